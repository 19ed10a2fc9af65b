"""A model as ``from_pretrained`` would load it, from its config alone.

It has the shapes and dtypes, and lies on the meta device.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..errors import ConfigError
from ..reports import in_one_line, shown
from ..tensors.dtypes import HALF_DTYPES, dtype_name, parse_dtype
from .bitsandbytes_layers import make_pending
from .quantization import is_quantized_layer, is_quantized_parameter
from .tree import join

# By the name "cpu", transformers would leave all layers unquantized for a config with
# `llm_int8_enable_fp32_cpu_offload`, which a run on a GPU may have.
_CPU = torch.device("cpu")
# Tried in this order where the config names no architecture.
_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModel",
)
# where transformers imports the code of a folder
_CODE_OF_FOLDERS = "transformers_modules."
ASSUMED = "assumed_of_config"
"""The attribute of a built model for sentences on what its config leaves open.

They also say what is not as the config says.
"""

DEQUANTIZED_BY = "dequantized_by"
"""The attribute of a built model for the quantizer that dequantizes its files; absent where none does."""

# What a config counts, and models have by the thousand at most; the modules of the
# largest are 120,000.
_COUNTS = re.compile(r"layer|depth|expert|labels")
_MAX_COUNT, _MAX_MODULES = 100_000, 200_000


def meta_model(
    name_or_path: Any, quantization_config: Any = None, dtype: Any = None
) -> nn.Module:
    """Build the model that ``from_pretrained`` would load, in evaluation mode.

    No weight is read or allocated.
    """
    config = read_config(name_or_path)
    assumed = []
    # A composite config has its dtype in its parts; of two text parts the decoder's
    # counts.
    text_config = config.get_text_config(decoder=True)
    of_files = config.dtype or text_config.dtype or torch.bfloat16
    chosen = of_files = parse_dtype(of_files, is_floating=True)
    if dtype is not None and dtype != "auto":
        chosen = parse_dtype(dtype, is_floating=True)

    settings = as_plain(getattr(config, "quantization_config", None)) or {}
    is_quantized = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    if chosen != of_files and is_quantized:
        assumed.append(kept_dtype(of_files, chosen))
        chosen = of_files

    try:
        model = _build(config, quantization_config, chosen, assumed)
    except ConfigError:
        raise
    except Exception as error:  # whatever an architecture raises for a config that it cannot be built from
        name = type(name_or_path).__name__
        if isinstance(name_or_path, (str, os.PathLike)):
            name = repr(os.fspath(name_or_path))
        raise ConfigError(
            f"no model can be built from the config of {name}: {_reason(error)}"
        ) from error

    setattr(model, ASSUMED, tuple(assumed))
    return model


def kept_dtype(of_files: torch.dtype, asked: torch.dtype) -> str:
    """Say that weights are loaded in the dtype of their files, as those of quantized files are."""
    return (
        f"the base's files are {dtype_name(of_files)}, which loading keeps where they are quantized: "
        f"{dtype_name(asked)} was not taken"
    )


def as_plain(settings: Any) -> Any:
    """Return a quantization config as plain values, as it is in files; that of a loaded model is an object."""
    return settings.to_dict() if hasattr(settings, "to_dict") else settings


def load_pretrained(
    name_or_path: Any,
    quantization_config: Any,
    dtype: Any,
    device: torch.device | str = "cpu",
    class_name: str | None = None,
    trust_remote_code: bool = False,
    num_labels: int | None = None,
    *,
    is_pending: bool = False,
) -> tuple[Any, set[str]]:
    """Load a model on one device, of the class named or the config's.

    The layers of bitsandbytes of one that ``is_pending`` are left pending. Such a model
    is loaded on the CPU, and what is not converted to another dtype stays in the files,
    which are mapped into memory.

    Returns:
        The model, and the names of the weights that its files lack.
    """
    import transformers

    config = read_config(name_or_path, trust_remote_code)
    if os.path.isdir(name_or_path) and not trust_remote_code:
        _refuse_larger(Path(name_or_path), config)

    if class_name is not None:
        config.architectures = [class_name]

    options = {
        "dtype": dtype or "auto",
        "device_map": {"": torch.device(device)},  # see `_CPU`
        "output_loading_info": True,
        "trust_remote_code": trust_remote_code,
    }
    is_quantized = getattr(config, "quantization_config", None) is not None
    if quantization_config and not is_quantized and not is_pending:
        options["quantization_config"] = quantization_config

    if num_labels is not None:
        options["num_labels"] = num_labels

    # A repository may have code of its own for some Auto classes, which may run.
    own = getattr(config, "auto_map", None) if trust_remote_code else None
    auto_classes = [name for name in _AUTO_CLASSES if name in (own or ())]
    if auto_classes:
        cls: Any = getattr(transformers, auto_classes[0])
    else:
        cls = _model_class(config)
        # as AutoModel does for a class of another kind of model, which would read a config of its own
        parts = [type(config), *config.sub_configs.values()]
        usual = [one for name in _AUTO_CLASSES for one in classes_of(name, config)]
        if cls in usual and cls.config_class not in parts and num_labels is None:
            options["config"] = config

    try:
        model, info = cls.from_pretrained(name_or_path, **options)
    except Exception as error:  # of transformers, safetensors and quantizers
        raise ConfigError(
            f"cannot load a model from {os.fspath(name_or_path)!r}: {_reason(error)}"
        ) from error

    if is_pending:
        _leave_pending(model, quantization_config)
    return model, {*info["missing_keys"]}


def _leave_pending(model: Any, quantization_config: Any) -> None:
    """Replace the layers of a loaded model that are to be quantized, and leave them pending."""
    names = Counter(
        id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    quantizer, layers = layers_to_quantize(model, quantization_config)
    for fqn, layer in layers.items():
        parameters = model.get_submodule(fqn)._parameters
        layer._parameters["bias"] = parameters["bias"]
        weight = parameters["weight"]
        if names[id(weight)] > 1:  # the other one's, which is not quantized
            layer._parameters["weight"] = weight
        else:
            # what loading quantizes, also of a layer that its model builds in another dtype
            make_pending(layer, weight.to(model.config.dtype or weight.dtype))
        model.set_submodule(fqn, layer)

    model.is_quantized = True
    model.quantization_method = quantizer.quantization_config.quant_method
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    model.eval()


def unexpected_names(
    model: Any, names: Iterable[str], *, is_quantized: bool
) -> list[str]:
    """Return the names in a model's files that loading finds no place for, as its class does not build them.

    Those that the class says it ignores are among them; buffers that it computes, and
    older releases saved, are not. Files that are quantized hold tensors of other names
    in the places of weights.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    quantizer = getattr(model, "hf_quantizer", None)
    mapping = get_model_conversion_mapping(model, None, quantizer)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    places = model.state_dict(keep_vars=True)
    computed = set()
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name in module._non_persistent_buffers_set:
            computed.add(last_two(join(fqn, name)))

    found = []
    for name in names:
        in_model, _ = rename_source_key(
            name, renamings, converters, model.base_model_prefix, places
        )
        if in_model in places or name in places or last_two(name) in computed:
            continue
        if not (is_quantized and _is_of_a_layer(model, in_model)):
            found.append(name)

    return found


