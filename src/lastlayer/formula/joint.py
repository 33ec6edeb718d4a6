"""The function of a fitted model at several points jointly: a Gaussian that is linear in standard normal numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lastlayer.formula.predictive import Components, centred, components, far_of, joined, last_layer, stretch

Array = Any
"""An array of the library whose operations `ops` holds."""


@dataclass(frozen=True, eq=False)
class Functions:
    """f = mean + sum_t rows_t E_t outputs_t' + dense e at m points; all entries of E_t and e are standard normal.

    A mixture is replaced by the Gaussian with its mean and covariance.
    """

    ops: Any
    parts: Components
    """Predictions of the members at each point alone."""
    mean: Array
    """Mean of the mixture, (m, q)."""
    terms: list[tuple[Array, Array]]
    """Rows (m, r) and outputs (q, s) of each member; where each output has its own rows, of each member and output."""
    dense: list[Array]
    """One array (m, r) per output, with one e for all: deviations of the members from the mean."""

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        return len(self.terms[0][1]) if self.terms else len(self.dense)

    def map(self, convert: Callable[[Array], Array], *, outputs: Callable[[Array], Array] | None = None) -> "Functions":
        """Convert all arrays, of points and of `outputs`: None leaves the latter, where the axis of points changes."""
        return replace(
            self,
            parts=Components(*map(convert, self.parts[:-1])),
            mean=convert(self.mean),
            terms=[(convert(H), own if outputs is None else outputs(own)) for H, own in self.terms],
            dense=[convert(D) for D in self.dense],
        )

    def output(self, j: int) -> "Functions":
        """One output alone, which takes fewer random numbers."""
        scales = [(H, (outputs[j : j + 1] ** 2).sum(-1)[:, None] ** 0.5) for H, outputs in self.terms]
        terms = [(H, scale) for H, scale in scales if scale[0, 0] > 0]
        return replace(self, mean=self._mean_of(j), terms=terms, dense=self.dense[j : j + 1])

    def linear(self, j: int) -> Array:
        """[mean, G] (m, 1 + r) of output j, which is mean + G e with the same e for all outputs."""
        columns = [outputs[j, k] * H for H, outputs in self.terms for k in range(outputs.shape[1])]
        return self.ops.columns([self._mean_of(j), *columns, *self.dense[j : j + 1]])

    def cov(self) -> Array:
        """Covariance of all points and outputs, (mq, mq), ordered by output."""
        cov = sum(self.ops.kron(_gram(outputs), _gram(H)) for H, outputs in self.terms)
        return cov + _gram(self.ops.join(self.dense)) if self.dense else cov

    def cov_of_outputs(self) -> list[Array]:
        """Covariance between the points, (m, m), of each output."""
        terms = [(_gram(H), (outputs**2).sum(-1)) for H, outputs in self.terms]
        between = list(map(_gram, self.dense)) or [0.0] * self.n_outputs
        return [sum(scale[j] * K for K, scale in terms) + between[j] for j in range(self.n_outputs)]

    def sample(self, n: int, normal: Callable[[tuple[int, ...]], Array]) -> Array:
        """Draw n functions, (n, m, q), given a source of arrays of standard normal numbers."""
        draws = self.mean[None]
        for H, outputs in self.terms:
            draws = draws + H @ normal((n, H.shape[-1], outputs.shape[-1])) @ outputs.swapaxes(-1, -2)
        if self.dense:
            e = normal((n, self.dense[0].shape[-1]))
            draws = draws + self.ops.stack([e @ D.swapaxes(-1, -2) for D in self.dense])
        return draws

    def at_points(self, E: Array) -> Array:
        """Evaluate each point with its own standard normal numbers E (m, r, q), as if it had a draw to itself."""
        value, first = self.mean, 0
        for H, outputs in self.terms:
            own = E[:, first : (first := first + H.shape[-1]), : outputs.shape[-1]]
            value = value + (H[:, :, None] * own).sum(1) @ outputs.swapaxes(-1, -2)
        if self.dense:
            value = value + self.ops.stack([(D * E[:, first : first + D.shape[-1], 0]).sum(1) for D in self.dense])
        return value

    def _mean_of(self, j: int) -> Array:
        return self.ops.blocks(self.mean, self.n_outputs)[j]


def stretched(ops, model, z):  # type: ignore[no-untyped-def]
    """Components, and for each member its whitened features scaled to the calibrated variance: one array, or one per
    output where outputs have different costs."""
    pairs = [(layer, centred(ops, layer, z)) for layer in model.layers]
    parts = components(ops, model, joined(ops, model, [last_layer(ops, *pair) for pair in pairs]), z)
    far = far_of(ops, model, z, parts.cost_star)
    root = model.widening**0.5 * stretch(ops, model.curve, parts.cost, far)
    whitened: dict[int, tuple[Array, int]] = {}
    for layer, phi in pairs:
        own = ops.affine(phi, layer.root, layer.shift)
        whitened |= {place: (ops.pick(own, i), layer.n_costs) for i, place in enumerate(layer.places)}
    found = []
    for i in range(len(whitened)):
        (H, n), scale = whitened[i], ops.pick(root, i)
        found.append([a * b for a, b in zip(ops.blocks(scale, n), ops.blocks(H, n), strict=True)])
    return parts, found


def functions(ops, model, z):  # type: ignore[no-untyped-def]
    """The function at standardised inputs, jointly over points and outputs."""
    parts, members = stretched(ops, model, z)
    mean = ops.total(parts.weights * parts.mean)
    dense = []
    if len(members) > 1:
        dense = [[apart] for apart in ops.by_output(ops.sqrt(parts.weights) * (parts.mean - mean))]
    terms = []
    for i, (blocks, root) in enumerate(zip(members, model.roots, strict=True)):
        own = [ops.sqrt(ops.pick(parts.weights, i)) * H for H in blocks]
        if len(own) == 1:
            terms.append((own[0], root))
        else:
            terms += [(H, root[:, j : j + 1]) for j, H in enumerate(own)]
    return Functions(ops, parts, mean, terms, [ops.columns(columns) for columns in dense])


def _gram(H: Array) -> Array:
    return H @ H.swapaxes(-1, -2)
