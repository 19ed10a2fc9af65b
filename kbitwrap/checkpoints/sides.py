"""The sides of a comparison: a merged checkpoint, its base and its merge, by the names of tensors in files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import StrPath
from ..errors import ConfigError
from ..export.configs import cached_path
from ..export.export import saved_tensors
from ..export.merge import merge_into
from ..export.plain import is_transposed, make_plain
from ..export.ties import untie
from ..export.twin import build_twin
from ..model.pretrained import load_pretrained
from ..model.quantization import is_quantized_layer, library_dequantizer
from ..model.tree import ModelTree, join
from ..model.wrappers import unwrap
from .reader import SavedCheckpoint, lazy_tensors, open_checkpoint, tied_names


@dataclass(frozen=True)
class Side:
    """The tensors of one model, by name; none is computed or read before it is asked for.

    Attributes:
        saved: Those in its files, or that ``save_pretrained`` writes, dequantized, by
            their names there.
        ties: The names that are one tensor, by group; ``None`` where that is not known.
        named: All of them, also those that are tied to another, by their names in the
            model; none of a checkpoint that is read from its files.
        layers: The quantized layers of a merged checkpoint, by the names of their
            weights in the model.
        dtype: The dtype that its config names, or that it has live.
    """

    saved: Mapping[str, Tensor]
    ties: list[list[str]] | None
    named: Mapping[str, Tensor] = field(default_factory=dict)
    layers: Mapping[str, nn.Module] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    def names_in_model(self) -> dict[str, str]:
        """Return the names in the model of all tensors, by these and by those in files."""
        fqns: dict[tuple[int, torch.Size], str] = {}
        for fqn, tensor in self.named.items():
            fqns.setdefault(_place(tensor), fqn)

        found = {fqn: fqn for fqn in self.named}
        for name, tensor in self.saved.items():
            found.setdefault(name, fqns.get(_place(tensor), name))

        return found


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return the key that tells the tensors of one side apart, none of which is computed."""
    return tensor.untyped_storage().data_ptr(), tensor.shape


def plain_side(model: nn.Module, *, is_merged: bool) -> Side:
    """Return the plain model that a model is, with or without its active adapters, not rounded."""
    twin = build_twin(ModelTree(model))
    merge_into(twin, None if is_merged else (), in_float32=True)
    ties = tied_names(twin.model)
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "layer_replication", None) for config in configs):
        # A model's own saving refuses layers that share weights.
        for first, *others in ties:
            for fqn in others:
                if re.sub(r"\d+", "", fqn) == re.sub(r"\d+", "", first):
                    path, _, name = fqn.rpartition(".")
                    untie(twin.model.get_submodule(path), name)

    return Side(saved_tensors(twin.model), ties, twin.model.state_dict())


def merged_onto(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the merged weights of a model whose layers have other weights, not rounded.

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


def read_merged(path: Path, trust_remote_code: bool = False) -> Side:
    """Read a merged checkpoint from its files; a quantized one is loaded, maybe by code in its folder."""
    checkpoint = open_checkpoint(path)
    if checkpoint.is_quantized:
        model, _ = load_pretrained(
            path, None, checkpoint.dtype, trust_remote_code=trust_remote_code
        )
        return walk_merged(model)

    meta = checkpoint.meta_model()
    ties = None if meta is None else tied_names(meta)
    return Side(lazy_tensors(checkpoint.tensors), ties, dtype=checkpoint.dtype)


def walk_merged(model: Any) -> Side:
    """Return a live model that something was merged into."""
    bare, _ = unwrap(model)
    layers = {}
    for node in ModelTree(bare).base:
        if stored_dtype(node.module) is not None:
            layers[join(node.fqn, "weight")] = node.module

    saved = plain_side(bare, is_merged=False).saved
    dtype = getattr(bare, "dtype", None)
    return Side(saved, tied_names(bare), layers=layers, dtype=dtype)


def stored_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that a quantized layer keeps its codes in.

    ``None`` of a layer that is not quantized.
    """
    is_library = library_dequantizer(module) is not None
    if not is_library and not is_quantized_layer(module):
        return None

    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    codes = [one.dtype for one in tensors if not one.is_floating_point()]
    return next(iter(codes + [one.dtype for one in tensors]), None)


def original_tensors(base: StrPath) -> dict[str, Tensor]:
    """Return the tensors in the files of a base that was saved unquantized, by name; none of another."""
    checkpoint = files_of_base(base)
    if checkpoint is None or checkpoint.is_quantized:
        return {}

    return lazy_tensors(checkpoint.tensors)


def files_of_base(base: StrPath) -> SavedCheckpoint | None:
    """Return the tensors in the files of a base; ``None`` where they are of a kind that is not read here."""
    config = cached_path(base, "config.json")  # in its folder, or in its snapshot
    try:
        return None if config is None else open_checkpoint(config.parent)
    except ConfigError:  # what loads it need not be safetensors
        return None
