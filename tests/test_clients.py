"""The examples of use with other libraries and networks: each runs small, and what it claims holds."""

import logging
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import sine
from torch import nn

from lastlayer import BLLRegressor

FOLDER = Path(__file__).parents[1] / "examples" / "clients"
pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture
def run(monkeypatch, capsys):
    """The table that an example returns, which it has printed too."""
    monkeypatch.syspath_prepend(FOLDER)

    def call(name, *arguments):
        table = import_module(name).main([str(argument) for argument in arguments])
        printed = capsys.readouterr().out
        assert all(row.split(",")[0] in printed for row in table)
        return table

    return call


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
    monkeypatch.syspath_prepend(FOLDER)
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


def test_every_example_is_tried():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert [path.stem for path in FOLDER.glob("*.py") if path.stem not in tests] == []
