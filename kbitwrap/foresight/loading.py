"""The peak of loading: what ``from_pretrained`` holds on a device while it quantizes one weight after the other."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import UnsupportedModelError
from ..model.pretrained import DEQUANTIZED_BY
from ..model.tree import ModelTree
from ..tensors.allocator import ALLOCATION_BYTES, rounded_up
from .ledger import FORWARD, WEIGHTS, Events, Storage
from .quantization import is_built, is_followed, quantize_weight, warm_tables
from .tracker import Watch, held_tensors

LOADING = "loading_of_files"
"""The attribute of a model without weights that says what loading it would allocate."""
LOADING_HIGHEST = "loading the model takes more than the step, and is what has to fit"
"""The note on a prediction whose model takes more while it is loaded."""

_PLAIN = re.compile(r"[\w.]+$")  # of names that are no patterns


@dataclass(frozen=True)
class Loading:
    """The memory that is made and freed while a model is loaded.

    Attributes:
        turns: Parameters and buffers in order, each with its events: first ``None`` with
            the memory that is freed at once, then each parameter with what is made before
            all turns, then each again with its own turn, and the buffers.
        mapped_bytes: The bytes of the largest tensor of the files. These are mapped until
            the last is read; pages that were read are clean, and the system takes them
            back where it needs memory, once their tensor is copied.
    """

    turns: list[tuple[Any, Events]]
    mapped_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes held."""
        level = highest = 0
        for _, events in self.turns:
            for storage, number in events:
                level += number * storage.num_bytes
                highest = max(highest, level)
        return highest


def loading_of(model: Any) -> Loading | None:
    """Return what ``from_pretrained`` allocates on CUDA, as core_model_loading.py of transformers 5 loads.

    First all memory that the weights will take is allocated and freed again, in one
    piece (``caching_allocator_warmup``). Weights that it quantizes are loaded one at a
    time, in the natural order of their names: each lies on the device in the dtype of
    the model until it is quantized, and what was quantized before is there. Where it
    quantizes none, threads read ahead of what is made of the tensors, as far as they
    get: to the end. Experts that files hold one by one are merged, and a weight that
    was saved quantized lets go of the tensor that said how.

    Args:
        model: The model as ``meta_model`` builds it.

    Returns:
        The events; ``None`` where they are not known: another quantization than
        bitsandbytes', or files that are dequantized.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    is_dequantized = DEQUANTIZED_BY in vars(model)
    if is_dequantized or not (quantizer is None or is_followed(quantizer)):
        return None
    quantizes = quantizer is not None and not quantizer.pre_quantized
    warm_tables()
    saved = {id(value): value for value in model.state_dict(keep_vars=True).values()}
    warm = storage_of(sum(value.nbytes for value in saved.values()))
    read = [(None, [(warm, 1), (warm, -1)])]
    turns: list[tuple[Any, Events]] = []
    known = {}
    largest = 0
    for loaded in _in_order(model):
        parameter = loaded.parameter
        whole = parameter.unpacked if is_built(parameter) else parameter
        largest = max(largest, (whole if quantizes else parameter).nbytes)
        layout = loaded.is_merged, loaded.is_transposed
        key = type(parameter), whole.shape, whole.dtype, layout
        if key not in known:
            known[key] = _events(loaded, quantizes)
        before_all, own_events = known[key]
        read.append((parameter, before_all))
        turns.append((parameter, own_events))
    for buffer in model.buffers():
        turns.append((buffer, [(storage_of(buffer.nbytes), 1)]))
    return Loading(read + turns, largest)


def events_of(loading: Loading | None, tree: ModelTree) -> list[tuple[Any, Events]]:
    """Return the events of loading a model; where they are not known, each tensor is made once."""
    if loading is not None:
        return loading.turns
    held = {id(tensor): tensor for tensor, _, _ in held_tensors(tree)}
    return [(tensor, [(storage_of(tensor.nbytes), 1)]) for tensor in held.values()]


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
    method = quantizer.quantization_config.quant_method
    replaces = quantizer.get_weight_conversions()
    for name, _ in model.named_parameters():
        if replaces or quantizer.param_needs_quantization(model, name):
            raise UnsupportedModelError(
                f"expected plain tensors and weights of bitsandbytes, found a {type(model).__name__} quantized with "
                f"{getattr(method, 'value', method)}, which makes tensors of its own of the weights when they "
                "are loaded: their operations cannot be followed without values. StepTracker measures a step of "
                "the loaded model"
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
        names = []
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

    merged = {}
    renamed = {}
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


def storage_of(num_bytes: int) -> Storage:
    """Return a storage of so many bytes, as the allocator counts them."""
    return Storage(rounded_up(num_bytes, ALLOCATION_BYTES), WEIGHTS)


def _events(loaded: _Loaded, quantizes: bool) -> tuple[Events, Events]:
    """Return what is allocated and freed for a parameter before all turns, and in its own turn."""
    parameter = loaded.parameter
    if not is_built(parameter):
        tensor = storage_of(parameter.nbytes)
        read, made = [(tensor, 1)], []
        if loaded.is_merged:
            parts = storage_of(parameter.nbytes)
            read, made = [(parts, 1)], [(tensor, 1), (parts, -1)]
        return ([], read + made) if quantizes else (read, made)
    turn = _quantized(loaded)
    if quantizes:
        return [], turn
    kept = dict(turn)
    for storage, number in turn:
        if number < 0:
            del kept[storage]
    # of a few bytes: what says how it was quantized, and the offset of double quantization that is read from it
    settings = storage_of(1)
    turn = [(settings, -1)]
    if getattr(parameter, "compress_statistics", False):
        offset = min(kept, key=lambda storage: storage.num_bytes)
        del kept[offset]
        turn.insert(0, (offset, 1))
    return [*kept.items(), (settings, 1)], turn


def _quantized(loaded: _Loaded) -> Events:
    """Return what is allocated and freed for a weight while it is quantized: it stays until that is done."""
    whole = loaded.parameter.unpacked
    shape = whole.shape[::-1] if loaded.is_transposed else whole.shape  # in its file
    watch = Watch(on_cuda=True)
    watch.enter(FORWARD)
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        weight = torch.empty(shape, dtype=whole.dtype, device="cpu")
        if loaded.is_transposed:
            weight = weight.T
        made = quantize_weight(loaded.parameter, weight)
        del weight
    events = watch.close().spans[0].events
    del made
    return events
