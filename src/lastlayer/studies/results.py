"""What a study leaves behind: tables, every number as JSON, figures, a report. All of it or nothing."""

import csv
import io
import json
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.studies.paper import COLUMNS, NOTES, PUBLISHED, ROWS, Study


def write_all(studies: list[Study], folder: Path, draw: Callable[[Path], object]) -> list[Path]:
    """Write into a folder aside, then move file by file into place: a broken run leaves the old results as they were.

    `draw(folder)` adds the figures and the report.
    """
    check_folder(folder)
    aside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        for name, text in {
            "table1.csv": as_csv(studies),
            "table1.md": as_markdown(studies),
            "table1.tex": as_latex(studies),
            "study.json": as_json(studies),
        }.items():
            (aside / name).write_text(text)
        draw(aside)
        finished = sorted(aside.iterdir())
        for path in finished:
            os.replace(path, folder / path.name)
        return [folder / path.name for path in finished]
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_folder(folder: Path) -> None:
    """Make the folder, or say why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write results to {folder}: {error.strerror}; choose another --out") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write results to {folder}: no permission; choose another --out")


def pooled(studies: list[Study], row: str, column: str) -> ndarray:
    """One number for every initialisation and data seed."""
    return np.concatenate([study.column(row, column) for study in studies])


def cells(studies: list[Study], *, digits: int = 2) -> list[list[str]]:
    """The table as text: medians, quartiles in square brackets if there is more than one run, published in round."""
    table = []
    for row in ROWS:
        line = [row]
        for column in COLUMNS:
            values = pooled(studies, row, column)
            line.append(_cell(values, PUBLISHED.get(row, {}).get(column), digits + (column[:5] in ("noise", "mse_t"))))
        table.append(line)
    return table


def _cell(values: ndarray, published: float | None, digits: int) -> str:
    if np.isnan(values).all():
        return "-"
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="nearest")
    text = _number(middle, digits)
    if len(values) > 1:
        text += f" [{_number(low, digits)}, {_number(high, digits)}]"
    return text if published is None else f"{text} ({published:.{digits}f})"


def _number(value: float, digits: int) -> str:
    return "inf" if math.isinf(value) else f"{value:.{digits}f}"


def caption(studies: list[Study]) -> str:
    n, seeds = len(studies[0].seeds), [study.data_seed for study in studies]
    runs = "median and quartiles over " if n * len(seeds) > 1 else ""
    data = f"data seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    return f"{runs}{n} initialisation{'s' * (n > 1)}, {data}; published figures in round brackets"


def as_csv(studies: list[Study]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "data_seed", "initialisation", *COLUMNS])
    for study in studies:
        for row in ROWS:
            for seed, scores in zip(study.seeds, study.scores[row], strict=True):
                writer.writerow([row, study.data_seed, seed, *(repr(v) for v in asdict(scores).values())])
    return out.getvalue()


def as_markdown(studies: list[Study]) -> str:
    head = ["", *COLUMNS.values()]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(line) + " |" for line in cells(studies)]
    return "\n".join([*lines, "", f"{caption(studies).capitalize()}.", "", *(f"- {note}" for note in NOTES), ""])


def as_latex(studies: list[Study]) -> str:
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
    """Every number, the seeds, and the versions that made them; infinities and gaps as text, so that any reader can."""
    packages = {name: version(name) for name in ("lastlayer", "torch", "numpy", "scipy", "scikit-learn")}
    content = {
        "studies": [
            {
                "data_seed": study.data_seed,
                "initialisations": study.seeds,
                "scores": {row: [asdict(s) for s in study.scores[row]] for row in ROWS},
            }
            for study in studies
        ],
        "published": PUBLISHED,
        "notes": NOTES,
        "versions": {"python": platform.python_version(), **packages},
    }
    return json.dumps(_plain(content), indent=1) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
