"""`BLLModel`: fitted last layers as a BoTorch model, and functions drawn from it."""

from collections.abc import Sequence
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.deterministic import DeterministicModel
from botorch.models.model import Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import fantasize as fantasizing
from botorch.posteriors import GPyTorchPosterior, Posterior
from botorch.sampling.base import MCSampler
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from jaxtyping import Float
from linear_operator import to_linear_operator
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.integrations.botorch.gaussian import Dense, LinearGaussian, Separable, block_diagonal
from lastlayer.predictor.fitted import as_fitted


class BLLModel(Model):  # type: ignore[misc]  # mypy skips BoTorch
    """A fitted model for BoTorch: the joint Gaussian over points and outputs of `model.joint`, differentiable.

    A mixture is replaced by the Gaussian with the same mean and covariance. Observations and fantasies condition it in
    closed form at fixed features and noise: without calibration, that is the last layer after `model.update`.

    Parameters
    ----------
    fitted : BLLRegressor or Fitted
        A regressor, or its `fitted_`, fitted to inputs and targets as the transforms return them; it is copied.
    train_X : Tensor of shape (n, d), default None
        The points it was fitted to, in original units, around which BoTorch starts its search for the best point.
    input_transform, outcome_transform : InputTransform, OutcomeTransform, default None
        BoTorch transforms, already fitted; the posterior is in original units.
    """

    def __init__(
        self,
        fitted: Any,
        *,
        train_X: Float[Tensor, "n d"] | None = None,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        super().__init__()
        if train_X is not None:
            self.train_inputs = (train_X,)
        one = as_fitted(fitted, "BoTorch", bell=True)
        separable = len(one.members) == 1 and one.correlation is None and not one.by_output
        self.gaussians = torch.nn.ModuleList([Separable(one) if separable else Dense(one)])
        self.requires_grad_(False)
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.eval()

    @property
    def parts(self) -> Any:
        """One Gaussian of all outputs, or one of each."""
        return self.gaussians

    @property
    def num_outputs(self) -> int:
        return sum(len(part.kept) for part in self.parts)

    @property
    def batch_shape(self) -> torch.Size:
        return self.parts[0].M.shape[:-2]

    def posterior(
        self,
        X: Float[Tensor, "*b q d"],
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """Return the joint posterior at q points, batched.

        Parameters
        ----------
        X, output_indices : Tensor of shape (..., q, d), list of int
            Points in original units, and the outputs to return; None: all.
        observation_noise : bool or Tensor, default False
            Whether to include the learned noise; a tensor holds the noise variances to include.
        posterior_transform : PosteriorTransform, default None
            Transform to apply to the posterior.
        """
        self.eval()
        shown = self if output_indices is None else self.subset_output(output_indices)
        posterior = shown._posterior(self.transform_inputs(X), observation_noise)
        if hasattr(shown, "outcome_transform"):
            posterior = shown.outcome_transform.untransform_posterior(posterior, X=X)
        return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=X)

    def forward(self, X: Float[Tensor, "*b q d"]) -> MultivariateNormal:
        """Return the distribution of `posterior`, as calling a GPyTorch model does."""
        return self.posterior(X).distribution

    def condition_on_observations(
        self, X: Float[Tensor, "*c n d"], Y: Float[Tensor, "*b n o"], noise: Tensor | None = None, **_: Any
    ) -> "BLLModel":
        """Condition on more observations in closed form; features, alpha and noise stay as they are.

        Parameters
        ----------
        X, Y : Tensor of shape (..., n, d), (..., n, o)
            Points and observed values; a batch of Y returns a batch of models.
        noise, **_ : Tensor, default None
            Noise variances of these observations, on the scale of the outcome transform. None: the learned noise.
        """
        if Y.shape[-1] != self.num_outputs or Y.shape[-2] != X.shape[-2]:
            raise InputError(
                f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}: Y must be (..., {X.shape[-2]}, "
                f"{self.num_outputs}), one row per row of X and one column per output"
            )
        return self._conditioned(X, self._transformed(Y, X), noise)

    def fantasize(
        self, X: Float[Tensor, "*b n d"], sampler: MCSampler, observation_noise: Tensor | None = None, **_: Any
    ) -> "BLLModel":
        """Condition on draws of the model's own noisy posterior at X."""
        if not X.shape[-2]:
            return self._with([part.repeated(sampler.sample_shape + X.shape[:-2]) for part in self.parts])
        noise = observation_noise
        with fantasizing():
            Y = self._transformed(sampler(self.posterior(X, observation_noise=True if noise is None else noise)), X)
            return self._conditioned(X, Y, None if noise is None else noise.expand(Y.shape[1:]))

    def subset_output(self, idcs: list[int]) -> "BLLModel":
        n = self.num_outputs
        if any(not -n <= i < n for i in idcs) or not idcs:
            raise InputError(f"outputs {list(idcs)} were requested, but the model has outputs 0 to {n - 1}")
        kept, alone = [i % n for i in idcs], len(self.parts) == 1
        new = self._with([self.parts[0].outputs(kept)] if alone else [self.parts[i].separate() for i in kept])
        if hasattr(self, "outcome_transform"):
            new.outcome_transform = self.outcome_transform.subset_output(idcs)
        return new

    def draw(self, n: int | tuple[int, ...] = (), *, seed: int | None = None) -> "DrawnFunctions":
        """Sample one function from the posterior, or a batch of n; at X (q, d) or (n, q, d) it has values (n, q, o).

        Parameters
        ----------
        n, seed : int or tuple of int, int
            Number, or shape, of the functions, and the seed; None: torch's global generator.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return DrawnFunctions(self, (n,) if isinstance(n, int) else n, generator)

    def _posterior(self, X: Tensor, noise: bool | Tensor) -> GPyTorchPosterior:
        each = [_distribution(part, X, n) for part, n in zip(self.parts, self._by_part(noise), strict=True)]
        # several parts are block-diagonal, as in `SingleTaskGP`: BoTorch decomposes each output separately
        whole = each[0] if len(each) == 1 else MultitaskMultivariateNormal.from_independent_mvns(each)
        return GPyTorchPosterior(whole)

    def _conditioned(self, X: Tensor, Y: Tensor, noise: Tensor | None) -> "BLLModel":
        X, each = self.transform_inputs(X), zip(self.parts, self._by_part(Y), self._by_part(noise), strict=True)
        return self._with([part.condition(X, y, n) for part, y, n in each])

    def _by_part(self, values: Tensor | bool | None) -> list[Any]:
        """Values of the outputs, part by part; anything but a tensor is the same for all."""
        if len(self.parts) > 1 and isinstance(values, Tensor):
            return [values[..., j : j + 1] for j in range(len(self.parts))]
        return [values] * len(self.parts)

    def _with(self, parts: Sequence[LinearGaussian]) -> "BLLModel":
        new = BLLModel.__new__(BLLModel)
        Model.__init__(new)
        new.gaussians = torch.nn.ModuleList(parts)
        _share(self, new, "train_inputs", "input_transform", "outcome_transform")
        new.training = False
        return new

    def _transformed(self, Y: Tensor, X: Tensor) -> Tensor:
        return self.outcome_transform(Y, X=X)[0] if hasattr(self, "outcome_transform") else Y

    def _set_transformed_inputs(self) -> None:
        """Do nothing: the training inputs stay as they are, because nothing is computed from them."""

    _revert_to_original_inputs = _set_transformed_inputs


class DrawnFunctions(DeterministicModel):  # type: ignore[misc]
    """Functions with fixed weights, in original units: X (*b, q, d) -> (*c, q, o)."""

    def __init__(self, model: BLLModel, shape: tuple[int, ...], generator: torch.Generator | None) -> None:
        super().__init__()
        self._num_outputs, self.shape = model.num_outputs, torch.Size(shape) + model.batch_shape
        self.parts = torch.nn.ModuleList([part.separate() for part in model.parts])
        self.coefficients = [part.draw(generator, shape) for part in model.parts]
        _share(model, self, "input_transform", "outcome_transform")
        self.eval()

    @property
    def batch_shape(self) -> torch.Size:
        return self.shape

    def forward(self, X: Float[Tensor, "*b q d"]) -> Float[Tensor, "*c q o"]:
        each = [part.function(X, e) for part, e in zip(self.parts, self.coefficients, strict=True)]  # type: ignore[operator]
        return torch.cat(each, -1)


class FunctionPaths(SamplePath):  # type: ignore[misc]
    """Functions of a model's posterior in BoTorch's layout, outputs before points."""

    def __init__(self, model: BLLModel, sample_shape: torch.Size) -> None:
        super().__init__()
        self.drawn = model.draw(tuple(sample_shape))

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Do nothing: the model is no ensemble."""

    def forward(self, x: Float[Tensor, "*b n d"], **_: Any) -> Tensor:
        if self.drawn.num_outputs == 1:
            return self.drawn.posterior(x).mean[..., 0]
        return self.drawn.posterior(x.squeeze(-3) if x.dim() > 2 and x.shape[-3] == 1 else x).mean.mT


DrawMatheronPaths.register(BLLModel)(lambda model, *, sample_shape, **_: FunctionPaths(model, sample_shape))


def _share(model: Model, other: Model, *names: str) -> None:
    """Give another model what BoTorch lets a model have or not have."""
    for name in names:
        if hasattr(model, name):
            setattr(other, name, getattr(model, name))


def _distribution(part: LinearGaussian, X: Tensor, noise: bool | Tensor) -> MultivariateNormal:
    mean, cov, learned = part.moments(X)
    if isinstance(noise, Tensor) or noise:
        added = torch.diag_embed(noise.expand(mean.shape)) if isinstance(noise, Tensor) else learned
        cov = cov + to_linear_operator(block_diagonal(added.expand(*mean.shape, mean.shape[-1])))
    if mean.shape[-1] == 1:
        return MultivariateNormal(mean[..., 0], cov)
    return MultitaskMultivariateNormal(mean, cov)
