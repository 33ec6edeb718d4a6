"""The paper's simulation study: Table 1, with the same definition of each score in all rows, and its files."""

import csv
import io
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy import ndarray

from lastlayer._internal.files import STUDY, check_output
from lastlayer._internal.work import progress_bar
from lastlayer.errors import InputError
from lastlayer.predictions.metrics import coverage, log_predictive_density, rmse
from lastlayer.predictions.prediction import Prediction
from lastlayer.studies.baselines import BayesByBackpropRegressor
from lastlayer.studies.data import SEED, TRAIN_RANGE, PaperData, paper_data
from lastlayer.studies.networks import HIDDEN, MAX_EPOCHS, FittedNetwork, Scalers, fit_networks

KINDS = ("alpha*", "alpha^max honest", "alpha^max leak")
ROWS = (*(f"{name}, {kind}" for name in ("BLL", "BLR") for kind in KINDS), "BNN")
COLUMNS = (
    {"lpd_train": "LPD train", "lpd_test": "LPD test", "lpd_inside": "LPD test inside"}
    | {"lpd_outside": "LPD test outside", "nlml": "NLML train", "mse_train": "MSE train", "mse_test": "MSE test"}
    | {"noise_1": "noise 1", "noise_2": "noise 2"}
    | {f"coverage_{level}": f"in {level}%" for level in (50, 90, 99)}
    | {"log_alpha": "log alpha"}
)
PUBLISHED: dict[str, dict[str, float]] = {
    "BLL, alpha*": {"lpd_train": 0.42, "lpd_test": -18.14, "nlml": -0.09, "mse_train": 0.042, "mse_test": 2.98}
    | {"noise_1": 0.0507, "noise_2": 0.1786, "log_alpha": 2.86},
    "BLL, alpha^max leak": {"lpd_train": 0.41, "lpd_test": -1.83},
    "BLR, alpha*": {"lpd_train": 0.29, "lpd_test": -19.20, "nlml": 0.14, "mse_train": 0.047, "mse_test": 2.20},
    "BLR, alpha^max leak": {"lpd_train": 0.29, "lpd_test": -1.95},
}
"""Numbers from the paper's Table 1 and text. Its alpha^max was tuned on the test set, hence it is listed with the leak.

The scores of its BNN are averaged over outputs and come from another test range: they cannot be compared.
"""
BNN_EPOCHS = 10_000
"""Enough for a training MSE close to that of BLL."""
NOTES = (
    "LPD: mean log predictive density, joint over the two outputs, of targets standardised on the training set.",
    f"Test: 100 points on [-0.4, 1.4]; inside: those on [{TRAIN_RANGE[0]:g}, {TRAIN_RANGE[1]:g}]; outside: the rest.",
    "NLML: negative log marginal likelihood per training sample, standardised targets. MSE: standardised targets.",
    "Noise: standard deviation in target units; true values 0.05 and 0.2. Coverage: share of test targets inside.",
    "honest: alpha tuned on blocks of the training range that were held out. leak: alpha tuned on the test set.",
    "BNN: Bayes by Backprop. The paper averages its scores over outputs, on another range: no published values here.",
)
RECORD = "study.json"
FIGURES = tuple(f"figure{i}.{end}" for i in range(1, 6) for end in ("png", "pdf"))
FILES = (RECORD, "report.html", "table1.csv", "table1.md", "table1.tex", *FIGURES)
Scores: TypeAlias = dict[str, float]
"""One row of the table for one initialisation, by the names of COLUMNS."""


@dataclass(frozen=True)
class Study:
    """Everything that was fitted and scored for one data seed."""

    data: PaperData
    data_seed: int
    seeds: list[int]
    bll: list[FittedNetwork]
    blr: list[FittedNetwork]
    bnn: list[BayesByBackpropRegressor]
    scores: dict[str, list[Scores]]

    def column(self, row: str, name: str) -> ndarray:
        return np.array([s[name] for s in self.scores[row]])


