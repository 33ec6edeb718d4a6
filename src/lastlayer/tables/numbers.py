"""Numbers formatted for people."""

import math

LARGEST, SMALLEST = 1e15, 1e-4


def written(value: float, digits: int = 4) -> str:
    """Format a number with so many significant digits, with commas between thousands and an exponent only if needed."""
    value = float(value)
    if math.isnan(value):
        return "n/a"
    if math.isinf(value) or value == 0:
        return f"{value:g}"
    if not SMALLEST <= abs(value) < LARGEST:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits - 1}e}")
    if value == int(value):
        return f"{rounded:,.0f}"
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def plain(value: float) -> str:
    """Format a number of a table with up to seven digits, without trailing zeros."""
    text = written(value, 7)
    if "e" in text:
        return f"{value:.7g}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    return "n/a" if math.isnan(share) else f"{share:.0%}"
