"""A model's identity, read without touching it.

It is its class, its config and every tensor's original content.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..errors import ExportError, ManifestError
from ..export.sharding import Gathering
from ..export.twin import build_twin
from ..model.bitsandbytes_layers import is_pending, quantized_layer
from ..model.checks import refuse_unreadable
from ..model.quantization import DISTRIBUTIONS, is_quantized_parameter
from ..model.tree import ModelTree, join
from ..model.wrappers import COPIES, loaded_class
from ..preparation.original import Buffer
from ..preparation.preparation import Preparation
from ..preparation.process import plain_mode
from ..tensors.bits import content_digest, is_dense, parts_of
from ..tensors.dtypes import dtype_name
from ..tensors.lazy import values_of
from .configs import adapter_record, model_record
from .schema import AdapterRecord, ModelRecord, TensorRecord


@dataclass(frozen=True)
class Contents:
    """The identity of a model as it was loaded.

    Attributes:
        model: Its class and configs.
        tensors: All of the state dict of the unwrapped model, by name, with the dtypes,
            flags and digests of the originals.
        adapters: The adapters on it, by name.
        trained: The parameters that a preparation holds, and that training has changed.
        unread: The pending layers that were not read, by name: of their tensors, the
            biases alone are in ``tensors``.
    """

    model: ModelRecord
    tensors: dict[str, TensorRecord]
    adapters: dict[str, AdapterRecord]
    trained: tuple[str, ...]
    unread: frozenset[str] = frozenset()


def read_contents(
    tree: ModelTree,
    preparation: Preparation | None,
    *,
    progress: bool = False,
    reads_pending: bool = True,
) -> Contents:
    """Read the contents of a model, prepared or not.

    Of one that was sharded since, all ranks read it together. Layers that are pending
    are quantized for it, unless they are not to be read.
    """
    gathering = Gathering(tree, preparation, "make a manifest", ManifestError)
    remedy = "Make or check a manifest while all of them are loaded"
    with plain_mode():
        with gathering.agreeing():
            try:
                refuse_unreadable(
                    tree, allow_sharded=gathering.is_sharded, remedy=remedy
                )
                twin = build_twin(tree, preparation, gathering).model
            except ExportError as error:
                raise ManifestError(
                    f"cannot determine the original base: {error}", fqn=error.fqn
                ) from error

        return gathering.lead(
            lambda: _read(twin, tree, preparation, gathering, progress, reads_pending)
        )


def _read(
    twin: nn.Module,
    tree: ModelTree,
    preparation: Preparation | None,
    gathering: Gathering,
    progress: bool,
    reads_pending: bool,
) -> Contents:
    """Read the contents of a twin of a live model.

    The twin has the originals; the live model says which of them are parameters, and
    what its preparation left of each.
    """
    live = _live_tensors(tree)
    state = twin.state_dict(keep_vars=True)
    originals = {fqn: one for fqn, one in state.items() if isinstance(one, Tensor)}
    layers = {fqn: module for fqn, module in twin.named_modules() if is_pending(module)}
    pending = {join(fqn, "weight"): module for fqn, module in layers.items()}
    parameters = [fqn for fqn in originals if isinstance(live.get(fqn), nn.Parameter)]
    ties = _ties({fqn: originals[fqn] for fqn in parameters})
    buffers = {} if preparation is None else preparation.original.buffers

    tensors = {}
    bar = tqdm(
        originals, desc="digest", unit="tensor", disable=not progress, leave=False
    )
    for fqn, original in _read_in_turn(bar, originals, pending, reads_pending):
        was = buffers.get(fqn) or _as_it_is(fqn, original)
        flags = _flags(live.get(fqn), was.dtype, tree, preparation)
        tensors[fqn] = TensorRecord(
            fqn=fqn,
            type=_type_of(live.get(fqn)),
            shape=tuple(was.shape),
            original_dtype=dtype_name(was.dtype),
            **flags,
            digest=f"{was.digest():016x}",
            tie_group=ties.get(fqn),
        )

    dtype = None
    for fqn in parameters:
        if dtype is None and _is_plain(live[fqn]):
            dtype = tensors[fqn].original_dtype

    trained = [] if preparation is None else preparation.changes(tree).trained
    return Contents(
        model_record(twin, dtype),
        tensors,
        _adapters(tree),
        trained=(*trained, *gathering.trained),
        unread=frozenset() if reads_pending else frozenset(layers),
    )


def _read_in_turn(
    fqns: Iterable[str],
    originals: Mapping[str, Tensor],
    pending: Mapping[str, nn.Module],
    reads_pending: bool,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state dict by name, where layers that are pending are quantized, one at a time."""
    for fqn in fqns:
        if fqn not in pending:
            yield fqn, originals[fqn]
        elif reads_pending:
            layer = quantized_layer(pending[fqn])
            yield from _quantized_state(fqn, layer).items()


def _quantized_state(fqn: str, layer: nn.Module) -> dict[str, Tensor]:
    """The entries of a layer in a state dict, without its bias, which has its own turn."""
    prefix = fqn.removesuffix("weight")
    state: dict[str, Tensor] = layer.state_dict(prefix=prefix, keep_vars=True)
    state.pop(f"{prefix}bias", None)
    return state


