"""Model files: what was saved is what is loaded, and whatever else lies there is refused in words."""

import copy
import errno
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from helpers import refused, reloaded
from torch import nn

import lastlayer
from lastlayer import BLLRegressor, TrainingOptions
from lastlayer._internal import files
from lastlayer._internal.files import ModelFileError
from lastlayer.settings.types import Place

NEW = np.linspace(-6, 6, 9)[:, None]


def data(q: int = 0, m: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (m, 1))
    y = np.sin(X + np.arange(max(q, 1))) + 0.1 * rng.standard_normal((m, max(q, 1)))
    return X, y if q else y[:, 0]


def fitted(q: int = 0, **options) -> BLLRegressor:
    options = {"preset": "evidence", "hidden": (4,), "max_epochs": 3, "random_state": 0} | options
    return BLLRegressor(**options).fit(*data(q))


def backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 6), nn.BatchNorm1d(6), nn.Tanh())


@pytest.fixture(scope="module")
def model() -> BLLRegressor:
    return fitted()


@pytest.fixture
def path(model, tmp_path):
    """A saved model, alone in its folder."""
    model.save(tmp_path / "m.lastlayer")
    return tmp_path / "m.lastlayer"


def assert_same(got: BLLRegressor, expected: BLLRegressor, X=NEW) -> None:
    np.testing.assert_array_equal(got.predict(X, return_std=True), expected.predict(X, return_std=True))
    np.testing.assert_array_equal(got.predict(X, return_cov=True)[1], expected.predict(X, return_cov=True)[1])
    np.testing.assert_array_equal(got.sample_y(X, 2), expected.sample_y(X, 2))
    np.testing.assert_array_equal(got.extrapolation(X).quantile, expected.extrapolation(X).quantile)
    np.testing.assert_array_equal(got.predictive(X).cov(), expected.predictive(X).cov())
    assert (got.alpha_, got.alpha_star_, got.nlml_) == (expected.alpha_, expected.alpha_star_, expected.nlml_)
    assert got.n_features_in_ == expected.n_features_in_


SINGLE = [
    {},
    {"noise": "full"},
    {"training": TrainingOptions(bias_prior="shared")},
    {"dtype": "float32"},
    {"hidden": (3, 5), "activation": "relu"},
]
ENCODED = [
    {"preset": "fast"},
    {"preset": "fast", "dtype": "float32"},
    {},
    {"preset": "calibrated", "n_members": 3, "hidden_prior": 0.3},
    {"preset": "calibrated", "n_members": 1, "hidden_prior": 0.3, "hidden": ()},
]


@pytest.mark.usefixtures("small_process")
@pytest.mark.parametrize(
    ("q", "options"),
    [
        *((q, options) for q in (0, 2) for options in SINGLE),
        *((0, each | {"encoding": "piecewise"}) for each in ENCODED),
    ],
    ids=str,
)
def test_a_loaded_model_answers_to_the_last_bit(tmp_path, q, options):
    model = fitted(q, **options)
    again = reloaded(model, tmp_path)
    assert_same(again, model)
    assert again.get_params() | {"random_state": 0} == model.get_params()
    X, y = data(q)
    assert_same(again.update(X[:5], y[:5]), copy.deepcopy(model).update(X[:5], y[:5]))
    assert_same(reloaded(again, tmp_path), again)


@pytest.mark.parametrize("log_alpha", [-3.25, 12.5, math.inf])
def test_a_tuned_alpha_comes_back(tmp_path, model, log_alpha):
    tuned = model.at_alpha(log_alpha)
    again = reloaded(tuned, tmp_path)
    assert again.alpha_ == (math.inf if math.isinf(log_alpha) else math.exp(log_alpha))
    assert_same(again, tuned)


def test_feature_names_come_back(tmp_path):
    X, y = data()
    frame = pd.DataFrame(X, columns=["angle"])
    named = BLLRegressor(hidden=(4,), preset="evidence", max_epochs=3, random_state=0).fit(frame, y)
    again = reloaded(named, tmp_path)
    assert_same(again, named, frame)
    refused(r"(?s)feature names.*torque", again.predict, frame.rename(columns={"angle": "torque"}), error=ValueError)


