"""BoTorch: the posterior is the model's joint, conditioning is the update, acquisition values are those of a Gaussian
process with the same linear kernel, and the surrogate is close to its process."""

import copy
import inspect
import math
import re
import warnings
from functools import cache

import gpytorch
import numpy as np
import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient, qMaxValueEntropy, qUpperConfidenceBound
from botorch.acquisition.joint_entropy_search import qJointEntropySearch
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.max_value_entropy_search import qLowerBoundMaxValueEntropy
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.acquisition.predictive_entropy_search import qPredictiveEntropySearch
from botorch.acquisition.utils import get_optimal_samples
from botorch.fit import fit_gpytorch_mll
from botorch.generation import MaxPosteriorSampling
from botorch.models import ModelList, ModelListGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.input import InputPerturbation
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.get_sampler import get_sampler
from botorch.sampling.pathwise import draw_matheron_paths
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from helpers import close, refused, sine
from models import holes

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.features import affine_features
from lastlayer.errors import FlooredNoiseWarning, MissingPackageError, need
from lastlayer.integrations.botorch import BLLModel, SingleTaskBLL, Surrogate, fit_model
from lastlayer.integrations.botorch.surrogate import LITTLE_NOISE
from lastlayer.networks.fourier import ProcessFeatures
from lastlayer.training.lengths import fit_lengths

JOINT = 10.0  # tolerances are so much wider where covariances carry their jitter, 1e-10 of the mean variance
SMALL = {"hidden": (6, 6), "max_epochs": 30, "random_state": 0}
KINDS = {
    "one network": {"preset": "evidence"},
    "tuned alpha": {"calibration": "alpha", "n_members": 1, "hidden_prior": 1.0},
    "calibrated": {"calibration": "auto", "n_members": 4, "hidden_prior": 1.0},
    "alike": {"calibration": None, "n_members": 3, "hidden_prior": 1.0},
}
MORE = {
    "noise by input": {"noise": "input", "n_members": 3, "hidden_prior": 1.0},
    "one network, noise by input": {"noise": "input", "n_members": 1, "hidden_prior": 1.0},
    "one network, missing targets": {"preset": "evidence"},
    "calibrated, missing targets": {"calibration": "auto", "n_members": 3, "hidden_prior": 1.0},
    "known noise": {"preset": "evidence"},
}
"""Kinds whose noise is never correlated between the outputs."""
ALL = [*[(kind, noise) for kind in KINDS for noise in ("diagonal", "full")], *[(kind, "diagonal") for kind in MORE]]


def fitted(kind="one network", q=2, noise="diagonal", **words):
    """A copy: some tests go on to update it."""
    return copy.deepcopy(_fitted(kind, q, noise, **words))


@cache
def _fitted(kind, q, noise, **words):
    X, y = sine(50, q=q, d=2)
    y = holes(y) if kind.endswith("missing targets") else y
    known = {"noise_std": 0.1 + np.abs(X[:, 0])} if kind == "known noise" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlooredNoiseWarning)
        return BLLRegressor(**{**SMALL, "noise": noise, **(KINDS | MORE)[kind], **words}).fit(X, y, **known)


