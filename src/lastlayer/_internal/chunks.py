"""Rows in chunks."""

CHUNK_ROWS = 16_384
"""Rows per chunk on the processor."""


def row_chunks(m: int, size: int = CHUNK_ROWS) -> list[slice]:
    """Split m rows into slices of nearly equal size.

    Parameters
    ----------
    m : int
        Number of rows.
    size : int, default CHUNK_ROWS
        Largest number of rows per slice.

    Returns
    -------
    list of slice
        The slices, in order.
    """
    n = -(-m // size)
    return [slice(i * m // n, (i + 1) * m // n) for i in range(n)]