def records_of_layer(fqn: str, layer: nn.Module) -> dict[str, TensorRecord]:
    """The records of a quantized layer's weight, which has this name, and of its statistics."""
    found = {}
    for name, tensor in _quantized_state(fqn, layer).items():
        dtype = dtype_name(tensor.dtype)
        found[name] = TensorRecord(
            fqn=name,
            type="parameter" if name == fqn else "quantization",
            shape=tuple(tensor.shape),
            original_dtype=dtype,
            requires_grad=False,
            prepared_dtype=dtype,
            prepared_requires_grad=False,
            digest=f"{content_digest(tensor):016x}",
            tie_group=None,
        )

    return found


def _live_tensors(tree: ModelTree) -> dict[str, Tensor | None]:
    """The parameters and buffers of the base, by name."""
    live: dict[str, Tensor | None] = {}
    for node in tree.base:
        for held in (node.module._parameters, node.module._buffers):
            live |= {join(node.fqn, name): tensor for name, tensor in held.items()}
    return live


def _as_it_is(fqn: str, tensor: Tensor) -> Buffer:
    """The record of a tensor of the twin, whose values are the original ones."""
    if not is_dense(tensor):
        raise ManifestError(
            f"{fqn}: expected a dense tensor, whose bytes can be read, found "
            f"{type(tensor).__name__} of {tensor.layout} and {tensor.dtype}; register "
            "a buffer that checkpoints do not need with persistent=False"
        )

    digest = functools.partial(_digest, tensor)
    return Buffer(tensor.dtype, tensor.shape, digest)


def _digest(tensor: Tensor) -> int:
    """The digest of a tensor's values, which are computed for it."""
    return content_digest(values_of(tensor))


def _type_of(tensor: Tensor | None) -> str:
    """The type of an entry of the state dict, by the live tensor of its name."""
    if tensor is None:
        return "quantization"  # it is in the state dict, and nowhere in the model
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _flags(
    tensor: Tensor | None,
    dtype: torch.dtype,
    tree: ModelTree,
    preparation: Preparation | None,
) -> dict[str, Any]:
    """The flags of a live tensor, before and while prepared, and its dtype then.

    Args:
        tensor: The live tensor; a buffer has no flag.
        dtype: The original dtype, which stays where nothing was recorded.
        tree: The live model.
        preparation: The preparation in force, if there is one.

    Returns:
        The fields of a ``TensorRecord`` by their names.
    """
    flag = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    found = {
        "requires_grad": flag,
        "prepared_dtype": dtype_name(dtype),
        "prepared_requires_grad": flag,
    }
    record = tree.known.get(id(tensor)) or tree.sharded.get(id(tensor))
    if preparation is None or record is None:
        return found

    found["requires_grad"] = preparation.original.flags[record]
    left = preparation.left.of(record)
    if left is not None:
        found["prepared_dtype"] = dtype_name(left["dtype"])
        found["prepared_requires_grad"] = left["requires_grad"]

    return found


def _is_plain(parameter: Any) -> bool:
    """Whether a parameter says by its dtype which one the model was loaded in."""
    return parameter.is_floating_point() and not is_quantized_parameter(parameter)


def _adapters(tree: ModelTree) -> dict[str, AdapterRecord]:
    """The adapters that PEFT put into the base, by their names.

    Of those in a part of the model, the part's name comes first.
    """
    dtypes = _dtypes_of_adapters(tree)
    found = {}
    config_class = loaded_class("peft", "PeftConfig")
    for node in tree.base:
        configs = vars(node.module).get("peft_config")
        if not isinstance(configs, dict):
            continue
        for name, config in configs.items():
            if name in dtypes and isinstance(config, config_class):
                found[join(node.fqn, name)] = adapter_record(config, dtypes[name])

    return found


def _dtypes_of_adapters(tree: ModelTree) -> dict[str, set[Any]]:
    """The dtypes of what PEFT's modules hold, by the name of the adapter.

    Copies of the base's modules do not count, but an adapter that has no other
    parameters is there too.
    """
    dtypes: dict[str, set[Any]] = {}
    for node in tree.adapters:
        for key, container in node.module._modules.items():
            if not isinstance(container, (nn.ModuleDict, nn.ParameterDict)):
                continue
            for name in container:
                dtypes.setdefault(name, set())

            if key in COPIES:
                continue
            for path, parameter in container.named_parameters():
                name, _, _ = path.partition(".")
                dtypes[name].add(dtype_name(parameter.dtype))

    return dtypes


def _ties(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Number the groups of names that are one tensor.

    Such have the same memory, dtype, shape and stride.
    """
    groups: dict[Any, list[str]] = {}
    for fqn, parameter in parameters.items():
        groups.setdefault(_memory_of(parameter), []).append(fqn)
    tied = [names for names in groups.values() if len(names) > 1]
    return {name: number for number, names in enumerate(tied) for name in names}


def _memory_of(parameter: Tensor) -> Any:
    """The key of the memory that a parameter's values lie in, as it sees them."""
    if not parameter.numel():  # such have no memory to share
        return id(parameter)
    return tuple(
        (part.data_ptr(), part.dtype, part.shape, part.stride())
        for part in parts_of(parameter)
    )


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the libraries involved, by distribution.

    None of these is imported.
    """
    found = {"python": platform.python_version()}
    libraries = ("torch", "transformers", "peft", "accelerate", "safetensors")
    for name in ("kbitwrap", *libraries, *DISTRIBUTIONS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)

    # the distribution's version may lack the build
    found["torch"] = str(torch.__version__)
    return found