def points(*shape, d=2, seed=1):
    return 2 * torch.randn(*shape, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def joint_of(posterior):
    """Mean (q, o) and covariance output by output, as `model.joint` has it."""
    mean = posterior.mean.detach()
    q, o = mean.shape
    cov = posterior.distribution.covariance_matrix.detach().reshape(q, o, q, o).permute(1, 0, 3, 2)
    return mean, cov.reshape(q * o, q * o)


def is_joint(posterior, joint):
    for found, expected, loose in zip(joint_of(posterior), (joint.mean, joint.cov()), (1.0, JOINT), strict=True):
        close(found, torch.tensor(expected), loose=loose)


@pytest.fixture(scope="module")
def linear_gp():
    """A network of two outputs under the shared bias prior, and the Gaussian processes of one output with its kernel.

    The kernel is sigma_w^2 phi phi' on the affine features, the noise sigma_e^2: what the last layer assumes.
    """
    regressor = fitted(training=TrainingOptions(bias_prior="shared"))
    X, y = sine(50, q=2, d=2)
    posterior, inputs, targets = (regressor.members_[0].posterior, regressor.fitted_.inputs, regressor.fitted_.targets)

    class Features(gpytorch.kernels.Kernel):
        has_lengthscale = False

        def forward(self, a, b, diag=False, **_):
            one, other = (self.features(x) for x in (a, b))
            cov = math.exp(float(posterior.log_alpha)) * (one @ other.mT)
            return cov.diagonal(dim1=-2, dim2=-1) if diag else cov

        def features(self, x):
            z = (x - inputs.mean) / inputs.scale
            flat = affine_features(regressor.members_[0].network(z.reshape(-1, z.shape[-1])))
            return flat.reshape(*x.shape[:-1], flat.shape[-1])

    def gp(i):
        variance = float(posterior.Sigma_E[i, i]) * float(targets.scale[i]) ** 2
        modules = {"covar_module": gpytorch.kernels.ScaleKernel(Features())}
        modules |= {"mean_module": gpytorch.means.ConstantMean(), "outcome_transform": None}
        modules["covar_module"].outputscale = variance
        modules["mean_module"].constant.data.fill_(float(targets.mean[i]))
        noise = torch.full((50, 1), variance, dtype=torch.float64)
        return SingleTaskGP(torch.tensor(X), torch.tensor(y)[:, i : i + 1], train_Yvar=noise, **modules).eval()

    return regressor, [gp(i) for i in range(2)]


@pytest.mark.parametrize(("kind", "noise"), ALL)
def test_the_posterior_is_the_models_joint(kind, noise):
    regressor, X = fitted(kind, noise=noise), points(4)
    model = BLLModel(regressor)
    for with_noise in (False, True):
        is_joint(model.posterior(X, observation_noise=with_noise), regressor.joint(X.numpy(), noise=with_noise))


@pytest.mark.parametrize("noise", ["diagonal", "full"])
@pytest.mark.parametrize("kind", ["one network", "calibrated"])
def test_batches_outputs_and_transforms(kind, noise):
    regressor, X = fitted(kind, noise=noise), points(3, 2, 4)
    model = BLLModel(regressor)
    whole = model.posterior(X)
    assert model.num_outputs == 2
    assert model.batch_shape == torch.Size()
    assert whole.mean.shape == (3, 2, 4, 2)
    each = joint_of(model.posterior(X[1, 1]))
    close(whole.mean[1, 1], each[0])
    close(whole.distribution[1, 1].covariance_matrix.reshape(4, 2, 4, 2).permute(1, 0, 3, 2).reshape(8, 8), each[1])
    for second in (model.posterior(X, output_indices=[1]), model.subset_output([1]).posterior(X)):
        close(second.mean, whole.mean[..., 1:])
        close(second.variance, whole.variance[..., 1:], loose=JOINT)
    scalar = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(torch.tensor([2.0, -1.0]).double()))
    close(scalar.mean[..., 0], 2 * whole.mean[..., 0] - whole.mean[..., 1])
    own = torch.tensor([0.5, 2.0], dtype=torch.float64).expand(3, 2, 4, 2)
    close(model.posterior(X, observation_noise=own).variance, whole.variance + own, loose=JOINT)


def test_a_single_output_is_plain_and_several_are_a_kronecker_product():
    one, two = BLLModel(fitted(q=1)), BLLModel(fitted())
    assert type(one.posterior(points(3)).distribution) is gpytorch.distributions.MultivariateNormal
    distribution = two.posterior(points(3)).distribution
    assert type(distribution) is gpytorch.distributions.MultitaskMultivariateNormal
    assert "Kronecker" in type(distribution.lazy_covariance_matrix).__name__


