"""What a model is quantized with, and what that permits. The only room that names the quantization libraries.

===================== ============================ =====================================================
method                 found by                     half parameters outside the quantized layers
===================== ============================ =====================================================
bitsandbytes 4/8-bit   ``is_loaded_in_4bit``/``8bit``, upcast
                       ``quantization_method``, or
                       a bitsandbytes layer
gptq, aqlm, eetq,      ``quantization_method``;      never cast (PEFT's own list)
hqq, torchao           hqq also ``hqq_quantized``
every other method     ``quantization_method``       never cast by the wrapper: the method computes its own
of transformers                                      layers in the dtype it loaded. PEFT casts them
===================== ============================ =====================================================
"""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .dtypes import HALF_DTYPES as HALF_DTYPES
from .journal import MISSING
from .topology import named_modules

DISTRIBUTIONS = ("bitsandbytes", "torchao", "hqq", "gptqmodel", "aqlm", "eetq", "optimum-quanto")
"""The libraries that quantize, as package indexes call them."""
Rows = slice | types.EllipsisType
"""Some rows of a tensor, or the whole of it, of whatever shape."""
_SELF_MANAGED_IN_PEFT = ("gptq", "aqlm", "eetq", "hqq", "torchao")


@dataclass(frozen=True)
class Quantization:
    """How a model is quantized.

    Attributes:
        method: ``"bitsandbytes_4bit"``, ``"bitsandbytes_8bit"``, another method's name, or ``None``.
        is_quantized: Whether the model is quantized, so that checkpointing is enabled.
        casts: Whether half parameters outside the quantized layers may be cast.
    """

    method: str | None
    is_quantized: bool
    casts: bool


def _bitsandbytes_classes(*names: str) -> tuple[type, ...]:
    """Classes of ``bitsandbytes.nn`` by name, if it is loaded: without it no model can hold one of its layers."""
    module = sys.modules.get("bitsandbytes.nn")
    return tuple(cls for name in names if (cls := getattr(module, name, None)) is not None)


def is_quantized_layer(module: nn.Module) -> bool:
    """Whether a module is a bitsandbytes 4-bit or 8-bit layer."""
    return isinstance(module, _bitsandbytes_classes("Linear4bit", "Linear8bitLt", "Embedding4bit", "Embedding8bit"))


