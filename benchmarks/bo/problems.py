"""Functions to maximise on the unit cube, and the regret of a run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.test_functions import Ackley, Branin, BraninCurrin, Hartmann
from botorch.utils.multi_objective.hypervolume import Hypervolume
from jaxtyping import Float
from torch import Tensor

Evaluate = Callable[[Float[Tensor, "n d"]], Float[Tensor, "n o"]]


@dataclass(frozen=True)
class Problem:
    """A noise-free function on the unit cube, and the budget of a run."""

    name: str
    note: str
    n_inputs: int
    n_initial: int  # number of initial Sobol points, the same for every method
    n_steps: int
    make: Callable[[int], Evaluate]  # the function for one seed
    best: float  # the maximum, or the hypervolume of the true Pareto front
    reference: tuple[float, ...] = ()
    """Reference point of the hypervolume, with the signs of the values; empty for one objective."""
    timing: bool = False
    """Whether the problem only measures the time of a step: it then has three seeds, and its regret is not ranked."""

    @property
    def n_outputs(self) -> int:
        return max(1, len(self.reference))

    def regret(self, Y: Float[Tensor, "n o"]) -> list[float]:
        if not self.reference:
            return (self.best - Y[:, 0].cummax(0).values).tolist()
        volume = Hypervolume(torch.tensor(self.reference, dtype=Y.dtype))
        return [self.best - float(volume.compute(_front(Y[: i + 1]))) for i in range(len(Y))]


def _front(Y: Float[Tensor, "n o"]) -> Float[Tensor, "k o"]:
    """Points that no other point dominates."""
    better = (Y[:, None] >= Y).all(-1) & (Y[:, None] > Y).any(-1)
    return Y[~better.any(0)]


def _scaled(function: Branin | Hartmann | Ackley | BraninCurrin) -> Evaluate:
    low, high = function.bounds.double()

    def evaluate(X: Tensor) -> Tensor:
        values = -function._evaluate_true(low + X * (high - low))
        return values if values.dim() > 1 else values[:, None]

    return evaluate


def _rotated(seed: int) -> Evaluate:
    """Hartmann's function of six orthogonal directions among 200, drawn by the seed; the best point lies in the box."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(200, 6, generator=generator, dtype=torch.float64)).Q
    inner = Hartmann(6)
    return lambda X: -inner._evaluate_true(((2 * X - 1) @ Q + 1) / 2)[:, None]


def _ackley(seed: int) -> Evaluate:
    return _scaled(Ackley(20, bounds=[(-5.0, 10.0)] * 20))


HARTMANN, FRONT = 3.32237, 59.36011874867746
TWO = "two objectives; regret is the missing hypervolume"
TIMED = "Hartmann6 with 2,000 observations: the time of one step"
TURNED = "Hartmann6 of six orthogonal directions of [-1, 1]^200; every seed draws other directions"
PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("Branin", "2 inputs", 2, 10, 30, lambda _: _scaled(Branin()), -0.397887),
        Problem("Hartmann6", "6 inputs", 6, 10, 50, lambda _: _scaled(Hartmann(6)), HARTMANN),
        Problem("Ackley20", "20 inputs in [-5, 10]: the best point is not the centre", 20, 20, 60, _ackley, 0.0),
        Problem("rotated200", TURNED, 200, 20, 60, _rotated, HARTMANN),
        Problem("BraninCurrin", TWO, 2, 10, 30, lambda _: _scaled(BraninCurrin()), FRONT, (-18.0, -6.0)),
        Problem("2,000 points", TIMED, 6, 2000, 1, lambda _: _scaled(Hartmann(6)), HARTMANN, timing=True),
    )
}
