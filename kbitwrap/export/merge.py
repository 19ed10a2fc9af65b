"""The merged model.

Quantized weights are dequantized, active adapters merged in float32, and everything is
rounded once.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from ..errors import ConfigError, ExportError
from ..model.quantization import is_quantized_layer, is_quantized_parameter
from ..model.tree import ModelTree, join, shallow_copy
from ..model.wrappers import is_adapter_class
from ..tensors.dtypes import HALF_DTYPES
from .adapters import (
    ActiveLayer,
    Chosen,
    active_adapters,
    adapters_of,
    is_tuner_layer,
    refusal,
    refuse_unmergeable,
    trained_copy,
)
from .forms import (
    HALF,
    MIXED,
    QUANTIZED,
    MergeForm,
    fused_layer,
    num_bytes,
    of_no_gain,
    quantized_modules,
    skip_plain_layers,
    stays_quantized,
)
from .merged import Merged, MergedModule
from .plain import dequantize
from .tally import Tally
from .ties import configs_of_all, settle_ties
from .twin import Twin

# The attributes that a quantized load leaves on a model, and on its configs.
_MODEL_ATTRIBUTES = (
    "hf_quantizer",
    "is_quantized",
    "quantization_method",
    "hqq_quantized",
    "is_loaded_in_4bit",
    "is_loaded_in_8bit",
    "is_4bit_serializable",
    "is_8bit_serializable",
)
_CONFIG_ATTRIBUTES = ("quantization_config", "_pre_quantization_dtype")


def merge_into(
    twin: Twin,
    adapters: Chosen = None,
    *,
    form: MergeForm | None = None,
    in_float32: bool = False,
    is_tallied: bool = False,
) -> Merged:
    """Make a twin, in place, the merged model in a form, which is half by default.

    With ``in_float32`` what is computed is not rounded: it can be compared. With
    ``is_tallied`` what is rounded is compared with what it was rounded from, which takes
    more time.

    Returns:
        The names of the modules that an adapter or a trained copy changed, and how well
        rounding keeps the delta, once all tensors are computed; it always tells that of
        weights that stay quantized.

    Raises:
        ExportError: Adapters cannot be merged exactly, or weights not be dequantized.
    """
    chosen = None if adapters is None else tuple(dict.fromkeys(adapters))
    _refuse_unknown(twin, chosen)
    tree = ModelTree(twin.model)
    if not tree.quantization.can_dequantize:
        raise ExportError(
            f"the model is quantized with {tree.quantization.method}, whose weights "
            "cannot be dequantized here, and so not merged; export without merging"
        )

    form = form or MergeForm()
    form.refuse_others(tree.quantization)
    size = num_bytes(twin.model) if form.merge_as == MIXED else 0
    places = [tree.places(tensor) for tensor in tree.tensors]
    dtype = torch.float32 if in_float32 else _half_dtype(twin.model)
    plain = _to_make_plain(twin, form, chosen)
    rounded = dequantize(twin, dtype, plain)
    merges = _plan(twin, dtype, plain, rounded, chosen)
    tallies: dict[str, Tally] = {}
    for merge in merges:
        merge.in_float32 = in_float32
        # Where a trained copy takes the place of a layer there are no codes to choose.
        is_random = form.merge_as == QUANTIZED and merge.copy is None
        if is_random and is_quantized_layer(merge.original):
            merge.seed = form.seed
        if is_tallied or merge.seed is not None:
            merge.tallies = tallies

    # Refusals come before anything is written: one layer of each kind is tried out.
    for merge in {merge.kind: merge for merge in reversed(merges)}.values():
        merge.try_out()

    for merge in merges:
        merge.replace_tensors()

    shared = [group for group in places if len(group) > 1]
    settle_ties(twin.model, shared, merges)
    left = quantized_modules(twin.model)
    note = ""
    if not left:
        _remove_traces(twin.model)
        if form.merge_as == MIXED:
            note = of_no_gain(size, num_bytes(twin.model))
    else:
        skip_plain_layers(twin.model, left)

    fqns = [merge.fqn for merge in merges if merge.is_adapted]
    return Merged(tuple(fqns), tallies, note)


def _to_make_plain(twin: Twin, form: MergeForm, chosen: Chosen) -> set[nn.Module]:
    """The modules of a twin whose quantized weights are dequantized."""
    modules = dict(twin.model.named_modules())
    if form.merge_as == HALF:
        return set(modules.values())

    if form.merge_as == QUANTIZED:
        return set()

    touched: dict[str, nn.Module] = {}
    for peeled in twin.peeled:
        if any(_is_active(wrapper, chosen) for wrapper in peeled.wrappers):
            touched[peeled.fqn] = peeled.shell

    # what engines compute as one layer has one format
    fused = {fused_layer(fqn) for fqn in touched}
    for fqn, module in modules.items():
        if stays_quantized(module) and fused_layer(fqn) in fused:
            touched[fqn] = module

    return set(touched.values())


def _is_active(wrapper: nn.Module, chosen: Chosen) -> bool:
    """Whether a module of PEFT's changes the one that it is around."""
    return bool(is_tuner_layer(wrapper) and active_adapters(wrapper, chosen))


