"""A model's identity, read without touching it.

It is the model's class, its config and every tensor's original content.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ExportError, ManifestError
from ..export.sharding import Gathering
from ..export.twin import build_twin
from ..model.bitsandbytes_layers import is_pending, quantized_layer
from ..model.checks import refuse_unreadable
from ..model.quantization import DISTRIBUTIONS, is_quantized_parameter
from ..model.tree import ModelTree, join
from ..model.wrappers import COPIES, loaded_class
from ..preparation.preparation import Preparation
from ..preparation.process import bar, plain_mode
from ..tensors.bits import content_digest, is_dense, parts_of
from ..tensors.dtypes import dtype_name
from ..tensors.lazy import values_of
from .configs import adapter_record, model_record
from .schema import TensorRecord


class Contents(NamedTuple):
    """The identity of a model as it was loaded.

    Attributes:
        model: Its class and configs, with the names of a manifest's ``"model"``.
        tensors: All of the state dict of the unwrapped model, by name, with the dtypes,
            flags and digests of the originals.
        adapters: The adapters on it, by name, as in a manifest's ``"adapters"``.
        trained: The parameters that a preparation holds, and that training has changed.
        unread: The pending layers that were not read, by name: of their tensors, the
            biases alone are in ``tensors``.
    """

    model: dict[str, Any]
    tensors: dict[str, TensorRecord]
    adapters: dict[str, dict[str, Any]]
    trained: tuple[str, ...]
    unread: frozenset[str]


def read_contents(
    tree: ModelTree,
    preparation: Preparation | None,
    *,
    progress: bool = False,
    reads_pending: bool = True,
) -> Contents:
    """Read the contents of a model, prepared or not.

    All ranks together read a model that was sharded since. Layers that are pending
    are quantized for it, unless they are not to be read.
    """
    gathering = Gathering(tree, preparation, "make a manifest", ManifestError)
    remedy = "Make or check a manifest while all of them are loaded"

    def read() -> Contents:
        """Read the twin, which has the originals; the live model says which are parameters."""
        live: dict[str, Tensor | None] = {}
        for node in tree.base:
            for held in (node.module._parameters, node.module._buffers):
                named = {join(node.fqn, name): tensor for name, tensor in held.items()}
                live |= named

        state = twin.state_dict(keep_vars=True)
        originals = {fqn: one for fqn, one in state.items() if isinstance(one, Tensor)}
        parameters = [
            fqn for fqn in originals if isinstance(live.get(fqn), nn.Parameter)
        ]
        ties = _tie_groups({fqn: originals[fqn] for fqn in parameters})
        modules = dict(twin.named_modules())
        pending = [fqn for fqn, module in modules.items() if is_pending(module)]
        layers = {join(fqn, "weight"): modules[fqn] for fqn in pending}
        tensors = {}
        for fqn in bar([*originals], "digest", is_shown=progress, unit="tensor"):
            if fqn not in layers:
                tensors[fqn] = _record(
                    fqn, originals[fqn], live.get(fqn), ties.get(fqn), tree, preparation
                )
            elif reads_pending:  # they are quantized one at a time
                tensors |= records_of_layer(fqn, quantized_layer(layers[fqn]))

        dtype = None
        for fqn in parameters:
            one: Any = live[fqn]
            is_plain = one.is_floating_point() and not is_quantized_parameter(one)
            if dtype is None and is_plain:
                dtype = tensors[fqn].original_dtype

        trained = [] if preparation is None else preparation.changes(tree).trained
        return Contents(
            model_record(twin, dtype),
            tensors,
            _adapters(tree),
            trained=(*trained, *gathering.trained),
            unread=frozenset() if reads_pending else frozenset(pending),
        )

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

        return gathering.lead(read)


def _record(
    fqn: str,
    original: Tensor,
    live: Tensor | None,
    tie_group: int | None = None,
    tree: ModelTree | None = None,
    preparation: Preparation | None = None,
) -> TensorRecord:
    """Record an original; ``live`` is the live model's tensor of that name, or ``None``."""
    kind, flag = "buffer", False
    if live is None:
        kind = "quantization"  # it is in the state dict, and nowhere in the model
    elif isinstance(live, nn.Parameter):
        kind, flag = "parameter", live.requires_grad

    # A buffer is recorded as it was before the preparation: training writes to it.
    recorded_buffer = as_prepared = None
    if preparation is not None and tree is not None:
        recorded_buffer = preparation.before.buffers.get(fqn)
        known = tree.found(live)
        if known is not None:
            flag = preparation.before.flag(known)
            if preparation.after is not None:
                as_prepared = preparation.after.parameters.get(known)

    if recorded_buffer is None and not is_dense(original):
        raise ManifestError(
            f"{fqn}: expected a dense tensor, whose bytes can be read, found "
            f"{type(original).__name__} of {original.layout} and {original.dtype}; register "
            "a buffer that checkpoints do not need with persistent=False"
        )

    source: Any = original
    if recorded_buffer is None:
        digest = content_digest(values_of(original))
    else:
        source, digest = recorded_buffer, recorded_buffer.digest()
    prepared = as_prepared or {"dtype": source.dtype, "requires_grad": flag}
    return TensorRecord(
        fqn=fqn,
        type=kind,
        shape=tuple(source.shape),
        original_dtype=dtype_name(source.dtype),
        prepared_dtype=dtype_name(prepared["dtype"]),
        requires_grad=flag,
        prepared_requires_grad=prepared["requires_grad"],
        digest=f"{digest:016x}",
        tie_group=tie_group,
    )


