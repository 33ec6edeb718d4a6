"""The wrong formulas of `make mutants` still apply; whether tests catch them is the job of that command."""

from pathlib import Path

from mutants import MUTANTS

TESTS = Path(__file__).parent


def test_none_is_stale():
    """Each changes one place that is there, and names a test file that is there."""
    files = {mutant.file: (TESTS.parent / "src" / "lastlayer" / mutant.file).read_text() for mutant in MUTANTS}
    assert [mutant.name for mutant in MUTANTS if files[mutant.file].count(mutant.old) != 1] == []
    assert [mutant.name for mutant in MUTANTS if not (TESTS / mutant.test.split("::")[0]).exists()] == []
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
