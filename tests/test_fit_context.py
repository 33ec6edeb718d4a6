"""The threads that a fit uses, and what it tells a logger."""

import logging
from contextlib import nullcontext

import pytest
import torch
from helpers import refused, sine
from joblib import cpu_count
from sklearn.base import clone

import lastlayer
from lastlayer import BLLRegressor
from lastlayer.ensemble import run
from lastlayer.ensemble.run import LOGGER
from lastlayer.errors import InputError

pytestmark = pytest.mark.usefixtures("as_a_user")

SMALL = {"hidden": (4,), "preset": "evidence", "max_epochs": 3, "random_state": 0}


@pytest.mark.parametrize(("n_jobs", "wanted"), [(1, 1), (3, 3), (-1, cpu_count()), (-1000, 1)])
def test_a_fit_has_the_threads_of_n_jobs_and_leaves_them_as_they_were(n_jobs, wanted, monkeypatch):
    seen, train = [], run.train
    monkeypatch.setattr(run, "threads_for", lambda _: nullcontext())
    monkeypatch.setattr(run, "train", lambda *a, **k: (seen.append(torch.get_num_threads()), train(*a, **k))[1])
    before = torch.get_num_threads()
    BLLRegressor(**SMALL, n_jobs=n_jobs).fit(*sine(30))
    assert seen == [wanted]
    assert torch.get_num_threads() == before
    with pytest.raises(InputError):
        BLLRegressor(**SMALL, n_jobs=n_jobs, noise="what").fit(*sine(30))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("verbose", "levels"), [(1, {"INFO"}), (2, {"INFO", "DEBUG"}), (True, {"INFO"}), (9, {"INFO", "DEBUG"})]
)
def test_a_fit_tells_a_logger_what_verbose_asks_for(verbose, levels, caplog):
    before = LOGGER.level
    BLLRegressor(**SMALL, verbose=verbose).fit(*sine(30))
    assert {record.levelname for record in caplog.records} == levels
    text = caplog.text
    assert "fit to 30 rows, 1 inputs, 1 outputs" in text
    assert "calibration: " in text
    assert "fitted 1 members" in text
    assert ("early_stopping: False" in text) == (verbose > 1)
    assert LOGGER.level == before


def test_a_silent_fit_is_silent_unless_logging_is_configured(caplog, capsys):
    BLLRegressor(**SMALL).fit(*sine(30))
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="lastlayer"):
        BLLRegressor(**SMALL).fit(*sine(30))
    assert caplog.records
    assert capsys.readouterr().err == ""


def test_without_handlers_lines_go_to_stderr_during_the_fit(monkeypatch, capsys):
    monkeypatch.setattr(LOGGER, "hasHandlers", lambda: False)
    BLLRegressor(**SMALL, verbose=1).fit(*sine(30))
    assert "lastlayer: fit to 30 rows" in capsys.readouterr().err
    assert not LOGGER.handlers


@pytest.mark.parametrize(
    "wrong", [{"n_jobs": 0}, {"n_jobs": 1.5}, {"n_jobs": True}, {"verbose": -1}, {"verbose": "yes"}]
)
def test_what_cannot_be_is_told(wrong):
    refused(f"{next(iter(wrong))}=", BLLRegressor(**SMALL, **wrong).fit, *sine(30))


def test_both_are_parameters_like_others(tmp_path):
    model = clone(BLLRegressor(**SMALL, n_jobs=1, verbose=0)).fit(*sine(30))
    model.save(tmp_path / "model")
    assert lastlayer.load(tmp_path / "model").get_params()["n_jobs"] == 1
