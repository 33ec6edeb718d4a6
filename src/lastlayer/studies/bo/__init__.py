"""Bayesian optimisation: lastlayer beside BoTorch's models and random points. `lastlayer bench bo`, or without the
command line's packages `python -m lastlayer.studies.bo`."""
