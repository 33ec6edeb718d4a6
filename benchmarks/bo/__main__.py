"""Command `python -m benchmarks.bo`. Dependencies are imported when it runs, so that `--help` is fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastlayer.cli.console import Json, helpful

if TYPE_CHECKING:
    from benchmarks.bo import tables

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@helpful
def bo(
    problems: Annotated[str | None, typer.Option(help="Comma-separated problems; default: all.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated methods; default: all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method on each problem.")] = 10,
    steps: Annotated[int | None, typer.Option(min=1, help="Maximum number of steps per run, for a trial.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs in parallel, with one thread each.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for results, tables and the figure.")] = Path("results/bo"),
    again: Annotated[bool, typer.Option("--again", help="Repeat runs that already have results.")] = False,
    as_json: Json = False,
) -> None:
    """Bayesian optimisation: every run is saved when it is done, and a second call runs only what is missing."""
    from lastlayer.errors import need

    need("botorch", extra="botorch")
    from benchmarks.bo import command
    from benchmarks.commands import run_benchmark

    asked = command.Asked.parse(
        problems=problems, methods=methods, seeds=seeds, steps=steps, processes=processes, out=out, again=again
    )
    run_benchmark(command, asked, "bo.png", _print_regrets, as_json)


def _print_regrets(summary: "tables.Summary") -> None:
    from benchmarks.bo import tables
    from benchmarks.commands import print_rows

    for table in (tables.regret_table, tables.rank_table, tables.seconds_table):
        print_rows(table(summary))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.bo")
