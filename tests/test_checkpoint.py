"""What a checkpoint belongs to: every byte of the data, every setting of training, the user's network."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import refused
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer._internal import digests
from lastlayer._internal.digests import digest_of, digest_of_parameters, layout_of, name_of
from lastlayer.data.sources import ArraySource, LoaderSource
from lastlayer.training import checkpoint

RNG = np.random.default_rng(0)
X = RNG.integers(0, 2, size=(16, 2)).astype(float)  # few values: sums of squares coincide
Y = RNG.normal(size=16)
PARAMETERS = {"hidden": (3,), "preset": "evidence", "batch_size": 8, "max_epochs": 1, "random_state": 0}


class Stopped(Exception):
    pass


class Counted(nn.Module):
    """Dropout, which draws from torch's generator, and a count of passes, which can be told to end training."""

    passes, last = 0, 10**9

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.passes += self.training
        if Counted.passes > Counted.last:
            raise Stopped
        return self.layers(x)


def make() -> nn.Module:
    return Counted()


@pytest.fixture
def kept(monkeypatch, as_a_user):
    """States are written after every step, and stay when training ends."""
    monkeypatch.setattr(checkpoint, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr("lastlayer.ensemble.run.clear_checkpoints", lambda folder: None)


def fit(folder: Path | None, X=X, y=Y, *, sample_weight=None, source=None, **parameters) -> BLLRegressor:
    training = replace(parameters.pop("training", TrainingOptions()), checkpoint=folder)
    model = BLLRegressor(**{**PARAMETERS, **parameters}, training=training)
    return model.fit(X, y, sample_weight) if source is None else model.fit_source(source)


def test_no_other_inputs_resume(kept, tmp_path):
    fit(tmp_path)
    for seed in range(40):
        other = np.random.default_rng(seed + 1).permutation(X)
        refused("data: ", fit, tmp_path, other)
    for others in ({"y": Y[::-1]}, {"X": X[:, ::-1]}, {"X": 2 * X}, {"sample_weight": np.arange(1.0, 17)}):
        refused("data: ", fit, tmp_path, **others)
    fit(tmp_path, X.copy())


OTHERS = {"hidden": (4,), "activation": "relu", "input_skip": False, "hidden_prior": 0.5, "noise": "full"}
OTHERS |= {"max_epochs": 2, "batch_size": 4, "dtype": "float32", "random_state": 1, "backbone": make}
OF_TRAINING = {"bias_prior": "shared", "learning_rate": 0.1, "validation_fraction": 0.3, "patience": 3}
OF_TRAINING |= {"early_stopping": True}


@pytest.mark.parametrize("name", [*OTHERS, *OF_TRAINING])
def test_another_setting_does_not_resume(kept, tmp_path, name):
    other = {"training": TrainingOptions(**{name: OF_TRAINING[name]})} if name in OF_TRAINING else {name: OTHERS[name]}
    fit(tmp_path)
    refused("belongs to another training", fit, tmp_path, **other)


def test_what_is_in_the_way_and_what_differs_is_said(kept, tmp_path):
    fit(tmp_path / "states")
    refused("max_epochs: 1 there, 4 here", fit, tmp_path / "states", max_epochs=4)
    (tmp_path / "a file").write_text("")
    refused("must be a folder", fit, tmp_path / "a file")


def test_other_folds_do_not_resume(kept, tmp_path):
    """The same rows and settings, but networks leave out others."""
    words, other = {"preset": "calibrated", "n_members": 2, "hidden_prior": 0.1}, KFold(2, shuffle=True, random_state=0)
    fit(tmp_path, calibration=KFold(2), **words)
    refused("data: .*digest of the rows used", fit, tmp_path, calibration=other, **words)


def test_a_source_is_known_by_all_of_its_rows_and_a_shuffling_loader_whatever_else_was_drawn(kept, tmp_path):
    words = {"preset": "calibrated"}
    fit(tmp_path / "arrays", source=ArraySource(X, Y), **words)
    fit(tmp_path / "arrays", source=ArraySource(X.copy(), Y), **words)
    other = X.copy()
    other[3] += 1
    other[4] -= 1  # the sum, and so the mean, stays
    for source in (ArraySource(other, Y), ArraySource(X, Y, np.ones(16))):
        refused("data: ", fit, tmp_path / "arrays", source=source, **words)
    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    for seed in range(2):
        torch.manual_seed(seed)
        fit(tmp_path / "loader", source=LoaderSource(DataLoader(rows, batch_size=4, shuffle=True)), **words)


@pytest.mark.parametrize(
    "backbone",
    [make, Counted, lambda: Counted(), partial(Counted, 4), Counted().double()],
    ids=["function", "class", "lambda", "partial", "module"],
)
def test_a_network_of_the_user_resumes_where_it_was(kept, tmp_path, monkeypatch, backbone):
    words = {"backbone": backbone, "max_epochs": 4, "training": TrainingOptions(early_stopping=False)}
    monkeypatch.setattr(Counted, "passes", 0)
    plain = fit(None, **words)
    whole, Counted.passes = Counted.passes, 0
    monkeypatch.setattr(Counted, "last", whole // 2)
    with pytest.raises(Stopped):
        fit(tmp_path, **words)
    monkeypatch.setattr(Counted, "last", 10**9)
    Counted.passes = 0
    resumed = fit(tmp_path, **words)
    assert 0 < Counted.passes <= whole - whole // 2 + 1
    assert np.array_equal(resumed.predict(X), plain.predict(X))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (make, Counted),
        (lambda: Counted(3), lambda: Counted(4)),
        (partial(Counted, 3), partial(Counted, 4)),
        (Counted().double(), Counted().double()),
    ],
    ids=["name", "lambda", "partial", "weights"],
)
def test_another_network_does_not_resume(kept, tmp_path, one, other):
    fit(tmp_path, backbone=one)
    refused("backbone: ", fit, tmp_path, backbone=other)


