"""Reading a model's identity without touching it: its class, its config and every tensor's original content."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..errors import ExportError, ManifestError
from ..export.sharding import Gathering
from ..export.twin import Twin, build_twin
from ..model.checks import refuse_unreadable
from ..model.quantization import DISTRIBUTIONS, is_quantized_parameter
from ..model.tree import ModelTree, join
from ..model.wrappers import COPIES, loaded_class
from ..preparation.preparation import Preparation
from ..preparation.process import plain_mode
from ..tensors.bits import content_digest, is_dense, parts_of
from ..tensors.dtypes import dtype_name
from ..tensors.lazy import values_of
from .schema import AdapterRecord, ModelRecord, QuantizationRecord, TensorRecord

# Config keys that use, saving or another version of transformers changes, at any depth.
# Those with a leading "_" are volatile too.
_VOLATILE = (
    "architectures", "bos_token_id", "dtype", "eos_token_id", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "quantization_config", "return_dict", "torch_dtype", "transformers_version",
    "use_cache",
)  # fmt: skip
# The tensors show which modules stay unquantized, and the device of a layer is no
# property of the model.
_VOLATILE_QUANTIZATION = (
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_skip_modules",
    "modules_to_not_convert",
)
# What saving and loading change in the config of an adapter.
_VOLATILE_ADAPTER = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
)


@dataclass(frozen=True)
class Contents:
    """The identity of a model as it was loaded, with the dtypes, flags and digests of the originals."""

    model: ModelRecord
    # all of the state dict of the unwrapped model, by name
    tensors: dict[str, TensorRecord]
    adapters: dict[str, AdapterRecord]
    # parameters that a preparation holds and that training has changed
    trained: tuple[str, ...]


def read_contents(
    tree: ModelTree, preparation: Preparation | None, *, progress: bool = False
) -> Contents:
    """Read the contents of a model, prepared or not; of one that was sharded since, all ranks read it together."""
    gathering = (
        None
        if preparation is None
        else Gathering.of(tree, "make a manifest", ManifestError)
    )
    with plain_mode():
        with contextlib.nullcontext() if gathering is None else gathering.agreeing():
            try:
                remedy = "Make or check a manifest while all of them are loaded"
                refuse_unreadable(
                    tree, allow_sharded=gathering is not None, remedy=remedy
                )
                twin = build_twin(tree, preparation, gathering)
            except ExportError as error:
                raise ManifestError(
                    f"cannot determine the original base: {error}", fqn=error.fqn
                ) from error
        read = functools.partial(_read, twin, tree, preparation, gathering, progress)
        return read() if gathering is None else gathering.lead(read)


def _read(
    twin: Twin,
    tree: ModelTree,
    preparation: Preparation | None,
    gathering: Gathering | None,
    progress: bool,
) -> Contents:
    """Read the contents of a twin of a live model."""
    live: dict[str, torch.Tensor | None] = {}
    for node in tree.base:
        for name, held in (
            *node.module._parameters.items(),
            *node.module._buffers.items(),
        ):
            live[join(node.fqn, name)] = held
    state = {
        fqn: t
        for fqn, t in twin.model.state_dict(keep_vars=True).items()
        if isinstance(t, torch.Tensor)
    }
    ties = _ties(
        {fqn: t for fqn, t in state.items() if isinstance(live.get(fqn), nn.Parameter)}
    )
    known = {} if preparation is None else {**tree.known, **tree.sharded}
    digests: dict[int, int] = {}  # a tied tensor is read once
    tensors = {}
    for fqn, tensor in tqdm(
        state.items(), desc="digest", unit="tensor", disable=not progress, leave=False
    ):
        current = live.get(fqn)
        buffer = None if preparation is None else preparation.original.buffers.get(fqn)
        if buffer is not None:
            dtype, shape, digest = buffer.dtype, buffer.shape, buffer.digest()
        else:
            if id(tensor) not in digests:
                digests[id(tensor)] = _digest(fqn, tensor)
            dtype, shape, digest = tensor.dtype, tensor.shape, digests[id(tensor)]
        prepared_dtype, prepared_flag, flag = dtype, False, False
        kind = "quantization" if current is None else "buffer"
        if isinstance(current, nn.Parameter):
            kind = "parameter"
            flag = prepared_flag = current.requires_grad
            record = known.get(id(current))
            if preparation is not None and record is not None:
                flag = preparation.original.flags[record]
                left = preparation.left.of(record)
                if left is not None:
                    prepared_dtype, prepared_flag = left["dtype"], left["requires_grad"]
        tensors[fqn] = TensorRecord(
            fqn=fqn,
            type=kind,
            shape=tuple(shape),
            original_dtype=dtype_name(dtype),
            prepared_dtype=dtype_name(prepared_dtype),
            requires_grad=flag,
            prepared_requires_grad=prepared_flag,
            digest=f"{digest:016x}",
            tie_group=ties.get(fqn),
        )
    trained = [] if preparation is None else preparation.changes(tree).trained
    trained += [] if gathering is None else gathering.trained
    return Contents(
        _model_record(twin.model, live, tensors),
        tensors,
        _adapters(tree),
        tuple(trained),
    )


def _adapters(tree: ModelTree) -> dict[str, AdapterRecord]:
    """The adapters that PEFT put into the base, by their names; in a part of the model, with the part's before."""
    # of what PEFT's modules hold under a name, copies of the base's not counted
    dtypes: dict[str, set[Any]] = {}
    for key, container in (
        child for node in tree.adapters for child in node.module._modules.items()
    ):
        for name, part in (
            container.items()
            if isinstance(container, (nn.ModuleDict, nn.ParameterDict))
            else ()
        ):
            own = (
                ()
                if key in COPIES
                else part.parameters()
                if isinstance(part, nn.Module)
                else (part,)
            )
            dtypes.setdefault(name, set()).update(
                dtype_name(parameter.dtype) for parameter in own
            )
    return {
        join(node.fqn, name): _adapter_record(config, dtypes[name])
        for node in tree.base
        if isinstance(configs := vars(node.module).get("peft_config"), dict)
        for name, config in configs.items()
        if name in dtypes and isinstance(config, loaded_class("peft", "PeftConfig"))
    }


