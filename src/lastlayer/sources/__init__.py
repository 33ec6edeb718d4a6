"""Where rows come from, when they do not all fit into memory: one small protocol, and what speaks it."""

from lastlayer.sources.batch import Batch, Source, TensorSource
from lastlayer.sources.loader import LoaderSource
from lastlayer.sources.pooled import ArraySource, ParquetSource
from lastlayer.sources.standardized import Scales, StandardizedSource, check_finite_batch, scales_of

__all__ = [
    "ArraySource",
    "Batch",
    "LoaderSource",
    "ParquetSource",
    "Scales",
    "Source",
    "StandardizedSource",
    "TensorSource",
    "check_finite_batch",
    "scales_of",
]
