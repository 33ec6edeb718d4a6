"""The paper's simulation study on built-in data; the mathematics is that of the library."""
