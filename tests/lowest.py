"""Prints the lowest versions that pyproject.toml allows, as pip takes them: `make test-lowest` installs these.

python tests/lowest.py [extra ...]: those of the package itself, and of the extras named.

torch is left out: the Makefile pins the version that is installed everywhere, since a range would pull the CUDA build.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def lowest(extras: list[str]) -> list[str]:
    """Requirements of the package and of extras, pinned to their floors; extras that an extra names are followed."""
    asked = list(PROJECT["dependencies"])
    for extra in extras:
        asked += PROJECT["optional-dependencies"][extra]
    pins: dict[str, str] = {}
    for requirement in asked:
        if named := re.fullmatch(r"lastlayer\[(.*)\]", requirement):
            for pin in lowest(named[1].split(",")):
                pins.setdefault(pin.split("==")[0], pin)
            continue
        name, floor = requirement.split(">=")
        if name != "torch":
            pins[name] = f"{name}=={floor}"
    return list(pins.values())


if __name__ == "__main__":
    print("\n".join(lowest(sys.argv[1:])))
