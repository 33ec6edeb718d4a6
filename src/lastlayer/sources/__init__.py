"""Where rows come from, when they do not all fit into memory: one small protocol, and what speaks it."""

from lastlayer.sources.batch import Batch, Source, TensorSource

__all__ = ["Batch", "Source", "TensorSource"]
