"""Bayesian optimisation: lastlayer beside BoTorch's models and random points. `python -m benchmarks.bo`."""
