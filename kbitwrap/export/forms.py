"""The forms of a merged model: all in half, partly quantized, or quantized as its base."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ExportError
from ..model.quantization import (
    SKIPPED_LAYERS,
    Quantization,
    is_linear,
    is_quantized_layer,
    library_dequantizer,
    quantized_stacks,
)
from ..model.tree import join
from .ties import configs_of_all

HALF, MIXED, QUANTIZED = "half", "mixed", "quantized"
FORMS = (HALF, MIXED, QUANTIZED)
# What engines call the one layer that they make of siblings, and the names of these.
_FUSED = {
    "qkv_proj": (
        {"q_proj", "k_proj", "v_proj"},
        {"query", "key", "value"},
        {"q", "k", "v"},
    ),
    "gate_up_proj": ({"gate_proj", "up_proj"}, {"w1", "w3"}),
    "fused_qkv_a_proj": ({"q_a_proj", "kv_a_proj_with_mqa"},),
    "in_proj_qkvz": ({"in_proj_qkv", "in_proj_z"},),
    "in_proj_ba": ({"in_proj_b", "in_proj_a"},),
}
_EXPERTS = ".experts."


@dataclass(frozen=True)
class MergeForm:
    """The form that a merged model is written in.

    Attributes:
        merge_as: ``"half"``: no layer stays quantized. ``"mixed"``: those do, with
            their bytes, that no active adapter touches. ``"quantized"``: all do, and
            adapted ones get other codes under the statistics that they have.
        seed: The seed by which those codes are chosen at random.
    """

    merge_as: str = HALF
    seed: int = 0

    def __post_init__(self) -> None:
        if self.merge_as not in FORMS:
            raise ConfigError(
                f"merge_as: expected one of {', '.join(map(repr, FORMS))}, found "
                f"{self.merge_as!r}"
            )
        if type(self.seed) is not int or self.seed < 0:
            raise ConfigError(
                f"seed: expected an integer that is not negative, found {self.seed!r}"
            )

    def refuse_others(self, quantization: Quantization) -> None:
        """Raise `ExportError` where the layers of a model cannot stay quantized."""
        is_bitsandbytes = quantization.is_quantized and quantization.casts
        if self.merge_as == HALF or is_bitsandbytes:
            return

        found = "not quantized"
        if quantization.is_quantized:
            found = f"quantized with {quantization.method}"
        raise ExportError(
            f"merge_as: {self.merge_as!r} is for layers of bitsandbytes, and the model "
            f"is {found}; merge it as 'half'"
        )


def fused_layer(fqn: str) -> str:
    """Return the name of the layer that an engine computes this one in, or its own name."""
    before, experts, _ = fqn.partition(_EXPERTS)
    if experts:
        return before + experts.rstrip(".")

    parent, _, name = fqn.rpartition(".")
    for fused, groups in _FUSED.items():
        if any(name in siblings for siblings in groups):
            return join(parent, fused)

    return fqn


def stays_quantized(module: nn.Module) -> bool:
    """Return whether a module of a merged model is quantized, or holds quantized stacks of experts."""
    is_of_library = library_dequantizer(module) is not None
    return is_of_library or is_quantized_layer(module) or bool(quantized_stacks(module))


def skip_plain_layers(model: nn.Module, quantized: Sequence[str]) -> None:
    """Name, in the config of a partly quantized model, the linear layers that are not.

    ``from_pretrained`` would quantize them. They are named as others know them, too: the
    class of the model inside has no prefix; other versions of transformers, and engines,
    name modules as the files do; an engine fuses siblings, which are all plain or cannot
    be loaded.
    """
    plain, own = [], []
    for name, module in model.named_modules():
        if stays_quantized(module):
            continue
        if is_linear(module):
            plain.append(name)
        elif _holds_matrices(module):
            own.append(name)

    for name in plain:
        for fqn in quantized:
            if fqn.endswith(name):
                raise ExportError(
                    f"{fqn} stays quantized, and its name ends as that of {name}, which "
                    "does not: no config tells the two apart; merge as 'half'",
                    fqn=fqn,
                )

    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    others = [name.removeprefix(prefix) for name in plain]
    others += [*own, *_names_in_files(model, [*plain, *own])]
    fused_and_quantized = {fused_layer(fqn) for fqn in quantized}
    others += [
        fused for fused in map(fused_layer, plain) if fused not in fused_and_quantized
    ]
    names = dict.fromkeys(plain)
    for name in others:
        if not any(fqn.endswith(name) for fqn in quantized):
            names[name] = None
    skip_layers(model, [*names])


def skip_layers(model: nn.Module, fqns: Sequence[str]) -> None:
    """Name, in the configs of a model, all layers that are not to be quantized."""
    for config in configs_of_all(model):
        settings = getattr(config, "quantization_config", None)
        if settings is not None:
            fields = settings if isinstance(settings, dict) else vars(settings)
            fields[SKIPPED_LAYERS] = [*fqns]


def _holds_matrices(module: nn.Module) -> bool:
    """Return whether a module of a model's own class may be linear layers in another version.

    Stacks of experts, and routers, are that in transformers 4.
    """
    own = [one for one in module._parameters.values() if one is not None]
    is_leaf = len(own) == len([*module.parameters()])
    is_of_torch = type(module).__module__.startswith("torch.")
    return is_leaf and not is_of_torch and any(one.dim() > 1 for one in own)


def _names_in_files(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names of modules in files, where transformers renames what it loads."""
    conversions = getattr(model, "_weight_conversions", None) or ()
    renamings = [one for one in conversions if not hasattr(one, "operations")]
    if not renamings:
        return []

    from transformers.core_model_loading import revert_weight_conversion

    renaming: Any = types.SimpleNamespace(_weight_conversions=renamings, config=None)
    state_dict = {f"{name}.weight": torch.empty(0) for name in names}
    saved = revert_weight_conversion(renaming, state_dict)
    return [name.removesuffix(".weight") for name in saved]
