"""The subjects that the doctor examines: adapters and base, of a folder or of a live model, and the files of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..manifest.manifest import Manifest
from ..model.bitsandbytes_layers import (
    has_transposed_scales,
    is_repacked,
    quant_state_of,
)
from ..model.checks import refuse_unreadable
from ..model.pretrained import meta_model
from ..model.quantization import Quantization, is_quantized_parameter
from ..model.tree import ModelTree
from ..model.wrappers import canonical_fqn, unwrap
from ..preparation.copies import casts_by_others
from ..preparation.preparation import Preparation
from ..tensors.dtypes import find_dtype
from ..tensors.lazy import materialize
from .inspection import inspect_opened
from .reader import (
    StoredTensor,
    adapter_file,
    expect_file_of_weights,
    has_weights,
    lazy_tensors,
    open_checkpoint,
    read_json,
    read_tensors,
    saved_manifest,
    tied_names,
)

_CHECKPOINT = re.compile(r"checkpoint-\d+")
Tensors = Mapping[str, Tensor]


# ----------------------------------------------------------------------------------------------------
# The kinds of subjects.
# ----------------------------------------------------------------------------------------------------


class DoctorOptions(NamedTuple):
    """The caller's options beside what is examined.

    Attributes:
        base: The base that was trained on: a folder, a name, a model, or ``None``.
        adapter: The folder of the adapter that may have been merged, or ``None``.
        quantization_config: How the base was quantized in training, as for
            `merge_checkpoint`.
        device: The device to dequantize a base on; ``None`` for the accelerator if there
            is one, else the CPU.
        trust_remote_code: Run the code that the base's folder brings along.
    """

    base: Any
    adapter: Any
    quantization_config: Any
    device: Any
    trust_remote_code: bool

    @property
    def named_base(self) -> Any:
        """The base, if it is a folder or a name, which can be loaded as it was trained on."""
        return None if isinstance(self.base, nn.Module) else self.base


class Adapter(NamedTuple):
    """An adapter, saved or live.

    Attributes:
        where: Its folder, or the class of the live model.
        tensors: Its tensors, by their names in the file or the live model.
        is_damaged: Whether its files cannot be read.
    """

    where: str
    tensors: Tensors
    is_damaged: bool = False


@dataclass(frozen=True)
class Base:
    """A base, saved or live. While a preparation holds it, nothing that this makes of it is a fault.

    Attributes:
        tensors: The tensors that are not quantized, by fqn.
        meta: The model that its config describes, on the meta device; ``None`` where
            transformers knows none.
        ties: The names that the config ties, by group.
        dtype: The dtype that its config names.
        sources: The dtype from which each 4-bit weight was quantized, by fqn.
        transposed: The 4-bit weights whose scales lie in the order of another layout;
            ``None`` while one is repacked, which hides in which order they lay before.
        left: Float32 that a preparation left; ``None`` where that cannot be told.
        is_all_float32: Whether nothing says that the original was half.
    """

    tensors: Tensors
    meta: Any
    ties: Sequence[Sequence[str]]
    dtype: torch.dtype | None
    sources: Mapping[str, torch.dtype | None]
    transposed: Sequence[str] | None
    left: Sequence[str] | None
    is_all_float32: bool = False

    @functools.cached_property
    def quantization(self) -> Quantization:
        """The quantization that its config names."""
        if self.meta is None:
            return Quantization(None)
        return ModelTree(self.meta).quantization


@dataclass(frozen=True)
class Subject:
    """A folder of a run, or a live model.

    Attributes:
        where: Its path, or the class of the model.
        options: The caller's options.
        adapters: The adapters in it; of a live model, all together.
        base: The base in it, or ``None``.
    """

    where: str
    options: DoctorOptions
    adapters: Sequence[Adapter]
    base: Base | None

    @property
    def has_damaged_adapter(self) -> bool:
        """Whether the files of an adapter in it cannot be read."""
        return any(adapter.is_damaged for adapter in self.adapters)

    def tensors_of_adapters(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of all adapters, with their names."""
        found: list[tuple[str, Tensor]] = []
        for adapter in self.adapters:
            found += adapter.tensors.items()

        return found


@dataclass(frozen=True)
class Folder(Subject):
    """A folder of a run, or a file of weights, as far as it can be read.

    Attributes:
        path: The path.
        manifest: The manifest of the run, or ``None``.
        damaged: Why files of adapters and weights cannot be read.
    """

    path: Path
    manifest: Manifest | None
    damaged: Sequence[str]


@dataclass(frozen=True)
class LiveModel(Subject):
    """A live model, walked once.

    Attributes:
        tree: Its modules and tensors.
        preparation: The preparation that holds it, or ``None``.
    """

    tree: ModelTree
    preparation: Preparation | None


# ----------------------------------------------------------------------------------------------------
# Folders.
# ----------------------------------------------------------------------------------------------------


def read_run(path: Path, options: DoctorOptions) -> list[Folder]:
    """Read a folder, or a file of weights, and the checkpoints that a ``Trainer`` left in it, the newest last.

    The manifests of one run agree: the newest counts for all of it.
    """
    expect_file_of_weights(path)
    first = path.parent if path.stem == "adapter_model" else path
    places = [first, *numbered_folders(first)]
    manifest = None
    for place in places:
        manifest = saved_manifest(place) or manifest

    # not by a method of ``Path``, which raises where a name is too long
    there = [place for place in places if os.path.exists(place)]
    folders = [_read_folder(place, options, manifest) for place in there]
    if not any(folder.adapters or folder.base or folder.damaged for folder in folders):
        raise ConfigError(
            f"{str(path)!r}: expected a checkpoint, an adapter or a Trainer's output, found no .safetensors or .bin "
            "file with weights"
        )

    return folders


