"""Validation of an estimator's parameters, each on its own and in combination, before any data is seen."""

import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lastlayer.errors import InputError, check_choice
from lastlayer.settings.types import BIAS_PRIORS, DTYPES, NOISE_MODELS

WORDS: dict[str, tuple[Iterable[str], tuple[type, ...]]] = {
    "noise": (NOISE_MODELS, ()),
    "bias_prior": (BIAS_PRIORS, ()),
    "dtype": (DTYPES, ()),
    "preset": (("calibrated", "fast", "evidence"), ()),
    "objective": (("profiled", "mse"), ()),
    "calibration": (("auto", "alpha"), (object,)),
    "encoding": (("auto", "raw", "piecewise", "fourier"), ()),
    "hidden": (("auto",), (object,)),
    "input_skip": (("auto",), (bool,)),
    "early_stopping": (("auto",), (bool,)),
}
"""Words that a parameter may be, and types other than words that it may have."""
ROWS = "a whole number of rows, 2 or more"
NUMBERS: dict[str, tuple[str, float, bool, tuple[str | None, ...]]] = {
    "n_members": ("a whole number, 1 or more", 1, True, ("auto",)),
    "hidden_prior": ("a number, 0 or more", 0, False, ("auto",)),
    "max_epochs": ("a whole number, 0 or more", 0, True, ("auto",)),
    "batch_size": (ROWS, 2, True, ("auto", None)),
    "chunk_size": (ROWS, 2, True, (None,)),
    "learning_rate": ("a number, positive and finite", math.ulp(0.0), False, ("auto",)),
}
"""What a parameter must be, its smallest value, whether it is whole, and what it may be in place of a number."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options of training; pass them as `BLLRegressor(training=TrainingOptions(...))`.

    Parameters
    ----------
    objective : {"profiled", "mse"}, default "profiled"
        Loss. "profiled": evidence with weights and noise in closed form at every step; "mse": mean squared error.
    bias_prior : {"flat", "shared"}, default "flat"
        Prior on the bias of the last layer: "flat" (Theorem 2), or "shared", which reproduces the evidence printed
        in the paper.
    learning_rate : float or "auto", default "auto"
        Initial step size of Adam. "auto": 0.04; 0.02 with early stopping, a backbone, a source of batches or an
        objective other than "profiled".
    early_stopping : bool or "auto", default "auto"
        Whether to hold out rows, score them under the posterior of the others, and keep the best network. "auto": with
        a backbone or preset="evidence", from 100 rows on.
    validation_fraction : float, default 0.15
        Fraction of the rows held out for early stopping, or for calibration with a backbone.
    patience : int, default 200
        Epochs without improvement before stopping.
    chunk_size : int or None, default None
        Rows in memory at a time. The gradient is still that of all rows, at the price of a second forward pass.
    checkpoint : path or None, default None
        Folder in which mini-batch training saves its state every minute. A fit that was interrupted resumes from
        it; a fit that completes deletes what it saved there.

    Examples
    --------
    >>> from lastlayer import BLLRegressor, TrainingOptions
    >>> model = BLLRegressor(training=TrainingOptions(early_stopping=True, patience=50))
    """

    objective: str = "profiled"
    bias_prior: str = "flat"
    learning_rate: float | int | str = "auto"
    early_stopping: bool | str = "auto"
    validation_fraction: float = 0.15
    patience: int = 200
    chunk_size: int | None = None
    checkpoint: str | os.PathLike[str] | None = None


def options_of(training: Any) -> TrainingOptions:
    """Options of training that were given, or the defaults."""
    if training is not None and not isinstance(training, TrainingOptions):
        raise InputError(f"training={training!r} must be None or a lastlayer.TrainingOptions")
    return training or TrainingOptions()


