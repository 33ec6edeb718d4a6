"""Warnings and log lines about a table or a fit; warnings are issued once per fit."""

import logging
import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.data.copies import SHARE
from lastlayer.data.rows import Rows
from lastlayer.errors import CopiesWarning, FlooredNoiseWarning, MissingTargetsWarning
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.member import Member
from lastlayer.settings.types import Settings

logger = logging.getLogger(__name__)


def warn_of_missing_targets(y: Float[ndarray, "m q"]) -> None:
    """Warn once per fit if targets are missing."""
    missing = np.isnan(y)
    if missing.any():
        each = ", ".join(f"{n:,}" for n in (~missing).sum(0).tolist())
        warnings.warn(
            f"{int(missing.sum()):,} of {y.size:,} targets are missing: each output is fitted to the rows where it "
            f"is known ({each})",
            MissingTargetsWarning,
            stacklevel=4,
        )


def warn_of_copies(n_rows: int, copies: Int[ndarray, " m"] | None) -> None:
    """Warn once per fit if many rows are equal or nearly equal; such rows are held out together."""
    n_groups = n_rows if copies is None else int(copies.max()) + 1
    if n_groups <= (1 - SHARE) * n_rows:
        warnings.warn(
            f"{n_rows} rows are equal or nearly equal to one of {n_groups}: copies are held out together, so that the "
            "model is evaluated on rows that are new to it",
            CopiesWarning,
            stacklevel=4,
        )


def warn_of_floored_noise(members: Sequence[Member], *, varied: bool) -> None:
    """Warn if the noise is at its floor, unless the targets are constant (`varied` is False)."""
    if varied and any(member.posterior.noise_floored for member in members):
        warnings.warn(
            "the network fits the targets without error: the noise was set to its floor, 1e-6 of their standard "
            "deviation; expect intervals that are too narrow, and give more data or a smaller network",
            FlooredNoiseWarning,
            stacklevel=3,
        )


def log_start(settings: Settings, rows: Rows) -> None:
    """Log what is fitted, and the settings."""
    shape, n_outputs = rows.main.X.shape, rows.main.T.shape[1]
    logger.info(
        "fit to %s rows, %s inputs, %d outputs on %s; calibration: %s",
        f"{shape[0]:,}",
        " x ".join(map(str, shape[1:])),
        n_outputs,
        settings.place.device,
        settings.plan,
    )
    logger.debug("settings:\n%s", settings)


def log_summary(fitted: Fitted) -> None:
    """Log the result of a fit."""
    logger.info("fitted %d members; best alone: %s", len(fitted.members), fitted.members[0].family)
    logger.info("%s", "not calibrated" if fitted.calibration is None else fitted.calibration)
