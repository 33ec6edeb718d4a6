"""Parameters of an estimator, and the settings they resolve to for given data."""
