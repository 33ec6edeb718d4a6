"""Drift detection: a sequential test on standardised residuals with a bounded rate of false alarms."""

import json
import math
from array import array
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray
from scipy.special import ndtri

from lastlayer.errors import InputError

SHIFTS = np.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 0.0, 0.0])
"""Means of x under each alternative."""
SCALES = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 2.5])
"""Standard deviations of x under each alternative."""
KINDS = {
    "up": "targets lie above the predictions",
    "down": "targets lie below the predictions",
    "larger": "errors have become larger than the model predicts",
}
"""Kinds of change, with a description of each."""

PRIOR_ROWS = 20
"""Number of uncorrelated rows that the estimate of the autocorrelation starts with."""
STRONGEST = 0.95
"""Limit of the autocorrelation: a residual fully explained by the previous one would carry no evidence."""


def log_ratios(x: Float[ndarray, " *s"]) -> Float[ndarray, "*s a"]:
    """Log likelihood ratio log f(x) / phi(x) of each alternative N(shift, scale^2)."""
    x = np.asarray(x)[..., None]
    return 0.5 * (np.square(x) - np.square((x - SHIFTS) / SCALES)) - np.log(SCALES)


@dataclass(frozen=True)
class Drift:
    """State of a drift monitor."""

    alarm: bool
    """Whether the evidence has exceeded the threshold."""
    n_rows: int
    """Rows seen since the monitor was started."""
    evidence: float
    """Largest M so far; without drift it exceeds c within n rows with probability at most n / c."""
    threshold: float
    """Evidence at which the alarm is raised."""
    since: int
    """Most likely first row of the change, from 0."""
    output: int
    """The output with the strongest evidence, from 0."""
    kind: str
    """The most likely change: "up", "down" or "larger"."""

    def __str__(self) -> str:
        seen = f"{self.n_rows:,} rows seen, evidence {self.evidence:.3g} of {self.threshold:.3g}"
        if not self.alarm:
            return f"no drift: {seen}; go on"
        words = KINDS[self.kind]
        chance = min(1.0, self.n_rows / self.threshold)
        return (
            f"drift: since about row {self.since:,} {words} (output {self.output}); {seen}, by chance with probability "
            f"{chance:.2g} at most. Fit a new model to rows from there on, or let old rows fade faster; then restart() "
            "the monitor"
        )


