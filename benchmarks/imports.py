"""Import time of lastlayer relative to torch: processor seconds of fresh processes, which take turns.

`import lastlayer` loads nothing until a name is used; this line has a target. The other lines show the cost of first
using the mathematics and the estimator, most of which is scikit-learn for the latter.
"""

import resource
import subprocess
import sys
from functools import partial

from benchmarks.runner import options_of
from benchmarks.timing import describe_machine, time_in_turns

ALLOWED = 1.2  # allowed ratio of importing torch and lastlayer to importing torch
PROGRAMS = {
    "torch": "import torch",
    "torch, lastlayer": "import torch, lastlayer",
    "torch, the mathematics": "import torch, lastlayer as ll; ll.evidence, ll.posterior, ll.extrapolation",
    "torch, scikit-learn": "import torch, sklearn.base",
    "torch, BLLRegressor": "import torch, lastlayer; lastlayer.BLLRegressor",
}


def run(program: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def of_children() -> float:
    """Processor seconds of all processes that have been started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str] | None = None) -> int:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args(arguments)
    print(describe_machine())
    sides = [partial(run, program) for program in PROGRAMS.values()]
    timings = dict(zip(PROGRAMS, time_in_turns(*sides, repeats=asked.repeats, clock=of_children), strict=True))
    torch = timings["torch"].median
    for name, timing in timings.items():
        print(f"{name:<24} {timing}  {timing.median / torch:5.2f} times torch alone")
    ratio = timings["torch, lastlayer"].median / torch
    verdict = "PASS" if ratio <= ALLOWED else "short"
    print(f"importing torch and lastlayer / importing torch: {ratio:.3f}, at most {ALLOWED:g} {verdict}")
    return int(ratio > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
