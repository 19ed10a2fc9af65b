"""The subjects that the doctor examines: adapters and base, of a folder or of a live model, and the files of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
from ..model.tree import CONFIG_ATTRIBUTES, ModelTree
from ..model.wrappers import canonical_fqn, unwrap
from ..preparation.preparation import Preparation
from ..tensors.dtypes import HALF_DTYPES, dtype_name, find_dtype
from ..tensors.lazy import materialize
from .inspection import inspect_checkpoint
from .reader import (
    StoredTensor,
    adapter_file,
    expect_file_of_weights,
    has_weights,
    load_pickled,
    open_checkpoint,
    read_json,
    read_tensors,
    recorded_shapes,
    saved_manifest,
    tied_names,
)

OPTIMIZER_NAME = "optimizer.pt"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
# an optimizer's state in the shape of its parameter
_MOMENTS = ("exp_avg", "state1", "momentum_buffer")
_MAX_STATE_BYTES = 4096  # of a 4-bit weight's statistics, as JSON
Tensors = Mapping[str, torch.Tensor]
_Sources = dict[str, torch.dtype | None]


# ----------------------------------------------------------------------------------------------------
# The kinds of subjects.
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The caller's options beside the subject.

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
    quantization_config: Any = None
    device: Any = None
    trust_remote_code: bool = False

    @property
    def tells_merge(self) -> bool:
        """Whether it tells what a merge should be: by the adapter, and a base that can be loaded."""
        is_named = self.base is not None and not isinstance(self.base, nn.Module)
        return is_named and self.adapter is not None

    @functools.cached_property
    def model(self) -> Any:
        """The base, without weights where it is named.

        ``None`` where none was given.
        """
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
        unreadable: Why it cannot be read, or ``""``.
    """

    num_states: int = 0
    moments: Sequence[torch.Tensor] = ()
    is_torchs: bool = False
    unreadable: str = ""


@dataclass(frozen=True)
class Adapter:
    """An adapter, and what is known of its training.

    Attributes:
        where: Its folder, or the class of the live model.
        tensors: Its tensors, by their names in the file or the live model.
        trained: The names of its dtypes in training, where they are known.
    """

    where: str
    tensors: Tensors
    trained: frozenset[str]


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
        transposed: The 4-bit weights whose scales lie in the order of another layout.
        left: Float32 that a preparation left; ``None`` where that cannot be told.
        use_cache: The configs' ``use_cache``, by config; empty while it is prepared.
        are_scales_hidden: Whether a weight is repacked now, so that nothing tells in which
            order its scales lay before.
        is_all_float32: Whether nothing says that the original was half.
    """

    tensors: Tensors
    meta: Any
    ties: Sequence[Sequence[str]]
    dtype: torch.dtype | None
    sources: _Sources
    transposed: Sequence[str]
    left: Sequence[str] | None
    use_cache: Mapping[str, Any]
    are_scales_hidden: bool = False
    is_all_float32: bool = False

    @functools.cached_property
    def quantization(self) -> Quantization:
        """How its config says that it is quantized."""
        return ModelTree(self.meta).quantization

    @property
    def is_quantized(self) -> bool:
        """Whether its config says that it is quantized."""
        return self.meta is not None and self.quantization.is_quantized


@dataclass(frozen=True)
class Subject:
    """A folder of a run, or a live model.

    Attributes:
        where: Its path, or the class of the model.
        given: What the caller gave beside it.
        adapters: The adapters in it; of a live model, all together.
        base: The base in it, or ``None``.
    """

    where: str
    given: Given
    adapters: Sequence[Adapter]
    base: Base | None


@dataclass(frozen=True)
class Folder(Subject):
    """A folder of a run, or a file of weights, as far as it can be read.

    Attributes:
        path: The path.
        manifest: The manifest of the run, or ``None``.
        optimizer: The optimizer in it, or ``None``.
        damaged: Why files of adapters and weights cannot be read.
    """

    path: Path
    manifest: Manifest | None
    optimizer: Optimizer | None
    damaged: Sequence[str]

    @property
    def is_numbered(self) -> bool:
        """Whether a ``Trainer`` saved it on the way."""
        return is_numbered(self.path)

    def embedding(self) -> tuple[str, int] | None:
        """The name of the input embeddings, and the number of their rows; ``None`` where nothing tells them.

        Those that are saved here count, and else those of the manifest: they were
        resized or trained.
        """
        shapes: dict[str, Sequence[int]] = {}
        if self.manifest is not None:
            shapes.update(recorded_shapes(self.manifest))

        saved = tensors_of(self.adapters)
        if self.base is not None:
            saved += self.base.tensors.items()

        for name, tensor in saved:
            shapes[canonical_fqn(name)] = tensor.shape

        model = self.given.model if self.base is None else self.base.meta
        if model is not None:
            return _embedding_of(model, shapes)

        for fqn, shape in shapes.items():
            if fqn.endswith("embed_tokens.weight"):
                return fqn, shape[0]

        return None


def _embedding_of(
    model: Any, shapes: Mapping[str, Sequence[int]]
) -> tuple[str, int] | None:
    """The name of a model's input embeddings, and their rows, by a shape that is known or else the model's own."""
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):  # its input is no text
        return None

    for name, parameter in model.named_parameters():
        if parameter is weight:
            fqn = canonical_fqn(name)
            shape = shapes.get(fqn, parameter.shape)
            return fqn, shape[0]

    return None


@dataclass(frozen=True)
class LiveModel(Subject):
    """A live model, walked once.

    Attributes:
        tree: Its modules and tensors.
        preparation: The preparation that holds it, or ``None``.
    """

    tree: ModelTree
    preparation: Preparation | None


def tensors_of(adapters: Iterable[Adapter]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of all adapters, with their names."""
    found: list[tuple[str, torch.Tensor]] = []
    for adapter in adapters:
        found += adapter.tensors.items()

    return found


