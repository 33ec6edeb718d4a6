"""The predictive formula of a fitted model, in the operations of any array library (see `ops`).

For each member of the mixture, with z the standardised inputs and phi its centred linear features,

    mean   = phi W + offset                                          target units
    h      = phi root + shift,      v = h h'                         affine cost (Theorem 2), at alpha* and as tuned
    far    = process_noise max(0, u - inside)                        u: affine cost of the process, outside the data
    e(v)   = noise_var b (v^gamma + share far)                       calibrated epistemic variance
    n      = noise_var a exp(V' tanh(U'z + u))                       calibrated noise variance
    mean'  = centre + (mean - centre) / (1 + precision (e* + n))     shrunk to the targets' mean; e* without far
    weight ~ trust (e* + n)^-sharpness                               geometric mean over outputs; e* = e(v at alpha*)

Outside the data the means are then `merged`: disagreement between members counts as variance of each of them.
A draw of the function is mean' + stretch(v) h E, the columns of E normal with covariance `noise_cov` times b.
The process is a Gaussian process in random features, which need not be a member. Rows are the last axis but one,
outputs the last; the first axis indexes members where the library has such an axis. Variances are kept as logarithms,
the form in which calibration fits them. The names on `model` and `layer` are those of `module.Predictor`. This module
imports nothing, because exported models contain a copy of it.
"""

TINY = 2.0**-511
"""A positive number whose inverse can be squared without overflow."""


class Components:
    """Predictions of the members at each point: `mean`, `epistemic`, `noise` (c, m, q); `weights`, `cost` (c, m, 1)."""

    def __init__(self, mean, epistemic, noise, weights, cost, cost_star):  # type: ignore[no-untyped-def]
        self.mean, self.epistemic, self.noise, self.weights = mean, epistemic, noise, weights
        self.cost, self.cost_star = cost, cost_star


def last_layer(ops, layer, phi):  # type: ignore[no-untyped-def]
    """Mean and affine cost for centred features at the alpha in use; if that was tuned, also the cost at alpha*."""
    said = [*layer_mean(ops, layer, phi), ops.block_sum(ops.square(rows(ops, layer, phi)), layer.n_costs)]
    if layer.root_star is None:
        return said
    return [*said, ops.block_sum(ops.square(ops.affine(phi, layer.root_star, layer.shift_star)), layer.n_costs)]


def layer_mean(ops, layer, phi):  # type: ignore[no-untyped-def]
    """Mean for centred features."""
    return [ops.affine(phi, layer.weights, layer.offset)]


def rows(ops, layer, phi):  # type: ignore[no-untyped-def]
    """h: whitened features at the alpha in use; concatenated over outputs that were observed at different rows."""
    return ops.affine(phi, layer.root, layer.shift)


def log_far(ops, outside, cost):  # type: ignore[no-untyped-def]
    """Log of the variance of the process in excess of its variance inside the data, given its affine cost."""
    return outside.log_noise + ops.log(ops.at_least(cost - outside.inside, TINY))


def log_shape(ops, curve, log_cost, far):  # type: ignore[no-untyped-def]
    """log(v^gamma + share far); beyond the calibrated reach, v^gamma is its value there times v over the reach."""
    known = ops.minimum(log_cost, curve.log_reach)
    own = curve.power * known + (log_cost - known)
    return own if far is None else ops.logaddexp(own, curve.log_share + far)


def log_noise_factor(ops, head, z):  # type: ignore[no-untyped-def]
    """Log of the noise variance at z over its base value, for each output; z is clipped to the range of the data."""
    inside = ops.minimum(ops.maximum(z, head.low), head.high)
    return ops.matmul(ops.tanh(ops.matmul(inside, head.U) + head.u), head.V)


def log_variance(ops, curve, shape, log_factor):  # type: ignore[no-untyped-def]
    """Log of the calibrated variance of a target over the noise variance of the evidence.

    It is log(a s + b (v^gamma + share far)), given log(v^gamma + share far) as `shape` and log s as `log_factor`.
    """
    return ops.logaddexp(curve.log_noise + log_factor, curve.log_slope + shape)


def member_weights(ops, log_var, sharpness, log_trust):  # type: ignore[no-untyped-def]
    """Weights of the members: a power of their precision at the point, times the trust in their family.

    The precision is the geometric mean over the outputs.
    """
    return ops.softmax(log_trust - sharpness * ops.row_mean(log_var))


