"""The commands for a user's table: fit, predict, evaluate, report, explain, update, export."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from lastlayer import __version__
from lastlayer.cli.console import INTERRUPTED, Force, Json, Output
from lastlayer.errors import InputError

if TYPE_CHECKING:
    from lastlayer.tables import Comparison, Ranking, Schema, Scores, Table
    from lastlayer.tables.files import Cells

WIDEST = 10_000
Data = Annotated[
    Path, Argument(help="Table: .csv, .tsv, .jsonl (also .gz), .parquet or .xlsx; the first line has the column names.")
]
Model = Annotated[Path, Argument(help="Model file written by `lastlayer fit`.")]
Target = Annotated[
    list[str] | None,
    Option(help="Columns with the true values, separated by commas, if their names differ from those in fit."),
]
Unknown = Annotated[
    str, Option(help="For texts that no training row had: 'error', or 'warn' to predict anyway, as no known category.")
]
Encoding = Annotated[str | None, Option(help="Text encoding of DATA, such as cp1252.", show_default="UTF-8")]
Decimal = Annotated[str, Option(help="Decimal sign of DATA: '.', ',' or 'auto' (as in training).")]


def fit(
    data: Data,
    target: Annotated[list[str], Option("--target", "-t", help="Column to predict; separate several with commas.")],
    model: Annotated[
        Path | None, Option("--model", "-m", help="Model file to write.", show_default="DATA's name.lastlayer")
    ] = None,
    drop: Annotated[list[str] | None, Option(help="Columns to exclude, separated by commas.")] = None,
    keep: Annotated[
        list[str] | None, Option(help="Columns to keep although they look like row labels, separated by commas.")
    ] = None,
    text: Annotated[list[str] | None, Option(help="Columns to read as text, such as numeric codes.")] = None,
    impute: Annotated[
        str | None, Option(help="'median': fill missing numbers with the median, texts with the most frequent one.")
    ] = None,
    groups: Annotated[
        str | None, Option(help="Column that tells which rows belong together, such as a patient.")
    ] = None,
    preset: Annotated[
        str, Option(help="'calibrated': a mixture; 'fast': fewer networks and epochs; 'evidence': one, uncalibrated.")
    ] = "calibrated",
    hidden: Annotated[str, Option(help="Widths of the hidden layers, such as 50,50.")] = "auto",
    noise: Annotated[
        str, Option(help="Noise: 'diagonal', 'full' (correlated targets), 'input' (depends on the inputs) or 'auto'.")
    ] = "auto",
    likelihood: Annotated[
        str,
        Option(
            help="'gaussian', 'lognormal', 'counts', 'levels', 'student' (outliers) or 'auto': by held-out targets."
        ),
    ] = "auto",
    members: Annotated[
        int | None, Option(min=1, max=100, help="Number of networks in the mixture.", show_default="auto")
    ] = None,
    max_epochs: Annotated[
        int | None, Option(min=0, max=10**6, help="Maximum number of passes over the data.", show_default="auto")
    ] = None,
    decimal: Annotated[str, Option(help="Decimal sign of numbers: '.', ',' or 'auto' (inferred).")] = "auto",
    date_order: Annotated[str, Option(help="Order of dates with the year last: 'dmy', 'mdy' or 'auto'.")] = "auto",
    encoding: Encoding = None,
    holdout: Annotated[
        float | None, Option(help="Share of rows to keep out of the fit for scoring.", show_default="cross-validation")
    ] = None,
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed; the same seed gives the same model.")] = 0,
    force: Force = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Also print noise, LPD and calibration curves.")] = False,
    as_json: Json = False,
) -> None:
    """Learn to predict columns of a table from the others, and score the predictions on held-out rows."""
    started = time.monotonic()  # imports are part of what a person waits for
    from lastlayer._internal.files import MODEL, check_output
    from lastlayer.tables import Schema, TableFile, TableRegressor, compare, held_out_importance, importance, keep_back
    from lastlayer.tables import explain as explained
    from lastlayer.tables.columns import Problems

    file, problems, output = TableFile(data, encoding), Problems(), Output(as_json)
    path = model or Path(f"{file.stem}.lastlayer")
    check_output(path, MODEL, inputs=[data], force=force, advice="another --model")
    table = file.read(problems=problems.found)
    targets = names_in(target, table)
    fitted = TableRegressor(
        _widths(hidden),
        preset=preset,
        noise=noise,
        likelihood=likelihood,
        n_members=members or "auto",
        max_epochs="auto" if max_epochs is None else max_epochs,
        drop=names_in(drop, table),
        keep=names_in(keep, table),
        text=names_in(text, table),
        impute=impute,
        decimal=decimal,
        date_order=date_order,
        random_state=seed,
        progress=not as_json,
    )
    with output.heeding():
        schema = Schema.infer(table, targets, **fitted.reading(groups), problems=problems)
        _describe(output, data, table, schema)
        rows, kept = (table, None) if holdout is None else keep_back(table, holdout, groups=groups, seed=seed)
        fitted.fit(rows, target=targets, groups=groups, schema=schema if kept is None else None)
        comparison = compare(fitted, rows, kept)
        ranking = held_out_importance(fitted, rows) if kept is None else importance(fitted, kept, kept_back=True)
    interrupted = any(note.startswith("interrupted") for note in output.notes)
    fitted.card_ |= {
        "data": data.name,
        "fitted": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "seed": seed,
        "interrupted": interrupted,
        "notes": output.notes,
        "held_out": None if comparison is None else asdict(comparison),
        "importance": None if ranking is None else ranking.as_json(),
    }
    fitted.save(path)
    seconds = time.monotonic() - started
    facts = {"seconds": seconds, "interrupted": interrupted, "rows": len(rows), **explained(fitted)}
    networks = "1 network" if facts["members"] == 1 else f"{facts['members']} networks"
    described = f"; {facts['described']}" if facts["described"] else ""
    output.words(f"{len(rows):,} rows, {networks}, fitted in {seconds:.0f} s{described}\n")
    _print_comparison(output, comparison)
    for sentence in [] if ranking is None else ranking.sentences():
        output.words(sentence)
    if verbose:
        _print_ranking(output, ranking)
        _print_details(output, facts, comparison)
    output.words(f"\nsaved {path} ({path.stat().st_size / 1024:,.0f} kB)", "bold")
    output.words(f"next: lastlayer predict {path} NEW_ROWS.csv, lastlayer report {path} TEST_ROWS.csv", "dim")
    if interrupted:
        output.note(f"training was interrupted: {path} can be used, but a complete fit would be better")
    output.result(model=str(path), **facts)
    if interrupted:
        raise Exit(INTERRUPTED)


def predict(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        Option("--out", "-o", help=".csv, .tsv, .jsonl or .parquet file.", show_default="DATA's name.predicted.csv"),
    ] = None,
    level: Annotated[float, Option(help="Probability of the intervals.")] = 0.95,
    unknown: Unknown = "error",
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict each row: add mean, standard deviation, interval and degree of extrapolation as columns."""
    from lastlayer._internal.files import PREDICTIONS, check_output
    from lastlayer.tables import TableFile, forecast, load_table
    from lastlayer.tables.writing import write_table

    output, file = Output(as_json), TableFile(data, encoding, decimal)
    path = out or Path(f"{file.stem}.predicted.csv")
    check_output(path, PREDICTIONS, inputs=[model, data], force=force, advice="another --out")
    fitted = load_table(model, unknown=unknown)
    counts, outside, strange = Counter[str](), Counter[str](), Counter[str]()

    def predicted() -> "Iterator[Cells]":
        for table in file.chunks():
            found = forecast(fitted, table, level=level)
            counts.update(found.counts)
            outside.update(found.outside)
            strange.update(found.unknown)
            yield table.columns | found.cells

    sign, started = fitted.schema_.decimal if decimal == "auto" else decimal, time.monotonic()
    write_table(path, predicted(), separator=file.separator(), decimal=sign)
    seconds, rows = time.monotonic() - started, counts["rows"]
    for text, count in strange.most_common(10):
        output.note(f"{count} rows have {text!r}, which no training row had: predicted as no known category")
    output.words(f"{rows:,} rows in {seconds:.1f} s ({rows / max(seconds, 1e-9):,.0f} per second)")
    remarks = {f"outside the training range of {name}": count for name, count in (+outside).items()}
    remarks["farther out than every training row: see the column extrapolation"] = counts["beyond"]
    remarks["farther out than the rows that intervals were calibrated on: do not rely on them"] = counts["beyond_reach"]
    for remark, count in remarks.items():
        if count:
            output.words(f"{'1 row is' if count == 1 else f'{count:,} rows are'} {remark}", "yellow")
    output.words(f"saved {path}", "bold")
    output.result(out=str(path), seconds=seconds, level=level, outside_range=outside, **counts)