def test_digests_tell_bytes_types_and_shapes_apart_and_are_taken_in_pieces(monkeypatch, tmp_path):
    a = np.arange(6.0)
    distinct = [(a,), (a.reshape(2, 3),), (a.reshape(3, 2),), (a.astype("f4"),), (a, None), (None, a), (a[:3], a[3:])]
    distinct += [
        (a + 1e-15,),
        (np.array(["a"], dtype=object),),
        (torch.arange(6, dtype=torch.bfloat16),),
        (1.0,),
        ("a",),
    ]
    assert len({digest_of(*each) for each in distinct}) == len(distinct)
    assert digest_of(np.asfortranarray(a.reshape(2, 3))) == digest_of(a.reshape(2, 3))
    np.save(tmp_path / "a.npy", a)
    assert digest_of(np.load(tmp_path / "a.npy", mmap_mode="r")) == digest_of(a)
    a = RNG.normal(size=(50, 3))
    whole = digest_of(a, torch.from_numpy(a))
    monkeypatch.setattr(digests, "CHUNK_BYTES", 100)
    assert digest_of(a, torch.from_numpy(a)) == whole


def test_networks_are_known_by_layout_weights_and_name():
    class Printed(nn.Linear):
        def extra_repr(self) -> str:
            return repr(object())

    network = nn.BatchNorm1d(2)
    assert layout_of(Printed(2, 1)) == layout_of(Printed(2, 1))
    assert layout_of(network) != layout_of(nn.BatchNorm1d(2).double())
    weights, everything = digest_of_parameters(network, buffers=False), digest_of_parameters(network)
    network(torch.ones(3, 2))
    assert digest_of_parameters(network, buffers=False) == weights
    assert digest_of_parameters(network) != everything
    assert digest_of_parameters(network.requires_grad_(False), buffers=False) != weights
    assert name_of(make).endswith("test_checkpoint.make")
    assert name_of(partial(make)) == "functools.partial"
