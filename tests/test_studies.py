import json
import math
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import refused
from matplotlib.figure import Figure
from typer.testing import CliRunner

from lastlayer import cli
from lastlayer.__main__ import main
from lastlayer.ensemble.splits import blocked_folds
from lastlayer.report import study as report
from lastlayer.studies import data, figures, networks, paper

pytestmark = pytest.mark.usefixtures("as_a_user")

SMALL = ["--max-epochs", "10", "--bnn-epochs", "4"]
runner = CliRunner()


def test_the_data_are_the_papers():
    d = data.paper_data()
    assert [len(s.X) for s in (d.train, d.validation, d.test)] == [160, 40, 100]
    inside = np.vstack([d.train.X, d.validation.X])
    # the legacy generator's first draws for seed 99, in single precision
    draws = np.random.RandomState(99).uniform(size=200).astype(np.float32)
    assert set(np.float32(inside[:, 0]).tolist()) == set(draws.tolist())
    assert d.test.X.min() >= -0.4
    assert d.test.X.max() <= 1.4
    residual = np.vstack([d.train.y, d.validation.y]) - data.truth(inside)
    assert np.allclose(residual.std(0), data.NOISE_STD, rtol=0.15)
    other = data.paper_data(seed=7)
    assert not np.allclose(other.train.X, d.train.X)


def test_blocks_of_a_plane_are_small_and_partition_the_rows():
    plane = np.random.default_rng(0).normal(size=(200, 3)) * [5.0, 1.0, 1e-9]
    cells = blocked_folds(plane, 4)
    assert sorted(np.concatenate(cells).tolist()) == list(range(200))
    within = np.mean([plane[c][:, :2].std(0).prod() for c in cells])
    assert within < 0.6 * plane[:, :2].std(0).prod()
    refused("k=60 blocks of 53 rows", blocked_folds, plane[:53], 60, error=ValueError)


@pytest.fixture(scope="module")
def small_study() -> paper.Study:
    return paper.run([0, 1], max_epochs=15, bnn_epochs=5)


def test_all_rows_are_scored_alike(small_study):
    study, scale = small_study, small_study.data.train.y.std(0)
    assert {len(study.scores[row]) for row in paper.ROWS} == {2}
    network, scores = study.bll[1], study.scores["BLL, alpha*"][1]
    p = network.predict(study.data.test.X, float(network.posterior.log_alpha))
    density = -0.5 * (((study.data.test.y - p.mean) ** 2 / p.var) + np.log(2 * np.pi * p.var / scale**2)).sum(1)
    assert scores["lpd_test"] == pytest.approx(density.mean())
    inside = ((study.data.test.X >= 0) & (study.data.test.X <= 1))[:, 0]
    assert scores["lpd_inside"] == pytest.approx(density[inside].mean())
    assert scores["lpd_outside"] == pytest.approx(density[~inside].mean())
    assert scores["mse_test"] == pytest.approx((((study.data.test.y - p.mean) / scale) ** 2).mean())
    bnn = study.bnn[0].predictive(study.data.test.X)
    expected = bnn.log_prob(study.data.test.y).mean() + np.log(scale).sum()
    assert study.scores["BNN"][0]["lpd_test"] == pytest.approx(expected)


def test_the_leak_is_best_on_the_test_set_and_honest_alpha_never_saw_it(small_study):
    for name in ("BLL", "BLR"):
        own, honest, leak = (small_study.column(f"{name}, {kind}", "lpd_test") for kind in paper.KINDS)
        assert (leak >= own - 1e-9).all()
        assert (leak >= honest - 1e-9).all()
    known = data.paper_data()
    changed = data.PaperData(known.train, known.validation, data.draw(100, data.TEST_RANGE, 5))
    refit = networks.fit_networks(changed, [0, 1], loss="evidence", max_epochs=15)
    for a, b in zip(refit, small_study.bll, strict=True):
        assert a.honest.log_alpha == pytest.approx(b.honest.log_alpha)
        assert a.leak.log_alpha != pytest.approx(b.leak.log_alpha)


