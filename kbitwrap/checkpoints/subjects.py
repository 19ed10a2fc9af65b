"""What the doctor examines: the adapters and the base of a folder or of a live model, and the files of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ConfigError
from ..manifest.manifest import Manifest
from ..model.checks import refuse_unreadable
from ..model.pretrained import meta_model
from ..model.quantization import is_quantized_parameter, quant_state_of
from ..model.tree import CONFIG_ATTRIBUTES, ModelTree, NamedTensor
from ..model.wrappers import canonical_fqn, unwrap
from ..preparation.preparation import Preparation
from ..tensors.dtypes import HALF_DTYPES, find_dtype
from ..tensors.lazy import materialize
from .base import recorded_shapes
from .inspection import inspect_checkpoint
from .reader import (
    SavedCheckpoint,
    adapter_file,
    has_weights,
    is_beside,
    is_trained_copy,
    load_pickled,
    open_checkpoint,
    read_json,
    read_tensors,
    saved_manifest,
    tied_names,
)

OPTIMIZER_NAME = "optimizer.pt"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# an optimizer's state in the shape of its parameter
_MOMENTS = ("exp_avg", "state1", "momentum_buffer")
_MAX_STATE_BYTES = 4096  # of a 4-bit weight's statistics, as JSON
Tensors = Mapping[str, torch.Tensor]


# ----------------------------------------------------------------------------------------------------
# The kinds of subjects.
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """What the caller gave beside the subject.

    Attributes:
        base: The base that was trained on: a folder, a name, a model, or ``None``.
        adapter: The folder of the adapter that may have been merged, or ``None``.
    """

    base: Any
    adapter: Any

    @functools.cached_property
    def model(self) -> Any:
        """The base, without weights where it is named; ``None`` where none was given."""
        if self.base is None or isinstance(self.base, nn.Module):
            return self.base
        return meta_model(self.base)


@dataclass(frozen=True)
class Optimizer:
    """The state of an optimizer.

    Attributes:
        num_states: The number of parameters that have a state.
        moments: The states that have the shape of their parameter, without values.
        is_torchs: Whether it is torch's own, whose states have the dtype of the
            parameter too.
    """

    num_states: int
    moments: Sequence[torch.Tensor]
    is_torchs: bool


@dataclass(frozen=True)
class Adapter:
    """An adapter, and what is known of its training.

    Attributes:
        where: Its folder.
        tensors: Its tensors, by their names in the file or the live model.
        is_live: Whether it is on a live model.
        recorded: The names of its dtypes in training, where a manifest tells them.
        moments: The states of its parameters in torch's optimizer, where they are saved
            beside it.
    """

    where: str
    tensors: Tensors
    is_live: bool = False
    recorded: frozenset[str] = frozenset()
    moments: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class Base:
    """A base, saved or live. While a preparation holds it, nothing that this makes of it is a fault.

    Attributes:
        tensors: The tensors that are not quantized, by fqn.
        meta: The model that its config describes, on the meta device; ``None`` where
            transformers knows none.
        ties: The names that the config ties, by group.
        left: Float32 that a preparation left; ``None`` where that cannot be told.
        is_all_float32: Whether nothing says that the original was half.
        without_cache: The configs that turn the cache off; ``None`` while it is
            prepared.
        is_quantized: Whether it holds quantized weights.
        sources: The dtype from which each 4-bit weight was quantized, by fqn.
        dtype: The dtype that its config names.
    """

    tensors: Tensors
    meta: Any
    ties: Sequence[Sequence[str]]
    left: Sequence[str] | None
    is_all_float32: bool
    without_cache: Sequence[str] | None
    is_quantized: bool
    sources: Mapping[str, torch.dtype | None]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Folder:
    """A folder of a run, or a file of weights, as far as it can be read.

    Attributes:
        path: Its path.
        given: What the caller gave beside it.
        adapters: The adapters in it.
        base: The weights of a model in it, or ``None``.
        manifest: The manifest in it, or else the newest of the run.
        optimizer: The optimizer in it, or ``None``.
        damaged: Why files of adapters and weights cannot be read.
        unknown_optimizer: Why the optimizer cannot be read, or ``""``.
    """

    path: Path
    given: Given
    adapters: Sequence[Adapter]
    base: Base | None
    manifest: Manifest | None
    optimizer: Optimizer | None
    damaged: Sequence[str]
    unknown_optimizer: str

    @property
    def is_numbered(self) -> bool:
        """Whether a ``Trainer`` saved it on the way."""
        return _CHECKPOINT.fullmatch(self.path.name) is not None

    def embedding(self) -> tuple[str, int] | None:
        """The name of the input embeddings, and the number of their rows; ``None`` where nothing tells them.

        Those that are saved here count, and else those of the manifest: they were
        resized or trained.
        """
        shapes = dict(recorded_shapes(self.manifest))
        if self.base is not None:
            shapes.update(
                {fqn: tuple(tensor.shape) for fqn, tensor in self.base.tensors.items()}
            )
        for adapter in self.adapters:
            shapes.update(
                {
                    canonical_fqn(name): tuple(tensor.shape)
                    for name, tensor in adapter.tensors.items()
                }
            )
        described = self.given.model if self.base is None else self.base.meta
        if described is None:
            named = [fqn for fqn in shapes if fqn.endswith("embed_tokens.weight")]
            return (named[0], shapes[named[0]][0]) if named else None
        try:
            weight = described.get_input_embeddings().weight
        except (AttributeError, NotImplementedError):  # its input is no text
            return None
        names = [
            canonical_fqn(name)
            for name, parameter in described.named_parameters()
            if parameter is weight
        ]
        return names[0], shapes.get(names[0], weight.shape)[0]


class LiveModel(NamedTuple):
    """A live model, walked once.

    Attributes:
        model: The model.
        tree: Its modules and tensors.
        preparation: The preparation that holds it, or ``None``.
        base: Its base.
        adapters: Its adapters, together, or none.
        given: What the caller gave beside it.
    """

    model: nn.Module
    tree: ModelTree
    preparation: Preparation | None
    base: Base
    adapters: Sequence[Adapter]
    given: Given


# ----------------------------------------------------------------------------------------------------
# Folders.
# ----------------------------------------------------------------------------------------------------


def read_run(path: Path, given: Given) -> list[Folder]:
    """Read a folder, or a file of weights, and the checkpoints that a ``Trainer`` left in it, the newest last."""
    first = path.parent if path.stem == "adapter_model" else path
    checkpoints = [
        _read_folder(place, given, None) for place in numbered_folders(first)
    ]
    recorded = None
    for checkpoint in checkpoints:
        recorded = checkpoint.manifest or recorded  # those of one run agree
    folders = [_read_folder(first, given, recorded), *checkpoints]
    if not any(
        folder.adapters or folder.base or _is_damaged(folder) for folder in folders
    ):
        raise ConfigError(
            f"{str(path)!r}: expected a checkpoint, an adapter or a Trainer's output, found neither"
        )
    return folders


def _is_damaged(folder: Folder) -> bool:
    """Whether there are files of tensors, which cannot be read; a pipe or a device in their place is none."""
    found = [folder.path, *folder.path.glob("*model*")]
    return bool(folder.damaged) and any(path.is_file() for path in found)


def numbered_folders(path: Path) -> list[Path]:
    """The checkpoints that a ``Trainer`` left in a folder, the newest last."""
    if not path.is_dir():
        return []
    found = [inside for inside in path.iterdir() if _CHECKPOINT.fullmatch(inside.name)]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def checkpoint_before(path: Path) -> Path | None:
    """The newest checkpoint that a ``Trainer`` saved before a folder was written."""
    older = numbered_folders(path)
    if _CHECKPOINT.fullmatch(path.name):
        older = [
            one for one in numbered_folders(path.parent) if _number(one) < _number(path)
        ]
    return older[-1] if older else None


def _read_folder(path: Path, given: Given, recorded: Manifest | None) -> Folder:
    """Read what there is in a folder: headers alone, but for JSON. Without a manifest, the one recorded counts."""
    damaged: list[str] = []
    stored: dict[Path, Tensors] = {}
    for file in _adapter_files(path):
        try:
            tensors, _ = read_tensors(file)
            stored[file.parent] = {
                name: tensor.lazy() for name, tensor in tensors.items()
            }
        except ConfigError as error:
            damaged.append(str(error))

    base = None
    try:
        if has_weights(path):
            base = _saved_base(path)
    except ConfigError as error:
        damaged.append(str(error))

    optimizer, unknown_optimizer = None, ""
    try:
        if (path / OPTIMIZER_NAME).is_file():
            optimizer = _read_optimizer(path / OPTIMIZER_NAME)
    except ConfigError as error:
        unknown_optimizer = str(error)

    manifest = saved_manifest(path) or recorded
    adapters = _saved_adapters(path, stored, manifest, optimizer)
    return Folder(
        path, given, adapters, base, manifest, optimizer, damaged, unknown_optimizer
    )


def _adapter_files(folder: Path) -> list[Path]:
    """The files of adapters: PEFT saves ``default`` in the folder, and others in folders of their names."""
    inside = [
        path for path in folder.glob("*/") if not _CHECKPOINT.fullmatch(path.name)
    ]
    files = [adapter_file(place) for place in [folder, *inside]]
    return [file for file in files if file is not None]


def _read_optimizer(path: Path) -> Optimizer:
    """Read a saved optimizer, whose tensors stay unread; raise `ConfigError` where the file holds anything else."""
    content = load_pickled(path)
    try:
        states = list(content["state"].values())
        moments = [state[key] for state in states for key in _MOMENTS if key in state]
        is_torchs = any("foreach" in group for group in content["param_groups"])
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected the state of an optimizer: {error!r}"
        ) from error
    tensors = [moment for moment in moments if isinstance(moment, torch.Tensor)]
    return Optimizer(len(states), tensors, is_torchs)


def _saved_adapters(
    path: Path,
    stored: Mapping[Path, Tensors],
    manifest: Manifest | None,
    optimizer: Optimizer | None,
) -> list[Adapter]:
    records = {} if manifest is None else manifest.adapters
    dtypes = {
        name.rpartition(".")[2]: frozenset(record.dtypes)
        for name, record in records.items()
    }
    # one of several may be frozen
    is_told = optimizer is not None and optimizer.is_torchs and len(stored) == 1
    moments = optimizer.moments if optimizer is not None and is_told else ()
    adapters = []
    for place, tensors in stored.items():
        name = "default" if place == path else place.name
        recorded = dtypes.get(name, frozenset())
        adapters.append(Adapter(str(place), tensors, False, recorded, moments))
    return adapters


def _saved_base(path: Path) -> Base:
    checkpoint = open_checkpoint(path)
    report = inspect_checkpoint(path)
    own = [
        tensor
        for name, tensor in checkpoint.tensors.items()
        if not is_trained_copy(name)
    ]
    stored = {canonical_fqn(tensor.name): tensor.lazy() for tensor in own}
    quantized = {
        fqn.removesuffix(".quant_map") for fqn in stored if fqn.endswith(".quant_map")
    }
    plain = {
        fqn: tensor
        for fqn, tensor in stored.items()
        if fqn not in quantized and not is_beside(fqn, stored)
    }
    sources = _sources(stored)
    was_float32 = set(sources.values()) == {torch.float32}
    leftovers = [fqn for group in report.leftovers.values() for fqn in group]
    meta = checkpoint.meta_model()
    is_tied = (
        meta is not None and checkpoint.config.get("tie_word_embeddings") is not False
    )
    return Base(
        tensors=plain,
        meta=meta,
        ties=tied_names(meta) if is_tied else [],
        left=[] if was_float32 else leftovers,
        is_all_float32=report.half_dtype is None
        and report.dtypes.keys() == {"float32"},
        without_cache=_configs_without_cache(checkpoint),
        is_quantized=report.is_quantized,
        sources=sources,
        dtype=checkpoint.dtype,
    )


def _sources(stored: Tensors) -> dict[str, torch.dtype | None]:
    """The dtype from which each 4-bit weight was quantized, as the statistics beside it say."""
    found: dict[str, torch.dtype | None] = {}
    for name, tensor in stored.items():
        fqn, is_state, _ = name.partition(".quant_state.")
        if not is_state or tensor.nbytes >= _MAX_STATE_BYTES:
            continue
        # damaged, it tells nothing
        with contextlib.suppress(ValueError, LookupError, TypeError):
            content = bytes(materialize(tensor).tolist())
            found[fqn] = find_dtype(json.loads(content)["dtype"])
    return found


def _configs_without_cache(checkpoint: SavedCheckpoint) -> list[str]:
    configs = {"config.json": checkpoint.config}
    path = checkpoint.folder / "generation_config.json"
    if path.is_file():
        configs[path.name] = read_json(path)
    return [
        name for name, config in configs.items() if config.get("use_cache") is False
    ]


# ----------------------------------------------------------------------------------------------------
# Live models.
# ----------------------------------------------------------------------------------------------------


def walk_live(model: nn.Module, given: Given) -> LiveModel:
    """Walk a live model, which is not changed; raise where its tensors cannot be read."""
    tree, preparation = Preparation.tree_of(model)
    refuse_unreadable(tree, allow_sharded=False)
    base = _live_base(tree, is_prepared=preparation is not None)
    own = [
        tensor for tensor in tree.tensors if id(tensor.parameter) in tree.adapter_ids
    ]
    adapters = []
    if own:
        tensors = {tensor.path: tensor.parameter for tensor in own}
        adapters.append(Adapter("the model", tensors, is_live=True))
    return LiveModel(model, tree, preparation, base, adapters, given)


def _live_base(tree: ModelTree, *, is_prepared: bool) -> Base:
    bare: Any = unwrap(tree.model)[0]
    config = getattr(bare, "config", None)
    meta = None
    with contextlib.suppress(ConfigError):  # the model is none of transformers
        meta = meta_model(config)
    packed = [
        tensor
        for tensor in tree.base_tensors
        if is_quantized_parameter(tensor.parameter)
    ]
    quantized = {tensor.fqn for tensor in packed}
    plain = {
        tensor.fqn: tensor.parameter
        for tensor in tree.base_tensors
        if tensor.fqn not in quantized
    }
    return Base(
        tensors=plain,
        meta=meta,
        ties=[] if meta is None else tied_names(meta),
        left=None if is_prepared or meta is None else _left_in_float32(plain, meta),
        is_all_float32=False,
        without_cache=None if is_prepared else _attributes_without_cache(bare),
        is_quantized=bool(packed),
        sources=_live_sources(packed),
        dtype=getattr(config, "dtype", None),
    )


def _left_in_float32(plain: Tensors, meta: nn.Module) -> list[str]:
    """The float32 parameters that the architecture loads in half."""
    loaded = dict(meta.named_parameters(remove_duplicate=False))
    halves = {
        fqn for fqn, parameter in loaded.items() if parameter.dtype in HALF_DTYPES
    }
    return [
        fqn
        for fqn, tensor in plain.items()
        if tensor.dtype == torch.float32 and fqn in halves
    ]


def _attributes_without_cache(model: nn.Module) -> list[str]:
    configs = {name: getattr(model, name, None) for name in CONFIG_ATTRIBUTES}
    return [
        name
        for name, config in configs.items()
        if getattr(config, "use_cache", None) is False
    ]


def _live_sources(packed: Sequence[NamedTensor]) -> dict[str, torch.dtype | None]:
    """The dtype from which each 4-bit weight was quantized; of a prepared one, the original dtype."""
    found = {}
    for tensor in packed:
        state = quant_state_of(tensor.module, tensor.parameter)
        if state is not None:
            found[tensor.fqn] = vars(state).get("original_dtype", state.dtype)
    return found