def shrunk(ops, mean, log_var, centre, log_precision):  # type: ignore[no-untyped-def]
    """Posterior mean of a target with prior N(centre, 1 / precision) that a member predicts as N(mean, var).

    The variance is left unchanged: it must not shrink outside the data.
    """
    return centre + (mean - centre) * ops.sigmoid(-log_precision - log_var)


def components(ops, model, said, z, far=None):  # type: ignore[no-untyped-def]
    """Calibrate, weight and shrink the predictions of the last layers, noise included.

    `far` is given where the process is not among the members.
    """
    curve, mean, cost, cost_star = model.curve, said[0], said[1], said[-1]
    far = far_of(ops, model, cost_star) if far is None else far
    log_factor = 0.0 if model.head is None else log_noise_factor(ops, model.head, z)
    shape = log_shape(ops, curve, ops.log(ops.at_least(cost, TINY)), far)
    log_star = ops.log(ops.at_least(cost_star, TINY))
    star = shape if cost_star is cost else log_shape(ops, curve, log_star, far)
    log_var = model.log_noise_var + log_variance(ops, curve, star, log_factor)
    if model.log_precision is not None:
        own_var = log_var
        if far is not None:
            own = log_shape(ops, curve, log_star, None)
            own_var = model.log_noise_var + log_variance(ops, curve, own, log_factor)
        mean = shrunk(ops, mean, own_var, model.centre, model.log_precision)
    return Components(
        mean,
        ops.exp(model.log_noise_var + curve.log_slope + shape),
        ops.exp(model.log_noise_var + curve.log_noise + log_factor),
        member_weights(ops, log_var, model.sharpness, curve.log_trust),
        cost,
        cost_star,
    )


def far_of(ops, model, cost_star):  # type: ignore[no-untyped-def]
    """`log_far` from the member that is the process; None if there is none."""
    if model.outside is None:
        return None
    return log_far(ops, model.outside, ops.row_mean(ops.pick(cost_star, model.outside.place)))


def predict(ops, model, x):  # type: ignore[no-untyped-def]
    """Components for inputs in original units."""
    z = standardized(model, x)
    said = [last_layer(ops, layer, layer.features(ops, z)) for layer in model.layers]
    return components(ops, model, joined(ops, model, said), z)


def standardized(model, x):  # type: ignore[no-untyped-def]
    """z: standardised inputs."""
    return (x - model.input_mean) / model.input_scale


def joined(ops, model, said):  # type: ignore[no-untyped-def]
    """Predictions of the last layers in the order of the members; layers of equal shape were evaluated together."""
    whole = [ops.join(part) for part in zip(*said)]  # noqa: B905
    return whole if model.order is None else [part[model.order] for part in whole]


def moments(ops, model, parts):  # type: ignore[no-untyped-def]
    """Mean, epistemic variance and noise variance of the mixture, and the mean affine cost."""
    mean = ops.total(parts.weights * parts.mean)
    between = ops.total(parts.weights * ops.square(parts.mean - mean))
    epistemic = model.widening * ops.total(parts.weights * parts.epistemic) + between
    cost = ops.row_mean(ops.average(parts.cost))
    return mean, epistemic, model.widening * ops.total(parts.weights * parts.noise), cost


def output_cov(ops, correlation, epistemic, noise):  # type: ignore[no-untyped-def]
    """Covariance between the outputs at a point: that of the function plus that of the noise, which are independent."""
    e, n = ops.sqrt(epistemic), ops.sqrt(noise)
    return correlation * (ops.outer(e, e) + ops.outer(n, n))


def stretch(ops, curve, cost, far):  # type: ignore[no-untyped-def]
    """Standard deviation of the calibrated function over that of the posterior at each point, before the factor b."""
    log_cost = ops.log(ops.at_least(cost, TINY))
    return ops.exp(0.5 * (log_shape(ops, curve, log_cost, far) - log_cost))


def outside_fraction(np, references, cost):  # type: ignore[no-untyped-def]
    """How far outside the data a point is: the largest max(0, 1 - inside / u) over the references."""
    fraction = np.zeros((cost.shape[1], 1))
    for places, inside in references:
        u = np.maximum(cost[places].mean(0).mean(-1, keepdims=True), TINY)
        fraction = np.maximum(fraction, 1.0 - np.minimum(u, inside) / u)
    return fraction


