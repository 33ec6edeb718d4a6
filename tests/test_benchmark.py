"""The benchmark: tables and splits, the store that takes up where it stopped, the summary by hand, helpful errors."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import close
from typer.testing import CliRunner

from benchmarks import observe, outside, small_tables
from benchmarks.uci import command, tables
from benchmarks.uci.__main__ import app
from benchmarks.uci.data import Table, load_folder, outer_rows
from benchmarks.uci.networks import conformal_quantiles, deep_ensemble
from benchmarks.uci.ours import OURS
from benchmarks.uci.peers import PEERS
from benchmarks.uci.picture import picture
from benchmarks.uci.protocol import Method, Quantiles, Scores, Task, hold_out, most_epochs, score
from benchmarks.uci.run import run
from benchmarks.uci.stacks import Recipe, search, squared_error, train
from benchmarks.uci.store import Result, open_store
from lastlayer import BLLRegressor, metrics
from lastlayer.errors import InputError
from lastlayer.predictions.mixture import MixturePrediction

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")


@pytest.fixture
def folder(tmp_path):
    """A table with two given splits as .npz, another without as .csv."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    y = X @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=60)
    path = tmp_path / "data"
    path.mkdir()
    np.savez(path / "first.npz", X=X, y=y, test_0=np.arange(6), test_1=np.arange(10, 16))
    lines = [",".join(map(str, row)) for row in np.column_stack([X[:40], y[:40]])]
    (path / "second.csv").write_text("\n".join(["a,b,c,target", *lines, ""]))
    return path


def gaussian(mean, std):
    zero, noise = np.zeros(len(mean)), np.full(len(mean), float(std) ** 2)
    return MixturePrediction.gaussian(np.asarray(mean, float), epistemic_var=zero, noise_var=noise, affine_cost=zero)


def method(name, *, family="neural", config="1", calls=None, fails=False):
    """The mean of the training targets, whatever the input."""

    def fit(X, y, task):
        if calls is not None:
            calls.append((name, task.data, task.kind, task.split))
        if fails:
            raise RuntimeError("no luck")
        return lambda X: gaussian(np.full(len(X), y.mean()), y.std())

    return Method(name, family, "not at all", fit, config)


def result(data, split, name, *, lpd=0.0, crps=1.0, kind="given", config="1"):
    return Result(data, kind, split, name, config, Scores(lpd, 1.0, crps, 0.9, 0.0), 1.0, 1.0, "cpu", {})


# tables and splits ------------------------------------------------------------------------------------------------


def test_tables_from_both_kinds_of_files_smallest_first(folder):
    second, first = load_folder(folder)
    assert (first.name, second.name) == ("first", "second")
    assert first.X.shape == (60, 3)
    assert second.X.shape == (40, 3)
    np.testing.assert_allclose(second.X, first.X[:40])
    np.testing.assert_allclose(second.y, first.y[:40])
    assert [table.name for table in load_folder(folder, ["first"])] == ["first"]


def test_given_splits_are_those_of_the_file_or_drawn_by_seed(folder):
    second, first = load_folder(folder)
    assert first.test_rows("given", 1).tolist() == list(range(10, 16))
    assert first.splits("given", [0, 1, 7]) == [0, 1]
    rows = second.test_rows("given", 3)
    assert rows.tolist() == second.test_rows("given", 3).tolist() != second.test_rows("given", 4).tolist()
    assert len(np.unique(rows)) == 4
    assert second.splits("given", [0, 9]) == [0, 9]
    with pytest.raises(InputError, match=r"first has no split 7: it has \[0, 1\]"):
        first.test_rows("given", 7)


def test_outer_rows_are_the_ends_of_the_widest_direction():
    rng = np.random.default_rng(1)
    t = rng.permutation(np.linspace(-1, 1, 50))
    noise = rng.normal(size=50)
    noise -= noise.mean() + t * (t @ noise) / (t @ t)  # uncorrelated with t: the first direction is that of t alone
    X = np.column_stack([1000 * t, 0.01 * t, noise])
    low, high = outer_rows(X, highest=False), outer_rows(X, highest=True)
    assert set(low) == set(np.argsort(t)[:5])
    assert set(high) == set(np.argsort(t)[-5:])
    table = Table("x", X, t)
    assert table.splits("outer", [8]) == [0, 1]
    assert table.test_rows("outer", 0).tolist() == low.tolist()
    constant = np.column_stack([X, np.ones(50)])
    assert outer_rows(constant, highest=True).tolist() == high.tolist()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.zeros((30, 2))}, "has no array y"),
        ({"X": np.zeros((30, 2)), "y": np.zeros(29)}, "need"),
        ({"X": np.zeros((30, 2)), "y": np.full(30, np.nan)}, "missing or infinite"),
        ({"X": np.zeros((30, 2)), "y": np.zeros(30), "test_0": np.array([0, 30])}, "row numbers from 0 to 29"),
    ],
)
def test_a_wrong_npz_says_what_is_wrong(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InputError, match=message):
        load_folder(tmp_path)


