"""Tables of users: read in chunks, encoded as in training, predicted in bounded memory, written safely."""

from lastlayer.tables.comparison import Comparison, compare, keep_back
from lastlayer.tables.facts import Scores, explain, facts, score
from lastlayer.tables.files import Table, TableFile, chunks, read
from lastlayer.tables.importance import Ranking, dependence, held_out_importance, importance
from lastlayer.tables.model import TableModel
from lastlayer.tables.regressor import TableRegressor
from lastlayer.tables.schema import Reading, Schema

__all__ = [
    "Comparison",
    "Ranking",
    "Reading",
    "Schema",
    "Scores",
    "Table",
    "TableFile",
    "TableModel",
    "TableRegressor",
    "chunks",
    "compare",
    "dependence",
    "explain",
    "facts",
    "held_out_importance",
    "importance",
    "keep_back",
    "read",
    "score",
]
