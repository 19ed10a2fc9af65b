"""What an operation of torch does with its arguments, as its schema says."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the values, most of them tensors, that an operation writes to.

    Whether what it returns lies in the memory of an argument says ``func.is_view``.

    Args:
        func: The overload of an operator that a dispatch mode, or a subclass, is given.
        args: The positional arguments.
        kwargs: The others.
    """
    if not func._schema.is_mutable:
        return []

    values = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            values.append(args[position])
        else:
            values.append(kwargs.get(argument.name))

    return tree_leaves(values)