def test_input_and_outcome_transforms_leave_original_units():
    X, y = sine(50, q=2, d=2)
    X, y = torch.tensor(X), torch.tensor(y)
    into, out = Normalize(2, bounds=torch.tensor([[-5.0, -5.0], [5.0, 5.0]]).double()), Standardize(2)
    T = out(y)[0]
    regressor = BLLRegressor(**SMALL, preset="evidence").fit(into(X).numpy(), T.detach().numpy())
    out.eval()
    model = BLLModel(regressor, input_transform=into.eval(), outcome_transform=out)
    inner, new = BLLModel(regressor), points(3)
    close(model.posterior(new).mean, out.untransform(inner.posterior(into(new)).mean)[0])
    later = model.condition_on_observations(new, y[:3])
    expected = inner.condition_on_observations(into(new), out(y[:3])[0])
    close(later.posterior(new + 1).mean, out.untransform(expected.posterior(into(new + 1)).mean)[0])
    close(model.subset_output([1]).posterior(new).mean, model.posterior(new).mean[..., 1:])
    drawn = model.draw(seed=0)
    close(drawn.posterior(new).mean, out.untransform(inner.draw(seed=0)(into(new)))[0])


@pytest.mark.parametrize("kind", ["one network", "calibrated", "tuned alpha"])
def test_mean_and_covariance_have_the_derivatives_that_differences_show(kind):
    model = BLLModel(fitted(kind))

    def numbers(X):
        posterior = model.posterior(X, observation_noise=True)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(numbers, points(2).requires_grad_(), atol=1e-6)


@pytest.mark.parametrize("noise", ["diagonal", "full"])
@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
def test_conditioning_is_the_update_of_the_last_layer(noise, bias_prior):
    regressor = fitted(noise=noise, training=TrainingOptions(bias_prior=bias_prior))
    model, X, Y, new = BLLModel(regressor), points(4), points(4, seed=2), points(3, seed=3)
    once = model.condition_on_observations(X, Y)
    twice = model.condition_on_observations(X[:1], Y[:1]).condition_on_observations(X[1:], Y[1:])
    joint = regressor.update(X.numpy(), Y.numpy()).joint(new.numpy(), noise=False)
    for later in (once, twice):
        is_joint(later.posterior(new), joint)


@pytest.mark.parametrize(("kind", "noise"), ALL)
def test_conditioning_is_that_of_the_joint_gaussian(kind, noise):
    """Slow and obvious: the Gaussian over new and observed points together, conditioned entry by entry."""
    model, X, Y, new = BLLModel(fitted(kind, noise=noise)), points(3), points(3, seed=2), points(2, seed=3)
    function = model.posterior(torch.cat([new, X]))
    m, S = function.mean.detach().reshape(-1), function.distribution.covariance_matrix.detach()
    N = (model.posterior(X, observation_noise=True).distribution.covariance_matrix - S[4:, 4:]).detach()
    gain = torch.linalg.solve(S[4:, 4:] + N, S[4:, :4]).T
    later = model.condition_on_observations(X, Y).posterior(new)
    close(later.mean.reshape(-1), m[:4] + gain @ (Y.reshape(-1) - m[4:]), loose=1e4)  # the jitter, through a solve
    close(later.distribution.covariance_matrix, S[:4, :4] - gain @ S[4:, :4], loose=1e4)


@pytest.mark.parametrize("kind", ["one network", "calibrated"])
@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_outputs_may_be_in_different_units(kind, noise):
    """The jitter of an output is in its unit."""
    X, y = sine(50, q=2, d=2)
    regressor = BLLRegressor(**{**SMALL, **KINDS[kind], "noise": noise}).fit(X, y * [1.0, 1e7])
    found = BLLModel(regressor).posterior(torch.from_numpy(X[:4])).variance.detach().numpy()
    np.testing.assert_allclose(found, regressor.predictive(X[:4], noise=False).var, rtol=1e-6)


