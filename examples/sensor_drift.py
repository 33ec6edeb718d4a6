"""A sensor that drifts: a model that learns while it runs, and a monitor that recommends when to fit a new model.

    python examples/sensor_drift.py --out sensor_drift.png

The voltage of a sensor depends on pressure and temperature. In the first phase nothing changes; in the second, gain and
offset of the sensor drift slowly, which the last layer can follow; in the third, the sensor is replaced by another type
with a curve that the features were not trained on. Each row is predicted first and learned afterwards.

The table gives, for each phase, the root mean square error and the share of rows inside the 95% interval.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy import ndarray

from lastlayer import BLLRegressor
from lastlayer.online import DriftMonitor, ExponentialForgetting, OnlineModel, SlidingWindow


def sensor(rows: int, seed: int = 0) -> tuple[ndarray, ndarray, ndarray]:
    """Inputs, voltages and the phase of each row: one third of the rows each."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (rows, 2))
    pressure, temperature = X.T
    phase = np.arange(rows) * 3 // rows
    creep = np.clip(3 * np.arange(rows) / rows - 1, 0, 1)
    old = (1 + 0.6 * creep) * np.tanh(2 * pressure) * (1 + 0.3 * temperature) + 0.8 * creep
    new = 1.5 * np.sin(5 * pressure + 2 * temperature)
    return X, np.where(phase == 2, new, old) + 0.05 * rng.standard_normal(rows), phase


@dataclass
class Record:
    """Errors and coverage of one method, each row predicted before its target is learned."""

    errors: list[float] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)

    def add(self, prediction, y: ndarray) -> None:
        lower, upper = prediction.interval(0.95)
        self.errors.append(float(y[0] - prediction.mean[0]))
        self.inside.append(bool(lower[0] <= y[0] <= upper[0]))

    def cells(self, phase: ndarray) -> str:
        errors, inside = np.array(self.errors), np.array(self.inside)
        parts = [(np.sqrt(np.mean(errors[phase == i] ** 2)), inside[phase == i].mean()) for i in range(3)]
        return "".join(f"{rmse:11.3f} {share:6.1%}" for rmse, share in parts)


def main(arguments: list[str] | None = None) -> dict[str, Record]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_800, help="rows of the stream")
    parser.add_argument("--fitted", type=int, default=300, help="rows that the model is fitted to beforehand")
    parser.add_argument("--memory", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("sensor_drift.png"))
    options = parser.parse_args(arguments)

    def fitted(X: ndarray, y: ndarray) -> BLLRegressor:
        return BLLRegressor(n_members=5, hidden_prior=0.03, max_epochs=options.epochs, random_state=0).fit(X, y)

    X_fit, y_fit, _ = sensor(3 * options.fitted, seed=1)
    X_fit, y_fit = X_fit[: options.fitted], y_fit[: options.fitted]
    X, y, phase = sensor(options.rows)
    model = fitted(X_fit, y_fit)
    ways = {
        "all rows": OnlineModel(model),
        f"window of {2 * options.memory}": OnlineModel(model, SlidingWindow(2 * options.memory), start=(X_fit, y_fit)),
        f"forgetting, memory {options.memory}": OnlineModel(model, ExponentialForgetting(options.memory)),
    }
    refits = OnlineModel(model, ExponentialForgetting(options.memory))
    monitor, began, alarms = DriftMonitor(false_alarm_every=100 * options.rows), 0, []
    records = {name: Record() for name in ("as fitted", *ways, "forgetting, refitted on alarm")}
    for i in range(options.rows):
        row, target = X[i : i + 1], y[i : i + 1]
        records["as fitted"].add(model.predictive(row), target)
        for name, way in ways.items():
            records[name].add(way.predictive(row), target)
            way.update(row, target)
        prediction = refits.predictive(row)
        records["forgetting, refitted on alarm"].add(prediction, target)
        refits.update(row, target)
        drift = monitor.update(prediction.standardized_residual(target))
        changed = began + drift.since
        if drift.alarm and i + 1 - changed >= options.fitted // 2:
            print(f"row {i}: {drift}")
            refits = OnlineModel(fitted(X[changed : i + 1], y[changed : i + 1]), ExponentialForgetting(options.memory))
            monitor.restart()
            began, alarms = i + 1, [*alarms, (changed, i)]

    print(f"\n{'RMSE and share inside 95%':<32}{'steady':>18}{'creeping':>18}{'replaced':>18}")
    for name, record in records.items():
        print(f"{name:<32}{record.cells(phase)}")
    picture(records, alarms, options.out)
    print(f"\npicture: {options.out}")
    return records


def picture(records: dict[str, Record], alarms: list[tuple[int, int]], path: Path) -> None:
    """Plot the running error of each method; lines mark the detected start of a change and the refit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, record in records.items():
        squared = np.square(record.errors)
        width = max(1, len(squared) // 40)
        smooth = np.sqrt(np.convolve(squared, np.ones(width) / width, mode="valid"))
        axes.plot(np.arange(len(smooth)) + width - 1, smooth, label=name, lw=1.5)
    for began, fitted in alarms:
        axes.axvline(began, color="0.6", ls=":", lw=1)
        axes.axvline(fitted, color="0.3", ls="--", lw=1)
    axes.set(xlabel="row", ylabel="running RMSE", yscale="log", title="dotted: start of the change; dashed: refit")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
