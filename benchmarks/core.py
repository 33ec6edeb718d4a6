"""Speed of the closed forms: ratios to the straightforward implementation, measured in the same run.

Both sides of a ratio use float64, the same chunks and threads, take turns, and are compared by their medians; the peak
memory is measured in separate processes. On a busy machine several threads mostly wait for each other: one by default.
"""

import os
import time
import timeit
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from benchmarks.runner import in_own_process, options_of
from benchmarks.timing import Ratio, Timing, describe_machine, memory, print_ratios, time_in_turns
from lastlayer import BLLRegressor, formula
from lastlayer._internal.numbers import LOG_2PI
from lastlayer.bayes.evidence import profiled_nlml
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.formula.ops import TorchOps
from lastlayer.networks.mlp import MLP
from lastlayer.predictor.fitted import rows_in_cache

CHUNK = 2_000  # rows per chunk, in every loop over points

ROWS = 10_000


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def pinv_ratios(
    gram: Float[Tensor, "p p"], Phi: Float[Tensor, "r p"], log_alphas: Float[Tensor, " a"]
) -> Float[Tensor, "a r"]:
    """phi' pinv(Lambda_bar) phi for one alpha after the other: the authors' loop without its repeated products."""
    penalised = torch.ones_like(gram[0])
    penalised[-1] = 0  # flat prior on the bias
    ratios = []
    for log_alpha in log_alphas:
        Sigma = torch.linalg.pinv(gram + torch.diag(torch.exp(-log_alpha) * penalised), hermitian=True)
        ratios.append(torch.cat([((phi @ Sigma) * phi).sum(-1) for phi in Phi.split(CHUNK)]))
    return torch.stack(ratios)


def spectral_ratios(
    moments: Statistics, Phi: Float[Tensor, "r p"], log_alphas: Float[Tensor, " a"]
) -> Float[Tensor, "a r"]:
    """Compute the same from one eigendecomposition, which a fresh posterior repeats at every call."""
    posterior = Posterior(moments, 0.0)
    return torch.cat([posterior.variance_ratios(phi, log_alphas) for phi in Phi.split(CHUNK)], dim=-1)


