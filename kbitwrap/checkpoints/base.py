"""The base of a run, loaded from its files as the run had it: of its class, with its head and its vocabulary."""

from __future__ import annotations

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
from ..model.tree import join
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
_SKIPPED = "llm_int8_skip_modules"
_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TrainedBase:
    """A base as a run had it, without the adapter."""

    source: str  # its folder or name
    model: Any
    unknown: Mapping[str, int]  # by the name of a parameter, the row from which on the files do not hold it


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
    try:
        meta: Any = meta_model(config, quantization_config or None)
    except ConfigError:  # loading says why, unless its code is its own
        meta = None
    if meta is not None:
        num_labels = _num_labels(meta, shapes)
        if manifest is None:
            quantization_config = _skipping(quantization_config, meta, saved)
    model, missing = load_pretrained(
        name_or_path, quantization_config, dtype, device, class_name, trust_remote_code, num_labels
    )
    unknown = dict.fromkeys(missing, 0) | _resize(model, shapes)
    tensors = _tensors(model)
    for fqn, start in unknown.items():
        if tensors[fqn].is_floating_point():
            tensors[fqn].data[start:] = torch.nan
    return TrainedBase(os.fspath(name_or_path), model, unknown)


def check_base(manifest: Manifest, base: TrainedBase) -> None:
    """Compare a base with a manifest, but for the values of what its files do not hold."""
    try:
        manifest.check(base.model)
    except ManifestMismatchError as error:
        if error.missing or error.unexpected or not error.different.keys() <= base.unknown.keys():
            raise


def adapted_base(base: TrainedBase, saved: SavedAdapter) -> nn.Module:
    """The base with the adapter on it, which holds what the base's files lack; else `ConfigError`."""
    held = saved.held
    absent = [fqn for fqn, start in base.unknown.items() if not start and fqn not in held]
    if absent:
        raise ConfigError(
            f"the base {base.source!r} lacks weights that {saved.name} does not hold: {first_of(sorted(absent))}"
        )
    tensors = _tensors(base.model)
    marked = {id(tensors[fqn]): (tensors[fqn], start) for fqn, start in base.unknown.items()}
    adapted = with_adapter(base.model, saved)
    unknown = {key: (tensor, start) for key, (tensor, start) in marked.items() if _is_unknown(tensor, start)}
    for path, module in adapted.named_modules(remove_duplicate=False) if unknown else ():
        for name, parameter in module._parameters.items():
            tensor, start = unknown.get(id(parameter), (None, 0))
            if tensor is not None and not _is_replaced(adapted, path, range(start, len(tensor))):
                raise ConfigError(
                    f"{canonical_fqn(join(path, name))} had {len(tensor)} rows in training, where the base "
                    f"{base.source!r} has {start}, and {saved.name} does not hold the new ones: give the base that "
                    "training began with, as save_pretrained writes it after "
                    f"model.resize_token_embeddings({len(tensor)})"
                )
    for tensor, start in unknown.values():  # no place is left where it would be computed with
        tensor.data[start:] = 0
    return adapted


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers, by all of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _is_unknown(tensor: torch.Tensor, start: int) -> bool:
    """Whether rows of a tensor were not loaded since they were marked."""
    return not tensor.is_floating_point() or bool(tensor[start:].isnan().any())


def _is_replaced(adapted: nn.Module, path: str, rows: range) -> bool:
    """Whether an adapter's own rows take the place of those of the module at a path, which PEFT may have wrapped."""
    wrapper_path, _, child = path.rpartition(".")
    if child == "original_module":
        return True
    by_adapter = vars(adapted.get_submodule(wrapper_path)).get("token_indices", {})
    trained = {index for indices in by_adapter.values() for index in indices}
    return child == "base_layer" and trained.issuperset(rows)


