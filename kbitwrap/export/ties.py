"""Tied weights of a merged model: tied again where they are equal, and told apart where they are not."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import ExportError
from ..tensors.bits import content_digest
from ..tensors.lazy import LazyTensor, materialize, values_of
from .plain import parameter_of

Places = list[list[tuple[nn.Module, str]]]
"""For each parameter that has several, its places."""
_FLAG = "tie_word_embeddings"
# Whose methods save and load a model, and compute nothing.
_LIBRARIES = ("torch.", "transformers.modeling_utils")


def settle_ties(model: nn.Module, places: Places) -> None:
    """Tie again the weights that were tied, if all are still equal; otherwise untie all of them, in the configs too."""
    is_untied = False
    for group in places:
        tensors = {
            id(tensor): tensor
            for module, name in group
            if (tensor := module._parameters[name]) is not None
        }
        if len(tensors) == 1:
            continue
        if (
            len({content_digest(materialize(tensor)) for tensor in tensors.values()})
            > 1
        ):
            is_untied = True
            continue
        for module, name in group:
            vars(module)["_parameters"][name] = next(iter(tensors.values()))
    if not is_untied:
        return
    for module, name in (place for group in places for place in group[1:]):
        tied = parameter_of(module, name)
        vars(module)["_parameters"][name] = LazyTensor(
            tied.shape, tied.dtype, functools.partial(values_of, tied)
        )
    _untie_configs(model)


def _untie_configs(model: nn.Module) -> None:
    """Let the configs say that nothing is tied; where a model computes by that, keep it and rely on what loads it."""
    tying = [
        config for config in configs_of_all(model) if getattr(config, _FLAG, False)
    ]
    if not tying:
        return
    classes: list[Any] = [type(module) for _, module in model.named_modules()]
    readers = [cls for cls in classes if _FLAG in _names_read(cls)]
    if not readers:
        for config in tying:
            setattr(config, _FLAG, False)
        return
    # transformers 5 ties nothing that a checkpoint holds twice, with different values.
    loading = inspect.signature(getattr(model, "tie_weights", len))
    if "missing_keys" not in loading.parameters:
        raise ExportError(
            f"the tied weights of this {type(model).__name__} were trained apart, and no config describes it then: "
            f"{readers[0].__name__}.forward computes something else where {_FLAG} is false, and the installed "
            "transformers ties what it loads where it is true; merge with transformers 5, or export without merging"
        )


@functools.cache
def _names_read(cls: Any) -> frozenset[str]:
    """The names in the code of a class's ``forward``, and of its methods that this calls."""
    found: set[str] = set()
    waiting = {"forward"}
    while waiting:
        method = waiting.pop()
        found.add(method)
        for base in cls.__mro__:
            code = getattr(
                inspect.unwrap(vars(base).get(method, cls)), "__code__", None
            )
            if code is not None and not base.__module__.startswith(_LIBRARIES):
                waiting |= _names_in(code) - found
    return frozenset(found)


def _names_in(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function's code, and in the functions inside it."""
    inner = [
        _names_in(constant)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    ]
    return set(code.co_names).union(*inner)


def configs_of_all(model: nn.Module) -> Iterator[Any]:
    """The configs of a model and of its modules, nested ones included."""
    found = [vars(module).get("config") for _, module in model.named_modules()]
    seen: set[int] = set()
    while found:
        config = found.pop()
        if hasattr(config, "save_pretrained") and id(config) not in seen:
            seen.add(id(config))
            yield config
            found += vars(config).values()
