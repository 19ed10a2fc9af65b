"""The weights, codes and statistics that layers of bitsandbytes compute with, in all of their forms.

A layer may be pending, which is not quantized yet, or have repacked its weight for a
CPU. As `quantization.py` it names that library.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.codes import Codes, EvenCodes, TableCodes
from ..tensors.lazy import LazyTensor
from .quantization import is_quantized_parameter
from .tree import shallow_copy
from .wrappers import loaded_class

STATISTICS = ("SCB", "quant_state")
"""The attributes of a bitsandbytes weight that hold what its codes are computed by."""
REPACKS = "support_avx512bf16_for_cpu"
"""The attribute of a ``Linear4bit`` that says whether it repacks its weight.

It does when it runs in eval mode on the CPU.
"""
RUNTIME_ATTRIBUTES = ("compute_dtype", "compute_type_is_set", REPACKS)
"""The attributes that a bitsandbytes layer sets on itself when it runs.

The last of them says what it does then.
"""
_NEXT_TO_ZERO = 2.0**-20  # less than all values of codes
_SHARED = "quantized_copy"
"""The attribute of a pending weight for a weak reference to its quantized copy."""
_WATCHER = "watcher_of_quantized_copy"
"""The attribute of a pending weight for what is called with its next copy."""
_AT_ONCE = 1 << 20
"""The values that are quantized at once; a multiple of every block size.

