"""Table with one line per size and method; costs also as a ratio to lastlayer's at the same size."""

from collections.abc import Sequence

from benchmarks.fit.data import N_INPUTS, ORACLE_CRPS, ORACLE_LPD
from benchmarks.fit.measure import TEST_ROWS, Result
from benchmarks.fit.methods import OWN
from benchmarks.fit.run import Outcome

HEAD = (
    f"{'rows':>8}  {'':<13} {'cpu s':>9} {'wall s':>9} {'cpu ratio':>9} {'LPD':>7} {'CRPS':>7} "
    f"{'us/row':>9} {'us, one':>9}"
)


def table(outcomes: Sequence[Outcome]) -> str:
    """Format machine, lines and the meaning of the columns as text."""
    own = {o.rows: o.result.cpu_seconds for o in outcomes if o.method == OWN and o.result is not None}
    lines = [_heading([o.result for o in outcomes if o.result is not None]), "", HEAD]
    for before, outcome in zip([None, *outcomes], outcomes, strict=False):
        size = f"{outcome.rows:,}" if before is None or before.rows != outcome.rows else ""
        lines.append(f"{size:>8}  {outcome.method:<13} {_cells(outcome, own.get(outcome.rows))}")
    return "\n".join(
        [
            *lines,
            "",
            f"cpu s, wall s: of the fit, tuning included; cpu ratio: to {OWN} at the same size",
            f"LPD (larger is better), CRPS (smaller is better): {TEST_ROWS:,} fresh rows; the true function with its "
            f"noise has {ORACLE_LPD:.3f} and {ORACLE_CRPS:.3f}",
            f"us/row: processor microseconds per row for a prediction of {TEST_ROWS:,} rows; us, one: for a prediction "
            "of one row",
        ]
    )


def _heading(results: Sequence[Result]) -> str:
    if not results:
        return "nothing measured"
    machines = "; ".join(dict.fromkeys(f"{r.machine}, torch {r.versions['torch']}" for r in results))
    threads = ", ".join(str(n) for n in sorted({r.threads for r in results}))
    loads = [r.load for r in results]
    return (
        f"{machines}; {threads} thread(s), load {min(loads):.1f} to {max(loads):.1f} as each began; rows by {N_INPUTS} "
        "columns"
    )


def _cells(outcome: Outcome, own: float | None) -> str:
    r = outcome.result
    if r is None:
        return str(outcome)
    ratio = "-" if own is None else f"{r.cpu_seconds / own:.2f}"
    lpd = "-" if r.scores.lpd is None else f"{r.scores.lpd:.3f}"
    return (
        f"{r.cpu_seconds:9,.1f} {r.seconds:9,.1f} {ratio:>9} {lpd:>7} {r.scores.crps:7.3f} {r.row_us:9,.1f} "
        f"{r.single_us:9,.0f}"
    )
