"""Predictive control of a reactor identified below 350 K, whose best operating point is near its limit of 360 K.

`python -m benchmarks.control_studies.mpc` runs four controllers from 20 starts, prints the table and writes it with its
figures into a folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy import ndarray

from benchmarks.control_studies import controllers, reactor
from benchmarks.control_studies.controllers import HORIZON, KINDS, Timed, learn, make_controller
from benchmarks.runner import helpful, markdown, options_of, write_files
from lastlayer.dynamics import DynamicsModel, Episode
from lastlayer.integrations.do_mpc import trust_limit
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE


@dataclass(frozen=True, eq=False)
class Result:
    runs: list[reactor.Run]
    seconds: ndarray  # wall seconds of every step, including propagation of the covariance
    unsolved: int

    @property
    def runs_violated(self) -> int:
        return sum(bool(run.violations.any()) for run in self.runs)

    def cells(self) -> list[str]:
        cost, hottest = np.mean([run.cost for run in self.runs]), max(run.states[:, 1].max() for run in self.runs)
        rate, times = np.mean([run.violations.mean() for run in self.runs]), 1e3 * self.seconds
        found = [f"{cost:.0f}", f"{rate:.1%}", f"{self.runs_violated} of {len(self.runs)}", f"{hottest:.1f}"]
        return [*found, f"{np.median(times):.0f}", f"{times.max():.0f}", f"{self.unsolved} of {len(times)}"]


def run_controller(kind: str, controller: Timed, numbers: Sequence[int], steps: int) -> Result:
    """Run closed loops from the given starts; all controllers get the same noise, except the true plant's."""
    noise_std, runs = np.zeros(2) if kind == "true plant" else reactor.NOISE_STD, []
    for i in numbers:
        controller.reset()
        runs.append(reactor.closed_loop(controller, reactor.starts()[i], seed=i, steps=steps, noise_std=noise_std))
    return Result(runs, np.array(controller.seconds), controller.unsolved)


def run(
    folder: Path,
    starts: int,
    max_epochs: int,
    n_experiments: int = 30,
    steps: int = reactor.RUN_STEPS,
    horizon: int = HORIZON,
) -> str:
    episodes = reactor.experiments(n_experiments)
    dynamics = learn(episodes, max_epochs=max_epochs)
    print(f"learned: {dynamics.regressor_.calibration_}", flush=True)
    results = {}
    for kind in KINDS:
        controller = make_controller(kind, dynamics, horizon=horizon)
        results[kind] = run_controller(kind, controller, range(starts), steps)
        print(f"{kind}: done", flush=True)
    text = report(results)
    figures = {"mpc-runs.png": over_time(results), "mpc-plane.png": in_the_plane(results, dynamics, episodes)}
    write_files(folder, {"mpc.md": text + "\n"}, figures)
    return text


def report(results: dict[str, Result]) -> str:
    columns = ("controller", "cost per run", "steps above the limit", "runs with any", "hottest / K")
    head = [*columns, "median ms per step", "slowest ms", "unsolved steps"]
    runs = next(iter(results.values())).runs
    notes = (
        f"{len(runs)} runs of {len(runs[0].coolant)} steps of {reactor.STEP_MIN} min, limit {reactor.LIMIT:.0f} K, "
        f"target concentration {reactor.WANTED} mol/l. All controllers get the same starts and noise; the true plant's "
        f"controller knows the plant and its state exactly. Chance constraints at {controllers.PROBABILITY:.0%}, "
        f"back-off over {controllers.BACK_OFF_STEPS} steps; trust limit at the "
        f"{controllers.TRUST_QUANTILE:.0%} quantile of the training points' affine cost."
    )
    return f"{markdown([head, *([kind, *result.cells()] for kind, result in results.items())])}\n\n{notes}"


def over_time(results: dict[str, Result]) -> Figure:
    figure = Figure(figsize=(3.0 * len(results), 5.2), layout="constrained", dpi=150)
    axes = figure.subplots(2, len(results), sharex=True, sharey="row", squeeze=False)
    for (kind, result), (top, bottom) in zip(results.items(), axes.T, strict=True):
        for one in result.runs:
            t = reactor.STEP_MIN * np.arange(len(one.states))
            hot = one.violations.any()
            for ax, values in ((top, one.states[:, 1]), (bottom, one.states[:, 0])):
                ax.plot(t, values, color=ORANGE if hot else BLUE, lw=0.8, alpha=0.7)
        top.axhline(reactor.LIMIT, color="black", lw=1.2)
        top.axhline(reactor.INTERLOCK, color=GREY, lw=1.0, ls="--")
        bottom.axhline(reactor.WANTED, color=GREEN, lw=1.2, ls="--")
        top.set_title(f"{kind}: {result.runs_violated} of {len(result.runs)} runs too hot", fontsize=9)
        bottom.set_xlabel("minutes")
    axes[0, 0].set(ylabel="temperature / K", ylim=(310, 400))
    axes[1, 0].set(ylabel="concentration / mol/l", ylim=(0, 1))
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("black: limit; grey: no data above; green: target; orange: runs that exceed the limit", fontsize=9)
    return figure


def in_the_plane(results: dict[str, Result], dynamics: DynamicsModel, episodes: Sequence[Episode]) -> Figure:
    measured = np.concatenate([episode.outputs for episode in episodes])
    c, T = np.meshgrid(np.linspace(0.2, 1.0, 81), np.linspace(310.0, 370.0, 81))
    rows = np.column_stack([c.ravel(), T.ravel(), np.full(c.size, 300.0)])
    log_cost = np.log10(dynamics.next(rows).affine_cost).reshape(c.shape)
    limit = np.log10(trust_limit(dynamics, controllers.TRUST_QUANTILE))
    figure = Figure(figsize=(3.4 * len(results), 3.6), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(results), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (kind, result) in zip(axes, results.items(), strict=True):
        shade = ax.contourf(c, T, log_cost, levels=np.linspace(-3, 2, 11), cmap="Greys", extend="both", alpha=0.8)
        ax.contour(c, T, log_cost, levels=[limit], colors=[GREEN], linewidths=1.6)
        ax.plot(*measured.T, ".", color=BLUE, ms=1.5, alpha=0.5)
        for one in result.runs:
            ax.plot(*one.states.T, color=ORANGE, lw=0.8, alpha=0.8)
        ax.axhline(reactor.LIMIT, color="black", lw=1.2)
        ax.set(title=kind, xlabel="concentration / mol/l", xlim=(0.2, 1.0), ylim=(310, 370))
        ax.title.set_fontsize(9)
    axes[0].set_ylabel("temperature / K")
    figure.colorbar(shade, ax=axes, label="log10 affine cost at 300 K coolant")
    figure.suptitle("blue: data; orange: runs; green: trust limit; black: temperature limit", fontsize=9)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__, out="results/mpc")
    parser.add_argument("--starts", type=int, default=20, choices=range(1, 21), metavar="1..20", help="number of runs")
    parser.add_argument("--max-epochs", type=int, default=500, help="maximum number of epochs of the networks")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with helpful():
        print(f"\n{run(asked.out, asked.starts, asked.max_epochs)}")


if __name__ == "__main__":
    main()