def dtype_names(tensors: Iterable[torch.Tensor]) -> frozenset[str]:
    """The names of the dtypes of tensors."""
    return frozenset(dtype_name(tensor.dtype) for tensor in tensors)


# ----------------------------------------------------------------------------------------------------
# Folders.
# ----------------------------------------------------------------------------------------------------


def read_run(path: Path, given: Given) -> list[Folder]:
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
    folders = [_read_folder(place, given, manifest) for place in there]
    if not any(folder.adapters or folder.base or folder.damaged for folder in folders):
        raise ConfigError(
            f"{str(path)!r}: expected a checkpoint, an adapter or a Trainer's output, found no .safetensors or .bin "
            "file with weights"
        )

    return folders


def is_numbered(path: Path) -> bool:
    """Whether a folder has the name of one that a ``Trainer`` saves on the way."""
    return _CHECKPOINT.fullmatch(path.name) is not None


def numbered_folders(path: Path) -> list[Path]:
    """The checkpoints that a ``Trainer`` left in a folder, the newest last."""
    if not os.path.isdir(path):
        return []

    found = [inside for inside in path.iterdir() if is_numbered(inside)]
    return sorted(found, key=lambda inside: int(inside.name.rpartition("-")[2]))


def checkpoint_before(path: Path) -> Path | None:
    """The newest checkpoint that a ``Trainer`` saved before a folder was written."""
    older = numbered_folders(path)
    if is_numbered(path):
        siblings = numbered_folders(path.parent)
        older = siblings[: siblings.index(path)]

    return older[-1] if older else None


def _read_folder(path: Path, given: Given, manifest: Manifest | None) -> Folder:
    """Read what there is in a folder of a run: headers alone, but for JSON."""
    optimizer = None
    if (path / OPTIMIZER_NAME).is_file():
        optimizer = _read_optimizer(path / OPTIMIZER_NAME)

    damaged: list[str] = []
    adapters = []
    files = _adapter_files(path)
    # one of several may be frozen
    trained = optimizer if len(files) == 1 else None
    for place, file in files.items():
        with _noting(damaged):
            name = "default" if place == path else place.name
            dtypes = _trained_dtypes(name, manifest, trained)
            adapters.append(Adapter(str(place), _lazy(read_tensors(file)), dtypes))

    base = None
    with _noting(damaged):
        if has_weights(path):
            base = _saved_base(path)

    return Folder(str(path), given, adapters, base, path, manifest, optimizer, damaged)


@contextlib.contextmanager
def _noting(damaged: list[str]) -> Iterator[None]:
    """Note why a file cannot be read, and go on."""
    try:
        yield
    except ConfigError as error:
        damaged.append(str(error))


def _lazy(stored: Mapping[str, StoredTensor]) -> Tensors:
    return {name: tensor.lazy() for name, tensor in stored.items()}


def _adapter_files(folder: Path) -> dict[Path, Path]:
    """The files of adapters by their folders: of ``default`` it is this one, of others one of their name in it."""
    files = {}
    for place in (folder, *folder.glob("*/")):
        file = adapter_file(place)
        if file is not None and (place == folder or not is_numbered(place)):
            files[place] = file

    return files


def _read_optimizer(path: Path) -> Optimizer:
    """Read a saved optimizer, whose tensors stay unread."""
    try:
        content = load_pickled(path)
    except ConfigError as error:
        return Optimizer(unreadable=str(error))

    moments = []
    try:
        states = content["state"].values()
        for state in states:
            found = [state.get(key) for key in _MOMENTS]
            moments += [one for one in found if isinstance(one, torch.Tensor)]
        is_torchs = any("foreach" in group for group in content["param_groups"])
    except (AttributeError, LookupError, TypeError) as error:
        why = f"{path}: expected the state of an optimizer: {error!r}"
        return Optimizer(unreadable=why)

    return Optimizer(len(states), moments, is_torchs)


def _trained_dtypes(
    name: str, manifest: Manifest | None, optimizer: Optimizer | None
) -> frozenset[str]:
    """The dtypes of an adapter in training, by the manifest, or else by the states of torch's own optimizer."""
    if manifest is not None:
        for fqn, record in manifest.adapters.items():
            if fqn.rpartition(".")[2] == name:
                return frozenset(record.dtypes)

    if optimizer is None or not optimizer.is_torchs:
        return frozenset()

    return dtype_names(optimizer.moments)