def check(p: Mapping[str, Any]) -> None:
    """Check every parameter, and combinations that are invalid for any data."""
    options = options_of(p["training"])
    given = {**p, **vars(options)}
    for name, (words, kinds) in WORDS.items():
        if isinstance(given[name], str) or not isinstance(given[name], kinds):
            check_choice(name, given[name], words)
    for name, (wanted, least, whole, free) in NUMBERS.items():
        value = given[name]
        number = not isinstance(value, bool) and isinstance(value, numbers.Real) and least <= float(value) < math.inf
        left_to_us = any(value is word or (isinstance(value, str) and value == word) for word in free)
        if not left_to_us and not (number and not (whole and float(value) % 1)):
            raise InputError(f"{name}={value!r} must be {' or '.join(map(repr, free))} or {wanted}")
    if not 0 < options.validation_fraction < 1:
        raise InputError(f"validation_fraction={options.validation_fraction} must lie strictly between 0 and 1")
    if p["n_members"] not in ("auto", 1) and isinstance(p["backbone"], torch.nn.Module):
        raise InputError(
            f"n_members={p['n_members']} needs networks with different initial weights: give backbone a callable "
            "that returns a new module, such as backbone=lambda: MyNetwork(), in place of a module"
        )
    if p["encoding"] in ("piecewise", "fourier") and (p["backbone"] is not None or p["input_skip"] is False):
        other = "backbone=..." if p["backbone"] is not None else "input_skip=False"
        raise InputError(
            f'encoding="{p["encoding"]}" cannot be combined with {other}: its features are the library\'s own, and '
            "bounded outside the data, where the inputs passed on let the variance grow"
        )
    profiled, by_rows = options.objective == "profiled", isinstance(p["batch_size"], numbers.Integral)
    if by_rows and not (profiled and options.chunk_size is None):
        raise InputError(
            f'batch_size={p["batch_size"]} needs objective="profiled" and no chunk_size, but they are '
            f"{options.objective!r} and {options.chunk_size!r}"
        )
    if options.chunk_size is not None and not profiled:
        raise InputError(
            f'chunk_size needs objective="profiled", whose gradient splits into rows, not "{options.objective}"'
        )


def check_running(n_jobs: Any, verbose: Any) -> None:
    """Check the parameters that control how a fit runs."""
    whole = lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if n_jobs is not None and not (whole(n_jobs) and n_jobs):
        raise InputError(f"n_jobs={n_jobs!r} must be None, a number of threads, or -1 for all cores")
    if verbose not in (True, False) and not (whole(verbose) and verbose >= 0):
        raise InputError(f"verbose={verbose!r} must be 0, 1 for the stages of a fit, or 2 for details")


def check_source(p: Mapping[str, Any], options: TrainingOptions, *, validation: bool) -> None:
    """Check the parameters for a source of batches: one network, trained in mini-batches, without held-out rows."""
    whole = "needs rows held out of training, and a source of batches is passed over as a whole"
    for name, given, allowed, advice in (
        ("n_members", p["n_members"], ("auto", 1), "cannot be combined with a source of batches: leave it at 'auto'"),
        ("objective", options.objective, ("profiled",), "cannot be combined with a source of batches"),
        ("chunk_size", options.chunk_size, (None,), "cannot be combined with a source of batches: give batch_size"),
        ("early_stopping", options.early_stopping, ("auto", False), f"{whole}: choose max_epochs"),
        ("encoding", p["encoding"], ("auto", "raw"), "needs a table, not a source of batches"),
        ("likelihood", p["likelihood"], ("auto", "gaussian"), "needs arrays: transform the targets of the source"),
    ):
        if given not in allowed:
            raise InputError(f"{name}={given!r} {advice}")
    if p["batch_size"] is None:
        raise InputError(
            "batch_size=None means all rows in every step, which a source of batches cannot give: leave it at 'auto' "
            "or give a number of rows"
        )
    calibration = p["calibration"]
    if not (calibration is None or calibration == "auto" or (validation and calibration == "alpha")):
        raise InputError(
            f"calibration={calibration!r} {whole}: give validation_data, with calibration 'auto' for a curve or "
            "'alpha' for Algorithm 1"
        )
