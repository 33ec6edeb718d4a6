"""A stream in river's protocol: each row is predicted, scored, and then learned.

    python examples/clients/river_stream.py

The stream is a heat exchanger whose walls foul: inputs are two flows and two temperatures, the target is the outlet
temperature. Fouling begins after half of the rows. `RiverRegressor` fits its networks to the first rows and is updated
row by row afterwards; it is compared with river's Bayesian linear regression on scaled inputs and targets, with the
same memory.

The table gives, before and after fouling begins, the mean absolute error, the root mean square error, the share of rows
inside the 95% interval, and its mean width.
"""

import argparse
import math
import time
from collections.abc import Iterator

import numpy as np
from river import conf, linear_model, metrics, preprocessing, stats

from lastlayer import BLLRegressor
from lastlayer.integrations.river import RiverRegressor
from lastlayer.online import DriftMonitor, ExponentialForgetting


def exchanger(rows: int, seed: int = 0) -> Iterator[tuple[dict[str, float], float]]:
    """Flows, inlet temperatures, and the outlet temperature of the hot stream."""
    rng = np.random.default_rng(seed)
    for i in range(rows):
        x = {
            "hot_flow": rng.uniform(0.5, 2.0),
            "cold_flow": rng.uniform(0.5, 2.0),
            "hot_in": rng.uniform(60, 90),
            "cold_in": rng.uniform(10, 25),
        }
        fouling = max(0.0, 2 * i / rows - 1)
        transfer = 2.0 / (1 + 1.5 * fouling)
        ratio = x["hot_flow"] / x["cold_flow"]
        units = transfer / x["hot_flow"]
        effectiveness = (1 - math.exp(-units * (1 + ratio))) / (1 + ratio)
        out = x["hot_in"] - effectiveness * (x["hot_in"] - x["cold_in"])
        yield x, out + 0.3 * rng.standard_normal()


class Scores:
    """river's metrics for one half of the stream."""

    def __init__(self) -> None:
        self.errors = metrics.MAE(), metrics.RMSE()
        self.inside, self.width = stats.Mean(), stats.Mean()

    def update(self, y: float, mean: float, interval: conf.Interval) -> None:
        for metric in self.errors:
            metric.update(y, mean)
        self.inside.update(y in interval)
        self.width.update(interval.width)

    def __str__(self) -> str:
        mae, rmse = (metric.get() for metric in self.errors)
        return f"{mae:8.3f}{rmse:8.3f}{self.inside.get():8.1%}{self.width.get():8.2f}"


def main(arguments: list[str] | None = None) -> dict[str, tuple[Scores, Scores]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000, help="rows of the stream")
    parser.add_argument("--warm-up", type=int, default=400, help="rows that the networks are fitted to")
    parser.add_argument("--memory", type=int, default=300, help="rows after which a row has 1/e of its weight")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--epochs", type=int, default=300)
    options = parser.parse_args(arguments)

    memory = options.memory
    regressor = BLLRegressor(preset=options.preset, max_epochs=options.epochs, random_state=0)
    models = {
        "RiverRegressor": RiverRegressor(
            regressor,
            ExponentialForgetting(memory),
            warm_up=options.warm_up,
            monitor=DriftMonitor(false_alarm_every=100 * options.rows),
        ),
        "BayesianLinearRegression": conf.RegressionJackknife(
            preprocessing.TargetStandardScaler(
                preprocessing.StandardScaler() | linear_model.BayesianLinearRegression(smoothing=math.exp(-1 / memory))
            ),
            confidence_level=0.95,
        ),
    }
    scores = {name: (Scores(), Scores()) for name in models}
    print(f"{'':<26}{'steady: MAE, RMSE, inside, width':>36}{'fouling: the same':>36}{'us/row':>10}")
    for name, model in models.items():
        taken = 0.0
        for i, (x, y) in enumerate(exchanger(options.rows)):
            scored = i >= options.warm_up
            start = time.process_time()
            mean, interval = model.predict_one(x), model.predict_one(x, with_interval=True)
            model.learn_one(x, y)
            taken += (time.process_time() - start) * scored
            if scored:  # rows that the networks are fitted to are not scored
                scores[name][2 * i >= options.rows].update(y, mean, interval)
        halves = "".join(f"    {half}" for half in scores[name])
        print(f"{name:<26}{halves}{1e6 * taken / (options.rows - options.warm_up):10.0f}")
    print(models["RiverRegressor"].drift)
    return scores


if __name__ == "__main__":
    main()
