"""Writing a twin to a folder: what the model's own ``save_pretrained`` would write, streamed."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from .checkpoint import read_header
from .errors import ConfigError, ExportError
from .lazy import LazyTensor, materialize
from .quantization import is_of_a_quantizer
from .reports import ExportReport
from .stream import staged, write_safetensors
from .twin import Twin

_WEIGHTS_PATTERN = "model{suffix}.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_METADATA = {"format": "pt"}

Writer = Callable[..., None]
"""Takes tensors by name, a path and ``metadata``, as ``safetensors.torch.save_file`` does."""


def export_twin(
    twin: Twin,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: bool = False,
    merged: tuple[str, ...] = (),
) -> ExportReport:
    """Write a twin as a checkpoint: a folder that is there whole, or not at all.

    A transformers model is written by its own ``save_pretrained``, config and all, with tensors streamed one at a time
    where it is the library's. Of any other model the state dict is written.

    Args:
        twin: The twin; its config gets the fields that ``save_pretrained`` sets.
        path: The folder to make.
        max_shard_size: The most bytes in a file, or a string such as ``"5GB"``.
        overwrite: Replace a folder that is there.
        progress: Show a bar of the bytes written.
        merged: The layers that adapters were merged into, for the report.

    Returns:
        What was written.

    Raises:
        ConfigError: ``max_shard_size`` cannot be meant.
        ExportError: It could not be written; nothing was left at ``path``.
    """
    start = time.perf_counter()
    _refuse_shard_size(max_shard_size)
    name = type(twin.model).__name__
    with staged(path, overwrite=overwrite) as folder:
        try:
            with tqdm(desc="export", unit="B", unit_scale=True, disable=not progress, leave=False) as bar:
                _save(twin.model, folder, max_shard_size, functools.partial(_write, bar))
        except (ExportError, OSError):
            raise
        except Exception as error:
            raise ExportError(f"{name} could not be saved: {error}; {os.fspath(path)} is as it was") from error
        files = tuple(sorted(file.name for file in folder.iterdir()))
        weights = [folder / file for file in files if file.endswith(".safetensors")]
        sizes = [tensor.num_bytes for file in weights for tensor in read_header(file)[0].values()]
    seconds = time.perf_counter() - start
    return ExportReport(Path(path), files, len(sizes), sum(sizes), twin.converted, merged, seconds)


def _write(
    bar: tqdm[Any], tensors: Mapping[str, torch.Tensor], path: str, metadata: Mapping[str, str] | None = None
) -> None:
    write_safetensors(path, tensors, metadata, progress=bar.update)


def _refuse_shard_size(max_shard_size: int | str) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    is_meant = isinstance(max_shard_size, str) or (type(max_shard_size) is int and max_shard_size > 0)
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except (TypeError, ValueError):
        is_meant = False
    if not is_meant:
        raise ConfigError(f"max_shard_size: expected bytes or a string such as '5GB', found {max_shard_size!r}")


def _save(model: nn.Module, folder: Path, max_shard_size: int | str, write: Writer) -> None:
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        _save_state_dict(model, folder, max_shard_size, write)
        return
    fields = vars(model)
    # One process writes all of it, whichever rank it has.
    fields["should_save_on_this_rank"] = lambda is_main_process: True
    if fields.get("_weight_conversions"):
        # What read a quantized checkpoint has no way back, and needs none: a state dict has the names of what it read.
        fields["_weight_conversions"] = [c for c in fields["_weight_conversions"] if not is_of_a_quantizer(c)]
    function = _streaming(type(model).save_pretrained, write)
    if function is None:
        _materialize(model)
        function = type(model).save_pretrained
    function(model, folder, max_shard_size=max_shard_size)


def _streaming(function: Any, write: Writer) -> Callable[..., None] | None:
    """The library's ``save_pretrained`` with our writer in the place of safetensors', and nothing patched.

    Returns:
        The function over a copy of its module's names; ``None`` where it is another function, which calls the
        library's by name, or does not write by this name.
    """
    own = sys.modules["transformers.modeling_utils"].PreTrainedModel.save_pretrained
    if function is not own or inspect.unwrap(own) is not own or "safe_save_file" not in own.__code__.co_names:
        return None
    names = {**own.__globals__, "safe_save_file": write}
    rebuilt = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    rebuilt.__kwdefaults__ = own.__kwdefaults__
    return rebuilt


def _materialize(model: nn.Module) -> None:
    """Compute every lazy tensor of a twin; those that are tied stay one."""
    computed: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if isinstance(tensor, LazyTensor):
                values = computed.setdefault(id(tensor), materialize(tensor))
                vars(module)["_parameters"][name] = values


def _save_state_dict(model: nn.Module, folder: Path, max_shard_size: int | str, write: Writer) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = model.state_dict()
    for fqn, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ExportError(f"{fqn}: expected a tensor in the state dict, found {type(tensor).__name__}", fqn=fqn)
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=_WEIGHTS_PATTERN, max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        write({name: tensors[name] for name in names}, folder / file, metadata=_METADATA)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / _INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
