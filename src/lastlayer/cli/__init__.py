"""The command line. Commands import what they need when they run, so that `lastlayer --help` is quick."""

from typing import Annotated

import typer

from lastlayer import __version__
from lastlayer.cli import studies, tables
from lastlayer.cli.say import helpful

app = typer.Typer(
    help="Regression with neural networks that know what they do not know.\n\n"
    "Begin with a table: [bold]lastlayer fit data.csv --target y[/bold], then [bold]predict[/bold] and "
    "[bold]report[/bold]. Exit codes: 0 fine, 1 something to mend, 2 wrong usage, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
TABLES, JOBS = "Your own table", "Studies and benchmarks"
for command in (
    tables.fit,
    tables.predict,
    tables.evaluate,
    tables.report,
    tables.explain,
    tables.update,
    tables.export,
):
    app.command(rich_help_panel=TABLES)(helpful(command))
app.command(rich_help_panel=JOBS)(helpful(studies.study))
app.add_typer(studies.bench, name="bench", rich_help_panel=JOBS)


def _version(asked: bool | None) -> None:
    if asked:
        typer.echo(f"lastlayer {__version__}")
        raise typer.Exit


Version = Annotated[bool | None, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def options(version: Version = None) -> None:
    pass
