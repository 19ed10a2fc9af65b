"""The longest sequence and the largest batch whose step fits a budget, found by few predictions."""

from __future__ import annotations

from collections.abc import Callable


def largest(
    num_bytes: Callable[[int], int], budget: int, start: int, limit: int
) -> int:
    """The largest whole number up to ``limit`` whose bytes are within a budget; 0 where 1 is not.

    The bytes grow nearly in proportion, so the next number to try is found on the line
    through the two that came nearest to the budget; every third one halves the range,
    in case the line misleads.

    Args:
        num_bytes: The bytes of a number, which must not fall as it grows.
        budget: The most bytes.
        start: The number to try first.
        limit: The largest number that may be given back.

    Returns:
        The number.
    """
    tried: dict[int, int] = {}
    low = 0
    high = limit + 1
    number = min(start, limit)
    while high - low > 1:
        tried[number] = num_bytes(number)
        if tried[number] <= budget:
            low = number
        else:
            high = number
        number = (low + high) // 2
        if len(tried) % 3 != 0:
            target = _on_line(tried, budget) or number
            number = max(low + 1, min(target, high - 1))
    return low


def _on_line(tried: dict[int, int], budget: int) -> int | None:
    """Where the line through the two numbers that came nearest to a budget meets it.

    Args:
        tried: The bytes of each number that was tried.
        budget: The budget, in bytes.

    Returns:
        The number; ``None`` where both have the same bytes.
    """
    near = sorted(tried, key=lambda number: abs(tried[number] - budget))[:2]
    rise = tried[near[-1]] - tried[near[0]]
    if rise == 0:
        return None
    run = near[-1] - near[0]
    return near[0] + (budget - tried[near[0]]) * run // rise
