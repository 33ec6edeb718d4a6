"""From affine cost to variance: the curve against a slow form and known truths; splits against what they promise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import blocked_splits, close, random_splits, refused, shell_splits
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES
from scipy import stats
from scipy.optimize import approx_fprime, minimize
from sklearn.model_selection import GroupKFold, KFold, RepeatedKFold, TimeSeriesSplit

from lastlayer import calibration, formula
from lastlayer.bayes.statistics import Readings
from lastlayer.calibration.curve import OF_MIXTURE, Calibration, Curve, NoiseHead, Outside, Shrinkage, Tails
from lastlayer.calibration.fit import CurveProblem, fit_curves
from lastlayer.calibration.points import REGION_WEIGHT, HeldOutPoints
from lastlayer.ensemble.splits import given_splits
from lastlayer.formula.ops import NumPyOps, TorchOps
from lastlayer.predictor import revisions
from lastlayer.settings.types import ADDITIVE, FOURIER, LINEAR, NETWORK, Family, Network

TRUTH = Curve(np.array([0.6, 2.0]), np.array([1.5, 0.4]), power=0.7)
TAILS = Tails(0.1, 9.0)
NONE, FREE = Tails(), Shrinkage()
PRIOR = {p.name: p.prior for p in (*Curve.PARAMETERS, *OF_MIXTURE)}
LIMITS = {p.name: p.bounds for p in (*Curve.PARAMETERS, *OF_MIXTURE)}
WEAK, STRONG = Network(1.0), Network(2.0)


def held_out(
    n: int = 200,
    q: int = 1,
    c: int = 1,
    seed: int = 0,
    *,
    curve: Curve = TRUTH,
    tails: Tails = NONE,
    shrinkage: float = 0.0,
    families: tuple[Family, ...] = (),
    trust: tuple[float, ...] = (1.0,),
    outside: float = 0.0,
    correlated: bool = False,
) -> HeldOutPoints:
    """Points drawn from what the curve makes of c networks: costs over four decades, means and noises of their own.

    `families` and `trust` are those of each network. With `outside`, so many times the variance of the process joins
    that of the networks, and half of the points, held out in regions, cost the process a hundred times as much.
    """
    rng = np.random.default_rng(seed)
    curve, families = replace(curve, noise=curve.noise[:q], slope=curve.slope[:q]), families or (NETWORK,) * c
    kind = np.array(["random", "blocked", "random", "shell"])[np.arange(n) % 4]
    cost = 10 ** rng.uniform(-2, 2, (c, n))
    noise_var = np.broadcast_to(rng.uniform(0.5, 2, (c, 1, q)), (c, n, q)).copy()
    mean = rng.normal(size=(c, n, q))
    if outside:
        cost[[family == FOURIER for family in families]] *= np.where(kind == "random", 1.0, 100.0)
    epistemic = noise_var * curve.epistemic(cost)
    if outside:
        far, _ = slow_far(cost, noise_var, kind, families)
        for i, j in np.ndindex(c, n):
            epistemic[i, j] += slow_added(noise_var[i, j], curve, families[i], outside * far[j])
    var = epistemic + noise_var * curve.noise
    weight = np.array(trust)[:, None] / var.prod(-1) ** (1 / q)
    pick = (rng.random(n) > (weight / weight.sum(0)).cumsum(0)[:-1]).sum(0), np.arange(n)
    wide = np.where(rng.random((n, 1)) < tails.share, tails.factor, 1.0)
    error = np.sqrt(var[pick]) * rng.normal(size=(n, q))
    correlation = None
    if correlated:
        B = rng.normal(size=(c, q, q + 2))
        own = B @ B.swapaxes(1, 2)
        std = np.sqrt(np.diagonal(own, axis1=1, axis2=2))
        correlation = np.broadcast_to((own / std[:, :, None] / std[:, None, :])[:, None], (c, n, q, q)).copy()
        cov = slow_cov(correlation, epistemic, noise_var * curve.noise)[pick]
        error = (np.linalg.cholesky(cov) @ rng.normal(size=(n, q, 1)))[..., 0]
    targets = mean[pick] / (1 + shrinkage * var[pick]) + np.sqrt(wide) * error
    points = HeldOutPoints(
        mean=torch.from_numpy(mean),
        cost=torch.from_numpy(cost),
        noise_var=torch.from_numpy(noise_var),
        correlation=None if correlation is None else torch.from_numpy(correlation),
        inputs=torch.from_numpy(rng.normal(size=(n, 2))),
        readings=Readings.of(torch.from_numpy(targets)),
        weight=torch.from_numpy(rng.uniform(0.5, 1.5, n)),
        kind=kind,
        families=families,
    )
    return points.beside_references() if outside else points


def slow_far(
    cost: np.ndarray, noise_var: np.ndarray, kind: np.ndarray, families: tuple[Family, ...]
) -> tuple[np.ndarray, float]:
    """Variance of the process at each point beyond what it has inside, and its cost up to which a point is inside: the
    largest of those that were held out without their neighbours. Several networks of it count by their mean cost, and
    by the geometric mean of their noises."""
    process = [i for i, family in enumerate(families) if family == FOURIER]
    u = [sum(cost[i, j] for i in process) / len(process) for j in range(cost.shape[1])]
    inside = max(u[j] for j, where in enumerate(kind) if where not in ("blocked", "shell"))
    noise = [np.prod(var) ** (1 / var.size) for var in np.moveaxis(noise_var[process], 1, 0)]
    return np.array([noise[j] * max(0.0, u[j] - inside) for j in range(len(u))]), inside


def slow_added(noise_var: np.ndarray, curve: Curve, family: Family, variance: float) -> np.ndarray:
    """That variance of the process as it joins the outputs of a network: in proportion to noise_var b, their geometric
    mean one; of a process itself e^-1.5 of it."""
    each = noise_var * curve.slope
    return each / np.prod(each) ** (1 / len(each)) * variance * (np.exp(-1.5) if family == FOURIER else 1.0)


def slow_cov(correlation: np.ndarray, epistemic: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Function and noise have that correlation each, and are independent of each other."""
    cov = np.zeros(correlation.shape)
    for *at, a, b in np.ndindex(*correlation.shape):
        i, j = (*at, a), (*at, b)
        both = np.sqrt(epistemic[i] * epistemic[j]) + np.sqrt(noise[i] * noise[j])
        cov[(*at, a, b)] = correlation[(*at, a, b)] * both
    return cov


def factor_of(head: NoiseHead, Z: torch.Tensor) -> np.ndarray:
    """What a head multiplies the noise variance by."""
    inside = np.clip(Z.numpy(), head.low.numpy(), head.high.numpy())
    return np.exp(np.tanh(inside @ head.U.numpy() + head.u.numpy()) @ head.V.numpy())


