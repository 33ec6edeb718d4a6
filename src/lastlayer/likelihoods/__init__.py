"""How targets are read as weighted Gaussian readings, scored, and predicted."""

from typing import Any

from jaxtyping import Float
from numpy import ndarray

from lastlayer._internal import checked
from lastlayer.errors import check_choice
from lastlayer.likelihoods.base import Gaussian, Likelihood
from lastlayer.likelihoods.lognormal import LogNormal

LIKELIHOODS: dict[str, type[Likelihood]] = {kind.name: kind for kind in (Gaussian, LogNormal)}
"""Values of the parameter `likelihood`; "auto" takes the first that suits the targets, else Gaussian noise."""


NAMES = (*LIKELIHOODS, "auto")


def choose(asked: str, y: Float[ndarray, "m q"]) -> Likelihood:
    """The likelihood asked for, or that of the data, of which some may be missing (NaN)."""
    if check_choice("likelihood", asked, NAMES) != "auto":
        return LIKELIHOODS[asked]()
    return next((found for kind in LIKELIHOODS.values() if (found := kind()).suits(y)), Gaussian())


def restored(name: str, numbers: dict[str, Any]) -> Likelihood:
    """Restore a likelihood from its name and its own numbers."""
    return checked.instance(LIKELIHOODS[name], numbers)
