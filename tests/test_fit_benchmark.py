"""The benchmark of costs against rows: its function, what one measurement holds, the loop, the table, the command."""

import json
import subprocess
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.fit import methods
from benchmarks.fit import run as loop
from benchmarks.fit.__main__ import app
from benchmarks.fit.data import NOISE, ORACLE_CRPS, ORACLE_LPD, function, make_rows
from benchmarks.fit.measure import Result, in_a_process, measure, open_store, read, this_machine
from benchmarks.fit.methods import METHODS, unable
from benchmarks.fit.picture import COLOURS, picture
from benchmarks.fit.tables import table
from benchmarks.uci import gaussian_boosting
from benchmarks.uci.protocol import Gaussians, Method, Scores, Task, hold_out, score

pytestmark = pytest.mark.usefixtures("as_a_user")


def method(name, modules=()):
    """The mean of the training targets, whatever the input."""

    def fit(X, y, task):
        return lambda X: Gaussians(np.full((1, len(X)), y.mean()), np.full((1, len(X)), y.var()))

    return Method(name, "other", "not at all", fit, modules=modules)


def result(name, rows, *, seconds=1.0, cpu=2.0):
    scores = Scores(-2.0, 1.0, 0.5, 0.9, 0.0)
    return Result(name, "1", rows, 1, this_machine(), 0.5, cpu, seconds, 3.0, 40.0, scores, {"torch": "2"})


def measured(calls, **seconds):
    """Takes so long for each row of a method."""

    def stands_in(method, rows, threads):
        calls.append((rows, method.name))
        if seconds[method.name] is None:
            raise ChildProcessError("no luck")
        return result(method.name, rows, seconds=seconds[method.name] * rows)

    return stands_in


# data -----------------------------------------------------------------------------------------------------------------


def test_fewer_rows_are_the_first_of_more_and_seeds_differ():
    X, y = make_rows(50, 0)
    for part, whole in zip(make_rows(20, 0), (X, y), strict=True):
        np.testing.assert_array_equal(part, whole[:20])
    assert not np.isin(make_rows(20, 1)[0], X).any()


def test_the_function_has_a_step_and_columns_that_do_nothing():
    X = make_rows(100, 0)[0]
    other = X.copy()
    other[:, 6:] = 1 - X[:, 6:]
    np.testing.assert_array_equal(function(X), function(other))
    low, high = X.copy(), X.copy()
    low[:, 5], high[:, 5] = 0.599, 0.601
    np.testing.assert_allclose(function(high) - function(low), 5.0)


def test_the_function_itself_scores_as_said():
    X, y = make_rows(20_000, 1)
    scores = score(Gaussians(function(X)[None], np.full((1, len(X)), NOISE**2)), y)
    assert scores.lpd == pytest.approx(ORACLE_LPD, abs=0.02)
    assert scores.crps == pytest.approx(ORACLE_CRPS, abs=0.02)


# one measurement ------------------------------------------------------------------------------------------------------


def test_a_measurement_counts_the_asked_rows_and_survives_its_file(tmp_path):
    sizes = []
    mean = method("lastlayer")

    def fit(X, y, task):
        sizes.append(len(X))
        return mean.fit(X, y, task)

    found = measure(replace(mean, fit=fit), 80, torch.get_num_threads())
    assert sizes == [60, 80]  # a small fit first
    assert found.rows == 80
    assert min(found.seconds, found.cpu_seconds) >= 0
    assert min(found.row_us, found.single_us) > 0
    assert found.scores.rmse == pytest.approx(np.std(make_rows(2_000, 1)[1]), rel=0.05)
    open_store(tmp_path).append(found)
    assert open_store(tmp_path).results == {found.key: found}
    assert (tmp_path / "fit.jsonl").exists()
    assert read(asdict(found)) == found


def test_a_process_of_its_own_brings_its_result_or_its_error(monkeypatch):
    printed, stood_in = [], result("lastlayer", 30)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: printed.append(command) or done)
    done = SimpleNamespace(returncode=0, stdout="a warning\n" + json.dumps(asdict(stood_in)))
    assert in_a_process(METHODS["lastlayer"], 30, 1) == stood_in
    assert printed[0][-3:] == ["lastlayer", "30", "1"]
    monkeypatch.undo()
    with pytest.raises(ChildProcessError, match="KeyError: 'nobody'"):
        in_a_process(method("nobody"), 60, 1)


def test_trees_are_chosen_by_the_lowest_loss_on_held_out_rows():
    seen = []

    def losses(depth, fit, held):
        seen.append((depth, len(fit), len(held)))
        return {3: [2.0, 1.0, 1.5], 5: [1.2, 1.1, 1.1]}[depth]

    assert gaussian_boosting._chosen(losses, (3, 5), 50, Task("fit", "given", 0)) == (3, 2)
    assert seen == [(3, 40, 10), (5, 40, 10)]
    assert len(hold_out(50, 0)[1]) == 10


def test_what_cannot_be_done_is_told(monkeypatch):
    monkeypatch.setattr(methods, "free_memory", lambda: 20.0)
    exact = replace(METHODS["exact GP"], modules=())
    assert unable(exact, 10_000) is None
    assert unable(exact, 100_000) == "needs about 1,360 GB of memory, 20 GB are free"
    monkeypatch.setattr(methods, "free_memory", lambda: 10.0)
    assert unable(exact, 10_000) == "needs about 14 GB of memory, 10 GB are free"
    assert unable(method("a", modules=("surely_not_installed",)), 300) == (
        "needs surely_not_installed; make bench-fit installs it"
    )
    assert unable(method("a"), 100_000) is None
    monkeypatch.undo()
    assert methods.free_memory() > 0


