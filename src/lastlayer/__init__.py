"""Regression with neural networks that know what they do not know."""

__version__ = "0.1.0.dev0"
