"""What an operation of torch does with its arguments, as its schema says."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils._pytree import tree_leaves


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the values, most of them tensors, that an operation writes to.

    Whether its results are views of an argument says ``func.is_view``.

    Args:
        func: The overload of an operator that a dispatch mode, or a subclass, is given.
        args: The positional arguments.
        kwargs: The others.
    """
    values = []
    for position, name in _written(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        values.append(value)

    return tree_leaves(values) if values else []


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Find the positions and names of the arguments that an operation writes to."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append((position, argument.name))

    return found
