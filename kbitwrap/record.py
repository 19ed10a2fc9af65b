"""What a model is: its class, its config and every tensor's original content, read without touching it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from .checkpointing import input_gradient_hooks
from .digest import content_digest
from .edits import FlagsChange
from .errors import ExportError, ManifestError, UnsupportedModelError
from .journal import Change, Journal
from .lazy import LazyTensor
from .quantization import DISTRIBUTIONS, detect, is_quantized_parameter
from .schema import TensorRecord
from .topology import (
    base_modules,
    canonical_fqn,
    is_adapter_module,
    named_modules,
    named_tensors,
    only_reading,
    refuse_unsupported_tensors,
)
from .twin import Origin, build_twin, peel

# What use, saving or another version of transformers changes in a config, at any depth; names that begin with an
# underscore too.
_VOLATILE = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# Which modules stay unquantized shows in the tensors; where others are computed is no property of the model.
_VOLATILE_QUANTIZATION = ("llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules", "modules_to_not_convert")


@dataclass(frozen=True)
class Moment:
    """Hooks, flags, modes and memory of a model at one moment, read as fast as a preparation can afford.

    Attributes:
        state: As ``StateRecord``.
        memory: As ``MemoryRecord``.
    """

    state: dict[str, Any]
    memory: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> Moment:
        """Read a model as it is now.

        Args:
            model: The model.

        Returns:
            Its state and memory.
        """
        with only_reading():
            return cls(cls._state(model), cls._memory(model))

    @staticmethod
    def _state(model: nn.Module) -> dict[str, Any]:
        modules = [(fqn, module) for fqn, module in base_modules(model) if not is_adapter_module(module)]
        hooks = {canonical_fqn(fqn): len(keys) for fqn, module in modules if (keys := input_gradient_hooks(module))}
        use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        return {
            "input_gradient_hooks": hooks,
            "checkpointing": [
                canonical_fqn(fqn) for fqn, m in modules if vars(m).get("gradient_checkpointing") is True
            ],
            "use_cache": use_cache if isinstance(use_cache, bool) else None,
            "num_modules": len(modules),
            "num_training": sum(module.training for _, module in modules),
        }

    @staticmethod
    def _memory(model: nn.Module) -> dict[str, Any]:
        parameters = [tensor.parameter for tensor in named_tensors(model)]
        storages = (parameter.untyped_storage() for parameter in parameters)
        devices = {parameter.device for parameter in parameters if parameter.is_cuda}
        return {
            "parameter_bytes": sum({storage._cdata: storage.nbytes() for storage in storages}.values()),
            "allocated_bytes": sum(map(torch.cuda.memory_allocated, devices)) if devices else None,
            "reserved_bytes": sum(map(torch.cuda.memory_reserved, devices)) if devices else None,
        }


class Baseline:
    """What a preparation found, as far as the journal does not say it; found again by the model that it prepared.

    Args:
        model: The model, before anything is changed.
        journal: The journal, which will say the rest.
    """

    def __init__(self, model: nn.Module, journal: Journal) -> None:
        self._model = weakref.ref(model)
        self._journal = weakref.ref(journal)
        self.origin: Origin | None = None
        self.before = self.after = Moment.of(model)
        self._prepared: dict[int, tuple[weakref.ref[torch.Tensor], torch.dtype, bool]] = {}
        # Training writes buffers, such as the statistics of a batch norm, and no record of the base is to change with
        # them. They are small.
        self.buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[torch.dtype, torch.Size, int]]] = (
            weakref.WeakKeyDictionary()
        )
        for _, module in named_modules(model):
            buffers = {
                name: (buffer.dtype, buffer.shape, content_digest(buffer))
                for name, buffer in module._buffers.items()
                if buffer is not None and name not in module._non_persistent_buffers_set
            }
            if buffers:
                self.buffers[module] = buffers

    def settle(self, model: nn.Module, origin: Origin | None) -> None:
        """Record what preparation left, and be found from here on.

        Args:
            model: The prepared model.
            origin: What was recorded of its configs and its tensors' places.
        """
        self.origin = origin
        self.after = Moment.of(model)
        with only_reading():
            parameters = [tensor.parameter for tensor in named_tensors(model)]
            self._prepared = {id(p): (weakref.ref(p), p.dtype, p.requires_grad) for p in parameters}
        _baselines.add(self)

    def changes(self) -> Sequence[Change]:
        """What the journal holds, oldest first; nothing once all is undone."""
        journal = self._journal()
        return () if journal is None else tuple(journal.changes)

    def prepared(self, parameter: torch.Tensor) -> tuple[torch.dtype, bool]:
        """The dtype and the flag that preparation left a parameter with; those of now where it came later."""
        reference, dtype, requires_grad = self._prepared.get(id(parameter), (None, None, None))
        if reference is None or reference() is not parameter or dtype is None or requires_grad is None:
            return parameter.dtype, parameter.requires_grad
        return dtype, requires_grad

    def original_flags(self) -> dict[int, bool]:
        """``requires_grad`` before preparation, by the ``id`` of the parameter."""
        flags: dict[int, bool] = {}
        for change in self.changes():
            if isinstance(change, FlagsChange):
                for reference, flag in change.flags:
                    flags.setdefault(id(reference()), flag)
        return flags

    @staticmethod
    def find(model: nn.Module) -> Baseline | None:
        """Find the preparation that holds a model or a part of it.

        Args:
            model: The model, whatever was wrapped around it since.

        Returns:
            Its baseline, or ``None``.
        """
        live = [baseline for baseline in _baselines if baseline.changes()]
        modules = {id(module) for _, module in named_modules(model)} if live else set()
        for baseline in live:
            prepared = baseline._model()
            if prepared is not None and any(id(module) in modules for _, module in named_modules(prepared)):
                return baseline
        return None


_baselines: weakref.WeakSet[Baseline] = weakref.WeakSet()


@dataclass(frozen=True)
class Contents:
    """What a model is, whatever was made of it since it was loaded.

    Attributes:
        model: As ``ModelRecord`` in JSON.
        tensors: Every base parameter, persistent buffer and statistic of a quantized weight, by the name that it has
            in the state dict of the unwrapped model. Dtypes, flags and digests are the original's.
    """

    model: dict[str, Any]
    tensors: dict[str, TensorRecord]


def read_contents(model: nn.Module, *, progress: bool = False) -> Contents:
    """Read what a model is: one as loaded, or prepared, or suspended, with adapters and wrappers or without.

    Args:
        model: The model; it is left untouched.
        progress: Show a progress bar on standard error.

    Returns:
        Its contents.

    Raises:
        ManifestError: Adapters are merged into its weights, or these were replaced since it was prepared.
        UnsupportedModelError: It is sharded, offloaded or on the meta device.
    """
    try:
        refuse_unsupported_tensors(model, allow_meta=False)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"cannot read every tensor of this model: {error}. Make a manifest, or check it, before that", fqn=error.fqn
        ) from error
    baseline = Baseline.find(model)
    try:
        changes, origin = (baseline.changes(), baseline.origin) if baseline else ((), None)
        twin = build_twin(model, changes, origin).model
    except ExportError as error:
        raise ManifestError(f"cannot tell what the base was: {error}") from error
    live = {fqn: (module, name) for fqn, module, name in _live_tensors("", model)}
    flags = baseline.original_flags() if baseline else {}
    state = {fqn: t for fqn, t in twin.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    ties = _ties(fqn_tensor for fqn_tensor in state.items() if isinstance(_at(live, fqn_tensor[0]), nn.Parameter))
    digests: dict[int, int] = {}  # a tied tensor is read once
    tensors = {}
    for fqn, tensor in tqdm(state.items(), desc="digest", unit="tensor", disable=not progress, leave=False):
        current = _at(live, fqn)
        dtype, shape = tensor.dtype, tensor.shape
        if isinstance(current, nn.Parameter):
            kind = "parameter"
            prepared_dtype, prepared_flag = baseline.prepared(current) if baseline else (dtype, current.requires_grad)
            flag = flags.get(id(current), current.requires_grad)
            digest = None
        else:
            kind = "quantization" if current is None else "buffer"
            flag = prepared_flag = False
            module, name = live.get(fqn, (None, ""))
            known = baseline.buffers.get(module, {}).get(name) if baseline is not None and module is not None else None
            dtype, shape, digest = known or (dtype, shape, None)
            prepared_dtype = dtype
        if digest is None:
            if id(tensor) not in digests:
                digests[id(tensor)] = content_digest(tensor.compute() if isinstance(tensor, LazyTensor) else tensor)
            digest = digests[id(tensor)]
        tensors[fqn] = TensorRecord(
            fqn,
            kind,
            tuple(shape),
            _name(dtype),
            _name(prepared_dtype),
            flag,
            prepared_flag,
            f"{digest:016x}",
            ties.get(fqn),
        )
    return Contents(_model_record(twin, live, tensors), tensors)


def _live_tensors(fqn: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The parameters and buffers of the base underneath adapters and wrappers: name, owner, name in the owner."""
    base, _ = peel(module)
    prefix = f"{fqn}." if fqn else ""
    for name in (*base._parameters, *base._buffers):
        yield prefix + name, base, name
    for name, child in base._modules.items():
        if child is not None:
            yield from _live_tensors(prefix + name, child)


