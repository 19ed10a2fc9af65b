"""The largest number whose bytes fit a budget, found by few trials."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

_BY_CURVE = 6  # trials after which every second one halves the range


def largest(
    num_bytes: Callable[[int], int], budget: int, numbers: Iterable[int], limit: int
) -> int:
    """Find the largest whole number up to ``limit`` whose bytes are within a budget; 0 where 1 is not.

    The bytes of the number and of the next one are seen; a guess that misleads costs
    trials alone.

    Args:
        num_bytes: The bytes of a number, which must not fall as it grows. Those of 0
            decide nothing: the first guess follows the line from there.
        budget: The most bytes.
        numbers: The numbers to try first; those beyond the limit are left out.
        limit: The largest number that may be given back.

    Returns:
        The number.
    """
    tried: dict[int, int] = {}
    following = [number for number in numbers if number <= limit] or [limit]
    low = 0
    high = limit + 1
    while high - low > 1:
        points = list(tried.items())[-3:]
        if following:
            number = following.pop()
        elif len(tried) > _BY_CURVE and len(tried) % 2 == 0:
            number = (low + high) // 2
        else:
            if len(points) < 3:
                points.append((0, num_bytes(0)))
            between = range(low + 1, high)
            within = bisect_right(between, budget, key=lambda n: _curve(points, n))
            number = between[max(within - 1, 0)]
        tried[number] = num_bytes(number)
        if tried[number] <= budget:
            low = max(low, number)
        else:
            high = min(high, number)
    return low


def _curve(points: list[tuple[int, int]], number: int) -> int:
    """Return the value at a number of the polynomial through some points (Lagrange's)."""
    total = 0.0
    for at, value in points:
        part = float(value)
        for other, _ in points:
            if other != at:
                part *= (number - other) / (at - other)
        total += part
    return round(total)
