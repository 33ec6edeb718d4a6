"""The benchmarks: `python -m benchmarks` lists them, `python -m benchmarks.NAME --help` says what one measures."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent


def commands() -> dict[str, str]:
    """Modules that can be run, by their name below `benchmarks`, with the first line of their docstrings."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_text()
        if path != Path(__file__) and '\nif __name__ == "__main__":' in text:
            name = ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__main__")
            found[name] = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return found


def main() -> None:
    listed = commands()
    width = max(map(len, listed))
    for name, text in listed.items():
        print(f"python -m benchmarks.{name:<{width}}  {text}")


if __name__ == "__main__":
    main()
