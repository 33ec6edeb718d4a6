"""Arguments and options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

if TYPE_CHECKING:
    from lastlayer.tables import Table

Data = Annotated[
    Path, Argument(help="Table: .csv, .tsv, .jsonl (also .gz), .parquet or .xlsx; the first line has the column names.")
]
Model = Annotated[Path, Argument(help="Model file written by `lastlayer fit`.")]
Target = Annotated[
    list[str] | None,
    Option(help="Columns with the true values, separated by commas, if their names differ from those in fit."),
]
Unknown = Annotated[
    str, Option(help="For texts that no training row had: 'error', or 'warn' to predict anyway, as no known category.")
]
Encoding = Annotated[str | None, Option(help="Text encoding of DATA, such as cp1252.", show_default="UTF-8")]
Decimal = Annotated[str, Option(help="Decimal sign of DATA: '.', ',' or 'auto' (as in training).")]


def names_in(asked: list[str] | None, table: "Table") -> list[str]:
    """Split column names at commas, except where the whole text is a column name."""
    names: list[str] = []
    for word in asked or []:
        names += [word] if word in table.columns else [name.strip() for name in word.split(",") if name.strip()]
    return names