def test_a_wrong_csv_says_what_is_wrong(tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\nx,3\n")
    with pytest.raises(InputError, match="only numbers"):
        load_folder(tmp_path)


def test_held_out_rows_are_a_fifth_and_apart():
    fit, held = hold_out(50, seed=3)
    assert len(held) == 10
    assert sorted([*fit, *held]) == list(range(50))


# scores -----------------------------------------------------------------------------------------------------------


def test_many_quantiles_of_a_gaussian_score_like_the_gaussian():
    rng = np.random.default_rng(0)
    mean, y = rng.normal(size=200), rng.normal(size=200)
    p = gaussian(mean, 1.3)
    levels = np.linspace(0.001, 0.999, 999)
    q = Quantiles(levels, np.stack([p.quantile(level) for level in levels]), mean)
    exact, other = score(p, y), score(q, y)
    assert other.lpd is None
    assert other.crps == pytest.approx(metrics.crps(p, y), rel=2e-3)
    assert other.rmse == pytest.approx(exact.rmse)
    assert other.coverage_90 == pytest.approx(exact.coverage_90, abs=0.01)
    assert other.calibration_error == pytest.approx(exact.calibration_error, abs=0.01)


def test_conformal_intervals_hold_the_ranked_errors():
    errors = np.arange(1.0, 20.0)  # 19 errors: a 90% interval reaches to the 18th
    q = conformal_quantiles(np.array([5.0]), errors)
    assert (q.at(0.05)[0], q.at(0.5)[0], q.at(0.95)[0]) == pytest.approx((5 - 18, 5, 5 + 18))
    assert q.at(0.99)[0] == pytest.approx(5 + 19)
    assert (np.diff(q.values, axis=0) >= 0).all()


def test_epochs_fall_beyond_the_full_budget():
    assert (most_epochs(800, 500), most_epochs(800, 2000), most_epochs(800, 8000)) == (800, 800, 200)


def test_configurations_side_by_side_train_as_alone():
    """With full batches, where the draw of the rows is of no account beyond rounding."""
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    t = x[:, 0] * x[:, 1]
    task = Task("d", "given", 0, 5)
    recipe = Recipe(1e-2, batch_size=1000, max_epochs=20, decays=(0.0, 1e-1), activation=torch.tanh)
    both, ones = recipe.stack([0, 1], 2, task), [recipe.stack([i], 2, task) for i in range(2)]
    for i, one in enumerate(ones):
        one.load_state_dict({name: p[[i]] for name, p in both.state_dict().items()})
    train(both, x, t, squared_error, recipe, [0, 1], seed=0)
    for i, one in enumerate(ones):
        train(one, x, t, squared_error, recipe, [i], seed=0)
        for name, p in one.state_dict().items():
            close(both.state_dict()[name][[i]], p)


def test_the_search_keeps_the_best_epoch_of_each_configuration():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    told = iter([(3.0, 1.0), (1.0, 2.0), (2.0, 0.5)])
    seen = []

    def held_out(stack, x, t):
        seen.append({name: p.detach().clone() for name, p in stack.named_parameters()})
        return [(score, 10 * score) for score in next(told)]

    recipe = Recipe(1e-2, batch_size=10, max_epochs=6, decays=(0.0, 1e-2), checks=3)
    found = search(x, x[:, 0], squared_error, recipe, held_out, Task("d", "given", 0, 5))
    assert [(one.score, one.note, one.epoch) for one in found] == [(1.0, 10.0, 4), (0.5, 5.0, 6)]
    close(found[0].weights["first"], seen[1]["first"][:1])
    close(found[1].weights["last"], seen[2]["last"][1:])


# store and loop ---------------------------------------------------------------------------------------------------


def test_a_second_run_does_only_what_is_missing(folder, tmp_path):
    calls: list[object] = []
    some = {"kinds": ["given", "outer"], "splits": [0, 1]}
    a, b = method("a", calls=calls), method("b", calls=calls)
    assert run(load_folder(folder), [a], open_store(tmp_path), **some) == []
    assert len(calls) == 8
    assert [call[3] for call in calls] == [0] * 4 + [1] * 4  # split by split
    run(load_folder(folder), [a, b], open_store(tmp_path), **some)
    assert [call[0] for call in calls[8:]] == ["b"] * 8
    run(load_folder(folder), [a, b], open_store(tmp_path), **some)
    assert len(calls) == 16
    run(load_folder(folder), [method("a", calls=calls, config="2")], open_store(tmp_path), **some)
    assert len(calls) == 24  # another configuration is another row
    run(load_folder(folder), [b], open_store(tmp_path), **some, again=True)
    assert len(calls) == 32
    assert len(open_store(tmp_path).results) == 24


def test_a_line_cut_off_is_done_again_and_hurts_no_other(folder, tmp_path):
    calls: list[object] = []
    a = method("a", calls=calls)
    some = {"kinds": ["given"], "splits": [0, 1]}
    run(load_folder(folder), [a], open_store(tmp_path), **some)
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text()[:-30])
    assert len(open_store(tmp_path).results) == 3
    run(load_folder(folder), [a], open_store(tmp_path), **some)
    assert len(calls) == 5
    assert len(open_store(tmp_path).results) == 4
    assert {"torch", "python"} <= set(json.loads(path.read_text().splitlines()[0])["versions"])


