"""Networks that make features: MLPs, stacks of them, random Fourier features, extractors for users' networks."""
