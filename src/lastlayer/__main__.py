"""The command `lastlayer`, also `python -m lastlayer`: it needs an extra, and says so where that is missing."""

import sys


def main() -> None:
    try:
        from lastlayer.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f'the command lastlayer needs {error.name}, which is not installed: pip install "lastlayer[cli]"')
    app()


if __name__ == "__main__":
    main()
