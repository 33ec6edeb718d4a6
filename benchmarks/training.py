"""Time for the profiled evidence to reach the final NLML of the paper's recipe, on the paper's own data.

The recipe: the augmented evidence of Theorem 1, Adam at a constant 1e-3 for 10,000 full-batch steps; its final NLML is
the target. The contender starts from the same network with weights and noise profiled out, by L-BFGS in one call; its
clock stops at the first evaluation at or below the target. The augmented evidence under the same L-BFGS shows how much
of the ratio is due to the optimizer, which was chosen on initialisations 100 to 102: others are measured.
"""

import copy
import itertools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.paper_recipe import standardised, start
from benchmarks.runner import options_of
from benchmarks.timing import Ratio, Timing, describe_machine, print_ratios, timed
from lastlayer.data.rows import Points, Rows
from lastlayer.studies.data import paper_data
from lastlayer.training import FullBatch, Objective, Optimizer, Profiled, train

RECIPE_RATE = 1e-3
MAX_ITERATIONS = 3_000
REPEATS = 3  # repeats of the first contender, whose ratio has a target; everything else runs once
CONTENDERS = {"profiled, one-call L-BFGS": "profiled", "augmented, one-call L-BFGS": "augmented"}


class _Reached(Exception):
    """The target has been met."""


class Watched(Objective):
    """Objective that stops training at the first value at or below a target."""

    def __init__(self, inner: Objective, target: float) -> None:
        nn.Module.__init__(self)
        self.inner, self.target, self.evaluations = inner, target, 0
        self.bias_prior, self.log_alpha = inner.bias_prior, inner.log_alpha

    def forward(self, phi_tilde: Tensor, T: Tensor, sample_weight: Tensor | None) -> Tensor:
        J: Tensor = self.inner(phi_tilde, T, sample_weight)
        self.evaluations += 1
        if float(J.detach()) <= self.target:
            raise _Reached
        return J


@dataclass(frozen=True)
class Run:
    """One training run: wall and processor seconds, final NLML, and number of evaluations."""

    wall: float
    processor: float
    nlml: float
    evaluations: int
    reached: bool = True

    def __str__(self) -> str:
        seconds = f"{self.wall:7.2f} s ({self.processor:5.2f} cpu)" if self.reached else "target not reached "
        return f"{seconds}, {self.evaluations:>6,} evaluations, NLML {self.nlml:8.4f}"

    def speed(self, paper: "Run", clock: str) -> float:
        """Ratio of the recipe's time to that of this run; zero if it never reached the target."""
        return float(getattr(paper, clock) / getattr(self, clock)) if self.reached else 0.0


def evaluate(network: nn.Module, objective: Objective, data: Points) -> float:
    with torch.no_grad():
        return float(objective(network(data.X), data.T, data.weight))


def lbfgs(network: nn.Module, objective: Watched, data: Points) -> bool:
    """Run L-BFGS in one call of torch's own loop; return whether it reached the target."""
    parameters = [*network.parameters(), *objective.parameters()]
    words: dict[str, Any] = {"tolerance_grad": 0, "tolerance_change": 0, "history_size": 20}
    words |= {"max_iter": MAX_ITERATIONS, "max_eval": 10 * MAX_ITERATIONS, "line_search_fn": "strong_wolfe"}
    steps = torch.optim.LBFGS(parameters, **words)

    def closure() -> float:
        steps.zero_grad()
        J = objective(network(data.X), data.T, data.weight)
        J.backward()
        return float(J.detach())

    try:
        steps.step(closure)
    except _Reached:
        return True
    return False


def contend(network: nn.Module, objective: Objective, data: Points, target: float) -> Run:
    network, objective = copy.deepcopy(network), copy.deepcopy(objective)
    watched = Watched(objective, target)
    reached, processor, wall = timed(lambda: lbfgs(network, watched, data))
    return Run(wall, processor, evaluate(network, objective, data), watched.evaluations, reached)


def compare(seed: int, data: Points, steps: int) -> tuple[Run, dict[str, Run]]:
    initial, augmented = start(seed)
    profiled = Profiled(bias_prior="shared", noise="diagonal")
    objectives: dict[str, Objective] = {"augmented": augmented, "profiled": profiled}
    network, objective = copy.deepcopy(initial), copy.deepcopy(augmented)
    problem = FullBatch(network, objective, Rows(data))
    history, processor, wall = timed(lambda: train(problem, Optimizer(RECIPE_RATE, max_epochs=steps, cosine=False)))
    paper = Run(wall, processor, evaluate(network, objective, data), len(history.nlml))
    at_optimum = copy.deepcopy(profiled)
    with torch.no_grad():
        at_optimum.log_alpha.copy_(objective.log_alpha)
    rest = evaluate(network, at_optimum, data)
    print(f"initialisation {seed}")
    print(f"  {'augmented, Adam 1e-3':<27}{paper}  (weights and noise at their optimum: {rest:.4f})")
    runs = {}
    for i, (name, kind) in enumerate(CONTENDERS.items()):
        repeats = [contend(initial, objectives[kind], data, paper.nlml) for _ in range(1 if i else REPEATS)]
        run = runs[name] = sorted(repeats, key=lambda run: run.wall)[len(repeats) // 2]
        speeds = f"ratio {run.speed(paper, 'wall'):5.1f}, of cpu s {run.speed(paper, 'processor'):5.1f}"
        print(f"  {name:<27}{run}  {speeds}, spread {Timing.of([r.wall for r in repeats]).spread:.2f}", flush=True)
    return paper, runs


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--initialisations", type=int, default=5, help="number of initialisations")
    parser.add_argument("--first", type=int, default=0, help="seed of the first initialisation")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the recipe")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    *_, data, _ = standardised(paper_data())
    print(f"{describe_machine()}; float64\n")
    results = [compare(options.first + i, data, options.steps) for i in range(options.initialisations)]
    median = lambda name, clock: statistics.median(runs[name].speed(paper, clock) for paper, runs in results)
    targets = {(next(iter(CONTENDERS)), "processor"): 8}
    asked = itertools.product(CONTENDERS, ("processor", "wall"))
    named = [(f"recipe / {name}, {clock}", median(name, clock), targets.get((name, clock))) for name, clock in asked]
    print_ratios([Ratio("training, median", *each) for each in named])


if __name__ == "__main__":
    main()