def test_the_plane_of_features_is_turned_and_test_features_leave_the_line():
    three = networks.fit_three_samples(max_epochs=400)
    train, test = (three.turned_features(X) for X in (networks.X_TRAIN, networks.X_TEST))
    # the same distances, the largest spread of the training features first
    features = three.features(networks.X_TEST).numpy()
    np.testing.assert_allclose(
        np.linalg.norm(np.diff(test, axis=0), axis=1), np.linalg.norm(np.diff(features, axis=0), axis=1)
    )
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-12)
    assert np.ptp(train[:, 0]) > np.ptp(train[:, 1])
    assert np.abs(test[:, 1]).max() > np.abs(train[:, 1]).max()
    left = figures.alpha_and_features(three).axes[3]
    np.testing.assert_allclose(left.collections[0].get_offsets(), test)
    assert left.get_ylim()[1] - left.get_ylim()[0] < 1.5 * np.ptp(test[:, 1])


def test_the_figures_have_no_corner_and_name_their_panels():
    three = networks.fit_three_samples(max_epochs=50)
    top = figures.alpha_curves(three).axes[0]
    density = np.linspace(-100, 10, 2000)
    shown = top.transData.transform(np.column_stack([np.zeros_like(density), density]))[:, 1]
    slope = np.diff(shown)
    assert np.abs(np.diff(slope) / slope[1:]).max() < 0.05  # a threshold would be a jump
    hulls = figures.hulls().axes
    assert [ax.get_title() for ax in hulls[:3]] == ["convex hull", "span", "affine hull"]
    assert {label.get_ha() for ax in hulls for label in ax.texts} == {"right"}


def test_tables_hold_every_number_and_the_bnn_stands_beside_none_of_the_paper(small_study):
    """Its published figures are of another score on another range."""
    content = json.loads(paper.as_json([small_study]))
    assert len(content["studies"][0]["scores"]["BNN"]) == 2
    assert content["studies"][0]["data_seed"] == 99
    assert paper.as_csv([small_study]).count("\n") == 1 + 2 * len(paper.ROWS)
    assert "(-18.14)" in paper.as_markdown([small_study])
    assert r"\alpha^{\max}" in paper.as_latex([small_study])
    own, pooled = small_study.column("BNN", "lpd_test"), paper.pooled([small_study], "BNN", "lpd_test")
    assert math.isclose(float(np.median(own)), float(np.median(pooled)))
    *others, bnn = paper.cells([small_study])
    assert bnn[0] == "BNN"
    assert not any("(" in cell for cell in bnn)
    assert any("(" in cell for row in others for cell in row)


def test_the_command_writes_everything_and_twice_the_same(tmp_path, monkeypatch):
    for name, cheaper in {"savefig.dpi": 40, "pdf.fonttype": 3}.items():
        monkeypatch.setitem(figures.STYLE, name, cheaper)
    monkeypatch.setattr(report, "N_STEPS", 5)
    monkeypatch.setattr(figures, "Figure", lambda layout, **words: Figure(**words))  # layout takes the most time
    for folder in ("a", "b"):
        run = runner.invoke(cli.app, ["study", *SMALL, "--out", str(tmp_path / folder)])
        assert run.exit_code == 0, run.output
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    expected = {f"figure{i}.{e}" for i in range(1, 6) for e in ("png", "pdf")}
    assert set(files) == expected | {"table1.csv", "table1.md", "table1.tex", "study.json", "report.html"}
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    page = (tmp_path / "a" / "report.html").read_text()
    assert 'src="http' not in page
    assert "<link" not in page


def test_an_interrupt_leaves_old_results_alone(tmp_path, monkeypatch):
    (tmp_path / "table1.md").write_text("old")
    monkeypatch.setattr(figures, "draw_all", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("sys.argv", ["lastlayer", "study", *SMALL, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (1, 130)
    assert [p.name for p in tmp_path.iterdir()] == ["table1.md"]
    assert (tmp_path / "table1.md").read_text() == "old"


def test_bad_arguments_end_with_a_message(tmp_path, monkeypatch, capsys):
    for words in (["--seeds", "0"], ["--sedes", "3"]):
        assert runner.invoke(cli.app, ["study", *words]).exit_code == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["lastlayer", "study", "--out", str(tmp_path / "file" / "inside")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert "choose another --out" in " ".join(capsys.readouterr().err.split())
