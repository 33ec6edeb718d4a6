"""`SingleTaskBLL`: in the place of BoTorch's `SingleTaskGP`, in its tutorials and in Ax."""

from collections.abc import Mapping
from typing import Any

import torch
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from gpytorch.constraints import Positive
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.models import GP
from jaxtyping import Float
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.integrations.botorch.gaussian import Gaussian, Independent, Separable
from lastlayer.integrations.botorch.model import BLLModel
from lastlayer.integrations.botorch.surrogate import Surrogate
from lastlayer.predictor.fitted import as_fitted


class SingleTaskBLL(BLLModel, GPyTorchModel, GP):  # type: ignore[misc]  # BoTorch is not looked into
    """A Bayesian last layer on random Fourier features as BoTorch's `SingleTaskGP` is used, of one output or several.

    Constructed from data, then fitted: by `fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))`, by
    `fit()`, or when it is first asked. Outputs are independent, each with lengths and noise of its own.

    Parameters
    ----------
    train_X : Tensor, (n, d)
        Points, in original units.
    train_Y : Tensor, (n, o)
        Their values, a column for each output.
    train_Yvar : Tensor, (n, o), optional
        Known variances of the noise of each value, beside what is learned.
    outcome_transform, input_transform : optional
        BoTorch's; values and inputs are standardised without them too.
    bounds : Tensor, (2, d), optional
        The box that lengths are measured by, as the input transform returns points; if left out, their range.
    random_state : int, default 0
        Seed of the random frequencies; keep it over the steps of a run, so that data alone change the model.

    Examples
    --------
    >>> model = SingleTaskBLL(X, Y)  # doctest: +SKIP
    >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))  # doctest: +SKIP
    """

    def __init__(
        self,
        train_X: Float[Tensor, "n d"],
        train_Y: Float[Tensor, "n o"],
        train_Yvar: Float[Tensor, "n o"] | None = None,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: InputTransform | None = None,
        bounds: Float[Tensor, "2 d"] | None = None,
        random_state: int = 0,
    ) -> None:
        Model.__init__(self)
        alike = train_Yvar is None or train_Yvar.shape == train_Y.shape
        if train_X.dim() != 2 or train_Y.dim() != 2 or len(train_X) != len(train_Y) or not alike:
            yvar = "" if train_Yvar is None else f", train_Yvar {tuple(train_Yvar.shape)}"
            raise InputError(
                f"train_X has shape {tuple(train_X.shape)} and train_Y {tuple(train_Y.shape)}{yvar}: they must be "
                "(n, d) and (n, o), one row per point, and train_Yvar like train_Y; a single output is Y[:, None]"
            )
        if outcome_transform is not None:
            outcome_transform.train()
            train_Y, train_Yvar = outcome_transform(train_Y, train_Yvar, X=train_X)
            outcome_transform.eval()
            self.outcome_transform = outcome_transform
        if input_transform is not None:
            input_transform.train()
            self.transform_inputs(train_X, input_transform)
            input_transform.eval()
            self.input_transform = input_transform
        self.train_inputs = (train_X,)
        self.train_targets = train_Y[:, 0] if train_Y.shape[1] == 1 else train_Y.mT
        self.data = (train_Y.detach(), None if train_Yvar is None else train_Yvar.detach())
        self.bounds, self.random_state = bounds, random_state
        outputs = torch.Size([train_Y.shape[1]] if train_Y.shape[1] > 1 else [])
        self.likelihood = GaussianLikelihood(noise_constraint=Positive(), batch_shape=outputs).double()
        self.parts = torch.nn.ModuleList()
        self.eval()

    @property
    def num_outputs(self) -> int:
        return self.data[0].shape[1] if not len(self.parts) else super().num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        return super().batch_shape if len(self.parts) else torch.Size()

    def fit(self) -> "SingleTaskBLL":
        """Learn lengths, amplitude and noise of every output; the last layer is exact."""
        Y, Yvar = self.data
        with torch.no_grad():
            points = self.transform_inputs(self.train_inputs[0]).detach().cpu().double().numpy()
        box = None if self.bounds is None else self.bounds.detach().cpu().double().numpy()
        outputs = []
        for j, y in enumerate(Y.cpu().double().numpy().T):
            noise_std = None if Yvar is None else Yvar[:, j].cpu().double().sqrt().numpy()
            surrogate = Surrogate(random_state=self.random_state).fit(points, y, bounds=box, noise_std=noise_std)
            outputs.append(Separable(as_fitted(surrogate)))
        self.parts = torch.nn.ModuleList([outputs[0] if len(outputs) == 1 else Independent(outputs)]).to(Y.device)
        self.requires_grad_(False)
        noise = self._learned_noise(self.transform_inputs(self.train_inputs[0][:1]))[0]
        self.likelihood.noise = noise[0] if len(noise) == 1 else noise[:, None]
        return self.eval()

    def custom_fit(self, mll: Any, **_: Any) -> Any:
        """What `fit_gpytorch_mll` calls: lengths by the evidence, the rest in closed form, no optimizer."""
        self.fit()
        return mll.eval()

    def posterior(self, X: Tensor, *arguments: Any, **named: Any) -> Any:
        if not len(self.parts):
            self.fit()
        return super().posterior(X, *arguments, **named)

    def forward(self, X: Float[Tensor, "*b q d"]) -> Any:
        return BLLModel.forward(self, X)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        """The numbers of another model of the same shape."""
        if not len(self.parts):
            self.fit()
        return torch.nn.Module.load_state_dict(self, state_dict, strict)  # BoTorch's also restores training targets

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **named: Any) -> Any:
        if not len(self.parts):
            self.fit()
        return BLLModel.condition_on_observations(self, X, Y, noise, **named)

    def _learned_noise(self, X: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q o"]:
        """Variances at inputs as the input transform returns them."""
        own: Gaussian = self.parts[0]
        each = own.moments_of_outputs(X) if isinstance(own, Independent) else [own.moments(X)]
        return torch.cat([moments.noise[..., 0] for moments in each], -1)

    def _posterior(self, X: Tensor, noise: bool | Tensor) -> Any:
        """Noise that is asked for without saying how much is what is learned and the mean of what is known."""
        if noise is True and self.data[1] is not None:
            learned = self._learned_noise(X)
            noise = learned + self.data[1].mean(0).to(learned)
        return super()._posterior(X, noise)

    def _with(self, parts: Any, kind: Any = None) -> Any:
        """Models after more observations, and of some outputs, are not fitted again."""
        return super()._with(parts, BLLModel if kind is None else kind)


def fit_model(
    X: Float[Tensor, "n d"],
    Y: Float[Tensor, "n o"],
    Yvar: Float[Tensor, "n o"] | None = None,
    *,
    bounds: Float[Tensor, "2 d"] | None = None,
    random_state: int = 0,
) -> SingleTaskBLL:
    """A fitted `SingleTaskBLL` of values Y at points X of the box `bounds`."""
    return SingleTaskBLL(X, Y, Yvar, bounds=bounds, random_state=random_state).fit()
