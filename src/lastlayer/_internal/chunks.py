"""Rows in chunks."""

CHUNK_ROWS = 16_384
"""Rows per chunk on the processor."""


def row_chunks(m: int, size: int = CHUNK_ROWS) -> list[slice]:
    """Split m rows into slices of nearly equal size."""
    n = -(-m // size)
    return [slice(i * m // n, (i + 1) * m // n) for i in range(n)]
