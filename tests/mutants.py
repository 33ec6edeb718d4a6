"""Wrong formulas, each of which some test must catch: `python tests/mutants.py`, or with NAMES for some.

Each row of mutants.txt changes one place of a copy of the package, and runs there the tests that should notice. Places
are found by their text alone, however its lines are broken: `--check` lists, without running a test, the rows whose
text is not there exactly once, that change nothing or leave no valid Python, or whose test is not there.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".txt")
SOURCES = ("src/lastlayer", "benchmarks")
LIMIT_S = 600

CONFTEST = """\
import hypothesis

def pytest_sessionstart():  # a failure is enough: no time goes into making it small
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("first failure", hypothesis.settings(), phases=phases)
    hypothesis.settings.load_profile("first failure")

def pytest_terminal_summary(terminalreporter):
    import lastlayer
    terminalreporter.write_line(f"package: {lastlayer.__file__}")
"""


@dataclass(frozen=True)
class Mutant:
    """One wrong formula."""

    name: str
    start: str  # text to begin at, which occurs exactly once; empty: that of the formula
    old: str
    new: str
    test: str  # the test file, or the one test in it, that should notice

    def places(self, texts: Mapping[Path, str]) -> list[tuple[Path, int, int]]:
        """Where the formula stands: file, begin and end."""
        mark, old = spaced(self.start or self.old), spaced(self.old)
        marks = [(path, found.start()) for path, text in texts.items() for found in mark.finditer(text)]
        return [(path, *found.span()) for path, at in marks if (found := old.search(texts[path], at))]

    def applied(self, text: str, begin: int, end: int) -> str:
        return text[:begin] + self.new + text[end:]


@cache
def spaced(text: str) -> re.Pattern[str]:
    """The text with any white space where it has some, and inside brackets, where a last comma may stand too."""
    pattern = r"\s+".join(map(re.escape, text.split()))
    pattern = re.sub(r"(\\[(\[{])(\\s\+)?", r"\1\\s*", pattern)
    return re.compile(re.sub(r"(\\s[+*])?(\\[)\]}])", r",?\\s*\2", pattern))


def read_table(text: str) -> list[Mutant]:
    """Rows `name  old  =>  new`, or `name  start ... old  =>  new`, indented below the name of their test."""
    mutants, test = [], ""
    for line in text.splitlines():
        if line[:1] != " ":
            test = line
            continue
        name, _, formula = line.strip().partition("  ")
        old, _, new = (part.strip() for part in formula.partition("=>"))
        start, _, old = old.rpartition(" ... ")
        mutants.append(Mutant(name, start, old, new, test))
    return mutants


MUTANTS = read_table(TABLE.read_text())


def sources(root: Path) -> dict[Path, str]:
    """Texts that mutants change, by their path from a root."""
    return {path.relative_to(root): path.read_text() for part in SOURCES for path in (root / part).rglob("*.py")}


def stale(mutants: list[Mutant]) -> list[str]:
    """Say of every row what is wrong with it."""
    texts, wrong = sources(ROOT), []
    for mutant in mutants:
        if len(places := mutant.places(texts)) == 1:
            [(path, *span)] = places
            changed = mutant.applied(texts[path], *span)
            if changed == texts[path] or not is_python(changed):
                wrong.append(f"{mutant.name}: would change nothing in {path}, or leave no valid Python")
        else:
            where = ", ".join(f"{path}:{texts[path].count(chr(10), 0, at) + 1}" for path, at, _ in places) or "nowhere"
            wrong.append(f"{mutant.name}: {mutant.start or mutant.old!r} must be there once, and is {where}")
        file, _, test = mutant.test.partition("::")
        path = ROOT / "tests" / file
        if not path.is_file() or (test and f"def {test.split('[')[0]}(" not in path.read_text()):
            wrong.append(f"{mutant.name}: there is no test {mutant.test}")
    names = [mutant.name for mutant in mutants]
    return wrong + [f"{name}: two rows have this name" for name in sorted({n for n in names if names.count(n) > 1})]


def is_python(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def run_tests(package: Path, tests: list[str]) -> tuple[bool, str]:
    """Whether the tests pass on a copy of the repository, and what pytest printed."""
    variables = {"PYTHONPATH": str(package / "src"), "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "250"}  # kept bytecode saves time, wide lines the reason
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{t}" for t in tests)]
    try:
        done = subprocess.run(
            command, cwd=package, env={**os.environ, **variables}, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {LIMIT_S} s"
    if f"package: {package / 'src' / 'lastlayer'}{os.sep}" not in done.stdout:
        return False, f"not the copy in {package} was tested:\n{indent(done.stdout + done.stderr, '    ')}"
    return done.returncode == 0, done.stdout


def verdict(mutant: Mutant, original: Path, place: Path) -> tuple[bool, str]:
    """Whether the mutant is caught, and by which test."""
    texts = sources(original)
    if len(places := mutant.places(texts)) != 1:
        return False, f"STALE: its text is in {len(places)} places"
    [(path, *span)] = places
    copy = place / mutant.name
    shutil.copytree(original, copy)
    file = copy / path
    file.write_text(mutant.applied(texts[path], *span))
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):  # written by the first run, kept to save time
        compiled.unlink()
    passed, output = run_tests(copy, [mutant.test])
    shutil.rmtree(copy)
    if passed:
        return False, f"SURVIVED {mutant.test}"
    failed = re.search(r"^FAILED tests/(\S+)( - [\w.]+)?", output, re.MULTILINE)
    if failed is None:
        return False, f"BROKEN: no test failed, but {output}"
    return True, f"caught by {failed[1]}{failed[2] or ''}"


def main(names: list[str]) -> int:
    if names == ["--check"]:
        wrong = stale(MUTANTS)
        print("\n".join([*wrong, f"{len(MUTANTS)} mutants, {len(wrong)} out of date"]))
        return int(bool(wrong))
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"no such mutant: {', '.join(sorted(unknown))}; there are {', '.join(m.name for m in MUTANTS)}")
        return 1
    every = {mutant.test for mutant in chosen}
    needed = sorted(test for test in every if "::" not in test or test.split("::")[0] not in every)
    with tempfile.TemporaryDirectory() as folder:
        original = Path(folder).resolve() / "original"
        for part in ("src", "tests", "examples", "benchmarks"):
            shutil.copytree(ROOT / part, original / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", original)
        (original / "conftest.py").write_text(CONFTEST)
        start = time.perf_counter()
        passed, output = run_tests(original, needed)
        print(
            f"{'(the formulas as they are)':32} {time.perf_counter() - start:5.1f} s  {'pass' if passed else 'FAIL'}",
            flush=True,
        )
        if not passed:
            print(f"{output}\n0 passed, {len(chosen)} failed")
            return 1
        caught = 0
        for mutant in chosen:
            start = time.perf_counter()
            good, words = verdict(mutant, original, original.parent)
            caught += good
            print(f"{mutant.name:32} {time.perf_counter() - start:5.1f} s  {words}", flush=True)
    print(f"{caught} passed, {len(chosen) - caught} failed")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
