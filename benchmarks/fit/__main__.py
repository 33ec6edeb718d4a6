"""Command `python -m benchmarks.fit`. Dependencies are imported when it runs, so that `--help` is fast."""

from pathlib import Path
from typing import Annotated

import typer

from lastlayer.cli.console import helpful

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@helpful
def fit(
    rows: Annotated[str, typer.Option(help="Comma-separated numbers of rows.")] = "300,1000,3000,10000,100000",
    methods: Annotated[str | None, typer.Option(help="Comma-separated methods; default: all.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each method.")] = 2,
    limit: Annotated[
        float, typer.Option(min=0, help="Seconds; a method whose fit takes longer is not run with more rows.")
    ] = 1800,
    out: Annotated[Path, typer.Option(help="Folder for results, table and figure.")] = Path("results"),
    again: Annotated[bool, typer.Option("--again", help="Repeat fits that already have results.")] = False,
) -> None:
    """Cost of a fit against rows, beside peers: every fit is saved when done, and a second run computes the rest."""
    from benchmarks.commands import named, whole_numbers, write_files
    from benchmarks.fit.measure import WARM_UP_ROWS, open_store
    from benchmarks.fit.methods import METHODS
    from benchmarks.fit.picture import picture
    from benchmarks.fit.run import Outcome, run
    from benchmarks.fit.tables import table
    from lastlayer.studies.paper import check_folder

    chosen = list(METHODS.values()) if methods is None else named("method", methods, METHODS)
    sizes = whole_numbers("rows", rows, least=WARM_UP_ROWS, example="300,1000")
    check_folder(out)
    outcomes: list[Outcome] = []
    try:
        for outcome in run(chosen, sizes, open_store(out), threads=threads, limit=limit, again=again, progress=True):
            print(outcome, flush=True)
            outcomes.append(outcome)
    finally:  # an interrupted run also writes its table
        text = table(outcomes)
        print(f"\n{text}\n")
        results = [outcome.result for outcome in outcomes if outcome.result is not None]
        write_files(out, {"fit.txt": text + "\n"}, {"fit.png": picture(results)} if results else {})
        print(f"table: {out / 'fit.txt'}; figure: {out / 'fit.png'}")
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.fit")
