"""`python -m lastlayer.cli`."""

from lastlayer.cli import main

main()
