"""What a user installs: the wheel and the sdist hold what they should, and importing is quick and quiet."""

import contextlib
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import release
from hatchling import build

import lastlayer

ROOT = Path(__file__).parents[1]
OUTSIDE = ("sklearn", "pandas", "pyarrow", "matplotlib", "plotly", "typer", "rich", "casadi", "onnx", "gpytorch")
MODULES = ("metrics", "plots", "online", "baselines", "evidence")
HEAVY = ("torch", "numpy", "scipy", "jaxtyping", *OUTSIDE)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """An sdist, and the wheel that is built from it, as an index or a distribution would."""
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    with contextlib.chdir(ROOT):
        sdist = folder / build.build_sdist(str(folder))
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    with contextlib.chdir(next(source.iterdir())):
        build.build_wheel(str(folder))
    return folder


def test_the_wheel_holds_the_package_alone_and_its_metadata_say_what_the_project_says(dist):
    assert release.built(dist) == []
    info = f"lastlayer-{lastlayer.__version__}.dist-info"
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert metadata["Name"] == "lastlayer"
    assert metadata["Version"] == lastlayer.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"cli", "docs", "parquet", "plots", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert "lastlayer = lastlayer.__main__:main" in scripts
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_the_sdist_can_be_tested_and_holds_no_data(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
    names = {member.name.split("/", 1)[1] for member in files}
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert pages | {"LICENSE", "CITATION.cff", "Makefile", "requirements.lock"} <= names
    for folder in ("src/lastlayer", "tests", "benchmarks", "examples", "docs"):
        assert any(name.startswith(f"{folder}/") for name in names), folder
    data = (".npz", ".parquet", ".pkl", ".lastlayer", ".pyc", ".html")
    assert not {name for name in names if Path(name).suffix in data and "/templates/" not in name}
    assert sum(member.size for member in files) < 5e6


def test_the_version_stands_in_the_package_and_in_the_citation():
    """`make release` compares the two."""
    stated = [
        path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *ROOT.glob("docs/*.py"), *ROOT.glob("src/**/*.py")]
        if lastlayer.__version__ in path.read_text()
    ]
    assert stated == ["CITATION.cff", "src/lastlayer/__init__.py"]


def test_importing_is_quiet_and_brings_nothing_heavy():
    """In fresh processes, warnings being errors; the mathematics must do without estimators and pictures."""
    names = f"assert {{*{MODULES}, *lastlayer.__all__}} <= set(dir(lastlayer))"
    own = "n.startswith('lastlayer.')"
    assert _run(f"import sys, lastlayer; {names}; print([n for n in sys.modules if n in {HEAVY} or {own}])") == "[]"
    modules = "lastlayer; lastlayer.evidence, lastlayer.posterior, lastlayer.extrapolation, lastlayer.metrics"
    program = f"import sys, {modules}; print([name for name in {(*OUTSIDE, 'scipy.optimize')} if name in sys.modules])"
    assert _run(program) == "[]"


PARTS = f"""import lastlayer, sys
for name in ("__main__", "_hidden", "nothing", "BLRegressor"):
    try:
        getattr(lastlayer, name)
    except AttributeError as error:
        assert f"module 'lastlayer' has no attribute {{name!r}}" in str(error)
    else:
        raise SystemExit(name)
print([getattr(lastlayer, name) is sys.modules[getattr(lastlayer, name).__name__] for name in {MODULES}])
import numpy as np
x = np.linspace(0, 1, 40)[:, None]
lastlayer.BLLRegressor(hidden=(3,), preset="fast", max_epochs=2, random_state=0).fit(x, np.sin(6 * x[:, 0]))
print("torch._dynamo" in sys.modules)
[getattr(lastlayer, name) for name in lastlayer.__all__]"""


def test_modules_are_attributes_of_the_package_and_a_fit_imports_no_compiler():
    """It would cost more than the training of a small table. Private and unknown names are attribute errors."""
    assert _run(PARTS).splitlines() == [str([True] * len(MODULES)), "False"]


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
