"""The examples that users copy: each runs small, its claims hold, and all are tried here and listed in the docs."""

import logging
import math
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import sine
from torch import nn

from lastlayer import BLLRegressor

ROOT = Path(__file__).parents[1]
FOLDER, CLIENTS, PHYSICS = (ROOT / "examples" / name for name in ("", "clients", "physics"))
pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example; returns its table, all rows of which it has printed."""
    for folder in (FOLDER, CLIENTS, PHYSICS):
        monkeypatch.syspath_prepend(folder)

    def call(name, *arguments):
        given = arguments[0] if arguments and isinstance(arguments[0], Path) else list(map(str, arguments))
        table, printed = import_module(name).main(given), capsys.readouterr().out
        assert all((row.split(",")[0] if (CLIENTS / f"{name}.py").exists() else row) in printed for row in table)
        return table

    return call


@pytest.fixture
def table_of(run, tmp_path):
    """The scores of an example of physics, whose picture was saved."""

    def call(name):
        table = run(name, tmp_path)
        assert 10_000 < (tmp_path / f"{name}.png").stat().st_size < 80_000
        return table

    return call


def better(table, more, less, *, ratio, gain=-math.inf, share=0.0):
    """Of two rows: the ratio of their errors at most, the gain in LPD and the share inside intervals at least."""
    assert table[more][0] / table[less][0] < ratio
    assert table[more][1] - table[less][1] > gain
    assert table[more][2] > share


def test_every_example_is_tried_and_listed():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert [p.stem for p in CLIENTS.glob("*.py") if p.stem not in tests] == []
    assert [p.stem for p in PHYSICS.glob("*.py") if p.stem != "shared" and f'"{p.stem}"' not in tests] == []
    listed = re.findall(r"`(examples/[\w/]+\.py)`", (ROOT / "docs" / "howto" / "examples.md").read_text())
    there = {path.relative_to(ROOT).as_posix() for path in FOLDER.rglob("*.py")} - {"examples/physics/shared.py"}
    assert sorted(listed) == sorted(there)


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


def test_a_transformer_is_less_sure_of_words_that_it_does_not_know(run):
    table = run("transformer", "--sentences", 300, "--epochs", 12)
    known, unknown = table["known words"], table["unknown words"]
    assert known["rmse"] < 0.4  # of levels whose standard deviation is 0.9
    assert 0.8 < known["inside 90%"] < 0.97
    assert unknown["std"] > 2 * known["std"]


def test_lightning_attaches_to_batches_that_are_dictionaries(run, recwarn):
    pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    table = run("lightning_loop", "--sentences", 300, "--epochs", 12)
    assert table["rmse"] < 0.4
    assert 0.8 < table["inside 90%"] < 0.97


def test_a_gaussian_process_of_gpytorch_with_the_kernel_is_the_last_layer(run):
    table = run("gpytorch_kernel", "--rows", 60, "--epochs", 100)
    assert table["GPyTorch"] == pytest.approx(table["lastlayer"], rel=1e-5)  # a flat prior is a limit
    assert table["with an RBF kernel"][1] > table["lastlayer"][1]


def test_that_process_is_the_joint_distribution_and_its_network_stays_in_evaluation_mode(monkeypatch):
    pytest.importorskip("gpytorch")
    monkeypatch.syspath_prepend(CLIENTS)
    from gpytorch_kernel import LastLayerGP

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5)).double()
    X, y = sine(60, d=3)
    model = BLLRegressor(backbone=network, preset="evidence", max_epochs=3, random_state=0).fit(X, y)
    points, joint = torch.tensor(X[:20] + 0.5), model.joint(X[:20] + 0.5, noise=False)
    process = LastLayerGP(model, torch.tensor(X), torch.tensor(y))
    with torch.no_grad():
        found, kernel = process(points), process.covar_module
        np.testing.assert_allclose(found.mean, joint.mean, rtol=1e-5)
        np.testing.assert_allclose(found.covariance_matrix, joint.cov(), atol=1e-6 * joint.cov().max())
        before = kernel(points).to_dense()
        for _ in range(2):
            assert torch.equal(kernel.train()(points).to_dense(), before)


def test_forces_on_atoms_teach_the_forces_of_other_clusters(run):
    table = run("atoms", "--clusters", 12, "--new", 20, "--members", 1, "--epochs", 80)
    assert table["force, from energies and forces"][0] < 0.7 * table["force, from energies"][0]


def test_the_sampler_beats_random_search(run):
    pytest.importorskip("optuna")
    best = run("optuna_sampler", "--trials", 20, "--seeds", 1)
    assert best["lastlayer"] < 0.5 * best["random"]


def test_mapie_covers_as_many_rows_but_not_the_noisy_ones(run):
    pytest.importorskip("mapie")
    table = run("mapie_intervals", "--rows", 300, "--epochs", 40)
    theirs, ours = table["MAPIE, absolute residuals"], table["lastlayer, conformal"]
    assert 0.86 < theirs["inside"] < 0.95
    assert 0.86 < ours["inside"] < 0.95
    assert abs(ours["noisy"] - 0.9) < 0.05 < 0.9 - theirs["noisy"]
    assert ours["score"] < 0.9 * theirs["score"]


def test_shap_tells_what_moves_the_mean_from_what_moves_the_noise(run):
    pytest.importorskip("shap")
    table = run("shap_values", "--rows", 200, "--epochs", 40, "--explained", 5)
    mean, std = table["mean"], table["standard deviation"]
    assert mean[0] > 5 * max(mean[1:])
    assert std[1] > 5 * max(std[0], std[2])


def test_ax_runs_an_experiment_with_it(run):
    pytest.importorskip("ax")
    table = run("ax_loop", "--trials", 14)
    assert table["SingleTaskBLL"] < 2.0  # Branin's values lie between 0.4 and 308


def test_the_loop_of_a_botorch_tutorial_runs_with_the_class_exchanged(run):
    table = run("botorch_tutorial", "--batches", 2, "--q", 2)
    assert table["SingleTaskBLL"] >= table["Sobol points"] - 0.1


@pytest.mark.parametrize("name", ["energy_from_forces", "molecule_from_forces"])
def test_forces_more_than_halve_the_errors_of_energy_and_force(name, table_of):
    table = table_of(name)
    for what in ("energy", "force"):
        better(table, f"{what}, from energies and forces", f"{what}, from energies", ratio=0.5, gain=1, share=0.7)


def test_totals_show_the_flow_and_rates_sharpen_it(table_of):
    table = table_of("flow_from_rates")
    levels, totals, rates = table
    better(table, totals, levels, ratio=0.5)
    better(table, rates, totals, ratio=0.9)
    better(table, rates, levels, ratio=1, gain=1)


def test_a_flat_axis_helps_where_the_core_is_flat(table_of):
    rows = "shear-thinning, with wall and flat axis", "shear-thinning, with wall"
    better(table_of("flat_at_boundary"), *rows, ratio=0.5, gain=0.3, share=0.8)


def test_totals_of_buildings_tell_the_parts(table_of):
    table = table_of("parts_from_totals")
    flats, buildings = table
    better(table, buildings, flats, ratio=0.5, gain=1, share=0.8)
