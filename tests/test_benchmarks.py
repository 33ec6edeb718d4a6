"""Benchmarks: every command runs at a tiny size, the runner resumes, and made functions are what their pages say."""

import itertools
import os
import pickle
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import close, refused
from scipy.integrate import solve_ivp
from test_docs import blocks, run

import lastlayer
from benchmarks import fit, observe, outside, runner
from benchmarks.__main__ import commands
from benchmarks.bo import methods as bo_methods
from benchmarks.bo import tables as bo_tables
from benchmarks.bo.problems import PROBLEMS
from benchmarks.control_studies import mpc, reactor, spring
from benchmarks.control_studies.controllers import true_model
from benchmarks.control_studies.discs import Discs
from benchmarks.uci import gaussian_boosting, networks, tables
from benchmarks.uci import methods as uci_methods
from benchmarks.uci.data import Table, load_folder
from benchmarks.uci.networks import conformal_quantiles, deep_ensemble
from benchmarks.uci.protocol import Gaussians, Method, Quantiles, Result, Scores, Task, hold_out, score
from benchmarks.uci.stacks import Recipe, search, squared_error, train
from lastlayer import BLLRegressor, metrics
from lastlayer.dynamics import DynamicsModel, Lags, Linearized, Unscented
from lastlayer.tables import TableRegressor

pytestmark = [
    pytest.mark.usefixtures("as_a_user", "small_process"),
    pytest.mark.filterwarnings("ignore:\\s*casadi. a numpy function:FutureWarning"),
]


def quick(*args, **options):
    """A regressor that is trained for two epochs, whatever is asked for."""
    return BLLRegressor(*args, **(options | {"max_epochs": 2, "n_members": 2}))


def one_network(*_, **options):
    """A single small network, trained for two epochs by the evidence alone."""
    kept = {name: options[name] for name in options.keys() & {"random_state", "noise", "encoding", "progress"}}
    return BLLRegressor((5,), preset="evidence", max_epochs=2, **kept)


quick_table = partial(TableRegressor, preset="evidence", max_epochs=2)


def mean_of_targets(name, *, family="neural", fails=False, modules=()):
    """The mean of the training targets, whatever the input."""

    def fit(X, y, task):
        if fails:
            raise RuntimeError("no luck")
        return lambda X: Gaussians(np.full((1, len(X)), y.mean()), np.full((1, len(X)), y.var()))

    return Method(name, family, "not at all", fit, modules=modules)


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


