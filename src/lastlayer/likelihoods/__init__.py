"""How targets are read as weighted Gaussian readings, scored, and predicted."""

from typing import Any

from lastlayer._internal import checked
from lastlayer.likelihoods.base import Gaussian as Gaussian
from lastlayer.likelihoods.base import Likelihood as Likelihood
from lastlayer.likelihoods.discrete import Counts as Counts
from lastlayer.likelihoods.discrete import Ordinal as Ordinal
from lastlayer.likelihoods.lognormal import LogNormal as LogNormal
from lastlayer.likelihoods.student import Student as Student

NAMES = (*Likelihood.KINDS, "auto")


def restored(name: str, numbers: dict[str, Any]) -> Likelihood:
    """Restore a likelihood from its name and its own numbers."""
    return checked.instance(Likelihood.KINDS[name], numbers)
