"""Predictions for a folder of Parquet files by Spark, on one machine or a cluster.

    python examples/clients/spark_predict.py model.lastlayer rows/ predictions/ --ids id

Each Python worker of Spark loads the model once and predicts batch after batch, in the memory of one batch. On a
cluster, lastlayer must be installed on the workers, and the paths must be readable from all of them.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import DoubleType, StructField, StructType

from lastlayer.integrations.batches import BatchPredictor


def predict_folder(
    spark: SparkSession, model: Path, rows: Path, out: Path, *, ids: Sequence[str], batch_rows: int = 8_192
) -> None:
    """Write a folder of Parquet files with the ids and predictions of all rows."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", batch_rows)
    predict = BatchPredictor(str(model.resolve()))
    table = spark.read.parquet(str(rows.resolve())).select(*dict.fromkeys([*predict.input_columns, *ids]))
    schema = StructType([*table.schema, *(StructField(name, DoubleType()) for name in predict.output_columns)])
    predicted = table.mapInPandas(lambda frames: map(predict, frames), schema).select(*ids, *predict.output_columns)
    predicted.write.mode("overwrite").parquet(str(out.resolve()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model file of model.save or `lastlayer fit`")
    parser.add_argument("rows", type=Path, help="folder of Parquet files")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--ids", nargs="+", required=True, help="columns to copy to the output")
    parser.add_argument("--batch", type=int, default=8_192, help="rows per batch")
    parser.add_argument("--master", default="local[2]", help="master URL of Spark")
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers run this Python, which has lastlayer
    spark = SparkSession.builder.master(options.master).appName("lastlayer").getOrCreate()
    predict_folder(spark, options.model, options.rows, options.out, ids=options.ids, batch_rows=options.batch)
    spark.stop()


if __name__ == "__main__":
    main()