def _at(live: Mapping[str, tuple[nn.Module, str]], fqn: str) -> torch.Tensor | None:
    """The live parameter or buffer of that name."""
    module, name = live.get(fqn, (None, ""))
    if module is None:
        return None
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found


def _ties(parameters: Iterator[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Number the groups of names that are one and the same memory, seen in the same way."""
    groups: dict[Any, list[str]] = {}
    for fqn, parameter in parameters:
        is_empty = parameter.numel() == 0
        place = (parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride())
        groups.setdefault(id(parameter) if is_empty else place, []).append(fqn)
    tied = [names for names in groups.values() if len(names) > 1]
    return {name: number for number, names in enumerate(tied) for name in names}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model_record(
    twin: nn.Module, live: Mapping[str, tuple[nn.Module, str]], tensors: Mapping[str, TensorRecord]
) -> dict[str, Any]:
    config = getattr(twin, "config", None)
    quantization_config = getattr(config, "quantization_config", None)
    numbers = (
        record.original_dtype
        for fqn, record in tensors.items()
        if isinstance(parameter := _at(live, fqn), nn.Parameter)
        and parameter.is_floating_point()
        and not is_quantized_parameter(parameter)
    )
    return {
        "class": type(twin).__name__,
        "name_or_path": str(getattr(config, "_name_or_path", "")),
        "config_sha256": _sha256(_settled(_as_dict(config), _VOLATILE)) if config is not None else None,
        "dtype": next(numbers, None),
        "quantization": {
            "method": detect(twin).method,
            "config": _settled(_as_dict(quantization_config), _VOLATILE_QUANTIZATION),
        },
    }


def _as_dict(config: Any) -> dict[str, Any]:
    """A config as plain values: what differs from its class's defaults, if it can say so, or else everything.

    Defaults are left out where possible: another version of transformers has further ones.
    """
    if config is None or isinstance(config, dict):
        return dict(config or {})
    convert = getattr(config, "to_diff_dict", None) or getattr(config, "to_dict", None)
    return dict(convert()) if convert is not None else dict(vars(config))


def _settled(value: Any, volatile: tuple[str, ...]) -> Any:
    """A config's values as JSON has them, without what is volatile, the same in every process."""
    if isinstance(value, Mapping):
        items = {str(key): item for key, item in value.items()}
        kept = {key: item for key, item in items.items() if not key.startswith("_") and key not in volatile}
        return {key: _settled(kept[key], volatile) for key in sorted(kept)}
    if isinstance(value, (set, frozenset)):
        return sorted(_settled(item, volatile) for item in value)
    if isinstance(value, (list, tuple)):
        return [_settled(item, volatile) for item in value]
    if isinstance(value, torch.dtype):
        return _name(value)
    value = getattr(value, "value", value)  # of an enumeration
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the installed libraries that take part, by distribution; none is imported."""
    found = {"python": platform.python_version()}
    for name in ("kbitwrap", "torch", "transformers", "peft", "accelerate", "safetensors", *DISTRIBUTIONS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