def slow_log_density(
    points: HeldOutPoints,
    curves: dict[Family, Curve],
    tails: Tails = NONE,
    shrinkage: Shrinkage = FREE,
    head: NoiseHead | None = None,
    *,
    outside: float = 0.0,
    alike: bool = False,
) -> np.ndarray:
    """Point by point and network by network: a mixture of normals weighted by trust and precision (or `alike`), each
    with a wider twin; every network by the curve of its family, and with `outside` times the variance of the process.
    Means are those of the product with N(0, 1 / precision)."""
    c, n, q = points.mean.shape
    density, far = np.zeros(n), np.zeros(n)
    if outside:
        far, _ = slow_far(points.cost.numpy(), points.noise_var.numpy(), points.kind, points.families)
    for j in range(n):
        factor = np.ones(q) if head is None else factor_of(head, points.inputs[j : j + 1])[0]
        epistemic, noise, trust, added_by_process = [], [], [], []
        for i in range(c):
            curve, v = curves[points.families[i]], float(points.cost[i, j])  # within reach
            noise_var = points.noise_var[i, j].numpy()
            count = points.families.count(points.families[i])  # the networks of a family share its trust
            trust.append((1.0 if alike else curve.trust) / count)
            noise.append(noise_var * curve.noise * factor)
            added = slow_added(noise_var, curve, points.families[i], outside * far[j])
            epistemic.append(noise_var * curve.slope * v**curve.power + added)
            added_by_process.append(added)
        var = [e + n for e, n in zip(epistemic, noise, strict=True)]
        precision = [1.0 if alike else v.prod() ** (-1 / q) for v in var]
        weight = np.multiply(trust, precision)
        for i in range(c):
            C = np.eye(q) if points.correlation is None else points.correlation[i, j].numpy()
            cov = slow_cov(C, epistemic[i], noise[i])
            alone = var[i] - added_by_process[i]
            mean = points.mean[i, j].numpy() / alone / (1 / alone + shrinkage.precision)
            for share, wide in ((1 - tails.share, 1.0), (tails.share, tails.factor)):
                each = normal_density(points.readings.values[j].numpy() - mean, wide * cov)
                density[j] += weight[i] / weight.sum() * share * each
    return np.log(density)


def normal_density(error: np.ndarray, cov: np.ndarray) -> float:
    """Of a multivariate normal."""
    return float(np.exp(-0.5 * error @ np.linalg.solve(cov, error)) / np.sqrt(np.linalg.det(2 * np.pi * cov)))


def numbers(
    curves: dict[Family, Curve], tails: Tails = NONE, shrinkage: Shrinkage = FREE, outside: Outside | None = None
) -> np.ndarray:
    """What the optimizer moves; without a process, the last number of a mixture stays at its prior mean."""
    more = []
    if tails.share:
        of_process = PRIOR["outside"][0] if outside is None else np.log(outside.factor)
        more = [np.log(tails.share / (1 - tails.share)), *np.log([tails.factor, shrinkage.precision]), of_process]
    each = [np.concatenate([np.log(c.noise), np.log(c.slope), np.log([c.power, c.trust])]) for c in curves.values()]
    return np.concatenate([*each, more])


def widening(points: HeldOutPoints) -> float:
    """What a and b of a fit to these points are multiplied by in the end."""
    in_regions = ("blocked", "shell")
    n = max(8.0, sum(float(w) for w, kind in zip(points.weight, points.kind, strict=True) if kind not in in_regions))
    return (n + 3) / (n - 5)


def narrow(found: Calibration, points: HeldOutPoints) -> dict[Family, Curve]:
    """The curves of the fit before they were widened."""
    w = widening(points)
    return {family: replace(c, noise=c.noise / w, slope=c.slope / w) for family, c in found.curves.items()}


def moved(found: Calibration, points: HeldOutPoints | None = None) -> np.ndarray:
    """Where the optimizer ended: before the curves were widened, if the points are given."""
    curves = found.curves if points is None else narrow(found, points)
    return numbers(curves, found.tails, found.shrinkage, found.outside)


def problem_of(points: HeldOutPoints, mixture: bool, head: NoiseHead | None = None) -> CurveProblem:
    return CurveProblem(points, list(dict.fromkeys(points.families)), mixture, head)


def names_of(problem: CurveProblem) -> list[str]:
    """The parameter of each number."""
    return [parameter.name for parameter in problem.parameters]


def test_the_identity_is_the_posterior_as_it_stands() -> None:
    v = np.array([0.0, 0.1, 5.0])
    curve = Curve.identity(2)
    # powers are taken through logarithms, of costs that are above zero
    np.testing.assert_allclose(curve.factor(v), np.stack([1 + v, 1 + v], 1), rtol=1e-15)
    np.testing.assert_allclose(curve.epistemic(v), np.stack([v, v], 1), rtol=1e-15, atol=1e-150)
    assert (TRUTH.epistemic(np.zeros(1)) < 1e-100).all()
    assert (TRUTH.factor(np.zeros(1)) == TRUTH.noise).all()
    assert NONE.widening == 1


@given(
    a=st.floats(1e-3, 1e3),
    b=st.floats(1e-6, 1e6),
    power=st.floats(0.15, 4),
    v=st.floats(1e-8, 1e8),
    more=st.floats(1, 9),
)
def test_the_variance_never_falls_as_the_cost_grows(a: float, b: float, power: float, v: float, more: float) -> None:
    curve = Curve(np.array([a]), np.array([b]), power)
    less, greater = curve.factor(np.array([v, v * more]))
    assert less <= greater
    assert less >= a


@given(power=st.floats(0.15, 4), reach=st.floats(1e-3, 1e3), v=st.floats(1e-6, 1e6), more=st.floats(1, 100))
def test_beyond_its_reach_the_curve_grows_as_the_posterior_does(power, reach, v, more) -> None:
    curve = Curve(np.ones(1), np.array([2.5]), power, reach=reach)
    endless = replace(curve, reach=np.inf)
    low, high = curve.epistemic(np.array([v, v * more]))[:, 0]
    if v >= reach:
        assert high / low == pytest.approx(more)
    if v * more <= reach:
        np.testing.assert_allclose([low, high], endless.epistemic(np.array([v, v * more]))[:, 0], rtol=1e-12)
    assert low <= high
    below, above = curve.epistemic(reach * np.array([1 - 1e-9, 1 + 1e-9]))
    assert above == pytest.approx(float(below[0]), rel=1e-7)  # no step


