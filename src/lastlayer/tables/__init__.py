"""Tables of users: read in pieces, encoded the same way ever after, predicted in bounded memory, written safely."""

from lastlayer.tables.explain import explain
from lastlayer.tables.model import Forecast, TableModel
from lastlayer.tables.reading import Table, chunks, read
from lastlayer.tables.schema import Encoded, NumberColumn, Schema, TextColumn
from lastlayer.tables.scores import Scores, TargetScores, score
from lastlayer.tables.writing import check_writable, guarded, writing

__all__ = [
    "Encoded",
    "Forecast",
    "NumberColumn",
    "Schema",
    "Scores",
    "Table",
    "TableModel",
    "TargetScores",
    "TextColumn",
    "check_writable",
    "chunks",
    "explain",
    "guarded",
    "read",
    "score",
    "writing",
]
