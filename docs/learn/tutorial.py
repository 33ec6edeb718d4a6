# ---
# jupytext:
#   text_representation:
#     extension: .py
#     format_name: percent
# kernelspec:
#   display_name: Python 3
#   language: python
#   name: python3
# ---

# %% [markdown]
# # The theory, from one sample to several outputs
#
# lastlayer rests on Bayesian linear regression. This page develops the theory from one sample to several outputs,
# with pictures. It is a notebook that runs when the documentation is built; you can also run `docs/learn/tutorial.py`
# as a script, or open it with jupytext.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
import torch

from lastlayer import BLLRegressor, plots
from lastlayer.bayes.evidence import nlml, optimal_alpha, profiled_nlml
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.estimators.extrapolation import affine_cost, affine_cost_program, tune_alpha
from lastlayer.networks.mlp import MLP, InputSkip
from lastlayer.plots.drawing import BLUE, GREY, ORANGE
from lastlayer.studies.data import paper_data, truth

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
plt.rcParams.update({"figure.constrained_layout.use": True, "axes.spines.top": False, "axes.spines.right": False})


def column(x) -> torch.Tensor:
    return torch.as_tensor(x).reshape(-1, 1)


def show(ax, x, marginals, color=BLUE, label="mean and 95% of the function") -> None:
    """Mean and band of the first output."""
    mean = marginals.mean[:, 0]
    reach = 1.96 * marginals.function_cov()[:, 0, 0].sqrt()
    ax.fill_between(x, mean - reach, mean + reach, color=color, alpha=0.2, lw=0)
    ax.plot(x, mean, color=color, label=label)


def legend(ax, **options) -> None:
    ax.legend(frameon=False, **options)


# %% [markdown]
# ## One sample
#
# Assume a line, $y = w x + b$, and measurements $t = y + \text{noise}$ with noise variance $\sigma_e^2$. The prior on
# the slope is $w \sim N(0, \sigma_w^2)$. The offset $b$ has a *flat* prior: the data alone determine it. Of the two
# variances only the ratio matters, the signal-to-noise ratio $\alpha = \sigma_w^2 / \sigma_e^2$.
#
# Now observe one sample, at $x_1$. It determines the offset up to noise and gives no information about the slope, so
# the variance of the line is
#
# $$\mathrm{var}[y(x)] = \sigma_e^2 \, v(x), \qquad v(x) = 1 + \alpha (x - x_1)^2 .$$
#
# $v$ is called the *variance ratio*: the variance of the line divided by that of a single measurement.

# %%
x = torch.linspace(-3, 3, 121)
one = Statistics.from_linear_features(column([0.5]), column([1.0]))  # sufficient statistics of the data
posterior = Posterior(one, math.log(0.5), noise_cov=torch.eye(1) * 0.1)

Phi = affine_features(column(x))  # rows [x, 1]
marginals = posterior.predict(Phi)
assert torch.allclose(marginals.variance_ratio, 1 + 0.5 * (x - 0.5) ** 2)

figure, ax = plt.subplots(figsize=(7, 3))
show(ax, x, marginals)
draws = posterior.sample_weights(12, generator=torch.Generator().manual_seed(0))
ax.plot(x, (Phi @ draws)[:, :, 0].T, color=GREY, lw=0.6)
ax.plot([0.5], [1.0], "ko", label="the sample")
ax.set(title="One sample: the offset is known, the slope is not (grey: posterior samples)", xlabel="x")
legend(ax)
# %% [markdown]
# A `Statistics` object holds the count, the means and the centred second moments, and nothing else. Statistics are
# additive, so adding samples means adding statistics, and the posterior is a function of their sum. With two more
# samples the slope is known too. The band is narrowest at the mean of the samples, where $v = 1/m$, and widens with
# the distance from it.

# %%
more = Statistics.from_linear_features(column([-1.0, 1.5]), column([0.1, 1.4]))
both = posterior.update(more)  # the same as Posterior(one + more, ...)

