"""The size of the whole: what a first call walks through, lines, and the map of CONTRIBUTING.md beside the tree."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import lines, walk

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lastlayer"
WALK = {
    "default, fit": (250, 36, 135),
    "gaussian, fit": (235, 34, 120),
    "of these, orchestration": (80, 14),
    "gaussian, first predictive": (56, 14, 25),
    "evidence, fit": (158, 25, 82),
}
"""At most so many functions, files and switches."""
LINES = {"src": 25_000, "benchmarks": 6_950}
TESTS_PER_LINE_OF_CODE = 1.35


@pytest.fixture(scope="module")
def walked():
    """In a process of its own: without the checks of shapes, and with nothing loaded before."""
    command = [sys.executable, "-m", "benchmarks.walk", "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("call", WALK)
def test_a_call_walks_through_no_more_code_than_agreed(walked, call):
    found = walked["counts"][call]
    assert all(now <= most for now, most in zip(found, WALK[call], strict=True)), f"{found}, at most {WALK[call]}"


def test_no_module_lies_loose_at_the_top_of_the_package(walked):
    assert walked["loose"] == []


def test_there_are_no_more_lines_than_agreed():
    counted = lines.totals()
    assert {name: counted[name].all for name in LINES if counted[name].all > LINES[name]} == {}
    assert lines.tests_per_code(counted) <= TESTS_PER_LINE_OF_CODE


def test_the_map_has_the_rows_of_the_tree():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    layers = [set(layer.replace("lastlayer.", "").split(" | ")) for layer in layers]
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [set(re.findall(r"`(\w+)", row)) for row in rows] == layers
    tree = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {path.stem for path in PACKAGE.glob("*.py")}
    assert set().union(*layers) == tree - {"__init__", "__main__"} | {"benchmarks"}


def test_what_the_map_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`(\w+(?:/\w+)*\.py)`", text):
        assert (ROOT / path).exists() or (PACKAGE / path).exists(), path
    named = re.findall(r"`(\w+)`(?: and `(\w+)`)? (?:in|of) `(\w+/\w+\.py)`", text)
    assert len(named) > 10
    for first, second, path in named:
        assert {first, second} - {""} <= set(re.findall(r"\w+", (PACKAGE / path).read_text())), (first, second, path)


def test_a_walk_counts_named_functions_of_the_package_and_ways_between_files():
    found = walk.walk(str(ROOT / "benchmarks"), lambda: [walk.rows(), lines.total([]), walk.rows(), (lambda: 0)()])
    assert {name for _, name in found.functions} == {"rows", "total"}
    assert {Path(file).name for file in found.files} == {"walk.py", "lines.py"}
    assert len(found.switches) == 2


def test_lines_are_code_docstrings_or_neither():
    text = '"""Two\nlines."""\n\nx = 1  # code\n# a comment\nx.y = """\na string\n"""\n"""Below a name."""\n'
    assert lines.Lines.of(text) == (4, 3, 9)
