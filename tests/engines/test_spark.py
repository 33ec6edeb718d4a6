"""Predictions by Spark: the numbers of `predictive`, ids and order kept, a model per worker, batches in bounds."""

import os
import sys

import numpy as np
import pytest

from lastlayer.integrations.batches import BatchPredictor, load_once

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def spark():
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("lastlayer")
    for name, value in (("ui.enabled", "false"), ("driver.bindAddress", "127.0.0.1"), ("driver.host", "127.0.0.1")):
        builder = builder.config(f"spark.{name}", value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        session = builder.getOrCreate()
        yield session
        session.stop()


def test_the_example_predicts_a_folder(spark, job):
    from spark_predict import predict_folder

    predict_folder(spark, job.model, job.rows, job.out, ids=job.ids)
    job.assert_predicted(job.written())


def test_rows_keep_their_order_and_a_worker_loads_the_model_once(spark, job):
    predict = BatchPredictor(str(job.model))

    def watched(frames):
        for frame in frames:
            seen = {"rows": len(frame), "process": os.getpid()}
            found = predict(frame)
            yield found.assign(**seen, loads=load_once.cache_info().misses)

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 512)
    spark.conf.set("spark.sql.files.maxPartitionBytes", 40_000)  # many tasks for each worker process
    rows = spark.read.parquet(str(job.rows))
    added = ", ".join(f"{name} double" for name in predict.output_columns)
    predicted = rows.mapInPandas(watched, f"id long, b double, a double, {added}, rows long, process long, loads long")
    assert predicted.rdd.getNumPartitions() > 4
    found = predicted.toPandas()
    assert found["rows"].max() <= 512
    assert os.getpid() not in set(found["process"])
    assert (found["loads"] == 1).all()
    for _, part in found.groupby("process"):
        assert (np.diff(part["id"]) > 0).mean() > 0.9  # in order within every task
    job.assert_predicted({name: found[name].to_numpy() for name in found})
