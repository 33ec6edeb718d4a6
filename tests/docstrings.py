"""Lists public definitions whose docstrings fail the checks of `[tool.numpydoc_validation]`, file by file.

    python tests/docstrings.py                          all of lastlayer
    python tests/docstrings.py src/lastlayer/online     one folder or file
    python tests/docstrings.py --count                  one line per file

Public are modules, classes, functions, methods and properties of which no part of the dotted name begins with an
underscore. Nothing is imported. Beside what `numpydoc lint` does:

- A property is documented like an attribute: it needs no Returns section.
- A dataclass documents its fields in a Parameters section, all of them and in order, or each by a string below it.
- The parameters of `__init__` are documented by the class.
- Modules that the reference does not describe need a docstring for every public definition, ended by a period; their
  annotations say the rest.

Exits with 1 if anything is listed.
"""

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from numpydoc.hooks.validate_docstrings import AstValidator
from numpydoc.validate import validate

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
CHECKS = frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["numpydoc_validation"]["checks"])
INTERNAL = frozenset({"GL08", "SS03"})
REFERENCE = tuple(
    SRC / "lastlayer" / name
    for name in (
        *("baselines.py", "dynamics", "estimators/attached.py", "estimators/base.py", "estimators/posthoc.py"),
        *("estimators/regressor.py", "evidence.py", "explain", "export/__init__.py", "extrapolation.py", "features.py"),
        *("integrations", "log_prediction.py", "metrics.py", "observe.py", "online/drift.py", "online/memory.py"),
        *("online/model.py", "parameters.py", "parquet.py", "plots.py", "posterior.py", "prediction.py"),
        *(
            "joint_prediction.py",
            "predictor/fitted.py",
            "recursion.py",
            "scorers.py",
            "sources.py",
            "statistics.py",
            "tables/regressor.py",
        ),
        *("calibration/curve.py", "networks/feature_extractor.py", "training/loss.py"),
    )
)
"""What the reference describes: all checks hold there."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Public(NamedTuple):
    """A public definition: its name within the module ("" for the module itself), and the nodes that lead to it."""

    name: str
    path: Path
    nodes: tuple[ast.Module | Definition, ...]

    @property
    def line(self) -> int:
        return getattr(self.nodes[-1], "lineno", 1)


class Checked(AstValidator):
    """numpydoc's rules, with those for properties and dataclasses that the module's docstring names."""

    @property
    def is_function_or_method(self) -> bool:
        return super().is_function_or_method and not decorators(self.node) & {"property", "cached_property"}

    @property
    def type(self) -> str:
        return "module" if self.is_module else "type" if self.is_class else "function"

    @property
    def signature_parameters(self) -> tuple[str, ...]:
        if not (self.is_class and "dataclass" in decorators(self.node)):
            return super().signature_parameters
        fields = dict(fields_of(self.node))
        return tuple(name for name, documented in fields.items() if self.doc_all_parameters or not documented)


def decorators(node: ast.AST) -> set[str]:
    """Last parts of the names of all decorators: "dataclass" for `@dataclasses.dataclass(frozen=True)`."""
    calls = (d.func if isinstance(d, ast.Call) else d for d in getattr(node, "decorator_list", []))
    return {ast.unparse(call).split(".")[-1] for call in calls}


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Public fields of a dataclass that its `__init__` takes, and whether a string below documents each."""
    for i, statement in enumerate(node.body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        name, text = statement.target.id, ast.unparse(statement)
        if name.startswith("_") or "ClassVar" in text or "init=False" in text:
            continue
        below = node.body[i + 1] if i + 1 < len(node.body) else None
        yield name, isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)


def definitions(path: Path) -> Iterator[Public]:
    """The module, and all that is public in it; overloads, setters and deleters are left out."""
    if any(part.startswith("_") and part != "__init__" for part in path.relative_to(SRC).with_suffix("").parts):
        return
    module = ast.parse(path.read_text())
    yield Public("", path, (module,))
    yield from _inside((module,), path)


def _inside(nodes: tuple[ast.Module | Definition, ...], path: Path) -> Iterator[Public]:
    for node in nodes[-1].body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        if decorators(node) & {"overload", "setter", "deleter"}:
            continue
        inner = (*nodes, node)
        yield Public(".".join(n.name for n in inner[1:]), path, inner)
        if isinstance(node, ast.ClassDef):
            yield from _inside(inner, path)


def problems(public: Public) -> list[tuple[str, str]]:
    """Chosen checks that a definition fails, with numpydoc's words for each."""
    *ancestry, node = public.nodes
    found = validate(public.name, Checked, ast_node=node, filename=public.path, ancestry=ancestry)
    described = any(public.path == place or place in public.path.parents for place in REFERENCE)
    return [(code, text) for code, text in found["errors"] if code in (CHECKS if described else INTERNAL)]


def report(paths: list[Path], *, only_counts: bool = False) -> int:
    """Print what fails, and return how many definitions do."""
    failing = total = 0
    for file in [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]:
        found = [(public, problems(public)) for public in definitions(file.resolve())]
        failed = [(public, codes) for public, codes in found if codes]
        total, failing = total + len(found), failing + len(failed)
        if failed:
            print(f"{file.resolve().relative_to(ROOT)}: {len(failed)} of {len(found)}")
        for public, codes in [] if only_counts else failed:
            print(f"  {public.line}: {public.name or 'module'}")
            for code, text in codes:
                print(f"      {code} {text}")
    print(f"{failing} of {total} public definitions fail {', '.join(sorted(CHECKS))}")
    return failing


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[SRC / "lastlayer"], help="files or folders")
    parser.add_argument("--count", action="store_true", help="one line per file")
    asked = parser.parse_args(arguments)
    if missing := [str(path) for path in asked.paths if not path.exists()]:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    return int(report(asked.paths, only_counts=asked.count) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