def is_quantized_parameter(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds quantized storage, whatever its dtype.

    4-bit weights can be packed into a half dtype (``bnb_4bit_quant_storage``), whose bytes are no numbers.
    """
    cls = type(parameter)
    if cls is nn.Parameter:
        return False  # the quick answer for nearly all that are not
    # Subclasses that other libraries swap in (sharding, quanto, torchao) keep the class name but not the class.
    names = ("Params4bit", "Int8Params")
    return cls.__name__ in names or isinstance(parameter, _bitsandbytes_classes(*names))


def _method_of(model: nn.Module) -> str | None:
    method = getattr(model, "quantization_method", None)
    return None if method is None else str(getattr(method, "value", method))


def detect(model: nn.Module) -> Quantization:
    """Find out how a model is quantized, by its attributes and by its layers.

    Args:
        model: The model, wrapped or not.

    Returns:
        The quantization found.
    """
    peft = detect_as_peft(model)
    if peft.is_quantized:
        return peft
    # Inside a container, too, a model says how it is quantized.
    methods = (_method_of(module) for _, module in named_modules(model) if "quantization_method" in vars(module))
    method = next((method for method in methods if method not in (None, "bitsandbytes")), None)
    if method is not None:
        return Quantization(method, is_quantized=True, casts=False)
    for _, module in named_modules(model):
        if is_quantized_layer(module):
            bits = "8bit" if isinstance(module, _bitsandbytes_classes("Linear8bitLt", "Embedding8bit")) else "4bit"
            return Quantization(f"bitsandbytes_{bits}", is_quantized=True, casts=True)
    return peft


def detect_as_peft(model: nn.Module) -> Quantization:
    """Find out how a model is quantized by the attributes that PEFT's function reads, and by nothing else.

    Args:
        model: The model, wrapped or not.

    Returns:
        The quantization as PEFT sees it.
    """
    method = _method_of(model)
    if getattr(model, "hqq_quantized", False):
        method = "hqq"
    if method in _SELF_MANAGED_IN_PEFT:
        return Quantization(method, is_quantized=True, casts=False)
    for bits in ("8bit", "4bit"):
        if getattr(model, f"is_loaded_in_{bits}", False):
            return Quantization(f"bitsandbytes_{bits}", is_quantized=True, casts=True)
    return Quantization(None, is_quantized=False, casts=True)


class RuntimeChange:
    """What a bitsandbytes layer rewrites on itself when it runs, as it was.

    ``Linear4bit`` fills in ``compute_dtype``, and on some CPUs repacks its weight in eval mode; ``Linear8bitLt`` moves
    its weight's statistics into ``state``. Nothing is kept alive but the layer's small quantization statistics, and
    these on the CPU only, where repacking replaces them by an approximation. A weight that was replaced since (a
    merge) keeps its own state.
    """

    def __init__(self, module: nn.Module) -> None:
        weight = module._parameters["weight"]
        assert weight is not None
        self.module = weakref.ref(module)
        self.weight = weakref.ref(weight)
        fields = module.__dict__
        self.fields = {name: fields.get(name, MISSING) for name in ("compute_dtype", "compute_type_is_set")}
        self.state = {name: _recorded(vars(owner), keys) for name, owner, keys in _state_owners(module, weight)}

    def undo(self) -> None:
        """Put the recorded fields back."""
        module, weight = self.module(), self.weight()
        if module is None:
            return
        vars(module).update({k: v for k, v in self.fields.items() if v is not MISSING})
        if weight is None or module._parameters.get("weight") is not weight:
            return
        quant_state = getattr(weight, "quant_state", None)
        was_packed = self.state.get("quant_state", {}).get("packing_format_for_cpu", False)
        if getattr(quant_state, "packing_format_for_cpu", False) and not was_packed:
            _unpack_for_cpu(weight, quant_state)
        # All values are looked up before any is written: one field may be all that keeps another's value alive.
        held = {name: {key: (hold, _held(hold)) for key, hold in fields.items()} for name, fields in self.state.items()}
        for name, owner, keys in _state_owners(module, weight):
            if name in held:
                _write(vars(owner), held[name], keys)

    def unpacked_weight(self) -> torch.Tensor | None:
        """The weight as it was before the layer repacked it for the CPU, as a copy; ``None`` where it did not."""
        weight = self.weight()
        quant_state = getattr(weight, "quant_state", None)
        if weight is None or not getattr(quant_state, "packing_format_for_cpu", False):
            return None
        # bitsandbytes unpacks into the state that it is given.
        state = copy.copy(quant_state)
        copied = torch.Tensor._make_subclass(type(weight), _unpacked(weight, state))
        held = self.state.get("quant_state", {})
        if not held.get("packing_format_for_cpu", False):
            _write(vars(state), {key: (hold, _held(hold)) for key, hold in held.items()}, None)
        vars(copied).update({**vars(weight), "quant_state": state})
        return copied

    def original_quant_state(self) -> Any:
        """The layer's 4-bit statistics as they were before it repacked its weight, for a weight that lost them.

        Sharding makes a 4-bit weight a plain tensor; its layer still holds the statistics.

        Returns:
            The ``QuantState``, a copy where the layer has changed it; ``None`` where there is none.
        """
        state = getattr(self.module(), "quant_state", None)
        held = self.state.get("quant_state", {})
        if not getattr(state, "packing_format_for_cpu", False) or held.get("packing_format_for_cpu", False):
            return state
        state = copy.copy(state)
        _write(vars(state), {key: (hold, _held(hold)) for key, hold in held.items()}, None)
        return state

    def now(self) -> RuntimeChange:
        """A record of the same layer as it is now; of one that is gone, this record."""
        module = self.module()
        return self if module is None else RuntimeChange(module)


def dequantizer(module: nn.Module) -> Callable[[Rows], torch.Tensor]:
    """Compute rows of the weight of a bitsandbytes layer, as its forward sees it. The layer is only read.

    Args:
        module: A 4-bit or 8-bit layer, one that has run included.

    Returns:
        A function that computes some rows of the weight, which has shape ``(out_features, in_features)``: of 4 bits in
        the dtype of its ``quant_state`` (it keeps all of them), of 8 bits in float32, ``weight * SCB / 127`` with a
        scale for each row (LLM.int8(), Dettmers et al. 2022, section 2).
    """
    weight = RuntimeChange(module).unpacked_weight()
    if weight is None:
        weight = module._parameters["weight"]
        assert weight is not None
    values = weight.detach().as_subclass(torch.Tensor)
    if weight.dtype == torch.int8:
        scales = getattr(weight, "SCB", None)
        scales = vars(module)["state"].SCB if scales is None else scales
        scales = scales.to(weight.device).view(-1, 1)
        return lambda rows: values[rows].float().mul_(scales[rows]).div_(127)
    state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
    if state is not None:  # otherwise it was loaded with ``has_fp16_weights``
        functional: Any = sys.modules["bitsandbytes.functional"]
        values = functional.dequantize_4bit(weight.detach(), state)
    return values.__getitem__


def has_runtime_state(module: nn.Module) -> bool:
    """Whether a module is a bitsandbytes linear layer that rewrites fields of its own when it runs."""
    return isinstance(module, _linear_classes()) and _has_quantized_weight(module)


def layers_with_runtime_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules of which ``has_runtime_state`` holds.

    Args:
        model: The model.

    Returns:
        ``(fqn, module)`` in the order of ``named_modules``.
    """
    classes = _linear_classes()
    return [(fqn, m) for fqn, m in named_modules(model) if isinstance(m, classes) and _has_quantized_weight(m)]


def _linear_classes() -> tuple[type, ...]:
    return _bitsandbytes_classes("Linear4bit", "Linear8bitLt")


def _has_quantized_weight(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and is_quantized_parameter(weight)


def is_of_a_quantizer(conversion: Any) -> bool:
    """Whether a model's quantizer added this conversion between a checkpoint's tensors and the model's.

    Args:
        conversion: One of what transformers calls a model's weight conversions.
    """
    return any("hf_quantizer" in vars(operation) for operation in getattr(conversion, "operations", ()))


def _state_owners(module: nn.Module, weight: torch.Tensor) -> list[tuple[str, Any, tuple[str, ...] | None]]:
    """The objects beside a layer that hold its quantization state, and which of their fields do (``None``: all)."""
    owners = [
        ("weight", weight, ("CB", "SCB", "quant_state")),
        ("state", vars(module).get("state"), None),
        ("quant_state", getattr(weight, "quant_state", None), None),
    ]
    return [(name, owner, keys) for name, owner, keys in owners if owner is not None]


def _recorded(fields: dict[str, Any], keys: tuple[str, ...] | None) -> dict[str, Any]:
    """What an object's fields are, or those named in ``keys``; tensors are held as ``_hold`` says."""
    found = dict(fields) if keys is None else {key: fields[key] for key in keys if key in fields}
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            found[key] = _hold(value)
    return found


def _hold(value: torch.Tensor) -> Any:
    """Hold a tensor: off the CPU weakly, so that a record pins no device memory."""
    return value if value.is_cpu and value.dtype != torch.int8 else weakref.ref(value)


def _held(value: Any) -> Any:
    """What ``_hold`` held, or ``None`` where that is gone."""
    return value() if isinstance(value, weakref.ref) else value


def _write(fields: dict[str, Any], held: dict[str, tuple[Any, Any]], keys: tuple[str, ...] | None) -> None:
    """Make ``fields`` (or those named in ``keys``) what was held: the same keys in the same order, the same objects."""
    # A dead weak reference: the object is gone from the layer for good, and what replaced it stays.
    values = {
        key: fields.get(key) if value is None and isinstance(hold, weakref.ref) else value
        for key, (hold, value) in held.items()
    }
    for key in list(fields) if keys is None else keys:
        fields.pop(key, None)
    fields.update(values)


def _unpack_for_cpu(weight: torch.Tensor, quant_state: Any) -> None:
    """Undo the repacking of ``Linear4bit`` for CPUs with AVX512-BF16: a permutation of nibbles, hence exact."""
    weight.data = _unpacked(weight, quant_state)


def _unpacked(weight: torch.Tensor, quant_state: Any) -> torch.Tensor:
    functional = sys.modules["bitsandbytes.functional"]
    data: torch.Tensor = functional._convert_weight_packed_for_cpu_inverse(weight.data, quant_state)[0]
    return data