SIZES = {"ROWS": 100, "TEST_ROWS": 20, "ENERGIES": 12, "GRADIENTS": 6, "TIMES": 2, "STEPS": 2}
SPRING = {"train_episodes": 4, "train_steps": 15, "test_episodes": 2, "horizon": 6, "hidden": (4,), "n_members": 2}
MPC = {"n_experiments": 6, "steps": 2, "horizon": 4}
SCALE = "epochs statistics --rows 256 --test-rows 64 --width 8 --batch 64 --epochs 1 --statistics-rows 64"
RUNS = {
    "bo": ("--problems Branin --methods random --seeds 2 --steps 2", {}, "last regret"),
    "control": ("", {"POINTS": 4, "SIZES": ((4, 4),), "BLLRegressor": one_network}, "C code of export_c"),
    "control_studies.mpc": ("--starts 1 --max-epochs 2", {"run": partial(mpc.run, **MPC)}, "chance and trust"),
    "control_studies.spring": ("--seeds 1 --max-epochs 2", {"Budget": partial(spring.Budget, **SPRING)}, "BLR, alpha"),
    "core": ("--shrink 50", {"in_own_process": lambda *_: 1.0, "BLLRegressor": quick}, "autograd / closed form"),
    "growth": ("--ms 64 128 --ps 8 16 --qs 1 2 --m 64 --p 8 --out OUT/growth.png", {"REPEATS": 1}, "against m, slope"),
    "imports": ("--repeats 1", {"PROGRAMS": dict.fromkeys(("torch", "torch, lastlayer"), "")}, "importing torch"),
    "likelihoods": ("--seeds 1 --tables grades --methods gaussian,density_network", {"ROWS": 60}, "density network"),
    "lines": ("", {}, "per line of code"),
    "observe": ("--quick --seeds 1", {"BLLRegressor": one_network, **SIZES}, "energies and n gradients"),
    "online": ("--rows 12 --epochs 2", {"FITTED": 40, "TUNING": 12, "BLLRegressor": quick}, "lower bound"),
    "outside": ("--seeds 1 --processes 2 --functions linear --methods exact_process", {}, "mean of all"),
    "paper_recipe": ("--initialisations 1 --max-epochs 2", {}, "-18.1400"),
    "paper_seeds": ("--data-seeds 99 --initialisations 2 --max-epochs 2", {}, "| 99 |"),
    "pump": ("--seeds 7", {"ROWS": 40, "TableRegressor": quick_table}, "| 1,400 to 2,900 |"),
    "readme_picture": ("", {"BLLRegressor": one_network}, "Algorithm 1"),
    "scale": (SCALE, {}, "float32 features / own matrix product"),
    "small": ("--tables 1 --seeds 1", {"BLLRegressor": quick}, "exact process: coverage"),
    "training": ("--initialisations 1 --steps 2", {"MAX_ITERATIONS": 2, "REPEATS": 1}, "training, median"),
}
"""Arguments, names of the module that are replaced, and words of the output."""
ELSEWHERE = {"equal": "needs a commit", "walk": "test_walk.py", "terminal": "test_docs.py", "uci": "below"}
ELSEWHERE |= {"fit": "below", "exactness": "needs peers", "peers": "needs peers", "predict": "a million rows"}
FILES = {
    "bo": {"results.jsonl", "tables.md", "scores.csv", "bo.png"},
    "control_studies.mpc": {"mpc.md", "mpc-runs.png", "mpc-plane.png"},
    "control_studies.spring": {"spring.md", "spring-trajectory.png", "spring-lpd.png"},
    "growth": {"growth.png"},
    "likelihoods": {"results.jsonl", "likelihoods.txt"},
    "observe": {"results.jsonl", "tables.md"},
    "outside": {"results.jsonl", "outside.png"},
    "readme_picture": {"prediction.png", "scores.txt"},
    "small": {"results.jsonl", "promises.png"},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_command_runs(name, tmp_path, monkeypatch, capsys):
    arguments, replaced, words = RUNS[name]
    module = import_module(f"benchmarks.{name}" + (".__main__" if name == "bo" else ""))
    for each, value in replaced.items():
        monkeypatch.setattr(module, each, value)
    given = [part.replace("_", " ").replace("OUT", str(tmp_path / "out")) for part in arguments.split()]
    if name in FILES and "--out" not in given:
        given += ["--out", str(tmp_path / "out")]
    module.main(given)
    assert words in capsys.readouterr().out
    if name in FILES:
        assert {path.name for path in (tmp_path / "out").iterdir()} == FILES[name]


def test_all_are_listed_with_a_line_each(capsys):
    listed = commands()
    assert set(listed) == RUNS.keys() | ELSEWHERE.keys()
    assert all(20 < len(text) <= 120 and text.endswith((".", ")")) for text in listed.values()), listed


def test_uci_writes_tables_and_figure_and_fails_softly(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(uci_methods.METHODS, "vbll", mean_of_targets("vbll", fails=True))
    monkeypatch.setitem(uci_methods.METHODS, "MC dropout", mean_of_targets("MC dropout"))
    uci = import_module("benchmarks.uci.__main__")
    words = ["--data", str(folder), "--splits", "0,1", "--out", str(tmp_path / "out"), "--methods"]
    with pytest.raises(SystemExit):
        uci.main([*words, "vbll,MC dropout"])
    out = capsys.readouterr().out
    assert "failed: vbll on first, given split 1: RuntimeError: no luck" in out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"results.jsonl", "scores.csv", "tables.md", "uci.png"}
    assert "MC dropout" in (tmp_path / "out" / "tables.md").read_text()
    uci.main([*words, "MC dropout", "--kinds", "given", "--sets", "first"])  # nothing new
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 8
    monkeypatch.setitem(uci_methods.METHODS, "vbll", mean_of_targets("vbll", modules=("surely_not_installed",)))
    uci.main([*words, "vbll,MC dropout", "--splits", "0,5"])
    out = capsys.readouterr().out
    assert "left out: vbll needs surely_not_installed; make bench-uci installs it" in out
    assert "first has no given split 5" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--data", "nowhere"], "nowhere is not a folder"),
        (["--methods", "vbl"], "did you mean 'vbll'"),
        (["--sets", "frist"], "did you mean 'first'"),
        (["--kinds", "inner"], "choose one of 'given', 'outer'"),
        (["--splits", "one"], "such as 0,1,2"),
        (["--splits", "-1"], "0 or more"),
        (["--methods", ","], "empty list"),
        (["--device", "abacus"], "'auto', 'cpu' or 'cuda'"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(folder, tmp_path, changes, message):
    words = ["--data", str(folder), "--methods", "conformal network", "--out", str(tmp_path / "out"), *changes]
    refused(re.escape(message), import_module("benchmarks.uci.__main__").main, words, error=SystemExit)


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(runner, "_alone", runner._outcome)
    before = torch.get_num_threads(), dict(os.environ)
    yield
    torch.set_num_threads(before[0])
    os.environ.clear()
    os.environ.update(before[1])


OTHERS = ("CatBoost", "chimeraboost", "exact GP")


@pytest.mark.usefixtures("in_this_process")
def test_fit_writes_table_and_figure_and_fails_softly(folder, tmp_path, monkeypatch, capsys):
    chosen = {name: mean_of_targets(name, fails=name == "chimeraboost") for name in ("lastlayer", *OTHERS)}
    monkeypatch.setattr(fit, "METHODS", chosen)
    monkeypatch.setattr(fit, "MATRICES", 1e9)
    monkeypatch.setattr(fit, "timed", lambda work: (work(), 2.0, 1.0))
    words = ["--threads", "1", "--out", str(tmp_path / "out")]
    compared = [*words, "--rows", "300,100", "--methods", ",".join(chosen), "--data", str(folder), "--splits", "2"]
    with pytest.raises(SystemExit):
        fit.main(compared)
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["100", "lastlayer", "2.00", "1.00", "1.00"] in [line[:5] for line in lines]
    assert ["first", "54", "lastlayer", "2.00", "1.00", "1.00"] in [line[:6] for line in lines]
    assert "chimeraboost      not measured: RuntimeError: no luck" in out
    assert "exact GP          not measured: needs about 80,000 GB of memory, " in out
    assert "failed: made, 300 rows, chimeraboost: RuntimeError: no luck" in out
    store = tmp_path / "out" / "fit.jsonl"
    assert {p.name for p in store.parent.iterdir()} == {"fit.jsonl", "fit.png", "fit.txt"}
    before = store.read_text()
    fit.main([*compared, "--methods", "lastlayer"])
    assert store.read_text() == before
    kept = {(r.data, r.rows, r.method): r for r in runner.Store(store, fit.Result).results.values()}
    parts = [load_folder(folder, ["first"])[0].parts("given", split) for split in (0, 1)]
    each = [score(chosen["lastlayer"].fit(X, y, None)(Z), t) for X, y, Z, t in parts]
    assert kept["first", 54, "lastlayer"].scores.crps == pytest.approx(np.mean([scores.crps for scores in each]))
    slow = [replace(kept["made", 100, "CatBoost"], seconds=100.0)]
    assert fit.unable(fit.Job("CatBoost", 300), slow, 50.0) == "100 s for 100 rows, above the limit of 50 s"
    fit.main([*words, "--growth", "--rows", "20,40"])
    assert {"growth.txt", "growth.png"} < {p.name for p in store.parent.iterdir()}


@pytest.mark.usefixtures("in_this_process")
def test_a_fit_is_stopped_at_its_limit(tmp_path, monkeypatch, capsys):
    fits = iter(["warm-up"])

    def fit_for_long(X, y, task):
        if not next(fits, None):
            time.sleep(60)

    monkeypatch.setattr(fit, "METHODS", {"lastlayer": Method("lastlayer", "other", "", fit_for_long)})
    refused("^1$", fit.main, ["--growth", "--rows", "20", "--limit", "0.01", "--out", str(tmp_path)], error=SystemExit)
    assert "not measured: TimeoutError: stopped after 0 s" in capsys.readouterr().out


def test_the_ceiling_holds_for_a_fit_within_the_recorded_ratio_and_refuses_one_above(monkeypatch, capsys):
    monkeypatch.setattr(fit, "BLLRegressor", one_network)
    monkeypatch.setattr(fit, "PRODUCTS", 1)
    monkeypatch.setattr(fit, "REPEATS", 1)
    monkeypatch.setattr(fit, "CEILING", {20: 1e6})
    fit.main(["--ceiling"])
    assert "1000000.00  within 1.1 times" in capsys.readouterr().out
    monkeypatch.setattr(fit, "CEILING", {20: 0.0})
    refused("costs more", fit.main, ["--ceiling"], error=SystemExit)
    fit.main(["--ceiling", "--record"])
    assert "CEILING = {20: " in capsys.readouterr().out


@dataclass(frozen=True)
class Answer:
    value: int
    scores: Scores | None = None


@dataclass(frozen=True)
class Square(runner.Job):
    of: int

    def run(self) -> Answer:
        if self.of == 13:
            raise RuntimeError("no luck")
        return Answer(self.of**2)


def computed(store, numbers, **how):
    return {o.task.of: o for o in runner.perform([Square(n) for n in numbers], store, **how)}


@pytest.mark.parametrize("how", [{}, {"processes": 2}, {"isolated": True}])
def test_a_second_run_computes_what_is_missing(tmp_path, monkeypatch, how):
    monkeypatch.setattr(runner, "pool_of", ThreadPoolExecutor)  # "outside" runs in processes
    path = tmp_path / "results.jsonl"
    found = computed(runner.Store(path, Answer), [1, 13, 2], **how)
    assert (found[2].result, found[13].why_not, found[13].failed) == (Answer(4), "RuntimeError: no luck", True)
    assert str(found[13]) == "13: RuntimeError: no luck"
    text = path.read_text()
    assert computed(runner.Store(path, Answer), [1, 2], **how)[1].result == Answer(1)
    assert path.read_text() == text
    assert sorted(computed(runner.Store(path, Answer), [3, 1], **how)) == [1, 3]
    assert len(path.read_text().splitlines()) == 3


def test_lines_cut_off_or_of_another_version_are_computed_again_and_results_survive_their_file(tmp_path):
    path = tmp_path / "results.jsonl"
    computed(runner.Store(path, Answer), [1, 2])
    path.write_text('{"key": [5], "result": {"other": 1}}\n' + path.read_text()[:-10])
    assert list(runner.Store(path, Answer).results) == [(1,)]
    computed(runner.Store(path, Answer), [2, 1], again=True)
    assert {key: r.value for key, r in runner.Store(path, Answer).results.items()} == {(1,): 1, (2,): 4}
    whole = Result("a", "given", 0, "m", "1", Scores(None, 1.0, 2.0, 0.9, 0.0), 1.0, 1.0, "cpu", {"torch": "2"})
    runner.Store(tmp_path / "x", Result).append(("a", 0), whole)
    assert runner.Store(tmp_path / "x", Result).results == {("a", 0): whole}


def test_some_tasks_cannot_be_run_and_failures_end_the_program(tmp_path, capsys):
    store = runner.Store(tmp_path / "x", Answer)
    found = computed(store, [1, 2], unable=lambda task: "too large" if task.of == 2 else None)
    assert (found[2].why_not, found[2].failed) == ("too large", False)
    assert runner.complete([Square(1), Square(3)], store) == [Answer(1), Answer(9)]
    with pytest.raises(SystemExit):
        runner.complete([Square(13)], store)
    assert "failed: 13: RuntimeError: no luck" in capsys.readouterr().out


def test_jobs_are_found_by_other_processes():
    """What is defined in the __main__ of a package is not."""
    fitted = outside.Fitted("sine", "NGBoost", 0)
    for job in (bo_methods.Job("Branin", "random", 0, 1), fitted, fit.Job("lastlayer", 60)):
        assert not type(job).__module__.endswith("__main__")
        assert pickle.loads(pickle.dumps(job)) == job


def test_names_with_commas_are_found():
    every = {name: name for name in ("a", "a, b", "b")}
    assert runner.named("method", "a,b,b, a", every) == ["a, b", "b", "a"]
    assert runner.named("method", None, every) == ["a", "a, b", "b"]


def result(data, split, name, *, lpd=0.0, crps=1.0, kind="given", config="1"):
    return Result(data, kind, split, name, config, Scores(lpd, 1.0, crps, 0.9, 0.0), 1.0, 1.0, "cpu", {})


def test_tables_from_both_kinds_of_files_and_their_splits_given_or_drawn_by_seed(folder):
    second, first = load_folder(folder)  # the smallest first
    assert [(table.name, table.X.shape) for table in (first, second)] == [("first", (60, 3)), ("second", (40, 3))]
    np.testing.assert_allclose(second.X, first.X[:40])
    np.testing.assert_allclose(second.y, first.y[:40])
    assert [table.name for table in load_folder(folder, ["first"])] == ["first"]
    assert first.test_rows("given", 1).tolist() == list(range(10, 16))
    assert first.splits("given", [0, 1, 7]) == [0, 1]
    rows = second.test_rows("given", 3)
    assert rows.tolist() == second.test_rows("given", 3).tolist() != second.test_rows("given", 4).tolist()
    assert len(np.unique(rows)) == 4
    assert second.splits("given", [0, 9]) == [0, 9]
    refused(r"first has no split 7: it has \[0, 1\]", first.test_rows, "given", 7)


def test_outer_rows_are_the_ends_of_the_widest_direction():
    rng = np.random.default_rng(1)
    t = rng.permutation(np.linspace(-1, 1, 50))
    noise = rng.normal(size=50)
    noise -= noise.mean() + t * (t @ noise) / (t @ t)  # uncorrelated with t: the first direction is that of t alone
    X = np.column_stack([1000 * t, 0.01 * t, noise])
    for inputs in (X, np.column_stack([X, np.ones(50)])):
        table = Table("x", inputs, t)
        assert table.splits("outer", [8]) == [0, 1]
        assert set(table.test_rows("outer", 0)) == set(np.argsort(t)[:5])
        assert set(table.test_rows("outer", 1)) == set(np.argsort(t)[-5:])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.zeros((30, 2))}, "has no array y"),
        ({"X": np.zeros((30, 2)), "y": np.zeros(29)}, "need"),
        ({"X": np.zeros((30, 2)), "y": np.full(30, np.nan)}, "missing or infinite"),
        ({"X": np.zeros((30, 2)), "y": np.zeros(30), "test_0": np.array([0, 30])}, "row numbers from 0 to 29"),
        ("a,b\n1,2\nx,3\n", "only numbers"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, arrays, message):
    if isinstance(arrays, str):
        (tmp_path / "bad.csv").write_text(arrays)
    else:
        np.savez(tmp_path / "bad.npz", **arrays)
    refused(message, load_folder, tmp_path)


