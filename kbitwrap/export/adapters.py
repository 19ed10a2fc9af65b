"""PEFT's layers and wrappers.

They tell which adapters are active, and which cannot be merged.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ExportError
from ..model.quantization import PEFT_MODULES, is_quantized_layer
from ..tensors.bits import content_digest
from ..tensors.lazy import materialize

Chosen = Sequence[str] | None
"""The names of the adapters to merge; ``None`` for those that the model uses."""
# Layers for a quantized base are called as those for a plain one, with a prefix or a
# suffix.
_KIND = re.compile(
    rf"peft\.tuners\.(\w+)\.(?:layer|{'|'.join(PEFT_MODULES)})\.(?:\w+Lora(?=Linear))?(\w+?)(?:4bit|8bitLt)?"
)

# where LoRA has the factor of a weight's rows, and that of its columns
_FACTORS = {
    "lora.Linear": ("lora_B", "lora_A"),
    "lora.Embedding": ("lora_embedding_A", "lora_embedding_B"),
}


@dataclass(frozen=True)
class ActiveLayer:
    """One of PEFT's layers around a module of the base, and its active adapters."""

    fqn: str  # the module's
    layer: Any
    adapters: tuple[str, ...]

    @property
    def parameter(self) -> str | None:
        """The parameter that it adapts; ``None`` where it adapts the module."""
        return getattr(self.layer, "parameter_name", None)

    @property
    def kind(self) -> str:
        """The method and the class for a plain base, as ``"lora.Linear"``.

        It is ``""`` for a class that is not PEFT's.
        """
        cls = type(self.layer)
        found = _KIND.fullmatch(f"{cls.__module__}.{cls.__name__}")
        return ".".join(found.groups()) if found else ""

    @property
    def is_for_quantized(self) -> bool:
        """Whether its class is the one that PEFT has for bases of a library that quantizes."""
        return type(self.layer).__module__.rpartition(".")[2] in PEFT_MODULES

    @property
    def reads_storage(self) -> bool:
        """Whether PEFT takes what a quantized base stores for its weight.

        Some methods compute the values by a layer of their own for each library, others
        by a backend, which not every version of PEFT has.
        """
        has_backend = getattr(self.layer, "quantization_backend", None) is not None
        is_quantized = is_quantized_layer(self.layer.get_base_layer())
        return is_quantized and not self.is_for_quantized and not has_backend

    @property
    def variants(self) -> frozenset[str]:
        """The classes of the variants of LoRA that its adapters are."""
        variants = vars(self.layer).get("lora_variant", {})
        found = [variants[name] for name in self.adapters if name in variants]
        return frozenset(type(variant).__name__ for variant in found)

    @property
    def delta(self) -> Hashable:
        """The digests of the factors by which plain LoRA changes a weight, the rows' first, and their scale.

        It is ``None`` for another method.
        """
        if self.kind not in _FACTORS or self.parameter is not None or self.variants:
            return None

        deltas = []
        for adapter in self.adapters:
            of_rows, of_columns = (
                getattr(self.layer, name)[adapter] for name in _FACTORS[self.kind]
            )
            if isinstance(of_rows, nn.Linear):
                if of_rows.bias is not None:
                    return None
                of_rows, of_columns = of_rows.weight, of_columns.weight.t()
            else:
                of_rows = of_rows.t()

            digests = [content_digest(materialize(of_rows))]
            digests.append(content_digest(materialize(of_columns)))
            deltas.append((self.layer.scaling[adapter], *digests))

        return tuple(deltas)

    def refusal(self, why: object) -> ExportError:
        """Return the error for adapters that cannot be merged."""
        return refusal(self.fqn, self.layer, why, self.adapters)


def refusal(
    fqn: str, layer: nn.Module, why: object, active: Sequence[str] = ()
) -> ExportError:
    """Return the error for adapters that cannot be merged.

    The ``fqn`` ``""`` is the model itself.
    """
    cls = type(layer)
    method = re.sub(r"^peft\.(?:tuners\.)?", "", cls.__module__).partition(".")[0]
    adapters = f" with the adapters {list(active)}" if active else ""
    return ExportError(
        f"{fqn or 'the model'}: {cls.__name__} ({method}){adapters} cannot be merged "
        f"exactly: {why}; export without merging, or disable these adapters",
        fqn=fqn,
    )


def refuse_infinite(fqn: str, rounded: Tensor) -> None:
    """Raise where a rounded value is not finite.

    An adapter may hold values that are not, or the sum may be too large for half.
    """
    if torch.isfinite(rounded).all():
        return

    raise ExportError(
        f"{fqn}: merged with its adapters, it has values that are not finite, or beyond "
        f"the range of {rounded.dtype}; export without merging, or disable these adapters",
        fqn=fqn.rpartition(".")[0],
    )


def is_tuner_layer(wrapper: nn.Module) -> bool:
    """Return whether one of PEFT's modules is a layer that adapts a module of the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(wrapper, BaseTunerLayer)


def adapters_of(wrapper: Any) -> list[str]:
    """Return the names of the adapters that one of PEFT's layers or wrappers holds.

    A wrapper is one of ``modules_to_save``.
    """
    if is_tuner_layer(wrapper):
        return list(wrapper._all_available_adapter_names())
    return [*wrapper._modules.get("modules_to_save", ())]


def active_adapters(wrapper: Any, chosen: Chosen = None) -> tuple[str, ...]:
    """Return the adapters of a layer or wrapper that are chosen, in their order.

    By default they are those that its forward uses.
    """
    if chosen is None:
        chosen = () if wrapper.disable_adapters else wrapper.active_adapters
    there = adapters_of(wrapper)
    return tuple(name for name in chosen if name in there)


def trained_copy(fqn: str, wrapper: Any, chosen: Chosen) -> nn.Module | None:
    """Return the copy that a ``modules_to_save`` wrapper runs instead of the original.

    It is ``None`` where the original runs.
    """
    copies = wrapper._modules.get("modules_to_save")
    active = () if copies is None else active_adapters(wrapper, chosen)
    if not active:
        return None

    if len(active) > 1:
        why = "each has a trained copy of the module, which only one can replace"
        raise refusal(fqn, wrapper, why, active)

    return copies[active[0]]  # type: ignore[no-any-return]


def refuse_unmergeable(fqn: str, wrapper: Any, chosen: Chosen) -> None:
    """Raise `ExportError` for a module of PEFT's that does more than hold layers."""
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(wrapper, (PeftModel, PeftMixedModel)):
        names = wrapper.active_adapters if chosen is None else chosen
        for name in names:
            config = wrapper.peft_config.get(name)
            if config is not None and config.is_prompt_learning:
                method: Any = config.peft_type
                why = f"{method.value} adds to the input"
                raise refusal(fqn, wrapper, why, names)
        return

    if type(wrapper).__name__ == "XLoraModel":
        why = "the weights of its adapters depend on the input"
        raise refusal(fqn, wrapper, why)

    if not isinstance(wrapper, (BaseTuner, AuxiliaryTrainingWrapper)):
        raise refusal(fqn, wrapper, "it has no method that merges")
