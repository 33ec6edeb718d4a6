"""The command line. Commands import what they need when they run, so that `lastlayer --help` is fast."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from lastlayer import __version__
from lastlayer.cli import tables
from lastlayer.cli.console import Force, Json, Output, helpful

app = typer.Typer(
    help="Regression with neural networks that report how uncertain their predictions are.\n\n"
    "Start with a table: [bold]lastlayer fit data.csv --target y[/bold], then [bold]predict[/bold] and "
    "[bold]report[/bold]. Exit codes: 0 success, 1 error, 2 wrong usage, 130 interrupted, 143 terminated.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
SHOWN = ("lpd_train", "lpd_test", "lpd_outside", "coverage_90")
for command in tables.COMMANDS:
    app.command(rich_help_panel="Your own table")(helpful(command))


@app.command(rich_help_panel="Built-in data")
@helpful
def study(
    seeds: Annotated[int, Option(min=1, max=1000, help="Number of initialisations.")] = 1,
    data_seed: Annotated[list[int] | None, Option(help="Seed of the data; repeat the option for several.")] = None,
    out: Annotated[Path, Option(help="Folder for tables, figures and the report.")] = Path("results"),
    max_epochs: Annotated[int, Option(min=1, help="Maximum number of epochs for BLL and BLR.")] = 10_000,
    bnn_epochs: Annotated[int, Option(min=1, help="Epochs of the Bayesian neural network.")] = 10_000,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run the paper's simulation study: Table 1, Figures 1 to 5 and a report with a slider for alpha."""
    import torch

    from lastlayer.report.study import report
    from lastlayer.studies import figures, paper
    from lastlayer.studies.data import SEED
    from lastlayer.studies.networks import fit_three_samples

    paper.check_results(out, force=force)
    torch.set_num_threads(1)  # many small matrix products: a second thread would not help
    studies = [
        paper.run(list(range(seeds)), data_seed=data, max_epochs=max_epochs, bnn_epochs=bnn_epochs, progress=True)
        for data in data_seed or [SEED]
    ]
    three = fit_three_samples(max_epochs=min(5000, max_epochs), progress=True)

    def draw(folder: Path) -> None:
        figures.draw_all(studies[0], three, folder)
        (folder / "report.html").write_text(report(studies, folder))

    written, output = paper.write_all(studies, out, draw), Output(as_json)
    places = [0, *(1 + list(paper.COLUMNS).index(name) for name in SHOWN)]
    lines = [["", *paper.COLUMNS.values()], *paper.cells(studies)]
    output.table([[line[i] for i in places] for line in lines], f"Table 1: {paper.caption(studies)}")
    for note in paper.NOTES:
        output.words(f"  {note}", "dim")
    output.words(f"\nall columns: {out / 'table1.md'}")
    output.words(f"{len(written)} files in {out}; open {out / 'report.html'} in a browser")
    output.result(files=[str(path) for path in written])


def _version(asked: bool | None) -> None:
    if asked:
        typer.echo(f"lastlayer {__version__}")
        raise typer.Exit


Version = Annotated[
    bool | None, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def options(version: Version = None) -> None:
    """Options of `lastlayer` itself, without a command."""
