"""Predictions by Ray Data: the numbers of `predictive`, ids and order kept, a model per worker, batches in bounds."""

import os

import numpy as np
import pytest

from lastlayer.integrations.batches import BatchPredictor, load_once

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=150_000_000)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def test_the_example_predicts_a_folder(ray, job):
    from ray_predict import predict_folder

    predict_folder(job.model, job.rows, job.out, ids=job.ids)
    job.assert_predicted(job.written())
    with pytest.raises(ValueError, match="3 workers take all 3 cores"):
        predict_folder(job.model, job.rows, job.out, ids=job.ids, workers=3)


def test_rows_keep_their_order_and_a_worker_loads_the_model_once(ray, job):
    class Watched(BatchPredictor):
        def __call__(self, batch):
            found = super().__call__(batch)
            n = len(batch["id"])
            seen = {"rows": n, "process": os.getpid(), "loads": load_once.cache_info().misses}
            return found | {name: np.full(n, value) for name, value in seen.items()}

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    options = {"path": str(job.model)}
    predicted = ray.data.read_parquet(str(job.rows)).map_batches(
        Watched, fn_constructor_kwargs=options, batch_size=512, compute=ray.data.ActorPoolStrategy(size=2)
    )
    found = predicted.to_pandas()
    assert found["id"].tolist() == list(range(len(job.X)))
    assert found["rows"].max() <= 512
    assert found["process"].nunique() <= 2
    assert os.getpid() not in set(found["process"])
    assert (found["loads"] == 1).all()
    job.assert_predicted({name: found[name].to_numpy() for name in found})
