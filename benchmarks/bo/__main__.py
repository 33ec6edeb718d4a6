"""Bayesian optimisation beside BoTorch's models: hours on one core (docs/bo.md).

Every run is saved when it is done; a second call runs only what is missing. At the end, and after an interruption,
`tables.md`, `scores.csv` and `bo.png` are made of all results in the folder.
"""

import time
from dataclasses import dataclass

import torch

from benchmarks import runner
from benchmarks.bo import tables
from benchmarks.bo.methods import METHODS, initial_points
from benchmarks.bo.problems import PROBLEMS
from benchmarks.bo.tables import Result
from lastlayer.errors import InputError
from lastlayer.studies.paper import check_folder

TIMING_SEEDS = 3


@dataclass(frozen=True)
class Job:
    """One run, identified by names only so that any process can execute it."""

    problem: str
    method: str
    seed: int
    n_steps: int

    def __str__(self) -> str:
        return f"{self.method} on {self.problem}, seed {self.seed}"

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Results of another configuration are not reused."""
        config = f"{PROBLEMS[self.problem].n_initial} + {self.n_steps}, {METHODS[self.method].config}"
        return self.problem, self.method, self.seed, config

    def run(self) -> Result:
        torch.set_num_threads(1)
        problem, method = PROBLEMS[self.problem], METHODS[self.method]
        function, optimiser = problem.make(self.seed), method.make(problem, self.seed)
        torch.manual_seed(self.seed)
        X = initial_points(problem, self.seed, problem.n_initial)
        Y, seconds = function(X), []
        for _ in range(self.n_steps):
            start = time.process_time()
            x = optimiser.propose(X, Y)
            seconds.append(round(time.process_time() - start, 4))
            X, Y = torch.cat([X, x]), torch.cat([Y, function(x)])
        return Result(*self.key, problem.regret(Y), seconds, runner.versions(method.packages))


def jobs(problems: str | None, methods: str | None, seeds: int, steps: int | None) -> list[Job]:
    chosen, present = (
        runner.named("problem", problems, PROBLEMS),
        runner.installed(runner.named("method", methods, METHODS)),
    )
    return [
        Job(problem.name, method.name, seed, min(problem.n_steps, steps or problem.n_steps))
        for seed in range(seeds)
        for problem in sorted(
            chosen, key=lambda problem: -problem.n_steps
        )  # long runs first: no core is idle at the end
        for method in present
        if not problem.timing or (seed < TIMING_SEEDS and not method.slow)
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = runner.options_of(__doc__, out="results/bo", again=True)
    parser.add_argument("--problems", help="comma-separated problems; default: all")
    parser.add_argument("--methods", help="comma-separated methods; default: all")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each method on each problem")
    parser.add_argument("--steps", type=int, help="maximum number of steps per run, for a trial")
    parser.add_argument("--processes", type=int, default=1, help="runs in parallel, with one thread each")
    asked = parser.parse_args(arguments)
    with runner.helpful():
        if min(asked.seeds, asked.processes, asked.steps or 1) < 1:
            raise InputError("--seeds, --steps and --processes: each must be 1 or more")
        tasks = jobs(asked.problems, asked.methods, asked.seeds, asked.steps)
        check_folder(asked.out)
    store, failed = runner.Store(asked.out / "results.jsonl", Result), []
    try:
        for outcome in runner.perform(tasks, store, again=asked.again, processes=asked.processes):
            failed += [outcome] if outcome.failed else []
    finally:  # an interrupted run also writes its tables
        results = list(store.results.values())
        summary = tables.Summary(results)
        texts = {"tables.md": tables.as_markdown(summary), "scores.csv": tables.scores_csv(results)}
        ranked = any(problem.ranked for problem in summary.problems)
        runner.write_files(asked.out, texts, {"bo.png": tables.picture(summary)} if ranked else {})
    for table in tables.TABLES:
        runner.print_rows(table(summary))
    runner.tell(failed)


if __name__ == "__main__":
    main()