class DriftMonitor:
    """Watches standardised residuals, `predictive(X).standardized_residual(y)`, taken before the rows are learned.

    Within n rows, a false alarm has probability n / false_alarm_every at most, as long as rows are exchangeable or
    depend on the previous row alone; longer dependence, such as a season, breaks this. Calibration does not matter.

    Parameters
    ----------
    false_alarm_every : float, default 10_000
        Evidence at which the alarm is raised: false alarms come at most once in this many rows on average.
    reference : array-like of shape (n,) or (n, q), default None
        Residuals of rows held out when the model was fitted, to detect a change from the very first rows.
    n_outputs, random_state : int, default 1 and 0
        Number of outputs, if no `reference` is given, and the seed for breaking ties.
    """

    def __init__(
        self,
        *,
        false_alarm_every: float | int = 10_000,
        reference: Any = None,
        n_outputs: int = 1,
        random_state: int = 0,
    ) -> None:
        if not false_alarm_every > 1:
            raise InputError(f"false_alarm_every={false_alarm_every} must be a number of rows above 1, such as 10_000")
        self.false_alarm_every = float(false_alarm_every)
        self._rng = np.random.default_rng(random_state)
        self._q = n_outputs if reference is None else self._table(reference, None).shape[1]
        self.restart(reference)

    def restart(self, reference: Any = None) -> "DriftMonitor":
        """Reset the monitor, as after fitting a new model.

        Parameters
        ----------
        reference : array-like of shape (n,) or (n, q), default None
            Residuals of rows held out when the model was fitted.
        """
        past = np.empty((0, self._q)) if reference is None else self._table(reference, self._q)
        self._before = [array("d", np.sort(column)) for column in past.T]
        shape = (self._q, len(SHIFTS))
        self._log_M = np.full(shape, -math.inf)
        self._log_cusum, self._reset = np.zeros(shape), np.zeros(shape, dtype=int)
        self._scores = np.zeros((5, self._q))
        """First and last normal score of each output, and sums of scores, squares and products of neighbours."""
        self.drift = Drift(False, 0, 0.0, self.false_alarm_every, 0, 0, "larger")
        """State so far; an alarm stays until `restart`."""
        return self

    def update(self, residuals: Any) -> Drift:
        """Test more residuals, row by row.

        Parameters
        ----------
        residuals : array-like of shape (n,) or (n, q)
            Standardised residuals in the order of the rows.
        """
        for row in self._table(residuals, self._q):
            self._look(row)
        return self.drift

    def _look(self, row: Float[ndarray, " q"]) -> None:
        u = np.array([self._rank(before, float(z)) for before, z in zip(self._before, row, strict=True)])
        x, n = ndtri(u), self.drift.n_rows
        log_f = self._bets(x)
        self._remember(x)
        self._log_M = np.logaddexp(self._log_M, 0.0) + log_f
        fresh = self._log_cusum <= 0  # a change that starts here explains more than one that started earlier
        self._reset[fresh] = n
        self._log_cusum = np.maximum(self._log_cusum, 0.0) + log_f
        top = float(self._log_M.max())
        evidence = math.exp(min(top, 700.0)) * float(np.exp(self._log_M - top).mean())
        self.drift = replace(self.drift, n_rows=n + 1, evidence=max(evidence, self.drift.evidence))
        if self.drift.alarm:
            return
        output, best = np.unravel_index(int(self._log_M.argmax()), self._log_M.shape)
        kind = "up" if SHIFTS[best] > 0 else "down" if SHIFTS[best] < 0 else "larger"
        alarm, since = evidence >= self.false_alarm_every, int(self._reset[output, best])
        self.drift = replace(self.drift, alarm=alarm, since=since, output=int(output), kind=kind)

    def _bets(self, x: Float[ndarray, " q"]) -> Float[ndarray, "q a"]:
        """Log ratio of f to the largest density of exchangeable or dependent rows at x, given the previous scores."""
        r, last, n = self._autocorrelation(), self._scores[1], self.drift.n_rows
        log_p = lambda r: -0.5 * (np.square(x - r * last) / (1 - np.square(r)) + np.log1p(-np.square(r)))
        error = 1 / math.sqrt(n + PRIOR_ROWS)
        likely = [log_p((r + step).clip(-STRONGEST, STRONGEST)) for step in (-error, 0.0, error)]
        penalty = np.maximum(np.max(likely, 0), log_p(0 * r)) - likely[1]
        return log_ratios((x - r * last) / np.sqrt(1 - np.square(r))) - penalty[:, None]

    def _autocorrelation(self) -> Float[ndarray, " q"]:
        """Autocorrelation of each output's scores around their mean, over the rows seen so far."""
        n, (first, last, total, squares, products) = self.drift.n_rows, self._scores
        mean = total / max(n, 1)
        cov = products - mean * (2 * total - first - last) + max(n - 1, 0) * np.square(mean)
        r: ndarray = cov / (squares - n * np.square(mean) + PRIOR_ROWS)
        return r.clip(-STRONGEST, STRONGEST)

    def _remember(self, x: Float[ndarray, " q"]) -> None:
        first, last, *sums = self._scores if self.drift.n_rows else (x, *self._scores[1:])
        self._scores = np.array([first, x, *np.add(sums, [x, np.square(x), x * last])])

    def _rank(self, before: "array[float]", z: float) -> float:
        """Randomised rank of z, uniform on (0, 1) if z and the earlier values are exchangeable; z is added to them."""
        below, ties = bisect_left(before, z), bisect_right(before, z) - bisect_left(before, z) + 1
        insort(before, z)
        chance = max(self._rng.random(), 1e-12)
        return (below + chance * ties) / len(before)

    def _table(self, residuals: Any, q: int | None) -> Float[ndarray, "n q"]:
        table = np.asarray(residuals, dtype=float)
        table = table.reshape(-1, 1) if table.ndim < 2 else table
        if table.ndim != 2 or q not in (None, table.shape[1]) or not np.isfinite(table).all():
            raise InputError(
                f"residuals of shape {table.shape} with {int((~np.isfinite(table)).sum())} values that are not finite: "
                f"give finite standardised residuals of shape (n, {'q' if q is None else q}), or set n_outputs"
            )
        return table


@dataclass(frozen=True)
class SavedMonitor:
    """What a model file holds of a monitor."""

    false_alarm_every: float
    random: str
    before: tuple[Float[ndarray, " n"], ...]
    log_M: Float[ndarray, "q a"]
    log_cusum: Float[ndarray, "q a"]
    reset: Int64[ndarray, "q a"]
    scores: Float[ndarray, "5 q"]
    drift: Drift

    @classmethod
    def of(cls, monitor: DriftMonitor) -> "SavedMonitor":
        random, before = json.dumps(monitor._rng.bit_generator.state), tuple(map(np.array, monitor._before))
        sums = monitor._log_M, monitor._log_cusum, monitor._reset, monitor._scores
        return cls(monitor.false_alarm_every, random, before, *sums, monitor.drift)

    def restored(self) -> DriftMonitor:
        """Inverse of `of`; raises ValueError if the parts are inconsistent."""
        q, n = self.log_M.shape
        if n != len(SHIFTS) or len(self.before) != q or (self.log_M == math.inf).any():
            raise ValueError(f"evidence of shape {(q, n)} does not match {len(SHIFTS)} alternatives, or is infinite")
        if any((np.diff(column) < 0).any() for column in self.before):
            raise ValueError("earlier residuals are not in ascending order")
        if self.drift.kind not in KINDS or not 0 <= self.drift.output < q:
            raise ValueError(f"drift is {self.drift!r}")
        monitor = DriftMonitor(false_alarm_every=self.false_alarm_every, n_outputs=q)
        monitor._rng.bit_generator.state = json.loads(self.random)
        monitor._before = [array("d", column) for column in self.before]
        monitor._log_M, monitor._log_cusum = self.log_M, self.log_cusum
        monitor._reset, monitor._scores, monitor.drift = self.reset, self.scores, self.drift
        return monitor
