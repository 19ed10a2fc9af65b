"""The peak of loading: what ``from_pretrained`` holds on a device while it quantizes one weight after the other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import UnsupportedModelError
from ..model.pretrained import DEQUANTIZED_BY
from .cuda import ALLOCATION_BYTES
from .ledger import FORWARD, WEIGHTS, rounded_up
from .quantization import is_built, is_followed, method_of, quantize_weight, warm_tables
from .tracker import Watch

LOADING = "loading_bytes_of_files"
"""The attribute of a model without weights that says what loading it would take."""
LOADING_HIGHEST = "loading the model takes more than the step, and is what has to fit"
"""The note on a prediction whose model takes more while it is loaded."""


_PLAIN = re.compile(r"[\w.]+$")  # of names that are no patterns


class _Rise(NamedTuple):
    """The bytes that one parameter adds while it is loaded.

    Attributes:
        ahead: Those of its tensors in files that threads read before their turn.
        highest: The most beside what was there before its turn.
        kept: What its turn adds for good; negative where it frees more.
    """

    ahead: int
    highest: int
    kept: int


def loading_bytes(model: Any) -> int | None:
    """Return the most bytes that ``from_pretrained`` holds on CUDA, as core_model_loading.py of transformers 5 loads.

    Weights that it quantizes are loaded one at a time, in the natural order of their
    names: each lies on the device in the dtype of the model until it is quantized, and
    what was quantized before is there. Where it quantizes none, threads read ahead of
    what is made of the tensors, as far as they get: to the end. Experts that files hold
    one by one are merged, and a weight that was saved quantized lets go of the tensor
    that said how.

    Args:
        model: The model as ``meta_model`` builds it.

    Returns:
        The bytes; ``None`` where it is not known: another quantization than
        bitsandbytes', or files that are dequantized.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    is_dequantized = DEQUANTIZED_BY in vars(model)
    if is_dequantized or not (quantizer is None or is_followed(quantizer)):
        return None
    quantizes = quantizer is not None and not quantizer.pre_quantized
    warm_tables()
    rises = []
    known: dict[Hashable, _Rise] = {}
    for loaded in _in_order(model):
        parameter = loaded.parameter
        whole = parameter.unpacked if is_built(parameter) else parameter
        turned = loaded.is_merged, loaded.is_transposed
        key = type(parameter), whole.shape, whole.dtype, turned
        if key not in known:
            known[key] = _rise(loaded, quantizes)
        rises.append(known[key])
    level = highest = sum(rise.ahead for rise in rises)
    for rise in rises:
        highest = max(highest, level + rise.highest)
        level += rise.kept
    level += sum(map(_size, model.buffers()))
    return max(highest, level)


def refuse_replaced(model: Any) -> None:
    """Refuse a quantizer that puts tensors of its own in the place of the weights that a model was built with.

    Args:
        model: The model as ``meta_model`` builds it.

    Raises:
        UnsupportedModelError: The weights are such, and not of bitsandbytes.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or is_followed(quantizer):
        return
    replaces = quantizer.get_weight_conversions()
    for name, _ in model.named_parameters():
        if replaces or quantizer.param_needs_quantization(model, name):
            raise UnsupportedModelError(
                f"expected plain tensors and weights of bitsandbytes, found a {type(model).__name__} quantized with "
                f"{method_of(quantizer)}, which makes tensors of its own of the weights when they are loaded: their "
                "operations cannot be followed without values. StepTracker measures a step of the loaded model"
            )


def refuse_hqq_files(folder: Any) -> None:
    """Refuse a folder with layers that HQQ wrote: its config does not say so, and loading initializes them.

    Args:
        folder: The folder; what is none, or holds no file that can be read, is let through.

    Raises:
        UnsupportedModelError: There is such a layer in it.
    """
    from safetensors import SafetensorError, safe_open

    for file in Path(folder).glob("*.safetensors"):
        names: list[str] = []
        with (
            contextlib.suppress(OSError, SafetensorError),
            safe_open(file, "pt") as tensors,
        ):
            names = list(tensors.keys())
        if any(name.endswith(".W_q") for name in names):
            raise UnsupportedModelError(
                f"{file}: the layers are quantized with HQQ, which the config does not say, and from_pretrained would "
                "initialize them again: read them by the program on the page on exports, and give the model itself"
            )


class _Loaded(NamedTuple):
    """A parameter that is loaded.

    Attributes:
        name: Its name, or the first one that files have for a part of it.
        parameter: The parameter as it was built.
        is_merged: Whether it is merged of several tensors.
        is_transposed: Whether it is turned before it is quantized.
    """

    name: str
    parameter: Any
    is_merged: bool
    is_transposed: bool


def _in_order(model: Any) -> list[_Loaded]:
    """Return the parameters, each once, in the order in which files name them, as transformers converts the names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key

    merged: dict[str, str] = {}
    renamed: dict[str, str] = {}
    for conversion in get_model_conversion_mapping(model):
        first = conversion.source_patterns[0].lstrip("^").replace("\\.", ".")
        for pattern in conversion.target_patterns:
            if isinstance(conversion, WeightConverter):
                merged[pattern] = first.replace("*", "0")
            elif _PLAIN.match(pattern) and _PLAIN.match(first):
                renamed[pattern] = first
    found = []
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        replaced = getattr(owner, "source_cls", None)
        is_transposed = getattr(replaced, "__name__", "") == "Conv1D"
        is_merged = False
        for pattern, of_first in merged.items():
            name, num_found = re.subn(pattern, of_first, name)
            is_merged = is_merged or num_found > 0
        for part, of_files in renamed.items():
            name = name.replace(part, of_files)
        found.append(_Loaded(name, parameter, is_merged, is_transposed))
    return sorted(found, key=lambda loaded: dot_natural_key(loaded.name))


def _size(tensor: Tensor) -> int:
    return rounded_up(tensor.nbytes, ALLOCATION_BYTES)


def _rise(loaded: _Loaded, quantizes: bool) -> _Rise:
    """Return the bytes of a parameter that is loaded, in its turn or, where nothing is quantized, before it."""
    parameter = loaded.parameter
    if not is_built(parameter):
        size = _size(parameter)
        parts = size if loaded.is_merged else 0
        return _Rise(0, size + parts, size) if quantizes else _Rise(size, parts, 0)
    rise = _quantized(loaded)
    if quantizes:
        return rise
    # of a few bytes: what says how it was quantized, and the offset of double quantization that is read from it
    settings = ALLOCATION_BYTES
    is_double = getattr(parameter, "compress_statistics", False)
    offset = ALLOCATION_BYTES if is_double else 0
    return _Rise(rise.kept - offset + settings, offset, offset - settings)


def _quantized(loaded: _Loaded) -> _Rise:
    """Return the bytes of a weight while it is quantized: it stays until that is done."""
    whole = loaded.parameter.unpacked
    shape = whole.shape[::-1] if loaded.is_transposed else whole.shape  # in its file
    watch = Watch(on_cuda=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.empty(shape, dtype=whole.dtype, device="cpu")
        watch.hold(weight, WEIGHTS)
        held = watch.ledger.held().total()
        watch.enter(FORWARD)
        with watch:
            if loaded.is_transposed:
                weight = weight.T
            made = quantize_weight(loaded.parameter, weight)
        del weight
    run = watch.ledger.runs()[0]
    del made
    return _Rise(0, held + run.at_peak.total(), held + run.net.total())