@pytest.mark.parametrize("input_skip", ["auto", True])
def test_a_backbone_is_given_again(tmp_path, path, input_skip):
    refused("backbone", lastlayer.load, path, backbone=backbone(), error=ModelFileError)  # a model without one
    mine = fitted(backbone=backbone(), input_skip=input_skip)
    mine.save(tmp_path / "m")
    given = backbone()
    before = copy.deepcopy(given.state_dict())
    assert_same(lastlayer.load(tmp_path / "m", backbone=given), mine)
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    refused("pass a module of the same architecture", lastlayer.load, tmp_path / "m")
    for wrong in (nn.Linear(1, 6), nn.Sequential(nn.Linear(1, 7), nn.BatchNorm1d(7)), nn.Identity()):
        refused(r"does not fit .* this backbone", lastlayer.load, tmp_path / "m", backbone=wrong, error=ModelFileError)


def test_images_come_back(tmp_path):
    X = np.random.default_rng(0).normal(size=(12, 1, 4, 4))
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Tanh())
    model = BLLRegressor(backbone=make(), preset="evidence", max_epochs=3, random_state=0).fit(X, X.sum((1, 2, 3)))
    assert_same(reloaded(model, tmp_path, backbone=make()), model, X)


def test_numbers_of_numpy_and_devices_of_torch_can_be_saved(as_a_user, tmp_path):
    """A grid search hands such numbers over."""
    training = TrainingOptions(patience=np.int32(9), learning_rate=np.float32(0.01))
    words = {"hidden": np.array([4]), "max_epochs": np.int64(3), "device": torch.device("cpu")}
    model = fitted(**words, training=training, progress=np.bool_(False))
    assert_same(reloaded(model, tmp_path), model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_model_of_a_machine_with_a_gpu_loads_on_one_without(tmp_path, model):
    settings = replace(model.settings_, place=Place("cuda", "float64"))
    from_afar = model.with_fitted(replace(model.fitted_, settings=settings)).set_params(device="cuda")
    assert_same(reloaded(from_afar, tmp_path), model)


def test_the_file_is_plain_safetensors(path):
    tensors, content = safetensors.torch.load_file(path), path.read_bytes()
    assert {"0.noise_cov", "0.statistics.scatter", "0.network.network.0.weight"} <= tensors.keys()
    assert tensors["0.statistics.count"] == 40
    assert b"pickle" not in content
    assert content[8:9] == b"{"  # JSON, then numbers: no other format inside
    start = 8 + int.from_bytes(content[:8], "little")
    assert sum(tensor.nbytes for tensor in tensors.values()) == len(content) - start


def test_the_file_can_be_read_by_whom_the_umask_allows(path):
    plain = path.parent / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"# a text file\n" * 50, b"PK\x03\x04" + bytes(100), bytes(1000), b"\xff" * 1000],
    ids=["empty", "one byte", "text", "zip", "zeros", "ones"],
)
def test_other_files_are_refused(tmp_path, content):
    for nothing in (tmp_path / "missing", tmp_path):
        refused("is not a file", lastlayer.load, nothing, error=ModelFileError)
    (tmp_path / "m").write_bytes(content)
    refused("truncated, damaged or foreign", lastlayer.load, tmp_path / "m", error=ModelFileError)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"lastlayer": "[1, 2]"}, {"lastlayer": "{}"}])
def test_safetensors_of_others_are_refused(tmp_path, metadata):
    safetensors.torch.save_file({"weight": torch.ones(3)}, tmp_path / "m", metadata)
    refused("not one that lastlayer wrote", lastlayer.load, tmp_path / "m", error=ModelFileError)


@pytest.mark.parametrize("number", [999, files.FORMAT + 1])
def test_a_newer_format_asks_for_a_newer_lastlayer(path, number):
    tensors, header = files.read(path)
    files.write(path, tensors, header | {"format": number})
    refused(f"file format {number}.*upgrade", lastlayer.load, path, error=ModelFileError)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, header: tensors.pop("0.noise_cov"),
        lambda tensors, header: tensors.pop("0.network.network.0.weight"),
        lambda tensors, header: header.pop("members"),
        lambda tensors, header: header["parameters"].update(colour="red"),
        lambda tensors, header: header["settings"]["network"].update(activation="red"),
        lambda tensors, header: header["settings"]["network"].update(hidden=[4, 4]),
        lambda tensors, header: header.update(parameters=None),
        lambda tensors, header: header.update(settings=None),
        lambda tensors, header: header.update(training={"colour": "red"}),
        lambda tensors, header: header["members"][0].update(tuned="large"),
        lambda tensors, header: header.update(model="SomethingElse"),
    ],
)
def test_whole_files_that_do_not_fit_are_refused(as_a_user, path, change):
    tensors, header = files.read(path)
    change(tensors, header)
    files.write(path, tensors, header)
    refused("does not fit this version", lastlayer.load, path, error=ModelFileError)


