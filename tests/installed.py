"""What `make test-package` asks of an installed wheel, in an environment that holds nothing else."""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import lastlayer


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    program = Path(sys.executable).parent / "lastlayer"
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def library() -> None:
    assert Path(sys.prefix) in Path(lastlayer.__file__).parents, lastlayer.__file__
    assert importlib.metadata.version("lastlayer") == lastlayer.__version__
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (60, 2))
    y = X.sum(1) + 0.1 * rng.standard_normal(60)
    model = lastlayer.BLLRegressor(hidden=(5,), max_epochs=5, n_members=2, random_state=0).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "m.lastlayer")
        assert (lastlayer.load(Path(folder) / "m.lastlayer").predict(X) == mean).all()


if __name__ == "__main__":
    library()
    if "--cli" in sys.argv:
        assert command("--version").stdout == f"lastlayer {lastlayer.__version__}\n"
        assert "fit" in command("--help").stdout
    else:
        without = command("--version")
        assert without.returncode == 1, without
        assert "lastlayer[cli]" in without.stderr, without
        assert "Traceback" not in without.stderr, without
    print("lastlayer", lastlayer.__version__, "installed and used" + (", with its command" * ("--cli" in sys.argv)))
