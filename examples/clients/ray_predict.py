"""Predictions for a folder of Parquet files by Ray Data, on one machine or a cluster.

    python examples/clients/ray_predict.py model.lastlayer rows/ predictions/ --ids id

Each of the --workers processes loads the model once and predicts batch after batch, with a few batches in memory.
Rows keep their order and their ids. On a cluster the paths must be readable from every machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import ray

from lastlayer.integrations.batches import BatchPredictor


def predict_folder(
    model: Path, rows: Path, out: Path, *, ids: Sequence[str], workers: int = 1, batch_rows: int = 8_192
) -> None:
    """Write a folder of Parquet files with the ids and predictions of all rows."""
    cores = int(ray.cluster_resources()["CPU"])
    if workers >= cores:  # every worker holds a core, and reading would wait for one forever
        raise ValueError(f"{workers} workers take all {cores} cores of the cluster: leave one for reading and writing")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    path, predict = {"path": str(model.resolve())}, BatchPredictor(model)
    wanted = list(dict.fromkeys([*predict.input_columns, *ids]))  # the others are not even read
    (
        ray.data.read_parquet(str(rows.resolve()), columns=wanted)
        .map_batches(
            BatchPredictor,
            fn_constructor_kwargs=path,
            batch_size=batch_rows,
            compute=ray.data.ActorPoolStrategy(size=workers),
        )
        .select_columns([*ids, *predict.output_columns])
        .write_parquet(str(out.resolve()))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model file of model.save or `lastlayer fit`")
    parser.add_argument("rows", type=Path, help="folder of Parquet files")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--ids", nargs="+", required=True, help="columns to copy to the output")
    parser.add_argument("--workers", type=int, default=1, help="processes that predict; fewer than cores")
    parser.add_argument("--batch", type=int, default=8_192, help="rows per batch")
    options = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    predict_folder(
        options.model, options.rows, options.out, ids=options.ids, workers=options.workers, batch_rows=options.batch
    )


if __name__ == "__main__":
    main()
