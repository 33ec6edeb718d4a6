"""A prediction is a Gaussian or a mixture of them at each point: every question has a slow, obvious answer."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from helpers import close, refused
from hypothesis import given
from hypothesis import strategies as st
from numpy import ndarray
from scipy import stats
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal

from lastlayer.formula import Components, Functions
from lastlayer.formula.ops import NumPyOps
from lastlayer.predictions.joint import JointPrediction
from lastlayer.predictions.mixture import MixturePrediction

LEVELS = [1e-4, 0.025, 0.5, 0.9]
QUESTIONS = ("mean", "epistemic_var", "noise_var", "var", "std", "affine_cost")


def gaussian(m: int = 4, q: int = 2, seed: int = 0, *, correlated: bool = True) -> MixturePrediction:
    rng = np.random.default_rng(seed)
    return MixturePrediction.gaussian(
        rng.normal(0, 2, (m, q)),
        epistemic_var=rng.uniform(0.2, 2, (m, q)),
        noise_var=rng.uniform(0.2, 2, (m, q)),
        affine_cost=rng.uniform(0, 3, m),
        correlation=np.corrcoef(rng.normal(size=(q, 4 * q))).reshape(q, q) if correlated else None,
    )


def mixture(c: int = 3, m: int = 4, q: int = 2, seed: int = 0) -> MixturePrediction:
    """Unequal weights, other ones at every point, and one member without correlation among others with it."""
    members = [gaussian(m, q, 100 * seed + i, correlated=i != 1) for i in range(c)]
    return MixturePrediction.mixture(members, np.random.default_rng(seed).dirichlet(np.ones(c), m).T)


def component_covs(p: MixturePrediction) -> ndarray:
    """Function plus noise, independent of each other, each with covariance D C D."""
    c, _, q = p.component_mean.shape
    C = np.stack([np.eye(q)] * c) if p.correlation is None else p.correlation
    parts = [np.sqrt(var) for var in (p.component_epistemic_var, p.component_noise_var)]
    return sum(std[..., :, None] * C[:, None] * std[..., None, :] for std in parts)


def targets(p: MixturePrediction, seed: int = 1) -> ndarray:
    return p.mean + p.std * np.random.default_rng(seed).normal(size=p.mean.shape)


def same(a: MixturePrediction, b: MixturePrediction) -> None:
    """Whatever is asked, the answers are equal."""
    y = targets(a)
    for name in QUESTIONS:
        close(*(np.array(getattr(p, name)) for p in (a, b)))  # copies: torch warns of read-only views
    close(a.cov(), b.cov())
    close(a.cdf(y), b.cdf(y))
    for per_output in (False, True):
        close(a.log_prob(y, per_output=per_output), b.log_prob(y, per_output=per_output))
    for level in LEVELS:
        close(a.quantile(level), b.quantile(level))


@pytest.mark.parametrize("parts", [gaussian, mixture])
def test_the_joint_density_of_known_targets_is_their_marginal(parts: Callable[..., MixturePrediction]) -> None:
    p = parts(m=4, q=3)
    y, known = targets(p), [[0, 2], [1], [0, 1, 2], [1, 2]]
    holes, covs = np.full_like(y, np.nan), component_covs(p)
    for i, shown in enumerate(known):
        holes[i, shown] = y[i, shown]
    part = lambda c, i, o: stats.multivariate_normal(p.component_mean[c, i, o], covs[c, i][np.ix_(o, o)]).pdf(y[i, o])
    density = [sum(w * part(c, i, o) for c, w in enumerate(p.weights[:, i])) for i, o in enumerate(known)]
    close(p.log_prob(holes), np.log(density))


def test_noise_of_every_point_may_be_given_once() -> None:
    p, noise = gaussian(), np.array([0.3, 0.7])
    parts = {"epistemic_var": p.epistemic_var, "affine_cost": p.affine_cost}
    once = MixturePrediction.gaussian(p.mean, noise_var=noise, **parts)
    np.testing.assert_array_equal(once.noise_var, np.tile(noise, (4, 1)))
    close(once.var, p.epistemic_var + noise)
    function = MixturePrediction.gaussian(p.mean, noise_var=0 * noise, **parts)
    close(function.quantile(0.9), stats.norm(p.mean, np.sqrt(p.epistemic_var)).ppf(0.9))


def test_the_covariance_of_the_targets_is_that_of_the_function_plus_that_of_the_noise() -> None:
    p = mixture()
    function = replace(p, component_noise_var=0 * p.component_noise_var)
    noise = replace(p, component_epistemic_var=0 * p.component_epistemic_var, component_mean=0 * p.component_mean)
    close(p.cov(), function.cov() + noise.cov())
    close(p.component_cov(), component_covs(p))


@given(c=st.integers(1, 5), m=st.integers(1, 4), q=st.integers(1, 3), seed=st.integers(0, 99))
def test_mixtures_agree_with_torch(c: int, m: int, q: int, seed: int) -> None:
    p = mixture(c, m, q, seed)
    y = torch.as_tensor(targets(p))
    close(p.component_cov(), component_covs(p))
    w, mean = torch.as_tensor(p.weights).T, torch.as_tensor(p.component_mean)
    covs = torch.as_tensor(component_covs(p))
    joint = MixtureSameFamily(Categorical(w), MultivariateNormal(mean.movedim(0, -2), covs.movedim(0, -3)))
    std = covs.diagonal(dim1=-2, dim2=-1).sqrt()
    alone = MixtureSameFamily(Categorical(w[:, None].expand(m, q, c)), Normal(mean.movedim(0, -1), std.movedim(0, -1)))
    close(p.log_prob(y.numpy()), joint.log_prob(y))
    close(p.log_prob(y.numpy(), per_output=True), alone.log_prob(y))
    close(p.cdf(y.numpy()), alone.cdf(y))
    close(p.mean, joint.mean)
    close(p.var, joint.variance)
    close(p.standardized_residual(p.mean + 1.7 * p.std), np.full((m, q), 1.7))


@given(
    c=st.integers(1, 4),
    seed=st.integers(0, 99),
    level=st.floats(1e-6, 1 - 1e-6),
    shrink=st.sampled_from([1.0, 1e-2, 1e-6]),
)
def test_quantile_inverts_the_distribution_function(c: int, seed: int, level: float, shrink: float) -> None:
    """Also where components are far apart for their width and the distribution function is nearly flat."""
    wide = mixture(c, seed=seed)
    parts = ("component_epistemic_var", "component_noise_var")
    p = replace(wide, **{part: shrink * getattr(wide, part) for part in parts})
    np.testing.assert_allclose(p.cdf(p.quantile(level)), level, atol=1e-9, rtol=0)
    lower, upper = p.interval(level)
    np.testing.assert_allclose(p.cdf(upper) - p.cdf(lower), level, atol=1e-9, rtol=0)
    np.testing.assert_allclose(p.cdf(lower), 1 - p.cdf(upper), atol=1e-9, rtol=0)


def same_mixtures() -> dict[str, tuple[MixturePrediction, MixturePrediction]]:
    p, apart, of = gaussian(), gaussian(correlated=False), MixturePrediction.mixture
    a, b, c = (gaussian(seed=i, correlated=i > 0) for i in range(3))
    far = replace(c, component_mean=1e3 + c.component_mean, component_noise_var=1e4 * c.component_noise_var)
    wider = lambda p, e, n: replace(
        p, component_epistemic_var=e * p.epistemic_var[None], component_noise_var=n * p.noise_var[None]
    )
    split = lambda p: (
        p.split([0.8, 0.2], [1.0, 2.0], [0.5, 3.0]),
        of([wider(p, 1.0, 0.5), wider(p, 2.0, 3.0)], np.array([0.8, 0.2])),
    )
    merged = mixture().merged(np.full(4, 0.5))
    inner = of([b, c], np.array([0.25, 0.75]))
    return {
        **{f"of one: {i}": (of([each]), each) for i, each in enumerate((p, apart, merged))},
        **{f"equal: {i}": (of([x] * 3, np.array([0.2, 0.5, 0.3])), x) for i, x in enumerate((p, apart, mixture()))},
        "a member of weight zero": (of([p, far], np.array([1.0, 0.0])), p),
        "weights of nested mixtures multiply": (
            of([a, inner], np.array([0.4, 0.6])),
            of([a, b, c], np.array([0.4, 0.15, 0.45])),
        ),
        "members count equally unless weights are given": (of([a, b, c]), of([a, b, c], np.full(3, 1 / 3))),
        "split": split(p),
        "split, uncorrelated": split(apart),
    }


@pytest.mark.parametrize("name", same_mixtures())
def test_mixtures_that_are_the_same_say_the_same(name: str) -> None:
    same(*same_mixtures()[name])


def test_weights_of_each_point_are_those_of_a_mixture_at_that_point_alone() -> None:
    members, weights = [gaussian(seed=i) for i in range(3)], np.random.default_rng(0).dirichlet(np.ones(3), 4).T
    p = MixturePrediction.mixture(members, weights)
    y = targets(p)
    for j in range(4):
        alone = MixturePrediction.mixture(members, weights[:, j])
        for ask in (lambda x: x.mean, lambda x: x.var, lambda x: x.log_prob(y), lambda x: x.quantile(0.9)):
            close(ask(p)[j], ask(alone)[j])
    rounded = MixturePrediction.mixture(members, np.full(3, 0.333333))  # brought back to one
    close(rounded.weights, np.full((3, 4), 1 / 3))
    assert rounded.sample(2, random_state=0).shape == (2, 4, 2)


def test_law_of_total_variance() -> None:
    p = mixture()
    w = p.weights[..., None]
    within = (w * (p.component_epistemic_var + p.component_noise_var)).sum(0)
    between = (w * p.component_mean**2).sum(0) - (w * p.component_mean).sum(0) ** 2
    close(p.var, within + between)
    close(p.epistemic_var + p.noise_var, p.var)
    close(p.noise_var, (w * p.component_noise_var).sum(0))
    close(np.einsum("mii->mi", p.cov()), p.var)
    close(p.std**2, p.var)


@given(seed=st.integers(0, 100), c=st.integers(2, 4), q=st.integers(1, 3), correlated=st.booleans())
def test_merging_leaves_the_moments_as_they_are(seed: int, c: int, q: int, correlated: bool) -> None:
    members = [gaussian(4, q, 100 * seed + i, correlated=correlated) for i in range(c)]
    p = MixturePrediction.mixture(members, np.random.default_rng(seed).dirichlet(np.ones(c), 4).T)
    fraction = np.array([0.0, 0.3, 0.9, 1.0])
    merged = p.merged(fraction)
    for name in QUESTIONS:
        close(*(np.array(getattr(each, name)) for each in (p, merged)))
    close(p.cov(), merged.cov())
    apart = [each.component_mean - each.mean for each in (p, merged)]
    np.testing.assert_allclose(apart[1], np.sqrt(1 - fraction)[:, None] * apart[0], atol=1e-12)


@pytest.mark.parametrize("correlated", [True, False])
def test_a_merged_density_is_that_of_the_mixture_written_down(correlated: bool) -> None:
    """Component i has mean m + sqrt(1 - g) (m_i - m) and covariance S_i + g D, D the covariance between the means."""
    p, fraction = mixture(), np.array([0.0, 0.3, 0.9, 1.0])
    if not correlated:
        p = replace(p, correlation=None)
    y, within = targets(p), component_covs(p)
    density = []
    for j, g in enumerate(fraction):
        w, means = p.weights[:, j], p.component_mean[:, j]
        middle = w @ means
        between = sum(w[i] * np.outer(means[i] - middle, means[i] - middle) for i in range(3))
        moved = middle + np.sqrt(1 - g) * (means - middle)
        each = [
            stats.multivariate_normal(*parts).pdf(y[j]) for parts in zip(moved, within[:, j] + g * between, strict=True)
        ]
        density.append(np.log(w @ each))
    close(p.merged(fraction).log_prob(y), np.array(density))


def test_members_that_contradict_the_others_widen_a_merged_interval() -> None:
    """A tenth of the weight far off: nothing in a 90% interval of the mixture, everything in its variance."""
    parts = {"epistemic_var": np.full(1, 0.01), "noise_var": np.full(1, 0.01), "affine_cost": np.ones(1)}
    near, far = (MixturePrediction.gaussian(np.full(1, mean), **parts) for mean in (0.0, 10.0))
    p = MixturePrediction.mixture([near, far], np.array([0.96, 0.04]))
    widths = [np.ptp(each.interval(0.9), axis=0)[0] for each in (p, p.merged(np.full(1, 0.5)), p.merged(np.ones(1)))]
    assert widths[0] < 1 < 3 < widths[1] < widths[2]
    assert widths[2] == pytest.approx(2 * 1.645 * p.std[0], rel=1e-3)


def test_inside_the_data_nothing_is_merged_and_correlations_of_functions_survive_a_mixture() -> None:
    p = mixture()
    assert p.merged(np.zeros(4)) is p
    assert gaussian().merged(np.ones(4)).component_mean.shape == (1, 4, 2)
    merged = p.merged(np.full(4, 0.5))
    close(MixturePrediction.mixture([merged, merged]).cov(), merged.cov())


@pytest.mark.parametrize("p", [gaussian(m=2), gaussian(m=2, correlated=False), mixture(m=2)])
def test_draws_have_the_moments_and_quantiles_of_the_prediction(p: MixturePrediction) -> None:
    n = 100_000
    draws = p.sample(n, random_state=0)
    assert draws.shape == (n, 2, 2)
    assert (np.abs(draws.mean(0) - p.mean) < 5 * p.std / np.sqrt(n)).all()
    cov = np.cov(draws.reshape(n, 4), rowvar=False).reshape(2, 2, 2, 2)
    error = 10 * p.std[:, :, None] * p.std[:, None, :] / np.sqrt(n)  # twice as wide: mixtures have heavier tails
    for i in range(2):
        assert (np.abs(cov[i, :, i] - p.cov()[i]) < error[i]).all()
        assert (np.abs(cov[i, :, 1 - i]) < 10 * p.std.max() ** 2 / np.sqrt(n)).all(), "points are independent"
    for level in (0.1, 0.5, 0.8):
        share = (draws < p.quantile(level)).mean(0)
        assert (np.abs(share - level) < 5 * np.sqrt(level * (1 - level) / n)).all()


def test_the_same_seed_gives_the_same_draws() -> None:
    p = mixture()
    first = p.sample(5, random_state=3)
    assert (p.sample(5, random_state=3) == first).all()
    assert (p.sample(5, random_state=np.random.default_rng(3)) == first).all()
    assert (p.sample(5, random_state=4) != first).all()


@pytest.mark.parametrize("rank", [3, 1])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("spread", [0, 2])
def test_joint_draws_vary_together_over_points_and_outputs(rank: int, parts: int, spread: int) -> None:
    """Also where one point follows from another and the covariance is singular."""
    rng, n = np.random.default_rng(0), 100_000
    A, B, C = rng.normal(size=(parts, 3, rank)), rng.normal(size=(parts, 2, 2)), rng.normal(size=(3, 2, 1))
    points, outputs, noise = A @ A.swapaxes(1, 2), B @ B.swapaxes(1, 2), float(spread > 0) * C @ C.swapaxes(1, 2)
    mean, dense = rng.normal(size=(3, 2)), rng.normal(size=(2, 3, spread))
    none = Components(*[np.zeros((1, 3, 2))] * 6)
    function = Functions(NumPyOps, none, mean, list(zip(A, B, strict=True)), list(dense) if spread else [])
    p = JointPrediction(function, noise)
    entry_by_entry = np.zeros((2, 3, 2, 3))
    for a, i, b, j in np.ndindex(2, 3, 2, 3):
        entry_by_entry[a, i, b, j] = sum(outputs[t, a, b] * points[t, i, j] for t in range(parts))
        entry_by_entry[a, i, b, j] += dense[a, i] @ dense[b, j]
        entry_by_entry[a, i, b, j] += noise[i, a, b] if i == j else 0.0
    close(p.cov(), entry_by_entry.reshape(6, 6))
    close(p.cov_of_outputs(), np.einsum("aiaj->ija", entry_by_entry))
    draws = p.sample(n, random_state=0).transpose(0, 2, 1).reshape(n, 6)
    std = np.sqrt(np.diag(p.cov()))
    assert (np.abs(draws.mean(0) - p.mean.T.ravel()) < 5 * std / np.sqrt(n)).all()
    error = 5 * np.sqrt(2 / n) * std[:, None] * std  # of a covariance of Gaussians, at most
    assert (np.abs(np.cov(draws, rowvar=False) - p.cov()) < error).all()
    assert (p.sample(4, random_state=1) == p.sample(4, random_state=1)).all()


@given(n=st.integers(1, 60), level=st.floats(0.01, 0.99))
def test_a_conformal_interval_reaches_as_far_as_its_rank_among_the_scores(n: int, level: float) -> None:
    """Of n + 1 exchangeable scores the new one is equally likely to have any rank: P(rank <= r) = r / (n + 1)."""
    p, scores = gaussian(m=3), np.random.default_rng(n).exponential(size=(n, 2))
    lower, upper = replace(p, conformal_scores=scores).interval(level, method="conformal")
    np.testing.assert_allclose(upper - p.mean, p.mean - lower, rtol=1e-9)
    reach = (upper - p.mean) / p.std
    for j in range(2):
        covered = np.array([(scores[:, j] < s).sum() + 1 for s in scores[:, j]]) / (n + 1)  # P(new score <= s)
        enough = scores[covered >= level - 1e-9, j]
        np.testing.assert_allclose(reach[:, j], enough.min() if len(enough) else np.inf, rtol=1e-9)


def test_a_prediction_cannot_be_changed() -> None:
    p = gaussian()
    for name in ("component_mean", "weights", "mean", "std", "new"):
        with pytest.raises(FrozenInstanceError):
            setattr(p, name, p.component_mean)


def of_two(weights: list) -> Callable[[], MixturePrediction]:
    return lambda: MixturePrediction.mixture([gaussian(), gaussian()], np.array(weights))


SHARES = "must be 2 non-negative"
REFUSED = [
    (lambda: gaussian().interval(0.9, method="conformal"), "conformalize"),
    (lambda: gaussian().interval(0.9, method="conformall"), "did you mean 'conformal'"),
    *((of_two(w), rf"weights=.*{SHARES}") for w in ([0.5, 0.6], [1.5, -0.5], [1.0], [0.2, 0.3, 0.5], [0.5, np.nan])),
    (of_two([[0.5] * 4, [0.5, 0.5, 0.6, 0.5]]), "add up to one"),
    (lambda: MixturePrediction.mixture([]), "at least one"),
    *(
        (lambda other=other: MixturePrediction.mixture([gaussian(), other]), rf"(?s)(?=.*{len(other.mean)})(?=.*{q})")
        for other, q in ((gaussian(m=5), 2), (gaussian(q=3), 3), (gaussian(q=3, correlated=False), 3))
    ),
    *(
        (lambda p=p, ask=ask, level=level: getattr(p, ask)(level), f"level={level}")
        for level in (0.0, 1.0, -0.1, 95.0, float("nan"))
        for p, ask in ((gaussian(), "quantile"), (mixture(), "quantile"), (gaussian(), "interval"))
    ),
    *(
        (lambda fraction=fraction: mixture().merged(fraction), "from 0 to 1 for each of 4 points")
        for fraction in (np.zeros(3), np.full(4, 1.1), np.full(4, -0.1), np.full(4, np.nan))
    ),
]


@pytest.mark.parametrize(("ask", "said"), REFUSED)
def test_what_cannot_be_is_refused(ask: Callable, said: str) -> None:
    refused(said, ask)
