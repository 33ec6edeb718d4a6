"""`SingleTaskBLL`: a replacement for BoTorch's `SingleTaskGP`, in its tutorials and in Ax."""

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
from lastlayer.integrations.botorch.gaussian import Separable
from lastlayer.integrations.botorch.model import BLLModel
from lastlayer.integrations.botorch.surrogate import Surrogate


class SingleTaskBLL(BLLModel, GPyTorchModel, GP):  # type: ignore[misc]  # mypy skips BoTorch
    """A Bayesian last layer on random Fourier features, used like BoTorch's `SingleTaskGP`, for one or more outputs.

    It is fitted by `fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))`, by `fit()`, or at its first
    use. Outputs are independent, each with its own length scales and noise.

    Parameters
    ----------
    train_X, train_Y : Tensor of shape (n, d), (n, o)
        Points in original units, and their values, one column per output.
    train_Yvar : Tensor of shape (n, o), default None
        Known noise variances of the values, in addition to the learned noise.
    outcome_transform, input_transform : OutcomeTransform, InputTransform, default None
        BoTorch transforms; values and inputs are standardised without them too.
    bounds : Tensor of shape (2, d), default None
        Box that sets the unit of the length scales, in the units of the input transform. None: the range of the points.
    random_state : int, default 0
        Seed of the frequencies; keep it fixed during a run, so that only the data change the model.
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
        self.eval()

    @property
    def parts(self) -> Any:
        """One Gaussian for each output; the first use fits them."""
        if "gaussians" not in self._modules:
            self.fit()
        return self.gaussians

    @property
    def num_outputs(self) -> int:
        return self.data[0].shape[1]

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size()

    def fit(self) -> "SingleTaskBLL":
        """Learn length scales, amplitude and noise of every output; the last layer is exact."""
        Y, Yvar = self.data
        with torch.no_grad():
            points = self.transform_inputs(self.train_inputs[0]).detach().cpu().double().numpy()
        box = None if self.bounds is None else self.bounds.detach().cpu().double().numpy()
        outputs = []
        for j, y in enumerate(Y.cpu().double().numpy().T):
            noise_std = None if Yvar is None else Yvar[:, j].cpu().double().sqrt().numpy()
            surrogate = Surrogate(random_state=self.random_state).fit(points, y, bounds=box, noise_std=noise_std)
            outputs.append(Separable(surrogate.fitted_))
        self.gaussians = torch.nn.ModuleList(outputs).to(Y.device)
        self.requires_grad_(False)
        noise = self._learned_noise(self.transform_inputs(self.train_inputs[0][:1]))[0]
        self.likelihood.noise = noise[0] if len(noise) == 1 else noise[:, None]
        return self.eval()

    def custom_fit(self, mll: Any, **_: Any) -> Any:
        """Fit the model; `fit_gpytorch_mll` calls this instead of an optimizer."""
        self.fit()
        return mll.eval()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        assert len(self.parts)
        return torch.nn.Module.load_state_dict(self, state_dict, strict)  # BoTorch's also restores training targets

    def _learned_noise(self, X: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q o"]:
        """Noise variances at inputs as the input transform returns them."""
        return torch.cat([part.rows(X).noise[..., 0] for part in self.parts], -1)

    def _posterior(self, X: Tensor, noise: bool | Tensor) -> Any:
        """Posterior; `noise=True` includes the learned noise and the mean of the known variances."""
        if noise is True and self.data[1] is not None:
            learned = self._learned_noise(X)
            noise = learned + self.data[1].mean(0).to(learned)
        return super()._posterior(X, noise)


def fit_model(
    X: Float[Tensor, "n d"],
    Y: Float[Tensor, "n o"],
    Yvar: Float[Tensor, "n o"] | None = None,
    *,
    bounds: Float[Tensor, "2 d"] | None = None,
    random_state: int = 0,
) -> SingleTaskBLL:
    """Fit a `SingleTaskBLL` to values Y at points X."""
    return SingleTaskBLL(X, Y, Yvar, bounds=bounds, random_state=random_state).fit()
