"""Lines of source, tests and benchmarks: code, docstrings, all, and lines of test per line of code.

    python -m benchmarks.lines            one line per folder
    python -m benchmarks.lines --json     totals as one JSON object

Code is what is neither blank, nor a comment, nor a docstring or another string that stands alone.
"""

import argparse
import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Lines(NamedTuple):
    """Numbers of lines."""

    code: int = 0
    docstrings: int = 0
    all: int = 0

    @classmethod
    def of(cls, text: str) -> "Lines":
        docstrings = {
            number
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        lines = dict(enumerate(text.splitlines(), 1))
        code = sum(
            bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
            for number, line in lines.items()
        )
        return cls(code, len(docstrings), len(lines))


def total(files: Iterable[Path]) -> Lines:
    counted = [Lines.of(path.read_text()) for path in files]
    return Lines(*map(sum, zip(*counted, strict=True))) if counted else Lines()


def totals(root: Path = ROOT) -> dict[str, Lines]:
    return {name: total((root / name).rglob("*.py")) for name in ("src", "tests", "benchmarks")}


def tests_per_code(counted: dict[str, Lines]) -> float:
    return counted["tests"].all / counted["src"].code


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the totals as one JSON object")
    options = parser.parse_args(arguments)
    counted = totals()
    ratio = tests_per_code(counted)
    if options.json:
        print(json.dumps({name: each._asdict() for name, each in counted.items()} | {"tests per code": ratio}))
        return
    package = ROOT / "src" / "lastlayer"
    each = {path.name: total(path.rglob("*.py")) for path in package.iterdir() if path.is_dir()}
    each["at the top"] = total(package.glob("*.py"))
    print(f"{'':<16}{'code':>8}{'docstrings':>12}{'all':>8}")
    for name, lines in [*sorted(each.items(), key=lambda item: -item[1].all), *counted.items()]:
        print(f"{name:<16}{lines.code:>8}{lines.docstrings:>12}{lines.all:>8}")
    print(f"lines of test per line of code in src: {ratio:.2f}")


if __name__ == "__main__":
    main()
