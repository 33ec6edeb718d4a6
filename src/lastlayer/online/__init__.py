"""Models that learn while they run: what happens to old rows, and when to fit a new model."""

from lastlayer.online.drift import Drift, DriftMonitor
from lastlayer.online.memory import ExponentialForgetting, KeepAll, Memory, SlidingWindow
from lastlayer.online.model import OnlineModel

__all__ = ["Drift", "DriftMonitor", "ExponentialForgetting", "KeepAll", "Memory", "OnlineModel", "SlidingWindow"]
