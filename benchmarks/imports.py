"""What importing lastlayer adds to importing torch: processor seconds of fresh processes, in turns.

`import lastlayer` brings nothing with it until a name is asked for; that is the line with a target. The other lines say
what the first use of the mathematics and of the estimator brings, the latter mostly scikit-learn.
"""

import resource
import subprocess
import sys

from benchmarks.timing import Timing, describe_machine

ALLOWED = 1.2
"""Importing torch and lastlayer over importing torch."""
PROGRAMS = {
    "torch": "import torch",
    "torch, lastlayer": "import torch, lastlayer",
    "torch, the mathematics": "import torch, lastlayer.evidence, lastlayer.posterior, lastlayer.extrapolation",
    "torch, scikit-learn": "import torch, sklearn.base",
    "torch, BLLRegressor": "import torch, lastlayer; lastlayer.BLLRegressor",
}


def processor_seconds(program: str) -> float:
    """Of a fresh process, which has its files in the cache of the machine already."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(repeats: int = 7) -> int:
    print(describe_machine())
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for turn in range(repeats + 1):
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
    print(f"importing torch and lastlayer over importing torch: {ratio:.3f}, at most {ALLOWED:g} {verdict}")
    return int(ratio > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
