"""Arguments and options that commands for a user's own table share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

if TYPE_CHECKING:
    from lastlayer.tables import Table

Data = Annotated[
    Path, Argument(help="Table: .csv, .tsv or .jsonl, also with .gz, .parquet or .xlsx; the first line names columns.")
]
Model = Annotated[Path, Argument(help="Model file that `lastlayer fit` wrote.")]
Target = Annotated[
    list[str] | None, Option(help="Columns with the true values, with commas, if they are not called as in fit.")
]
Unknown = Annotated[
    str, Option(help="A text no training row had: 'error', or 'warn' to predict as if it were none of the known.")
]
Encoding = Annotated[str | None, Option(help="Of the text in DATA, such as cp1252.", show_default="UTF-8")]
Decimal = Annotated[str, Option(help="Decimal sign of DATA: '.', ',' or 'auto', as in training.")]


def names_in(asked: list[str] | None, table: "Table") -> list[str]:
    """Column names with commas between them; a name that has a comma itself stands alone."""
    names: list[str] = []
    for word in asked or []:
        names += [word] if word in table.columns else [name.strip() for name in word.split(",") if name.strip()]
    return names
