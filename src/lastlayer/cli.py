"""The command line: `lastlayer study`."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from lastlayer import __version__
from lastlayer.errors import LastLayerError
from lastlayer.studies import figures, paper, results, three_samples
from lastlayer.studies.data import SEED
from lastlayer.studies.networks import BUDGET, Budget
from lastlayer.studies.report import report

app = typer.Typer(
    help="Regression with neural networks that know what they do not know.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()
SHOWN = ("lpd_train", "lpd_test", "lpd_outside", "coverage_90")


def _version(asked: bool | None) -> None:
    if asked:
        console.print(f"lastlayer {__version__}")
        raise typer.Exit


Version = Annotated[bool | None, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def options(version: Version = None) -> None:
    """Options that go with every command."""


@app.command()
def study(
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many initialisations.")] = 1,
    data_seed: Annotated[list[int] | None, typer.Option(help="Seed of the data; give it again for more.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables, figures and the report.")] = Path("results"),
    max_epochs: Annotated[int, typer.Option(min=1, help="Upper limit for BLL and BLR.")] = BUDGET.max_epochs,
    bnn_epochs: Annotated[int, typer.Option(min=1, help="Epochs of the Bayesian neural network.")] = 2000,
) -> None:
    """The paper's simulation study: Table 1, Figures 1 to 5 and a report with a slider for alpha."""
    results.check_folder(out)
    torch.set_num_threads(1)  # many small products: a second thread only waits for the first
    budget = Budget(max_epochs=max_epochs)
    initialisations = list(range(seeds))
    studies = [
        paper.run(initialisations, data_seed=data, budget=budget, bnn_epochs=bnn_epochs, progress=True)
        for data in data_seed or [SEED]
    ]
    three = three_samples.fit(max_epochs=min(5000, max_epochs), progress=True)

    def draw(folder: Path) -> None:
        figures.draw_all(studies[0], three, folder)
        (folder / "report.html").write_text(report(studies, three))

    written = results.write_all(studies, out, draw)
    _print_table(studies)
    console.print(f"\nall columns: {out / 'table1.md'}")
    console.print(f"{len(written)} files in {out}; open [bold]{out / 'report.html'}[/bold] in a browser")


def _print_table(studies: list[paper.Study]) -> None:
    table = Table(title="Table 1", caption=results.caption(studies), title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    names = list(paper.COLUMNS)
    for column in SHOWN:
        table.add_column(paper.COLUMNS[column], justify="right")
    for row in results.cells(studies):
        table.add_row(row[0], *(row[1 + names.index(column)] for column in SHOWN))
    console.print(table)
    for note in paper.NOTES:
        console.print(f"  {note}", style="dim", highlight=False)


def main() -> None:
    """Run the command line: 0 fine, 1 an error the user can mend, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except LastLayerError as error:
        console.print(f"[bold red]error:[/bold red] {error}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("\ninterrupted: nothing was written, earlier results are as they were")
        sys.exit(130)


if __name__ == "__main__":
    main()
