"""Bayesian optimisation with lastlayer, BoTorch's models and random points: `python -m benchmarks.bo`."""
