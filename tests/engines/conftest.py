"""A model, and rows of it in a folder of Parquet files, for all engines."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from lastlayer import BLLRegressor, Prediction

ROOT = Path(__file__).parents[2]
FILES, ROWS = 4, 5_000
"""Files, and rows in each of them."""


class Job:
    """What an engine is asked to do, and what must come out."""

    ids = ("id",)

    def __init__(self, folder: Path) -> None:
        self.model, self.rows, self.out = folder / "m.lastlayer", folder / "rows", folder / "out"
        rng = np.random.default_rng(0)
        X = rng.normal(size=(200, 2))
        regressor = BLLRegressor(preset="evidence", hidden=(8,), max_epochs=20, random_state=0)
        regressor.fit(pd.DataFrame(X, columns=["a", "b"]), np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=200)).save(
            self.model
        )
        self.X = rng.normal(size=(FILES * ROWS, 2))
        self.prediction: Prediction = regressor.predictive(pd.DataFrame(self.X, columns=["a", "b"]))
        self.rows.mkdir()
        for i in range(FILES):
            part = slice(i * ROWS, (i + 1) * ROWS)
            content = {"id": np.arange(part.start, part.stop), "b": self.X[part, 1], "a": self.X[part, 0]}
            parquet.write_table(pa.table(content), self.rows / f"part-{i}.parquet", row_group_size=1_000)

    def assert_predicted(self, found: dict[str, np.ndarray]) -> None:
        """Every row once, its numbers those of `predictive`, by id."""
        at = np.argsort(found["id"])
        assert np.array_equal(found["id"][at], np.arange(len(self.X)))
        lower, upper = self.prediction.interval(0.95)
        expected = {"mean": self.prediction.mean, "std": self.prediction.std, "lower": lower, "upper": upper}
        for word, values in expected.items():
            np.testing.assert_allclose(found[f"y_{word}"][at], values, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found["affine_cost"][at], self.prediction.affine_cost, rtol=1e-9)

    def written(self) -> dict[str, np.ndarray]:
        """The table that was written, in the order of its files."""
        table = parquet.read_table(self.out)
        return {name: table[name].to_numpy() for name in table.column_names}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(autouse=True)
def examples(monkeypatch) -> None:
    """They can be imported by their names."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "clients")