def last_two(name: str) -> str:
    """Return the last two parts of a tensor's name."""
    return ".".join(name.split(".")[-2:])


def _is_of_a_layer(model: nn.Module, name: str) -> bool:
    """Return whether a name leads into a module of the model that has tensors of its own."""
    module = model
    for part in name.split("."):
        child = module._modules.get(part)
        if child is None:
            break
        module = child

    return bool([*module.parameters(recurse=False), *module.buffers(recurse=False)])


def layers_to_quantize(
    model: Any, quantization_config: Any
) -> tuple[Any, dict[str, nn.Module]]:
    """Return the quantizer of transformers, and the layers that it makes of a loaded model's, by their fqns.

    They are without weights, which `make_pending` gives them. A loaded model does not
    tell which they are: its weights are tied.
    """
    config = copy.deepcopy(model.config)
    quantizer = _quantizer(config, quantization_config)
    meta = _before_loading(type(model), config, quantizer, model.dtype)
    return quantizer, {f: m for f, m in meta.named_modules() if is_quantized_layer(m)}


def _refuse_larger(folder: Path, config: Any) -> None:
    """Raise where a config describes far more than the files of its folder hold, or there are none.

    Loading would allocate it.
    """
    files = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")]
    if not files:
        raise ConfigError(
            f"cannot load a model from {os.fspath(folder)!r}: there is no .safetensors or .bin file with weights in it"
        )

    num_bytes = sum(path.stat().st_size for path in files)
    bare = read_config(config)
    bare.quantization_config = None
    num_elements = sum(parameter.numel() for parameter in meta_model(bare).parameters())
    if num_elements > 16 * num_bytes + (1 << 26):
        raise ConfigError(
            f"the config of {os.fspath(folder)!r} describes {num_elements:,} values, and its files hold {num_bytes:,} "
            "bytes: one of them is of another model"
        )