def test_noise_of_an_observation_can_be_given():
    model, X, Y = BLLModel(fitted(q=1)), points(2), points(2, seed=2)[:, :1]
    own = model.posterior(X, observation_noise=True).variance - model.posterior(X).variance
    given, sure = (model.condition_on_observations(X, Y, noise=s * own).posterior(X).mean for s in (1.0, 1e-8))
    close(given, model.condition_on_observations(X, Y).posterior(X).mean, loose=1e4)
    close(sure, Y, loose=1e5)


@pytest.mark.parametrize("kind", ["one network", "alike"])
def test_fantasies_are_models_conditioned_on_draws(kind):
    model, X, new = BLLModel(fitted(kind)), points(3, 2), points(3, 4, seed=2)
    sampler = SobolQMCNormalSampler(torch.Size([5]), seed=0)
    fantasies = model.fantasize(X, sampler)
    Y = sampler(model.posterior(X, observation_noise=True))
    one = model.condition_on_observations(X[1], Y[4, 1]).posterior(new[1])
    many = fantasies.posterior(new)
    assert (fantasies.batch_shape, many.mean.shape) == ((5, 3), (5, 3, 4, 2))
    close(many.mean[4, 1], one.mean)
    close(many.variance[4, 1], one.variance, loose=JOINT)


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_an_output_observed_alone_is_conditioned_on_what_it_says(noise):
    """With correlated noise it is known less than with the values of the other output."""
    model, X, Y = BLLModel(fitted(noise=noise)), points(3), points(3, seed=2)
    first = model.subset_output([0])
    alone, both = first.condition_on_observations(X, Y[:, :1]).posterior(X), model.condition_on_observations(X, Y)
    S, N = (first.posterior(X, observation_noise=noisy).distribution.covariance_matrix for noisy in (False, True))
    mean = first.posterior(X).mean
    close(alone.mean, mean + S @ torch.linalg.solve(N, Y[:, :1] - mean), loose=1e4)  # the jitter, through a solve
    if noise == "diagonal":
        close(alone.mean, both.posterior(X).mean[:, :1])


@pytest.mark.parametrize("kind", ["one network", "calibrated"])
def test_drawn_functions_have_the_moments_of_the_posterior(kind):
    model, X = BLLModel(fitted(kind)).condition_on_observations(points(2), points(2, seed=5)), points(3, seed=2)
    part = model.parts[0]
    draws = part.function(X, part.draw(torch.Generator().manual_seed(0), (3000,)))
    mean, cov = joint_of(model.posterior(X))
    std = cov.diagonal().reshape(2, 3).T.sqrt()
    assert float(((draws.mean(0) - mean) / std).abs().max()) < 0.08  # 4 standard errors of 3,000 draws
    flat = ((draws - mean) / std).permute(0, 2, 1).reshape(3000, 6)
    correlation = cov / torch.outer(cov.diagonal().sqrt(), cov.diagonal().sqrt())
    assert float((flat.T @ flat / 3000 - correlation).abs().max()) < 0.12