Quantizing takes forty times the bytes of its result. With fewer at once, threads that
want the same cores as other processes wait for one another most of the time.
"""
Rows = slice | types.EllipsisType
"""Some rows of a tensor, or the whole of it, of whatever shape."""
Settle = Callable[[dict[str, Any]], None]
"""A function that makes the fields of copied statistics the recorded ones."""


def _functional() -> Any:
    """Return the functions of bitsandbytes, which is loaded where there is a layer of it."""
    return sys.modules["bitsandbytes.functional"]


def is_pending(module: nn.Module) -> bool:
    """Return whether a bitsandbytes layer is not quantized yet.

    Its weight has the values that moving it to a device would quantize. Reading it
    returns the quantized values, computed on demand, so that a large model is never
    quantized as a whole.
    """
    weight = module._parameters.get("weight")
    if weight is None or not is_quantized_parameter(weight):
        return False

    if not weight.is_floating_point():
        return False

    if type(weight).__name__ != "Params4bit":
        return not getattr(weight, "has_fp16_weights", True)

    fields = vars(module)
    shape = fields.get("out_features"), fields.get("in_features")
    # Half storage, too, can be packed, in one column.
    return quant_state_of(module, weight) is None and weight.shape == shape


def make_pending(module: nn.Module, values: Tensor) -> None:
    """Give a layer that transformers made for quantized weights what is to be quantized."""
    conv1d = loaded_class("transformers.pytorch_utils", "Conv1D")
    if issubclass(vars(module)["source_cls"], conv1d):
        values = values.t()

    made = module.get_parameter("weight")
    weight = type(made)(values.detach(), requires_grad=False, **vars(made))
    module._parameters["weight"] = weight


def quantized_layer(module: nn.Module) -> nn.Module:
    """Return a bitsandbytes layer, quantized: a copy where it is pending, or its weight lazy.

    All copies of a pending one share a weight, as long as any of them is there.
    """
    pending = module.get_parameter("weight")
    if isinstance(pending, LazyTensor):
        classes: Any = type(pending).__mro__
        cls = next(one for one in classes if not issubclass(one, LazyTensor))
        weight: Any = Tensor._make_subclass(cls, pending.compute())
        copy_statistics(pending, weight)
        return _with_weight(module, weight)

    if not is_pending(module):
        return module

    watcher = vars(pending).pop(_WATCHER, None)
    shared = vars(pending).get(_SHARED)
    weight = None if shared is None else shared()
    if weight is None:
        weight = _quantized(pending)
        vars(pending)[_SHARED] = weakref.ref(weight)

    layer = _with_weight(module, weight)
    if watcher is not None:
        watcher(layer)
    return layer


def copy_statistics(source: Tensor, weight: Tensor) -> None:
    """Give a weight the statistics that another one has."""
    for name in STATISTICS:
        if name in vars(source):
            vars(weight)[name] = vars(source)[name]


def _with_weight(module: nn.Module, weight: Any) -> nn.Module:
    """Copy a layer, with another weight."""
    layer = shallow_copy(module)
    layer._parameters["weight"] = weight
    return layer


def when_quantized(module: nn.Module, watcher: Callable[[nn.Module], None]) -> None:
    """Call a function once, with the copy of a pending layer that is quantized next.

    It sees a layer that somebody reads, which is not quantized again for it.
    """
    vars(module.get_parameter("weight"))[_WATCHER] = watcher


def _quantized(pending: Any) -> Any:
    """Make the weight that a pending one becomes when it is moved to its device."""
    values = pending.detach().as_subclass(Tensor)
    is_int8 = type(pending).__name__ == "Int8Params"
    parts = values.reshape(-1).split(_AT_ONCE)
    if is_int8:
        parts = values.split(max(_AT_ONCE // max(values.shape[1], 1), 1))
    codes, scales = [], []
    for part in parts:
        made, state = _quantize_as(None if is_int8 else pending, part)
        codes.append(made)
        scales.append(state if is_int8 else state.absmax)

    data = torch.cat(codes)
    if is_int8:
        return type(pending)(data, requires_grad=False, CB=data, SCB=torch.cat(scales))

    state.absmax = torch.cat(scales)
    state.shape = pending.shape
    if pending.compress_statistics:
        _compress(state)

    data = data.flatten().view(pending.quant_storage).unsqueeze(1)
    weight = Tensor._make_subclass(type(pending), data)
    fields = {**vars(pending), "quant_state": state, "bnb_quantized": True}
    fields.pop(_SHARED, None)
    vars(weight).update(fields)
    return weight


def _compress(state: Any) -> None:
    """Quantize the statistics of a 4-bit weight, as bitsandbytes does."""
    state.offset = state.absmax.mean()
    state.absmax, state.state2 = _functional().quantize_blockwise(
        state.absmax - state.offset, blocksize=256
    )
    state.nested = True


def _stored(layer: nn.Module) -> tuple[Tensor, Any, Any]:
    """Read what a quantized layer stores: its codes, their scales and the 4-bit statistics.

    The codes of 8 bits are a matrix, with a scale for each row (LLM.int8(), Dettmers et
    al. 2022, section 2), those of 4 bits flat bytes, with a scale for each block. A
    layer that was loaded with ``has_fp16_weights`` has values, and no scales.
    """
    weight = unpacked_copy(layer.get_parameter("weight"))
    codes = weight.detach().as_subclass(Tensor)
    if weight.dtype == torch.int8:
        scales = getattr(weight, "SCB", None)
        if scales is None:
            scales = vars(layer)["state"].SCB
        return codes, scales.to(weight.device), None

    state = quant_state_of(layer, weight)
    if state is None:
        return codes, None, None

    scales = state.absmax
    if state.nested:
        scales = _functional().dequantize_blockwise(scales, state.state2) + state.offset
    return codes.view(torch.uint8).flatten(), scales, state


def dequantizer(module: nn.Module) -> Callable[[Rows], Tensor]:
    """Make a function that computes rows of a bitsandbytes layer's weight, as it runs.

    The weight has the shape ``(out_features, in_features)``. The quantized copy of a
    pending layer lives as long as the function.
    """
    layer = quantized_layer(module)
    return functools.partial(_dequantized, layer, *_stored(layer))


def _dequantized(
    _held: nn.Module, codes: Tensor, scales: Any, state: Any, rows: Rows
) -> Tensor:
    """Compute rows of the weight of a layer that stores these codes."""
    if scales is None:
        return codes[rows]

    if state is None:
        return codes[rows].float().mul_(scales.view(-1, 1)[rows]).div_(127)

    state = copy.copy(state)
    state.nested = False
    state.absmax = scales
    num_rows, width = state.shape[0], math.prod(state.shape[1:])
    if rows is ... or width % state.blocksize:
        whole: Tensor = _functional().dequantize_4bit(codes.view(-1, 1), state)
        return whole[rows]

    start, stop, _ = rows.indices(num_rows)
    blocks = slice(start * width // state.blocksize, stop * width // state.blocksize)
    state.absmax = scales[blocks]
    state.shape = torch.Size((stop - start, *state.shape[1:]))
    part = codes[start * width // 2 : stop * width // 2].view(-1, 1)
    return _functional().dequantize_4bit(part, state)  # type: ignore[no-any-return]


def dequantized_dtype(module: nn.Module, weight: Tensor) -> torch.dtype | None:
    """Return the dtype of the values of a layer's weight, where it is quantized to 4 bits."""
    if type(weight).__name__ == "Params4bit" and is_pending(module):
        return weight.dtype

    state = quant_state_of(module, weight)
    return None if state is None else state.dtype


