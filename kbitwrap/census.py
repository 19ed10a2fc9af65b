"""Who lives in a model: what was there when it was prepared, and what others copied, replaced or added since."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from .checkpointing import input_gradient_hooks
from .quantization import HALF_DTYPES
from .storage import CopyChange
from .topology import adapter_parameter_ids, canonical_fqn, named_tensors


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Walk the base parameters, tied ones at each of their places, adapters left out.

    Args:
        model: The model, wrapped or not.

    Yields:
        ``(canonical fqn, parameter)``.
    """
    adapters = adapter_parameter_ids(model)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in adapters:
            yield canonical_fqn(fqn), parameter


class Census:
    """The base parameters of a model and its forward hooks, at the moment before it is prepared.

    Args:
        model: The unprepared model.
    """

    def __init__(self, model: nn.Module) -> None:
        # By each of its names, a tied parameter's two included: a copy of it can stand at any.
        self._places = {fqn: (weakref.ref(p), p.dtype) for fqn, p in base_parameters(model)}
        self._hook_ids = {key for module in model.modules() for key in module._forward_hooks}

    def _own(self) -> set[int]:
        return {id(p) for reference, _ in self._places.values() if (p := reference()) is not None}

    def copies(self, model: nn.Module, cast: Mapping[nn.Parameter, torch.Tensor | None]) -> list[CopyChange]:
        """Find float32 parameters that stand, by name, for a half one: PEFT's copies, beside it or in its place.

        A half parameter that was not cast and is float32 now, such as one that was resized, is found as well.

        Args:
            model: The live model.
            cast: The parameters that the preparation cast, which are not looked for, each with the original value that
                what took its place is to get, or ``None`` for its own value.

        Returns:
            A change for each that takes it to the original dtype.
        """
        found = []
        for fqn, _, _, parameter in named_tensors(model):
            name = canonical_fqn(fqn)
            reference, dtype = self._places.get(name, (None, None))
            if reference is None or dtype not in HALF_DTYPES or parameter in cast:
                continue
            if parameter.dtype == torch.float32:
                replaced = reference()
                original = cast.get(replaced) if name == fqn and replaced is not None else None
                is_fitting = original is not None and original.shape == parameter.shape
                found.append(CopyChange(name, parameter, dtype, original if is_fitting else None))
        return found

    def found(self, model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Find what others replaced and added.

        Args:
            model: The live model.

        Returns:
            The canonical names at which another parameter stands, and the live names of what was added: parameters, and
            forward hooks other than those that a restore removes.
        """
        own = self._own()
        replaced, foreign = [], []
        for fqn, _, _, parameter in named_tensors(model):
            name = canonical_fqn(fqn)
            if id(parameter) in own:
                continue
            if name in self._places:
                replaced.append(name)
            if name not in self._places or name != fqn:
                foreign.append(fqn)
        for fqn, module in model.named_modules():
            ours = {*self._hook_ids, *input_gradient_hooks(module)}
            hooks = [hook for key, hook in module._forward_hooks.items() if key not in ours]
            foreign += [f"{fqn}: forward hook {getattr(hook, '__name__', type(hook).__name__)}" for hook in hooks]
        return tuple(dict.fromkeys(replaced)), tuple(foreign)