figure, ax = plt.subplots(figsize=(7, 3))
show(ax, x, both.predict(Phi))
ax.plot([0.5, -1.0, 1.5], [1.0, 0.1, 1.4], "ko", label="samples")
ax.set(title="Three samples", xlabel="x")
legend(ax)
# %% [markdown]
# ## Features
#
# Few functions are lines, but many are linear in suitable features. Replace $x$ by features $\tilde\phi(x)$, and
# everything above still holds: with $\phi = [\tilde\phi, 1]$, the matrix $\Phi$ of all samples, and
#
# $$\bar\Lambda = \Phi^\top \Phi + \alpha^{-1} \tilde I, \qquad W = \bar\Lambda^{-1} \Phi^\top T, \qquad
# v(x) = \phi(x)^\top \bar\Lambda^{-1} \phi(x),$$
#
# where $\tilde I$ is the identity with a zero in the position of the bias. The mean is $\phi^\top W$ and the variance
# $\sigma_e^2 v$. The question is which features to use. As an example, take powers of $x$: $1, x, \ldots, x^d$.

# %%
rng = np.random.default_rng(1)
X = torch.as_tensor(np.sort(rng.uniform(-2, 2, 25)))
T = column(torch.sin(2 * X) + 0.15 * torch.as_tensor(rng.standard_normal(25)))


def powers(x, degree: int) -> torch.Tensor:
    return torch.stack([(x / 2) ** d for d in range(1, degree + 1)], 1)


# %% [markdown]
# ## The evidence
#
# The probability of the targets with the weights integrated out, $p(T \mid \Phi, \alpha, \sigma_e)$, is the
# *evidence* or marginal likelihood. It rewards a good fit and penalises every direction in which the features could
# have fitted other targets. The library works with its negative logarithm per sample, `nlml`; `optimal_alpha` finds
# the $\alpha$ and the noise that minimise it.

# %%
degrees = list(range(1, 13))
best = [optimal_alpha(Statistics.from_linear_features(powers(X, d), T)) for d in degrees]
chosen = degrees[int(np.argmin([b.nlml for b in best]))]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), width_ratios=[1, 1.6])
left.plot(degrees, [b.nlml for b in best], "o-", color=BLUE)
left.set(xlabel="degree", ylabel="nlml per sample", title=f"The evidence prefers degree {chosen}")
for d, color in ((1, ORANGE), (chosen, BLUE)):
    fitted = Posterior(Statistics.from_linear_features(powers(X, d), T), best[d - 1].log_alpha)
    show(right, x, fitted.predict(affine_features(powers(x, d))), color, f"degree {d}")
right.plot(X, T, "k.", label="samples")
right.set(xlabel="x", ylim=(-3, 3), title="Bands of the function")
legend(right)
# %% [markdown]
# No sample was held out for this choice.
#
# ## Learned features
#
# A neural network without its output layer is a feature map, and the evidence is differentiable in the features, so
# the network can be trained by maximising it. For given hidden weights, the output weights $W$ and the noise have a
# closed form, and `profiled_nlml` is the negative log evidence with both at their optimum. The training loop is
# ordinary PyTorch.

# %%
network = MLP(1, (12, 12), generator=torch.Generator().manual_seed(0))
log_alpha = torch.zeros((), requires_grad=True)
optimiser = torch.optim.Adam([*network.parameters(), log_alpha], lr=2e-2)
curve = []
for _ in range(200):
    optimiser.zero_grad()
    loss = profiled_nlml(affine_features(network(column(X))), T, log_alpha)
    loss.backward()
    optimiser.step()
    curve.append(float(loss.detach()))


def features(x) -> torch.Tensor:
    with torch.no_grad():
        return affine_features(network(column(x)))


statistics = Statistics.from_features(features(X), T)
top = optimal_alpha(statistics)
learned = Posterior(statistics, top.log_alpha)

