"""Bayesian optimisation beside BoTorch's models: hours on one core (docs/bo.md).

Every run is saved when it is done; a second call runs only what is missing. At the end, and after an interruption,
`tables.md`, `scores.csv` and `bo.png` are made of all results in the folder.
"""

from benchmarks import runner
from benchmarks.bo import tables
from benchmarks.bo.methods import METHODS, Job, Result
from benchmarks.bo.problems import PROBLEMS
from lastlayer.errors import InputError

TIMING_SEEDS = 3


def jobs(problems: str | None, methods: str | None, seeds: int, steps: int | None) -> list[Job]:
    chosen = runner.named("problem", problems, PROBLEMS)
    present = runner.installed(runner.named("method", methods, METHODS))
    return [
        Job(problem.name, method.name, seed, min(problem.n_steps, steps or problem.n_steps))
        for seed in range(seeds)
        for problem in sorted(chosen, key=lambda each: -each.n_steps)  # long runs first: no core is idle at the end
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
    store = runner.Store(asked.out / "results.jsonl", Result)

    def write(_: object) -> None:
        results = list(store.results.values())
        summary = tables.Summary(results)
        texts = {"tables.md": tables.as_markdown(summary), "scores.csv": tables.scores_csv(results)}
        runner.write_files(asked.out, texts, {"bo.png": tables.picture(summary)} if summary.ranked else {})
        for table in tables.TABLES:
            print(runner.aligned(table(summary)))

    runner.complete(tasks, store, write, again=asked.again, processes=asked.processes)


if __name__ == "__main__":
    main()
