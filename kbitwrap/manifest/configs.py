"""A model's and its adapters' configs, as a manifest records and compares them.

A hash is of what determines the model, and not of what using or saving it changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..model.tree import ModelTree, join
from ..tensors.dtypes import dtype_name

# Config keys that use, saving or another version of transformers changes, at any depth.
# Those with a leading "_" are volatile too.
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


def model_record(twin: nn.Module, dtype: str | None) -> dict[str, Any]:
    """Record a twin; ``dtype`` is that of its first plain parameter."""
    configs = dict(_outermost_configs(twin))
    settled = {fqn: _settled(_as_dict(one), _VOLATILE) for fqn, one in configs.items()}
    quantizations = {}
    for fqn, config in configs.items():
        own = getattr(config, "quantization_config", None)
        if own is not None:
            quantizations[fqn] = _settled(_as_dict(own), _VOLATILE_QUANTIZATION)

    sha256 = _sha256(settled.get("", settled), sort_keys=True) if settled else None
    return {
        "class": type(twin).__name__,
        "name_or_path": str(getattr(configs.get(""), "_name_or_path", "")),
        "config_sha256": sha256,
        "dtype": dtype,
        "quantization": {
            "method": ModelTree(twin).quantization.method,
            "config": quantizations.get("", quantizations),
        },
    }


def adapter_record(config: Any, dtypes: set[str]) -> dict[str, Any]:
    """Record an adapter: what its config has beside the defaults of its class.

    Lists of names have no order.
    """
    given = {}
    for key, value in _as_dict(config).items():
        if value == getattr(type(config), key, {}):
            continue
        has_names = isinstance(value, list) and all(isinstance(v, str) for v in value)
        given[key] = {*value} if has_names else value

    sha256 = _sha256(_settled(given, _VOLATILE_ADAPTER))
    return {"config_sha256": sha256, "dtypes": tuple(sorted(dtypes))}


def _outermost_configs(module: nn.Module, fqn: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the config of a model, or those of the outermost models in a container, by fqn."""
    config = vars(module).get("config")
    if config is not None:
        yield fqn, config
        return
    for name, child in module.named_children():
        yield from _outermost_configs(child, join(fqn, name))


def _as_dict(config: Any) -> dict[str, Any]:
    """Return a config as a dict, if possible without its class's defaults.

    Versions of transformers add some of these.
    """
    if isinstance(config, dict):
        return config
    for name in ("to_diff_dict", "to_dict"):
        if hasattr(config, name):
            return dict(getattr(config, name)())
    return vars(config) if hasattr(config, "__dict__") else {"": config}


def _settled(value: Any, volatile: tuple[str, ...]) -> Any:
    """Return a config's values as JSON values without volatile keys, the same in every process."""
    if isinstance(value, Mapping):
        items = {str(key): item for key, item in value.items()}
        return {
            key: _settled(items[key], volatile)
            for key in sorted(items)
            if not key.startswith("_") and key not in volatile
        }

    if isinstance(value, (list, tuple)):
        return [_settled(item, volatile) for item in value]

    if isinstance(value, (set, frozenset)):
        return sorted([_settled(item, volatile) for item in value], key=json.dumps)

    if isinstance(value, torch.dtype):
        return dtype_name(value)

    value = getattr(value, "value", value)  # of an enumeration
    is_plain = value is None or isinstance(value, (str, int, float))
    return value if is_plain else type(value).__name__


def _sha256(value: Any, **options: Any) -> str:
    return hashlib.sha256(json.dumps(value, **options).encode()).hexdigest()
