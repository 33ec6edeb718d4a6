"""The wrong formulas of `make mutants` still apply; whether tests catch them is the job of that command."""

from pathlib import Path

from mutants import MUTANTS

TESTS = Path(__file__).parent


def test_none_is_stale():
    """Each changes one place that is there, and names a test that is there."""
    files = {mutant.file: (TESTS.parent / mutant.path).read_text() for mutant in MUTANTS}
    assert [mutant.name for mutant in MUTANTS if files[mutant.file].count(mutant.old) != 1] == []
    tests = {mutant.test: mutant.test.partition("::") for mutant in MUTANTS}
    texts = {file: (TESTS / file).read_text() for file, _, _ in tests.values()}
    assert [
        test for test, (file, _, name) in tests.items() if name and f"def {name.split('[')[0]}(" not in texts[file]
    ] == []
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