def _adapter_record(config: Any, dtypes: set[Any]) -> AdapterRecord:
    """The record of an adapter, of its config what is no default of its class; lists of names have no order."""
    given = {
        key: {*value}
        if isinstance(value, list) and all(isinstance(name, str) for name in value)
        else value
        for key, value in _as_dict(config).items()
        if value != getattr(type(config), key, {})
    }
    text = json.dumps(_settled(given, _VOLATILE_ADAPTER))
    return AdapterRecord(
        config_sha256=hashlib.sha256(text.encode()).hexdigest(),
        dtypes=tuple(sorted(dtypes)),
    )


def _digest(fqn: str, tensor: torch.Tensor) -> int:
    if not is_dense(tensor):
        raise ManifestError(
            f"{fqn}: expected a dense tensor, whose bytes can be read, found {type(tensor).__name__} of "
            f"{tensor.layout} and {tensor.dtype}; register a buffer that checkpoints do not need with persistent=False"
        )
    return content_digest(values_of(tensor))


def _ties(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Number the groups of names that are the same memory with the same dtype, shape and stride."""
    groups: dict[Any, list[str]] = {}
    for fqn, parameter in parameters.items():
        is_empty = parameter.numel() == 0
        places = tuple(
            (part.data_ptr(), part.dtype, part.shape, part.stride())
            for part in parts_of(parameter)
        )
        groups.setdefault(id(parameter) if is_empty else places, []).append(fqn)
    tied = [names for names in groups.values() if len(names) > 1]
    return {name: number for number, names in enumerate(tied) for name in names}


def _model_record(
    twin: nn.Module,
    live: Mapping[str, torch.Tensor | None],
    tensors: Mapping[str, TensorRecord],
) -> ModelRecord:
    config = getattr(twin, "config", None)
    configs = {"": config} if config is not None else dict(_inner_configs(twin))
    settled = {
        fqn: _settled(_as_dict(found), _VOLATILE) for fqn, found in configs.items()
    }
    quantizations = {
        fqn: _settled(_as_dict(quantization), _VOLATILE_QUANTIZATION)
        for fqn, found in configs.items()
        if (quantization := getattr(found, "quantization_config", None)) is not None
    }
    floating = {
        n: p
        for n, p in live.items()
        if isinstance(p, nn.Parameter) and p.is_floating_point()
    }
    plain = {
        fqn
        for fqn, parameter in floating.items()
        if not is_quantized_parameter(parameter)
    }
    method = ModelTree(twin).quantization.method
    sha256 = hashlib.sha256(
        json.dumps(settled.get("", settled), sort_keys=True).encode()
    ).hexdigest()
    data = {
        "class": type(twin).__name__,
        "name_or_path": str(getattr(config, "_name_or_path", "")),
        "config_sha256": sha256 if settled else None,
        "dtype": next(
            (record.original_dtype for fqn, record in tensors.items() if fqn in plain),
            None,
        ),
        "quantization": QuantizationRecord(
            method=method, config=quantizations.get("", quantizations)
        ),
    }
    return ModelRecord.model_validate(data)


def _inner_configs(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The configs of the outermost models inside a container, by their names."""
    for name, child in module.named_children():
        config = vars(child).get("config")
        if config is None:
            yield from _inner_configs(child, f"{prefix}{name}.")
        else:
            yield prefix + name, config


def _as_dict(config: Any) -> dict[str, Any]:
    """A config as plain values, if possible without its class's defaults: versions of transformers add some."""
    if config is None or isinstance(config, dict):
        return dict(config or {})
    convert = getattr(config, "to_diff_dict", None) or getattr(config, "to_dict", None)
    if convert is not None:
        return dict(convert())
    return dict(vars(config)) if hasattr(config, "__dict__") else {"": config}


def _settled(value: Any, volatile: tuple[str, ...]) -> Any:
    """A config's values as JSON values, without volatile keys, the same in every process."""
    if isinstance(value, Mapping):
        items = {str(key): item for key, item in value.items()}
        kept = {
            key: item
            for key, item in items.items()
            if not key.startswith("_") and key not in volatile
        }
        return {key: _settled(kept[key], volatile) for key in sorted(kept)}
    if isinstance(value, (set, frozenset)):
        return sorted((_settled(item, volatile) for item in value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [_settled(item, volatile) for item in value]
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    value = getattr(value, "value", value)  # of an enumeration
    return (
        value
        if isinstance(value, (str, int, float, bool, type(None)))
        else type(value).__name__
    )


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the libraries involved, by distribution; none is imported."""
    found = {"python": platform.python_version()}
    for name in (
        "kbitwrap",
        "torch",
        "transformers",
        "peft",
        "accelerate",
        "safetensors",
        *DISTRIBUTIONS,
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # the distribution's version may lack the build
    found["torch"] = str(torch.__version__)
    return found
