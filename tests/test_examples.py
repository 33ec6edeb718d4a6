"""The examples of `examples/` that users copy: each runs small, its claims hold, and all are listed in the docs."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example; returns its table, all rows of which it has printed."""
    monkeypatch.syspath_prepend(FOLDER)

    def call(name, *arguments):
        table = import_module(name).main([str(argument) for argument in arguments])
        printed = capsys.readouterr().out
        assert all(row in printed for row in table)
        return table

    return call


def test_a_frame_with_categories_dates_units_and_missing_cells(run):
    table = run("table", "--rows", 200, "--epochs", 20)
    assert 0.85 < table.pop("new rows") <= 1
    assert min(table, key=table.__getitem__) in ("date", "temperature_c")
    assert min(table["kind"], table["area"]) > 5  # kWh; the standard deviation of the target is about 30


def test_signals_of_higher_frequencies_are_recognised_by_a_network_of_the_user(run):
    table = run("own_network", "--signals", 100, "--epochs", 60, "--members", 2)
    for name in ("one network", "mixture"):
        new, higher = table[f"{name}, new signals"], table[f"{name}, higher frequencies"]
        assert new["rmse"] < 0.3  # of frequencies whose standard deviation is 0.87
        assert new["farther out"] < 0.3 < 0.9 < higher["farther out"]


def test_a_chance_constraint_keeps_the_level_below_its_limit(run):
    pytest.importorskip("do_mpc")
    table = run("dynamics_mpc", "--experiments", 6, "--steps", 40, "--epochs", 60, "--horizon", 5)
    mean, chance = table["constraint on the mean"], table["chance constraint"]
    assert chance["above"] < 0.1 < mean["above"]
    assert 0.65 < chance["mean"] < mean["mean"]


def test_every_example_is_listed():
    listed = re.findall(r"`(examples/[\w/]+\.py)`", (ROOT / "docs" / "howto" / "examples.md").read_text())
    there = {path.relative_to(ROOT).as_posix() for path in FOLDER.rglob("*.py")} - {"examples/physics/shared.py"}
    assert sorted(listed) == sorted(there)