def test_posterior_and_acquisition_values_are_those_of_the_gaussian_process(linear_gp, monkeypatch):
    # else BoTorch compiles a kernel of its own, which takes half a minute where it was never used before
    monkeypatch.setattr("botorch.acquisition.multi_objective.logei._load_attempted", True)
    regressor, (gp, other) = linear_gp
    # qMES looks at the training inputs too
    both, X = BLLModel(regressor, train_X=gp.train_inputs[0]), points(3, 2)
    model = both.subset_output([0])
    ours, theirs = model.posterior(X), gp.posterior(X)
    # the process solves with a matrix of 50 rows that is close to singular
    close(ours.mean, theirs.mean, loose=1e4)
    close(ours.distribution.covariance_matrix, theirs.distribution.covariance_matrix, loose=1e5)
    best, base, box = 3.0, points(6, seed=4), torch.tensor([[-3.0, -3.0], [3.0, 3.0]]).double()

    def sampler(n=16):
        return SobolQMCNormalSampler(torch.Size([n]), seed=1)

    plain = {"prune_baseline": False, "cache_root": False}
    makers = {
        "LogEI": (lambda m: LogExpectedImprovement(m, best), X[:, :1]),
        "qLogEI": (lambda m: qLogExpectedImprovement(m, best, sampler()), X),
        "qUCB": (lambda m: qUpperConfidenceBound(m, 2.0, sampler()), X),
        "qLogNEI": (lambda m: qLogNoisyExpectedImprovement(m, base, sampler(), **plain), X),
        "qKG": (lambda m: qKnowledgeGradient(m, num_fantasies=4, sampler=sampler(4)), points(3, 5)),
        "qMES": (lambda m: qMaxValueEntropy(m, base, num_fantasies=4), X[:, :1]),
    }
    for name, (make, x) in makers.items():
        values = []
        for m in (model, gp):
            torch.manual_seed(0)
            values.append(make(m)(x).detach())
        worst = float((values[0] - values[1]).abs().max() / values[1].abs().max())
        assert worst < 1e-6, f"{name}: {values}"
        torch.manual_seed(0)
        q = 1 if name in ("LogEI", "qMES", "qKG") else 2
        options = {"maxiter": 3, "batch_limit": 2}
        found, _ = optimize_acqf(make(model), box, q=q, num_restarts=2, raw_samples=4, options=options)
        assert found.shape == (q, 2)
        assert bool(((found >= box[0]) & (found <= box[1])).all())
    hypervolumes = []
    for m in (both, ModelList(gp, other)):
        torch.manual_seed(0)
        words = {"X_baseline": base, "sampler": get_sampler(m.posterior(points(1)), torch.Size([128]), seed=0)}
        hypervolumes.append(qLogNoisyExpectedHypervolumeImprovement(m, [0.0, 0.0], **words, **plain)(X).detach())
    assert torch.isfinite(hypervolumes[0]).all()
    close(hypervolumes[0], hypervolumes[1], loose=6e9)  # other base samples: Monte Carlo, 128 draws
    drawn = MaxPosteriorSampling(model, replacement=False)(points(30, seed=6), num_samples=2)
    assert drawn.shape == (2, 2)


def test_a_surrogate_is_close_to_its_process():
    """k = alpha sigma^2 (exp(-|a - a'|^2 / 2) + rho a'a') at the lengths, rho, alpha and noise that were found."""
    X = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Y = torch.sin(6 * X[:, :1]) + X[:, 1:] ** 2
    T = (Y - Y.mean()) / Y.std(correction=0)
    box = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    model = fit_model(X, T, bounds=box)
    surrogate = Surrogate(random_state=0).fit(X.numpy(), T[:, 0].numpy(), bounds=box.numpy())
    new = torch.rand(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z, z_new = ((x - 0.5) * math.sqrt(12) for x in (X, new))
    words = {"noise_prior": LITTLE_NOISE, "length": 1.0, "length_std": (1 + 2 / 40) ** -0.5, "steps": 100}  # two inputs
    log_length, log_linear = fit_lengths(z[None], T[None], torch.ones(1, 20).double(), **words)
    length, rho = log_length[0].exp(), math.exp(log_linear)
    # the same numbers from rows in another order: rounding grows over the steps
    torch.testing.assert_close(surrogate.members_[0].network.scale, 1 / length, rtol=1e-4, atol=0)
    noise, posterior = float(surrogate.members_[0].posterior.Sigma_E), surrogate.members_[0].posterior
    amplitude = math.exp(posterior.log_alpha) * noise

    def kernel(a, b):
        return amplitude * ((-0.5 * torch.cdist(a, b).square()).exp() + rho * a @ b.mT)

    a, b = z / length, z_new / length
    K = kernel(a, a) + noise * torch.eye(20).double() + 1e6  # a flat prior of the bias
    cross = kernel(b, a) + 1e6
    mean = cross @ torch.linalg.solve(K, T)
    prior = amplitude * (1 + rho * b.square().sum(1)) + 1e6
    var = prior - (cross * torch.linalg.solve(K, cross.mT).mT).sum(1)
    with torch.no_grad():
        ours = model.posterior(new)
    assert float((ours.mean - mean).abs().max()) < 2e-3
    assert float((ours.variance.sqrt()[:, 0] - var.sqrt()).abs().max()) < 0.05


def test_lengths_do_not_change_where_points_gather_and_bounds_may_meet_in_an_input_that_does_not_move():
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.uniform(size=(10, 2)), 0.5 + 0.01 * rng.normal(size=(10, 2))])
    surrogate = Surrogate(16, max_steps=0, random_state=0).fit(X, X[:, 0], bounds=[[0.0, 0.0], [1.0, 1.0]])
    assert surrogate.fitted_.inputs.scale == pytest.approx(1 / math.sqrt(12))
    assert surrogate.fitted_.inputs.mean == pytest.approx(0.5)
    X[:, 1] = 3.0
    surrogate = Surrogate(8, max_steps=2, random_state=0).fit(X, X[:, 0], bounds=[[-9.0, 3.0], [9.0, 3.0]])
    assert np.isfinite(surrogate.predict(X)).all()