def test_a_curve_says_what_it_is() -> None:
    assert "v^0.70" in str(TRUTH)
    assert "10% of it 9.0 times as wide" in str(TAILS)
    assert str(NONE) == ""
    assert "2.5 times the variance of the process" in str(Outside(2.5, 0.3))


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize(
    ("q", "families", "with_head"),
    [
        (1, (NETWORK,), False),
        (2, (NETWORK,), False),
        (2, (WEAK,) * 3, False),
        (2, (WEAK, LINEAR, WEAK), False),
        (1, (STRONG, WEAK), False),
        (1, (FOURIER,), False),
        (1, (WEAK, FOURIER), False),
        (2, (NETWORK, FOURIER, LINEAR), False),
        (2, (FOURIER, ADDITIVE, FOURIER), False),
        (2, (FOURIER, LINEAR), True),  # noise that depends on the input
    ],
)
def test_value_and_gradient_are_those_of_the_slow_form(q, families, with_head, mixture, correlated) -> None:
    """Correlated outputs are judged by their joint density; in a mixture the process has its say outside, and the cost
    of the additive model up to which points are inside is kept."""
    process = FOURIER in families
    points = held_out(12, q, len(families), families=families, outside=3.0 * process, correlated=correlated and q > 1)
    head = NoiseHead.initial(points.inputs, q) if with_head else None
    problem = problem_of(points.usable(), mixture, head)
    assert len(problem.starts[0]) == len(set(families)) * (2 * q + 2) + 4 * mixture
    x = np.concatenate([problem.starts[0], [] if head is None else head.numbers().numpy()])
    x += np.random.default_rng(1).normal(0, 0.3 if with_head else 0.5, len(x))
    found, w = problem.calibration(x, {}, lpd_before=0.0), points.weight.numpy()
    curves, tails, shrinkage, outside = found.curves, found.tails, found.shrinkage, 0.0
    assert (found.outside is not None) == (process and mixture)
    additive = points.inside.get(ADDITIVE) if mixture else None
    assert found.additive_inside == additive
    assert found.inside.get(ADDITIVE) == additive
    assert found.inside.get(FOURIER) == (found.outside.inside if found.outside else None)
    if found.outside is not None:
        far, inside = slow_far(points.cost.numpy(), points.noise_var.numpy(), points.kind, families)
        assert 3 <= (far > 0).sum() <= 9  # some outside, some inside
        assert found.outside.inside == pytest.approx(inside, rel=1e-12)
        outside = found.outside.factor
    own = x[: len(problem.parameters)]
    of_process = found.outside or Outside(np.exp(own[-1]), np.nan)  # without one the last number says nothing
    close(torch.from_numpy(numbers(curves, tails, shrinkage, of_process)), torch.from_numpy(own))
    prior = sum(0.5 * ((v - PRIOR[name][0]) / PRIOR[name][1]) ** 2
                for name, v in zip(names_of(problem), own, strict=True))  # fmt: skip
    if found.head is not None:  # fan_in of U is 2, of V is 10
        prior += 0.5 * float(2 * (found.head.U**2).sum() + (found.head.u**2).sum() + 10 * (found.head.V**2).sum())
    value, gradient = problem.value(x)
    slow = slow_log_density(points, curves, tails, shrinkage, found.head, outside=outside)
    assert value == pytest.approx(prior - (w * slow).sum(), rel=1e-10)
    assert problem.lpd(x) == pytest.approx((w * slow).sum() / w.sum(), rel=1e-10)
    np.testing.assert_allclose(gradient, approx_fprime(x, lambda z: problem.value(z)[0], 1e-6), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [1, 70])