def codes_of(module: nn.Module) -> Codes | None:
    """Read the codes of a bitsandbytes layer's weight.

    ``None`` of a layer that was loaded with ``has_fp16_weights``.
    """
    codes, scales, state = _stored(module)
    if scales is None:
        return None

    if state is None:
        stored = codes.view(torch.uint8).flatten()
        return EvenCodes(stored, 1 / 127, scales.float(), codes.shape[1])

    values = state.code.float().clone()
    [zeros] = (values == 0).nonzero(as_tuple=True)
    values[zeros[1:]] = -_NEXT_TO_ZERO  # fp4 has a -0, which stays another code
    return TableCodes(codes, values, scales.float(), state.blocksize)


def _quantize_as(settings: Any, values: Tensor) -> tuple[Tensor, Any]:
    """Quantize values to 4 bits, with settings as of a weight or its statistics, or, with none, to 8.

    The scales are not quantized again.

    Returns:
        The codes, those of 4 bits as bytes, and the statistics, or the scales of the
            rows.
    """
    if settings is None:
        codes, scales, _ = _functional().int8_vectorwise_quant(values.half())
        return codes, scales

    packed, state = _functional().quantize_4bit(
        values.contiguous(),
        blocksize=settings.blocksize,
        quant_type=settings.quant_type,
    )
    return packed, state


def share_of_codes(module: nn.Module, values: Tensor) -> float:
    """Return the share of a bitsandbytes layer's codes that values are quantized to.

    They are quantized as the layer was, and are all rows of the weight, or its first.
    Other values than those it was made of give few of its codes.
    """
    codes, scales, state = _stored(quantized_layer(module))
    if scales is None:
        return 0.0

    if state is None:
        found, _ = _quantize_as(None, values)
        return float((found == codes[: len(found)]).float().mean())

    packed, _ = _quantize_as(state, values.to(state.dtype))
    made = packed.flatten()
    differing = codes[: len(made)] ^ made
    num_same = (differing & 0x0F == 0).sum() + (differing & 0xF0 == 0).sum()
    return float(num_same) / (2 * len(differing))


def requantized(module: nn.Module, values: Tensor) -> Tensor:
    """Quantize values as a bitsandbytes layer is, but for double quantization, and dequantize them."""
    state = quant_state_of(module, module.get_parameter("weight"))
    codes, own = _quantize_as(state, values.float())
    if state is None:
        return codes.float() * own.view(-1, 1) / 127  # type: ignore[no-any-return]
    return _functional().dequantize_4bit(codes, own)  # type: ignore[no-any-return]


def has_scales_of_values(module: nn.Module, values: Tensor, allowed: Tensor) -> bool:
    """Return whether a bitsandbytes layer has the scales that its values give, block by block.

    A layer without scales has. ``allowed`` is how far each value may be off; double
    quantization adds half of the distance between its codes, but for the mean of the
    scales.
    """
    codes, scales, state = _stored(quantized_layer(module))
    if scales is None:
        return True

    size = codes.shape[1] if state is None else state.blocksize

    def largest(of_values: Tensor) -> Tensor:
        flat = of_values.flatten().abs()
        return nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size).amax(1)

    due, most = largest(values), largest(allowed)
    if state is not None and state.nested:
        if (due.mean() - state.offset).abs() > most.mean():
            return False
        outer = state.state2
        gaps = outer.code.diff()
        pad = nn.functional.pad
        widest = torch.maximum(pad(gaps, (0, 1)), pad(gaps, (1, 0)))
        largest_off = outer.absmax.repeat_interleave(outer.blocksize)[: len(scales)]
        most = most + widest[state.absmax.long()] / 2 * largest_off

    return bool(((due - scales.float()).abs() <= most).all())


