"""Command `python -m benchmarks.uci`. Dependencies are imported when it runs, so that `--help` is fast."""

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
    data: Annotated[Path, typer.Option(help="Folder of .npz or .csv tables in the format of docs/uci.md.")],
    methods: Annotated[str, typer.Option(help="Comma-separated methods, or 'ours', 'peers', 'all'.")] = "all",
    sets: Annotated[str | None, typer.Option(help="Comma-separated tables; default: all in the folder.")] = None,
    splits: Annotated[
        str, typer.Option(help="Comma-separated given splits; outer splits are always 0,1.")
    ] = "0,1,2,3,4",
    kinds: Annotated[str | None, typer.Option(help="Comma-separated kinds of splits; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, tables and the figure.")] = Path("results/uci"),
    device: Annotated[str, typer.Option(help="'cpu', 'cuda', or 'auto'.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Repeat fits that already have results.")] = False,
    as_json: Json = False,
) -> None:
    """Standard splits, one protocol: every fit is saved when it is done, and a second run computes what is missing."""
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
