"""Tied weights of a merged model.

They are tied again where they are equal, and told apart where they are not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import nn

from ..model.records import Place
from ..tensors.bits import content_digest
from ..tensors.lazy import LazyTensor, materialize, values_of
from .plain import parameter_of

Ties = list[list[Place]]
"""For each parameter that has several places, these."""
_FLAG = "tie_word_embeddings"


def settle_ties(
    model: nn.Module,
    groups: Ties,
    delta_of: Callable[[nn.Module, str], Hashable],
) -> None:
    """Tie each group again whose weights are equal.

    One flag of a config speaks for all groups: if one differs, all are untied. Tied weights
    that get one delta count as equal, even if its products are rounded differently:
    ``delta_of`` returns what identifies the delta of a module's parameter, or ``None``.
    """
    is_untied = False
    for group in groups:
        tensors = [parameter_of(module, name) for module, name in group]
        distinct = {id(tensor): tensor for tensor in tensors}.values()
        if len(distinct) == 1:
            continue
        deltas = {delta_of(module, name) for module, name in group}
        are_equal = len(deltas) == 1 and None not in deltas
        if not are_equal:
            digests = {content_digest(materialize(tensor)) for tensor in distinct}
            are_equal = len(digests) == 1
        if not are_equal:
            is_untied = True
            continue

        for module, name in group:
            vars(module)["_parameters"][name] = tensors[0]

    if is_untied:
        for group in groups:
            for module, name in group[1:]:
                untie(module, name)
        _untie_configs(model)


def untie(module: nn.Module, name: str) -> None:
    """Give a place a tensor of its own, with the same values."""
    tied = parameter_of(module, name)
    compute = functools.partial(values_of, tied)
    vars(module)["_parameters"][name] = LazyTensor(tied.shape, tied.dtype, compute)


def _untie_configs(model: nn.Module) -> None:
    """Let the configs say that nothing is tied.

    Where a forward reads the flag, it stays: what loads the model has to see that the
    weights differ.
    """
    for _, module in model.named_modules():
        # a forward that is not in Python has no code
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if _FLAG in getattr(code, "co_names", ()):
            return

    for config in configs_of_all(model):
        if getattr(config, _FLAG, False):
            setattr(config, _FLAG, False)


def configs_of_all(model: nn.Module) -> Iterator[Any]:
    """Yield the configs of a model and of its modules, each once.

    Those nested in others are among them.
    """
    found = [vars(module).get("config") for _, module in model.named_modules()]
    seen = set()
    while found:
        config = found.pop()
        if hasattr(config, "save_pretrained") and id(config) not in seen:
            seen.add(id(config))
            yield config
            found += vars(config).values()