def _refuse_countless(config: Mapping[str, Any]) -> None:
    """Raise where a config counts more of something than any model has."""
    for key, value in config.items():
        if isinstance(value, dict):
            _refuse_countless(value)
        elif type(value) is int and value > _MAX_COUNT and _COUNTS.search(str(key)):
            raise ConfigError(f"{shown(key)} is {shown(value)}, which no model has")


def _reason(error: BaseException) -> str:
    name, said = type(error).__name__, in_one_line(error)
    return said if said == name else f"{name}: {said}"


def read_config(name_or_path: Any, trust_remote_code: bool = False) -> Any:
    """Read a config; a config object is copied, for it is written to later."""
    from huggingface_hub import constants, snapshot_download
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(name_or_path, PretrainedConfig):
        return copy.deepcopy(name_or_path)

    if not isinstance(name_or_path, (str, os.PathLike)) or not os.fspath(name_or_path):
        raise ConfigError(
            "expected a folder, a config.json, a name on the hub or a config object of transformers, "
            f"found {name_or_path!r}"
        )

    name = str(os.fspath(name_or_path))
    path = Path(name)
    # What cannot be a name on the hub is not looked up there.
    is_path = isinstance(name_or_path, os.PathLike) or path.is_absolute()
    if (is_path or name.startswith((".", "~"))) and not os.path.exists(path):
        raise ConfigError(f"there is no model at {name!r}")

    if os.path.isdir(path) and not (path / "config.json").is_file():
        raise ConfigError(f"there is no config.json in {name!r}")

    content: Any = {}
    try:
        if not (os.path.exists(path) or constants.HF_HUB_OFFLINE):
            # transformers would try for half a minute where there is no network
            snapshot_download(name, allow_patterns="config.json")
        content, _ = PretrainedConfig.get_config_dict(name)
        _refuse_countless(content)
        # Without `trust_remote_code=False` it would ask, on the terminal, whether to
        # run the code of the repository.
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # of transformers, the JSON parser and the network
        reason = _reason(error)
        # a file may hold anything
        own = content.get("auto_map") if isinstance(content, dict) else None
        if not trust_remote_code and isinstance(own, dict) and "AutoConfig" in own:
            reason = "it brings code along, which runs only with trust_remote_code=True (--trust-remote-code)"
        elif not (content or os.path.exists(path)):
            reason = f"it is no folder here, and no model of that name is in the cache or on the hub ({reason})"
        raise ConfigError(f"cannot read a config from {name!r}: {reason}") from error

    return config


