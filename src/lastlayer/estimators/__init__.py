"""Estimators in scikit-learn's conventions: parameters in, a `Fitted` out."""