@pytest.mark.parametrize("correlated", [False, True])
def test_the_gradient_is_that_of_differences_and_pieces_add_up(at_once: int, correlated: bool, monkeypatch) -> None:
    points = held_out(40, 2, 3, families=(WEAK, FOURIER, WEAK), outside=3.0, correlated=correlated).usable()
    head = NoiseHead.initial(points.inputs, 2)
    whole = problem_of(points, True, head)
    x = np.concatenate([whole.starts[0], head.numbers().numpy()])
    x += np.random.default_rng(1).normal(0, 0.5, len(x))
    value, gradient = whole.value(x)
    both_ways = [whole.value(x + 1e-5 * e)[0] - whole.value(x - 1e-5 * e)[0] for e in np.eye(len(x))]
    np.testing.assert_allclose(gradient, np.array(both_ways) / 2e-5, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(calibration.fit, "AT_ONCE", at_once)
    in_pieces = problem_of(points, True, head)
    assert len(in_pieces.pieces) > len(whole.pieces) == 1
    assert in_pieces.value(x)[0] == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(in_pieces.value(x)[1], gradient, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(in_pieces.log_density(x), whole.log_density(x), rtol=1e-12)


@pytest.mark.parametrize(("q", "c", "correlated"), [(1, 1, False), (2, 1, False), (2, 3, False), (2, 1, True)])
def test_a_known_curve_is_found_again(q: int, c: int, correlated: bool, monkeypatch) -> None:
    monkeypatch.setattr(calibration.fit, "SOME_POINTS", 12_000)  # all points
    points = held_out(12_000 if correlated else 6000, q, c, correlated=correlated)
    fitted = fit_curves(points, mixture=False)
    found = narrow(fitted, points)[NETWORK]
    np.testing.assert_allclose(found.noise, TRUTH.noise[:q], rtol=0.15)  # a few standard errors of the points
    np.testing.assert_allclose(found.slope, TRUTH.slope[:q], rtol=0.15)
    assert found.power == pytest.approx(TRUTH.power, rel=0.05)
    assert found.reach == float(points.cost.max())
    assert found.trust == pytest.approx(1.0, abs=1e-3)  # of one family it changes nothing, so the prior decides
    assert fitted.tails == NONE


@pytest.mark.parametrize("mixture", [False, True])
def test_a_known_trust_is_found_again(mixture: bool) -> None:
    points = held_out(3000, 1, 3, families=(LINEAR, NETWORK, NETWORK), trust=(8.0, 0.5, 0.5))
    curves = fit_curves(points, mixture=mixture).curves
    assert curves[LINEAR].trust / curves[NETWORK].trust == pytest.approx(8.0, rel=0.25)
    # the density knows the ratio alone: by the prior the logarithms lie on both sides of zero
    assert curves[LINEAR].trust * curves[NETWORK].trust == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("families", "shrinkage", "factor"),
    [
        ((NETWORK,), 0.0, 0.0),
        *(((NETWORK,) * 3, precision, 0.0) for precision in (0.05, 1.0)),
        *(((NETWORK, FOURIER, LINEAR), 0.05, factor) for factor in (0.5, 20.0)),
        *(((FOURIER, FOURIER, NETWORK), 0.05, factor) for factor in (0.5, 20.0)),
    ],
)
def test_known_tails_shrinkage_and_factor_of_the_process_are_found_again(families, shrinkage, factor, monkeypatch):
    """Errors outside the data grow with the variance of the process; inside, they are those of the curve."""
    monkeypatch.setattr(calibration.fit, "SOME_POINTS", 12_000)  # all points
    words = {"families": families, "tails": TAILS, "shrinkage": shrinkage, "outside": factor}
    points = held_out(6000, 2, len(families), **words)
    found = fit_curves(points, mixture=True)
    assert found.tails.share == pytest.approx(0.1, rel=0.25)
    assert found.tails.factor == pytest.approx(9.0, rel=0.25)
    assert found.tails.widening == pytest.approx(TAILS.widening, rel=0.15)
    if not factor and shrinkage:
        assert found.shrinkage.precision == pytest.approx(shrinkage, rel=0.25)
    assert (found.outside is not None) == (factor > 0)
    if found.outside is not None:
        assert found.outside.factor == pytest.approx(factor, rel=0.25)
        assert found.outside.inside == points.inside[FOURIER]
    v = np.array([0.1, 1.0, 10.0])
    for curve in narrow(found, points).values():
        np.testing.assert_allclose(curve.factor(v), TRUTH.factor(v), rtol=0.35)


def test_without_a_process_its_factor_stays_what_it_was_before_data() -> None:
    points = held_out(50, 1, 2, families=(NETWORK, LINEAR)).usable()
    problem = problem_of(points, True)
    assert problem.best([problem.starts[0]])[-1] == pytest.approx(PRIOR["outside"][0], abs=1e-6)
    assert fit_curves(points, mixture=True).outside is None


def test_means_that_are_right_far_out_stay_where_they_are() -> None:
    """Targets of twenty standard deviations: they are known beforehand to a precision of 1 / 400, if at all."""
    points = held_out(400, 1)
    mean = 20 * points.mean
    readings = Readings.of(points.readings.values + (mean - points.mean)[0])
    found = fit_curves(replace(points, mean=mean, readings=readings), mixture=True)
    assert found.shrinkage.precision < 4 / 400
    assert str(FREE) == ""
    assert "from 2.0 standard deviations" in str(Shrinkage(0.25))


@given(mean=st.floats(-1e3, 1e3), var=st.floats(1e-6, 1e6), centre=st.floats(-10, 10), precision=st.floats(1e-6, 1e6))
def test_a_shrunk_mean_is_that_of_two_gaussians_made_one(mean, var, centre, precision) -> None:
    both = (mean / var + centre * precision) / (1 / var + precision)
    assert shrunk(mean, var, centre, precision) == pytest.approx(both, rel=1e-9, abs=1e-9)
    assert shrunk(mean, var, centre, 0.0) == pytest.approx(mean, rel=1e-12, abs=1e-12)
    assert min(mean, centre) - 1e-9 <= shrunk(mean, var, centre, precision) <= max(mean, centre) + 1e-9


def shrunk(mean: float, var: float, centre: float, precision: float) -> float:
    """In the units of variances and precisions."""
    log_precision = np.log(precision) if precision else -np.inf
    return float(formula.shrunk(NumPyOps, mean, np.log(var), centre, log_precision))


@pytest.mark.parametrize(("poor", "best"), [(STRONG, WEAK), (NETWORK, FOURIER)])
def test_each_family_finds_its_own_curve_and_the_best_comes_first(poor: Family, best: Family) -> None:
    """Members of the best family tell the truth with their noise, but where they cost most; the others know nothing of
    the targets but that these are near zero there."""
    points = held_out(4000, 1, 2, families=(poor, best))
    good = held_out(4000, 1, 1, seed=3)
    lost = good.cost[0, :, None] > 30
    good = replace(good, readings=Readings.of(torch.where(lost, 0.3 * good.mean[0].flip(0), good.readings.values)))
    points = replace(
        points,
        mean=torch.cat([torch.zeros_like(good.mean), good.mean]),
        cost=torch.cat([points.cost[:1], good.cost]),
        noise_var=torch.cat([points.noise_var[:1], good.noise_var]),
        readings=good.readings,
    )
    found = fit_curves(points, mixture=False)
    assert list(found.curves) == [best, poor]
    assert found.alone[best] > found.alone[poor]
    for family in (best, poor):  # alone, each is what it would be if the other did not exist, before it is widened
        own = points.of(family)
        single = problem_of(own.usable(), False).lpd(moved(fit_curves(own, mixture=False), own))
        assert found.alone[family] == pytest.approx(single, abs=1e-6)
    assert found.lpd > found.alone[best]  # where the one is lost, the other helps
    assert found.curves[best].trust > found.curves[poor].trust
    np.testing.assert_array_equal(found.points.cost, good.cost[0].numpy())
    assert found.curves[poor].reach == float(points.cost[0].max())


def pairs(c: int) -> tuple[Family, ...]:
    """Two networks of a family each."""
    return (NETWORK, NETWORK, LINEAR, LINEAR)[:c]


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize(
    ("n", "q", "c", "correlated"),
    [(3, 2, 1, False), (50, 2, 3, False), (30, 1, 2, False), (400, 2, 4, False), (100, 2, 3, True)],
)
def test_the_long_way_ends_no_lower(n: int, q: int, c: int, correlated: bool, mixture: bool) -> None:
    """L-BFGS from every start of every family alone, then of all together from there, from the identity and from the
    end that was found.

    Tails that the model does not have would make several minima of several families; only mixtures, which have tails,
    are ever fitted to more than one.
    """
    tails = TAILS if mixture else NONE
    points = held_out(n, q, c, seed=n, families=pairs(c), correlated=correlated, tails=tails).usable()
    found = fit_curves(points, mixture=mixture)

    def lowest(problem: CurveProblem, starts: list[np.ndarray]) -> tuple[float, np.ndarray]:
        options = {"bounds": [LIMITS[name] for name in names_of(problem)], "options": {"maxiter": 3000}}
        ends = [minimize(problem.value, x, jac=True, method="L-BFGS-B", **options) for x in starts]
        return min(((float(end.fun), end.x) for end in ends), key=lambda end: end[0])

    curves = []
    for family in found.curves:
        alone = CurveProblem(points.of(family), [family], mixture=False)
        curves.append(lowest(alone, [*alone.starts])[1])
        # nothing holds the LPD still where LPD and prior together end
        assert found.alone[family] == pytest.approx(alone.lpd(curves[-1]), abs=1e-5)
    problem = CurveProblem(points, list(found.curves), mixture)
    by_family = np.concatenate([*curves, problem.starts[0, problem.n_curves :]])
    value, _ = lowest(problem, [by_family, problem.starts[0], moved(found, points)])
    assert problem.value(moved(found, points))[0] <= value + 1e-6 * abs(value)


@pytest.mark.parametrize("n", [1, 4, 8, 9, 12, 40])
def test_a_fit_is_widened_as_much_as_a_regression_that_does_not_know_its_noise(n: int) -> None:
    """Of three unknowns, as a curve has, and n points, or eight: the variance of its Student-t predictive at their
    inputs, on average, over the likeliest noise variance."""
    m, rng = max(n, 8), np.random.default_rng(n)
    A, y = np.c_[np.ones(m), rng.normal(size=(m, 2))], rng.normal(size=m)
    residual = y - A @ np.linalg.lstsq(A, y, rcond=None)[0]
    leverage = np.diag(A @ np.linalg.inv(A.T @ A) @ A.T)
    scale = np.sqrt(residual @ residual / (m - 3) * (1 + leverage))
    expected = pytest.approx(np.log(stats.t(m - 3, scale=scale).var().mean() / (residual @ residual / m)))
    assert of_widening(n) == {"noise": expected, "slope": expected, "other": 0.0}


def of_widening(n: int) -> dict[str, float]:
    """How far `widened` moves every number of that name, points outside blocks having a total weight of n."""
    points = held_out(4 * n, 2, 2, families=(NETWORK, LINEAR))  # half of them in blocks
    points = replace(points, weight=torch.full((4 * n,), 0.5, dtype=torch.float64))
    problem = problem_of(points, True, NoiseHead.initial(points.inputs, 2))
    x = np.concatenate([problem.starts[0], problem.head.numbers().numpy()])
    x += np.random.default_rng(0).normal(size=len(x))
    before = x.copy()
    moves = problem.widened(x) - x
    np.testing.assert_array_equal(x, before)
    names = [*names_of(problem), *["head"] * (len(x) - len(problem.parameters))]
    found: dict[str, set[float]] = {"noise": set(), "slope": set(), "other": set()}
    for name, move in zip(names, moves, strict=True):
        found[name if name in found else "other"].add(round(float(move), 12))
    assert {name: len(values) for name, values in found.items()} == {"noise": 1, "slope": 1, "other": 1}
    return {name: values.pop() for name, values in found.items()}


@settings(max_examples=20)
@given(
    n=st.integers(1, 30),
    q=st.integers(1, 2),
    c=st.integers(1, 3),
    mixture=st.booleans(),
    correlated=st.booleans(),
    process=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_promised_lpd_is_never_below_the_old_one_but_for_the_prior(n, q, c, mixture, correlated, process, seed):
    """The identity lies within the limits: what it costs under the prior is all that may be lost on its own points,
    before the curves are widened.

    `lpd_before` is that of the uncalibrated mixture, in which all networks count alike.
    """
    families = (FOURIER, NETWORK, NETWORK)[:c] if process else (NETWORK,) * c
    points = held_out(n, q, c, seed, families=families, outside=3.0 * process, correlated=correlated and q > 1)
    found = fit_curves(points, mixture=mixture)
    # without tails and nearly without shrinkage and process it is the identity
    names = ("shrinkage", "outside") if process else ("shrinkage",)
    moves = {"factor": 0.0} | {name: LIMITS[name][0] for name in names}
    prior = sum(0.5 * ((x - PRIOR[name][0]) / PRIOR[name][1]) ** 2 for name, x in moves.items())
    # what is left of the shrinkage moves means by a few millionths; what is left of the process, e^-10 of its variance
    shift = (0.1 if process else 1e-4) * float(points.weight.sum())
    allowed = prior + shift if mixture else 0.0
    w = float(points.weight.sum())
    lpd = lambda density: float((points.weight.numpy() * density).sum()) / w
    identity, outside = dict.fromkeys(families, Curve.identity(q)), found.outside.factor if found.outside else 0.0
    fitted = lpd(slow_log_density(points, narrow(found, points), found.tails, found.shrinkage, outside=outside))
    assert fitted >= lpd(slow_log_density(points, identity)) - allowed / w - 1e-6
    slow = slow_log_density(points, found.curves, found.tails, found.shrinkage, outside=outside)
    assert found.lpd == pytest.approx(lpd(slow), rel=1e-8)
    assert found.lpd_before == pytest.approx(lpd(slow_log_density(points, identity, alike=True)), rel=1e-8)


@settings(max_examples=20)
@given(
    n=st.integers(2, 20), size=st.sampled_from([0.0, 1e-6, 1.0, 1e6]), mixture=st.booleans(), seed=st.integers(0, 99)
)
def test_limits_hold_whatever_the_errors(n: int, size: float, mixture: bool, seed: int) -> None:
    points = held_out(n, 2, 2, seed, families=(NETWORK, FOURIER), outside=3.0)
    wild = replace(points, readings=Readings.of(points.mean[0] + size * (points.readings.values - points.mean[0])))
    found = fit_curves(wild, mixture=mixture)
    for curve in narrow(found, wild).values():
        each = {"noise": curve.noise, "slope": curve.slope, "power": [curve.power], "trust": [curve.trust]}
        for name, values in each.items():
            low, high = np.exp(LIMITS[name])
            assert all(low * (1 - 1e-9) <= v <= high * (1 + 1e-9) for v in values)
    assert 0 <= found.tails.share <= 0.5
    assert 1 <= found.tails.factor <= np.exp(LIMITS["factor"][1]) * (1 + 1e-9)
    assert found.shrinkage.precision <= np.exp(LIMITS["shrinkage"][1]) * (1 + 1e-9)
    assert (found.tails.share > 0) == (found.shrinkage.precision > 0) == (found.outside is not None) == mixture
    if found.outside is not None:
        low, high = np.exp(LIMITS["outside"])
        assert low * (1 - 1e-9) <= found.outside.factor <= high * (1 + 1e-9)


@pytest.mark.parametrize("unit", [1e-3, 1e4])
def test_the_unit_of_the_targets_does_not_matter_to_a_curve(unit: float) -> None:
    """The shrinkage of a mixture has one: that of standardised targets."""
    points, s = held_out(80, 2, 2), torch.tensor([unit, 1.0], dtype=torch.float64)
    readings = Readings.of(s * points.readings.values)
    other = replace(points, mean=s * points.mean, noise_var=s**2 * points.noise_var, readings=readings)
    a, b = fit_curves(points, mixture=False), fit_curves(other, mixture=False)
    np.testing.assert_allclose(moved(a), moved(b), atol=1e-3)
    assert b.lpd == pytest.approx(a.lpd - np.log(unit), abs=1e-6)
    assert b.lpd_before == pytest.approx(a.lpd_before - np.log(unit), abs=1e-6)
    np.testing.assert_allclose(a.points.squared_error, b.points.squared_error)


def test_weights_count_copies() -> None:
    points = held_out(30, 2, 2)
    copies = np.arange(30) % 3
    weighted = fit_curves(replace(points, weight=torch.from_numpy(copies.astype(float))), mixture=True)
    repeated = points[np.repeat(np.arange(30), copies)]
    ones = torch.ones(len(repeated.readings.values), dtype=torch.float64)
    repeated = fit_curves(replace(repeated, weight=ones), mixture=True)
    np.testing.assert_allclose(moved(weighted), moved(repeated), atol=1e-3)
    assert weighted.lpd == pytest.approx(repeated.lpd)


def same_points(a: HeldOutPoints, b: HeldOutPoints) -> None:
    for name in ("mean", "cost", "noise_var", "inputs", "weight"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert torch.equal(a.readings.t, b.readings.t)
    assert list(a.kind) == list(b.kind)


def test_a_part_of_the_points_is_always_the_same_and_weighs_as_much() -> None:
    points = held_out(50, 2, 3, families=(NETWORK, FOURIER, LINEAR), outside=3.0)
    points = replace(points, kind=np.array(["random"] * 40 + ["blocked"] * 10))
    part, again = points.some(12), points.some(12)
    assert [int((part.kind == kind).sum()) for kind in ("random", "blocked")] == [12, 10]
    for kind in ("random", "blocked"):
        of = lambda p, kind=kind: float(p.weight[torch.from_numpy(p.kind == kind)].sum())
        assert of(part) == pytest.approx(of(points))
    same_points(part, again)
    rows = [int((points.readings.values == target).all(1).nonzero()) for target in part.readings.values]
    assert rows == sorted(set(rows))  # each at most once, in the old order
    assert rows[-10:] == list(range(40, 50))
    assert rows[:12] != list(range(12))
    assert torch.equal(part.mean, points.mean[:, rows])
    assert torch.equal(part.log_far, points.log_far[rows])
    assert part.inside == points.inside
    same_points(points.some(40), points)


def test_curves_of_a_part_are_near_those_of_all_and_speak_for_all(monkeypatch) -> None:
    points = held_out(6000, 1, 3, tails=TAILS)
    everything = fit_curves(points, mixture=True)
    monkeypatch.setattr(calibration.fit, "FIRST_POINTS", 100)
    coarse = fit_curves(points, mixture=True)  # where the descent begins does not matter
    np.testing.assert_allclose(moved(coarse), moved(everything), atol=1e-3)
    monkeypatch.setattr(calibration.fit, "MOST_POINTS", 700)
    part = fit_curves(points, mixture=True)
    assert not np.array_equal(moved(part), moved(everything))
    assert everything.lpd - 0.01 < part.lpd < everything.lpd + 1e-3  # of the same points
    problem = problem_of(points.usable(), True)
    assert part.lpd == pytest.approx(problem.lpd(moved(part)), rel=1e-10)
    assert part.alone[NETWORK] == pytest.approx(everything.alone[NETWORK], abs=0.01)
    assert part.lpd_before == everything.lpd_before
    assert part.curve.reach == float(points.cost.max())
    assert len(part.points.cost) == 6000


@pytest.mark.parametrize("mixture", [False, True])
def test_points_of_a_network_that_failed_are_left_out(mixture: bool) -> None:
    points, fold = held_out(50, 2, 3), np.arange(10)
    mean = points.mean.clone()
    mean[1, fold] = torch.nan
    cost = points.cost.clone()
    cost[2, 10] = torch.inf
    noise_var = points.noise_var.clone()
    noise_var[0, 11] = torch.nan
    noise_var[0, 12] = 0
    mean[0, 13] = 1e200  # a number, but not its square
    found = fit_curves(replace(points, mean=mean, cost=cost, noise_var=noise_var), mixture=mixture)
    expected = fit_curves(points[np.arange(14, 50)], mixture=mixture)
    np.testing.assert_array_equal(moved(found), moved(expected))
    assert len(found.points.cost) == len(found.points.kind) == 36
    assert found.lpd == expected.lpd


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_where_the_process_failed_says_nothing_of_what_is_inside(bad: float) -> None:
    points = held_out(50, 1, 2, families=(NETWORK, FOURIER), outside=3.0)
    cost = points.cost.clone()
    cost[1, 0] = bad
    points, rest = replace(points, cost=cost), np.arange(1, 50)
    found, expected = points.beside_references(), points[rest].beside_references()
    assert found.inside == expected.inside
    assert torch.equal(found[rest].log_far, expected.log_far)
    found, expected = fit_curves(found, mixture=True), fit_curves(expected, mixture=True)
    np.testing.assert_array_equal(moved(found), moved(expected))
    assert found.lpd == expected.lpd


@pytest.mark.parametrize("mixture", [False, True])
def test_a_network_with_absurd_errors_leaves_the_curve_finite(mixture: bool) -> None:
    """Errors of a million standard deviations in one fold: a curve of finite numbers, better than none."""
    points = held_out(50, 1)
    mean = points.mean.clone()
    mean[0, :10] += 1e6
    cost = points.cost.clone()
    cost[0, :10] = 1e3
    found = fit_curves(replace(points, mean=mean, cost=cost), mixture=mixture)
    assert np.isfinite(moved(found)).all()
    assert np.isfinite([found.lpd, found.lpd_before]).all()
    assert found.lpd > found.lpd_before
    var = float(points.noise_var[0, 0, 0] * found.curve.factor(np.array([1e3]))[0, 0])
    error = shrunk(1e6, var, 0.0, found.shrinkage.precision)
    assert error**2 < 1e4 * found.tails.widening * var  # it takes the errors for what they are
    assert found.curve.factor(np.array([0.01])) < 1e3  # and leaves points that cost little alone


def test_absurd_errors_of_one_of_several_networks_do_not_spoil_the_others() -> None:
    points = held_out(50, 1, 3)
    mean = points.mean.clone()
    mean[1, :10] += 1e6
    found, expected = (fit_curves(replace(points, mean=m), mixture=False) for m in (mean, points.mean))
    np.testing.assert_allclose(found.lpd, expected.lpd, atol=0.3)  # its weight is lost at ten points of fifty
    np.testing.assert_allclose(moved(found), moved(expected), atol=0.5)


@pytest.mark.parametrize("input_noise", [False, True, None])
def test_without_a_usable_point_the_posterior_stands_as_it_is(input_noise: bool) -> None:
    points = held_out(5, 2, 2)
    for nothing in (replace(points, mean=points.mean * torch.nan), replace(points, weight=0 * points.weight)):
        found = fit_curves(nothing, mixture=True, input_noise=input_noise)
        np.testing.assert_array_equal(found.curve.factor(np.array([0.3])), [[1.3, 1.3]])
        assert np.isnan(found.lpd)
        assert len(found.points.cost) == 0
        assert found.points.squared_error.shape == (0, 2)


def noisy(n: int, strength: float = 1.5, seed: int = 0) -> tuple[HeldOutPoints, torch.Tensor]:
    """Points that are all noise, and the variance of it over its usual value: exp(strength tanh(first input))."""
    points = held_out(n, 1, curve=Curve.identity(2), seed=seed)
    truth = torch.exp(strength * torch.tanh(points.inputs[:, :1]))
    noise = torch.randn(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    targets = points.mean[0] + (truth * points.noise_var[0]).sqrt() * noise
    return replace(points, cost=points.cost * 1e-3, readings=Readings.of(targets)), truth


def test_noise_of_the_input_is_found_and_ends_at_the_edge_of_the_data() -> None:
    points, truth = noisy(3000)
    plain, found = fit_curves(points, mixture=False), fit_curves(points, mixture=False, input_noise=True)
    assert found.lpd > plain.lpd + 0.05
    assert plain.head is None
    assert found.head is not None
    ratio = narrow(found, points)[NETWORK].noise * head_factor(found.head, points.inputs) / truth.numpy()
    assert 0.8 < np.quantile(ratio, 0.05) < np.quantile(ratio, 0.95) < 1.25
    edge, beyond = points.inputs.amax(0)[None], points.inputs.amax(0)[None] + 1e3
    np.testing.assert_array_equal(head_factor(found.head, edge), head_factor(found.head, beyond))


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize(("strength", "depends"), [(1.5, True), (-1.5, True), (0.0, False)])
@pytest.mark.parametrize("seed", range(2))
def test_whether_noise_depends_on_the_input_is_found_out(seed, strength, depends, mixture) -> None:
    points, _ = noisy(600, strength, seed)
    found = fit_curves(points, mixture=mixture, input_noise=None)
    assert (found.head is not None) == depends
    told = fit_curves(points, mixture=mixture, input_noise=depends)
    assert found.lpd == told.lpd
    np.testing.assert_array_equal(moved(found), moved(told))


def test_few_points_or_those_that_were_fitted_never_say_that_noise_depends_on_the_input() -> None:
    """Points of blocks do not count, however many there are."""
    for n, seed in ((320, 0), (300, 3)):  # by chance a head fits constant noise better than none
        assert fit_curves(noisy(n, 0.0, seed)[0], mixture=False, input_noise=None).head is None
    points, _ = noisy(300, 4.0)
    fewer = np.flatnonzero(np.arange(300) != 0)  # the first was held out at random
    assert fit_curves(points, mixture=False, input_noise=None).head is not None
    assert fit_curves(points[fewer], mixture=False, input_noise=None).head is None
    images = replace(points, inputs=points.inputs[:, None])  # inputs that are no table
    for other in (replace(points, kind=np.full(300, "blocked")), images):
        assert fit_curves(other, mixture=False, input_noise=None).head is None


def test_a_head_that_has_learned_nothing_changes_nothing() -> None:
    points = held_out(7, 2)
    head = NoiseHead.initial(points.inputs, 2)
    np.testing.assert_array_equal(head_factor(head, points.inputs), np.ones((7, 2)))
    again = head.with_numbers(head.numbers())
    assert all(torch.equal(getattr(again, name), getattr(head, name)) for name in ("low", "high", "U", "u", "V"))
    assert len(head.numbers()) == sum(getattr(head, name).numel() for name in ("U", "u", "V"))
    moved = head.with_numbers(head.numbers() + 0.3)
    close(head_factor(moved, points.inputs + 2), factor_of(moved, points.inputs + 2))  # some of them beyond the edge


def head_factor(head: NoiseHead, Z: torch.Tensor) -> np.ndarray:
    return formula.log_noise_factor(TorchOps, head, Z).exp().numpy()


def test_sets_of_points_are_joined_and_stacked_field_by_field() -> None:
    a, b = held_out(5, 2, 3, seed=1), held_out(4, 2, 3, seed=2)
    both = HeldOutPoints.joined([a, b])
    for part, rows in ((a, np.arange(5)), (b, np.arange(5, 9))):
        same_points(both[rows], part)
    twice = HeldOutPoints.stacked([a, a])
    assert torch.equal(twice.mean, torch.cat([a.mean, a.mean]))
    assert torch.equal(twice.readings.values, a.readings.values)
    assert twice.cost.shape == (6, 5)


def test_members_of_a_family_keep_their_places_in_sets_of_points() -> None:
    """Families of the same prior precision differ by their kind, those of the same kind by their prior precision."""
    families = (NETWORK, LINEAR, WEAK, NETWORK)
    a, b = held_out(5, 2, 4, seed=1, families=families, correlated=True), held_out(4, 2, 4, seed=2, families=families)
    a = replace(a, log_far=torch.arange(5.0).double(), inside={FOURIER: 0.5})
    assert HeldOutPoints.joined([replace(a, correlation=None, log_far=None), b]).families == families
    assert HeldOutPoints.stacked([a, replace(a, families=families[::-1])]).families == families + families[::-1]
    assert a[np.arange(2)].families == a.usable().families == a.some(1).families == families
    for family, places in ((NETWORK, [0, 3]), (LINEAR, [1]), (WEAK, [2])):
        own = a.of(family)
        assert own.families == (family,) * len(places)
        for name in ("mean", "cost", "noise_var", "correlation"):
            assert torch.equal(getattr(own, name), getattr(a, name)[places])
        assert torch.equal(own.readings.values, a.readings.values)
        assert torch.equal(own.log_far, a.log_far)
        assert own.inside == a.inside


@pytest.mark.parametrize("families", [(FOURIER,), (NETWORK, FOURIER, LINEAR), (FOURIER, NETWORK, ADDITIVE, FOURIER)])
def test_the_process_says_how_far_outside_the_data_points_are(families: tuple[Family, ...]) -> None:
    """Its mean cost beyond the largest of points held out without their neighbours, in units of its noise. The additive
    model says up to which cost points are inside, too."""
    rng = np.random.default_rng(0)
    points = held_out(40, 2, len(families), families=families)
    assert points.log_far is None
    noise_var = torch.from_numpy(rng.uniform(0.5, 2, points.noise_var.shape))  # of another fold at every point
    kind = np.array(["random", "blocked", "given", "shell"])[np.arange(40) % 4]
    own = [i for i, family in enumerate(families) if family == FOURIER]
    cost = points.cost.clone()
    cost[own] *= torch.from_numpy(np.where(np.arange(40) % 2, 100.0, 1.0))
    points = replace(points, noise_var=noise_var, cost=cost, kind=kind)
    beside = points.beside_references()
    far, inside = slow_far(cost.numpy(), noise_var.numpy(), kind, families)
    assert beside.single.tolist() == [True, False] * 20
    assert beside.inside[FOURIER] == pytest.approx(inside, rel=1e-12)
    assert set(beside.inside) == {FOURIER, ADDITIVE} & set(families)
    if ADDITIVE in families:
        assert beside.inside[ADDITIVE] == float(cost[families.index(ADDITIVE)][beside.single].max())
    assert 5 <= (far > 0).sum() <= 15
    assert not (far > 0)[beside.single].any()
    found = np.exp(beside.log_far.numpy())
    np.testing.assert_allclose(found[far > 0], far[far > 0], rtol=1e-12)
    assert (found[far == 0] < 1e-100).all()
    assert torch.equal(beside.cost, points.cost)


def test_points_beyond_a_cost_that_is_given_count_as_a_region() -> None:
    points = replace(held_out(20, 1, 2, families=(NETWORK, FOURIER)), kind=np.array(["given", "shell"] * 10))
    inside = float(points.cost[1].median())
    beside = points.beside_references({FOURIER: inside})
    beyond = (points.cost[1].numpy() > inside) & (points.kind == "given")
    assert 0 < beyond.sum() < 10
    assert beside.inside == {FOURIER: inside}
    assert beside.kind.tolist() == np.where(beyond, "outside", points.kind).tolist()
    np.testing.assert_allclose(beside.weight, points.weight.numpy() * np.where(beyond, REGION_WEIGHT, 1.0))
    assert ((beside.log_far > -200).numpy() == (points.cost[1].numpy() > inside)).all()


def test_without_a_process_or_points_or_others_than_of_regions_nothing_is_outside() -> None:
    points = held_out(12, 1, 2, families=(NETWORK, FOURIER))
    beside = replace(points, kind=np.array(["blocked", "shell"] * 6)).beside_references()
    assert beside.inside == {FOURIER: float(points.cost[1].max())}
    assert (beside.log_far < -200).all()
    points = held_out(4, 1, 2, families=(NETWORK, LINEAR))
    assert points.beside_references() is points
    none = held_out(4, 1, 1, families=(FOURIER,))[np.arange(0)]
    assert none.beside_references().log_far is None


@given(m=st.integers(4, 60), k=st.integers(2, 5), seed=st.integers(0, 9), copies=st.booleans())
def test_every_row_is_held_out_once_and_trained_on_otherwise(m: int, k: int, seed: int, copies: bool) -> None:
    """Rows of a group are held out together; `n_groups` counts the groups that are trained on."""
    rng = np.random.default_rng(seed)
    X, groups = rng.normal(size=(m, 2)), np.arange(m)
    if copies:  # two rows of each group or three
        groups = rng.permutation(np.arange(m) % (m // 2))
    k = min(k, max(2, len(set(groups)) // 2))
    for kind, splits in (
        ("random", random_splits(groups, k, np.random.default_rng(seed))),
        ("blocked", blocked_splits(X, groups, k)),
    ):
        assert len(splits) == k
        assert sorted(np.concatenate([split.held for split in splits]).tolist()) == list(range(m))
        for split in splits:
            assert split.kind == kind
            assert sorted([*split.train, *split.held]) == list(range(m))
            assert list(split.held) == sorted(split.held)
            assert not set(groups[split.train]) & set(groups[split.held])
            assert split.n_groups == len(set(groups[split.train]))
        sizes = [len(set(groups[split.held])) for split in splits]
        assert max(sizes) - min(sizes) <= (1 if kind == "random" else 2)  # a block is cut in halves, twice rounded


@pytest.mark.parametrize("copies", [1, 3])
def test_blocks_hold_neighbours_out_together(copies: int) -> None:
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat(np.arange(50), copies))
    X = rng.uniform(size=(50, 1))[groups]
    for split in blocked_splits(X, groups, 5):
        low, high = X[split.held].min(), X[split.held].max()
        assert not ((X[split.train] >= low) & (X[split.train] <= high)).any()


@pytest.mark.parametrize("copies", [1, 3])
def test_shells_hold_out_what_lies_farthest_from_the_middle(copies: int) -> None:
    """Whatever the units of the inputs, and beside one that never changes."""
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat(np.arange(50), copies))
    Z = rng.normal(size=(50, 2))[groups]
    splits = shell_splits(np.c_[Z * [1e3, 1.0] + 7, np.ones(len(Z))], groups)
    assert [split.n_groups for split in splits] == [20, 30, 40]
    for split in splits:
        assert split.kind == "shell"
        assert sorted([*split.train, *split.held]) == list(range(50 * copies))
        assert not set(groups[split.train]) & set(groups[split.held])
        away = (((Z - Z.mean(0)) / Z.std(0)) ** 2).sum(1)
        assert away[split.train].max() < away[split.held].min()
    few = shell_splits(np.array([[-9.0], [1.0], [0.0]]), np.arange(3))
    assert [list(split.train) for split in few] == [[1, 2]] * 3


def test_given_splits_are_the_splitters_own() -> None:
    X, groups = np.zeros((12, 1)), np.random.default_rng(0).permutation(np.arange(12) // 2)
    repeated = RepeatedKFold(n_splits=2, n_repeats=2, random_state=0)
    for splitter in (KFold(3), TimeSeriesSplit(3), repeated, GroupKFold(3)):
        of = groups if isinstance(splitter, GroupKFold) else None
        for split, (train, held) in zip(given_splits(splitter, X, X, of), splitter.split(X, X, of), strict=True):
            assert (split.train == train).all()
            assert (split.held == held).all()
            assert split.kind == "given"
            assert split.n_groups == len(train)


class Splitter:
    """Gives what it is told."""

    def __init__(self, *splits: tuple):
        self.splits = splits

    def split(self, X, y=None, groups=None):
        return iter(self.splits)

    def __repr__(self):
        return "mine"


@pytest.mark.parametrize(
    ("splitter", "said"),
    [
        (5, "calibration=5 is not a splitter.*GroupKFold"),
        ([([0, 1], [2])], "is not a splitter"),
        (KFold, "could not split 10 rows"),
        (KFold(11), "could not split 10 rows.*n_splits=11"),
        (GroupKFold(3), "could not split 10 rows.*groups"),
        (Splitter(), "mine gave a split with fewer than 2"),
        (Splitter(([0], [1])), "mine gave a split with fewer than 2"),
        (Splitter(([0, 1], [])), "mine gave a split with fewer than 2"),
        (Splitter(([0, 1], [10])), "rows that are not indices from 0 to 9"),
        (Splitter(([0, 1], [-1])), "rows that are not indices from 0 to 9"),
        (Splitter(([0.0, 1.0], [2.0])), "rows that are not indices from 0 to 9"),
        (Splitter((np.arange(10) < 5, np.arange(10) >= 5)), "rows that are not indices from 0 to 9"),
        (Splitter(([0, 1, 2], [2, 3])), "mine holds rows out that it also trains on"),
        (Splitter(([0, 1], [2], [3])), "could not split 10 rows"),
    ],
)
def test_splitters_that_do_not_split_are_told_why(as_a_user, splitter, said: str) -> None:
    refused(f"(?s){said}", given_splits, splitter, np.zeros((10, 1)), np.zeros((10, 1)))


def test_alpha_on_folds_is_tuned_on_the_targets_that_are_known(monkeypatch) -> None:
    seen, tune = [], revisions.tune_alpha_on
    monkeypatch.setattr(revisions, "tune_alpha_on", lambda folds, *a: (seen.extend(folds), tune(folds, *a))[1])
    case = CASES["missing"](40)
    case.fitted(hidden=(4,), n_members=2, calibration="alpha", max_epochs=5, random_state=0)
    missing = sum(int(fold.T.isnan().sum()) for fold in seen)
    assert missing / sum(fold.T.numel() for fold in seen) == pytest.approx(np.isnan(case.y).mean(), abs=0.05)
