"""The paper's simulation study, on built-in data. It calls the mathematics and has no numerics of its own."""