wide = torch.linspace(-4, 4, 161)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), width_ratios=[1, 1.6])
left.plot(curve, color=BLUE)
left.set(xlabel="step", ylabel="nlml per sample", title="Training by the evidence")
show(right, wide, learned.predict(features(wide)), label="learned features")
right.plot(wide, torch.sin(2 * wide), "--", color=ORANGE, lw=1, label="truth")
right.plot(X, T, "k.", label="samples")
right.set(xlabel="x", ylim=(-3, 3), title=f"estimated noise {float(top.noise_cov.sqrt()):.2f}, true 0.15")
legend(right, fontsize=8)
# %% [markdown]
# Inside the range of the samples, this works well. Outside, the network is overconfident and wrong. The rest of this
# page is about how to fix that.
#
# ## Theorem 1: the weights may be free
#
# The paper trains the output weights by gradient steps together with the hidden ones. Theorem 1 shows that this is
# sound: the negative log evidence with $W$ as a free variable has its minimum at the exact $W$, and there both forms
# have the same value and the same gradient with respect to everything else. The figure shows this along a line
# through the optimum.

# %%
log_sigma = 0.5 * top.noise_cov.diagonal().log()
at = torch.tensor(top.log_alpha)
steps = torch.linspace(-1, 1, 41)
direction = torch.randn(learned.weights.shape, generator=torch.Generator().manual_seed(1)) * 0.05
augmented = [float(nlml(features(X), T, at, log_sigma, W=learned.weights + s * direction)) for s in steps]
exact = float(nlml(features(X), T, at, log_sigma))

figure, ax = plt.subplots(figsize=(6, 2.8))
ax.plot(steps, augmented, color=BLUE, label="W free, along a line")
ax.axhline(exact, color=ORANGE, ls="--", label="W integrated out")
ax.set(xlabel="distance from the exact W", ylabel="nlml per sample", title="They touch at the exact W")
legend(ax)
assert abs(min(augmented) - exact) < 1e-9

# %% [markdown]
# ([The statement, its proof and its test.](../theory/theorem1.md))
#
# ## Theorem 2: the variance is a degree of extrapolation
#
# What does $v(x) = \phi^\top \bar\Lambda^{-1} \phi$ measure? Write the features of a new point as a combination of
# the samples' features, $\tilde\phi = \sum_i \nu_i \tilde\phi_i + e$ with $\sum_i \nu_i = 1$. Small coefficients
# spread over many samples mean interpolation; large coefficients of opposite signs, or a remainder $e$ that no
# combination reaches, mean extrapolation. The *affine cost* is
#
# $$\min_{\nu, e} \; |\nu|^2 + \alpha |e|^2 .$$
#
# Theorem 2 states that this minimum *is* the variance ratio. The next cells compute it in three ways, and plot it for
# three samples in the plane that lie nearly on a line.

# %%
samples = torch.tensor([[-1.0, -0.4], [0.0, 0.1], [1.0, 0.4]])
point = torch.tensor([[0.5, 1.0]])
by_programme = affine_cost_program(point, samples, gamma=5.0).cost
by_formula = affine_cost(point, samples, gamma=5.0)
by_posterior = Posterior(
    Statistics.from_linear_features(samples, torch.zeros(3, 1)), math.log(5.0), noise_cov=torch.eye(1)
).variance_ratio(affine_features(point))
print(float(by_programme), float(by_formula), float(by_posterior))

# %%
a, b = torch.meshgrid(torch.linspace(-2.5, 2.5, 61), torch.linspace(-1.5, 1.5, 41), indexing="xy")
grid = torch.stack([a.flatten(), b.flatten()], 1)
figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.7), sharey=True)
axes[0].set_ylabel("feature 2")
for ax, gamma in zip(axes, (0.3, 3.0, 100.0), strict=True):
    cost = affine_cost(grid, samples, gamma).reshape(a.shape)
    lines = ax.contour(a, b, cost, levels=[0.4, 0.6, 1, 2, 5, 20, 100], colors=BLUE, linewidths=1)
    ax.clabel(lines, fontsize=7)
    ax.plot(*samples.T, "ko", ms=4)
    ax.set(title=f"affine cost, alpha = {gamma:g}", xlabel="feature 1", aspect="equal")
# %% [markdown]
# A larger $\alpha$ puts a higher price on leaving the affine hull of the samples, here nearly a line. Near the
# samples the cost changes little: $\alpha$ controls the variance where there are no samples. ([The statement, its
# proof and its test.](../theory/theorem2.md))
#
# ## Algorithm 1: which alpha outside?
#
# The evidence chose $\alpha^*$ from the samples, which contain no information about the outside. Algorithm 1 keeps
# the mean and chooses the $\alpha$ of the variance by the log predictive density (LPD) of validation points, some of
# which should lie outside. One eigendecomposition serves every $\alpha$ up to infinity, so the whole curve costs next
# to nothing ([the spectral form](../theory/spectral.md)).