def test_many_quantiles_of_a_gaussian_score_like_the_gaussian():
    rng = np.random.default_rng(0)
    mean, y = rng.normal(size=200), rng.normal(size=200)
    p = Gaussians(mean[None], np.full((1, 200), 1.3**2)).prediction()
    levels = np.linspace(0.001, 0.999, 999)
    q = Quantiles(levels, np.stack([p.quantile(level) for level in levels]), mean)
    exact, other = score(p, y), score(q, y)
    assert other.lpd is None
    assert (other.crps, other.rmse) == pytest.approx((metrics.crps(p, y), exact.rmse), rel=2e-3)
    wanted = exact.coverage_90, exact.calibration_error
    assert (other.coverage_90, other.calibration_error) == pytest.approx(wanted, abs=0.01)


def test_conformal_intervals_hold_the_ranked_errors():
    errors = np.arange(1.0, 20.0)  # 19 errors: a 90% interval reaches to the 18th
    q = conformal_quantiles(np.array([5.0]), errors)
    assert (q.at(0.05)[0], q.at(0.5)[0], q.at(0.95)[0]) == pytest.approx((5 - 18, 5, 5 + 18))
    assert q.at(0.99)[0] == pytest.approx(5 + 19)
    assert (np.diff(q.values, axis=0) >= 0).all()


