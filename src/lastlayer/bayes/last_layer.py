"""A last layer at the maximum of the evidence."""

import math
from dataclasses import dataclass

from lastlayer.bayes.posterior import Posterior


@dataclass(frozen=True)
class LastLayer:
    """Posterior at alpha*, with the corresponding noise."""

    posterior: Posterior
    nlml: float
    """Negative log marginal likelihood per sample."""
    noise_floored: bool
    """Whether the features fit the targets without error, so that the noise was raised to its floor."""
    determined: float = math.nan
    """Number of features that the data determine."""