def test_many_inputs_are_honest():
    """150 rows of 80 inputs and noise: new targets lie within the intervals as often as they should."""
    rng = np.random.default_rng(0)
    X, Z, w = rng.normal(size=(150, 80)), rng.normal(size=(300, 80)), rng.normal(size=80) / np.sqrt(80)
    y, t = (x @ w + 0.3 * rng.normal(size=len(x)) for x in (X, Z))
    low, high = Surrogate(random_state=0).fit(X, y).predictive(Z).interval(0.9)
    assert 0.75 < np.mean((low <= t) & (t <= high)) < 0.98


@pytest.fixture(scope="module")
def two_columns():
    X = torch.rand(12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Y = torch.stack([torch.sin(4 * X[:, 0]), X[:, 1] ** 2], 1)
    return X, Y, fit_model(X, Y), [fit_model(X, Y[:, j : j + 1]) for j in range(2)]


def test_several_outputs_are_independent_models_in_one(two_columns):
    *_, model, single = two_columns
    new = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = torch.full((3, 4, 2), 0.1).double()
    for noisy in (False, True, noise):
        both = model.posterior(new, observation_noise=noisy)
        for j in range(2):
            own = noise[..., j : j + 1] if noisy is noise else noisy
            alone = single[j].posterior(new, observation_noise=own)
            torch.testing.assert_close(both.mean[..., j], alone.mean[..., 0])
            cov = both.distribution.covariance_matrix.reshape(3, 2, 4, 2, 4)  # outputs before points, as SingleTaskGP
            torch.testing.assert_close(cov[:, j, :, j], alone.distribution.covariance_matrix)
            assert not cov[:, j, :, 1 - j].any()
    torch.testing.assert_close(model.subset_output([1]).posterior(new).mean[..., 0], both.mean[..., 1])
    sampler = SobolQMCNormalSampler(torch.Size([5]), seed=0)
    assert sampler(model.posterior(new)).shape == (5, 3, 4, 2)


def test_several_outputs_are_conditioned_each(two_columns):
    X, _, model, single = two_columns
    more, values = torch.rand(2, 3, 2).double(), torch.rand(2, 3, 2).double()
    after = model.condition_on_observations(more, values).posterior(X[:4])
    for j in range(2):
        own = slice(j, j + 1)
        alone = single[j].condition_on_observations(more, values[..., own]).posterior(X[:4])
        torch.testing.assert_close(after.mean[..., own], alone.mean)
        torch.testing.assert_close(after.variance[..., own], alone.variance)
    fantasies = model.fantasize(more, SobolQMCNormalSampler(torch.Size([4]), seed=0))
    assert fantasies.posterior(X[:4]).mean.shape == (4, 2, 4, 2)


def test_it_runs_where_a_tutorial_has_a_gaussian_process(two_columns, as_a_user):
    X, Y, fitted, _ = two_columns
    model = SingleTaskBLL(X, Y, outcome_transform=Standardize(2), input_transform=Normalize(2))
    mll = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    assert not mll.training
    # what is standardised once more says the same
    torch.testing.assert_close(model.posterior(X).mean, fitted.posterior(X).mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.posterior(X).mean, Y, atol=0.05, rtol=0)
    torch.testing.assert_close(model(X).mean, model.posterior(X).mean)
    models = ModelListGP(SingleTaskBLL(X, Y[:, :1]), SingleTaskBLL(X, Y[:, 1:]))
    fit_gpytorch_mll(SumMarginalLogLikelihood(models.likelihood, models))
    torch.testing.assert_close(models.posterior(X).mean, fitted.posterior(X).mean)
    again = SingleTaskBLL(X, Y, input_transform=Normalize(2), outcome_transform=Standardize(2))
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.posterior(X).mean, model.posterior(X).mean)
    assert copy.deepcopy(model).posterior(X).mean.shape == (12, 2)
    refused("one row per point", SingleTaskBLL, X, Y[:, 0])