def run(
    seeds: list[int],
    *,
    data_seed: int = SEED,
    max_epochs: int = MAX_EPOCHS,
    bnn_epochs: int = BNN_EPOCHS,
    progress: bool = False,
) -> Study:
    data = paper_data(data_seed)
    bll = fit_networks(data, seeds, loss="evidence", max_epochs=max_epochs, progress=progress)
    blr = fit_networks(data, seeds, loss="mse", max_epochs=max_epochs, progress=progress)
    bnn, one = [], len(seeds) == 1
    for seed in progress_bar(seeds, disable=not progress or one, desc=f"BNN, {len(seeds)} networks", unit="network"):
        model = BayesByBackpropRegressor(HIDDEN, max_epochs=bnn_epochs, random_state=seed, progress=progress and one)
        bnn.append(model.fit(data.train.X, data.train.y))
    scores: dict[str, list[Scores]] = {row: [] for row in ROWS}
    for name, fitted in (("BLL", bll), ("BLR", blr)):
        for network in fitted:
            alphas = float(network.posterior.log_alpha), network.honest.log_alpha, network.leak.log_alpha
            for kind, log_alpha in zip(KINDS, alphas, strict=True):
                train, test = network.predict(data.train.X, log_alpha), network.predict(data.test.X, log_alpha)
                nlml = network.posterior.nlml if kind == "alpha*" else math.nan
                scores[f"{name}, {kind}"].append(score(data, train, test, network.noise_std, nlml, log_alpha))
    for model in bnn:
        train, test = model.predictive(data.train.X), model.predictive(data.test.X)
        scores["BNN"].append(score(data, train, test, model.noise_std_, math.nan, math.nan))
    return Study(data, data_seed, seeds, bll, blr, bnn, scores)


def score(
    data: PaperData, train: Prediction, test: Prediction, noise_std: ndarray, nlml: float, log_alpha: float
) -> Scores:
    """Scores of one fitted model; the same definitions hold for all rows of the table."""
    scale = Scalers.of(data.train).targets.scale.numpy()
    inside = ((data.test.X >= TRAIN_RANGE[0]) & (data.test.X <= TRAIN_RANGE[1]))[:, 0]
    lpd_each = test.log_prob(data.test.y) + np.log(scale).sum()
    mse = lambda p, samples: float(rmse(p.mean / scale, samples.y / scale) ** 2)
    return {
        "lpd_train": log_predictive_density(train, data.train.y, scale=scale),
        "lpd_test": float(lpd_each.mean()),
        "lpd_inside": float(lpd_each[inside].mean()),
        "lpd_outside": float(lpd_each[~inside].mean()),
        "nlml": nlml,
        "mse_train": mse(train, data.train),
        "mse_test": mse(test, data.test),
        "noise_1": float(noise_std[0]),
        "noise_2": float(noise_std[1]),
        **{f"coverage_{level}": coverage(test, data.test.y, level / 100) for level in (50, 90, 99)},
        "log_alpha": log_alpha,
    }


# the files of a study: written completely or not at all


def write_all(studies: list[Study], folder: Path, draw: Callable[[Path], object]) -> list[Path]:
    """Write all files to a temporary folder, then move them into place: a failed run leaves old results unchanged."""
    texts = {"table1.csv": as_csv, "table1.md": as_markdown, "table1.tex": as_latex, RECORD: as_json}
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder, ignore_cleanup_errors=True) as name:
        aside = Path(name)
        for file, text in texts.items():
            (aside / file).write_text(text(studies))
        draw(aside)
        return [path.replace(folder / path.name) for path in sorted(aside.iterdir())]


def check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write results to {folder}: {error.strerror}; choose another --out") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write results to {folder}: no permission; choose another --out")