@dataclass
class StateOwner:
    """An object beside a layer that holds quantization state of it."""

    name: str
    holder: Any
    # of the fields that hold state, where others do not
    names: tuple[str, ...] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields that hold the state."""
        fields = vars(self.holder)
        names = [name for name in fields if self.names is None or name in self.names]
        return {name: fields[name] for name in names}

    def replace(self, fields: dict[str, Any]) -> None:
        """Give it these fields, in their order, in place of those that hold state."""
        own, state = vars(self.holder), self.fields()
        others = {name: own[name] for name in own if name not in state}
        self.holder.__dict__ = others | fields


def state_owners(module: nn.Module, weight: Tensor) -> list[StateOwner]:
    """Return the objects that hold the quantization state of a layer."""
    owners = [
        StateOwner("weight", weight, ("CB", *STATISTICS)),
        StateOwner("state", vars(module).get("state")),
        StateOwner("quant_state", getattr(weight, "quant_state", None)),
    ]
    return [owner for owner in owners if owner.holder is not None]


def quant_state_of(module: nn.Module, weight: Tensor) -> Any:
    """Return the 4-bit statistics of a layer's weight, or ``None``.

    Sharding leaves them on the layer only.
    """
    state = getattr(weight, "quant_state", None)
    return getattr(module, "quant_state", None) if state is None else state


def lacks_statistics(module: nn.Module) -> bool:
    """Return whether a bitsandbytes layer has lost its statistics.

    Without these, its weight cannot be computed.
    """
    weight = module._parameters.get("weight")
    if weight is None or not is_quantized_parameter(weight) or is_pending(module):
        return False

    if weight.dtype == torch.int8:
        return lacks_scales(module, weight)

    is_four_bit = type(weight).__name__ == "Params4bit"
    return is_four_bit and quant_state_of(module, weight) is None


def lacks_scales(module: nn.Module, weight: Tensor) -> bool:
    """Return whether the scales of an 8-bit weight are neither on it nor on its layer."""
    owners = (weight, vars(module).get("state"))
    return all(getattr(owner, "SCB", None) is None for owner in owners)


def is_repacked(fields: Mapping[str, Any]) -> bool:
    """Return whether 4-bit statistics are those of a weight that its layer has repacked.

    Layers do so for CPUs with AVX512-BF16.
    """
    return bool(fields.get("packing_format_for_cpu", False))


def has_transposed_scales(module: nn.Module) -> bool:
    """Return whether a 4-bit layer has the scales of a repacked weight, and a weight that is not.

    bitsandbytes leaves it so where its state dict is read after the weight was repacked,
    unless the scales are quantized too. What it computes then is wrong: the scales are
    in another order, and in bfloat16.
    """
    weight = module._parameters.get("weight")
    state = None if weight is None else quant_state_of(module, weight)
    if state is None or is_repacked(vars(state)):
        return False

    return bool(state.absmax.ndim > 1)


def in_other_layout(weight: Tensor, quant_state: Any) -> Tensor:
    """Return the bytes of a 4-bit weight in the other of its two layouts.

    It is a permutation of nibbles, hence exact.
    """
    # bitsandbytes writes into the state that it is given
    state = copy.copy(quant_state)
    # and would compute statistics that nobody reads
    state.nested = state.original_nested = False
    inverse = "_inverse" if is_repacked(vars(state)) else ""
    convert = getattr(_functional(), f"_convert_weight_packed_for_cpu{inverse}")
    return convert(weight.data, state)[0]  # type: ignore[no-any-return]


def unpack_statistics(state: Any) -> None:
    """Make the statistics of a repacked weight those of the other layout, in place.

    Their rounding stays.
    """
    state.absmax = state.absmax.T.reshape(-1).float()
    state.nested = False
    if state.original_nested:
        _compress(state)

    state.dtype = state.original_dtype
    for name in (
        "packing_format_for_cpu",
        "original_dtype",
        "original_nested",
        "original_qshape",
        "original_storage_type",
    ):
        vars(state).pop(name, None)


def unpacked_state(quant_state: Any, settle: Settle | None = None) -> Any:
    """Return the 4-bit statistics of a weight that is not repacked.

    They are those given, or a copy where its layer has ever repacked the weight: its
    statistics stay rounded when it is unpacked.
    """
    if quant_state is None or "packing_format_for_cpu" not in vars(quant_state):
        return quant_state

    state = copy.copy(quant_state)
    if settle is not None:
        settle(vars(state))

    if is_repacked(vars(state)):
        unpack_statistics(state)

    return state


def unpacked_copy(weight: Tensor, settle: Settle | None = None) -> Tensor:
    """Return a weight that is not repacked for the CPU.

    It is the one given, or a copy where its layer has ever repacked it.
    """
    quant_state = getattr(weight, "quant_state", None)
    unpacked = unpacked_state(quant_state, settle)
    if unpacked is quant_state:
        return weight

    data = weight.data
    if is_repacked(vars(quant_state)):
        data = in_other_layout(weight, quant_state)

    copied = Tensor._make_subclass(type(weight), data)
    vars(copied).update(vars(weight), quant_state=unpacked)
    return copied
