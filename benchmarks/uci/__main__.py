"""`python -m benchmarks.uci`. What it needs is imported when it runs, so that `--help` is quick."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastlayer.cli.console import Json, helpful

if TYPE_CHECKING:
    from benchmarks.uci import tables

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
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

    from benchmarks.commands import run_benchmark
    from benchmarks.uci import command
    from benchmarks.uci.data import KINDS

    asked = command.Asked.parse(
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
    run_benchmark(command, asked, "uci.png", _print_scores, as_json)


def _print_scores(summary: "tables.Summary") -> None:
    from benchmarks.commands import console, print_rows
    from benchmarks.uci import tables

    for kind in summary.kinds:
        for score in tables.RANKED:
            (name, *head), *rows = tables.score_table(summary, kind, score)
            print_rows([[f"{name}, {kind} splits", *head], *rows])
        console.print(f"  {tables.splits_note(summary, kind)}", style="dim", highlight=False)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.uci")