def check_results(folder: Path, *, force: bool = False) -> None:
    """Create the folder for a study; raise InputError if files would be replaced that no study wrote."""
    check_folder(folder)
    theirs = [folder / name for name in FILES if (folder / name).exists()]
    if theirs and not force and not (folder / RECORD).is_file():
        raise InputError(
            f"{theirs[0]} exists, and {folder} has no {RECORD} of an earlier study: choose another --out, or --force "
            "to replace it"
        )
    check_output(folder / RECORD, STUDY, force=force, advice="another --out")


def pooled(studies: list[Study], row: str, column: str) -> ndarray:
    return np.concatenate([study.column(row, column) for study in studies])


def cells(studies: list[Study]) -> list[list[str]]:
    """The table as text: medians, quartiles in square brackets if there are several runs, published values in round."""
    places = {column: 2 + (column[:5] in ("noise", "mse_t")) for column in COLUMNS}
    return [[row, *(_cell(studies, row, column, places[column]) for column in COLUMNS)] for row in ROWS]


def _cell(studies: list[Study], row: str, column: str, digits: int) -> str:
    values, published = pooled(studies, row, column), PUBLISHED.get(row, {}).get(column)
    if np.isnan(values).all():
        return "-"
    quartiles = np.quantile(values, [0.25, 0.5, 0.75], method="nearest")
    low, text, high = (f"{value:.{digits}f}" for value in quartiles)
    if len(values) > 1:
        text += f" [{low}, {high}]"
    return text if published is None else f"{text} ({published:.{digits}f})"


def caption(studies: list[Study]) -> str:
    """Caption of the table: runs, seeds, and the meaning of brackets."""
    n, seeds = len(studies[0].seeds), [study.data_seed for study in studies]
    runs = "median and quartiles over " if n * len(seeds) > 1 else ""
    data = f"data seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    return f"{runs}{n} initialisation{'s' * (n > 1)}, {data}; published values in round brackets"


def as_csv(studies: list[Study]) -> str:
    """All scores as CSV, one line per row of the table and run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "data_seed", "initialisation", *COLUMNS])
    for study in studies:
        for row in ROWS:
            for seed, scores in zip(study.seeds, study.scores[row], strict=True):
                writer.writerow([row, study.data_seed, seed, *(repr(v) for v in scores.values())])
    return out.getvalue()


def as_markdown(studies: list[Study]) -> str:
    head = ["", *COLUMNS.values()]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(line) + " |" for line in cells(studies)]
    return "\n".join([*lines, "", f"{caption(studies).capitalize()}.", "", *(f"- {note}" for note in NOTES), ""])


def as_latex(studies: list[Study]) -> str:
    """The table in LaTeX, with caption and notes as comments."""
    names = {"alpha*": r"$\alpha^*$", "alpha^max": r"$\alpha^{\max}$", "%": r"\%", "log alpha": r"$\log\alpha$"}

    def tex(text: str) -> str:
        for plain, latex in names.items():
            text = text.replace(plain, latex)
        return text

    body = [" & ".join(map(tex, line)) + r" \\" for line in [["", *COLUMNS.values()], *cells(studies)]]
    rules = [r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule"]
    notes = [f"% {note}" for note in (caption(studies), *NOTES)]
    return "\n".join([*notes, rf"\begin{{tabular}}{{l{'r' * len(COLUMNS)}}}", *rules, r"\end{tabular}", ""])


def as_json(studies: list[Study]) -> str:
    """All scores, seeds and package versions as JSON; infinities and NaN as text, for strict readers."""
    packages = {name: version(name) for name in ("lastlayer", "torch", "numpy", "scipy", "scikit-learn")}
    content = {
        "studies": [
            {"data_seed": study.data_seed, "initialisations": study.seeds, "scores": study.scores} for study in studies
        ],
        "published": PUBLISHED,
        "notes": NOTES,
        "versions": {"python": platform.python_version(), **packages},
    }
    return json.dumps(json.loads(json.dumps(content), parse_constant=str), indent=1) + "\n"