def records_of_layer(fqn: str, layer: nn.Module) -> dict[str, TensorRecord]:
    """Record a quantized layer's weight, which has this name, and its statistics."""
    prefix = fqn.removesuffix("weight")
    state = layer.state_dict(prefix=prefix, keep_vars=True)
    state.pop(f"{prefix}bias", None)  # it is no part of what was quantized
    return {
        name: _record(name, tensor, tensor if name == fqn else None)
        for name, tensor in state.items()
    }


def _adapters(tree: ModelTree) -> dict[str, dict[str, Any]]:
    """Record the adapters that PEFT put into the base, by their names.

    The name of a part of the model comes before those of the adapters in it. The dtypes
    are those of PEFT's own parameters: copies of the base's modules do not count, but
    an adapter that has no other parameters is there too.
    """
    dtypes = defaultdict(set)
    for node in tree.adapters:
        for key, container in node.module._modules.items():
            if isinstance(container, (nn.ModuleDict, nn.ParameterDict)):
                own = [] if key in COPIES else container.named_parameters()
                for path, parameter in own:
                    name, _, _ = path.partition(".")
                    dtypes[name].add(dtype_name(parameter.dtype))
                for name in container:
                    dtypes.setdefault(name, set())  # also without parameters of its own

    found = {}
    config_class = loaded_class("peft", "PeftConfig")
    for node in tree.base:
        configs = vars(node.module).get("peft_config")
        for name, config in configs.items() if isinstance(configs, dict) else ():
            if name in dtypes and isinstance(config, config_class):
                found[join(node.fqn, name)] = adapter_record(config, dtypes[name])

    return found


def _tie_groups(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of the group of each name whose tensor has others.

    They have the same memory, dtype, shape and stride.
    """
    groups: dict[Any, list[str]] = {}
    for fqn, parameter in parameters.items():
        memory: Any = id(parameter)  # a tensor without elements has none to share
        if parameter.numel():
            memory = tuple(
                (part.data_ptr(), part.dtype, part.shape, part.stride())
                for part in parts_of(parameter)
            )
        groups.setdefault(memory, []).append(fqn)

    tied = [names for names in groups.values() if len(names) > 1]
    return {name: number for number, names in enumerate(tied) for name in names}


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries involved, by distribution.

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
