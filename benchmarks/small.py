"""Small, wide, duplicated and otherwise difficult tables: LPD promised by calibration and LPD achieved on new rows.

The default, preset="fast" and an exact Gaussian process (scikit-learn, one length scale per input) are fitted to 20
synthetic tables and scored on 1,000 new rows. Every fit is saved when done; a second run computes the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.runner import Job, Store, aligned, complete, options_of, write_files
from benchmarks.timing import timed
from benchmarks.uci.gaussian_processes import gaussians_of
from benchmarks.uci.protocol import Predict, score
from lastlayer import BLLRegressor
from lastlayer.plots.drawing import BLUE, GREY, ORANGE, new_figure

TEST_ROWS, LEVEL, CLOSE = 1_000, 0.9, 0.15
Rows = tuple[ndarray, ndarray]


@dataclass(frozen=True)
class Made:
    rows: int
    columns: int
    function: Callable[[ndarray], ndarray]
    noise: float | Callable[[ndarray], ndarray] = 0.2
    copies: int = 1

    def draw(self, m: int, rng: np.random.Generator) -> Rows:
        X = rng.normal(size=(m, self.columns))
        spread = self.noise(X) if callable(self.noise) else self.noise
        return X, self.function(X) + spread * rng.normal(size=m)

    def both(self, seed: int) -> tuple[Rows, Rows]:
        rng = np.random.default_rng(seed)
        X, y = self.draw(self.rows // self.copies, rng)
        return (np.repeat(X, self.copies, 0), np.repeat(y, self.copies)), self.draw(TEST_ROWS, rng)


wave = lambda X: np.sin(2 * X[:, 0]) + 0.5 * X[:, -1]
product = lambda X: X[:, 0] * X[:, 1] + np.sin(X[:, 2])
step = lambda X: 1.5 * (X[:, 0] > 0) + (X[:, 1] > 0.5) + 0.3 * X[:, 2]
plane = lambda X: X[:, :5].sum(1)
nothing = lambda X: np.zeros(len(X))


TABLES = {
    "12 x 1, wave": Made(12, 1, wave),
    "15 x 2, wave": Made(15, 2, wave),
    "18 x 5, plane": Made(18, 5, plane),
    "25 x 3, product": Made(25, 3, product),
    "30 x 2, wave, much noise": Made(30, 2, wave, 1.0),
    "40 x 4, step": Made(40, 4, step),
    "50 x 8, product": Made(50, 8, product),
    "60 x 20, plane": Made(60, 20, plane),
    "70 x 60, plane": Made(70, 60, plane, 0.5),
    "80 x 3, product": Made(80, 3, product),
    "100 x 4, step": Made(100, 4, step),
    "100 x 10, nothing": Made(100, 10, nothing, 1.0),
    "120 x 40, plane": Made(120, 40, plane, 0.5),
    "150 x 6, product": Made(150, 6, product),
    "150 x 150, plane": Made(150, 150, plane, 0.5),
    "200 x 3, noise by input": Made(200, 3, wave, lambda X: 0.1 + 0.6 * (X[:, 1] > 0)),
    "250 x 5, step": Made(250, 5, step),
    "200 x 4, each row four times": Made(200, 4, product, copies=4),
    "300 x 8, product": Made(300, 8, product),
    "400 x 3, noise by input": Made(400, 3, product, lambda X: 0.1 + 0.3 * np.abs(X[:, 0])),
}


@dataclass(frozen=True)
class Result:
    coverage: float
    lpd: float
    promised: float
    seconds: float

    @classmethod
    def mean(cls, results: Sequence["Result"]) -> "Result":
        return cls(*np.mean([astuple(r) for r in results], 0).tolist())


@dataclass(frozen=True)
class Fitted(Job):
    table: str
    method: str
    seed: int

    def run(self) -> Result:
        train, (X, y) = TABLES[self.table].both(self.seed)
        (predict, promised), seconds, _ = timed(lambda: METHODS[self.method](*train, self.seed))
        scores = score(predict(X), y)
        assert scores.lpd is not None
        return Result(scores.coverage_90, scores.lpd, promised, seconds)


def lastlayer(preset: str, X: ndarray, y: ndarray, seed: int) -> tuple[Predict, float]:
    model = BLLRegressor(preset=preset, random_state=seed).fit(X, y)
    unit = float(np.log(model.fitted_.targets.scale.numpy()).sum())  # promises are of standardised targets
    return model.predictive, np.nan if model.calibration_ is None else model.calibration_.lpd - unit


def exact_process(X: ndarray, y: ndarray, seed: int) -> tuple[Predict, float]:
    lengths = RBF(np.full(X.shape[1], 2.0), (0.05, 1e3))
    kernel = ConstantKernel(1.0, (1e-2, 1e3)) * lengths + WhiteKernel(0.1, (1e-6, 2))
    process = make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed))
    return gaussians_of(process.fit(X, y)), np.nan


Fit = Callable[[ndarray, ndarray, int], tuple[Predict, float]]  # to the prediction, and the LPD that is promised
OURS: dict[str, Fit] = {"default": partial(lastlayer, "calibrated"), "fast": partial(lastlayer, "fast")}
METHODS = OURS | {"exact process": exact_process}


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Result]]:
    parser = options_of(__doc__, out="results/small", again=True)
    parser.add_argument("--seeds", type=int, default=3, help="draws of each table, averaged")
    parser.add_argument("--tables", type=int, default=len(TABLES), help="number of tables, from the first on")
    asked = parser.parse_args(arguments)
    names = list(TABLES)[: asked.tables]
    jobs = [Fitted(name, method, seed) for name in names for method in METHODS for seed in range(asked.seeds)]
    store = Store(asked.out / "results.jsonl", Result)
    complete(jobs, store, again=asked.again)
    of = lambda *key: Result.mean([store.results[*key, seed] for seed in range(asked.seeds)])
    found = {name: {method: of(name, method) for method in METHODS} for name in names}
    cells = lambda s: [f"{s.coverage:.2f}", f"{s.lpd:.2f}", f"{s.promised:.2f}", f"{s.seconds:.1f}"]
    head = ["", *(part for name in METHODS for part in (f"{name}: {LEVEL:.0%}", "LPD", "promised", "cpu s"))]
    print(
        aligned([head, *([name, *(part for s in each.values() for part in cells(s))] for name, each in found.items())])
    )
    for method in METHODS:
        coverage, lpd, promised, _ = np.array([astuple(each[method]) for each in found.values()]).T
        gap = lpd - promised
        print(f"{method}: coverage {coverage.min():.2f} to {coverage.max():.2f}, mean LPD {lpd.mean():.2f}", end="")
        close = f"within {CLOSE} nats in {int((np.abs(gap) <= CLOSE).sum())} of {len(gap)}"
        print(f", achieved - promised {gap.min():+.2f} to {gap.max():+.2f}, {close}" if (gap == gap).all() else "")
    write_files(asked.out, {}, {"promises.png": picture(found)})
    return found


def picture(found: dict[str, dict[str, Result]]) -> Figure:
    figure = new_figure(8.5, 4.2)
    left, right = figure.subplots(1, 2)
    promised, lpd = np.array([[each["default"].promised, each["default"].lpd] for each in found.values()]).T
    ends = np.array([min(promised.min(), lpd.min()) - 0.2, max(promised.max(), lpd.max()) + 0.2])
    left.fill_between(ends, ends - CLOSE, ends + CLOSE, color=GREY, alpha=0.3, label=f"within {CLOSE} nats")
    left.plot(promised, lpd, "o", color=BLUE, label="one table")
    left.set(xlabel="LPD promised by calibration", ylabel="LPD of 1,000 new rows", xlim=ends, ylim=ends)
    left.legend(loc="upper left")
    places = np.arange(len(found))
    for method, color, marker in (("exact process", ORANGE, "s"), ("default", BLUE, "o")):
        right.plot([each[method].coverage for each in found.values()], places, marker, color=color, label=method)
    right.axvline(LEVEL, color=GREY)
    right.set(xlabel="coverage of 90% intervals", yticks=places, yticklabels=list(found), xlim=(0, 1.02))
    right.tick_params(axis="y", labelsize=7)
    right.invert_yaxis()
    right.legend(loc="lower left")
    return figure


if __name__ == "__main__":
    main()
