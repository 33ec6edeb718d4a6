"""Generated hostile input: whatever it is, the library gives finite answers, or refuses with an error of its own.

    python tests/fuzz.py cli --runs 1000 --seed 0     command lines on odd tables, names, options and outputs
    python tests/fuzz.py fits --runs 5000             fits to extreme tables, and what is done with the models
    python tests/fuzz.py files --runs 500             model files with a right digest and wrong content

Runs are numbered from the seed on: `--runs 1 --seed NUMBER` repeats one. A run is fine, refused, not finite or raw;
the last two are printed, and make the program exit with 1. The tests run a few of each.
"""

import argparse
import contextlib
import io
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path

import torch
from helpers import NotFinite, small_process

from lastlayer.errors import LastLayerError

KINDS = ("cli", "fits", "files")
Found = tuple[Counter[str], Counter[str], list[str]]


def outcome(run, case) -> tuple[str, str]:
    """("fine" | "refused" | "not finite" | "raw error", what the error says)."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            run(case)
    except LastLayerError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except NotFinite as error:
        return "not finite", " ".join([str(error), *getattr(error, "__notes__", [])])
    except Exception as error:
        steps = traceback.extract_tb(error.__traceback__)
        at = [step for step in steps if "lastlayer" in step.filename] or steps
        notes = " ".join(getattr(error, "__notes__", []))
        text = f"{type(error).__name__}: {str(error)[:300]}"
        return "raw error", f"{text} at {Path(at[-1].filename).name}:{at[-1].lineno} {notes}"
    return "fine", ""


def fuzz(kind: str, runs: int, seed: int, *, show: bool = False, **options) -> Found:
    """Numbers of outcomes, and of refusals by their words; and what went wrong."""
    counts, refusals, wrong = Counter[str](), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder, small_process():
        generator = import_module(f"fuzz_{kind}").Generator(Path(folder), **options)
        for number in range(seed, seed + runs):
            case = generator.case(number)
            found, text = outcome(generator.run, case)
            counts[found] += 1
            refusals[re.sub(r"[0-9][-+.e0-9]*", "#", text)[:60]] += found == "refused"
            if found in ("not finite", "raw error"):
                wrong.append(f"{number}: {found}: {text}\n    {case}")
                print(wrong[-1], flush=True) if show else None
            if show and number % 100 == 99:
                print(f"{number + 1 - seed} runs: {dict(counts)}", flush=True)
    return counts, refusals, wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first run")
    asked, started = parser.parse_args(arguments), time.monotonic()
    torch.set_num_threads(1)
    counts, refusals, wrong = fuzz(asked.kind, asked.runs, asked.seed, show=True)
    print(*(f"{n:6d} {text}" for text, n in refusals.most_common() if n), sep="\n")
    print(f"{asked.runs} runs: {dict(counts)}, {time.monotonic() - started:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
