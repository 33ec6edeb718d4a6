"""Methods of the benchmark, configured as in `benchmarks.uci`, and their limits."""

from dataclasses import replace
from pathlib import Path

from benchmarks.uci.gaussian_processes import EXACT_ROWS
from benchmarks.uci.ours import OURS
from benchmarks.uci.peers import PEERS
from benchmarks.uci.protocol import Method

TARGET = "make bench-fit"
"""Make target that sets up the environment of the peers."""
OWN, EXACT = "lastlayer", "exact GP"
MATRICES = 17
"""Number of m x m matrices that fit and prediction hold at their peak, as measured."""

_UCI = {method.name: method for method in (*OURS, *PEERS)}
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        replace(_UCI["lastlayer, own network"], name=OWN, tuning="BLLRegressor(), untuned"),
        replace(_UCI["Gaussian process"], name=EXACT),
        _UCI["deep ensemble"],
        _UCI["NGBoost"],
        _UCI["CatBoost"],
    )
}


def unable(method: Method, rows: int) -> str | None:
    """Reason why a method cannot be fitted to that many rows, or None."""
    if method.missing():
        return f"needs {', '.join(method.missing())}; {TARGET} installs it"
    need, free = MATRICES * 8 * rows**2 / 1e9, free_memory()
    if method.name == EXACT and (rows > EXACT_ROWS or need > free):
        return f"needs about {need:,.0f} GB of memory, {free:,.0f} GB are free"
    return None


def free_memory() -> float:
    """Memory available without swapping, in GB."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 / 1e9
