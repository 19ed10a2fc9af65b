"""The base of a run, loaded from its files as the run had it, and checked.

It is of the run's class, with its head and its vocabulary. Rows that the files do not hold
are NaN until an adapter brings them: whoever computes with them is refused.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import StrPath
from ..errors import ConfigError
from ..manifest.manifest import NOT_PREPARED, Manifest
from ..manifest.pending import begin_check
from ..model.bitsandbytes_layers import is_pending
from ..model.pretrained import (
    classes_of,
    load_pretrained,
    meta_model,
    read_config,
    unexpected_names,
)
from ..model.quantization import (
    SKIPPED_LAYERS,
    is_of_another_library,
    is_quantized_parameter,
)
from ..model.tree import join
from ..model.wrappers import canonical_fqn
from ..reports import first_of
from ..tensors.dtypes import find_dtype
from .adapters import (
    BASE_MODEL,
    SavedAdapter,
    rewrites_base,
    vocabulary_layers,
    with_adapter,
)
from .base_quantization import OF_BASE, QUANTIZATION, UNKNOWN, BaseQuantization
from .reader import StoredTensor, recorded_shapes
from .sides import files_of_base, original_tensors

# The classes of tasks whose head is not the base's own.
_TASKS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_IN_CACHE = "models--"  # begins the name of a repository's folder in the hub's cache
_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TrainedBase:
    """A base as a run had it, without the adapter.

    Attributes:
        source: Its folder or name.
        model: The model.
        unknown: By the name of a parameter, the row from which on the files do not hold
            it, and it is NaN.
        check: The call that finishes its comparison with the manifest; ``None`` without one.
        unexpected: The tensors in its files that the class does not build, such as a
            block for the prediction of several tokens, by name.
    """

    source: str
    model: Any
    unknown: Mapping[str, int]
    check: Callable[[], None] | None
    unexpected: Mapping[str, StoredTensor]

    def finish_check(self) -> None:
        """Compare what was pending with the manifest, after it was read.

        Raise `ManifestMismatchError` where it differs.
        """
        if self.check is not None:
            self.check()


def load_base(
    source: StrPath,
    saved: SavedAdapter | None,
    manifest: Manifest | None,
    quantization: BaseQuantization,
    dtype: Any = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    *,
    may_be_pending: bool = False,
) -> TrainedBase:
    """Load a base as the run had it, by the manifest or else by the adapter, and compare it with the manifest.

    On a CPU, its layers of bitsandbytes may be left pending: quantized whenever their
    weights are read. Who lets them be, reads them, and calls ``finish_check`` then.
    """
    config = read_config(source, trust_remote_code)
    if quantization.source == UNKNOWN:
        raise ConfigError(
            f"it is not known how the base {os.fspath(source)!r} was quantized in training: its config says nothing; "
            "give the manifest of the run, or the quantization (quantization_config; False for none)"
        )

    settings = None  # loading reads the base's own
    if quantization.config and quantization.source != OF_BASE:
        settings = {**quantization.config}

    # of the base's tensors that the adapter holds whole, and of the adapter's own
    shapes = {}
    if saved is not None:
        for name, stored in saved.tensors.items():
            shapes[canonical_fqn(name)] = stored.shape

    if manifest is not None:
        shapes.update(recorded_shapes(manifest))
        dtype = dtype or manifest.model.dtype
    elif saved is not None:
        config_of_model = saved.config_of_model
        recorded = config_of_model.get("dtype", config_of_model.get("torch_dtype"))
        dtype = dtype or find_dtype(recorded)

    class_name = _class_name(config, saved, manifest)
    own_classes = config.architectures
    if class_name is not None:
        config.architectures = [class_name]

    num_labels = None
    # Where no meta model can be built, loading says why; or it runs the base's own code, and builds one.
    with contextlib.suppress(ConfigError):
        meta = meta_model(config, settings)
        num_labels = _num_labels(meta, shapes)
        if saved is not None and manifest is None:
            settings = _skipping(settings, meta, saved)

    is_pending = may_be_pending and torch.device(device).type == "cpu"
    if settings is None or is_of_another_library(settings):
        is_pending = False
    if is_pending:
        # Weights of another dtype would be converted before, and all be in memory.
        num_bytes: Counter[torch.dtype] = Counter()
        for tensor in original_tensors(source).values():
            num_bytes[tensor.dtype] += tensor.nbytes
        wanted = find_dtype(dtype) or dtype or config.dtype
        is_pending = max(num_bytes, key=num_bytes.__getitem__, default=None) == wanted

    options = class_name, trust_remote_code, num_labels
    model, missing = load_pretrained(
        source, settings, dtype, device, *options, is_pending=is_pending
    )

    unknown = dict.fromkeys(missing, 0)
    unknown.update(_resize(model, shapes))
    for fqn, start in unknown.items():
        tensor = operator.attrgetter(fqn)(model)
        if tensor.is_floating_point():  # so that nothing computes with them unseen
            tensor.data[start:] = torch.nan

    check = None
    # A manifest that does not know the quantization records the base unquantized.
    if manifest is not None and (
        settings is None or QUANTIZATION not in manifest.unknown
    ):
        others = [] if saved is None else _rewritten(manifest, saved)
        check = begin_check(manifest, model, [*unknown, *others])

    unexpected = _unexpected_tensors(source, model, own_classes)
    return TrainedBase(os.fspath(source), model, unknown, check, unexpected)


def _rewritten(manifest: Manifest, saved: SavedAdapter) -> Iterator[str]:
    """Yield the tensors that may have been recorded with other values than the base's.

    They are those that were trained and are saved with the adapter, as biases, and were
    recorded when a run was resumed; and those that a callback recorded after PEFT's
    initializer, as PiSSA, had left a residual in them.
    """
    for fqn in saved.held & manifest.rows.keys():
        if manifest.tensors[fqn].prepared_requires_grad:
            yield fqn

    was_before = NOT_PREPARED not in manifest.unknown or not manifest.adapters
    if was_before or not rewrites_base(saved.config):
        return

    layers = {name.rpartition(".lora_")[0] for name in saved.held} - {""}
    starts = tuple(join(layer, "weight") for layer in layers)
    for fqn in manifest.rows:
        if fqn.startswith(starts):
            yield fqn


def _unexpected_tensors(
    source: StrPath, model: Any, own_classes: Any
) -> dict[str, StoredTensor]:
    """Find the tensors in the files of a base that a model of it has no place for, by name.

    Of a model that is a part of the base, those of other parts are not among them. A
    model for another task has a head in the place of what else the base has.
    """
    checkpoint = files_of_base(source)
    is_own = not own_classes or type(model).__name__ in own_classes
    if checkpoint is None or not (is_own or model.can_generate()):
        return {}

    tensors = checkpoint.tensors
    is_quantized = checkpoint.is_quantized
    names = unexpected_names(model, tensors, is_quantized=is_quantized)
    whole = checkpoint.meta_model() if names else None
    if whole is not None and type(whole.config) is not type(model.config):
        names = unexpected_names(whole, names, is_quantized=is_quantized)
    return {name: tensors[name] for name in names}


def named_base(saved: SavedAdapter) -> str:
    """Return the base that an adapter's config names.

    Raise `ConfigError` where it names none.
    """
    name = saved.config.get(BASE_MODEL)
    if not name:
        raise ConfigError(
            f"the config of {saved.name} does not name its base (base_model_name_or_path): give the base that was "
            "trained on"
        )

    return str(name)


def other_named_base(saved: SavedAdapter, source: StrPath) -> str | None:
    """Return the base that an adapter's config names, where that is another than the given one.

    A copy in a folder of the same name is taken for the same.
    """
    named = saved.config.get(BASE_MODEL)
    if not named or os.path.realpath(named) == os.path.realpath(source):
        return None

    is_same = name_of_base(named) == name_of_base(os.fspath(source))
    return None if is_same else named


def name_of_base(source: str) -> str:
    """Return the last part of the name of a base, or of the path of its folder.

    A folder in the hub's cache has the name of its repository.
    """
    for part in Path(source).parts:
        if part.startswith(_IN_CACHE):
            return part.rpartition("--")[2]

    return os.path.basename(os.path.abspath(source))


def load_adapted(
    source: StrPath,
    saved: SavedAdapter | None,
    *arguments: Any,
    may_be_pending: bool = True,
) -> tuple[TrainedBase, nn.Module]:
    """Load a base, and put the adapter on it, if there is one; the arguments are those of `load_base`.

    The base is loaded again, quantized, where PEFT computes with its weights, or
    changes them, when it makes the adapter.
    """
    trained = load_base(source, saved, *arguments, may_be_pending=may_be_pending)
    if saved is None:
        return trained, trained.model

    weights = _pending_weights(trained.model)
    if not weights:
        return trained, adapted_base(trained, saved)

    with contextlib.suppress(ConfigError):
        adapted = adapted_base(trained, saved)
        if _pending_weights(trained.model) == weights:
            return trained, adapted

    trained = load_base(source, saved, *arguments)
    return trained, adapted_base(trained, saved)


def _pending_weights(model: nn.Module) -> set[tuple[int, int, int]]:
    """Return identity, address and version of each weight that is not yet quantized."""
    found = set()
    for module in model.modules():
        if is_pending(module):
            weight = module.get_parameter("weight")
            found.add((id(weight), weight.data_ptr(), weight._version))

    return found


def adapted_base(base: TrainedBase, saved: SavedAdapter) -> nn.Module:
    """Put the adapter on the base.

    Raise `ConfigError` where it does not hold what the base's files lack.
    """
    missing = {fqn for fqn, start in base.unknown.items() if start == 0}
    absent = sorted(missing - saved.held)
    if absent:
        raise ConfigError(
            f"the base {base.source!r} lacks weights that {saved.name} does not hold: {first_of(absent)}"
        )

    tensors = {fqn: operator.attrgetter(fqn)(base.model) for fqn in base.unknown}
    adapted = with_adapter(base.model, saved)
    for fqn, tensor in tensors.items():
        start, num_rows = base.unknown[fqn], len(tensor)
        rows = tensor.data[start:]
        if not rows.isnan().any():  # the adapter brought them
            continue

        # Nothing computes with them where PEFT put a copy in their place, or the adapter's own rows.
        for name, parameter in adapted.named_parameters(remove_duplicate=False):
            parts = name.split(".")
            if parameter is not tensor or "original_module" in parts:
                continue
            replaced: set[int] = set()
            if parts[-2:-1] == ["base_layer"]:
                wrapper = adapted.get_submodule(".".join(parts[:-2]))
                replaced.update(*vars(wrapper).get("token_indices", {}).values())
            if not replaced.issuperset(range(start, num_rows)):
                raise ConfigError(
                    f"{canonical_fqn(name)} had {num_rows} rows in training, where the base {base.source!r} has "
                    f"{start}, and {saved.name} does not hold the new ones: give the base that training began with, as "
                    f"save_pretrained writes it after model.resize_token_embeddings({num_rows})"
                )
        rows.zero_()

    return adapted


def _class_name(
    config: Any, saved: SavedAdapter | None, manifest: Manifest | None
) -> str | None:
    """Return the class that was trained, where it is another than the base's config names.

    The manifest says it, or else the adapter's task, or else the names in the adapter's
    file: they may be of the text part of a composite model, or of a model without its head.
    """
    import transformers

    if manifest is not None:
        recorded = manifest.model.class_name
        return recorded if hasattr(transformers, recorded) else None

    if saved is None:
        return None

    auto_class = _TASKS.get(str(saved.config.get("task_type")))
    if auto_class is not None:
        names = [cls.__name__ for cls in classes_of(auto_class, config)]
        own = [name for name in names if name in (config.architectures or ())]
        return next(iter(own + names), None)

    modules = {(fqn.rpartition(".")[0], fqn.rsplit(".", 2)[0]) for fqn in saved.held}

    tried = copy.deepcopy(config)
    candidates = [None]
    for auto_class in ("AutoModelForCausalLM", "AutoModel"):
        candidates += [cls.__name__ for cls in classes_of(auto_class, config)]

    for name in candidates:
        if name is not None:
            tried.architectures = [name]
        with contextlib.suppress(ConfigError):  # loading says why
            found = {fqn for fqn, _ in meta_model(tried).named_modules()}
            if all(found.intersection(either) for either in modules):
                return name

    return None


def _num_labels(meta: Any, shapes: _Shapes) -> int | None:
    """Return how many labels the run had, where a head had another number of rows than its config has labels."""
    num_labels = getattr(meta.config, "num_labels", None)
    for fqn, parameter in meta.named_parameters():
        found = getattr(parameter, "unpacked", parameter).shape
        wanted = shapes.get(fqn)
        if not wanted or wanted[1:] != found[1:]:
            continue
        if found[:1] == (num_labels,) and wanted[0] != num_labels:
            return wanted[0]

    return None


def _skipping(
    quantization_config: dict[str, Any] | None, meta: Any, saved: SavedAdapter
) -> dict[str, Any] | None:
    """Return the quantization config, with those layers left as they are that an adapter trained whole."""
    trained = []
    vocabulary = vocabulary_layers(meta)
    parameters = dict(meta.named_parameters())
    for name, stored in saved.tensors.items():
        fqn = canonical_fqn(name)
        parameter = parameters.get(fqn)
        # codes beside factors are of a layer that was quantized
        if parameter is None or not stored.dtype.is_floating_point:
            continue
        # PEFT saves what is below factors of the vocabulary alone
        layer = meta.get_submodule(fqn.rpartition(".")[0])
        is_below = name.endswith(".base_layer.weight") and layer not in vocabulary
        if is_below or not is_quantized_parameter(parameter):
            continue
        if stored.shape[1:] == parameter.unpacked.shape[1:]:
            trained.append(fqn.removesuffix(".weight"))

    if not trained:
        return quantization_config

    skipped = meta.hf_quantizer.modules_to_not_convert or []
    return {**(quantization_config or {}), SKIPPED_LAYERS: [*skipped, *trained]}


def _resize(model: Any, shapes: _Shapes) -> dict[str, int]:
    """Resize the vocabulary as the run did.

    Return the parameters that got rows, and the first of these.
    """
    sizes = set()
    wanted = set()
    for fqn, parameter in _vocabulary(model).items():
        sizes.add(len(parameter))
        shape = shapes.get(fqn, parameter.shape)
        if shape[1:] == parameter.shape[1:]:
            wanted.add(shape[0])

    changed = wanted - sizes
    if len(changed) != 1:
        return {}

    size = changed.pop()
    num_rows = min(sizes)
    model.resize_token_embeddings(size, mean_resizing=False)
    return dict.fromkeys(_vocabulary(model), num_rows) if size > num_rows else {}


def _vocabulary(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's embeddings and head by all of their names, unless they are quantized."""
    held: set[nn.Parameter] = set()
    for layer in vocabulary_layers(model):
        held.update(layer.parameters(recurse=False))

    found = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in held and not is_quantized_parameter(parameter):
            found[fqn] = parameter

    return found
