"""The state that a preparation left, for ``verify`` to compare a live model with."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from .census import base_parameters
from .checkpointing import CHECKPOINTING_ATTRIBUTES, input_gradient_hooks
from .journal import MISSING
from .precision import Float32Forward
from .quantization import is_quantized_layer
from .reports import StateDiff
from .topology import base_modules, canonical_fqn, is_adapter_module, named_modules, named_tensors, only_reading
from .upcast import UpcastTensor


class PreparedState:
    """What there was when a preparation ended: of every base parameter and module, with its canonical name.

    Args:
        model: The prepared model.
    """

    def __init__(self, model: nn.Module) -> None:
        with only_reading():
            parameters = [tensor.parameter for tensor in named_tensors(model)]
            self._by_id: dict[int, tuple[weakref.ref[nn.Parameter], dict[str, Any]]] = {
                id(parameter): (weakref.ref(parameter), _read_parameter(parameter)) for parameter in parameters
            }
            # Two of them may have one canonical name.
            self._base = [(fqn, *self._by_id[id(parameter)]) for fqn, parameter in base_parameters(model)]
            # Most modules have nothing that a preparation sets.
            self.modules = {
                fqn: _read_module(module) if _is_marked(module) else None for fqn, module in _base_modules(model)
            }

    def of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """What was read of a parameter, an adapter's too; ``None`` of one that was not there."""
        found = self._by_id.get(id(parameter))
        return found[1] if found is not None and found[0]() is parameter else None

    def reread(self, model: nn.Module, modules: Collection[nn.Module]) -> None:
        """Take what some modules are now for what they are to be.

        Args:
            model: The prepared model.
            modules: The modules that were edited since.
        """
        for fqn, module in _base_modules(model):
            if module in modules:
                self.modules[fqn] = _read_module(module)

    def diff(self, model: nn.Module) -> StateDiff:
        """Compare a live model with this state. Adapters that others added are no difference.

        Args:
            model: The model, whatever was put into it since.

        Returns:
            The differences.
        """
        differences: dict[str, dict[str, tuple[Any, Any]]] = {}
        live: dict[str, list[nn.Parameter]] = {}
        for fqn, parameter in base_parameters(model):
            live.setdefault(fqn, []).append(parameter)
        rewritten, parametrized = _rewritten_biases(model), _parametrized_by_peft(model)
        for fqn, reference, expected in self._base:
            prepared, here = reference(), live.get(fqn, [])
            found = next((p for p in here if p is prepared), here[-1] if here else None)
            if found is None or found is not prepared:
                what = "none" if found is None else "another"
                differences.setdefault(fqn, {})["parameter"] = ("the prepared one", what)
            if found is not None:
                # A quantized layer casts its bias to the dtype it computes in, whenever it runs.
                ignored = ["dtype"] if id(found) in rewritten else []
                is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
                if is_distributed or id(found) in parametrized:
                    # DistributedDataParallel writes every parameter when it is made, with the value it has; a LoRA on a
                    # parameter (``target_parameters``) writes it back after each forward.
                    ignored.append("writes")
                _compare(differences, fqn, expected, _read_parameter(found), ignored)
        modules = dict(_base_modules(model))
        for fqn, marks in self.modules.items():
            module = modules.get(fqn)
            if module is not None and (marks is not None or _is_marked(module)):
                _compare(differences, fqn, marks or _UNMARKED, _read_module(module))
        return StateDiff(differences)


def _base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for fqn, module in base_modules(model):
        yield canonical_fqn(fqn), module


def _read_parameter(parameter: nn.Parameter) -> dict[str, Any]:
    return {
        "dtype": parameter.dtype,
        "shape": tuple(parameter.shape),
        "requires_grad": parameter.requires_grad,
        "writes": None if parameter.is_inference() else parameter._version,
    }


_MARKS = {*CHECKPOINTING_ATTRIBUTES[:2], "forward", "_old_forward", "__deepcopy__"}
_UNMARKED: dict[str, Any] = {
    **dict.fromkeys(CHECKPOINTING_ATTRIBUTES[:2], MISSING),
    "forward": None,
    "upcast": frozenset(),
    "input_gradient_hooks": 0,
}


def _is_marked(module: nn.Module) -> bool:
    """Whether a module may have anything that a preparation sets; a stand-in for a weight comes with a copier."""
    return bool(module._forward_hooks) or not _MARKS.isdisjoint(vars(module))


def _read_module(module: nn.Module) -> dict[str, Any]:
    fields = vars(module)
    forwards = [fields.get(slot) for slot in ("forward", "_old_forward")]
    state = {name: _plain(fields.get(name, MISSING)) for name in CHECKPOINTING_ATTRIBUTES[:2]}
    state["forward"] = next((f for f in forwards if isinstance(f, Float32Forward)), None)
    # A stand-in for a weight comes with a copier.
    named = fields.items() if "__deepcopy__" in fields else ()
    state["upcast"] = frozenset(name for name, value in named if isinstance(value, UpcastTensor))
    state["input_gradient_hooks"] = len(input_gradient_hooks(module))
    return state


def _plain(value: Any) -> Any:
    """A value that can be compared: two partials of the same call are not equal, their parts are."""
    if isinstance(value, functools.partial):
        return value.func.__qualname__, value.args, dict(value.keywords)
    return value


def _rewritten_biases(model: nn.Module) -> set[int]:
    biases = (module._parameters.get("bias") for _, module in named_modules(model) if is_quantized_layer(module))
    return {id(bias) for bias in biases if bias is not None}


def _parametrized_by_peft(model: nn.Module) -> set[int]:
    wrappers = [m for _, m in named_modules(model) if is_adapter_module(m) and hasattr(m, "parameter_name")]
    return {id(p) for wrapper in wrappers for p in wrapper.get_base_layer().parameters()}  # type: ignore[operator]


def _compare(
    differences: dict[str, dict[str, tuple[Any, Any]]],
    fqn: str,
    expected: dict[str, Any],
    found: dict[str, Any],
    ignored: Collection[str] = (),
) -> None:
    for what, value in expected.items():
        if what not in ignored and found[what] is not value and found[what] != value:
            differences.setdefault(fqn, {})[what] = (value, found[what])
