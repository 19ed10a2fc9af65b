"""The base of a run, loaded from its files as the run had it: of its class, with its head and its vocabulary."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ManifestMismatchError
from ..manifest.manifest import Manifest
from ..model.pretrained import load_pretrained, meta_model, read_config
from ..model.quantization import is_quantized_parameter
from ..model.wrappers import canonical_fqn
from ..reports import first_of
from .adapters import SavedAdapter, with_adapter

# The classes of tasks whose head is not the base's own.
_TASKS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_MAX_NEW_ROWS = 1 << 20  # more would be allocated before anything is compared
_SKIPPED = "llm_int8_skip_modules"
_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TrainedBase:
    """A base as a run had it, without the adapter."""

    source: str  # its folder or name
    model: Any
    # by the name of a parameter, the row from which on the files do not hold it
    unknown: Mapping[str, int]


def load_base(
    name_or_path: str | os.PathLike[str],
    saved: SavedAdapter | None,
    quantization_config: Any,
    dtype: Any,
    device: torch.device | str = "cpu",
    manifest: Manifest | None = None,
    trust_remote_code: bool = False,
) -> TrainedBase:
    """Load a base as the run had it, by the manifest or else by the adapter; what its files lack is marked by NaN."""
    shapes = {**_shapes_in(saved), **recorded_shapes(manifest)}
    config = read_config(name_or_path, trust_remote_code)
    class_name = _class_name(config, saved, manifest)
    if class_name is not None:
        config.architectures = [class_name]

    num_labels = None
    meta: Any = None
    # loading says why, unless its code is its own
    with contextlib.suppress(ConfigError):
        meta = meta_model(config, quantization_config or None)
    if meta is not None:
        num_labels = _num_labels(meta, shapes)
        if manifest is None:
            quantization_config = _skipping(quantization_config, meta, saved)

    model, missing = load_pretrained(
        name_or_path,
        quantization_config,
        dtype,
        device,
        class_name,
        trust_remote_code,
        num_labels,
    )
    unknown = dict.fromkeys(missing, 0)
    unknown.update(_resize(model, shapes))
    tensors = _tensors(model)
    for fqn, start in unknown.items():
        tensor = tensors[fqn]
        if tensor.is_floating_point():
            tensor.data[start:] = torch.nan
    return TrainedBase(os.fspath(name_or_path), model, unknown)


def check_base(manifest: Manifest, base: TrainedBase) -> None:
    """Compare a base with a manifest, but for the values of what its files do not hold."""
    try:
        manifest.check(base.model)
    except ManifestMismatchError as error:
        if (
            error.missing
            or error.unexpected
            or not error.different.keys() <= base.unknown.keys()
        ):
            raise


def adapted_base(base: TrainedBase, saved: SavedAdapter) -> nn.Module:
    """The base with the adapter on it, which holds what the base's files lack; else `ConfigError`."""
    held = saved.held
    absent = [
        fqn for fqn, start in base.unknown.items() if not start and fqn not in held
    ]
    if absent:
        raise ConfigError(
            f"the base {base.source!r} lacks weights that {saved.name} does not hold: {first_of(sorted(absent))}"
        )
    tensors = _tensors(base.model)
    adapted = with_adapter(base.model, saved)
    for fqn, start in base.unknown.items():
        tensor = tensors[fqn]
        if _is_unknown(tensor, start):
            _refuse_in_use(tensor, start, adapted, base, saved)
            tensor.data[start:] = 0
    return adapted


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers, by all of their names."""
    found: dict[str, torch.Tensor] = dict(
        model.named_parameters(remove_duplicate=False)
    )
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def _is_unknown(tensor: torch.Tensor, start: int) -> bool:
    """Whether rows of a tensor were not loaded since they were marked."""
    if not tensor.is_floating_point():
        return True
    marked = tensor[start:].isnan()
    return bool(marked.any())


def _refuse_in_use(
    tensor: torch.Tensor,
    start: int,
    adapted: nn.Module,
    base: TrainedBase,
    saved: SavedAdapter,
) -> None:
    """Raise where a model computes with rows of a parameter that the base's files lack."""
    num_rows = len(tensor)
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        if parameter is tensor and not _is_replaced(
            adapted, name, range(start, num_rows)
        ):
            raise ConfigError(
                f"{canonical_fqn(name)} had {num_rows} rows in training, where the base {base.source!r} has {start}, "
                f"and {saved.name} does not hold the new ones: give the base that training began with, as "
                f"save_pretrained writes it after model.resize_token_embeddings({num_rows})"
            )


def _is_replaced(adapted: nn.Module, name: str, rows: range) -> bool:
    """Whether an adapter's own rows take the place of those of a parameter, whose module PEFT may have wrapped."""
    path, _, _ = name.rpartition(".")
    wrapper_path, _, child = path.rpartition(".")
    if child != "base_layer":
        return child == "original_module"
    trained: set[int] = set()
    wrapper = adapted.get_submodule(wrapper_path)
    for indices in vars(wrapper).get("token_indices", {}).values():
        trained.update(indices)
    return trained.issuperset(rows)


