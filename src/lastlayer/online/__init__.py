"""Learning while running: a fitted model that takes rows as they come, and a monitor that says when to fit anew."""

from lastlayer.online.drift import Drift, DriftMonitor
from lastlayer.online.model import OnlineModel
from lastlayer.online.past import Everything, Fading, Past, Window

__all__ = ["Drift", "DriftMonitor", "Everything", "Fading", "OnlineModel", "Past", "Window"]