def test_configurations_side_by_side_train_as_alone():
    """With full batches, where the draw of the rows is of no account beyond rounding."""
    x, task = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), Task("d", "given", 0, 5)
    t = x[:, 0] * x[:, 1]
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


def test_the_same_seed_gives_the_same_prediction(folder, monkeypatch):
    monkeypatch.setattr(networks, "ENSEMBLE", replace(networks.ENSEMBLE, max_epochs=5))
    table = load_folder(folder, ["first"])[0]
    one, two = (deep_ensemble(table.X, table.y, Task("first", "given", 0, 5))(table.X[:4]) for _ in range(2))
    np.testing.assert_array_equal(one.mean, two.mean)
    assert one.mean.shape == (networks.MEMBERS, 4)


def test_means_errors_and_ranks_by_hand():
    results = [
        *(result("one", split, "a", lpd=split + 1.0) for split in range(3)),
        *(result("one", split, "b", lpd=1.5) for split in range(3)),
        result("one", 0, "c", lpd=None, crps=0.5),
        result("two", 0, "a", lpd=0.0, crps=2.0),
        result("two", 0, "b", lpd=1.0, crps=3.0),
        result("two", 0, "c", lpd=None, crps=1.0),
        result("three", 0, "a", lpd=9.0, crps=9.0),  # the others have not finished it: no part in the ranks
        result("one", 0, "a", lpd=-100.0, config="old"),
    ]
    summary = tables.Summary(results, [*map(mean_of_targets, "ab"), mean_of_targets("c", family="other")])
    assert runner.mean_and_error(summary.row("given", "one", "lpd")["a"]) == (2.0, pytest.approx(1 / np.sqrt(3)))
    assert np.isnan(runner.mean_and_error(summary.row("given", "two", "lpd")["a"])[1])
    assert summary.ranks("given", "lpd") == {"a": 1.5, "b": 1.5}
    assert summary.ranks("given", "crps") == {"a": 2.25, "b": 2.75, "c": 1.0}  # on "one", a and b share 2 and 3
    assert summary.ranks("given", "crps", family="neural") == {"a": 1.25, "b": 1.75}
    assert summary.best("given", "one", "crps") == "c"
    text = tables.as_markdown(summary)
    assert "2.00 ± 0.58 *" in text
    assert "one 1 to 3" in text
    assert tables.scores_csv(results).count("\n") == len(results) + 1


