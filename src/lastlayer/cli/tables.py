"""Commands for a user's own table: fit, predict, evaluate, report, explain, update, export."""

import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from lastlayer import __version__
from lastlayer.cli.console import INTERRUPTED, Force, Json, Output
from lastlayer.errors import InputError, check_choice

if TYPE_CHECKING:
    from lastlayer.tables import Schema, Scores, Table

WIDEST = 10_000
Data = Annotated[
    Path, Argument(help="Table: .csv, .tsv or .jsonl, also with .gz, .parquet or .xlsx; the first line names columns.")
]
Model = Annotated[Path, Argument(help="Model file that `lastlayer fit` wrote.")]
Target = Annotated[
    list[str] | None, Option(help="Columns with the true values, with commas, if they are not called as in fit.")
]
Unknown = Annotated[
    str, Option(help="A text no training row had: 'error', or 'warn' to predict as if it were none of the known.")
]
Encoding = Annotated[str | None, Option(help="Of the text in DATA, such as cp1252.", show_default="UTF-8")]
Decimal = Annotated[str, Option(help="Decimal sign of DATA: '.', ',' or 'auto', as in training.")]


def fit(
    data: Data,
    target: Annotated[list[str], Option("--target", "-t", help="Column to predict; several with commas.")],
    model: Annotated[
        Path | None, Option("--model", "-m", help="Model file to write.", show_default="DATA's name.lastlayer")
    ] = None,
    drop: Annotated[list[str] | None, Option(help="Columns to leave out, with commas.")] = None,
    keep: Annotated[
        list[str] | None, Option(help="Columns to keep that look like mere labels of the rows, with commas.")
    ] = None,
    text: Annotated[list[str] | None, Option(help="Columns of numbers that are codes: take them as text.")] = None,
    impute: Annotated[
        str | None, Option(help="'median': fill missing numbers by it, texts by the most frequent.")
    ] = None,
    groups: Annotated[
        str | None, Option(help="Column that says which rows belong together, such as a patient.")
    ] = None,
    preset: Annotated[
        str | None,
        Option(
            help="'calibrated': a mixture; 'fast': fewer networks and steps; 'evidence': one network, uncalibrated.",
            show_default="calibrated",
        ),
    ] = None,
    hidden: Annotated[
        str | None, Option(help="Widths of the hidden layers, such as 50,50.", show_default="auto")
    ] = None,
    noise: Annotated[
        str | None,
        Option(
            help="'diagonal', 'full' (correlated targets), 'input' (it depends on the inputs) or 'auto'.",
            show_default="auto",
        ),
    ] = None,
    target_transform: Annotated[
        str, Option(help="'log': fit the logarithm of positive targets; 'auto': if they are skewed and it is less so.")
    ] = "none",
    members: Annotated[int | None, Option(min=1, max=100, help="Networks in the mixture.", show_default="auto")] = None,
    max_epochs: Annotated[
        int | None, Option(min=0, max=10**6, help="Passes over the data.", show_default="auto")
    ] = None,
    decimal: Annotated[str, Option(help="Decimal sign of numbers: '.', ',' or 'auto', as the table shows.")] = "auto",
    date_order: Annotated[
        str, Option(help="Of dates with the year last: 'dmy', 'mdy' or 'auto', as the table shows.")
    ] = "auto",
    encoding: Encoding = None,
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="The same seed gives the same model.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Learn to predict columns of a table from the others.

    Numbers are taken as they are, also with units, per cent and thousands signs; texts become 0/1 inputs, dates become
    days and calendar parts; missing values are refused with advice. All problems of the table are said at once. Of
    several targets some may be missing: each learns from the rows where it is known. Ctrl-C stops training early and
    saves the model as it is then.
    """
    from lastlayer.files import MODEL, check_output
    from lastlayer.tables import Reading, Schema, TableFile, TableModel
    from lastlayer.tables import explain as explained
    from lastlayer.tables.columns import Problems
    from lastlayer.tables.schema import IMPUTE

    file = TableFile(data, encoding)
    say, path = Output(as_json), model or Path(f"{file.stem}.lastlayer")
    check_output(path, MODEL, inputs=[data], force=force, advice="another --model")
    if impute is not None:
        check_choice("impute", impute, IMPUTE)
    widths, problems = None if hidden in (None, "auto") else _widths(str(hidden)), Problems()
    table = file.read(problems=problems.found)
    given: dict[str, Any] = {
        "preset": preset,
        "hidden": widths,
        "noise": noise,
        "n_members": members,
        "max_epochs": max_epochs,
    }
    given["target_transform"] = None if target_transform == "none" else target_transform
    asked = {name: value for name, value in given.items() if value is not None}  # the estimator decides the rest
    dropped, started = {*_names(drop, table), *([groups] if groups else [])}, time.monotonic()
    with say.heeding():
        kept, texts = _names(keep, table), _names(text, table)
        reading = Reading(dropped, kept, texts, impute is not None, decimal, date_order)
        schema = Schema.infer(table, _names(target, table), reading, problems=problems)
        _describe(say, data, table, schema)
        for line in schema.notes:
            say.note(line)
        fitted = TableModel.of(schema, table, groups=groups, random_state=seed, progress=not as_json, **asked)
    interrupted = any(note.startswith("interrupted") for note in say.notes)
    made = {"data": data.name, "fitted": datetime.now(UTC).isoformat(timespec="seconds"), "version": __version__}
    fitted.card.update(made, seed=seed, interrupted=interrupted, notes=say.notes)
    fitted.save(path)
    found, seconds = explained(fitted), time.monotonic() - started
    of_log = " to the logarithm of the targets" if found["settings"]["target_transform"] == "log" else ""
    say.words(f"fitted {found['members']} networks{of_log} in {seconds:.0f} s")
    say.table(["target", "noise std"], [[row["target"], f"{row['noise_std']:.4g}"] for row in found["targets"]])
    if found["calibration"] is not None:
        say.words(f"calibration: {found['calibration']['words']}", "dim")
    say.words(f"\nsaved {path} ({path.stat().st_size / 1024:.0f} kB)", "bold")
    say.words(f"next: lastlayer predict {path} NEW_ROWS.csv, lastlayer report {path} TEST_ROWS.csv", "dim")
    if interrupted:
        say.note(f"training was interrupted: {path} is usable, but a full fit would be better")
    say.result(model=str(path), seconds=seconds, interrupted=interrupted, **found)
    if interrupted:
        raise Exit(INTERRUPTED)


def predict(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        Option("--out", "-o", help=".csv, .tsv, .jsonl or .parquet.", show_default="DATA's name.predicted.csv"),
    ] = None,
    level: Annotated[float, Option(help="Probability of the intervals.")] = 0.95,
    unknown: Unknown = "error",
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Add mean, standard deviation, interval and degree of extrapolation to every row.

    Rows go through in pieces, so the table may be larger than memory. A CSV has the separator and decimal sign of DATA.
    """
    from lastlayer.files import PREDICTIONS, check_output
    from lastlayer.tables import TableFile, TableModel
    from lastlayer.tables.writing import Dialect, writing

    say, file = Output(as_json), TableFile(data, encoding, decimal)
    path = out or Path(f"{file.stem}.predicted.csv")
    check_output(path, PREDICTIONS, inputs=[model, data], force=force, advice="another --out")
    fitted = TableModel.load(model)
    rows, beyond, far, outside, strange = 0, 0, 0, Counter[str](), Counter[str]()
    sign, started = fitted.schema.decimal if decimal == "auto" else decimal, time.monotonic()
    with writing(path, Dialect(file.separator(), sign)) as write:
        for table, forecast in fitted.stream(file.chunks(), level=level, unknown=unknown):
            write(table.columns | forecast.cells)
            rows += len(table)
            beyond += forecast.beyond
            far += forecast.beyond_reach
            outside.update(forecast.outside)
            strange.update(forecast.unknown)
    seconds = time.monotonic() - started
    for text, count in strange.most_common(10):
        say.note(f"{count} rows have {text!r}, which no training row had: predicted without knowing it")
    say.words(f"{rows:,} rows in {seconds:.1f} s ({rows / max(seconds, 1e-9):,.0f} per second)")
    for name, count in (+outside).items():
        say.words(f"{count:,} rows leave the training range of {name}", "yellow")
    if beyond:
        say.words(f"{beyond:,} rows are farther out than every training row: look at the column affine_cost", "yellow")
    if far:
        say.words(
            f"{far:,} rows are farther out than any on which the intervals were checked: there they are a guess",
            "yellow",
        )
    say.words(f"saved {path}", "bold")
    found = {"outside_range": outside, "beyond": beyond, "beyond_reach": far}
    say.result(out=str(path), rows=rows, seconds=seconds, level=level, **found)


def evaluate(
    model: Model,
    data: Data,
    target: Target = None,
    unknown: Unknown = "error",
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Scores of predictions for a table that has the true values too; best for rows the model has not seen."""
    from lastlayer.tables import TableFile, TableModel, score

    say, fitted, table = Output(as_json), TableModel.load(model), TableFile(data, encoding, decimal).read()
    y = fitted.schema.targets_of(table, _names(target, table) or None)
    scores = score(fitted.predictive(table, unknown=unknown)[1], y, fitted.schema.targets)
    _say_scores(say, scores)
    say.result(**asdict(scores))


def report(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None, Option("--out", "-o", help="HTML file.", show_default="MODEL's name.report.html")
    ] = None,
    target: Target = None,
    unknown: Unknown = "error",
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """One HTML page to show a colleague: scores, pictures, rows to look at, model card. It opens offline.

    DATA are rows with the true values, best ones the model has not seen.
    """
    from lastlayer.files import PAGE, check_output, replacing
    from lastlayer.report import make_report
    from lastlayer.tables import TableFile, TableModel

    say, path = Output(as_json), out or Path(f"{model.stem}.report.html")
    check_output(path, PAGE, inputs=[model, data], force=force, advice="another --out")
    fitted, table = TableModel.load(model), TableFile(data, encoding, decimal).read()
    targets = _names(target, table) or None
    made = make_report(fitted, table, model_name=model.name, data_name=data.name, targets=targets, unknown=unknown)
    with replacing(path) as file:
        file.write(made.html.encode())
    _say_scores(say, made.scores)
    say.words(f"\nsaved {path}: open it in a browser", "bold")
    say.result(out=str(path), **asdict(made.scores))


def explain(
    model: Model,
    curves: Annotated[Path | None, Option(help="PNG file for what each input adds, by the additive members.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """What was learned: noise, alpha, calibration, training range of every input, condition of the features.

    Below it, the settings: what every "auto" became. Some members of the default mixture are additive, a sum of one
    function of each input: --curves draws these functions with their bands.
    """
    from lastlayer.files import PICTURE, SOFTWARE, check_output, replacing
    from lastlayer.tables import TableModel, facts
    from lastlayer.tables import explain as explained

    if curves is not None:
        if curves.suffix.lower() != ".png":
            raise InputError(f"--curves {curves} must be the name of a PNG file, such as curves.png")
        check_output(curves, PICTURE, inputs=[model], force=force, advice="another --curves")
    say, fitted = Output(as_json), TableModel.load(model)
    say.words(f"{model.name}\n", "bold")
    for subject, words in facts(fitted).items():
        say.words(f"{subject:17}{words}")
    say.words()
    filled = lambda column: str(column.fill) if fitted.schema.impute else "refused"
    rows = [[column.name, column.kind, str(column), filled(column)] for column in fitted.schema.columns]
    say.table(["input", "kind", "training range", "if missing"], rows)
    say.words("\nsettings", "bold")
    say.words(str(fitted.model.settings_))
    if curves is not None:
        from lastlayer.explain import additive_curves

        figure = additive_curves(fitted.model, names=fitted.schema.features)
        with replacing(curves) as file:
            figure.savefig(file, dpi=150, format="png", metadata={"Software": SOFTWARE})
        say.words(f"\nsaved {curves}", "bold")
    say.result(**explained(fitted))


def update(
    model: Model,
    data: Data,
    out: Annotated[Path | None, Option("--out", "-o", help="Model file to write.", show_default="MODEL")] = None,
    forgetting: Annotated[float, Option(help="Weight that the old rows keep, up to 1.")] = 1.0,
    target: Target = None,
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Take in more rows in closed form, without training: features and alpha stay. Rows that lie farther from their
    predictions than calibration expected widen the intervals."""
    from lastlayer.files import MODEL, check_output
    from lastlayer.tables import TableFile, TableModel

    say, path = Output(as_json), out or model
    check_output(path, MODEL, inputs=[data], force=force, advice="another --out")
    if not 0 < forgetting <= 1:
        raise InputError(f"--forgetting {forgetting} must be above 0 and at most 1")
    fitted, table = TableModel.load(model), TableFile(data, encoding, decimal).read()
    fitted = fitted.update(table, targets=_names(target, table) or None, forgetting=forgetting)
    fitted.save(path)
    say.words(f"{len(table):,} more rows, {fitted.card['rows']:,} in all; saved {path}", "bold")
    say.result(model=str(path), new_rows=len(table), rows=fitted.card["rows"])


def export(
    model: Model,
    to: Annotated[
        Path | None,
        Argument(
            help="FILE.onnx for an ONNX graph, FILE.c for C source, or a folder.", show_default="MODEL's name-numpy"
        ),
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="The same, as an option.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """For places without torch: an ONNX graph, C source, or a folder that predicts with NumPy alone (model.npz,
    predict.py)."""
    from lastlayer.files import BUNDLE, BUNDLE_READER, C_SOURCE, ONNX_GRAPH, check_output
    from lastlayer.tables import TableModel

    if to is not None and out is not None:
        raise InputError(f"{to} and --out {out}: give one place to write to")
    place = to or out or Path(f"{model.stem}-numpy")
    single = {".onnx": ONNX_GRAPH, ".c": C_SOURCE}.get(place.suffix)
    if single is not None:
        check_output(place, single, inputs=[model], force=force)
    elif place.is_dir():
        for name, kind in (("model.npz", BUNDLE), ("predict.py", BUNDLE_READER)):
            check_output(place / name, kind, inputs=[model], force=force, advice="another folder")
    say, fitted = Output(as_json), TableModel.load(model)
    if place.suffix == ".onnx":
        from lastlayer.integrations.onnx import to_onnx

        written = [to_onnx(fitted.model, place, inputs=fitted.schema.features, targets=fitted.schema.targets)]
        say.words(f"inputs, in this order: {', '.join(fitted.schema.features)}", "dim")
    elif place.suffix == ".c":
        from lastlayer.integrations import export_c

        written = [export_c(fitted.model, place)]
        say.words(f"inputs, in this order: {', '.join(fitted.schema.features)}", "dim")
    else:
        from lastlayer.export import export_bundle

        written = export_bundle(fitted, place)
        say.words(f"try: python {place / 'predict.py'} ROWS.csv", "dim")
    for path in written:
        say.words(f"saved {path} ({path.stat().st_size / 1024:.0f} kB)")
    say.result(files=[str(path) for path in written])


COMMANDS = (fit, predict, evaluate, report, explain, update, export)


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


def _describe(say: Output, data: Path, table: "Table", schema: "Schema") -> None:
    say.words(f"{data}: {len(table):,} rows, {len(table.columns)} columns", "bold")
    taken = dict.fromkeys(schema.targets, ("target", ""))
    taken |= {column.name: (column.kind, str(column)) for column in schema.columns}
    rows = [[name, *taken.get(name, ("left out", ""))] for name in table.columns]
    say.table(["column", "taken as", "range"], rows)
    say.words()


def _say_scores(say: Output, scores: "Scores") -> None:
    head, *rows = scores.table()
    say.table(head, rows, f"{scores.rows:,} rows")
    say.words(f"joint LPD {scores.lpd:.4f}, calibration error {scores.calibration_error:.4f}")
