"""The benchmark of Bayesian optimisation: problems by what is known of them, runs, ranks by hand, the command."""

import json

import numpy as np
import pytest
import torch
from helpers import close
from typer.testing import CliRunner

from benchmarks.bo import command, methods, run, tables
from benchmarks.bo.__main__ import app
from benchmarks.bo.problems import PROBLEMS
from lastlayer.errors import InputError

pytestmark = pytest.mark.usefixtures("as_a_user")


def result(problem, method, seed, regret, steps=2):
    return run.Result(problem, method, seed, "1", [*([9.0] * 3), *regret], [0.5] * steps, {})


# problems -------------------------------------------------------------------------------------------------------------


def test_the_best_points_are_in_the_box_and_no_other_is_better(generator):
    for name, best in {
        "Branin": [[0.5427727, 0.1516667]],
        "Hartmann6": [[0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573]],
        "Ackley20": [[1 / 3] * 20],
    }.items():
        problem = PROBLEMS[name]
        function = problem.make(0)
        assert float(function(torch.tensor(best, dtype=torch.float64))) == pytest.approx(problem.best, abs=2e-5)
        X = torch.rand(500, problem.n_inputs, generator=generator, dtype=torch.float64)
        assert bool((function(X) < problem.best).all())


def test_the_rotated_problem_depends_on_six_directions_and_on_the_seed(generator):
    problem = PROBLEMS["rotated200"]
    X = torch.rand(300, 200, generator=generator, dtype=torch.float64, requires_grad=True)
    for seed in (0, 1):
        (slope,) = torch.autograd.grad(problem.make(seed)(X).sum(), X)
        assert int(torch.linalg.matrix_rank(slope, rtol=1e-8)) == 6
    assert bool((problem.make(0)(X) != problem.make(1)(X)).any())
    u = torch.tensor([[0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573]], dtype=torch.float64)
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


# runs -----------------------------------------------------------------------------------------------------------------


def test_every_method_begins_with_the_same_points_and_runs():
    for method in methods.METHODS:
        if method == "VBLL":
            continue
        outcome = run.evaluate(run.Task("Branin", method, 0, 1))
        assert len(outcome.regret) == 11
        assert len(outcome.seconds) == 1
        assert outcome.regret[:10] == run.evaluate(run.Task("Branin", "random", 0, 1)).regret[:10]


def test_two_objectives_and_vbll_run(monkeypatch):
    monkeypatch.setattr(methods, "VBLL_EPOCHS", {"first": 2, "later": 1})
    monkeypatch.setattr(methods, "RAW_SAMPLES", 8)
    monkeypatch.setattr(methods, "DRAWS", 4)
    # else BoTorch compiles a kernel of its own, which takes half a minute where it was never used before
    monkeypatch.setattr("botorch.acquisition.multi_objective.logei._load_attempted", True)
    for problem, method in (("Branin", "VBLL"), ("BraninCurrin", "VBLL"), ("BraninCurrin", "lastlayer")):
        outcome = run.evaluate(run.Task(problem, method, 0, 2 if method == "VBLL" else 1))
        assert np.isfinite(outcome.regret).all()


def test_random_points_go_on_with_the_sequence():
    problem = PROBLEMS["Hartmann6"]
    X = methods.initial_points(problem, 4, 12)
    close(methods.Sobol(problem, 4).propose(X[:11], X[:11, :1]), X[11:])


def test_what_is_there_is_not_done_again_and_failures_are_told(tmp_path, monkeypatch):
    calls = []

    def outcome(task):
        calls.append(task.method)
        if task.method == "VBLL":
            raise RuntimeError("no luck")
        return run.Result(task.problem, task.method, task.seed, task.key[-1], [1.0], [0.1], {})

    monkeypatch.setattr(run, "evaluate", outcome)
    asked = command.Asked.parse(problems="Branin", methods="random,VBLL", seeds=1, out=tmp_path)
    failures = command.run(asked)
    assert [str(f) for f in failures] == ["VBLL on Branin, seed 0: RuntimeError: no luck"]
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"cut": "off')
    command.run(asked)
    assert calls == ["random", "VBLL", "VBLL"]
    assert len(run.open_store(tmp_path).results) == 1


def test_processes_of_their_own_give_the_same(tmp_path):
    words = {"problems": "Branin", "methods": "random", "seeds": 2, "steps": 2}
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        assert command.run(command.Asked.parse(**words, processes=n, out=tmp_path / str(n))) == []
    one, two = (run.open_store(tmp_path / str(n)).results for n in (1, 2))
    assert {key: r.regret for key, r in one.items()} == {key: r.regret for key, r in two.items()}


# tables ---------------------------------------------------------------------------------------------------------------


def test_ranks_are_of_the_last_regret_seed_by_seed():
    lines = [
        result("Branin", "lastlayer", 0, [5.0, 1.0]),
        result("Branin", "lastlayer", 1, [5.0, 3.0]),
        result("Branin", "lastlayer", 2, [5.0, 0.0]),  # a seed that the other has not done
        result("Branin", "random", 0, [5.0, 2.0]),
        result("Branin", "random", 1, [5.0, 3.0]),
        result("2,000 points", "lastlayer", 0, [9.0, 9.0]),
    ]
    summary = tables.Summary(lines)
    assert summary.ranks(PROBLEMS["Branin"]) == {"lastlayer": 1.25, "random": 1.75}
    assert summary.average_ranks() == {"lastlayer": 1.25, "random": 1.75}
    assert tables.regret_table(summary) == [
        ["last regret", "Branin", "rank"],
        ["lastlayer", "1 (0.5, 2)", "1.25"],
        ["random", "2.5 (2.2, 2.8)", "1.75"],
    ]
    assert tables.seconds_table(summary)[0] == ["seconds per step", "Branin", "2,000 points"]
    longer = result("Branin", "random", 0, [1.0, 1.0, 1.0], steps=3)
    assert tables.Summary([*lines, longer]).of(PROBLEMS["Branin"], methods.METHODS["lastlayer"]) is None


def test_the_command_writes_tables_and_picture(tmp_path):
    words = ["--problems", "Branin", "--methods", "random", "--seeds", "2", "--steps", "2"]
    answer = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout.splitlines()[-1])["failures"] == []
    names = {"results.jsonl", "scores.csv", "tables.md", "bo.png"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names


def test_wrong_words_are_told(tmp_path):
    with pytest.raises(InputError, match="each must be 1 or more"):
        command.Asked.parse(seeds=0, out=tmp_path)
    with pytest.raises(InputError, match="did you mean 'Branin'"):
        command.Asked.parse(problems="Brainin", out=tmp_path)
    with pytest.raises(InputError, match="empty list"):
        command.Asked.parse(problems=" , ", out=tmp_path)
    asked = command.Asked.parse(problems="2,000 points,Branin", seeds=1, out=tmp_path)
    assert [str(task) for task in asked.tasks if task.problem == "2,000 points"] == [
        "lastlayer on 2,000 points, seed 0",
        "SingleTaskGP on 2,000 points, seed 0",
        "random on 2,000 points, seed 0",
    ]
