"""What a process has once is left alone: global random states, in one thread and in two; and forks do not hang."""

import os
import random
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

import numpy as np
import pytest
import torch
from helpers import refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lastlayer import BLLRegressor, TrainingOptions, attach, load
from lastlayer._internal.process_state import isolated, seeded
from lastlayer.data.sources import ArraySource, LoaderSource

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2))
Y = np.sin(X[:, 0]) + 0.1 * RNG.normal(size=40)
ROWS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
SMALL = {"hidden": (3,), "max_epochs": 2}


class Dropped(nn.Sequential):
    """Draws when it is made and while it is trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.5))


class Noisy(TensorDataset):
    """Augments its rows by torch's global generator."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 0.01 * torch.randn(2, dtype=torch.float64), y


NOISY = Noisy(*ROWS.tensors)


def loader(data=ROWS, **words) -> DataLoader:
    return DataLoader(data, batch_size=10, shuffle=True, **words)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, small_process):
    """Files of a mixture of all families, and of a network of the user's."""
    folder = tmp_path_factory.mktemp("models")
    model = BLLRegressor(preset="fast", **SMALL).fit(X, Y)
    model.save(folder / "mixture")
    BLLRegressor(backbone=Dropped, **SMALL).fit(X, Y).save(folder / "backbone")
    return folder, model


def states() -> list[object]:
    numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return [torch.get_rng_state().tolist(), numpy["key"].tolist(), numpy["pos"], random.getstate()]


USES = {
    "fit": lambda folder, model: BLLRegressor(preset="fast", **SMALL).fit(X, Y),
    "fit a class": lambda folder, model: BLLRegressor(backbone=Dropped, **SMALL).fit(X, Y),
    "fit by batches": lambda folder, model: BLLRegressor(
        backbone=Dropped, batch_size=20, training=TrainingOptions(checkpoint=folder / str(get_ident())), **SMALL
    ).fit(X, Y),
    "fit_source": lambda folder, model: BLLRegressor(**SMALL).fit_source(ArraySource(X, Y)),
    "fit a loader": lambda folder, model: BLLRegressor(backbone=Dropped, **SMALL).fit_source(LoaderSource(loader())),
    "fit a noisy loader": lambda folder, model: BLLRegressor(**SMALL).fit_source(LoaderSource(loader(NOISY))),
    "load": lambda folder, model: load(folder / "mixture"),
    "load a module": lambda folder, model: load(folder / "backbone", backbone=MODULE),
    "load a class": lambda folder, model: load(folder / "backbone", backbone=Dropped),
    "predict": lambda folder, model: model.predict(X, return_std=True),
    "sample": lambda folder, model: model.sample_y(X),
    "sample anew": lambda folder, model: model.sample_y(X, random_state=None),
    "sample points": lambda folder, model: model.predictive(X).sample(2),
    "update": lambda folder, model: model.with_fitted(model.fitted_).update(X[:5], Y[:5]),
    "attach": lambda folder, model: attach(MODULE, loader(), layer=None, calibration=loader()),
}
MODULE = Dropped().double()


@pytest.mark.parametrize("use", USES)
def test_global_random_states_stay(use, saved, as_a_user):
    before = states()
    USES[use](*saved)
    assert states() == before


@pytest.mark.parametrize(
    ("one", "other"), [("fit", "fit a class"), ("fit a class", "fit a class"), ("fit a loader", "load")]
)
def test_global_random_states_stay_with_two_threads(one, other, saved, as_a_user):
    before = states()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(USES[use], *saved) for use in (one, other)]:
            done.result()
    assert states() == before


def test_threads_do_not_change_what_a_seed_gives(as_a_user):
    fit = lambda seed: BLLRegressor(backbone=Dropped, random_state=seed, **SMALL).fit(X, Y).predict(X)
    alone = [fit(seed) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(fit, (0, 1)))
    assert np.array_equal(alone, together)
    assert not np.array_equal(*alone)


def test_no_random_state_is_another_one_each_time(as_a_user):
    seeds = set()
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        seeds.add(BLLRegressor(preset="evidence", **SMALL).fit(X, Y).settings_.seed)
    assert len(seeds) == 2


@pytest.mark.parametrize("own", [False, True])
def test_a_loader_gives_the_same_batches_for_the_same_seed_and_is_left_as_it_was(own, as_a_user):
    """The order and the noise of augmentations; its own generator or torch's."""
    generator = torch.Generator().manual_seed(5) if own else None
    source = LoaderSource(loader(NOISY, generator=generator))
    before = states(), None if generator is None else generator.get_state().tolist()
    passes = [[some.inputs for some in source.samples(seed=seed)] for seed in (3, 4, 3, None, None)]
    assert states() == before[0]
    torch.rand(3)
    passes.append([some.inputs for some in source.samples(seed=3, first=2)])
    one, other, again, unseeded, unseeded_again, rest = map(torch.cat, passes)
    assert torch.equal(one, again)
    assert torch.equal(unseeded, unseeded_again)
    assert torch.equal(rest, one[20:])
    assert not torch.equal(one, other)
    assert generator is None or generator.get_state().tolist() == before[1]


def test_a_sampler_keeps_its_epoch():
    sampler = torch.utils.data.DistributedSampler(ROWS, num_replicas=2, rank=0)
    sampler.set_epoch(7)
    source = LoaderSource(DataLoader(ROWS, batch_size=5, sampler=sampler))
    passes = [torch.cat([some.inputs for some in source.samples(seed=seed)]) for seed in (3, 4, 3)]
    assert sampler.epoch == 7
    assert torch.equal(passes[0], passes[2])
    assert not torch.equal(passes[0], passes[1])


def test_errors_within_put_the_states_back():
    def broken():
        torch.rand(1)
        raise ValueError("broken")
        yield

    before = states()
    refused("broken", list, isolated(broken(), torch.default_generator, 0), error=ValueError)
    with pytest.raises(ValueError, match="broken"), seeded(0, torch.device("cpu")):
        next(broken())
    assert states() == before


FORKS = """
    import os, sys, time
    import joblib, numpy as np, torch
    from sklearn.model_selection import GridSearchCV
    from lastlayer import BLLRegressor

    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    y = X[:, 0] + 0.1 * rng.normal(size=60)
    words = dict(preset="evidence", hidden=(3,), max_epochs=2, random_state=0)
    model = BLLRegressor(**words).fit(X, y)
    many = np.resize(X, (100_000, 2))
    model.predict(many)  # by threads of OpenMP, which a child does not have

    def work():
        assert torch.get_num_threads() == 1
        torch.randn(1_000_000).exp()
        return model.predict(many)[:3] if BLLRegressor(**words).fit(X, y) else None

    child = os.fork()
    if not child:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.get_num_threads() == 2
    with joblib.parallel_config(backend="multiprocessing", n_jobs=2):
        assert len(joblib.Parallel()(joblib.delayed(work)() for _ in range(2))) == 2
        search = GridSearchCV(BLLRegressor(**words), {"activation": ["tanh", "relu"]}, cv=2).fit(X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    print("done", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_after_a_fit_does_not_hang():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKS)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "done\n", done.stderr
