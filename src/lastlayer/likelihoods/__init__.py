"""How targets are read as weighted Gaussian readings, scored, and predicted."""
