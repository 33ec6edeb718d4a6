"""The library beside its peers on your own tables, by one protocol: `python -m benchmarks.uci --data DIR`."""
