"""The sides of a comparison: a merged checkpoint, its base and its merge, by the names of tensors in files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import StrPath
from ..errors import ConfigError
from ..export.export import saved_tensors
from ..export.merge import merge_into
from ..export.plain import is_transposed, make_plain
from ..export.ties import untie
from ..export.twin import build_twin
from ..model.pretrained import load_pretrained
from ..model.quantization import is_quantized_layer, library_dequantizer
from ..model.tree import ModelTree, join
from ..model.wrappers import canonical_fqn, unwrap
from .reader import SavedCheckpoint, open_checkpoint, tied_names


@dataclass(frozen=True)
class Side:
    """The tensors of one model, by name; none is computed or read before it is asked for.

    Attributes:
        saved: Those that ``save_pretrained`` writes, by their names in the files.
        named: All of them, also those that are tied to another, by their names in the
            model.
        ties: The names that are one tensor, by group.
    """

    saved: Mapping[str, Tensor]
    named: Mapping[str, Tensor]
    ties: list[list[str]]

    def names_in_model(self) -> dict[str, str]:
        """The names in the model of all tensors, by these and by those in files."""
        fqns: dict[tuple[int, torch.Size], str] = {}
        for fqn, tensor in self.named.items():
            fqns.setdefault(_place(tensor), fqn)

        found = {fqn: fqn for fqn in self.named}
        for name, tensor in self.saved.items():
            found.setdefault(name, fqns.get(_place(tensor), name))

        return found


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """The key that tells the tensors of one side apart, none of which is computed."""
    return tensor.untyped_storage().data_ptr(), tensor.shape


def plain_side(model: nn.Module, *, is_merged: bool) -> Side:
    """The plain model that a model is, with or without its active adapters, not rounded."""
    twin = build_twin(ModelTree(model))
    merge_into(twin, None if is_merged else (), in_float32=True)
    ties = tied_names(twin.model)
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "layer_replication", None) for config in configs):
        _untie_replicas(twin.model, ties)

    saved = saved_tensors(twin.model)
    return Side(saved, twin.model.state_dict(), ties)


def _untie_replicas(model: nn.Module, ties: list[list[str]]) -> None:
    """Tell the layers that PEFT replicated apart: a model's own saving refuses those that share weights."""
    for first, *others in ties:
        for fqn in others:
            if re.sub(r"\d+", "", fqn) == re.sub(r"\d+", "", first):
                path, _, name = fqn.rpartition(".")
                untie(model.get_submodule(path), name)


def merged_onto(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The merged weights of a model whose layers have other weights, not rounded.

    A part of what adapters add may depend on the weights: DoRA's norm, a rotation, a
    scale. A quantized layer made from ``Conv1D`` is left out.
    """
    twin = build_twin(ModelTree(model))
    replaced = []
    for fqn, module in twin.model.named_modules():
        name = join(fqn, "weight")
        if name in weights and not is_transposed(module):
            parameters = {**module._parameters, "weight": weights[name]}
            if is_quantized_layer(module):
                make_plain(module)
            vars(module)["_parameters"].update(parameters)  # its bias stays
            replaced.append(name)

    merge_into(twin, in_float32=True)
    merged = twin.model.state_dict()
    return {name: merged[name] for name in replaced}


@dataclass(frozen=True)
class MergedSide:
    """A merged checkpoint, or a live model, as it is.

    Attributes:
        where: Its folder, or its class.
        tensors: Its tensors, dequantized, by their names.
        layers: The quantized layers of those that are stored quantized.
        ties: The names that loading ties, by group; ``None`` where that is not known.
        dtype: The dtype that its config names, or that it has live.
    """

    where: str
    tensors: Mapping[str, Tensor]
    layers: Mapping[str, nn.Module]
    ties: list[list[str]] | None
    dtype: torch.dtype | None


def read_merged(path: Path, trust_remote_code: bool = False) -> MergedSide:
    """A merged checkpoint: read from its files, or, where it is quantized, loaded, maybe by code in its folder."""
    checkpoint = open_checkpoint(path)
    if checkpoint.is_quantized:
        model, _ = load_pretrained(
            path, None, checkpoint.dtype, trust_remote_code=trust_remote_code
        )
        return walk_merged(model, str(path))

    meta = checkpoint.meta_model()
    ties = None if meta is None else tied_names(meta)
    tensors = {name: stored.lazy() for name, stored in checkpoint.tensors.items()}
    return MergedSide(str(path), tensors, {}, ties, checkpoint.dtype)


def walk_merged(model: Any, where: str) -> MergedSide:
    """A live model that something was merged into."""
    bare, _ = unwrap(model)
    layers = {}
    for node in ModelTree(bare).base:
        if stored_dtype(node.module) is not None:
            layers[join(node.fqn, "weight")] = node.module

    side = plain_side(bare, is_merged=False)
    dtype = getattr(bare, "dtype", None)
    return MergedSide(where, side.saved, layers, tied_names(bare), dtype)


class Names:
    """Finds tensors of a merged checkpoint by the names that they should have.

    Tools write names with the prefixes of wrappers, and with or without that of the
    model inside a model.
    """

    def __init__(self, known: Mapping[str, Any], prefix: str) -> None:
        self._known = known
        self._prefix = f"{prefix}." if prefix else ""

    def of(self, name: str) -> str | None:
        """The known name of a tensor; ``None`` where there is none."""
        canonical = canonical_fqn(name)
        tried = [name, canonical]
        if self._prefix:
            tried += [canonical.removeprefix(self._prefix), self._prefix + canonical]

        return next((one for one in tried if one in self._known), None)


def stored_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype that a quantized layer keeps its codes in.

    ``None`` of a layer that is not quantized.
    """
    is_library = library_dequantizer(module) is not None
    if not is_library and not is_quantized_layer(module):
        return None

    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    codes = [one.dtype for one in tensors if not one.is_floating_point()]
    return next(iter(codes + [one.dtype for one in tensors]), None)


def original_tensors(base: StrPath) -> dict[str, Tensor]:
    """The floating-point tensors in the files of a base that was saved unquantized, by name; none of another."""
    checkpoint = files_of_base(base)
    if checkpoint is None or checkpoint.is_quantized:
        return {}

    return {name: stored.lazy() for name, stored in checkpoint.tensors.items()}


def files_of_base(base: StrPath) -> SavedCheckpoint | None:
    """The tensors in the files of a base; ``None`` where they are of a kind that is not read here."""
    folder = _folder_of(base)
    try:
        return None if folder is None else open_checkpoint(folder)
    except ConfigError:  # what loads it need not be safetensors
        return None


def _folder_of(base: StrPath) -> Path | None:
    """The folder of a base, or of its snapshot in the hub's cache."""
    from transformers.utils.hub import cached_file

    if os.path.isdir(base):
        return Path(base)

    found = cached_file(
        os.fspath(base),
        "config.json",
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found).parent
