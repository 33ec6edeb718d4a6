"""Tables of users: read in chunks, encoded as in training, predicted in bounded memory, written safely."""

from lastlayer.tables.comparison import Comparison, compare, keep_back
from lastlayer.tables.facts import explain, facts
from lastlayer.tables.files import Table, TableFile, read
from lastlayer.tables.forecast import forecast
from lastlayer.tables.importance import Ranking, dependence, held_out_importance, importance
from lastlayer.tables.regressor import TableRegressor, load_table
from lastlayer.tables.schema import Schema
from lastlayer.tables.scores import Scores, score

__all__ = [
    "Comparison",
    "Ranking",
    "Schema",
    "Scores",
    "Table",
    "TableFile",
    "TableRegressor",
    "compare",
    "dependence",
    "explain",
    "facts",
    "forecast",
    "held_out_importance",
    "importance",
    "keep_back",
    "load_table",
    "read",
    "score",
]