def is_numbered(path: Path) -> bool:
    """Return whether a folder has the name of one that a ``Trainer`` saves on the way."""
    return _CHECKPOINT.fullmatch(path.name) is not None


def numbered_folders(path: Path) -> list[Path]:
    """Return the checkpoints that a ``Trainer`` left in a folder, the newest last."""
    if not os.path.isdir(path):
        return []

    found = [inside for inside in path.iterdir() if is_numbered(inside)]
    return sorted(found, key=lambda inside: int(inside.name.rpartition("-")[2]))


def _read_folder(
    path: Path, options: DoctorOptions, manifest: Manifest | None
) -> Folder:
    """Read what there is in a folder of a run: headers alone, but for JSON."""
    damaged = []
    adapters = []
    # that of ``default`` is in the folder itself, others in one of their name in it
    for place in (path, *path.glob("*/")):
        file = adapter_file(place)
        if file is None or (place != path and is_numbered(place)):
            continue
        try:
            stored = read_tensors(file)
            # nothing else says to which layers its tensors belong
            read_json(place / "adapter_config.json")
        except ConfigError as error:
            damaged.append(str(error))
            adapters.append(Adapter(str(place), {}, is_damaged=True))
            continue
        adapters.append(Adapter(str(place), lazy_tensors(stored)))

    base = None
    try:
        if has_weights(path):
            base = _saved_base(path)
    except ConfigError as error:
        damaged.append(str(error))

    return Folder(str(path), options, adapters, base, path, manifest, damaged)


def _saved_base(path: Path) -> Base:
    """Read the headers of a saved base, and the statistics of its 4-bit weights."""
    checkpoint = open_checkpoint(path)
    report = inspect_opened(checkpoint)
    plain = {}
    sources = {}
    transposed = []
    for name, stored in checkpoint.tensors.items():
        fqn = canonical_fqn(name)
        weight, is_state, _ = fqn.partition(".quant_state.")
        if is_state:
            sources[weight] = _dtype_in_state(stored)
        if name.endswith(".absmax") and len(stored.shape) > 1:
            transposed.append(fqn.removesuffix(".absmax"))
        if name not in checkpoint.beside:
            plain[fqn] = stored.lazy()

    for weight in sources:
        plain.pop(weight, None)

    is_of_float32 = set(sources.values()) == {torch.float32}
    left = [] if is_of_float32 else [*report.leftovers]

    meta = checkpoint.meta_model()
    is_all_float32 = report.half_dtype is None and report.dtypes.keys() == {"float32"}
    return Base(
        plain,
        meta,
        checkpoint.ties(meta),
        checkpoint.dtype,
        sources,
        transposed,
        left,
        is_all_float32=is_all_float32,
    )


def _dtype_in_state(stored: StoredTensor) -> torch.dtype | None:
    """Return the dtype from which a 4-bit weight was quantized, by its statistics; ``None`` where these are damaged."""
    try:
        content = bytes(materialize(stored.lazy()).tolist())
        return find_dtype(json.loads(content)["dtype"])
    except (ValueError, LookupError, TypeError):
        return None


# ----------------------------------------------------------------------------------------------------
# Live models.
# ----------------------------------------------------------------------------------------------------


def walk_live(model: nn.Module, options: DoctorOptions) -> LiveModel:
    """Walk a live model, which is not changed.

    Raise where its tensors cannot be read.
    """
    tree, preparation = Preparation.tree_of(model)
    refuse_unreadable(tree, allow_sharded=False)
    base = _live_base(tree, is_prepared=preparation is not None)
    where = type(model).__name__
    own = {}
    for tensor in tree.tensors:
        if id(tensor.parameter) in tree.adapter_ids:
            own[tensor.path] = tensor.parameter

    adapters = [Adapter(where, own)] if own else []
    return LiveModel(where, options, adapters, base, tree, preparation)


def _live_base(tree: ModelTree, *, is_prepared: bool) -> Base:
    """Read what the checks of a base need of a live one."""
    config = getattr(unwrap(tree.model)[0], "config", None)
    meta = None
    with contextlib.suppress(ConfigError):  # the model is none of transformers
        meta = meta_model(config)

    plain = {}
    sources = {}
    transposed = []
    are_scales_hidden = False
    for tensor in tree.base_tensors:
        state = quant_state_of(tensor.module, tensor.parameter)
        if state is not None:
            are_scales_hidden |= is_repacked(vars(state))
        if not is_quantized_parameter(tensor.parameter):
            plain[tensor.fqn] = tensor.parameter
            continue
        if state is not None:
            # of a prepared one, the original dtype
            sources[tensor.fqn] = vars(state).get("original_dtype", state.dtype)
        if not is_prepared and has_transposed_scales(tensor.module):
            transposed.append(tensor.fqn)

    left = None
    if meta is not None and not is_prepared:
        left = [tensor.fqn for tensor, _ in casts_by_others(tree, meta)]

    return Base(
        plain,
        meta,
        tied_names(meta),
        getattr(config, "dtype", None),
        sources,
        transposed or (None if are_scales_hidden else []),
        left,
    )
