"""Loop over sizes and methods: existing results are reused, impossible cases reported, the rest measured."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.fit.measure import Result, in_a_process, key_of
from benchmarks.fit.methods import unable
from benchmarks.jsonl import Store
from benchmarks.uci.protocol import Method

Measure = Callable[[Method, int, int], Result]
"""Function from (method, rows, threads) to a result."""


@dataclass(frozen=True)
class Outcome:
    """A line of the table: a result, or the reason why there is none."""

    rows: int
    method: str
    result: Result | None = None
    why_not: str = ""
    failed: bool = False
    """Whether the measurement was tried and failed."""

    def __str__(self) -> str:
        if self.result is None:
            return f"not measured: {self.why_not}"
        return f"{self.result.cpu_seconds:,.1f} processor s, {self.result.seconds:,.1f} s"


def run(
    methods: Sequence[Method],
    sizes: Sequence[int],
    store: Store[Result],
    *,
    threads: int,
    limit: float,
    again: bool = False,
    progress: bool = False,
    measure: Measure = in_a_process,
) -> Iterator[Outcome]:
    """Measure size by size, the smallest first, so that methods are compared under similar load.

    A method whose fit took longer than `limit` seconds of wall time is not run with more rows. Failures are not
    written, so the next run tries them again. With `progress`, each measurement is announced.
    """
    taken: list[Result] = []
    for rows, method in product(sorted(sizes), methods):
        if progress:
            print(f"{rows:,} rows, {method.name}: ", end="", flush=True)
        found = None if again else store.results.get(key_of(method, rows, threads))
        if found is not None:
            outcome = Outcome(rows, method.name, found)
        elif why_not := unable(method, rows) or _too_slow(method, taken, limit):
            outcome = Outcome(rows, method.name, why_not=why_not)
        else:
            outcome = _attempt(method, rows, threads, measure)
            if outcome.result is not None:
                store.append(outcome.result)
        if outcome.result is not None:
            taken.append(outcome.result)
        yield outcome


def _attempt(method: Method, rows: int, threads: int, measure: Measure) -> Outcome:
    try:
        return Outcome(rows, method.name, measure(method, rows, threads))
    except Exception as error:  # an error of one method does not stop the others
        return Outcome(rows, method.name, why_not=f"{type(error).__name__}: {error}", failed=True)


def _too_slow(method: Method, taken: Iterable[Result], limit: float) -> str | None:
    over = [r for r in taken if r.method == method.name and r.seconds > limit]
    if not over:
        return None
    return f"{over[-1].seconds:,.0f} s for {over[-1].rows:,} rows, above the limit of {limit:,.0f} s"
