"""Tables of users: read in pieces, encoded the same way ever after, predicted in bounded memory, written safely."""

from lastlayer.tables.facts import Scores, explain, facts, score
from lastlayer.tables.files import Table, chunks, read
from lastlayer.tables.model import TableModel
from lastlayer.tables.schema import Schema

__all__ = ["Schema", "Scores", "Table", "TableModel", "chunks", "explain", "facts", "read", "score"]
