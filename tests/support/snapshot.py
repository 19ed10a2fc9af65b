"""The one comparison that every test uses: all of a model's state, before and after, or beside that of its twin.

A snapshot holds, for each module, its identity, class, train mode, instance attributes (keys in order, and values) and
hook dicts in order; for each parameter its identity, storage pointer, bytes, dtype, layout, flag and attributes; which
tensors share memory; and the configs. Values are kept as digests of their bytes, so a snapshot holds no tensor alive.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

# What transformers' models write on themselves when they first run, prepared or not; no preparation's business.
TRANSFORMERS_OWN = ("problem_type", "_output_capturing_hooks_installed")


def is_capturing_hook(value: Any) -> bool:
    """Whether a hook is one that transformers installs at the first forward to capture outputs."""
    return getattr(value, "__module__", None) == "transformers.utils.output_capturing"


PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
PLAIN_TYPES = frozenset(PLAIN)
CONTAINERS = (dict, list, tuple, set, frozenset)


def _kind(value: object) -> str:
    """What stands for an object's identity where another object of its kind may be in its place."""
    return f"{type(value).__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"


@torch.no_grad()  # reading is not training: a stand-in whose weight was made trainable refuses that alone
def tensor_digest(tensor: torch.Tensor, identify: Callable[[object], object] = id) -> tuple[Any, ...]:
    """Dtype, layout and a hash of the bytes, NaN payloads included; of a tensor made of others, those of each."""
    if hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local"):
        names, context = tensor.__tensor_flatten__()
        parts = [(name, identify(part := getattr(tensor, name)), tensor_digest(part, identify)) for name in names]
        return type(tensor).__name__, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), parts, repr(context)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor: this rank's shard
    data = local.detach().cpu().contiguous()
    raw = data.view(torch.uint8) if data.dim() else data.view(1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def digest(value: Any, depth: int = 0, identify: Callable[[object], object] = id) -> Any:
    """A comparable description of any attribute: plain values by value, tensors by bytes, the rest by identity."""

    def inner(value: Any, depth: int = 0) -> Any:
        return digest(value, depth, identify)

    if type(value) in PLAIN_TYPES or isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, CONTAINERS) and not value:  # most of what a module holds is dicts of no hooks
        return type(value).__name__, []
    if isinstance(value, torch.Tensor):
        return "tensor", tensor_digest(value, identify)
    if isinstance(value, nn.Module):
        return "module", identify(value)
    if isinstance(value, dict):
        items = [(k, v) for k, v in value.items() if k not in TRANSFORMERS_OWN and not is_capturing_hook(v)]
        if identify is not id and isinstance(value, OrderedDict):  # of hooks, which torch numbers
            return type(value).__name__, [inner(v, depth + 1) for _, v in items]
        return type(value).__name__, [(inner(k), inner(v, depth + 1)) for k, v in items]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [inner(v, depth + 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(repr(inner(v)) for v in value)
    if isinstance(value, functools.partial):
        return "partial", identify(value.func), inner(value.args), inner(value.keywords)
    if type(value).__name__ in ("QuantState", "MatmulLtState") and depth < 6:
        return type(value).__name__, inner(vars(value), depth + 1)
    if hasattr(value, "to_dict") and hasattr(value, "model_type"):
        return "config", identify(value), inner(vars(value), depth + 1) if depth < 4 else None
    return type(value).__name__, identify(value)


class Snapshot:
    """A model's state at one moment; of a ``twin``, what has to be equal in a model that was made as it was."""

    def __init__(self, model: nn.Module, *, twin: bool = False) -> None:
        self._identify: Callable[[object], object] = _kind if twin else id
        self._is_twin = twin
        self.items: dict[str, Any] = {}
        storages: dict[int, list[str]] = {}
        for fqn, module in model.named_modules(remove_duplicate=False):
            self.items[f"{fqn}: identity"] = (
                self._identify(module),
                type(module).__qualname__,
                type(module).__module__,
            )
            attributes = {k: v for k, v in vars(module).items() if k not in TRANSFORMERS_OWN}
            self.items[f"{fqn}: attributes"] = list(attributes)
            for name, value in attributes.items():
                if name == "_parameters":
                    self._parameters(fqn, value)
                else:
                    self.items[f"{fqn}: {name}"] = digest(value, identify=self._identify)
        for fqn, tensor in model.named_parameters(remove_duplicate=False):
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(fqn)
        self.items["shared memory"] = sorted(group for group in storages.values() if len(group) > 1)
        generation_config = getattr(model, "generation_config", None)
        if generation_config is not None:
            self.items["generation_config"] = digest(vars(generation_config), identify=self._identify)

    def _parameters(self, prefix: str, parameters: dict[str, nn.Parameter | None]) -> None:
        self.items[f"{prefix}: parameters"] = list(parameters)
        for name, parameter in parameters.items():
            if parameter is None:
                continue
            fqn = f"{prefix}.{name}"
            self.items[f"{fqn}: identity"] = (self._identify(parameter), type(parameter).__name__)
            if not self._is_twin:
                self.items[f"{fqn}: pointer"] = parameter.data_ptr()
            self.items[f"{fqn}: bytes"] = tensor_digest(parameter, self._identify)
            self.items[f"{fqn}: requires_grad"] = parameter.requires_grad
            for key, value in vars(parameter).items():
                if key != "module":
                    self.items[f"{fqn}: {key}"] = digest(value, identify=self._identify)

    def diff(self, later: Snapshot, *, moved: bool = False, ignore: Collection[str] = ()) -> list[str]:
        """What differs in a later snapshot.

        Args:
            later: The later snapshot.
            moved: Storage was freed and made anew (precision ``"full"``), so pointers may differ.
            ignore: Endings of keys that are not compared.

        Returns:
            One line a difference; empty where there is none.
        """
        lines = []
        for key in sorted({*self.items, *later.items}):
            if (moved and key.endswith(": pointer")) or any(key.endswith(ending) for ending in ignore):
                continue
            before, after = self.items.get(key, "absent"), later.items.get(key, "absent")
            if before != after:
                lines.append(f"{key}: {before} -> {after}")
        return lines
