"""Docstrings: examples run, and the list of those to rewrite (tests/docstrings.py) is right about what it lists."""

import doctest
from importlib import import_module
from pathlib import Path

import docstrings
import pytest

import lastlayer

SOURCE = Path(lastlayer.__file__).parent
WITH_EXAMPLES = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text())
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("name", [dotted(path) for path in WITH_EXAMPLES])
def test_examples_run(name, as_a_user, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = import_module(name)
    assert any(found.examples for found in doctest.DocTestFinder().find(module)), "an example that doctest cannot see"
    assert doctest.testmod(module, optionflags=FLAGS).failed == 0


SHOWN = '''
"""A module."""

from dataclasses import dataclass


def documented(x):
    """Return it.

    Parameters
    ----------
    x : float
        What to return.

    Returns
    -------
    float
        The same.
    """
    return x


def bare(x):
    """Return it."""
    return x


def silent(): ...


def _private(x): ...


@dataclass(frozen=True)
class Fields:
    """Fields with strings below them."""

    a: int
    """One."""
    b: int
    """Two."""
    _c: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.a + self.b


@dataclass
class Half:
    """One field is documented."""

    a: int
    """One."""
    b: int


@dataclass
class Listed:
    """Fields in a section.

    Parameters
    ----------
    b : int
        Two.
    """

    b: int


class Made:
    """Its parameters are nowhere."""

    def __init__(self, width):
        self.width = width
'''


def test_the_list_of_docstrings_to_rewrite(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "SRC", tmp_path)
    monkeypatch.setattr(docstrings, "REFERENCE", (tmp_path,))
    (tmp_path / "module.py").write_text(SHOWN.lstrip())
    found = {
        public.name: [code for code, _ in docstrings.problems(public)]
        for public in docstrings.definitions(tmp_path / "module.py")
    }
    assert found == {
        "": [],
        "documented": [],
        "bare": ["PR01", "RT01"],
        "silent": ["GL08"],
        "Fields": [],
        "Fields.total": [],
        "Half": ["PR01"],
        "Listed": [],
        "Made": ["PR01"],
    }
    (tmp_path / "_hidden.py").write_text("def silent(): ...\n")
    assert not list(docstrings.definitions(tmp_path / "_hidden.py"))


def test_the_list_counts_by_file_and_fails_where_there_is_something_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docstrings, "SRC", tmp_path)
    monkeypatch.setattr(docstrings, "ROOT", tmp_path)
    (tmp_path / "good.py").write_text('"""A module."""\n')
    assert docstrings.main([str(tmp_path)]) == 0
    (tmp_path / "bad.py").write_text('"""A module."""\n\n\ndef silent(): ...\n')
    assert docstrings.main([str(tmp_path)]) == 1
    assert docstrings.main(["--count", str(tmp_path / "bad.py")]) == 1
    out = capsys.readouterr().out
    assert "bad.py: 1 of 2" in out
    assert "  4: silent\n      GL08 The object does not have a docstring" in out
    assert "1 of 3 public definitions fail" in out
