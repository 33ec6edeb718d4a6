"""The commands for a user's table: fit, predict, evaluate, report, explain, update, export."""

import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from lastlayer import __version__
from lastlayer.cli.console import INTERRUPTED, Force, Json, Output
from lastlayer.cli.explain import explain, print_ranking
from lastlayer.cli.options import Data, Decimal, Encoding, Model, Target, Unknown, names_in
from lastlayer.errors import InputError

if TYPE_CHECKING:
    from lastlayer.tables import Comparison, Ranking, Schema, Scores, Table

WIDEST = 10_000


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
        str | None, Option(help="Column that identifies rows which belong together, such as a patient.")
    ] = None,
    preset: Annotated[
        str | None,
        Option(
            help="'calibrated': a mixture; 'fast': fewer networks and epochs; 'evidence': one network, uncalibrated.",
            show_default="calibrated",
        ),
    ] = None,
    hidden: Annotated[
        str | None, Option(help="Widths of the hidden layers, such as 50,50.", show_default="auto")
    ] = None,
    noise: Annotated[
        str | None,
        Option(
            help="Noise model: 'diagonal', 'full' (correlated targets), 'input' (depends on the inputs) or 'auto'.",
            show_default="auto",
        ),
    ] = None,
    likelihood: Annotated[
        str,
        Option(
            help="Distribution of the targets: 'gaussian', 'lognormal' (of positive targets), or 'auto': the latter "
            "where it reduces their skewness."
        ),
    ] = "gaussian",
    members: Annotated[
        int | None, Option(min=1, max=100, help="Number of networks in the mixture.", show_default="auto")
    ] = None,
    max_epochs: Annotated[
        int | None, Option(min=0, max=10**6, help="Maximum number of passes over the data.", show_default="auto")
    ] = None,
    decimal: Annotated[
        str, Option(help="Decimal sign of numbers: '.', ',' or 'auto' (inferred from the table).")
    ] = "auto",
    date_order: Annotated[
        str, Option(help="Order of dates with the year last: 'dmy', 'mdy' or 'auto' (inferred from the table).")
    ] = "auto",
    encoding: Encoding = None,
    holdout: Annotated[
        float | None,
        Option(
            help="Share of rows, chosen at random, to keep out of the fit for scoring.", show_default="cross-validation"
        ),
    ] = None,
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed; the same seed gives the same model.")] = 0,
    force: Force = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Also print noise, LPD and calibration curves.")] = False,
    as_json: Json = False,
) -> None:
    """Learn to predict columns of a table from the others, and score the predictions on held-out rows."""
    from lastlayer._internal.files import MODEL, check_output
    from lastlayer.tables import Schema, TableFile, TableRegressor, keep_back, measured
    from lastlayer.tables import explain as explained
    from lastlayer.tables.columns import Problems

    file, problems, output = TableFile(data, encoding), Problems(), Output(as_json)
    path = model or Path(f"{file.stem}.lastlayer")
    check_output(path, MODEL, inputs=[data], force=force, advice="another --model")
    given = {"preset": preset, "hidden": _widths(hidden), "noise": noise, "n_members": members}
    given |= {"max_epochs": max_epochs, "likelihood": likelihood}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}  # the rest is "auto"
    table, started = file.read(problems=problems.found), time.monotonic()
    asked |= {name: names_in(names, table) for name, names in (("drop", drop), ("keep", keep), ("text", text))}
    asked |= {"impute": impute, "decimal": decimal, "date_order": date_order}
    fitted = TableRegressor(random_state=seed, progress=not as_json, **asked)
    with output.heeding():
        targets = names_in(target, table)
        schema = Schema.infer(table, targets, fitted.reading(groups), problems=problems)
        _describe(output, data, table, schema)
        rows, kept = (table, None) if holdout is None else keep_back(table, holdout, groups=groups, seed=seed)
        fitted.fit(rows, target=targets, groups=groups, schema=schema if kept is None else None)
        seconds = time.monotonic() - started
        comparison, ranking = measured(fitted, rows, kept)
    interrupted = any(note.startswith("interrupted") for note in output.notes)
    made = {"data": data.name, "fitted": datetime.now(UTC).isoformat(timespec="seconds"), "version": __version__}
    fitted.card_ |= made | {"seed": seed, "interrupted": interrupted, "notes": output.notes}
    fitted.card_["held_out"] = None if comparison is None else asdict(comparison)
    fitted.card_["importance"] = None if ranking is None else ranking.as_json()
    fitted.save(path)
    facts = {"seconds": seconds, "interrupted": interrupted, "rows": len(rows), **explained(fitted)}
    _print_fit(output, path, facts, comparison, ranking, verbose=verbose)
    output.result(model=str(path), **facts)
    if interrupted:
        raise Exit(INTERRUPTED)


