"""Ensembles of networks: held-out rows of each network, training, and predictions of the held-out rows."""