def _remove_traces(model: nn.Module) -> None:
    """Remove what a quantized load leaves on a model and its configs."""
    for _, module in model.named_modules():
        for name in _MODEL_ATTRIBUTES:
            vars(module).pop(name, None)

    for config in configs_of_all(model):
        for name in _CONFIG_ATTRIBUTES:
            vars(config).pop(name, None)


def _refuse_unknown(twin: Twin, chosen: Chosen) -> None:
    """Raise `ConfigError` for the name of an adapter that no module has."""
    there: set[str] = set()
    for peeled in twin.peeled:
        for wrapper in peeled.wrappers:
            there.update(adapters_of(wrapper))

    for name in chosen or ():
        if name not in there:
            raise ConfigError(
                f"adapters: expected names out of {sorted(there)}, found {name!r}"
            )


def _plan(
    twin: Twin,
    dtype: torch.dtype,
    plain: set[nn.Module],
    rounded: set[int],
    chosen: Chosen,
) -> list[MergedModule]:
    """The modules whose tensors have to be computed.

    They are adapted ones, trained copies and quantized layers that become plain.
    """
    merges: dict[int, MergedModule] = {}

    def merge_of(fqn: str, shell: nn.Module) -> MergedModule:
        made = MergedModule(
            fqn, shell, shallow_copy(shell), dtype, id(shell) in rounded
        )
        return merges.setdefault(id(shell), made)

    for peeled in twin.peeled:
        fqn = peeled.fqn
        for wrapper in reversed(peeled.wrappers):
            if is_tuner_layer(wrapper):
                one = ActiveLayer(fqn, wrapper, active_adapters(wrapper, chosen))
                if not one.adapters:
                    continue
                layers = merge_of(fqn, peeled.shell).layers
                # A shared module is peeled once for each of its places.
                if all(other.layer is not wrapper for other in layers):
                    layers.append(one)
                continue

            trained = trained_copy(fqn, wrapper, chosen)
            if trained is None:
                refuse_unmergeable(fqn, wrapper, chosen)
                continue

            for name, module in trained.named_modules():
                if is_adapter_class(type(module)):
                    why = "it is inside a module of modules_to_save"
                    raise refusal(fqn, module, why)
                place = join(fqn, name) if name else fqn
                merge_of(place, peeled.shell.get_submodule(name)).copy = module

    for fqn, module in twin.model.named_modules():
        is_made_plain = module in plain and is_quantized_layer(module)
        if is_made_plain or id(module) in rounded:
            merge_of(fqn, module)

    _refuse_partly_adapted(twin, merges)
    return list(merges.values())


def _refuse_partly_adapted(twin: Twin, merges: dict[int, MergedModule]) -> None:
    """Raise where a module has several places, and an adapter only some of them.

    Merged, it would be in all.
    """
    adapted = {peeled.fqn for peeled in twin.peeled}
    wrappers = {id(peeled.shell): peeled.wrappers for peeled in twin.peeled}
    for place, module in twin.model.named_modules(remove_duplicate=False):
        if id(module) not in wrappers or place in adapted:
            continue
        merge = merges.get(id(module))
        if merge is not None and merge.is_adapted:
            why = f"the module is {place} too, and is not adapted there"
            raise refusal(merge.fqn, wrappers[id(module)][0], why)


def _half_dtype(model: nn.Module) -> torch.dtype:
    """The half dtype of most parameters outside quantized layers.

    It is float32 where there are none. Parameters vote, and not the config, whose dtype
    ``save_pretrained`` sets to float32 while a model is prepared.
    """
    votes = Counter(
        tensor.parameter.dtype
        for tensor in ModelTree(model).all_tensors
        if not is_quantized_parameter(tensor.parameter)
    )
    halves = [dtype for dtype in votes if dtype in HALF_DTYPES]
    return max(halves, key=votes.__getitem__, default=torch.float32)