def predict(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        Option(
            "--out",
            "-o",
            help="File to write: .csv, .tsv, .jsonl or .parquet.",
            show_default="DATA's name.predicted.csv",
        ),
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
    from lastlayer.tables import TableFile, load_table, stream
    from lastlayer.tables.writing import Dialect, writing

    output, file = Output(as_json), TableFile(data, encoding, decimal)
    path = out or Path(f"{file.stem}.predicted.csv")
    check_output(path, PREDICTIONS, inputs=[model, data], force=force, advice="another --out")
    fitted = load_table(model, unknown=unknown)
    rows, beyond, far, outside, strange = 0, 0, 0, Counter[str](), Counter[str]()
    sign, started = fitted.schema_.decimal if decimal == "auto" else decimal, time.monotonic()
    with writing(path, Dialect(file.separator(), sign)) as write:
        for table, forecast in stream(fitted, file.chunks(), level=level):
            write(table.columns | forecast.cells)
            rows += len(table)
            beyond += forecast.beyond
            far += forecast.beyond_reach
            outside.update(forecast.outside)
            strange.update(forecast.unknown)
    seconds = time.monotonic() - started
    for text, count in strange.most_common(10):
        output.note(f"{count} rows have {text!r}, which no training row had: predicted as no known category")
    output.words(f"{rows:,} rows in {seconds:.1f} s ({rows / max(seconds, 1e-9):,.0f} per second)")
    for name, count in (+outside).items():
        output.words(f"{_rows(count)} outside the training range of {name}", "yellow")
    if beyond:
        output.words(f"{_rows(beyond)} farther out than every training row: see the column extrapolation", "yellow")
    if far:
        output.words(
            f"{_rows(far)} farther out than the rows that intervals were calibrated on: do not rely on them", "yellow"
        )
    output.words(f"saved {path}", "bold")
    found = {"outside_range": outside, "beyond": beyond, "beyond_reach": far}
    output.result(out=str(path), rows=rows, seconds=seconds, level=level, **found)


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
    if not 0 < forgetting <= 1:
        raise InputError(f"--forgetting {forgetting} must be above 0 and at most 1")
    fitted, table = load_table(model), TableFile(data, encoding, decimal).read()
    fitted.update(table, target=names_in(target, table), forgetting=forgetting).save(path)
    output.words(f"{len(table):,} more rows, {fitted.card_['rows']:,} in all; saved {path}", "bold")
    output.result(model=str(path), new_rows=len(table), rows=fitted.card_["rows"])


def export(
    model: Model,
    to: Annotated[
        Path | None,
        Argument(
            help="FILE.onnx for an ONNX graph, FILE.c for C source, or a folder for NumPy.",
            show_default="MODEL's name-numpy",
        ),
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="The same as TO, as an option.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Export the model for use without torch."""
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
    if place.suffix == ".onnx":
        from lastlayer.integrations.onnx import to_onnx

        written = [to_onnx(fitted, place, inputs=fitted.schema_.features, targets=fitted.schema_.targets)]
        output.words(f"inputs, in this order: {', '.join(fitted.schema_.features)}", "dim")
    elif place.suffix == ".c":
        from lastlayer.integrations import export_c

        written = [export_c(fitted, place)]
        output.words(f"inputs, in this order: {', '.join(fitted.schema_.features)}", "dim")
    else:
        from lastlayer.integrations.export import export_bundle

        written = export_bundle(fitted, place)
        output.words(f"try: python {place / 'predict.py'} ROWS.csv", "dim")
    for path in written:
        output.words(f"saved {path} ({path.stat().st_size / 1024:.0f} kB)")
    output.result(files=[str(path) for path in written])


COMMANDS = (fit, predict, evaluate, report, explain, update, export)


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count:,} rows are"


def _widths(text: str | None) -> tuple[int, ...] | None:
    if text in (None, "auto"):
        return None
    parts = [part for part in text.split(",") if part.strip()]
    if not all(part.strip().isdecimal() and 1 <= int(part) <= WIDEST for part in parts):
        raise InputError(
            f"--hidden {text!r} must be whole numbers from 1 to {WIDEST}, separated by commas, such as 50,50"
        )
    return tuple(int(part) for part in parts)


def _describe(output: Output, data: Path, table: "Table", schema: "Schema") -> None:
    output.words(f"{data}: {len(table):,} rows, {len(table.columns)} columns", "bold")
    taken = dict.fromkeys(schema.targets, ("target", ""))
    taken |= {column.name: (column.kind, str(column)) for column in schema.columns}
    rows = [[name, *taken.get(name, ("excluded", ""))] for name in table.columns]
    output.table(["column", "used as", "range"], rows)
    output.words()
    for line in schema.notes:
        output.note(line)


def _print_fit(
    output: Output,
    path: Path,
    facts: dict[str, Any],
    comparison: "Comparison | None",
    ranking: "Ranking | None",
    *,
    verbose: bool,
) -> None:
    networks = "1 network" if facts["members"] == 1 else f"{facts['members']} networks"
    to_working = f" to {facts['modelled']}" if facts["modelled"] else ""
    output.words(f"{facts['rows']:,} rows, {networks}, fitted{to_working} in {facts['seconds']:.0f} s\n")
    _print_comparison(output, comparison)
    for sentence in [] if ranking is None else ranking.sentences():
        output.words(sentence)
    if verbose:
        print_ranking(output, ranking)
        _print_details(output, facts, comparison)
    output.words(f"\nsaved {path} ({path.stat().st_size / 1024:,.0f} kB)", "bold")
    output.words(f"next: lastlayer predict {path} NEW_ROWS.csv, lastlayer report {path} TEST_ROWS.csv", "dim")
    if facts["interrupted"]:
        output.note(f"training was interrupted: {path} can be used, but a complete fit would be better")


def _print_comparison(output: Output, found: "Comparison | None") -> None:
    if found is None:
        output.words("this fit had no held-out rows to score on: use --holdout 0.2 to keep some out", "dim")
        return
    output.words(f"Scores {found.caption}", "bold")
    head, *rows = found.table()
    output.table(head, rows)
    output.words(
        "RMSE (the typical error) and widths are in the units of the target; ideally 90% are in the intervals\n", "dim"
    )


def _print_details(output: Output, facts: dict[str, Any], found: "Comparison | None") -> None:
    """Print further details: noise, LPD, and the calibration curves from affine cost to variance."""
    densities = {} if found is None else {s.target: s.lpd for s in found.methods if s.lpd is not None}
    cell = lambda target: f"{densities[target]:.4f}" if target in densities else "n/a"
    rows = [[row["target"], f"{row['noise_std']:.4g}", cell(row["target"])] for row in facts["targets"]]
    output.words()
    output.table(["target", "noise std", "held-out LPD"], rows)
    if facts["calibration"] is not None:
        output.words(f"calibration: {facts['calibration']['words']}", "dim")


def _print_scores(output: Output, scores: "Scores") -> None:
    head, *rows = scores.table()
    output.table(head, rows, f"{scores.rows:,} rows")
    output.words(f"joint LPD {scores.lpd:.4f}, calibration error {scores.calibration_error:.4f}")