def damaged(content: bytes, kind: str) -> Iterator[bytes]:
    """What becomes of a file that is cut, changed somewhere, or replaced by noise."""
    rng = np.random.default_rng([1, 2, 3, len(kind)])
    noise = lambda n: rng.integers(0, 256, int(n), dtype=np.uint8).tobytes()
    if kind == "cut":
        lengths = {*range(0, len(content), 97), *range(12), len(content) - 1, len(content) - 8}
        yield from (content[:length] for length in lengths)
        return
    if kind == "header too long":
        sizes = [0, 1, 2**31, 2**40, 2**63, 2**64 - 1]
        yield from (length.to_bytes(8, "little") + content[8:] for length in sizes)
        return
    n_header = 8 + int.from_bytes(content[:8], "little")
    for i in range(300):
        # every second one in the header, where the parsers are
        at, n = int(rng.integers(n_header if i % 2 else len(content))), int(rng.integers(1, 9))
        if kind == "changed":  # some bytes are others, lost or added, or the file begins in its middle
            middle = (noise(n), b"", noise(n) + content[at : at + n])[i % 3]
            yield content[at:] + content[:at] if i % 10 == 9 else content[:at] + middle + content[at + n :]
        else:  # a third with a length that a header could have, a third with one that begins like JSON too
            rest = noise(rng.integers(0, 4000))
            length = int(rng.integers(0, 2 * len(rest) + 2)).to_bytes(8, "little")
            yield (b"", length, length + b'{"')[i % 3] + rest


@pytest.mark.parametrize("kind", ["cut", "header too long", "changed", "noise"])
def test_damaged_files_are_refused(path, kind):
    content = path.read_bytes()
    for changed in damaged(content, kind):
        path.write_bytes(changed)
        if changed != content:
            with pytest.raises(ModelFileError):
                lastlayer.load(path)


@pytest.fixture
def other() -> BLLRegressor:
    return fitted(hidden=(5,))


def test_saving_over_a_file_replaces_it(path, other):
    other.save(path)
    assert_same(lastlayer.load(path), other)
    assert [file.name for file in path.parent.iterdir()] == ["m.lastlayer"]


@pytest.mark.parametrize("fails", ["replace", "fsync", "fdopen"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_the_old_file_survives_a_save_that_fails(path, model, other, monkeypatch, fails, error):
    def fail(*_, **__):
        raise error

    opened = os.fdopen
    monkeypatch.setattr(os, fails, (lambda *args: _Full(opened(*args), fail)) if fails == "fdopen" else fail)
    with pytest.raises(type(error)):
        other.save(path)
    monkeypatch.undo()
    assert_same(lastlayer.load(path), model)
    assert [file.name for file in path.parent.iterdir()] == ["m.lastlayer"]


class _Full:
    """A file on a full disk: half of the bytes, then the error."""

    def __init__(self, file, fail):
        self.file, self.fail = file, fail

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        self.file.write(content[: len(content) // 2])
        self.fail()


def test_a_folder_that_is_not_there_is_named_and_a_model_must_be_fitted_to_be_saved(tmp_path, model):
    refused("not fitted", BLLRegressor().save, tmp_path / "m", error=ValueError)
    refused("nowhere", model.save, tmp_path / "nowhere" / "m", error=OSError)
    (tmp_path / "folder").mkdir()
    refused("folder", model.save, tmp_path / "folder", error=OSError)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


ACCIDENTS = """
import os, resource, signal, sys
import lastlayer

path = sys.argv[1]
model = lastlayer.load(path).update([[0.0]], [100.0])
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
try:
    model.save(path)
except OSError as error:
    print(error.errno, *os.listdir(os.path.dirname(path)), flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
model.save(path)
"""


def test_the_old_file_survives_a_full_quota_and_the_death_of_the_process(path, model):
    done = subprocess.run([sys.executable, "-c", ACCIDENTS, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(errno.EFBIG), "m.lastlayer"], done.stderr
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert_same(lastlayer.load(path), model)
    assert len(list(path.parent.glob(".*.part"))) == 1 == len(list(path.parent.iterdir())) - 1
    lastlayer.load(path).save(path)  # what was left behind does not stand in the way
