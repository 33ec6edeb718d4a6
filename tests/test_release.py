"""What `make release` refuses."""

import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import lowest
import pytest
import release
from packaging.requirements import Requirement
from packaging.version import Version

GOOD = {
    "src/lastlayer/__init__.py": '__version__ = "1.2.0"\n',
    "src/lastlayer/py.typed": "",
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2030-01-31\n\n### Added\n- This.\n",
    "CITATION.cff": 'version: 1.2.0\ndate-released: "2030-01-31"\n',
}
METADATA = """Metadata-Version: 2.4
Name: lastlayer
Version: 1.2.0
Summary: Regression
License-Expression: MIT
Requires-Python: >=3.11
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

# lastlayer
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    for name, text in GOOD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    return tmp_path


def test_a_tree_that_agrees_with_itself_is_ready(tree):
    assert release.ready(tree) == []
    assert release.ready(tree, tag="v1.2.0") == []
    assert "that of 1.2.0 is v1.2.0" in release.ready(tree, tag="v1.3.0")[0]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("src/lastlayer/__init__.py", "1.2.0", "1.2.0.dev0", "no version to release"),
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n- That.\n", "lines under Unreleased"),
        ("CHANGELOG.md", "## Unreleased\n", "", "no section Unreleased"),
        ("CHANGELOG.md", "## 1.2.0", "## 1.1.0", "newest section of CHANGELOG.md is 1.1.0"),
        ("CHANGELOG.md", " - 2030-01-31", "", "date ''"),
        ("CITATION.cff", "version: 1.2.0", "version: 1.1.0", "CITATION.cff has version 1.1.0"),
        ("CITATION.cff", "2030-01-31", "2030-01-30", "date-released 2030-01-30"),
    ],
)
def test_what_disagrees_is_named(tree, file, old, new, said):
    (tree / file).write_text((tree / file).read_text().replace(old, new))
    unclean, *problems = release.ready(tree)
    assert unclean.startswith("the tree is not clean")
    assert file in unclean
    assert any(said in problem for problem in problems), problems


def packed(tree: Path, name: str = "dist", *, files: tuple[str, ...] = (), metadata: str = METADATA) -> Path:
    folder = tree / name
    folder.mkdir()
    with zipfile.ZipFile(folder / "lastlayer-1.2.0-py3-none-any.whl", "w") as wheel:
        for name in ("lastlayer/__init__.py", "lastlayer/py.typed", *files):
            wheel.writestr(name, "")
        wheel.writestr("lastlayer-1.2.0.dist-info/METADATA", metadata)
    with tarfile.open(folder / "lastlayer-1.2.0.tar.gz", "w:gz") as sdist:
        member = tarfile.TarInfo("lastlayer-1.2.0/PKG-INFO")
        member.size = len(metadata.encode())
        sdist.addfile(member, io.BytesIO(metadata.encode()))
    return folder


def test_a_wheel_of_the_package_alone_passes_and_what_else_is_there_is_named(tree):
    assert release.built(packed(tree, "good"), tree) == []
    folder = packed(tree, files=("benchmarks/uci/peers.py",))
    assert any("holds benchmarks/uci/peers.py" in problem for problem in release.built(folder, tree))
    (folder / "lastlayer-1.1.0.tar.gz").write_text("")
    assert "too many ['lastlayer-1.1.0.tar.gz']" in release.built(folder, tree)[0]
    (tree / "src/lastlayer/new.py").write_text("")
    assert release.built(tree / "good", tree) == ["the wheel lacks lastlayer/new.py"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Typing :: Typed", "Typing :: Fast", "unknown classifier: Typing :: Fast"),
        ("text/markdown", "text/plain", "lack the README"),
        ("Version: 1.2.0", "Version: newest", "newest"),
        ("Requires-Python: >=3.11\n", "", "lack Requires-Python"),
    ],
)
def test_metadata_that_an_index_would_refuse(tree, old, new, said):
    problems = release.built(packed(tree, metadata=METADATA.replace(old, new)), tree)
    assert any(said in problem for problem in problems), problems


def test_the_floors_are_those_of_the_project():
    """Every dependency once, with a floor; extras that name extras are followed; torch is pinned elsewhere."""
    pins = [Requirement(pin) for pin in lowest.lowest(["cli"])]
    assert {"numpy", "scipy", "scikit-learn", "typer", "matplotlib"} <= {pin.name for pin in pins}
    assert "torch" not in {pin.name for pin in pins}
    assert len({pin.name for pin in pins}) == len(pins)
    for pin in pins:
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert Version(specifier.version) > Version("0")
