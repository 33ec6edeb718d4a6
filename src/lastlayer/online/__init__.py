"""Online learning: models that are updated row by row, memories for old rows, and drift detection."""

from lastlayer.online.drift import Drift, DriftMonitor
from lastlayer.online.memory import ExponentialForgetting, KeepAll, Memory, SlidingWindow
from lastlayer.online.model import OnlineModel

__all__ = ["Drift", "DriftMonitor", "ExponentialForgetting", "KeepAll", "Memory", "OnlineModel", "SlidingWindow"]
