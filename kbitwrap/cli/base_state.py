"""The state of a base model, taken before anything is done to it and compared afterwards.

It is taken with torch alone, not with kbitwrap, so that kbitwrap does not vouch for
itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_ATTRIBUTES = (
    "forward",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
)

ASPECTS = {
    "bytes": "bytes and quantization state",
    "dtypes": "dtypes",
    "requires_grad": "requires_grad",
    "parameters": "Parameter objects",
    "hooks": "hooks",
    "attributes": "checkpointing flags and forwards",
}


@dataclass(frozen=True)
class BaseState:
    """The contents of each module of a base model, by the module's name when the state was first taken.

    Attributes:
        modules: The module objects. An adapter wraps them, and leaves them the same
            objects.
        values: ``{aspect: {fqn: value}}``, the aspects being the keys of ``ASPECTS``.
        parameter_bytes: What the parameters held then, tied ones counted once.
    """

    modules: Mapping[str, nn.Module]
    values: Mapping[str, Mapping[str, Any]]
    parameter_bytes: int

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> BaseState:
        """Take the state of modules.

        Args:
            modules: The modules by name; those of ``BaseState.modules`` to see what
                became of them.

        Returns:
            The state. It holds the parameters, not copies of them: of the bytes, only
                digests.
        """
        values: dict[str, dict[str, Any]] = {aspect: {} for aspect in ASPECTS}
        for prefix, module in modules.items():
            for name, tensor in _stored(module).items():
                values["bytes"][f"{prefix}.{name}"] = _digest(tensor)
            for name, parameter in module.named_parameters(recurse=False):
                fqn = f"{prefix}.{name}"
                values["dtypes"][fqn] = str(parameter.dtype).removeprefix("torch.")
                values["requires_grad"][fqn] = parameter.requires_grad
                values["parameters"][fqn] = _Same(parameter)
            own = vars(module)
            hooks: list[Any] = []
            for name in _HOOK_DICTS:
                hooks += (own[name] or {}).values()
            values["hooks"][prefix] = [_describe(hook) for hook in hooks]
            values["attributes"][prefix] = {
                name: _describe(own[name]) for name in _ATTRIBUTES if name in own
            }
        parameters = {same.tensor for same in values["parameters"].values()}
        parameter_bytes = sum(parameter.nbytes for parameter in parameters)
        return cls(dict(modules), values, parameter_bytes)

    def again(self) -> BaseState:
        """Take the state of the same module objects now."""
        return BaseState.of(self.modules)

    def differences(self, later: BaseState, aspect: str) -> list[str]:
        """Name what differs in one aspect.

        Args:
            later: The state to compare with.
            aspect: A key of ``ASPECTS``.

        Returns:
            Names of tensors or modules.
        """
        before = self.values[aspect]
        after = later.values[aspect]
        names = before.keys() | after.keys()
        return sorted(name for name in names if before.get(name) != after.get(name))

    def digest(self) -> str:
        """One digest over all bytes and quantization state."""
        digests = sorted(self.values["bytes"].items())
        return hashlib.sha256(repr(digests).encode()).hexdigest()


@dataclass(frozen=True)
class _Same:
    """A tensor that equals only itself."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def _stored(module: nn.Module) -> dict[str, Any]:
    """The tensors that a module stores itself.

    Of a leaf it is its ``state_dict``, which has all of a quantized layer.
    """
    stored: dict[str, Any] = dict(module.named_buffers(recurse=False))
    is_leaf = next(module.children(), None) is None
    stored |= (
        module.state_dict() if is_leaf else dict(module.named_parameters(recurse=False))
    )
    return stored


def _digest(value: Any) -> str:
    """A digest of the bits of a tensor, with its dtype and shape; of another value what represents it."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    bits = value.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
    digest = hashlib.sha256(bits.numpy().data).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} {digest}"


def _describe(value: Any) -> str:
    """Hooks and attributes by what they are: a copy of a module has copies of them."""
    if value is None or isinstance(value, bool):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))
