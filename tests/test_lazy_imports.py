"""The package imports its parts when they are asked for."""

import subprocess
import sys

MODULES = ("metrics", "plots", "online", "baselines", "evidence")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_module_is_an_attribute_of_the_package():
    program = f"""import lastlayer, sys
for name in {MODULES}:
    assert getattr(lastlayer, name) is sys.modules[f"lastlayer.{{name}}"], name
print("fine")"""
    assert run(program) == "fine"


def test_asking_for_names_imports_nothing():
    program = f"""import sys, lastlayer
assert {{*{MODULES}, *lastlayer.__all__}} <= set(dir(lastlayer))
print([n for n in sys.modules if n == "torch" or n.startswith("lastlayer.")])"""
    assert run(program) == "[]"


def test_help_does_not_import_torch():
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
