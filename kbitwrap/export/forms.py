"""The forms of a merged model: all in half, partly quantized, or quantized as its base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..config import format_bytes
from ..errors import ConfigError, ExportError
from ..model.quantization import (
    Quantization,
    is_computed_by_library,
    is_linear,
    is_quantized_layer,
    skip_layers,
)
from .ties import configs_of_all

HALF, MIXED, QUANTIZED = "half", "mixed", "quantized"
FORMS = (HALF, MIXED, QUANTIZED)
# The names of sibling layers that engines compute as one.
_FUSED = (
    {"q_proj", "k_proj", "v_proj"},
    {"query", "key", "value"},
    {"q", "k", "v"},
    {"gate_proj", "up_proj"},
    {"w1", "w3"},
)
_EXPERTS = ".experts."


@dataclass(frozen=True)
class MergeForm:
    """The form that a merged model is written in.

    Attributes:
        merge_as: ``"half"``: no layer stays quantized. ``"mixed"``: those do, with
            their bytes, that no active adapter touches. ``"quantized"``: all do, and
            adapted ones get other codes under the statistics that they have.
        seed: The seed by which those codes are chosen at random.
        fuse: Whether layers that engines compute as one have one format in
            ``"mixed"``.
    """

    merge_as: str = HALF
    seed: int = 0
    fuse: bool = False

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

    def of(self, quantization: Quantization) -> MergeForm:
        """The form of a model that is quantized so.

        Raise `ExportError` where its layers cannot stay quantized.
        """
        if not quantization.is_quantized:
            return MergeForm()

        if self.merge_as != HALF and not quantization.casts:  # not by bitsandbytes
            raise ExportError(
                f"merge_as: {self.merge_as!r} is for layers of bitsandbytes, and the "
                f"model is quantized with {quantization.method}; merge it as 'half'"
            )
        return self


def fused_group(fqn: str) -> object:
    """The key of the layers that an engine computes as one with this one."""
    if _EXPERTS in fqn:
        return fqn.partition(_EXPERTS)[0]

    parent, _, name = fqn.rpartition(".")
    for number, names in enumerate(_FUSED):
        if name in names:
            return parent, number
    return fqn


def stays_quantized(module: nn.Module) -> bool:
    """Whether a module of a merged model is quantized."""
    return is_quantized_layer(module) or is_computed_by_library(module)


def quantized_modules(model: nn.Module) -> list[str]:
    """The names of the modules of a model that are quantized."""
    return [fqn for fqn, module in model.named_modules() if stays_quantized(module)]


def skip_plain_layers(model: nn.Module, quantized: Sequence[str]) -> None:
    """Name, in the config of a partly quantized model, the linear layers that are not.

    ``from_pretrained`` would quantize them.
    """
    plain = []
    for name, module in model.named_modules():
        if is_linear(module) and not stays_quantized(module):
            plain.append(name)

    for fqn in quantized:
        for name in plain:
            if fqn.endswith(name):  # as from_pretrained compares them
                raise ExportError(
                    f"{fqn} stays quantized, and its name ends as that of {name}, which "
                    "does not: no config tells the two apart; merge as 'half'",
                    fqn=fqn,
                )

    for config in configs_of_all(model):
        settings = getattr(config, "quantization_config", None)
        if settings is not None:
            skip_layers(settings, plain)


def num_bytes(model: nn.Module) -> int:
    """The bytes of all tensors of a model, with the statistics of quantized ones."""
    sizes = {}
    for tensor in model.state_dict().values():
        sizes[tensor.data_ptr(), tensor.shape] = tensor.nbytes
    return sum(sizes.values())


def of_no_gain(before: int, after: int) -> str:
    """The warning of a mixed merge in which no layer stays quantized."""
    return (
        "an adapter touches every quantized layer, so that none stays as it is: the "
        f"model takes {format_bytes(after)}, as merged in half, and its base "
        f"{format_bytes(before)}; merge_as='quantized' keeps that size"
    )
