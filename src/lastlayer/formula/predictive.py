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
the form in which calibration fits them. `model` is a `State`, or the module of the same shape. This module imports
only from Python's library, because exported models contain a copy of it.
"""

from collections import namedtuple
from types import SimpleNamespace

TINY = 2.0**-511
"""A positive number whose inverse can be squared without overflow."""
WIDEST = 3.0
"""Largest size of the log width of a Gaussian of the shape head."""


class State(SimpleNamespace):
    """Named numbers of a model, in the arrays of any library: arrays, plain values, other states, and lists of these.

    A model has `input_mean`, `input_scale`, `layers`, the `order` of their members, `curve`, `head`, `outside`,
    `centre`, `noise_cov`, `roots`, `log_noise_var`, `log_precision`, `sharpness`, `widening` and `shape`. A layer
    is a group of members with features of one shape; `network` has the numbers of `features`.
    """

    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        raise AttributeError(f"a state of {', '.join(vars(self))} has no {name}")

    def map(self, convert):  # type: ignore[no-untyped-def]
        """The same state with every array converted."""
        return _walked(self, lambda _, value: convert(value))

    def flat(self):  # type: ignore[no-untyped-def]
        """All arrays by name, and the rest as JSON values, with the names of arrays in their places."""
        arrays = {}
        plain = _walked(self, lambda name, value: arrays.update({name: value}) or {"array": name}, kind=dict)
        return arrays, plain

    @classmethod
    def unflat(cls, arrays, plain):  # type: ignore[no-untyped-def]
        """Inverse of `flat`."""
        if isinstance(plain, list):
            return [cls.unflat(arrays, value) for value in plain]
        if not isinstance(plain, dict):
            return plain
        if "array" in plain:
            return arrays[plain["array"]]
        return cls(**{name: cls.unflat(arrays, value) for name, value in plain.items()})


def _walked(value, at_array, name="", kind=State):  # type: ignore[no-untyped-def]
    if isinstance(value, State):
        within = {key: _walked(part, at_array, f"{name}.{key}", kind) for key, part in vars(value).items()}
        return kind(**within)
    if isinstance(value, list):
        return [_walked(part, at_array, f"{name}.{i}", kind) for i, part in enumerate(value)]
    plain = value is None or isinstance(value, (int, float, str)) or callable(value)
    return value if plain else at_array(name[1:], value)


Components = namedtuple(
    "Components", ("mean", "epistemic", "noise", "weights", "cost", "cost_star", "shape"), defaults=(None,)
)
"""Predictions of the members at each point: `mean`, `epistemic`, `noise` (c, m, q); `weights`, `cost` (c, m, 1).