def test_the_picture_shows_each_table_and_marks_what_is_far_off(tmp_path):
    names = [f"m{i}" for i in range(6)]
    results = [
        result(data, split, name, lpd=float(i) if i else -1000.0, crps=1.0 + i, kind=kind)
        for data, kind, split in itertools.product(("one", "two"), ("given", "outer"), range(2))
        for i, name in enumerate(names)
    ]
    figure = tables.picture(tables.Summary(results, [mean_of_targets(name) for name in names]))
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert len(shown) == 8
    assert any("-1000" in text.get_text() for text in shown[0].texts)
    figure.savefig(tmp_path / "x.png")


def test_trees_are_chosen_by_the_lowest_loss_on_held_out_rows():
    seen = []

    def losses(depth, fit, held):
        seen.append((depth, len(fit), len(held)))
        return {3: [2.0, 1.0, 1.5], 5: [1.2, 1.1, 1.1]}[depth]

    assert gaussian_boosting._chosen(losses, (3, 5), 50, Task("fit", "given", 0)) == (3, 2)
    assert seen == [(3, 40, 10), (5, 40, 10)]
    assert len(hold_out(50, 0)[1]) == 10


def test_made_rows_are_what_their_pages_say():
    """On the surface of a cube; gradients are those of the energy; every row of the incomplete table has a target."""
    assert np.abs(outside.surface(3, 50, 1.0, 0)).max() <= 1
    assert np.abs(outside.surface(3, 50, 1.5, 0)).max(1) == pytest.approx(1.5)
    X, step = observe.draw_points(4, np.random.default_rng(0))[0], 1e-6
    for j, e in enumerate(np.eye(3) * step):
        slope = (observe.surface(X + e)[:, 0] - observe.surface(X - e)[:, 0]) / (2 * step)
        np.testing.assert_allclose(observe.surface(X)[:, 1 + j], slope, atol=1e-7)
    known = observe.draw_known((2_000, 4), np.random.default_rng(0))
    assert known.any(1).all()
    assert known.mean() == pytest.approx(0.5, abs=0.05)
    X, y = fit.make_rows(20_000, 1)
    scores = score(Gaussians(fit.function(X)[None], np.full((1, len(X)), fit.NOISE**2)), y)
    assert (scores.lpd, scores.crps) == pytest.approx((fit.ORACLE_LPD, fit.ORACLE_CRPS), abs=0.02)