def _model_class(config: Any) -> Any:
    """Return the class that the config names, or that of the first Auto class that knows it."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    # Whoever read a config of a class of its folder's own let its code run.
    if type(config).__module__.startswith(_CODE_OF_FOLDERS):
        own = getattr(config, "auto_map", None) or {}
        for name in _AUTO_CLASSES:
            if name in own:
                return get_class_from_dynamic_module(own[name], config.name_or_path)

    names = config.architectures
    # a file may hold anything
    for name in names if isinstance(names, list) else ():
        found = getattr(transformers, str(name), None)
        if inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel):
            return found

    for name in _AUTO_CLASSES:
        classes = classes_of(name, config)
        if classes:
            return classes[0]

    raise ConfigError(
        f"transformers has no model class for {type(config).__name__} with architectures "
        f"{names!r}; build the model on the meta device and give it to build_plan"
    )


def classes_of(auto_class: str, config: Any) -> list[Any]:
    """Return the classes that an Auto class knows for a config, the usual one first."""
    import transformers

    found = getattr(transformers, auto_class)._model_mapping.get(type(config), ())
    return list(found) if isinstance(found, (tuple, list)) else [found]


def own_settings(config: Any) -> Any:
    """Return the quantization config in that of a model, or of its text part; ``None`` where there is none."""
    for one in (config, config.get_text_config(decoder=True)):
        own = getattr(one, "quantization_config", None)
        if own is not None:
            return own
    return None


def _quantizer(config: Any, quantization_config: Any) -> Any:
    """Make the quantizer of transformers, or ``None``.

    Its environment is not validated, because nothing is computed.
    """
    from transformers.quantizers.auto import AutoHfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if not isinstance(quantization_config, (QuantizationConfigMixin, dict, type(None))):
        raise ConfigError(
            "quantization_config: expected None or a config of transformers such as BitsAndBytesConfig, "
            f"found {quantization_config!r}"
        )

    own = own_settings(config)
    settings: Any = copy.deepcopy(quantization_config)
    is_quantized = own is not None and AutoHfQuantizer.supports_quant_method(
        as_plain(own)
    )
    if is_quantized:
        settings = AutoHfQuantizer.merge_quantization_configs(own, settings)

    if settings is None:
        return None

    config.quantization_config = settings
    return AutoHfQuantizer.from_config(settings, pre_quantized=is_quantized)


def _build(
    config: Any, quantization_config: Any, dtype: torch.dtype, assumed: list[str]
) -> nn.Module:
    model_class = _model_class(config)
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # as Auto classes take it
    quantizer = _quantizer(config, quantization_config)
    is_dequantized = None
    if quantizer is not None:
        dtype = quantizer.update_dtype(dtype)
        settings = quantizer.quantization_config
        method = str(getattr(settings.quant_method, "value", settings.quant_method))
        if quantizer.pre_quantized:
            is_dequantized = getattr(settings, "dequantize", None)
        if is_dequantized:
            assumed.append(
                f"the model's weights, quantized by {method}, are dequantized to "
                f"{dtype_name(dtype)} when it is loaded"
            )
        elif is_dequantized is False and not quantizer.is_trainable:
            raise ConfigError(
                f"the model's weights are quantized by {method}, in which transformers trains nothing: plan for "
                f"dequantized ones (quantization_config={type(settings).__name__}(dequantize=True))"
            )

    model = _before_loading(model_class, config, quantizer, dtype)
    _keep_in_float32(model, dtype)
    model.tie_weights()
    if quantizer is not None:
        for parameter in model.parameters():
            if is_quantized_parameter(parameter):
                _pack(parameter, dtype)
        quantizer.postprocess_model(model)

    is_quantized = getattr(model, "quantization_method", None) is not None
    model.hf_quantizer = quantizer if is_quantized else None  # as a loaded model has it
    if is_dequantized:
        setattr(model, DEQUANTIZED_BY, quantizer)
    return model.eval()  # type: ignore[no-any-return]


def _before_loading(
    model_class: Any, config: Any, quantizer: Any, dtype: torch.dtype
) -> Any:
    """Build a model as ``from_pretrained`` has it before it loads weights.

    Its layers are those of the quantizer, which chooses them before weights are tied. A
    model of more modules than any has is refused meanwhile.
    """
    from transformers.initialization import no_init_weights

    for part in (config, *[getattr(config, name) for name in config.sub_configs]):
        if part is not None:
            part.dtype = dtype

    contexts = model_class.get_init_context(
        dtype=dtype, is_quantized=True, _is_ds_init_called=False, allow_all_kernels=None
    )
    count = itertools.count()

    def refuse(*_: object) -> None:
        if next(count) > _MAX_MODULES:
            raise ConfigError(
                f"its config describes a model of more than {_MAX_MODULES:,} modules"
            )

    with contextlib.ExitStack() as stack:
        stack.callback(register_module_module_registration_hook(refuse).remove)
        for context in (*contexts, no_init_weights()):
            stack.enter_context(context)
        model = model_class(config)
        if quantizer is not None:
            quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": _CPU})

    return model


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Cast what the architecture keeps in float32.

    It keeps some of it beside any half dtype, and some beside float16 alone.
    """
    patterns = [*(model._keep_in_fp32_modules_strict or ())]
    if dtype == torch.float16:
        patterns += model._keep_in_fp32_modules or ()
    if not patterns or dtype not in HALF_DTYPES:
        return

    # As in transformers, a pattern matches anywhere in the name.
    kept = re.compile("|".join(patterns).replace("*", ".*"))
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *model.named_buffers()):
        is_half = tensor.dtype in HALF_DTYPES and not is_quantized_parameter(tensor)
        if is_half and kept.search(name):
            tensor.data = tensor.data.to(torch.float32)


def _pack(parameter: Any, dtype: torch.dtype) -> None:
    """Give an unquantized meta weight the shape and dtype of its quantized storage.

    The weight that it is quantized from, in the dtype of the model, stays with it.
    """
    parameter.unpacked = torch.empty_like(parameter.data, dtype=dtype)
    storage = getattr(parameter, "quant_storage", None)
    if storage is not None:  # two values a byte, in one column of the storage dtype
        rows = (parameter.numel() + 1) // (2 * storage.itemsize)
        parameter.data = torch.empty((rows, 1), dtype=storage, device="meta")
    elif not getattr(parameter, "has_fp16_weights", False):
        parameter.data = parameter.data.to(torch.int8)
