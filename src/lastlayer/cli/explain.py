"""The command `explain`, and the printing of a ranking of inputs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lastlayer.cli.console import Force, Json, Output
from lastlayer.cli.options import Decimal, Encoding, Model, Target, names_in
from lastlayer.errors import InputError

if TYPE_CHECKING:
    from lastlayer.tables import Ranking


def explain(
    model: Model,
    data: Annotated[
        Path | None,
        Option(help="Table with the true values to measure importance on.", show_default="held-out rows of the fit"),
    ] = None,
    importance: Annotated[Path | None, Option(help="PNG file to write: how much each input matters.")] = None,
    dependence: Annotated[
        Path | None, Option(help="PNG file to write: predictions as each input varies, with bands.")
    ] = None,
    curves: Annotated[
        Path | None, Option(help="PNG file to write: the effect of each input in the additive members.")
    ] = None,
    target: Target = None,
    decimal: Decimal = "auto",
    encoding: Encoding = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show which inputs matter, how predictions depend on each of them, and what the model has learned."""
    from lastlayer._internal.files import PICTURE, SOFTWARE, check_output, replacing
    from lastlayer.plots import additive_curves
    from lastlayer.plots import figures as plots
    from lastlayer.tables import TableFile, facts, load_table
    from lastlayer.tables import dependence as vary
    from lastlayer.tables import explain as explained
    from lastlayer.tables import importance as measure
    from lastlayer.tables.importance import extremes_table, saved_ranking

    for option, path in {"importance": importance, "dependence": dependence, "curves": curves}.items():
        if path is not None:
            if path.suffix.lower() != ".png":
                raise InputError(f"--{option} {path} must be a PNG file, such as {option}.png")
            given = [model] if data is None else [model, data]
            check_output(path, PICTURE, inputs=given, force=force, advice=f"another --{option}")
    output, fitted = Output(as_json), load_table(model)
    table = None if data is None else TableFile(data, encoding, decimal).read()
    if table is None:
        ranking = saved_ranking(fitted)
    else:
        ranking = measure(fitted, table, targets=names_in(target, table) or None)
    varied = vary(fitted, table)
    output.words(model.name, "bold")
    print_ranking(output, ranking)
    others = "other inputs at typical values" if table is None else "averaged over the given rows"
    output.words(
        f"\nPredictions as one input varies over its training range, {others}; ±: 90% band of the function", "bold"
    )
    head, *rows = extremes_table(varied, fitted.schema_.targets)
    output.table(head, rows)
    output.words("\nThe model", "bold")
    for subject, words in facts(fitted).items():
        output.words(f"{subject:17}{words}")
    output.words()
    filled = lambda column: str(column.fill) if fitted.schema_.impute else "rejected"
    rows = [[column.name, column.kind, str(column), filled(column)] for column in fitted.schema_.columns]
    output.table(["input", "kind", "training range", "if missing"], rows)
    output.words("\nsettings", "bold")
    output.words(str(fitted.settings_))
    drawn = {
        importance: lambda: plots.importance(_measured(ranking).inputs, targets=fitted.schema_.targets),
        dependence: lambda: plots.partial_dependence(varied, targets=fitted.schema_.targets),
        curves: lambda: additive_curves(fitted, names=fitted.schema_.features),
    }
    for path, draw in drawn.items():
        if path is not None:
            with replacing(path) as file:
                draw().savefig(file, dpi=150, format="png", metadata={"Software": SOFTWARE})
            output.words(f"\nsaved {path}", "bold")
    measured = {"importance": None if ranking is None else ranking.as_json()}
    output.result(**explained(fitted) | measured, dependence=[asdict(one) for one in varied])


def _measured(ranking: "Ranking | None") -> "Ranking":
    if ranking is None:
        raise InputError("this model file has no importance of inputs: give rows with the true values with --data")
    return ranking


def print_ranking(output: Output, found: "Ranking | None") -> None:
    if found is None:
        output.words(
            "the importance of inputs was not measured when this model was fitted: give rows with --data", "dim"
        )
        return
    output.words(f"\nWhich inputs matter: loss of accuracy on {found.caption} when an input is shuffled", "bold")
    head, *rows = found.table()
    output.table(head, rows)
