"""Measurements, of the library alone and beside its peers. They are not installed: run them from the repository root,
as `python -m benchmarks.NAME`."""