def evaluate(
    model: Model,
    data: Data,
    target: Target = None,
    unknown: Unknown = "error",
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Score predictions for a table with the true values, preferably rows that the model has not seen."""
    from lastlayer.tables import TableFile, load_table

    output, table = Output(as_json), TableFile(data, encoding, decimal).read()
    scores = load_table(model, unknown=unknown).evaluate(table, target=names_in(target, table))
    _print_scores(output, scores)
    output.result(**asdict(scores))


def report(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None, Option("--out", "-o", help="HTML file to write.", show_default="MODEL's name.report.html")
    ] = None,
    group: Annotated[str | None, Option(help="Column of texts: intervals are also checked for each of them.")] = None,
    target: Target = None,
    unknown: Unknown = "error",
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write an HTML page for colleagues: whether intervals hold, which inputs matter, plots, rows to look at."""
    from lastlayer._internal.files import PAGE, check_output, replacing
    from lastlayer.report import make_report
    from lastlayer.tables import TableFile, load_table

    output, path = Output(as_json), out or Path(f"{model.stem}.report.html")
    check_output(path, PAGE, inputs=[model, data], force=force, advice="another --out")
    fitted, table = load_table(model, unknown=unknown), TableFile(data, encoding, decimal).read()
    targets = names_in(target, table) or None
    made = make_report(fitted, table, targets=targets, group=group, model_name=model.name, data_name=data.name)
    with replacing(path) as file:
        file.write(made.html.encode())
    output.words(f"{made.verdict}\n")
    _print_scores(output, made.scores)
    output.words(f"\nsaved {path}: open it in a browser", "bold")
    output.result(out=str(path), verdict=made.verdict, **asdict(made.scores))


def explain(
    model: Model,
    data: Annotated[
        Path | None, Option(help="Table with true values to measure importance on.", show_default="held-out rows")
    ] = None,
    importance: Annotated[Path | None, Option(help="PNG file to write: how much each input matters.")] = None,
    dependence: Annotated[Path | None, Option(help="PNG file to write: predictions as each input varies.")] = None,
    curves: Annotated[Path | None, Option(help="PNG file to write: effect of each input, additive members.")] = None,
    target: Target = None,
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show which inputs matter, how predictions depend on each of them, and what the model has learned."""
    from lastlayer import plots
    from lastlayer._internal.files import PICTURE, SOFTWARE, check_output, replacing
    from lastlayer.tables import TableFile, facts, load_table
    from lastlayer.tables import dependence as vary
    from lastlayer.tables import explain as explained
    from lastlayer.tables import importance as measure
    from lastlayer.tables.importance import extremes_table, saved_ranking

    pictures = {"importance": importance, "dependence": dependence, "curves": curves}
    asked = {option: path for option, path in pictures.items() if path is not None}
    for option, path in asked.items():
        if path.suffix.lower() != ".png":
            raise InputError(f"--{option} {path} must be a PNG file, such as {option}.png")
        inputs = [model] if data is None else [model, data]
        check_output(path, PICTURE, inputs=inputs, force=force, advice=f"another --{option}")
    output, fitted = Output(as_json), load_table(model)
    if data is None:
        table, ranking, others = None, saved_ranking(fitted), "other inputs at typical values"
    else:
        table, others = TableFile(data, encoding, decimal).read(), "averaged over the given rows"
        ranking = measure(fitted, table, targets=names_in(target, table) or None)
    if ranking is None and importance is not None:
        raise InputError("this model file has no importance of inputs: give rows with the true values with --data")
    schema, varied = fitted.schema_, vary(fitted, table)
    output.words(model.name, "bold")
    _print_ranking(output, ranking)
    output.words(
        f"\nPredictions as one input varies over its training range, {others}; ±: 90% band of the function", "bold"
    )
    output.table(extremes_table(varied, schema.targets))
    output.words("\nThe model", "bold")
    for subject, words in facts(fitted).items():
        output.words(f"{subject:17}{words}")
    output.words()
    filled = lambda column: str(column.fill) if schema.impute else "rejected"
    rows = [[column.name, column.kind, str(column), filled(column)] for column in schema.columns]
    output.table([["input", "kind", "training range", "if missing"], *rows])
    output.words("\nsettings", "bold")
    output.words(str(fitted.settings_))
    draw = {
        "importance": lambda: plots.importance([] if ranking is None else ranking.inputs, targets=schema.targets),
        "dependence": lambda: plots.partial_dependence(varied, targets=schema.targets),
        "curves": lambda: plots.additive_curves(fitted, names=schema.features),
    }
    for option, path in asked.items():
        with replacing(path) as file:
            draw[option]().savefig(file, dpi=150, format="png", metadata={"Software": SOFTWARE})
        output.words(f"\nsaved {path}", "bold")
    measured = {"importance": None if ranking is None else ranking.as_json()}
    output.result(**explained(fitted) | measured, dependence=[asdict(one) for one in varied])


def update(
    model: Model,
    data: Data,
    out: Annotated[Path | None, Option("--out", "-o", help="Model file to write.", show_default="MODEL")] = None,
    forgetting: Annotated[float, Option(help="Factor for the weight of the old rows, at most 1.")] = 1.0,
    target: Target = None,
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Update the model with more rows in closed form, without training."""
    from lastlayer._internal.files import MODEL, check_output
    from lastlayer.tables import TableFile, load_table

    output, path = Output(as_json), out or model
    check_output(path, MODEL, inputs=[data], force=force, advice="another --out")
    fitted, table = load_table(model), TableFile(data, encoding, decimal).read()
    fitted.update(table, target=names_in(target, table), forgetting=forgetting).save(path)
    output.words(f"{len(table):,} more rows, {fitted.card_['rows']:,} in all; saved {path}", "bold")
    output.result(model=str(path), new_rows=len(table), rows=fitted.card_["rows"])


def export(
    model: Model,
    to: Annotated[
        Path | None, Argument(help="FILE.onnx, FILE.c, or a folder for NumPy.", show_default="MODEL's name-numpy")
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="The same as TO, as an option.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Export the model for use without torch: as an ONNX graph, C source, or a folder for NumPy."""
    from lastlayer._internal.files import BUNDLE, BUNDLE_READER, C_SOURCE, ONNX_GRAPH, check_output
    from lastlayer.tables import load_table

    if to is not None and out is not None:
        raise InputError(f"{to} and --out {out}: give only one of them")
    place = to or out or Path(f"{model.stem}-numpy")
    single = {".onnx": ONNX_GRAPH, ".c": C_SOURCE}.get(place.suffix)
    if single is not None:
        check_output(place, single, inputs=[model], force=force)
    elif place.is_dir():
        for name, kind in (("model.npz", BUNDLE), ("predict.py", BUNDLE_READER)):
            check_output(place / name, kind, inputs=[model], force=force, advice="another folder")
    output, fitted = Output(as_json), load_table(model)
    advice = f"inputs, in this order: {', '.join(fitted.schema_.features)}"
    if place.suffix == ".onnx":
        from lastlayer.integrations.onnx import to_onnx

        written = [to_onnx(fitted, place, inputs=fitted.schema_.features, targets=fitted.schema_.targets)]
    elif place.suffix == ".c":
        from lastlayer.integrations import export_c

        written = [export_c(fitted, place)]
    else:
        from lastlayer.integrations.export import export_bundle

        written, advice = export_bundle(fitted, place), f"try: python {place / 'predict.py'} ROWS.csv"
    output.words(advice, "dim")
    for path in written:
        output.words(f"saved {path} ({path.stat().st_size / 1024:.0f} kB)")
    output.result(files=[str(path) for path in written])


COMMANDS = (fit, predict, evaluate, report, explain, update, export)


def names_in(asked: list[str] | None, table: "Table") -> list[str]:
    """Split column names at commas, except where the whole text is a column name."""
    names: list[str] = []
    for word in asked or []:
        names += [word] if word in table.columns else [name.strip() for name in word.split(",") if name.strip()]
    return names


def _widths(text: str) -> tuple[int, ...] | str:
    parts = [part for part in text.split(",") if part.strip()]
    if text != "auto" and not all(part.strip().isdecimal() and 1 <= int(part) <= WIDEST for part in parts):
        raise InputError(
            f"--hidden {text!r} must be whole numbers from 1 to {WIDEST}, separated by commas, such as 50,50"
        )
    return text if text == "auto" else tuple(map(int, parts))


def _describe(output: Output, data: Path, table: "Table", schema: "Schema") -> None:
    output.words(f"{data}: {len(table):,} rows, {len(table.columns)} columns", "bold")
    taken = dict.fromkeys(schema.targets, ("target", ""))
    taken |= {column.name: (column.kind, str(column)) for column in schema.columns}
    rows = [[name, *taken.get(name, ("excluded", ""))] for name in table.columns]
    output.table([["column", "used as", "range"], *rows])
    output.words()
    for line in schema.notes:
        output.note(line)


def _print_comparison(output: Output, found: "Comparison | None") -> None:
    if found is None:
        output.words("this fit had no held-out rows to score on: use --holdout 0.2 to keep some out", "dim")
        return
    output.words(f"Scores {found.caption}", "bold")
    output.table(found.table())
    output.words(
        "RMSE (the typical error) and widths are in the units of the target; ideally 90% are in the intervals\n", "dim"
    )


def _print_details(output: Output, facts: dict[str, Any], found: "Comparison | None") -> None:
    """Print noise, LPD, and the calibration curves from affine cost to variance."""
    densities = {} if found is None else {s.target: f"{s.lpd:.4f}" for s in found.methods if s.lpd is not None}
    names = ((row["target"], row["noise_std"]) for row in facts["targets"])
    rows = [[target, f"{std:.4g}", densities.get(target, "n/a")] for target, std in names]
    output.words()
    output.table([["target", "noise std", "held-out LPD"], *rows])
    if facts["calibration"] is not None:
        output.words(f"calibration: {facts['calibration']['words']}", "dim")


def _print_ranking(output: Output, found: "Ranking | None") -> None:
    if found is None:
        output.words("the importance of inputs was not measured in the fit: give rows with --data", "dim")
        return
    output.words(f"\nWhich inputs matter: loss of accuracy on {found.caption} when an input is shuffled", "bold")
    output.table(found.table())


def _print_scores(output: Output, scores: "Scores") -> None:
    output.table(scores.table(), f"{scores.rows:,} rows")
    output.words(f"joint LPD {scores.lpd:.4f}, calibration error {scores.calibration_error:.4f}")
