"""The Bayesian last layer: features, readings, statistics, evidence, posterior."""
