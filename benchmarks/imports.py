"""Import time of lastlayer relative to torch: processor seconds of fresh processes, which take turns.

`import lastlayer` loads nothing until a name is used; this line has a target. The other lines show the cost of first
using the mathematics and the estimator, most of which is scikit-learn for the latter.
"""

import resource
import subprocess
import sys

from benchmarks.runner import options_of
from benchmarks.timing import Timing, describe_machine

ALLOWED = 1.2
"""Allowed ratio of importing torch and lastlayer to importing torch."""
PROGRAMS = {
    "torch": "import torch",
    "torch, lastlayer": "import torch, lastlayer",
    "torch, the mathematics": "import torch, lastlayer as ll; ll.evidence, ll.posterior, ll.extrapolation",
    "torch, scikit-learn": "import torch, sklearn.base",
    "torch, BLLRegressor": "import torch, lastlayer; lastlayer.BLLRegressor",
}


def processor_seconds(program: str) -> float:
    """Processor seconds of a fresh process whose files are already in the disk cache."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: list[str] | None = None) -> int:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args(arguments)
    print(describe_machine())
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for turn in range(asked.repeats + 1):
        for name, program in PROGRAMS.items():
            taken = processor_seconds(program)
            if turn:  # the first turn warms up
                seconds[name].append(taken)
    timings = {name: Timing.of(taken) for name, taken in seconds.items()}
    torch = timings["torch"].median
    for name, timing in timings.items():
        print(f"{name:<24} {timing}  {timing.median / torch:5.2f} times torch alone")
    ratio = timings["torch, lastlayer"].median / torch
    verdict = "PASS" if ratio <= ALLOWED else "short"
    print(f"importing torch and lastlayer / importing torch: {ratio:.3f}, at most {ALLOWED:g} {verdict}")
    return int(ratio > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
