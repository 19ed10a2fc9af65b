"""Who lives in a model: what was there when it was prepared, and what others copied, replaced or added since."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator

import torch
from torch import nn

from .checkpointing import input_gradient_hooks
from .quantization import HALF_DTYPES
from .storage import CopyChange
from .topology import adapter_parameter_ids, canonical_fqn, named_modules, named_tensors


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Walk the base parameters, tied ones at each of their places, adapters left out.

    Args:
        model: The model, wrapped or not.

    Yields:
        ``(canonical fqn, parameter)``.
    """
    adapters = adapter_parameter_ids(model)
    for fqn, _, _, parameter in named_tensors(model, remove_duplicate=False):
        if id(parameter) not in adapters:
            yield canonical_fqn(fqn), parameter


_HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Census:
    """The base parameters of a model and its forward hooks, at the moment before it is prepared.

    Args:
        model: The unprepared model.
    """

    def __init__(self, model: nn.Module) -> None:
        base = list(base_parameters(model))
        known = {id(p): (p.dtype, p.shape) for _, p in base}
        # By each of its names, a tied parameter's two included: a copy of it can stand at any.
        self._places = {fqn: known[id(p)] for fqn, p in base}
        self._parameters = {id(p): (weakref.ref(p), known.get(id(p))) for _, _, _, p in named_tensors(model)}
        self._hook_ids: set[int] = set()
        for _, module in named_modules(model):
            fields = vars(module)
            for name in _HOOK_DICTS:
                if fields[name]:
                    self._hook_ids.update(fields[name])

    def _recorded(
        self, name: str, parameter: nn.Parameter
    ) -> tuple[bool, tuple[torch.dtype, torch.Size] | tuple[None, None]]:
        """Whether a parameter is new; and dtype and shape as they were, of a new one those of what had its name."""
        reference, own = self._parameters.get(id(parameter), (None, None))
        is_new = reference is None or reference() is not parameter
        recorded = self._places.get(name) if is_new else own
        return is_new, recorded or (None, None)

    def copies(self, model: nn.Module, cast: Collection[nn.Parameter]) -> list[CopyChange]:
        """Find float32 parameters that stand, by name, for a half one: PEFT's copies, beside it or in its place.

        A half parameter that was not cast and has another dtype now, such as one that was resized, is found as well.

        Args:
            model: The live model.
            cast: The parameters that the preparation cast, which are not looked for.

        Returns:
            A change for each that takes it to the original dtype.
        """
        found = []
        for fqn, _, _, parameter in named_tensors(model):
            name = canonical_fqn(fqn)
            _, (dtype, shape) = self._recorded(name, parameter)
            if dtype not in HALF_DTYPES or parameter.dtype == dtype or parameter in cast:
                continue
            if parameter.dtype in (torch.float32, *HALF_DTYPES):
                found.append(CopyChange(name, parameter, dtype, is_resized=parameter.shape != shape))
        return found

    def found(self, model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Find what others replaced and added.

        Args:
            model: The live model.

        Returns:
            The canonical names at which another parameter stands, or one of another shape, and the live names of what
            was added: parameters, and hooks other than those that a restore removes.
        """
        replaced, foreign = [], []
        for fqn, _, _, parameter in named_tensors(model):
            name = canonical_fqn(fqn)
            is_new, (_, shape) = self._recorded(name, parameter)
            if shape is not None and (is_new or (name == fqn and parameter.shape != shape)):
                replaced.append(name)
            if is_new and (shape is None or name != fqn):
                foreign.append(fqn)
        for fqn, module in named_modules(model):
            ours = {*self._hook_ids, *input_gradient_hooks(module)}
            for name in _HOOK_DICTS:
                hooks = [hook for key, hook in getattr(module, name).items() if key not in ours]
                kind = name.strip("_").replace("_", " ").removesuffix("s")
                foreign += [f"{fqn}: {kind} {getattr(hook, '__name__', type(hook).__name__)}" for hook in hooks]
        return tuple(dict.fromkeys(replaced)), tuple(foreign)
