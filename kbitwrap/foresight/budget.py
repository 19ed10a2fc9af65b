"""The longest sequence and the largest batch whose step fits a budget, found by few predictions."""

from __future__ import annotations

from collections.abc import Callable


def largest(
    num_bytes: Callable[[int], int], budget: int, start: int, limit: int
) -> int:
    """The largest whole number up to ``limit`` whose bytes are within a budget; 0 where 1 is not.

    The bytes must not fall as the number grows. They grow nearly in proportion, so the
    next number to try is found on the line through the two tried next to it; every
    third one halves the range, in case the line misleads.
    """
    tried: dict[int, int] = {}
    low, high = 0, limit + 1
    number = min(start, limit)
    while high - low > 1:
        tried[number] = num_bytes(number)
        if tried[number] <= budget:
            low = number
        else:
            high = number
        number = _next(tried, budget, low, high, limit)
    return low


def _next(tried: dict[int, int], budget: int, low: int, high: int, limit: int) -> int:
    if high > limit and len(tried) < 2:
        return min(2 * low, limit)
    if len(tried) % 3 == 0 and high <= limit:
        return (low + high) // 2
    below = sorted((number for number in tried if number <= low), reverse=True)
    above = sorted(number for number in tried if number >= high)
    near = sorted(
        [*below[:2], *above[:2]], key=lambda number: abs(tried[number] - budget)
    )[:2]
    if len(near) < 2 or tried[near[0]] == tried[near[1]]:
        return (low + high) // 2 if high <= limit else min(2 * low, limit)
    (x, y), (x2, y2) = ((number, tried[number]) for number in near)
    target = x + (budget - y) * (x2 - x) // (y2 - y)
    return max(low + 1, min(target, high - 1))