def recorded_shapes(manifest: Manifest | None) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that a manifest records and that are not quantized."""
    records = {} if manifest is None else manifest.tensors
    return {fqn: record.shape for fqn, record in records.items() if "float" in record.original_dtype}


def _shapes_in(saved: SavedAdapter | None) -> dict[str, tuple[int, ...]]:
    """The shapes of the base's tensors that an adapter holds whole, or has factors of."""
    tensors = {} if saved is None else saved.tensors
    shapes = {canonical_fqn(name): stored.shape for name, stored in tensors.items()}
    found = dict(shapes)
    for name, (*_, size) in [(name, shape) for name, shape in shapes.items() if len(shape) == 2]:
        module, _, factor = name.partition(".lora_")
        if factor == "embedding_A":
            found[f"{module}.weight"] = (size, shapes.get(f"{module}.lora_embedding_B", (0,))[0])
        elif factor == "B.weight":
            found[f"{module}.weight"] = (shapes[name][0], shapes.get(f"{module}.lora_A.weight", (0,))[-1])
    return found


def _class_name(config: Any, saved: SavedAdapter | None, manifest: Manifest | None) -> str | None:
    """The class that was trained, where it is another than the base's config names."""
    import transformers

    if manifest is not None:
        recorded = manifest.model.class_name
        return recorded if hasattr(transformers, recorded) else None
    auto_class = _TASKS.get(str(saved.config.get("task_type"))) if saved is not None else None
    if auto_class is None:
        return None
    mapping = getattr(transformers, auto_class)._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    names: list[str] = [cls.__name__ for cls in (found if isinstance(found, (tuple, list)) else (found,))]
    own = [name for name in config.architectures or () if name in names]
    return own[0] if own else names[0]


def _num_labels(meta: Any, shapes: _Shapes) -> int | None:
    """How many labels the run had, where a head of its has other rows than one for each of the config's labels."""
    num_labels = getattr(meta.config, "num_labels", None)
    for fqn, parameter in meta.named_parameters():
        shape, wanted = getattr(parameter, "unpacked", parameter).shape, shapes.get(fqn, ())
        if shape[:1] == (num_labels,) and wanted[1:] == shape[1:] and wanted[:1] not in ((), (num_labels,)):
            return wanted[0]
    return None


def _skipping(quantization_config: Any, meta: Any, saved: SavedAdapter | None) -> Any:
    """The quantization config, with those layers left as they are that an adapter trained whole."""
    quantized = {fqn for fqn, parameter in meta.named_parameters() if is_quantized_parameter(parameter)}
    held = set() if saved is None else saved.held
    trained = [fqn.removesuffix(".weight") for fqn in sorted(held & quantized)]
    if not trained:
        return quantization_config
    skipped = [*(meta.hf_quantizer.modules_to_not_convert or ()), *trained]
    if isinstance(quantization_config, dict):
        return {**quantization_config, _SKIPPED: skipped}
    changed = copy.deepcopy(quantization_config)
    setattr(changed, _SKIPPED, skipped)
    return changed


def _resize(model: Any, shapes: _Shapes) -> dict[str, int]:
    """Resize the vocabulary as the run did; return the parameters that got rows, and the first of these."""
    layers = _vocabulary(model)
    wanted = {shapes[fqn][0] for fqn, p in layers.items() if fqn in shapes and shapes[fqn][1:] == p.shape[1:]}
    changed = wanted - {len(parameter) for parameter in layers.values()}
    if len(changed) != 1:
        return {}
    num_rows = min(len(parameter) for parameter in layers.values())
    model.resize_token_embeddings(changed.pop(), mean_resizing=False)
    return {fqn: num_rows for fqn, parameter in _vocabulary(model).items() if len(parameter) > num_rows}


def _vocabulary(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of a model's embeddings and head by all of their names, unless they are quantized."""
    try:
        layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):  # it has no vocabulary
        return {}
    held = {id(p) for layer in layers if isinstance(layer, nn.Module) for p in layer._parameters.values()}
    named = model.named_parameters(remove_duplicate=False)
    return {fqn: p for fqn, p in named if id(p) in held and not is_quantized_parameter(p)}