def test_known_variances_are_those_of_their_values():
    """Ten values that are almost noise beside ten exact ones: what these say counts."""
    g = torch.Generator().manual_seed(0)
    X = torch.linspace(0, 1, 20).double()[:, None]
    Y = torch.sin(6 * X)
    Yvar = torch.where(torch.arange(20) % 2 == 0, 1e-6, 1.0).double()[:, None]
    noisy = Y + Yvar.sqrt() * torch.randn(20, 1, generator=g).double()
    told, untold = SingleTaskBLL(X, noisy, Yvar), SingleTaskBLL(X, noisy)
    error = lambda model: float((model.posterior(X).mean - Y).square().mean().sqrt())
    assert error(told) < 0.03 < 0.2 < error(untold)
    spread = told.posterior(X, observation_noise=True).variance - told.posterior(X).variance
    assert float(spread.min()) >= float(Yvar.mean())


@pytest.mark.parametrize("kind", ["surrogate", "mixture"])
def test_acquisition_functions_with_pending_points_and_by_samples(kind, two_columns):
    """Entropy searches and knowledge gradient, which need a single Gaussian."""
    X, Y, _, (single, _) = two_columns
    words = {"preset": "fast", "max_epochs": 5, "random_state": 0, "n_members": 2}
    mixture = lambda: BLLModel(BLLRegressor((4,), **words).fit(X.numpy(), Y[:, :1].numpy()), train_X=X)
    model = single if kind == "surrogate" else mixture()
    box = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    candidates, x, pending = torch.rand(30, 2).double(), torch.rand(3, 1, 2).double(), torch.rand(2, 2).double()
    torch.manual_seed(0)
    for acquisition in (qLowerBoundMaxValueEntropy, qMaxValueEntropy):
        assert torch.isfinite(acquisition(model, candidates, X_pending=pending)(x)).all()
    assert qKnowledgeGradient(model, num_fantasies=2)(torch.rand(3, 3, 2).double()).shape == (3,)
    points, values = get_optimal_samples(model, box, 4, raw_samples=32, num_restarts=3)
    assert points.shape == (4, 2)
    assert torch.isfinite(qJointEntropySearch(model, points, values)(x)).all()
    assert torch.isfinite(qPredictiveEntropySearch(model, points)(x)).all()


@pytest.mark.parametrize("noise", [None, 0.01])
def test_fantasies_of_no_points_and_of_perturbed_ones(two_columns, noise):
    X, Y, *_ = two_columns
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    noise = None if noise is None else torch.full((1, 1), noise).double()
    perturbed = InputPerturbation(torch.tensor([[0.0, 0.0], [0.01, 0.0]]).double())
    model = SingleTaskBLL(X, Y[:, :1], input_transform=perturbed)
    after = model.fantasize(torch.rand(3, 2, 2).double(), sampler, observation_noise=noise)
    assert after.posterior(X[:5]).mean.shape == (4, 3, 10, 1)  # each point twice
    nothing = model.fantasize(torch.zeros(0, 2).double(), sampler, observation_noise=noise)
    torch.testing.assert_close(nothing.posterior(X[:5]).mean, model.posterior(X[:5]).mean.expand(4, -1, -1))


