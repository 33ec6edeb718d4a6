"""The package imports its parts when they are asked for."""

import subprocess
import sys

import pytest

MODULES = ("metrics", "plots", "online", "baselines", "evidence")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """Of a process that asks for modules and then fits."""
    program = f"""import lastlayer, sys
print([getattr(lastlayer, name) is sys.modules[getattr(lastlayer, name).__name__] for name in {MODULES}])
import numpy as np
x = np.linspace(0, 1, 40)[:, None]
lastlayer.BLLRegressor(hidden=(3,), preset="fast", max_epochs=2, random_state=0).fit(x, np.sin(6 * x[:, 0]))
print("torch._dynamo" in sys.modules)"""
    return run(program).splitlines()


def test_a_module_is_an_attribute_of_the_package(answers):
    assert answers[0] == str([True] * len(MODULES))


def test_a_fit_imports_no_compiler(answers):
    """It would cost more than the training of a small table."""
    assert answers[1] == "False"


def test_asking_for_names_imports_nothing():
    program = f"""import sys, lastlayer
assert {{*{MODULES}, *lastlayer.__all__}} <= set(dir(lastlayer))
print([n for n in sys.modules if n == "torch" or n.startswith("lastlayer.")])"""
    assert run(program) == "[]"


def test_help_does_not_import_torch():
    pytest.importorskip("typer")
    program = """import sys
sys.argv = ["lastlayer", "--help"]
from lastlayer.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code
print("torch" in sys.modules)"""
    assert run(program).splitlines()[-1] == "False"


def test_private_and_unknown_names_are_attribute_errors():
    program = """import lastlayer
for name in ("__main__", "_hidden", "nothing", "honest"):
    try:
        getattr(lastlayer, name)
    except AttributeError as error:
        assert repr(name) in str(error)
    else:
        raise SystemExit(name)
print("fine")"""
    assert run(program) == "fine"