def test_what_fails_is_told_and_the_rest_goes_on(folder, tmp_path):
    failures = run(
        load_folder(folder),
        [method("broken", fails=True), method("a")],
        open_store(tmp_path),
        kinds=["given"],
        splits=[0],
    )
    assert [str(f) for f in failures] == [
        "broken on second, given split 0: RuntimeError: no luck",
        "broken on first, given split 0: RuntimeError: no luck",
    ]
    assert {key[3] for key in open_store(tmp_path).results} == {"a"}


def test_the_same_seed_gives_the_same_prediction(folder, monkeypatch):
    from benchmarks.uci import networks

    monkeypatch.setattr(networks, "ENSEMBLE", replace(networks.ENSEMBLE, max_epochs=5))
    table = load_folder(folder, ["first"])[0]
    one, two = (deep_ensemble(table.X, table.y, Task("first", "given", 0, 5))(table.X[:4]) for _ in range(2))
    np.testing.assert_array_equal(one.mean, two.mean)
    assert one.mean.shape == (networks.MEMBERS, 4)


# summary ----------------------------------------------------------------------------------------------------------


def test_means_errors_and_ranks_by_hand():
    results = [
        *(result("one", split, "a", lpd=lpd, crps=1.0) for split, lpd in enumerate((1.0, 2.0, 3.0))),
        *(result("one", split, "b", lpd=1.5, crps=1.0) for split in range(3)),
        result("one", 0, "c", lpd=None, crps=0.5),
        result("two", 0, "a", lpd=0.0, crps=2.0),
        result("two", 0, "b", lpd=1.0, crps=3.0),
        result("two", 0, "c", lpd=None, crps=1.0),
        result("three", 0, "a", lpd=9.0, crps=9.0),  # the others have not finished it: no part in the ranks
        result("one", 0, "a", lpd=-100.0, config="old"),
    ]
    summary = tables.Summary(results, [method("a"), method("b"), method("c", family="other")])
    cell = summary.cell("given", "one", "a", "lpd")
    assert (cell.mean, cell.error, cell.n) == (2.0, pytest.approx(1 / np.sqrt(3)), 3)
    assert np.isnan(summary.cell("given", "two", "a", "lpd").error)
    assert summary.ranks("given", "lpd") == {"a": 1.5, "b": 1.5}
    assert summary.ranks("given", "crps") == {"a": 2.25, "b": 2.75, "c": 1.0}  # on "one", a and b share 2 and 3
    assert summary.ranks("given", "crps", family="neural") == {"a": 1.25, "b": 1.75}
    assert summary.complete_sets("given", "crps") == ["one", "two"]
    assert summary.best("given", "one", "crps") == "c"
    text = tables.as_markdown(summary)
    assert "2.00 ± 0.58 *" in text
    assert "one 1 to 3" in text
    assert tables.as_csv(results).count("\n") == len(results) + 1