# the loop -------------------------------------------------------------------------------------------------------------


def test_a_second_run_does_only_what_is_missing(tmp_path):
    calls = []
    a, b = method("a"), method("b")
    some = {"threads": 1, "limit": 1e9, "measure": measured(calls, a=1e-3, b=1e-3)}
    first = list(loop.run([a, b], [1000, 300], open_store(tmp_path), **some))
    assert calls == [(300, "a"), (300, "b"), (1000, "a"), (1000, "b")]
    again = list(loop.run([a, b], [300, 1000, 3000], open_store(tmp_path), **some))
    assert calls[4:] == [(3000, "a"), (3000, "b")]
    assert again[:4] == first
    list(loop.run([a], [300], open_store(tmp_path), **some, again=True))
    list(loop.run([replace(a, config="2")], [300], open_store(tmp_path), **some))
    list(loop.run([a], [300], open_store(tmp_path), **{**some, "threads": 2}))
    assert calls[6:] == [(300, "a")] * 3  # another configuration or number of threads is another result


def test_a_method_beyond_the_limit_is_not_asked_for_more_rows(tmp_path):
    calls = []
    some = {"threads": 1, "limit": 50.0, "measure": measured(calls, slow=0.1, quick=1e-3)}
    chosen = [method("slow"), method("quick")]
    for _ in range(2):  # the second time from the file
        found = list(loop.run(chosen, [300, 1000, 3000], open_store(tmp_path), **some))
        assert calls == [(300, "slow"), (300, "quick"), (1000, "slow"), (1000, "quick"), (3000, "quick")]
        assert found[4] == loop.Outcome(
            3000, "slow", why_not="100 s for 1,000 rows, above the limit of 50 s", failed=False
        )


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path, capsys):
    some = {"threads": 1, "limit": 1e9, "measure": measured([], broken=None, a=1e-3)}
    broken, fine = loop.run([method("broken"), method("a")], [300], open_store(tmp_path), **some, progress=True)
    assert broken.failed
    assert str(broken) == "not measured: ChildProcessError: no luck"
    assert fine.result is not None
    assert len(open_store(tmp_path).results) == 1
    assert "300 rows, broken: " in capsys.readouterr().out


# table and picture ----------------------------------------------------------------------------------------------------


def test_the_table_has_ratios_at_each_size_and_reasons():
    outcomes = [
        loop.Outcome(300, "lastlayer", result("lastlayer", 300, cpu=4.0)),
        loop.Outcome(300, "NGBoost", result("NGBoost", 300, cpu=2.0)),
        loop.Outcome(1000, "NGBoost", result("NGBoost", 1000, cpu=6.0)),
        loop.Outcome(1000, "exact GP", why_not="too large"),
    ]
    head, _, columns, *lines = table(outcomes).splitlines()
    assert "1 thread(s), load 0.5 to 0.5" in head
    assert len(columns) == len(lines[0])
    assert lines[0].split() == ["300", "lastlayer", "4.0", "1.0", "1.00", "-2.000", "0.500", "3.0", "40"]
    assert lines[1].split()[:4] == ["NGBoost", "2.0", "1.0", "0.50"]
    assert lines[2].split()[:5] == ["1,000", "NGBoost", "6.0", "1.0", "-"]  # nothing to compare with
    assert lines[3].split(maxsplit=2) == ["exact", "GP", "not measured: too large"]
    assert f"{ORACLE_LPD:.3f} and {ORACLE_CRPS:.3f}" in table(outcomes)
    assert "nothing measured" in table(outcomes[3:])


def test_the_picture_names_every_line_at_its_end_and_none_over_another(tmp_path):
    assert set(COLOURS) == set(METHODS)
    results = [result(name, rows, cpu=rows / 100) for name in METHODS for rows in (300, 1000)]
    figure = picture([*results, result("CatBoost", 3000, cpu=30.0)])
    (ax,) = figure.axes
    assert {text.get_text() for text in ax.texts} == set(METHODS)
    places = sorted(text.xy for text in ax.texts)
    assert len({round(x, 6) for x, _ in places}) == 2
    assert np.diff([y for _, y in places[:-1]]).min() > 0.05
    figure.savefig(tmp_path / "x.png")


# command --------------------------------------------------------------------------------------------------------------


def test_the_command_writes_table_and_picture_and_fails_softly(tmp_path, monkeypatch):
    chosen = {name: replace(one, modules=()) for name, one in METHODS.items()}
    monkeypatch.setattr(methods, "METHODS", chosen)
    stands_in = measured([], lastlayer=1e-3, NGBoost=None)
    monkeypatch.setattr(loop, "run", partial(loop.run, measure=stands_in))
    words = ["--rows", "300,1000", "--methods", "lastlayer,NGBoost", "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 1
    assert "not measured: ChildProcessError: no luck" in answer.output
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"fit.jsonl", "fit.png", "fit.txt"}
    assert (tmp_path / "out" / "fit.txt").read_text() in answer.output
    assert CliRunner().invoke(app, [*words[:3], "lastlayer", *words[4:]]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "lastlayr"], "did you mean 'lastlayer'"),
        (["--rows", "many"], "such as 300,1000"),
        (["--rows", "10"], "must be 60 or more"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(tmp_path, words, message):
    answer = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert answer.exit_code
    assert message in " ".join(answer.output.split())
