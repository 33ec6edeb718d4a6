"""The library beside its peers on tables of the user's, by one protocol: `python -m benchmarks.uci --data DIR`."""
