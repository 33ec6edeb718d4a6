"""Fitted models and their predictions: everything that predicts holds a `Fitted`."""