# %%
X_val = torch.cat([torch.linspace(-3, -2, 8), torch.linspace(2, 3, 8)])
T_val = column(torch.sin(2 * X_val) + 0.15 * torch.as_tensor(rng.standard_normal(16)))
tuned = tune_alpha(learned, features(X_val), T_val)
print(tuned)
plots.alpha_curve(tuned, alpha_star=math.exp(top.log_alpha))

# %%
figure, ax = plt.subplots(figsize=(7, 3))
for log_a, color, label in ((None, ORANGE, "at alpha*"), (tuned.log_alpha, BLUE, "at alpha^max")):
    v = learned.variance_ratio(features(wide), log_a)
    mean, reach = learned.mean(features(wide))[:, 0], 1.96 * (top.noise_cov[0, 0] * (1 + v)).sqrt()
    ax.fill_between(wide, mean - reach, mean + reach, color=color, alpha=0.2, lw=0, label=f"95% of targets, {label}")
ax.plot(wide, torch.sin(2 * wide), "--", color="black", lw=1, label="truth")
ax.plot(X, T, "k.")
ax.plot(X_val, T_val, "x", color=GREY, label="validation points")
ax.set(xlabel="x", ylim=(-4, 4), title="The same mean, a tuned band")
legend(ax, fontsize=8, ncols=2)
# %% [markdown]
# The band also widens in the gap between samples near $x = 0.5$, where there are no validation points. But a
# saturated network maps all distant points to the same features, and then no $\alpha$ can tell them apart. The
# library's own networks therefore pass the inputs on to the last layer as well, $[\tilde\phi(x), x, 1]$. The variance
# ratio is then never below that of linear regression on the inputs, and grows with the square of the distance ([the
# guarantee](../theory/input_skip.md)).

# %%
with_inputs = InputSkip(network)
with torch.no_grad():
    skipping = Posterior(Statistics.from_features(affine_features(with_inputs(column(X))), T), top.log_alpha)

far = torch.linspace(-8, 8, 161)
with torch.no_grad():
    v_skip = skipping.variance_ratio(affine_features(with_inputs(column(far))))
v_linear = affine_cost(column(far), column(X), math.exp(top.log_alpha))
figure, ax = plt.subplots(figsize=(7, 2.8))
ax.semilogy(far, learned.variance_ratio(features(far)), color=ORANGE, label="features alone: they saturate")
ax.semilogy(far, v_skip, color=BLUE, label="features and inputs")
ax.semilogy(far, v_linear, "--", color=GREY, label="inputs alone: the lower bound")
ax.set(xlabel="x", ylabel="variance ratio")
legend(ax, fontsize=8)
assert bool((v_skip >= v_linear * (1 - 1e-9)).all())

# %% [markdown]
# ## Several outputs
#
# Outputs share the features and therefore the matrix $\bar\Lambda$. The precision of all weights is $\Sigma_E^{-1}
# \otimes \bar\Lambda$: each point has *one* variance ratio, or affine cost, and each output scales it by its own
# noise. `BLLRegressor` puts all of this together. The data are those of the paper's study: two outputs on $[0, 1]$
# with noise standard deviations 0.05 and 0.2.

# %%
data = paper_data()
model = BLLRegressor(hidden=(20, 20), preset="evidence", max_epochs=200, random_state=0)
model.fit(data.train.X, data.train.y, validation_data=(data.validation.X, data.validation.y))
print("estimated noise", model.noise_std_.round(3), "true [0.05, 0.2]")
plots.one_input(model, data.train.X, data.train.y, span=(-0.4, 1.4), truth=truth)

# %% [markdown]
# This is a single network whose $\alpha$ was tuned on validation points inside the data. They carry little
# information about the outside, where the truth leaves the band. By default, and without any further data, the
# library does more: it trains networks that each leave out some rows, under priors of several strengths, and
# calibrates a curve from affine cost to variance. [What makes the uncertainty honest](../honesty.md) describes this.
