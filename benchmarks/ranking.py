"""Ranks with ties."""

from collections.abc import Sequence


def rank(costs: Sequence[float]) -> list[float]:
    """Rank costs from 1 for the smallest; equal costs share the mean of their ranks."""
    return [sum(c < cost for c in costs) + (1 + sum(c == cost for c in costs)) / 2 for cost in costs]