def test_coverage_is_best_near_nine_tenths():
    near, far = (
        replace(result("one", 0, n), scores=Scores(0.0, 1.0, 1.0, c, 0.0)) for n, c in (("a", 0.88), ("b", 1.0))
    )
    assert tables.Summary([near, far], [method("a"), method("b")]).best("given", "one", "coverage_90") == "a"


def test_the_picture_shows_each_table_and_marks_what_is_far_off(tmp_path):
    names = [f"m{i}" for i in range(6)]
    results = [
        result(data, split, name, lpd=float(i) if i else -1000.0, crps=1.0 + i, kind=kind)
        for data in ("one", "two")
        for kind in ("given", "outer")
        for split in range(2)
        for i, name in enumerate(names)
    ]
    figure = picture(tables.Summary(results, [method(name) for name in names]))
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert len(shown) == 8
    assert any("-1000" in text.get_text() for text in shown[0].texts)
    figure.savefig(tmp_path / "x.png")


# command ----------------------------------------------------------------------------------------------------------


def asked(folder, tmp_path, **changes):
    words = {
        "data": folder,
        "methods": "conformal network",
        "sets": None,
        "splits": "0",
        "kinds": "given",
        "out": tmp_path / "out",
        "device": "cpu",
        "again": False,
    }
    return command.Asked.parse(**{**words, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": Path("nowhere")}, "nowhere is not a folder"),
        ({"methods": "vbl"}, "did you mean 'vbll'"),
        ({"sets": "frist"}, "did you mean 'first'"),
        ({"kinds": "inner"}, "choose one of 'given', 'outer'"),
        ({"splits": "one"}, "such as 0,1,2"),
        ({"splits": "-1"}, "0 or more"),
        ({"methods": ","}, "empty list"),
        ({"device": "abacus"}, "'auto', 'cpu' or 'cuda'"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(folder, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        asked(folder, tmp_path, **changes)


def test_an_empty_folder_is_told(tmp_path):
    with pytest.raises(InputError, match=r"no \.npz or \.csv"):
        load_folder(tmp_path)


def test_a_missing_package_leaves_its_method_out_and_names_the_target(folder, tmp_path, monkeypatch):
    absent = replace(command.METHODS["vbll"], modules=("surely_not_installed",))
    monkeypatch.setitem(command.METHODS, "vbll", absent)
    some = asked(folder, tmp_path, methods="vbll, conformal network", splits="0,5")
    assert [m.name for m in some.methods] == ["conformal network"]
    assert some.messages == [
        "left out: vbll needs surely_not_installed; make bench-uci installs it",
        "first has no given split 5",
    ]
    with pytest.raises(InputError, match="none of the methods can run"):
        asked(folder, tmp_path, methods="vbll")


def test_methods_by_name_and_group():
    assert command.choose_methods("peers") == list(PEERS)
    assert command.choose_methods("ours") == list(OURS)
    names = [m.name for m in command.choose_methods("lastlayer, one member,vbll,lastlayer")]
    assert names == ["lastlayer, one member", "vbll", "lastlayer"]


def test_every_method_says_how_it_is_tuned_and_its_configuration():
    assert len(command.METHODS) == len(OURS) + len(PEERS)
    for one in command.METHODS.values():
        assert one.family in ("neural", "other")
        assert len(one.tuning) > 5
    assert len({m.config for m in OURS}) == len(OURS)


def test_the_command_writes_tables_and_picture_and_fails_softly(folder, tmp_path, monkeypatch):
    for name, fails in (("vbll", True), ("MC dropout", False)):
        monkeypatch.setitem(command.METHODS, name, method(name, fails=fails))
    words = ["--data", str(folder), "--methods", "vbll,MC dropout", "--splits", "0,1"]
    words += ["--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 1
    assert "vbll on first, given split 1: RuntimeError: no luck" in answer.output.replace("\n", " ")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"results.jsonl", "scores.csv", "tables.md", "uci.png"}
    assert "MC dropout" in (tmp_path / "out" / "tables.md").read_text()


def test_small_tables_are_scored_beside_a_process_and_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(small_tables, "BLLRegressor", partial(BLLRegressor, n_members=2, max_epochs=10))
    found = small_tables.main(["--tables", "2", "--seeds", "1", "--out", str(tmp_path / "new" / "p.png")])
    assert list(found) == list(small_tables.TABLES)[:2]
    for each in found.values():
        assert list(each) == list(small_tables.METHODS)
        assert all(0 <= score.coverage <= 1 and np.isfinite(score.lpd) for score in each.values())
        assert np.isfinite(each["default"].promised)
    assert (tmp_path / "new" / "p.png").stat().st_size > 10_000
    assert "exact process: coverage" in capsys.readouterr().out
    (X, y), (new, _) = small_tables.TABLES["200 x 4, each row four times"].both(0)
    assert (len(X), len(np.unique(X, axis=0)), len(new)) == (200, 50, small_tables.TEST_ROWS)
    np.testing.assert_array_equal(X[:4], X[[0] * 4])
    assert len(y) == 200


# where the data end ---------------------------------------------------------------------------------------------------


def test_points_that_leave_the_data_are_scored_by_distance_and_drawn(tmp_path, capsys):
    asked = ["--seeds", "2", "--functions", "linear,smooth draw", "--methods", "exact process"]
    found = outside.main([*asked, "--out", str(tmp_path / "new" / "outside.png")])["exact process"]
    assert found.shape == (2, len(outside.RADII), 3)
    assert found[:, 0, 0] == pytest.approx(0.9, abs=0.08)  # inside it covers as it should
    assert (np.diff(found[..., 2], axis=1) > 0).all()  # errors grow with the distance
    assert (tmp_path / "new" / "outside.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("exact process") == 3


def test_points_lie_on_the_surface_of_the_cube():
    assert np.abs(outside.surface(3, 50, 1.0, 0)).max() <= 1
    assert np.abs(outside.surface(3, 50, 1.5, 0)).max(1) == pytest.approx(1.5)


# more than values -----------------------------------------------------------------------------------------------------


def test_missing_targets_and_gradients_are_scored_beside_their_peers(tmp_path, monkeypatch):
    quick = {"preset": "evidence", "max_epochs": 2}
    monkeypatch.setattr(observe, "BLLRegressor", lambda _=None, **o: BLLRegressor((5,), **(o | quick)))
    sizes = {"ROWS": 100, "TEST_ROWS": 20, "ENERGIES": 12, "GRADIENTS": 6, "TIMES": 2, "STEPS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(observe, name, value)
    answer = CliRunner().invoke(observe.app, ["--quick", "--seeds", "1", "--out", str(tmp_path / "new")])
    assert answer.exit_code == 0, answer.output
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"results.json", "tables.md"}
    text = (tmp_path / "new" / "tables.md").read_text()
    results = json.loads((tmp_path / "new" / "results.json").read_text())
    assert [one["method"] for one in results["missing"]] == list(observe.WAYS)
    asked = [name for n in (6, 12) for name in observe.asked_of(n, 0, True)]
    assert [one["method"] for one in results["gradients"]] == asked
    assert {one["size"] for one in results["gradients"]} == {0, 6, 12}
    for one in results["missing"] + results["gradients"]:
        assert all(np.isfinite(list(one["scores"].values())))
        assert f"| {one['method']} |" in text
        assert one["method"] in answer.output
    assert ("Fourier features handle" in text) == (observe.find_spec("gpytorch") is not None)


def test_a_process_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(observe, "find_spec", lambda name: None)
    methods = observe.asked_of(observe.GRADIENTS, 0, False)
    assert methods == [name for name in observe.METHODS if name != observe.PROCESS]
    one = observe.Run(observe.EVIDENCE, observe.GRADIENTS, 0, 1.0, 1.0, {})
    assert "make bench-observe installs it" in observe.rows_in_the_same_time([one])


def test_made_gradients_are_those_of_the_energy():
    X, step = observe.draw_points(4, np.random.default_rng(0))[0], 1e-6
    for j, e in enumerate(np.eye(3) * step):
        slope = (observe.surface(X + e)[:, 0] - observe.surface(X - e)[:, 0]) / (2 * step)
        np.testing.assert_allclose(observe.surface(X)[:, 1 + j], slope, atol=1e-7)


def test_every_row_of_the_incomplete_table_has_a_target():
    known = observe.draw_known((2_000, 4), np.random.default_rng(0))
    assert known.any(1).all()
    assert known.mean() == pytest.approx(0.5, abs=0.05)
