"""Three discs in a row, joined by springs to each other and to two motors: the plant of the spring study."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.linalg import expm

from lastlayer.dynamics import Episode

NOISE_STD = (0.1, 0.05, 0.01)  # noise of the three measured angles, rad


@dataclass(frozen=True)
class Discs:
    """inertia * angle'' = torques of the springs to both sides - damping * angle'; the motors hold the outer ends."""

    inertia: tuple[float, float, float] = (2.25e-4, 2.25e-4, 2.25e-4)  # kg m^2
    stiffness: tuple[float, float, float, float] = (2.70e-3, 2.66e-3, 3.05e-3, 2.86e-3)
    """N m / rad: motor 1 to disc 1, disc 1 to 2, 2 to 3, 3 to motor 2."""
    damping: tuple[float, float, float] = (6.78e-5, 8.01e-5, 8.82e-5)  # N m s / rad
    step_s: float = 0.1

    def continuous(self) -> tuple[Float[ndarray, "6 6"], Float[ndarray, "6 2"]]:
        """d/dt [angles, speeds] = A x + B [motor angles]."""
        c, J = self.stiffness, np.diag(self.inertia)
        K = np.diag([c[0] + c[1], c[1] + c[2], c[2] + c[3]]) - np.diag(c[1:3], 1) - np.diag(c[1:3], -1)
        ends = np.zeros((3, 2))
        ends[0, 0], ends[2, 1] = c[0], c[3]
        speeds = np.hstack([-np.linalg.solve(J, K), -np.linalg.solve(J, np.diag(self.damping))])
        A = np.vstack([np.hstack([np.zeros((3, 3)), np.eye(3)]), speeds])
        return A, np.vstack([np.zeros((3, 2)), np.linalg.solve(J, ends)])

    def discrete(self) -> tuple[Float[ndarray, "6 6"], Float[ndarray, "6 2"]]:
        """Discretise exactly over one step with the motors held, by one matrix exponential."""
        A, B = self.continuous()
        both = expm(self.step_s * np.block([[A, B], [np.zeros((2, 8))]]))
        return both[:6, :6], both[:6, 6:]

    def episode(self, amplitude: float, steps: int, seed: int) -> Episode:
        """Simulate motors that jump to uniform angles at random times; angles are measured with noise."""
        rng = np.random.default_rng(seed)
        F, G = self.discrete()
        jumps = rng.random((steps, 2)) < 0.25
        jumps[0] = True
        wanted = rng.uniform(-amplitude, amplitude, (steps, 2))
        last = np.maximum.accumulate(np.where(jumps, np.arange(steps)[:, None], 0))
        inputs = np.take_along_axis(wanted, last, axis=0)
        x, angles = np.zeros(6), [np.zeros(3)]
        for u in inputs:
            x = F @ x + G @ u
            angles.append(x[:3])
        measured = np.stack(angles) + rng.standard_normal((steps + 1, 3)) * NOISE_STD
        return Episode.of(measured, inputs)

    def episodes(self, n: int, amplitude: float, steps: int, seed: int) -> list[Episode]:
        return [self.episode(amplitude, steps, 1000 * seed + i) for i in range(n)]
