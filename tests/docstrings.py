"""Checks the docstrings of what docs/reference shows, and of nothing else, by `[tool.numpydoc_validation]`.

    python tests/docstrings.py                          every failure
    python tests/docstrings.py src/lastlayer/online     those of one folder or file
    python tests/docstrings.py --count                  one line per file

Shown is what the directives of autodoc on these pages name. A property is documented like an attribute. A dataclass
documents its fields in a Parameters section, all of them and in order, or each by a string below it. One returned value
is described by the summary. Exits with 1 if anything is listed.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from numpydoc.docscrape import get_doc_object
from numpydoc.validate import Validator, validate

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
CHECKS = frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["numpydoc_validation"]["checks"])
DIRECTIVE = re.compile(r"^\.\. auto(?:module|class|function|exception):: (\S+)((?:\n +:.*)*)", re.MULTILINE)
OPTION = re.compile(r":([\w-]+):(.*)")


class Shown(NamedTuple):
    """What a page shows: its dotted name, and the class, function or property."""

    name: str
    value: Any

    @property
    def code(self) -> Any:
        """The class, or the function behind a property, a class method or a decorator."""
        for inner in ("fget", "func", "__func__"):
            if found := getattr(self.value, inner, None):
                return inspect.unwrap(found)
        instance = not (inspect.isclass(self.value) or inspect.isroutine(self.value) or self.value is None)
        return type(self.value) if instance else inspect.unwrap(self.value)


class Checked(Validator):
    """numpydoc's rules, with those for returned values and dataclasses that the module's docstring names."""

    method_returns_something = False

    def __init__(self, obj_name: Any) -> None:
        super().__init__(get_doc_object(obj_name))

    @property
    def signature_parameters(self) -> tuple[str, ...]:
        if not inspect.isclass(self.obj):
            return super().signature_parameters
        if "__dataclass_fields__" not in vars(self.obj):  # an inherited __init__ is documented where it stands
            init = vars(self.obj).get("__init__")
            return Checked(init).signature_parameters if inspect.isfunction(init) else ()
        below = set().union(*map(documented_below, self.obj.__mro__))
        fields = [field.name for field in dataclasses.fields(self.obj) if field.init]
        return tuple(
            name for name in fields if not name.startswith("_") and (self.doc_all_parameters or name not in below)
        )


def documented_below(cls: type) -> set[str]:
    """Fields of a dataclass that have a string below them."""
    if "__dataclass_fields__" not in vars(cls):
        return set()
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        ast.unparse(field.target)
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def resolved(name: str) -> Any:
    """The object of a dotted name; None if there is none."""
    try:
        return Validator._load_obj(name)
    except (AttributeError, ImportError):
        return None


def shown(folder: Path) -> Iterator[Shown]:
    """All that the directives of autodoc on the pages of a folder show."""
    for page in sorted(folder.glob("*.md")):
        for name, text in DIRECTIVE.findall(page.read_text()):
            options = {key: words.replace(",", " ").split() for key, words in OPTION.findall(text)}
            name = name if name.startswith("lastlayer.") else f"lastlayer.{name}"
            value = resolved(name)
            if not inspect.ismodule(value):
                yield from _with_members(name, value, options)
                continue
            for member in options.get("members") or value.__all__:
                path = f"{name}.{member}"
                yield from _with_members(path, resolved(path), {"members": []})


def _with_members(name: str, value: Any, options: dict[str, list[str]]) -> Iterator[Shown]:
    if not inspect.ismodule(value):
        yield Shown(name, value)
    if inspect.isclass(value) and "members" in options:
        for member in options["members"] or _public(value):
            if member not in (*options.get("exclude-members", []), *inspect.get_annotations(value)):
                yield Shown(f"{name}.{member}", inspect.getattr_static(value, member, None))


def _public(cls: type) -> list[str]:
    """Public methods that a class defines, and those of its properties that have a docstring."""
    public = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    methods = (FunctionType, classmethod, staticmethod)
    properties = (property, cached_property)
    return [
        name
        for name, value in public.items()
        if isinstance(value, methods) or (isinstance(value, properties) and value.__doc__)
    ]


def problems(each: Shown) -> list[tuple[str, str]]:
    """Chosen checks that a docstring fails, with numpydoc's words for each."""
    if each.value is None:
        return [("", "does not exist")]
    text = each.value.__doc__
    if isinstance(each.value, property | cached_property):
        words = text.strip().split("\n\n")[0] if text else ""
        return [] if words.endswith(".") else [("SS03", "Summary does not end with a period")]
    if text is None and inspect.getdoc(each.code):
        return []  # an override that behaves as what it overrides
    return [(code, words) for code, words in validate(each.code, Checked)["errors"] if code in CHECKS]


def report(paths: list[Path], *, only_counts: bool = False) -> int:
    """Print what fails below the paths, and return how many definitions do."""
    found, total = defaultdict[Path, list[Shown]](list), 0
    for each in {one.code or one.name: one for one in shown(REFERENCE)}.values():
        file = REFERENCE if each.value is None else Path(inspect.getsourcefile(each.code)).resolve()
        if each.value is None or any(path.resolve() in (file, *file.parents) for path in paths):
            total += 1
            found[file] += [each] if problems(each) else []
    for file, failed in found.items():
        if failed:
            print(f"{file.relative_to(ROOT)}: {len(failed)}")
        for each in [] if only_counts else failed:
            print(f"  {each.name}" + (f", line {inspect.getsourcelines(each.code)[1]}" if each.code else ""))
            for code, words in problems(each):
                print(f"      {code} {words}")
    failing = sum(map(len, found.values()))
    print(f"{failing} of {total} definitions that the reference shows fail {', '.join(sorted(CHECKS))}")
    return failing


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "src"], help="files or folders")
    parser.add_argument("--count", action="store_true", help="one line per file")
    asked = parser.parse_args(arguments)
    if missing := [str(path) for path in asked.paths if not path.exists()]:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    return int(report(asked.paths, only_counts=asked.count) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
