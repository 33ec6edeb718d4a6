"""Docstrings: examples run, and the check of what the reference shows (tests/docstrings.py) is right."""

import doctest
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
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
    """


def bare(x):
    """Return it."""


def silent(): ...


def not_shown(x): ...


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
        """The sum"""

    @property
    def half(self) -> float: ...

    def method(self):
        """Do nothing."""

    def _private(self, x): ...


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

    def __init__(self, width): ...

    def method(self, x): ...


class Inherited(Fields):
    """Only its own members are shown."""

    def method(self): ...
'''
PAGE = """
.. autofunction:: lastlayer_shown.documented
.. autoclass:: lastlayer_shown.Made

.. automodule:: lastlayer_shown
   :members: bare, silent, Fields, gone

.. currentmodule:: lastlayer
.. autoclass:: lastlayer_shown.Half
   :members:
   :exclude-members: a
.. autoclass:: lastlayer_shown.Listed
.. autoclass:: lastlayer_shown.Inherited
   :members: method
"""


@pytest.fixture
def reference(tmp_path, monkeypatch):
    """A page that shows a module, for the check to read."""
    (tmp_path / "lastlayer_shown.py").write_text(SHOWN.lstrip())
    (tmp_path / "page.md").write_text(PAGE.replace("lastlayer_shown", "lastlayer.shown"))
    spec = spec_from_file_location("lastlayer.shown", tmp_path / "lastlayer_shown.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lastlayer.shown", module)
    monkeypatch.setattr(lastlayer, "shown", module, raising=False)
    spec.loader.exec_module(module)
    monkeypatch.setattr(docstrings, "REFERENCE", tmp_path)
    monkeypatch.setattr(docstrings, "ROOT", tmp_path)
    return tmp_path


def test_every_name_of_the_reference_is_there():
    assert [one.name for one in docstrings.shown(docstrings.REFERENCE) if one.value is None] == []


def test_the_check_reads_the_names_of_the_reference_and_no_others(reference):
    found = {
        one.name.removeprefix("lastlayer.shown."): [code for code, _ in docstrings.problems(one)]
        for one in docstrings.shown(reference)
    }
    right = ("documented", "Fields", "Fields.method", "Listed", "Inherited", "Inherited.method")
    wrong = {"Made": ["PR01"], "bare": ["PR01"], "silent": ["GL08"], "Fields.total": ["SS03"], "gone": [""]}
    assert found == {name: [] for name in right} | wrong | {"Half": ["PR01"]}


def test_the_check_lists_by_file_and_fails_where_there_is_something_to_do(reference, capsys):
    assert docstrings.main(["--count", str(reference)]) == 1
    counts = capsys.readouterr().out
    assert "lastlayer_shown.py: 5" in counts
    assert "6 of 12 definitions that the reference shows fail" in counts
    assert docstrings.main([str(reference)]) == 1
    printed = capsys.readouterr().out
    assert "  lastlayer.shown.silent, line 20\n      GL08 The object does not have a docstring" in printed
    (reference / "page.md").write_text(".. autofunction:: lastlayer.shown.documented\n")
    assert docstrings.main([str(reference)]) == 0
