"""`lastlayer study` and `lastlayer bench`: jobs on built-in data and on folders of tables."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lastlayer.cli.say import Json, Say, helpful

if TYPE_CHECKING:
    from lastlayer.studies import paper
    from lastlayer.studies.benchmark import tables

SHOWN = ("lpd_train", "lpd_test", "lpd_outside", "coverage_90")
bench = typer.Typer(help="The library beside its peers.", no_args_is_help=True)
console = Console()


def study(
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many initialisations.")] = 1,
    data_seed: Annotated[list[int] | None, typer.Option(help="Seed of the data; give it again for more.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables, figures and the report.")] = Path("results"),
    max_epochs: Annotated[int | None, typer.Option(min=1, help="Upper limit for BLL and BLR.")] = None,
    bnn_epochs: Annotated[int, typer.Option(min=1, help="Epochs of the Bayesian neural network.")] = 2000,
    as_json: Json = False,
) -> None:
    """The paper's simulation study: Table 1, Figures 1 to 5 and a report with a slider for alpha."""
    import torch

    from lastlayer.studies import figures, paper, results, three_samples
    from lastlayer.studies.data import SEED
    from lastlayer.studies.networks import BUDGET, Budget
    from lastlayer.studies.report import report

    results.check_folder(out)
    torch.set_num_threads(1)  # many small products: a second thread only waits for the first
    budget = BUDGET if max_epochs is None else Budget(max_epochs=max_epochs)
    initialisations = list(range(seeds))
    studies = [
        paper.run(initialisations, data_seed=data, budget=budget, bnn_epochs=bnn_epochs, progress=True)
        for data in data_seed or [SEED]
    ]
    three = three_samples.fit(max_epochs=min(5000, budget.max_epochs), progress=True)

    def draw(folder: Path) -> None:
        figures.draw_all(studies[0], three, folder)
        (folder / "report.html").write_text(report(studies, three))

    written = results.write_all(studies, out, draw)
    if as_json:
        return Say(True).result(files=[str(path) for path in written])
    _print_table(studies)
    console.print(f"\nall columns: {out / 'table1.md'}")
    console.print(f"{len(written)} files in {out}; open [bold]{out / 'report.html'}[/bold] in a browser")
    return None


def _print_table(studies: "list[paper.Study]") -> None:
    from lastlayer.studies import paper, results

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
@helpful
def uci(
    data: Annotated[Path, typer.Option(help="Folder of .npz or .csv tables; docs/uci.md says what they hold.")],
    methods: Annotated[str, typer.Option(help="Rows, with commas; 'ours', 'peers' or 'all'.")] = "all",
    sets: Annotated[str | None, typer.Option(help="Tables, with commas; all of the folder if left out.")] = None,
    splits: Annotated[str, typer.Option(help="Given splits, with commas; the outer ones are two.")] = "0,1,2,3,4",
    kinds: Annotated[str | None, typer.Option(help="Kinds of splits, with commas; all if left out.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, tables and the picture.")] = Path("results/uci"),
    device: Annotated[str, typer.Option(help="'cpu', 'cuda', or 'auto'.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Do anew what is already there.")] = False,
    as_json: Json = False,
) -> None:
    """Standard splits, one protocol: every fit is kept as soon as it is done, and a second run does what is missing."""
    import torch

    from lastlayer.studies.benchmark import command as benchmark
    from lastlayer.studies.benchmark.data import KINDS

    asked = benchmark.Asked.parse(
        data=data,
        methods=methods,
        sets=sets,
        splits=splits,
        kinds=",".join(KINDS) if kinds is None else kinds,
        out=out,
        device=device,
        again=again,
    )
    torch.set_num_threads(1)
    _run_benchmark(benchmark, asked, "uci.png", _print_benchmark, as_json)


@bench.command()
@helpful
def bo(
    problems: Annotated[str | None, typer.Option(help="Problems, with commas; all if left out.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, with commas; all if left out.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method on each problem.")] = 10,
    steps: Annotated[int | None, typer.Option(min=1, help="At most so many steps a run, for a try.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, a thread each.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for results, tables and the picture.")] = Path("results/bo"),
    again: Annotated[bool, typer.Option("--again", help="Do anew what is already there.")] = False,
    as_json: Json = False,
) -> None:
    """Bayesian optimisation: every run is kept as soon as it is done, and a second call does what is missing."""
    from lastlayer.integrations.extras import need

    need("botorch", extra="botorch")
    from lastlayer.studies.bo import command as optimisation

    asked = optimisation.Asked.parse(
        problems=problems, methods=methods, seeds=seeds, steps=steps, processes=processes, out=out, again=again
    )
    _run_benchmark(optimisation, asked, "bo.png", _print_regrets, as_json)


def _run_benchmark(study: Any, asked: Any, picture: str, show: Callable[[Any], None], as_json: bool) -> None:
    """A `study` has `run` and `write`; what it finds is said, in words or as JSON."""
    say, out = Say(as_json), asked.out
    for message in asked.messages:
        say.note(message) if as_json else console.print(message, style="yellow", highlight=False)
    try:
        failures = study.run(asked, progress=True)
    finally:  # an interrupted run too leaves its tables
        summary = study.write(out)
    say.result(tables=str(out / "tables.md"), picture=str(out / picture), failures=[str(f) for f in failures])
    if not as_json:
        show(summary)
        for failure in failures:
            console.print(f"[bold red]failed:[/bold red] {failure}", highlight=False)
        console.print(f"\nall tables, and how each method is tuned: {out / 'tables.md'}; picture: {out / picture}")
    if failures:
        raise typer.Exit(1)


def _print_benchmark(summary: "tables.Summary") -> None:
    from lastlayer.studies.benchmark import tables

    for kind in summary.kinds:
        for score in tables.RANKED:
            (name, *head), *rows = tables.score_table(summary, kind, score)
            _print_rows([[f"{name}, {kind} splits", *head], *rows])
        console.print(f"  {tables.splits_note(summary, kind)}", style="dim", highlight=False)


def _print_regrets(summary: Any) -> None:
    from lastlayer.studies.bo import tables

    for table in (tables.regret_table, tables.rank_table, tables.seconds_table):
        _print_rows(table(summary))


def _print_rows(rows: list[list[str]]) -> None:
    """Head and rows; the first word of the head is the title."""
    (title, *head), *body = rows
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in head:
        table.add_column(name, justify="right")
    for row in body:
        table.add_row(*row)
    console.print(table)