def recorded_shapes(manifest: Manifest | None) -> _Shapes:
    """The shapes of the tensors that a manifest records and that are not quantized."""
    if manifest is None:
        return {}
    records = manifest.tensors.items()
    return {
        fqn: record.shape for fqn, record in records if "float" in record.original_dtype
    }


def _shapes_in(saved: SavedAdapter | None) -> _Shapes:
    """The shapes of the base's tensors that an adapter holds whole, or has factors of."""
    if saved is None:
        return {}
    shapes = {
        canonical_fqn(name): stored.shape for name, stored in saved.tensors.items()
    }
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    for name, (height, width) in matrices.items():
        module, _, factor = name.partition(".lora_")
        if factor == "B.weight":
            _, inputs = matrices.get(f"{module}.lora_A.weight", (0, 0))
            shapes[f"{module}.weight"] = (height, inputs)
        elif factor == "embedding_A":
            features, _ = matrices.get(f"{module}.lora_embedding_B", (0, 0))
            shapes[f"{module}.weight"] = (width, features)
    return shapes


def _class_name(
    config: Any, saved: SavedAdapter | None, manifest: Manifest | None
) -> str | None:
    """The class that was trained, where it is another than the base's config names."""
    import transformers

    if manifest is not None:
        recorded = manifest.model.class_name
        return recorded if hasattr(transformers, recorded) else None
    task = None if saved is None else saved.config.get("task_type")
    auto_class = _TASKS.get(str(task))
    if auto_class is None:
        return None
    mapping = getattr(transformers, auto_class)._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    classes = found if isinstance(found, (tuple, list)) else [found]
    names: list[str] = [cls.__name__ for cls in classes]
    for name in names:
        if name in (config.architectures or ()):
            return name
    return names[0]


def _num_labels(meta: Any, shapes: _Shapes) -> int | None:
    """How many labels the run had, where a head of its has other rows than one for each of the config's labels."""
    num_labels = getattr(meta.config, "num_labels", None)
    for fqn, parameter in meta.named_parameters():
        found = getattr(parameter, "unpacked", parameter).shape
        wanted = shapes.get(fqn)
        if not wanted or wanted[1:] != found[1:]:
            continue
        if found[:1] == (num_labels,) and wanted[0] != num_labels:
            return wanted[0]
    return None


def _skipping(quantization_config: Any, meta: Any, saved: SavedAdapter | None) -> Any:
    """The quantization config, with those layers left as they are that an adapter trained whole."""
    if saved is None:
        return quantization_config
    quantized = {
        fqn
        for fqn, parameter in meta.named_parameters()
        if is_quantized_parameter(parameter)
    }
    trained = sorted(saved.held & quantized)
    if not trained:
        return quantization_config
    skipped = list(meta.hf_quantizer.modules_to_not_convert or ())
    skipped += [fqn.removesuffix(".weight") for fqn in trained]
    if isinstance(quantization_config, dict):
        return {**quantization_config, _SKIPPED: skipped}
    changed = copy.deepcopy(quantization_config)
    setattr(changed, _SKIPPED, skipped)
    return changed


def _resize(model: Any, shapes: _Shapes) -> dict[str, int]:
    """Resize the vocabulary as the run did; return the parameters that got rows, and the first of these."""
    layers = _vocabulary(model)
    sizes = {len(parameter) for parameter in layers.values()}
    changed = set()
    for fqn, parameter in layers.items():
        wanted = shapes.get(fqn)
        if wanted and wanted[1:] == parameter.shape[1:] and wanted[0] not in sizes:
            changed.add(wanted[0])
    if len(changed) != 1:
        return {}
    size = changed.pop()
    num_rows = min(sizes)
    if not 0 < size <= num_rows + _MAX_NEW_ROWS:
        raise ConfigError(
            f"the manifest or the adapter says that the vocabulary had {size} rows in training, where the base has "
            f"{num_rows}: expected at least one, and at most {_MAX_NEW_ROWS} new ones; give the base and the adapter "
            "of one run"
        )
    model.resize_token_embeddings(size, mean_resizing=False)
    return {
        fqn: num_rows
        for fqn, parameter in _vocabulary(model).items()
        if len(parameter) > num_rows
    }


def _vocabulary(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of a model's embeddings and head by all of their names, unless they are quantized."""
    try:
        layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):  # it has no vocabulary
        return {}
    held: set[int] = set()
    for layer in layers:
        if isinstance(layer, nn.Module):
            held.update(map(id, layer._parameters.values()))
    named = model.named_parameters(remove_duplicate=False)
    return {
        fqn: parameter
        for fqn, parameter in named
        if id(parameter) in held and not is_quantized_parameter(parameter)
    }
