"""Models that learn while they run: what happens to old rows, and when to fit a new model."""

from lastlayer.online.drift import Drift, DriftMonitor
from lastlayer.online.model import ExponentialForgetting, KeepAll, Memory, OnlineModel, SlidingWindow

__all__ = ["Drift", "DriftMonitor", "ExponentialForgetting", "KeepAll", "Memory", "OnlineModel", "SlidingWindow"]
