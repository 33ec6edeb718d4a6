"""Benchmarks of the library alone and beside its peers.

They are not part of the installed package: run them from the repository root, as `python -m benchmarks.NAME`.
"""
