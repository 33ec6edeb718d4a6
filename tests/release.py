"""What a release must pass besides the tests: `make release` runs both parts.

    python tests/release.py ready [--tag v0.1.0]    clean tree; version, changelog and citation agree
    python tests/release.py built dist              wheel and sdist: their files, metadata, classifiers

Prints every problem, with what to do about it, and exits with 1 if there is one.
"""

import argparse
import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata
from trove_classifiers import classifiers as known_classifiers

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".typed", ".html"}


def version_of(root: Path) -> str:
    return _found(r'^__version__ = "(.*)"$', root / "src" / "lastlayer" / "__init__.py")


def ready(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """Problems of the working tree."""
    problems = []
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    if changed:
        problems.append(f"the tree is not clean: commit or remove\n{changed.rstrip()}")
    version, changelog, citation = version_of(root), root / "CHANGELOG.md", root / "CITATION.cff"
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        problems.append(f"{version} in src/lastlayer/__init__.py is no version to release: drop .dev and local parts")
    unreleased, *released = re.split(r"^## ", changelog.read_text(), flags=re.M)[1:] or [""]
    if unreleased.split("\n")[0] != "Unreleased":
        problems.append("CHANGELOG.md has no section Unreleased above the others: add an empty one")
    elif unreleased.strip() != "Unreleased":
        problems.append(f"CHANGELOG.md has lines under Unreleased: move them into the section {version}")
    newest, _, date = released[0].split("\n")[0].partition(" - ") if released else ("", "", "")
    if newest != version:
        problems.append(f"the newest section of CHANGELOG.md is {newest or 'missing'}: it must be {version}")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        problems.append(f"the section {newest} of CHANGELOG.md has the date {date!r}: write it as 2026-11-18")
    if (cited := _found(r"^version: (.*)$", citation)) != version:
        problems.append(f"CITATION.cff has version {cited}: it must be {version}")
    if (cited := _found(r'^date-released: "(.*)"$', citation)) != date:
        problems.append(f"CITATION.cff has date-released {cited}: CHANGELOG.md has {date}")
    if tag not in (None, f"v{version}"):
        problems.append(f"the tag is {tag}: that of {version} is v{version}")
    return problems


def _found(pattern: str, path: Path) -> str:
    match = re.search(pattern, path.read_text(), flags=re.M)
    return match[1] if match else "missing"


def built(folder: Path, root: Path = ROOT) -> list[str]:
    """Problems of a wheel and an sdist."""
    version = version_of(root)
    wheel, sdist = folder / f"lastlayer-{version}-py3-none-any.whl", folder / f"lastlayer-{version}.tar.gz"
    others = sorted(path.name for path in folder.iterdir() if path not in (wheel, sdist))
    missing = [path.name for path in (wheel, sdist) if not path.exists()]
    if missing or others:
        return [
            f"{folder} must hold {wheel.name} and {sdist.name}, and nothing else: missing {missing}, too many {others}"
        ]
    with zipfile.ZipFile(wheel) as archive:
        info = f"lastlayer-{version}.dist-info"
        problems = _wheel_files(archive.namelist(), info, root)
        problems += _metadata(archive.read(f"{info}/METADATA"), "the wheel")
    with tarfile.open(sdist) as archive:
        stream = archive.extractfile(f"lastlayer-{version}/PKG-INFO")
        assert stream is not None
        problems += _metadata(stream.read(), "the sdist")
    return problems


def _wheel_files(names: list[str], info: str, root: Path) -> list[str]:
    """The wheel is the package and its metadata: no tests, no benchmarks, no code of peers."""
    source = root / "src"
    ours = {p.relative_to(source).as_posix() for p in (source / "lastlayer").rglob("*") if p.suffix in SUFFIXES}
    packed = {name for name in names if not name.startswith(f"{info}/")}
    problems = [f"the wheel holds {name}, which is no file of src/lastlayer" for name in sorted(packed - ours)]
    return problems + [f"the wheel lacks {name}" for name in sorted(ours - packed)]


def _metadata(raw: bytes, what: str) -> list[str]:
    """What an index would refuse: fields by the core metadata's rules, classifiers that it does not know."""
    problems = []
    try:
        metadata = Metadata.from_email(raw, validate=True)
    except ExceptionGroup as group:
        return [f"the metadata of {what}: {error}" for error in group.exceptions]
    unknown = sorted(set(metadata.classifiers or []) - known_classifiers)
    problems += [f"the metadata of {what} have an unknown classifier: {name}" for name in unknown]
    if metadata.description_content_type != "text/markdown" or not (metadata.description or "").strip():
        problems.append(f"the metadata of {what} lack the README as text/markdown")
    for field in ("Summary", "License-Expression", "Requires-Python"):
        if not email.message_from_bytes(raw)[field]:
            problems.append(f"the metadata of {what} lack {field}")
    return problems


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("ready").add_argument("--tag")
    parts.add_parser("built").add_argument("folder", type=Path)
    asked = parser.parse_args(arguments)
    problems = ready(tag=asked.tag) if asked.part == "ready" else built(asked.folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"lastlayer {version_of(ROOT)}: {asked.part}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
