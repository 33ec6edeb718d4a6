"""Commands for a user's own table: fit, predict, evaluate, report, explain, update, export."""

import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastlayer import __version__
from lastlayer.cli.say import Json, Say
from lastlayer.errors import InputError

if TYPE_CHECKING:
    from lastlayer.tables import Schema, Scores, Table, TableModel

WIDEST = 10_000
Data = Annotated[
    Path, typer.Argument(help="Table: .csv, .tsv, .jsonl or .parquet; the first line of a CSV names columns.")
]
Model = Annotated[Path, typer.Argument(help="Model file that `lastlayer fit` wrote.")]
Target = Annotated[
    list[str] | None,
    typer.Option(help="Columns with the true values, with commas, if they are not called as in fit."),
]
Unknown = Annotated[
    str,
    typer.Option(help="A text no training row had: 'error', or 'warn' to predict as if it were none of the known."),
]


def fit(
    data: Data,
    target: Annotated[list[str], typer.Option("--target", "-t", help="Column to predict; several with commas.")],
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Model file to write.", show_default="DATA's name.lastlayer")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Columns to leave out, with commas.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Columns of numbers that are codes: take them as text.")
    ] = None,
    impute: Annotated[
        str | None, typer.Option(help="'median': fill missing numbers by the median, texts by the most frequent.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="Column that says which rows belong together (a trajectory, a patient).")
    ] = None,
    preset: Annotated[str, typer.Option(help="'honest': ten calibrated networks; 'fast': one, in seconds.")] = "honest",
    hidden: Annotated[str, typer.Option(help="Widths of the hidden layers.")] = "50,50",
    noise: Annotated[str, typer.Option(help="'diagonal', 'full' (correlated targets) or 'input'.")] = "diagonal",
    members: Annotated[int | None, typer.Option(min=1, max=100, help="Networks in the mixture.")] = None,
    max_epochs: Annotated[int, typer.Option(min=0, max=1_000_000, help="Passes over the data.")] = 500,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same seed gives the same model.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn to predict columns of a table from the others.

    Numbers are taken as they are, texts become 0/1 inputs; dates and missing values are refused with advice. Ctrl-C
    stops training early and saves the model as it is then.
    """
    from lastlayer.errors import choose
    from lastlayer.tables import Schema, TableModel, check_writable, read
    from lastlayer.tables.schema import IMPUTE

    say, path = Say(as_json), Path(f"{data.stem}.lastlayer") if model is None else model
    check_writable(path)
    if impute is not None:
        choose("impute", impute, IMPUTE)
    widths, table = _widths(hidden), read(data)
    targets = _names(target, table)
    started = time.monotonic()
    with say.heeding():
        schema = Schema.infer(
            table,
            targets,
            drop={*_names(drop, table), *([groups] if groups else [])},
            text=_names(text, table),
            impute=impute is not None,
        )
        _describe(say, data, table, schema)
        fitted = TableModel.of(
            schema,
            table,
            groups=groups,
            preset=preset,
            hidden=widths,
            noise=noise,
            n_members="auto" if members is None else members,
            max_epochs=max_epochs,
            random_state=seed,
            progress=not as_json,
        )
    interrupted = any(note.startswith("interrupted") for note in say.notes)
    fitted.card.update(
        data=data.name,
        fitted=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        seed=seed,
        interrupted=interrupted,
        notes=say.notes,
    )
    fitted.save(path)
    seconds = time.monotonic() - started
    _say_fitted(say, fitted, seconds)
    say.words(f"\nsaved {path} ({path.stat().st_size / 1024:.0f} kB)", "bold")
    say.words(f"next: lastlayer predict {path} NEW_ROWS.csv, lastlayer report {path} TEST_ROWS.csv", "dim")
    if interrupted:
        say.note(f"training was interrupted: {path} is usable, but a full fit would be better")
    say.result(model=str(path), seconds=seconds, interrupted=interrupted, **_summary(fitted))
    if interrupted:
        raise typer.Exit(130)


def predict(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=".csv, .jsonl or .parquet.", show_default="DATA's name.predicted.csv"),
    ] = None,
    level: Annotated[float, typer.Option(help="Probability of the intervals.")] = 0.95,
    unknown: Unknown = "error",
    as_json: Json = False,
) -> None:
    """Add mean, standard deviation, interval and degree of extrapolation to every row.

    Rows go through in pieces, so the table may be larger than memory.
    """
    from lastlayer.tables import TableModel, chunks, writing

    say = Say(as_json)
    fitted = TableModel.load(model)
    path = Path(f"{data.stem}.predicted.csv") if out is None else out
    if path.exists() and data.exists() and path.samefile(data):
        raise InputError(f"--out {path} is the table itself: give the predictions a file of their own")
    rows, beyond, outside, strange = 0, 0, Counter[str](), Counter[str]()
    started = time.monotonic()
    with writing(path) as write:
        for table, forecast in fitted.stream(chunks(data), level=level, unknown=unknown):
            write(table.columns | forecast.cells)
            rows += len(table)
            beyond += forecast.beyond
            for column, count in zip(fitted.schema.columns, forecast.outside, strict=True):
                outside[column.name] += int(count)
            for name, texts in forecast.unknown.items():
                strange.update({f"{name}={text}": n for text, n in texts.items()})
    seconds = time.monotonic() - started
    for text, count in strange.most_common(10):
        say.note(f"{count} rows have {text!r}, which no training row had: predicted without knowing it")
    say.words(f"{rows:,} rows in {seconds:.1f} s ({rows / max(seconds, 1e-9):,.0f} a second)")
    for name, count in outside.items():
        if count:
            say.words(f"{count:,} rows leave the training range of {name}", "yellow")
    if beyond:
        say.words(f"{beyond:,} rows are farther out than every training row: look at the column affine_cost", "yellow")
    say.words(f"saved {path}", "bold")
    say.result(out=str(path), rows=rows, seconds=seconds, level=level, outside_range=outside, beyond=beyond)


def evaluate(
    model: Model, data: Data, target: Target = None, unknown: Unknown = "error", as_json: Json = False
) -> None:
    """Scores of predictions for a table that has the true values too; best for rows the model has not seen."""
    from lastlayer.tables import TableModel, read, score

    say, fitted, table = Say(as_json), TableModel.load(model), read(data)
    y = fitted.schema.targets_of(table, _names(target, table) if target else None)
    scores = score(fitted.predictive(table, unknown=unknown)[1], y, fitted.schema.targets)
    _say_scores(say, scores)
    say.result(**asdict(scores))


def report(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file.", show_default="MODEL's name.report.html")
    ] = None,
    target: Target = None,
    unknown: Unknown = "error",
    as_json: Json = False,
) -> None:
    """One HTML page to show a colleague: scores, pictures, rows to look at, model card. It opens offline.

    DATA are rows with the true values, best ones the model has not seen.
    """
    from lastlayer.files import replacing
    from lastlayer.report import make_report
    from lastlayer.tables import TableModel, check_writable, read

    say, fitted, table = Say(as_json), TableModel.load(model), read(data)
    path = Path(f"{model.stem}.report.html") if out is None else out
    check_writable(path)
    made = make_report(
        fitted,
        table,
        model_name=model.name,
        data_name=data.name,
        targets=_names(target, table) if target else None,
        unknown=unknown,
    )
    with replacing(path) as file:
        file.write(made.html.encode())
    _say_scores(say, made.scores)
    say.words(f"\nsaved {path}: open it in a browser", "bold")
    say.result(out=str(path), **asdict(made.scores))


def explain(model: Model, as_json: Json = False) -> None:
    """What was learned: noise, alpha, calibration, training range of every input, condition of the features."""
    from lastlayer.tables import TableModel
    from lastlayer.tables import explain as explained

    say, fitted = Say(as_json), TableModel.load(model)
    found = explained(fitted)
    card = found["card"]
    say.words(f"{model.name}: {found['members']} networks, {card.get('rows', '?')} training rows", "bold")
    if card.get("fitted"):
        say.words(f"fitted {card['fitted']} to {card.get('data')} by lastlayer {card.get('version')}", "dim")
    say.words()
    say.table(["target", "noise std"], [[row["target"], row["noise_std"]] for row in found["targets"]])
    say.words()
    columns = fitted.schema.columns
    say.table(
        ["input", "kind", "training range", "if missing"],
        [
            [column.name, row["kind"], str(column), f"{column.fill}" if found["impute"] else "refused"]
            for column, row in zip(columns, found["inputs"], strict=True)
        ],
    )
    say.words()
    say.words(f"alpha*, of the evidence  {found['alpha_star']:.4g}")
    say.words(f"alpha of the variance    {found['alpha']:.4g}")
    say.words(f"NLML per sample          {found['nlml']:.4f} (standardised targets)")
    say.words(f"hidden prior             {found['hidden_prior']:g}")
    features = found["features"]
    say.words(
        f"features                 {features['count']}, of which the data determine {features['determined']:.1f}; "
        f"condition {features['condition']:.1e}"
    )
    calibration = found["calibration"]
    say.words(f"calibration              {'none' if calibration is None else calibration['words']}")
    say.result(**found)


def update(
    model: Model,
    data: Data,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Model file to write.", show_default="MODEL")] = None,
    forgetting: Annotated[float, typer.Option(help="Weight that the old rows keep, up to 1.")] = 1.0,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Take in more rows in closed form, without training: features, alpha and calibration stay."""
    from lastlayer.tables import TableModel, check_writable, read

    say, path = Say(as_json), model if out is None else out
    check_writable(path)
    if not 0 < forgetting <= 1:
        raise InputError(f"--forgetting {forgetting} must be above 0 and at most 1")
    fitted, table = TableModel.load(model), read(data)
    fitted = fitted.update(table, targets=_names(target, table) if target else None, forgetting=forgetting)
    fitted.save(path)
    say.words(f"{len(table):,} more rows, {fitted.card['rows']:,} in all; saved {path}", "bold")
    say.result(model=str(path), new_rows=len(table), rows=fitted.card["rows"])


def export(
    model: Model,
    to: Annotated[
        Path | None,
        typer.Argument(help="FILE.onnx for an ONNX graph, or a folder.", show_default="MODEL's name-numpy"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The same, as an option.")] = None,
    as_json: Json = False,
) -> None:
    """For places without torch: one ONNX graph, or a folder that predicts with NumPy alone (model.npz, predict.py)."""
    from lastlayer.tables import TableModel, check_writable

    if to is not None and out is not None:
        raise InputError(f"{to} and --out {out}: give one place to write to")
    say, fitted = Say(as_json), TableModel.load(model)
    place = to or out or Path(f"{model.stem}-numpy")
    if place.suffix == ".onnx":
        from lastlayer.integrations.onnx import to_onnx

        check_writable(place)
        written = [to_onnx(fitted.model, place, inputs=fitted.schema.features, targets=fitted.schema.targets)]
        say.words(f"inputs, in this order: {', '.join(fitted.schema.features)}", "dim")
    else:
        from lastlayer.export import export_bundle

        written = export_bundle(fitted, place)
        say.words(f"try: python {place / 'predict.py'} ROWS.csv", "dim")
    for path in written:
        say.words(f"saved {path} ({path.stat().st_size / 1024:.0f} kB)")
    say.result(files=[str(path) for path in written])


# inside -----------------------------------------------------------------------------------------------------------


def _names(asked: list[str] | None, table: "Table") -> list[str]:
    """Column names with commas between them; a name that has a comma itself stands alone."""
    names: list[str] = []
    for word in asked or []:
        names += [word] if word in table.columns else [name.strip() for name in word.split(",") if name.strip()]
    return names


def _widths(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part.strip()]
    if not all(part.strip().isdecimal() and 1 <= int(part) <= WIDEST for part in parts):
        raise InputError(f"--hidden {text!r} must be whole numbers from 1 to {WIDEST} with commas, such as 50,50")
    return tuple(int(part) for part in parts)


def _describe(say: Say, data: Path, table: "Table", schema: "Schema") -> None:
    say.words(f"{data}: {len(table):,} rows, {len(table.columns)} columns", "bold")
    kinds = {row["name"]: row["kind"] for row in schema.as_json()["columns"]}
    ranges = {column.name: str(column) for column in schema.columns}
    rows = []
    for name in table.names:
        kind = "target" if name in schema.targets else kinds.get(name, "left out")
        rows.append([name, kind, ranges.get(name, "")])
    say.table(["column", "taken as", "range"], rows)
    say.words()


def _say_fitted(say: Say, fitted: "TableModel", seconds: float) -> None:
    model = fitted.model
    say.words(f"fitted {len(model.members_)} networks in {seconds:.0f} s")
    rows = [[name, float(std)] for name, std in zip(fitted.schema.targets, model.noise_std_, strict=True)]
    say.table(["target", "noise std"], rows)
    if model.calibration_ is not None:
        say.words(f"calibration: {model.calibration_}", "dim")


def _summary(fitted: "TableModel") -> dict[str, Any]:
    from lastlayer.tables import explain as explained

    return explained(fitted)


def _say_scores(say: Say, scores: "Scores") -> None:
    say.table(
        ["target", "RMSE", "R2", "LPD", "CRPS", "in 50%", "in 95%", "width of 95%"],
        [[s.target, s.rmse, s.r2, s.lpd, s.crps, s.coverage_50, s.coverage_95, s.width_95] for s in scores.targets],
        f"{scores.rows:,} rows",
    )
    say.words(f"joint LPD {scores.lpd:.4f}, calibration error {scores.calibration_error:.4f}")