def alpha_sweep(shrink: int) -> Ratio:
    m, n_test, k, n_alphas, n_timed = ROWS // shrink, ROWS // shrink, 255 // shrink, 200, 5
    generator = torch.Generator().manual_seed(0)
    network = MLP(10, (k,), generator=generator).requires_grad_(False)
    X = torch.randn(m + n_test, 10, dtype=torch.float64, generator=generator)
    Phi, Phi_test = affine_features(network(X)).split([m, n_test])
    moments, gram = Statistics.from_features(Phi, X[:m, :1]), Phi.mT @ Phi
    log_alphas = torch.linspace(-10, 10, n_alphas, dtype=torch.float64)
    timed = log_alphas[:: (n_alphas - 1) // (n_timed - 1)][:n_timed]
    few, fast = time_in_turns(
        lambda: pinv_ratios(gram, Phi_test, timed), lambda: spectral_ratios(moments, Phi_test, log_alphas), repeats=5
    )
    slow = Timing(few.median * n_alphas / n_timed, few.spread)
    difference = spectral_ratios(moments, Phi_test, timed) / pinv_ratios(gram, Phi_test, timed) - 1
    print(f"alpha sweep: {n_alphas} alphas, p = {k + 1}, m = {m:,}, {n_test:,} test points, Phi'Phi given to both")
    print(f"  pinv for every alpha {slow}, extrapolated from {n_timed} of the {n_alphas} alphas")
    print(f"  spectral form        {fast}, all {n_alphas}, eigendecomposition included")
    print(f"  largest relative difference {float(difference.abs().max()):.1e}")
    return Ratio.of_times("alpha sweep", "pinv for every alpha / spectral form", slow, fast, at_least=100)


def evidence_problem(m: int, p: int = 256, q: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    Phi = torch.randn(m, p, dtype=torch.float64, generator=generator)
    Phi[:, -1] = 1
    T = Phi[:, :q] + 0.1 * torch.randn(m, q, dtype=torch.float64, generator=generator)
    return Phi.requires_grad_(), T, torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)


def autograd_nlml(
    Phi: Float[Tensor, "m p"], T: Float[Tensor, "m q"], log_alpha: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Profiled NLML per sample under the flat prior, in operations that autograd differentiates one by one."""
    (m, p), q, n = Phi.shape, T.shape[-1], len(Phi) - 1
    ridge = torch.exp(-log_alpha) * torch.cat([Phi.new_ones(p - 1), Phi.new_zeros(1)])
    L = torch.linalg.cholesky(Phi.mT @ Phi + torch.diag(ridge))
    W = torch.cholesky_solve(Phi.mT @ T, L)
    S = (T - Phi @ W).square().sum(0) + (ridge[:, None] * W.square()).sum(0)
    logdet = 2 * L.diagonal().log().sum()
    return (q * (n * LOG_2PI + (p - 1) * log_alpha + logdet) + n * (S / n).log().sum() + n * q) / (2 * m)


EvidenceForm = Callable[[Tensor, Tensor, Tensor], Tensor]
EVIDENCE_FORMS: dict[str, EvidenceForm] = {"closed": profiled_nlml, "autograd": autograd_nlml}


def value_and_gradient(form: EvidenceForm, Phi: Tensor, T: Tensor, log_alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute J, dJ/dphi_tilde and dJ/dlog alpha."""
    J = form(Phi, T, log_alpha)
    d_Phi, d_log_alpha = torch.autograd.grad(J, (Phi, log_alpha))
    return J.detach(), d_Phi[:, :-1], d_log_alpha


def peak_bytes(form: str, rows: int, threads: int) -> float:
    """By how much one evaluation raises the resident peak of this process."""
    torch.set_num_threads(threads)
    problem = evidence_problem(rows)
    value_and_gradient(EVIDENCE_FORMS[form], *evidence_problem(300))  # loads the libraries
    before = memory("VmHWM")  # ru_maxrss would start at that of the parent process
    value_and_gradient(EVIDENCE_FORMS[form], *problem)
    return 2**20 * (memory("VmHWM") - before)


def evidence(shrink: int) -> list[Ratio]:
    problem = Phi, T, _ = evidence_problem(ROWS // shrink)
    closed, autograd = (partial(value_and_gradient, form, *problem) for form in EVIDENCE_FORMS.values())
    times = time_in_turns(closed, autograd, repeats=9)
    # with a fixed threshold malloc gives every large block back at once, so that the resident peak is what is alive
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # read where a process starts
    sizes = ROWS // shrink, torch.get_num_threads()
    peaks = [in_own_process(peak_bytes, form, *sizes) for form in EVIDENCE_FORMS]
    differences = [f"{relative_difference(a, b):.1e}" for a, b in zip(closed(), autograd(), strict=True)]
    print(f"evidence: value and gradient, m = {len(Phi):,}, p = {Phi.shape[1]}, q = {T.shape[1]}")
    for form, timing, peak in zip(EVIDENCE_FORMS, times, peaks, strict=True):
        print(f"  {form:<20} {timing}, peak memory {peak / 1e6:.1f} MB, {peak / Phi.nbytes:.1f} times the features")
    print("  peak memory: growth of VmHWM in a fresh process, without the inputs, with the buffers of the BLAS")
    print("  relative differences in value, features' gradient, log alpha's gradient:", *differences)
    return [
        Ratio.of_times("evidence, time", "autograd / closed form", times[1], times[0], at_least=1),
        Ratio("evidence, memory", "autograd / closed form", peaks[1] / peaks[0], at_least=1),
    ]


def predict(network: nn.Module, posterior: Posterior, X: Float[Tensor, "r d"]) -> tuple[Tensor, Tensor]:
    means, stds = [], []
    for x in X.split(CHUNK):
        marginals = posterior.predict(affine_features(network(x)))
        means.append(marginals.mean)
        stds.append(((1 + marginals.variance_ratio)[:, None] * marginals.noise_cov.diagonal()).sqrt())
    return torch.cat(means), torch.cat(stds)


def prediction(shrink: int) -> list[Ratio]:
    n_points, m, d, width, q = 10 * ROWS // shrink, ROWS // shrink, 10, 50, 2
    generator = torch.Generator().manual_seed(2)
    network = MLP(d, (width, width), generator=generator).requires_grad_(False)
    bare = nn.Sequential(network, nn.Linear(width, q, dtype=torch.float64)).requires_grad_(False)
    X = torch.randn(n_points, d, dtype=torch.float64, generator=generator)
    T = torch.sin(X[:m, :q]) + 0.1 * torch.randn(m, q, dtype=torch.float64, generator=generator)
    moments = Statistics.from_features(affine_features(network(X[:m])), T)
    small, large = Posterior(moments, -5.0), Posterior(moments, 5.0)
    forward, *predicted = time_in_turns(
        lambda: torch.cat([bare(x) for x in X.split(CHUNK)]),
        lambda: predict(network, small, X),
        lambda: predict(network, large, X),
    )
    flops = 2 * (d * width + width**2 + width * q)
    print(f"prediction: {n_points:,} points, {d} inputs, two layers of {width}, q = {q}, chunks of {CHUNK:,}")
    print(f"  forward pass         {forward}, {flops} flops per point, and {2 * width} tanh")
    print(f"  mean and std: {width**2} more by a triangular solve, {2 * width**2} by a rotation")
    ratios = []
    for posterior, timing in zip((small, large), predicted, strict=True):
        name = f"mean and std, log alpha {posterior.log_alpha:g}"
        print(f"  {name:<27}{timing}")
        ratios.append(Ratio.of_times("prediction", f"{name} / forward pass", timing, forward, at_least=None))
    return ratios


def default_mixture(shrink: int, d: int = 10) -> list[Ratio]:
    rng = np.random.default_rng(3)
    X = rng.standard_normal((300, d))
    model = BLLRegressor(max_epochs=3, random_state=0).fit(X, X[:, 0] + np.sin(X[:, 1]))  # shapes as after a long fit
    layers = model.fitted_.state.layers
    stacks = [layer for layer in layers if layer.network.weights]
    chunk = rows_in_cache(max(layer.width for layer in layers))
    n = sum(len(layer.places) for layer in stacks)
    print(f"default mixture: {n} networks, {len(model.members_) - n} linear members, {d} inputs; processor time")
    forward = lambda z: [formula.features(TorchOps, layer.network, z) for layer in stacks]

    def measured(n: int, times: int) -> list[Ratio]:
        X = rng.standard_normal((n, d))
        Z = model.fitted_.standardized(X).split(chunk)
        discarded = lambda: deque(map(forward, Z), maxlen=0)
        sides = (discarded, lambda: model.predictive(X), lambda: model.predict(X))
        repeated = [partial(timeit.timeit, side, number=times) for side in sides]
        bare, *whole = time_in_turns(*repeated, clock=time.process_time)
        micro = [1e6 * timing.median / times / n for timing in (bare, *whole)]
        print("  {:>6,} rows at once, us per row: forward {:.1f}, predictive {:.1f}, predict {:.1f}".format(n, *micro))
        found = zip(("predictive", "predict"), whole, strict=True)
        name = f"bare forward pass, rows: {n:,}"
        return [Ratio.of_times("default mixture", f"{each} / {name}", timing, bare, None) for each, timing in found]

    return [*measured(1, 200 // shrink), *measured(1_000 // shrink, 1), *measured(20_000 // shrink, 1)]


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes by this, for a trial")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    print(f"{describe_machine()}; float64\n")
    n = asked.shrink
    print_ratios([alpha_sweep(n), *evidence(n), *prediction(n), *default_mixture(n)])


if __name__ == "__main__":
    main()
