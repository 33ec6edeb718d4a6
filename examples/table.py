"""A DataFrame with categories, dates, units and missing cells: fit, predict with intervals, see which columns matter.

    python examples/table.py

The table is made here: the energy that shops use in a day, by kind of shop, date, outside temperature, floor area and
opening hours. The script prints how each column is read, scores on new rows, a few predictions with their intervals,
and the columns by their importance. Replace `shops` by `pd.read_csv` of your table to start from your own data.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import pandas as pd

from lastlayer import TableRegressor
from lastlayer.tables import importance
from lastlayer.tables.frames import as_table

TARGET = "energy_kwh"
BASE = {"bakery": 1.6, "books": 0.5, "grocery": 1.0}
"""Energy per square metre of each kind of shop, relative to a grocery."""


def shops(n: int, rng: np.random.Generator) -> pd.DataFrame:
    """n days of shops; some temperatures are missing."""
    kind = rng.choice(list(BASE), n)
    date = pd.Timestamp("2023-01-01") + pd.to_timedelta(rng.integers(0, 730, n), unit="D")
    temperature = 10 - 10 * np.cos(2 * np.pi * date.day_of_year / 365) + 3 * rng.standard_normal(n)
    area, hours = rng.uniform(40, 300, n), rng.integers(6, 15, n)
    weekend = np.where(date.day_of_week >= 5, 0.7, 1.0)
    heating = 1 + 0.04 * np.maximum(18 - temperature, 0)
    energy = 0.02 * np.array([BASE[name] for name in kind]) * area * hours * weekend * heating
    return pd.DataFrame(
        {
            "id": range(n),
            "kind": pd.Categorical(kind),
            "date": date,
            "temperature_c": np.where(rng.random(n) < 0.03, np.nan, temperature),
            "area": [f"{x:.0f} m2" for x in area],
            "hours": hours,
            TARGET: energy * np.exp(0.05 * rng.standard_normal(n)),
        }
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600, help="rows to fit")
    parser.add_argument("--epochs", type=int, default=None, help="passes over the data (default: chosen by lastlayer)")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    frame, new = shops(options.rows, rng), shops(200, rng)

    epochs = {} if options.epochs is None else {"max_epochs": options.epochs}
    model = TableRegressor(impute="median", preset="fast", likelihood="auto", random_state=0, **epochs)
    model.fit(frame, target=TARGET)
    print("\n".join(model.notes_))
    print(f"likelihood: {model.settings_.layer.likelihood}")

    (scores,) = model.evaluate(new).targets
    print(f"\n200 new rows: RMSE {scores.rmse:.2f} kWh, R2 {scores.r2:.3f}, {scores.coverage_95:.0%} in 95% intervals")

    prediction = model.predictive(new[:5])
    lower, upper = prediction.interval(0.95)
    shown = new[:5].drop(columns=["id", "hours"]).assign(mean=prediction.mean, lower=lower, upper=upper)
    print(shown.to_string(index=False, float_format="{:.1f}".format))

    ranking = importance(model, as_table(new))
    print(f"\n{'column':16}{'RMSE lost without it':>22}")
    for column in ranking.ranked(0):
        print(f"{column.name:16}{column.rmse[0]:22.2f}")
    found = {column.name: float(column.rmse[0]) for column in ranking.inputs}
    return found | {"new rows": scores.coverage_95}


if __name__ == "__main__":
    main()