def test_many_functions_at_once_are_each_one_function(two_columns):
    X, _, model, _ = two_columns
    drawn = model.draw(40, seed=0)
    assert drawn.batch_shape == (40,)
    assert drawn(X[:2]).shape == (40, 2, 2)
    own = torch.rand(40, 1, 2).double().requires_grad_()
    torch.testing.assert_close(drawn(own)[7], model.draw(40, seed=0)(own[7])[7])
    (gradient,) = torch.autograd.grad(drawn(own).sum(), own)
    assert bool((gradient != 0).all())
    paths = draw_matheron_paths(model, torch.Size([3]))
    assert paths(X).shape == (3, 2, 12)  # outputs before points, as BoTorch has them
    torch.testing.assert_close(paths(X), paths(X))


def test_features_of_a_process_have_its_kernel_at_its_points():
    g = torch.Generator().manual_seed(0)
    points, log_length, rho = torch.randn(9, 30, generator=g).double(), torch.full((30,), 1.5).double(), -1.0
    features = ProcessFeatures(points, log_length, torch.tensor(rho).double(), 64, generator=g)
    at, new = features(points), features(torch.randn(5, 30, generator=g).double())
    a = points * (-log_length).exp()
    kernel = (-0.5 * torch.cdist(a, a).square()).exp() + math.exp(rho) * a @ a.mT
    torch.testing.assert_close(at @ at.mT, kernel, atol=1e-7, rtol=0)
    assert float((new @ new.mT).diagonal().min()) > 0.5


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([[-9, 1.5], [9, -2.25]], "input 1 .*from 1.5 to -2.25: the first row holds the lower bounds"),
        ([[-9, np.nan], [9, 1.0]], "input 1 .*from nan to 1: the first row holds the lower bounds"),
        *[(np.zeros(shape), rf"has shape {re.escape(str(shape))}: it must be \(2, 2\)") for shape in [(3, 2), (2,)]],
    ],
)
def test_bounds_that_are_no_box_are_told(bounds, words, as_a_user):
    X = points(6)
    refused(words, Surrogate(8).fit, X.numpy(), X[:, 0].numpy(), bounds=np.array(bounds))
    refused(words, fit_model, X, X[:, :1], bounds=torch.tensor(np.array(bounds)))


@pytest.mark.parametrize("noise", ["diagonal", "full", "input"])
def test_a_calibrated_mixture_answers_in_float32_too(noise):
    model, X = BLLModel(fitted("calibrated", noise=noise)), points(5)
    before = model.posterior(X, observation_noise=True)
    mean, variance = before.mean, before.variance
    single = model.to(torch.float32)
    assert {value.dtype for value in single.state_dict().values() if value.is_floating_point()} == {torch.float32}
    after = single.posterior(X.float(), observation_noise=True)
    assert after.mean.dtype == after.variance.dtype == torch.float32
    close(after.mean, mean)
    close(after.variance, variance, loose=JOINT)
    drawn = single.draw(seed=0)(X.float())
    assert drawn.dtype == torch.float32


def test_errors_say_what_to_do(as_a_user):
    model, X = BLLModel(fitted()), points(3)
    refused(r"Y must be \(..., 3, 2\)", model.condition_on_observations, X, X[:, :1])
    refused("outputs 0 to 1", model.posterior, X, output_indices=[2])
    refused(r"Y\[:, None\]", fit_model, X, X[:, 0])
    refused("use SingleTaskBLL", Surrogate(8).fit, X.numpy(), X.numpy())
    refused(r"lastlayer\[botorch\]", need, "no_such_botorch", extra="botorch", error=MissingPackageError)
    for name in ("fit_source", "save"):  # a surrogate is neither streamed nor saved
        assert not hasattr(Surrogate, name)
    assert "sample_weight" not in inspect.signature(Surrogate.fit).parameters