def extrapolation(np, references, sample_cost, cost):  # type: ignore[no-untyped-def]
    """Share of training rows that cost less than a point, given their mean costs in ascending order."""
    share = np.searchsorted(sample_cost, cost.mean(-1).mean(0)) / len(sample_cost)
    return np.where(outside_fraction(np, references, cost)[:, 0] > 0, 1.0, share)


def merged(np, mean, weights, fraction):  # type: ignore[no-untyped-def]
    """Means (c, m, q) of a mixture drawn towards their average, and the variance that this takes away from them."""
    centre = (weights * mean).sum(0)
    apart = mean - centre
    return centre + np.sqrt(1.0 - fraction) * apart, fraction * (weights * np.square(apart)).sum(0)


def mixture_quantile(np, ndtr, ndtri, level, mean, std, weights):  # type: ignore[no-untyped-def]
    """Quantile of a mixture of Gaussians (c, m, q) at probability `level`, by Newton's method."""
    each = mean + ndtri(level) * std
    if len(each) == 1:
        return each[0]
    lo, hi = each.min(0), each.max(0)  # the mixture's quantile lies between those of its components
    x, move, narrowest = 0.5 * (lo + hi), hi - lo, std.min(0)
    found = np.zeros(x.shape, dtype=bool)
    for _ in range(200):
        z = (x - mean) / std
        excess = (weights * ndtr(z)).sum(0) - level
        density = (weights * np.exp(-0.5 * np.square(z)) / std).sum(0) * (2 * np.pi) ** -0.5
        lo, hi = np.where(excess < 0, x, lo), np.where(excess < 0, hi, x)
        # Newton's step if it stays inside and is at most half as long as the last one, otherwise half the way
        step = x - excess / np.maximum(density, TINY)
        fine = (step >= lo) & (step <= hi) & (2 * np.abs(step - x) <= move)
        new = np.where(found, x, np.where(fine, step, 0.5 * (lo + hi)))
        x, move = new, np.abs(new - x)
        # the error after Newton's step is of the order of its square
        found = found | (move <= np.maximum(np.where(fine, 1e-8 * narrowest, 0.0), 1e-15 * np.abs(x)))
        if found.all():
            break
    return x


ACTIVATIONS = {
    "elu": lambda ops, x: ops.at_least(x, 0.0) + ops.exp(ops.at_most(x, 0.0)) - 1.0,
    "gelu": lambda ops, x: 0.5 * x * (1.0 + ops.erf(x * 2.0**-0.5)),
    "leaky_relu": lambda ops, x: ops.at_least(x, 0.0) + 0.01 * ops.at_most(x, 0.0),
    "relu": lambda ops, x: ops.at_least(x, 0.0),
    "selu": lambda ops, x: (
        1.0507009873554805 * (ops.at_least(x, 0.0) + 1.6732632423543772 * (ops.exp(ops.at_most(x, 0.0)) - 1.0))
    ),
    "sigmoid": lambda ops, x: ops.sigmoid(x),
    "silu": lambda ops, x: x * ops.sigmoid(x),
    "sin": lambda ops, x: ops.sin(x),
    "softplus": lambda ops, x: ops.logaddexp(x, 0.0 * x),
    "tanh": lambda ops, x: ops.tanh(x),
}
"""The activations of torch, for the other libraries."""


def encoded(ops, encoding, x):  # type: ignore[no-untyped-def]
    """Piecewise-linear encoding: the share of each bin that lies below the input; x holds the input of every bin."""
    return ops.at_most(ops.at_least(x * encoding.slope + encoding.shift, 0.0), 1.0)


def mlp(ops, activation, weights, biases, z):  # type: ignore[no-untyped-def]
    """Features of a fully connected network; without layers, the inputs."""
    a = z
    for weight, bias in zip(weights, biases):  # noqa: B905
        a = ACTIVATIONS[activation](ops, ops.affine(a, weight, bias))
    return a


def features(ops, network, z):  # type: ignore[no-untyped-def]
    """Linear features of a stack of MLPs; z has an axis for the networks."""
    bins = network.bins
    phi = mlp(
        ops,
        network.activation,
        network.weights,
        network.biases,
        z if bins is None else encoded(ops, bins, z[..., bins.column]),
    )
    return phi if network.passed is None else ops.beside(phi, network.passed * z)
