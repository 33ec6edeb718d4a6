"""Feature networks: MLPs, stacks of them, random Fourier features, and feature extractors for users' networks."""