def _saved_base(path: Path) -> Base:
    checkpoint = open_checkpoint(path)
    report = inspect_checkpoint(path)
    sources = _saved_sources(checkpoint.tensors)
    plain: dict[str, torch.Tensor] = {}
    for name, stored in checkpoint.tensors.items():
        fqn = canonical_fqn(name)
        if name not in checkpoint.beside and fqn not in sources:
            plain[fqn] = stored.lazy()

    left: list[str] = []
    if set(sources.values()) != {torch.float32}:
        for tensors in report.leftovers.values():
            left += tensors

    use_cache = {}
    for name in CONFIG_ATTRIBUTES:
        file = checkpoint.folder / f"{name}.json"
        if file.is_file():
            use_cache[file.name] = read_json(file).get("use_cache")

    meta = checkpoint.meta_model()
    return Base(
        plain,
        meta,
        checkpoint.ties(meta),
        checkpoint.dtype,
        sources,
        _saved_transposed(checkpoint.tensors),
        left,
        use_cache,
        False,
        report.half_dtype is None and report.dtypes.keys() == {"float32"},
    )


def _saved_transposed(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The 4-bit weights whose scales have two dimensions, as those of repacked weights."""
    found = []
    for name, stored in tensors.items():
        if name.endswith(".absmax") and len(stored.shape) > 1:
            found.append(canonical_fqn(name).removesuffix(".absmax"))

    return found


def _saved_sources(tensors: Mapping[str, StoredTensor]) -> _Sources:
    """The dtype from which each 4-bit weight was quantized, as the statistics beside it say."""
    found: _Sources = {}
    for name, stored in tensors.items():
        fqn, is_state, _ = canonical_fqn(name).partition(".quant_state.")
        if not is_state:
            continue
        found[fqn] = None
        # damaged, it tells nothing
        with contextlib.suppress(ValueError, LookupError, TypeError):
            if stored.num_bytes < _MAX_STATE_BYTES:
                content = bytes(materialize(stored.lazy()).tolist())
                found[fqn] = find_dtype(json.loads(content)["dtype"])

    return found


# ----------------------------------------------------------------------------------------------------
# Live models.
# ----------------------------------------------------------------------------------------------------


def walk_live(model: nn.Module, given: Given) -> LiveModel:
    """Walk a live model, which is not changed.

    Raise where its tensors cannot be read.
    """
    tree, preparation = Preparation.tree_of(model)
    refuse_unreadable(tree, allow_sharded=False)
    base = _live_base(tree, is_prepared=preparation is not None)
    own: dict[str, torch.Tensor] = {}
    for tensor in tree.tensors:
        if id(tensor.parameter) in tree.adapter_ids:
            own[tensor.path] = tensor.parameter

    where = type(model).__name__
    adapters = []
    if own:
        adapters.append(Adapter(where, own, dtype_names(own.values())))

    return LiveModel(where, given, adapters, base, tree, preparation)


def _live_base(tree: ModelTree, *, is_prepared: bool) -> Base:
    bare: Any = unwrap(tree.model)[0]
    config = getattr(bare, "config", None)
    meta = None
    with contextlib.suppress(ConfigError):  # the model is none of transformers
        meta = meta_model(config)

    plain: dict[str, torch.Tensor] = {}
    sources: _Sources = {}
    transposed = []
    for tensor in tree.base_tensors:
        if not is_quantized_parameter(tensor.parameter):
            plain[tensor.fqn] = tensor.parameter
            continue
        state = quant_state_of(tensor.module, tensor.parameter)
        if state is not None:
            # of a prepared one, the original dtype
            sources[tensor.fqn] = vars(state).get("original_dtype", state.dtype)
        if not is_prepared and has_transposed_scales(tensor.module):
            transposed.append(tensor.fqn)

    left = None
    if meta is not None and not is_prepared:
        left = _left_in_float32(plain, meta)

    use_cache = {}
    if not is_prepared:
        for name in CONFIG_ATTRIBUTES:
            found = getattr(bare, name, None)
            use_cache[name] = getattr(found, "use_cache", None)

    dtype = getattr(config, "dtype", None)
    ties = tied_names(meta)
    states = [quant_state_of(one.module, one.parameter) for one in tree.base_tensors]
    is_hidden = any(state is not None and is_repacked(vars(state)) for state in states)
    return Base(
        plain, meta, ties, dtype, sources, transposed, left, use_cache, is_hidden
    )


def _left_in_float32(plain: Tensors, meta: nn.Module) -> list[str]:
    """The float32 parameters that the architecture loads in half."""
    left = []
    for fqn, loaded in meta.named_parameters(remove_duplicate=False):
        is_float32 = fqn in plain and plain[fqn].dtype == torch.float32
        if is_float32 and loaded.dtype in HALF_DTYPES:
            left.append(fqn)

    return left
