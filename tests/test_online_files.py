"""A running model that was saved goes on, from the file, as the one that was not: to the last bit."""

import json
import math
from functools import cache, partial

import numpy as np
import pytest
import torch
from helpers import refused
from models import FAST, data, fitted
from torch import nn

import lastlayer
from lastlayer import BLLRegressor
from lastlayer._internal import files
from lastlayer._internal.files import ModelFileError
from lastlayer.errors import InputError
from lastlayer.online import DriftMonitor, ExponentialForgetting, KeepAll, Memory, OnlineModel, SlidingWindow
from lastlayer.settings.types import FOURIER

pytestmark = pytest.mark.usefixtures("small_process")

X, Y = data(m=260)
MEMORIES = [KeepAll(), ExponentialForgetting(30), SlidingWindow(40)]
MODELS = {
    "one output": cache(lambda: BLLRegressor(**FAST).fit(X[:60], Y[:60, 0])),
    "another alpha": lambda: fitted("single").at_alpha(math.log(fitted("single").alpha_) + 1.5),
}
MODELS |= {name: partial(fitted, name) for name in ("shared prior, full noise", "mixture", "mixture, noise by input")}
MODELS["mixture of families"] = partial(fitted, "mixture of families")


def targets(online: OnlineModel) -> np.ndarray:
    return Y if online.fitted_.y_ndim == 2 else Y[:, 0]


def started(name: str, memory: Memory) -> OnlineModel:
    y = Y[:60, 0] if name == "one output" else Y[:60]
    monitor = DriftMonitor(n_outputs=1 if y.ndim == 1 else 2, random_state=3)
    return OnlineModel(MODELS[name](), memory, start=(X[:60], y), monitor=monitor)


def learn(online: OnlineModel, start: int, stop: int, step: int = 1) -> list[np.ndarray]:
    """What it says of each row before it learns it, errors large enough to widen curves and to raise an alarm."""
    said, y = [], targets(online)
    for i in range(start, stop, step):
        rows = slice(i, min(i + step, stop))
        said += [*online.predict(X[rows], return_std=True)]
        online.update(X[rows], y[rows] * (1 + 0.02 * (i - 60)), sample_weight=None if i % 3 else [0.5] * len(X[rows]))
    return said


def numbers(online: OnlineModel) -> list[np.ndarray]:
    p = online.predictive(X[:30] * 1.2)
    state = (online.error, online.n_rows, online.drift.evidence, online.drift.since, online.drift.n_rows)
    return [p.component_mean, p.component_var, p.weights, p.affine_cost, np.array(state)]


def equal(ones: list[np.ndarray], others: list[np.ndarray]) -> None:
    for a, b in zip(ones, others, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: type(memory).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_the_loaded_model_goes_on_as_the_saved_one_does(name, memory, tmp_path):
    online = started(name, memory)
    learn(online, 60, 73)
    online.save(tmp_path / "running")
    again = OnlineModel.load(tmp_path / "running")
    assert (again.memory, again.drift) == (memory, online.drift)
    equal(numbers(online), numbers(again))
    for start, stop, step in ((73, 125, 1), (125, 131, 3), (131, 231, 100)):  # one by one, a few, and factored
        equal(learn(online, start, stop, step), learn(again, start, stop, step))
    equal(numbers(online), numbers(again))
    equal(*([each.reestimate().predictive(X[:9]).component_var] for each in (online, again)))


def test_a_model_with_a_network_of_yours_needs_it_again(tmp_path):
    backbone = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model = BLLRegressor(backbone=backbone, preset="evidence", max_epochs=5, random_state=0).fit(X[:60], Y[:60])
    online = OnlineModel(model).update(X[60:80], Y[60:80])
    online.save(tmp_path / "running")
    refused("backbone", OnlineModel.load, tmp_path / "running")
    again = OnlineModel.load(tmp_path / "running", backbone=nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    np.testing.assert_array_equal(again.predict(X), online.predict(X))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("online") / "running"
    online = started("mixture", SlidingWindow(40))
    learn(online, 60, 70)
    online.save(path)
    return path


def test_each_kind_of_file_says_how_it_is_loaded(saved, tmp_path):
    refused(r"use OnlineModel\.load", lastlayer.load, saved, error=ModelFileError)
    fitted("single").save(tmp_path / "model")
    refused(r"OnlineModel\(lastlayer\.load\(path\)\)", OnlineModel.load, tmp_path / "model", error=ModelFileError)


def lost(name):
    return lambda tensors, online: tensors.pop(name)


def cut(name):
    return lambda tensors, online: tensors.update({name: tensors[name][..., :-1].contiguous()})


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "a weight lost": (lost("online.layers.0.recursions.0.W"), "W is missing"),
        "a root cut": (cut("online.layers.0.recursions.0.R"), "R has shape"),
        "a window lost": (lost("online.window.0.T"), "T is missing"),
        "a window cut": (cut("online.window.0.phi"), "phi has shape"),
        "moments cut": (cut("online.layers.0.scatter"), "scatter has shape"),
        "not finite": (
            lambda tensors, online: tensors["online.layers.0.recursions.0.W"].fill_(torch.nan),
            "not finite",
        ),
        "of whole numbers": (
            lambda tensors, online: tensors.update({"online.window.0.T": tensors["online.window.0.T"].long()}),
            "int64",
        ),
        "evidence cut": (cut("online.monitor.log_M"), "has shape"),
        "no memory": (lambda tensors, online: online.pop("memory"), "memory"),
        "a memory of another kind": (lambda tensors, online: online["memory"].update(kind="Elephant"), "memory"),
        "too few curves": (lambda tensors, online: online["curves"].pop(), "zip"),
    }.values(),
)
def test_whole_files_with_parts_that_do_not_fit_are_refused(saved, tmp_path, change, words):
    tensors, header = files.read(saved)
    header = json.loads(json.dumps(header))
    change(tensors, header["online"])
    files.write(tmp_path / "odd", tensors, header)
    refused(rf"odd does not fit.*{words}", OnlineModel.load, tmp_path / "odd", error=ModelFileError)


def test_what_cannot_be_saved_says_so(tmp_path):
    class Mine(Memory):
        pass

    refused("a Mine cannot be saved", OnlineModel(fitted("single"), Mine()).save, tmp_path / "m")
    refused("BLLRegressor", OnlineModel(fitted("single").fitted_).save, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_follow_a_stream_are_refused():
    with pytest.raises(InputError, match="OnlineModel needs a model fitted to targets that are all known"):
        OnlineModel(fitted("partly missing targets, shared prior, alpha tuned"))
    mixture = fitted("mixture of families").fitted_
    place = next(i for i, member in enumerate(mixture.members) if member.family != FOURIER)
    refused("give the whole mixture", OnlineModel, mixture.alone(place))