`shape` (g, m, 3) holds the weights, means and variances of `shaped`; None: the mixture has no shape head."""


def last_layer(ops, layer, phi):  # type: ignore[no-untyped-def]
    """Mean and affine cost for centred features at the alpha in use; if that was tuned, also the cost at alpha*."""
    h = ops.affine(phi, layer.root, layer.shift)
    found = [ops.affine(phi, layer.weights, layer.offset), ops.block_sum(ops.square(h), layer.n_costs)]
    if layer.root_star is None:
        return found
    return [*found, ops.block_sum(ops.square(ops.affine(phi, layer.root_star, layer.shift_star)), layer.n_costs)]


def log_far(ops, outside, cost):  # type: ignore[no-untyped-def]
    """Log of the variance of the process in excess of its variance inside the data, given its affine cost."""
    return outside.log_noise + ops.log(ops.at_least(cost - outside.inside, TINY))


def log_shape(ops, curve, log_cost, far):  # type: ignore[no-untyped-def]
    """log(v^gamma + share far); beyond the calibrated reach, v^gamma is its value there times v over the reach."""
    known = ops.minimum(log_cost, curve.log_reach)
    own = curve.power * known + (log_cost - known)
    return own if far is None else ops.logaddexp(own, curve.log_share + far)


def log_noise_factor(ops, head, z):  # type: ignore[no-untyped-def]
    """Log of the noise variance over its base value, for each output; z is clipped to the range of the data."""
    inside = ops.minimum(ops.maximum(z, head.low), head.high)
    return ops.matmul(ops.tanh(ops.matmul(inside, head.U) + head.u), head.V)


def log_variance(ops, curve, shape, log_factor):  # type: ignore[no-untyped-def]
    """log(a s + b (v^gamma + share far)): the calibrated variance of a target over the noise of the evidence."""
    return ops.logaddexp(curve.log_noise + log_factor, curve.log_slope + shape)


def member_weights(ops, log_var, sharpness, log_trust):  # type: ignore[no-untyped-def]
    """Weights of members: a power of their precision at the point (mean over outputs), times trust in their family."""
    return ops.softmax(log_trust - sharpness * ops.row_mean(log_var))


def shrunk(ops, mean, log_var, centre, log_precision):  # type: ignore[no-untyped-def]
    """Mean of a target with prior N(centre, 1 / precision), predicted as N(mean, var), whose variance stays."""
    return centre + (mean - centre) * ops.sigmoid(-log_precision - log_var)


def components(ops, model, outputs, z):  # type: ignore[no-untyped-def]
    """Calibrate, weight and shrink the predictions of the last layers, noise included.

    Parameters
    ----------
    ops, model, outputs, z : Ops, State, list of array, array
        Operations of the array library, the model, what `last_layer` returns, and the standardised inputs.
    """
    curve, mean, cost, cost_star = model.curve, outputs[0], outputs[1], outputs[-1]
    far = far_of(ops, model, z, cost_star)
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
    weights = member_weights(ops, log_var, model.sharpness, curve.log_trust)
    return Components(
        mean,
        ops.exp(model.log_noise_var + curve.log_slope + shape),
        ops.exp(model.log_noise_var + curve.log_noise + log_factor),
        weights,
        cost,
        cost_star,
        None if model.shape is None else shaped(ops, model, z, mean, log_var, weights, cost_star),
    )


def gaussians(ops, head, z, mean, std):  # type: ignore[no-untyped-def]
    """Log weights, means and standard deviations (m, g) of the Gaussians of a shape head, in standardised units.

    The log weights of those that stay in place start at the mass of the mixture, of this mean and standard deviation.
    """
    outputs = log_noise_factor(ops, head, ops.columns([z, mean, ops.log(std)])) + head.v
    log_weight, centre, log_width = ops.blocks(outputs, 3)
    fixed = 1.0 - head.follows
    unit = head.follows * std + fixed
    width = unit * ops.exp(WIDEST * ops.tanh(log_width / WIDEST))
    spread = ops.square(std) + ops.square(width)
    mass = -0.5 * (ops.square(centre - mean) / spread + ops.log(spread))
    return log_weight + fixed * mass, head.follows * mean + unit * centre, width


def shaped(ops, model, z, mean, log_var, weights, cost_star):  # type: ignore[no-untyped-def]
    """Weights, means and variances (g, m, 3) beside a mixture of one output at alpha*; the first is the mixture."""
    head = model.shape
    centre = ops.total(weights * mean)
    within = model.widening * ops.total(weights * ops.exp(log_var))
    std = ops.sqrt(within + ops.total(weights * ops.square(mean - centre)))
    log_weight, own, width = gaussians(ops, head, z, (centre - model.centre) / head.scale, std / head.scale)
    back = 0.0 * std  # share that the mixture gets back outside the data
    for edge in head.edges:
        cost = sum(ops.row_mean(ops.pick(cost_star, place)) for place in edge.places) / (1.0 * len(edge.places))
        cost = ops.at_least(cost, TINY)
        back = ops.maximum(back, 1.0 - ops.minimum(cost, edge.inside) / cost)
    share = (1.0 - back) * ops.softmax(ops.members(log_weight)) + ops.members(back * head.first)
    return ops.columns(
        [share, ops.members(model.centre + head.scale * own), ops.members(ops.square(head.scale * width))]
    )


def far_of(ops, model, z, cost_star):  # type: ignore[no-untyped-def]
    """`log_far` by the process, which is a member or, where a member was taken out of a mixture, a layer of its own."""
    outside = model.outside
    if outside is None:
        return None
    layer = outside.process
    if layer is not None:
        cost_star = last_layer(ops, layer, centred(ops, layer, z))[-1]
    return log_far(ops, outside, ops.row_mean(ops.pick(cost_star, outside.place)))


def predict(ops, model, x):  # type: ignore[no-untyped-def]
    """Compute the components for inputs in original units.

    Parameters
    ----------
    ops, model, x : Ops, State, array
        Operations of the array library, the model, and the inputs.
    """
    z = standardized(model, x)
    return components(ops, model, last_layers(ops, model, z, last_layer), z)


def predict_mean(ops, model, x):  # type: ignore[no-untyped-def]
    """Mean of the mixture; costs are not computed where they affect neither weights nor shrinkage."""
    if model.log_precision is None and not model.sharpness and model.shape is None:
        mean = lambda ops, layer, phi: [ops.affine(phi, layer.weights, layer.offset)]
        return ops.average(last_layers(ops, model, standardized(model, x), mean)[0])
    parts = predict(ops, model, x)
    return ops.total(parts.weights * parts.mean) if model.shape is None else moments(ops, model, parts)[0]


def standardized(model, x):  # type: ignore[no-untyped-def]
    """z: standardised inputs; ids and inputs of more than two dimensions stay as they are."""
    return x if model.input_mean is None else (x - model.input_mean) / model.input_scale


def last_layers(ops, model, z, evaluate):  # type: ignore[no-untyped-def]
    """Outputs of the last layers in the order of the members; layers of equal shape are evaluated together."""
    found = [
        ops.by_rows(lambda z, layer=layer: evaluate(ops, layer, centred(ops, layer, z)), z, layer)
        for layer in model.layers
    ]
    return joined(ops, model, found)


def joined(ops, model, found):  # type: ignore[no-untyped-def]
    """Outputs of several layers in the order of the members."""
    whole = [ops.join(part) for part in zip(*found)]  # noqa: B905
    return whole if model.order is None else [part[model.order] for part in whole]


def centred(ops, layer, z):  # type: ignore[no-untyped-def]
    """phi: centred linear features of the members of a layer."""
    return features(ops, layer.network, z) - layer.centre


def moments(ops, model, parts):  # type: ignore[no-untyped-def]
    """Mean, epistemic variance and noise variance of the mixture, and the mean affine cost.

    Parameters
    ----------
    ops, model, parts : Ops, State, Components
        Operations of the array library, the model, and the predictions of its members.
    """
    mean = ops.total(parts.weights * parts.mean)
    between = ops.total(parts.weights * ops.square(parts.mean - mean))
    epistemic = model.widening * ops.total(parts.weights * parts.epistemic) + between
    noise, cost = model.widening * ops.total(parts.weights * parts.noise), ops.row_mean(ops.average(parts.cost))
    if parts.shape is None:
        return mean, epistemic, noise, cost
    share, own, var = ops.blocks(parts.shape, 3)
    mean = ops.total(share * own)
    # the variance of the mixture itself is that at the alpha in use
    total = ops.total(share * (var + ops.square(own - mean)))
    total = total + ops.pick(share, 0) * (epistemic + noise - ops.pick(var, 0))
    epistemic = ops.minimum(epistemic, total)
    return mean, epistemic, total - epistemic, cost


def output_cov(ops, correlation, epistemic, noise):  # type: ignore[no-untyped-def]
    """Covariance between the outputs at a point: that of the function plus that of the noise."""
    e, n = ops.sqrt(epistemic), ops.sqrt(noise)
    return correlation * (ops.outer(e, e) + ops.outer(n, n))


def stretch(ops, curve, cost, far):  # type: ignore[no-untyped-def]
    """Standard deviation of the calibrated function over that of the posterior, before the factor b."""
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


def features(ops, network, z):  # type: ignore[no-untyped-def]
    """Linear features of networks of one shape, which are MLPs, or the user's own network."""
    z = z if network.one is None else ops.like(z, network.one)
    a = z if network.bins is None else encoded(ops, network.bins, ops.take(z, network.bins.column))
    phi, activation = a if network.own is None else network.own(a), ops.activation(network.activation)
    for weight, bias in zip(network.weights, network.biases):  # noqa: B905
        phi = ops.affine(phi, weight, bias)
        phi = ACTIVATIONS[network.activation](ops, phi) if activation is None else activation(phi)
    return phi if network.passed is None else ops.beside(phi, network.passed * z)
