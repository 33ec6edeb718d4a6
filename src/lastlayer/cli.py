"""The command line: `lastlayer study`, `lastlayer bench uci`."""

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
from lastlayer.studies.benchmark import command as benchmark
from lastlayer.studies.benchmark import tables
from lastlayer.studies.benchmark.data import KINDS
from lastlayer.studies.data import SEED
from lastlayer.studies.networks import BUDGET, Budget
from lastlayer.studies.report import report

app = typer.Typer(
    help="Regression with neural networks that know what they do not know.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="The library beside its peers, on tables of yours.", no_args_is_help=True)
app.add_typer(bench, name="bench")
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


@bench.command()
def uci(
    data: Annotated[Path, typer.Option(help="Folder of .npz or .csv tables; docs/uci.md says what they hold.")],
    methods: Annotated[str, typer.Option(help="Rows, with commas; 'ours', 'peers' or 'all'.")] = "all",
    sets: Annotated[str | None, typer.Option(help="Tables, with commas; all of the folder if left out.")] = None,
    splits: Annotated[str, typer.Option(help="Given splits, with commas; the outer ones are two.")] = "0,1,2,3,4",
    kinds: Annotated[str, typer.Option(help=f"Kinds of splits: {', '.join(KINDS)}.")] = ",".join(KINDS),
    out: Annotated[Path, typer.Option(help="Folder for results, tables and the picture.")] = Path("results/uci"),
    device: Annotated[str, typer.Option(help="'cpu', 'cuda', or 'auto'.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Do anew what is already there.")] = False,
) -> None:
    """Standard splits, one protocol: every fit is kept as soon as it is done, and a second run does what is missing."""
    asked = benchmark.Asked.parse(
        data=data, methods=methods, sets=sets, splits=splits, kinds=kinds, out=out, device=device, again=again
    )
    for message in asked.messages:
        console.print(message, style="yellow", highlight=False)
    torch.set_num_threads(1)
    try:
        failures = benchmark.run(asked, progress=True)
    finally:  # an interrupted run too leaves its tables
        summary = benchmark.write(out)
    _print_benchmark(summary)
    for failure in failures:
        console.print(f"[bold red]failed:[/bold red] {failure}", highlight=False)
    console.print(f"\nall scores and how each is tuned: {out / 'tables.md'}; picture: {out / 'uci.png'}")
    if failures:
        raise typer.Exit(1)


def _print_benchmark(summary: tables.Summary) -> None:
    for kind in summary.kinds:
        for score in tables.RANKED:
            head, *rows = tables.score_table(summary, kind, score)
            table = Table(title=f"{head[0]}, {kind} splits", title_justify="left", caption_justify="left")
            table.add_column("", no_wrap=True)
            for name in head[1:]:
                table.add_column(name, justify="right")
            for row in rows:
                table.add_row(*row)
            console.print(table)
        console.print(f"  {tables.splits_note(summary, kind)}", style="dim", highlight=False)


def main() -> None:
    """Run the command line: 0 fine, 1 an error the user can mend, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except LastLayerError as error:
        console.print(f"[bold red]error:[/bold red] {error}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("\ninterrupted: finished fits of a benchmark are kept; of a study nothing was written")
        sys.exit(130)


if __name__ == "__main__":
    main()
