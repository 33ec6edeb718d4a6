"""The command `lastlayer`, or `python -m lastlayer`; it needs the extra "cli"."""

import sys


def main() -> None:
    """Run the command-line interface."""
    try:
        from lastlayer.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f'the command lastlayer needs {error.name}, which is not installed: pip install "lastlayer[cli]"')
    app()


if __name__ == "__main__":
    main()
