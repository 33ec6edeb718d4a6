"""`Surrogate`: a regressor for Bayesian optimisation, for some hundred values of little noise."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.rows import Rows
from lastlayer.data.scaling import Scales, Standardizer
from lastlayer.data.validation import seed_of, validated
from lastlayer.errors import InputError
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.likelihoods.base import Gaussian
from lastlayer.networks.fourier import ProcessFeatures
from lastlayer.networks.mlp import copied
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.member import Member, training_costs
from lastlayer.settings.resolve import resolve
from lastlayer.settings.types import NoisePrior, Shape, TrainingOptions
from lastlayer.training.lengths import fit_lengths, refine_lengths

LITTLE_NOISE = NoisePrior(rows=2.0, share=1e-4)
"""Prior of the noise, as informative as two rows whose noise variance is a ten-thousandth of the targets' variance."""
MANY_INPUTS = 40
"""From about this many inputs on, the prior of the length scales is narrower: no held-out rows check them here."""
MOST_ROWS = 400
"""Number of rows that length scales are fitted to and at which the kernel is exact; more add little."""
LENGTH = 1.0
"""Prior mode of a length scale, over the root of the number of inputs; half of that for tables, whose functions are
smoother."""
UNIT = 1 / math.sqrt(12)
"""Standard deviation of inputs uniform on the unit interval, by which standardised inputs are divided."""


class Surrogate(LastLayerRegressor):
    """A Gaussian process approximated by random frequencies, with one learned length scale per input.

    It has one output, and the methods of `BLLRegressor` but `save`: it is fitted within a second, so save X and y.

    Parameters
    ----------
    n_frequencies, max_steps : int, default 256 and 100
        Number of random frequencies, half that of features, and of steps of the search for the length scales.
    random_state : int, default None
        Seed of the frequencies; keep it fixed during a run, so that only the data change the model.

    Examples
    --------
    >>> X = np.linspace(0, 1, 8)[:, None]
    >>> model = Surrogate(32, max_steps=5, random_state=0).fit(X, np.sin(6 * X[:, 0]))
    >>> model.predictive(X).mean.shape
    (8,)
    """

    def __init__(self, n_frequencies: int = 256, *, max_steps: int = 100, random_state: Any = None) -> None:
        self.n_frequencies, self.max_steps, self.random_state = n_frequencies, max_steps, random_state

    def fit(self, X: Any, y: Any, *, bounds: Any = None, noise_std: Any = None) -> "Surrogate":
        """Learn length scales, amplitude and noise, and compute the exact last layer from all rows.

        Parameters
        ----------
        X, y : array-like of shape (n, d), (n,)
            Points and their values.
        bounds : array-like of shape (2, d), default None
            Box that sets the unit of the length scales. None: the range of X.
        noise_std : array-like of shape (n,), default None
            Known noise standard deviation of each value, in addition to the learned noise.
        """
        vars(self).pop("fitted_", None)
        seed, given = seed_of(self.random_state), validated(self, X, y, noise_std=noise_std)
        if given.y.shape[1] != 1:
            raise InputError(f"a Surrogate has one output, and y has {given.y.shape[1]}: use SingleTaskBLL for several")
        box = box_scaler(torch.tensor(given.X).double(), bounds)
        scales = replace(Scales.of(given, Gaussian().read(given)), inputs=box)
        table = Rows.of(given, Gaussian(), scales)
        data = table.main
        generator = torch.Generator().manual_seed(seed)
        some = torch.randperm(len(data.X), generator=generator)[:MOST_ROWS]
        weight = torch.ones(1, len(some), dtype=torch.float64)
        log_length, log_linear = fit_lengths(
            data.X[None, some],
            data.T[None, some],
            weight,
            noise_prior=LITTLE_NOISE,
            length=LENGTH,
            length_std=(1 + data.X.shape[1] / MANY_INPUTS) ** -0.5,
            steps=self.max_steps,
        )
        found = log_length[0], log_linear[0]
        if not table.learned:
            found = refine_lengths(table.take(some), *found, generator=generator)
        network = ProcessFeatures(data.X[some], *found, self.n_frequencies, generator=generator)
        defaults = BLLRegressor(
            backbone=network,
            preset="evidence",
            n_members=1,
            hidden_prior=1.0,
            max_epochs=self.max_steps,
            training=TrainingOptions(early_stopping=False),
            device="cpu",
        )
        member = Member(copied(network), self._posterior(table, network))
        self.fitted_ = Fitted(
            members=(member,),
            sample_cost=training_costs([member], data),
            inputs=scales.inputs,
            targets=scales.targets,
            settings=resolve(defaults.get_params(deep=False), Shape(tuple(data.X.shape)), seed=seed),
            n_features_in=self.n_features_in_,
            y_ndim=given.y_ndim,
        )
        return self

    @staticmethod
    def _posterior(rows: Rows, network: nn.Module) -> Posterior:
        """The last layer of all rows; with known noise, that of the single output."""
        if rows.learned:
            statistics = Statistics.from_features(affine_features(network(rows.main.X)), rows.main.T)
            return by_evidence([statistics], noise_prior=LITTLE_NOISE)[0]
        (posterior,) = by_evidence([rows.by_noise(network)])
        return posterior.output(0)


def box_scaler(X: Float[Tensor, "m d"], bounds: Any) -> Standardizer:
    """Build a scaler that standardises inputs as if they filled a box, wherever the points are."""
    d = X.shape[1]
    box = torch.stack([X.amin(0), X.amax(0)]) if bounds is None else torch.as_tensor(np.asarray(bounds, float))
    if box.shape != (2, d):
        raise InputError(f"bounds has shape {tuple(box.shape)}: it must be (2, {d}), lower bounds above upper ones")
    if not bool((box[0] <= box[1]).all()):
        i = int((~(box[0] <= box[1])).nonzero()[0])
        raise InputError(
            f"bounds of input {i} are reversed or not numbers, from {box[0, i]:g} to {box[1, i]:g}: the first row "
            "holds the lower bounds, the second the upper ones"
        )
    width = box[1] - box[0]
    return Standardizer(box.mean(0), UNIT * torch.where(width > 0, width, torch.ones_like(width)))