SIX = [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573]  # the best point of Hartmann's function of six inputs


def test_the_best_points_are_in_the_box_and_no_other_is_better(generator):
    for name, best in {"Branin": [0.5427727, 0.1516667], "Hartmann6": SIX, "Ackley20": [1 / 3] * 20}.items():
        problem = PROBLEMS[name]
        function = problem.make(0)
        assert float(function(torch.tensor([best], dtype=torch.float64))) == pytest.approx(problem.best, abs=2e-5)
        X = torch.rand(500, problem.n_inputs, generator=generator, dtype=torch.float64)
        assert bool((function(X) < problem.best).all())


def test_the_rotated_problem_depends_on_six_directions_and_on_the_seed(generator):
    problem = PROBLEMS["rotated200"]
    X = torch.rand(300, 200, generator=generator, dtype=torch.float64, requires_grad=True)
    for seed in (0, 1):
        (slope,) = torch.autograd.grad(problem.make(seed)(X).sum(), X)
        assert int(torch.linalg.matrix_rank(slope, rtol=1e-8)) == 6
    assert bool((problem.make(0)(X) != problem.make(1)(X)).any())
    u = torch.tensor([SIX], dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(200, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    x = ((2 * u - 1) @ Q.T + 1) / 2
    assert bool(((x > 0) & (x < 1)).all())
    assert float(problem.make(3)(x)) == pytest.approx(problem.best, abs=1e-4)


def test_regret_never_rises_and_hypervolume_is_that_of_rectangles():
    Y = torch.tensor([[1.0], [3.0], [2.0]], dtype=torch.float64)
    best = PROBLEMS["Hartmann6"].best
    assert PROBLEMS["Hartmann6"].regret(Y) == pytest.approx([best - 1, best - 3, best - 3])
    problem = PROBLEMS["BraninCurrin"]
    a, b = problem.reference
    Y = torch.tensor([[a - 1, b + 1], [a + 1, b + 2], [a + 3, b + 1], [a + 2, b + 1]], dtype=torch.float64)
    volume = [0.0, 2.0, 4.0, 4.0]
    assert problem.regret(Y) == pytest.approx([problem.best - v for v in volume])


def test_two_objectives_and_vbll_run(monkeypatch):
    monkeypatch.setattr(bo_methods, "VBLL_EPOCHS", {"first": 2, "later": 1})
    monkeypatch.setattr(bo_methods, "RAW_SAMPLES", 8)
    monkeypatch.setattr(bo_methods, "DRAWS", 4)
    # else BoTorch compiles a kernel of its own, which takes half a minute where it was never used before
    monkeypatch.setattr("botorch.acquisition.multi_objective.logei._load_attempted", True)
    for problem, method in (("Branin", "VBLL"), ("BraninCurrin", "VBLL"), ("BraninCurrin", "lastlayer")):
        outcome = runner._outcome(bo_methods.Job(problem, method, 0, 2 if method == "VBLL" else 1)).result
        assert np.isfinite(outcome.regret).all()


def run_of(problem, method, seed, regret, steps=2):
    return bo_methods.Result(problem, method, seed, "1", [*([9.0] * 3), *regret], [0.5] * steps, {})


def test_ranks_are_of_the_last_regret_seed_by_seed():
    finals = {"lastlayer": [1.0, 3.0, 0.0], "random": [2.0, 3.0]}  # a seed that the other has not done
    runs = [(name, seed, last) for name, each in finals.items() for seed, last in enumerate(each)]
    lines = [run_of("Branin", name, seed, [5.0, last]) for name, seed, last in runs]
    lines.append(run_of("2,000 points", "lastlayer", 0, [9.0, 9.0]))
    summary = bo_tables.Summary(lines)
    assert summary.ranks(PROBLEMS["Branin"]) == {"lastlayer": 1.25, "random": 1.75}
    assert summary.average_ranks() == {"lastlayer": 1.25, "random": 1.75}
    first = ["lastlayer", "1 (0.5, 2)", "1.25"]
    second = ["random", "2.5 (2.2, 2.8)", "1.75"]
    assert bo_tables.regret_table(summary) == [["last regret", "Branin", "rank"], first, second]
    assert bo_tables.seconds_table(summary)[0] == ["seconds per step", "Branin", "2,000 points"]
    longer = run_of("Branin", "random", 0, [1.0, 1.0, 1.0], steps=3)
    assert list(bo_tables.Summary([*lines, longer]).curves["Branin"]) == ["random"]


def test_discs_step_as_their_differential_equation():
    discs = Discs()
    rng = np.random.default_rng(0)
    x, u = rng.standard_normal(6), rng.standard_normal(2)
    J, c, d = discs.inertia, discs.stiffness, discs.damping

    def slope(_, x):
        """Torques one by one."""
        angle = np.array([u[0], *x[:3], u[1]])
        twist = np.diff(angle)
        torque = [c[i + 1] * twist[i + 1] - c[i] * twist[i] - d[i] * x[3 + i] for i in range(3)]
        return [*x[3:], *(t / j for t, j in zip(torque, J, strict=True))]

    wanted = solve_ivp(slope, (0, discs.step_s), x, rtol=1e-11, atol=1e-12).y[:, -1]
    F, G = discs.discrete()
    np.testing.assert_allclose(F @ x + G @ u, wanted, rtol=1e-8)
    assert np.abs(np.linalg.eigvals(F)).max() < 1  # it comes to rest


@pytest.mark.parametrize("by", [Linearized(), Unscented()])
def test_covariances_of_the_discs_stay_positive_over_many_steps(by, as_a_user):
    """Rounding errors of one side of a covariance, if left there, grow to its size within 100 steps of this plant."""
    discs, lags = Discs(), Lags(3, 3)
    train = discs.episodes(12, np.pi, 80, 0)
    model = DynamicsModel(lags, BLLRegressor((), preset="evidence", max_epochs=40, random_state=0)).fit(train)
    window = lags.windows(discs.episodes(6, np.pi, 104, 2), 100)
    rollout = model.rollout(window.starts, window.inputs, by=by)
    assert (np.linalg.eigvalsh(rollout.cov) > 0).all()
    assert rollout.std.max() < 2


def test_reactor_steps_as_its_differential_equation():
    plant = reactor.Reactor()
    x = np.array([0.6, 345.0])

    def slope(_, x):
        r = 7.2e10 * np.exp(-8750 / x[1]) * x[0]
        return [1 - x[0] - r, 350 - x[1] + 5e4 / 239 * r + 5e4 / 23900 * (300 - x[1])]

    wanted = solve_ivp(slope, (0, 0.1), x, rtol=1e-11, atol=1e-12).y[:, -1]
    np.testing.assert_allclose(plant.step(x, 300.0), wanted, rtol=1e-8)
    model = true_model()
    model.setup()
    np.testing.assert_allclose(model._rhs_fun(x, 300.0, [], [0, 0], [], []).full()[:, 0], wanted, rtol=1e-6)


def test_the_experiments_leave_the_hot_region_unexplored_and_starts_can_be_held(as_a_user):
    assert all((episode.outputs[:-1, 1] <= reactor.INTERLOCK).all() for episode in reactor.experiments(10))
    x = reactor.starts()
    assert x.shape == (20, 2)
    for _ in range(60):
        x = reactor.Reactor().step(x, np.full(20, reactor.COOLANT[0]))
        assert (x[:, 1] < reactor.LIMIT).all()


def test_the_code_of_the_page_runs(monkeypatch, tmp_path, as_a_user):
    page = Path(__file__).parents[1] / "docs" / "control.md"
    code = blocks(page, "python")
    assert len(code) == 6
    monkeypatch.chdir(tmp_path)
    fewer = partial(BLLRegressor, max_epochs=30, n_members=1, hidden_prior=0.3)
    monkeypatch.setattr(lastlayer, "BLLRegressor", fewer)  # the code, not its patience
    names = run("\n".join(code), page)
    assert names["lower"].shape == (1, 20, 2)
    assert names["cov"].shape == names["A"].shape == (2, 2)
    assert -3 <= names["u"][0] <= 3
    assert "int pendulum(" in (tmp_path / "pendulum.c").read_text()
