"""The wrong formulas of `make mutants` still apply; whether tests catch them is the job of that command."""

from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant, stale


def test_none_is_stale():
    """Each changes one place that is there, and names a test that is there."""
    assert len(MUTANTS) >= 300
    assert stale(MUTANTS) == []


@pytest.mark.parametrize("text", ["f(a, [b + 1])", "f(\n    a,\n    [b\n     + 1],\n)", "f(a,  [ b + 1 ] )"])
def test_texts_are_found_however_their_lines_are_broken(text):
    source = f"x = 1\ny = {text} + f(a, [b])\n"
    mutant = Mutant("m", "", "f(a, [b + 1])", "f(b)", "test_mutants.py")
    [(_, *place)] = mutant.places({Path("a.py"): source})
    assert mutant.applied(source, *place) == "x = 1\ny = f(b) + f(a, [b])\n"
    assert mutant.places({Path("a.py"): source, Path("b.py"): source})[1:]


def test_rows_that_do_not_apply_are_listed():
    there = "def mean_and_error("
    wrong = [("text that is nowhere", "x"), (f"{there}values", "def ("), (there, there)]
    rows = [Mutant(str(i), "", *words, "test_mutants.py") for i, words in enumerate(wrong)]
    found = stale([*rows, Mutant("t", "", there, "def other(", "test_mutants.py::test_gone")])
    assert [line.split(":")[0] for line in found] == ["0", "1", "2", "t"]
