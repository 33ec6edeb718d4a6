"""Plant, data, constraint, cost and the 20 starts of the control study.

The plant is a stirred tank in which A turns into B and heats it; the coolant temperature is the input. Above some
temperature the reaction runs away within seconds. The contents of this file were fixed before the first controller was
written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.dynamics import Episode

STEP_MIN = 0.1  # minutes between samples; the coolant is held in between
COOLANT = (280.0, 320.0)  # lowest and highest coolant temperature, K
COOLANT_START = 295.0  # coolant temperature before the first step of a run, K
LIMIT = 360.0  # constraint: upper limit of the reactor temperature, K
INTERLOCK = 350.0  # measured temperature at which identification experiments end, so that there are no data above it, K
WANTED = 0.35  # target concentration of A, mol/l; the reactor's steady state is then at about 359 K
NOISE_STD = np.array([0.005, 0.3])  # noise of the measured concentration and temperature
RUN_STEPS = 50
N_STARTS = 20

State = Float[ndarray, "*b 2"]


@dataclass(frozen=True)
class Reactor:
    """dc/dt = (1 - c) - r,  dT/dt = (T_feed - T) + heat r + cooling (T_coolant - T),  r = k0 exp(-E/R / T) c."""

    k0_per_min: float = 7.2e10
    activation_k: float = 8750.0
    feed_k: float = 350.0
    heat_k_l_per_mol: float = 5e4 / 239.0  # heat of reaction divided by density and heat capacity
    cooling_per_min: float = 5e4 / (100.0 * 239.0)
    substeps: int = 40

    def slope(self, x: State, coolant: float | Float[ndarray, "*b"]) -> State:
        c, T = x[..., 0], x[..., 1]
        rate = self.k0_per_min * np.exp(-self.activation_k / T) * c
        dT = (self.feed_k - T) + self.heat_k_l_per_mol * rate + self.cooling_per_min * (coolant - T)
        return np.stack([(1 - c) - rate, dT], axis=-1)

    def step(self, x: State, coolant: float | Float[ndarray, "*b"]) -> State:
        return runge_kutta(lambda x: self.slope(x, coolant), x, STEP_MIN, self.substeps)


def runge_kutta(slope: Callable[[Any], Any], x: Any, time: float, steps: int) -> Any:
    h = time / steps
    for _ in range(steps):
        a = slope(x)
        b = slope(x + 0.5 * h * a)
        c = slope(x + 0.5 * h * b)
        x = x + h / 6 * (a + 2 * b + 2 * c + slope(x + h * c))
    return x


def measure(x: State, rng: np.random.Generator, noise_std: Float[ndarray, "2"] = NOISE_STD) -> State:
    noisy: ndarray = x + noise_std * rng.standard_normal(x.shape)
    return noisy


def experiments(n: int = 30, steps: int = 40, seed: int = 0) -> list[Episode]:
    """Simulate identification episodes: random starts and coolant steps, each ended by the interlock."""
    rng, reactor = np.random.default_rng(seed), Reactor()
    episodes: list[Episode] = []
    while len(episodes) < n:
        x = rng.uniform([0.5, 310.0], [1.0, 345.0])
        held = np.repeat(rng.uniform(285.0, 312.0, steps), rng.integers(3, 12, steps))[:steps]
        outputs, inputs = [measure(x, rng)], []
        for coolant in held:
            x = reactor.step(x, coolant)
            inputs.append(coolant)
            outputs.append(measure(x, rng))
            if outputs[-1][1] > INTERLOCK:
                break
        if len(inputs) >= 3:
            episodes.append(Episode.of(np.stack(outputs), np.array(inputs)))
    return episodes


def starts() -> Float[ndarray, "20 2"]:
    """Initial states of the runs, from which full cooling can keep the constraint."""
    return np.random.default_rng(2024).uniform([0.6, 315.0], [0.95, 340.0], (N_STARTS, 2))


def stage_cost(c: Float[ndarray, "*b"], coolant_change: Float[ndarray, "*b"]) -> Float[ndarray, "*b"]:
    cost: ndarray = 100 * np.square(c - WANTED) + 1e-3 * np.square(coolant_change)
    return cost


@dataclass(frozen=True, eq=False)
class Run:
    states: Float[ndarray, "t1 2"]
    coolant: Float[ndarray, " t"]

    @property
    def cost(self) -> float:
        changes = np.diff(self.coolant, prepend=COOLANT_START)
        return float(stage_cost(self.states[1:, 0], changes).sum())

    @property
    def violations(self) -> Float[ndarray, " t"]:
        return (self.states[1:, 1] > LIMIT).astype(float)


def closed_loop(
    controller: Callable[[State], float], start: State, *, seed: int, steps: int, noise_std: Float[ndarray, "2"]
) -> Run:
    """Run a controller on noisy measurements; for the same seed, all controllers get the same noise."""
    rng, reactor = np.random.default_rng(seed), Reactor()
    x, states, inputs = start, [start], []
    for _ in range(steps):
        coolant = float(np.clip(controller(measure(x, rng, noise_std)), *COOLANT))
        x = reactor.step(x, coolant)
        states.append(x)
        inputs.append(coolant)
    return Run(np.stack(states), np.array(inputs))
