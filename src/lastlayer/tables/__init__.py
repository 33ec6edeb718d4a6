"""Tables of users: read in pieces, encoded the same way ever after, predicted in bounded memory, written safely."""

from lastlayer.tables.model import Forecast, TableModel
from lastlayer.tables.reading import Table, chunks, read
from lastlayer.tables.schema import Encoded, NumberColumn, Schema, TextColumn
from lastlayer.tables.writing import check_writable, guarded, writing

__all__ = [
    "Encoded",
    "Forecast",
    "NumberColumn",
    "Schema",
    "Table",
    "TableModel",
    "TextColumn",
    "check_writable",
    "chunks",
    "guarded",
    "read",
    "writing",
]
