"""Groups given to fit: wherever rows are left out, whole groups are."""

import numpy as np
import pytest
import torch
from helpers import refused, sine
from torch import nn

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.data.copies import joined, whole_groups
from lastlayer.ensemble import train as train_module
from lastlayer.ensemble.splits import Split
from lastlayer.errors import InputError
from lastlayer.estimators import regressor

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

M = 60
LABELS = np.array([f"run {i}" for i in np.random.default_rng(0).permutation(np.arange(M) % 12)], dtype=object)
TINY = {"hidden": (4,), "max_epochs": 3, "random_state": 0}


def splits_of(monkeypatch, groups, m: int = M, **options) -> tuple[BLLRegressor, list[Split], np.ndarray]:
    """A fitted model, the splits that its networks left out, and the groups of its rows."""
    seen, labels = list[Split](), list[int]()
    made = regressor.folds_for

    def watched(plan, rows, *args, **words):
        splits = made(plan, rows, *args, **words)
        labels.extend(rows.given.groups)
        seen.extend(splits)
        return splits

    monkeypatch.setattr(regressor, "folds_for", watched)
    X, y = sine(m)
    return BLLRegressor(**TINY | options).fit(X, y, groups=groups), seen, np.array(labels)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"preset": "fast"}, {"random", "blocked", "shell"}),
        ({"n_members": 3, "hidden_prior": 0.3}, {"random", "blocked", "shell"}),
        ({"n_members": 2, "calibration": "alpha", "hidden_prior": 0.3}, {"blocked"}),
        ({"n_members": 1}, {"random", "blocked", "shell"}),
        ({"backbone": nn.Linear(1, 3)}, {"random"}),
    ],
    ids=["mixture", "one prior", "alpha", "one network", "backbone"],
)
def test_no_group_is_split(options, kinds, monkeypatch):
    numbers = np.unique(LABELS, return_inverse=True)[1]
    given = torch.tensor(numbers) if kinds == {"blocked"} else LABELS  # tensors are labels too
    model, splits, labels = splits_of(monkeypatch, given, **options)
    assert sorted(labels) == sorted(numbers)
    assert {split.kind for split in splits} == kinds
    for split in splits:
        assert len(split.held)
        assert sorted([*split.train, *split.held]) == list(range(M))
        assert not set(labels[split.train]) & set(labels[split.held])
    assert model.settings_.network.hidden == (4,)


@pytest.mark.parametrize("n_groups", [2, 3, 4, 5])
def test_few_groups_are_enough(n_groups, monkeypatch):
    for options in ({"preset": "fast"}, {"backbone": nn.Linear(1, 3)}, {"n_members": 2, "hidden_prior": 0.3}):
        model, splits, labels = splits_of(monkeypatch, np.arange(M) % n_groups, **options)
        for split in splits:
            assert len(split.train)
            assert not set(labels[split.train]) & set(labels[split.held])
        assert np.isfinite(model.predictive(np.zeros((2, 1))).std).all()
    assert len(model.members_) == 2


def test_equal_rows_keep_their_groups(monkeypatch):
    """Two groups that have rows in common are one: a row in one would tell of its copy in the other."""
    X, y = sine(M)
    X, y, labels = np.tile(X[:20], (3, 1)), np.tile(y[:20], 3), np.repeat([0, 1, 2], 20)
    with pytest.raises(InputError, match="one group, or copies"), pytest.warns(UserWarning, match="nearly equal"):
        BLLRegressor(**TINY, preset="fast").fit(X, y, groups=labels)


def test_early_stopping_leaves_out_whole_groups(monkeypatch):
    seen = []
    make = train_module.Validation
    monkeypatch.setattr(train_module, "Validation", lambda *a, **k: (seen.append(a), make(*a, **k))[1])
    kept = train_module.Trainer._for_stopping
    parts = []
    monkeypatch.setattr(
        train_module.Trainer, "_for_stopping", lambda *a: (parts.append((a[1], *kept(*a))), parts[-1][1:])[1]
    )
    options = {"preset": "evidence", "training": TrainingOptions(early_stopping=True)}
    _, _, labels = splits_of(monkeypatch, LABELS, **options)
    (train, stopping, others) = parts[0]
    labels = labels[train]
    assert len(stopping) >= round(0.15 * M)
    assert sorted([*stopping.tolist(), *others.tolist()]) == list(range(M))
    assert not set(labels[stopping]) & set(labels[others])
    assert seen
    seen.clear()
    splits_of(monkeypatch, np.zeros(M), **options)  # nothing to stop by
    assert not seen


def test_a_memory_map_keeps_whole_groups_for_calibration(monkeypatch, tmp_path):
    X, y = sine(200)
    labels, held = np.arange(200) // 10, []
    made = regressor.Without
    monkeypatch.setattr(regressor, "Without", lambda source, rows: (held.extend(rows), made(source, rows))[1])
    mapped = np.memmap(tmp_path / "X", dtype=float, mode="w+", shape=X.shape)
    mapped[:] = X
    BLLRegressor(**TINY, batch_size=50).fit(mapped, y, groups=labels)
    assert len(held) == 30
    assert not set(labels[held]) & set(np.delete(labels, held))
    refused("one group", BLLRegressor(**TINY, batch_size=50).fit, mapped, y, groups=0 * labels)


def test_groups_that_share_rows_are_joined():
    assert joined(np.array([0, 0, 1, 2, 3]), np.array([0, 1, 1, 2, 3])).tolist() == [0, 0, 0, 1, 2]
    assert joined(np.arange(4), np.array([1, 0, 1, 0])).tolist() == [0, 1, 0, 1]


def test_whole_groups_leave_one():
    groups = np.array([0, 0, 0, 1, 2, 2])
    assert whole_groups(groups, 2, np.array([0, 1, 2])).tolist() == [0, 1, 2]
    assert whole_groups(groups, 2, np.array([1, 2, 0])).tolist() == [3, 4, 5]
    assert whole_groups(groups, 6, np.array([1, 2, 0])).tolist() == [3, 4, 5]
    assert whole_groups(groups * 0, 1, np.array([0])).tolist() == []


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.zeros(5), r"shape \(5,\).*60 rows"),
        (np.zeros((M, 2)), "one label for each"),
        (np.r_[np.nan, np.zeros(M - 1)], "1 missing labels"),
        (np.array([None, *"a" * (M - 1)], dtype=object), "1 missing labels"),
        (np.zeros(M), "60 rows are of one group"),
    ],
)
def test_what_cannot_be_is_told(groups, message):
    refused(message, BLLRegressor(**TINY, preset="fast").fit, *sine(M), groups=groups)
