"""What a plan warns of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..config import Precision, format_bytes
from ..model.quantization import (
    STACKS_QUANTIZED_BY,
    is_quantized_parameter,
    rounds_activations,
)
from ..model.roles import Role, loses_gradients, returns_float32
from ..model.tree import Node
from ..reports import first_of
from ..tensors.bits import is_composed
from ..tensors.dtypes import HALF_DTYPES
from .casts import Casts
from .process import mixed_precision


class Advice:
    """Gathers the warnings of a plan; the ``alarms`` are those that nobody may miss."""

    def __init__(self, casts: Casts) -> None:
        self.warnings: list[str] = []
        self.alarms: list[str] = []
        self._casts = casts
        self._tree = casts.tree
        self._config = casts.config
        self._quantization = casts.quantization

    def warn(self, warning: str, *, is_alarm: bool = False) -> None:
        """Add a warning."""
        self.warnings.append(warning)
        if is_alarm:
            self.alarms.append(warning)

    def of_lost_gradients(self) -> None:
        """Say which layers let no gradient through to their input: nothing else would."""
        answers: dict[Any, bool] = {}  # by the kind of weight: each is tried once
        found = [
            node.fqn for node in self._tree.base if rounds_activations(node.module)
        ]
        for node in self._tree.of_class(lambda cls: cls is nn.Linear):
            weight = node.module._parameters.get("weight")
            if (
                not node.is_base
                or weight is None
                or not is_composed(type(weight))
                or weight.is_meta
            ):
                continue
            kind = type(weight), repr(weight.__tensor_flatten__()[1])  # type: ignore[attr-defined]
            if kind not in answers:
                answers[kind] = loses_gradients(weight)
            if answers[kind]:
                found.append(node.fqn)
        if found:
            self.warn(
                f"{len(found)} layers, {found[0]} the first, let no gradient through to their input, so adapters in "
                "front of them are trained by what goes around them, or not at all: activations that are quantized as "
                "they are used have no backward; quantize weights only",
                is_alarm=True,
            )

    def of_unquantized_stacks(self) -> None:
        """Name the stacks of experts in a model that bitsandbytes quantizes, which loading leaves as they are."""
        if not (self._quantization.is_quantized and self._quantization.casts):
            return
        roles = self._casts.roles
        experts = [
            t
            for t in self._tree.tensors
            if roles[id(t.parameter)] is Role.EXPERT and t.parameter.dim() > 2
        ]
        if experts:
            num_bytes = format_bytes(sum(tensor.parameter.nbytes for tensor in experts))
            self.warn(
                f"{len(experts)} stacks of experts are not quantized, {experts[0].fqn} the first: {num_bytes}; "
                f"{STACKS_QUANTIZED_BY} quantizes them"
            )

    def of_precision(self) -> None:
        """Say what the precision costs beside its bytes, or that it changes nothing."""
        precision = self._config.precision
        if not self._quantization.casts:
            if precision is not Precision.NONE:
                self.warn(
                    f"{self._quantization.method} manages its own precision: precision {precision.value!r} changes "
                    "nothing"
                )
            return
        if not precision.upcasts_all:
            return
        roles = self._casts.roles
        if any(
            roles[id(t.parameter)] in (Role.INPUT_EMBEDDINGS, Role.NORM)
            for t in self._casts.castable
        ):
            self.warn(
                "float32 embeddings and norms make the residual stream float32 in most models: activations take "
                "twice the bytes, and FlashAttention refuses float32 queries, keys and values"
            )
        self._of_mixed_precision()
        stored = [ref() for store in self._casts.stores for ref in store.refs]
        experts = [
            parameter
            for parameter in stored
            if parameter is not None and roles[id(parameter)] is Role.EXPERT
        ]
        if experts:
            num_bytes = format_bytes(sum(parameter.nbytes for parameter in experts))
            self.warn(f"unquantized experts are doubled: {num_bytes} more")

    def _of_mixed_precision(self) -> None:
        """Say where a policy computes in half what is cast: the bytes are spent, and the numbers are not PEFT's."""
        policy = mixed_precision(self._casts.base)
        if policy is None or not self._casts.castable:
            return
        if policy.casts_parameters:
            self.warn(
                f"the mixed-precision policy of FSDP casts every parameter to {policy.dtype} before it is used, which "
                "nullifies the upcast: precision 'norms' or 'none' computes the same from half the bytes"
            )
        elif any(
            isinstance(tensor.module, nn.Linear) for tensor in self._casts.castable
        ):
            self.warn(
                f"under {policy.dtype} autocast linear layers, the head among them, are computed in {policy.dtype} "
                "whatever they store: their upcast is nullified, as it is in PEFT"
            )

    def of_adapters(self, *, is_suspended: bool = False) -> list[str]:
        """Name the adapters whose float32 output breaks the half model, prepared or not; at most one warning."""
        can_be_float32 = self._quantization.casts
        is_float32 = self._config.precision.upcasts_all and can_be_float32
        if is_float32 and not is_suspended:
            return []
        dtype = self._half_dtype()
        if dtype is None or mixed_precision(self._casts.base) is not None:
            return []
        kinds: dict[Any, list[Node]] = {}  # of a kind, one is tried
        for node in self._tree.adapters:
            if "base_layer" in node.module._modules:
                active = str(getattr(node.module, "active_adapters", ""))
                kinds.setdefault((type(node.module), active), []).append(node)
        found = [
            nodes for nodes in kinds.values() if returns_float32(nodes[0].module, dtype)
        ]
        names = [node.fqn for nodes in found for node in nodes]
        if not names:
            return []
        others = (
            " or prepare with precision 'full' or 'compute'"
            if can_be_float32 and not is_float32
            else ""
        )
        return [
            f"the adapters on {first_of(names, 1)} return float32 where the model computes in {dtype}: attention, or "
            "the head, will raise that dtypes differ, as in the unprepared model; run it under autocast "
            f"(torch.autocast, Trainer(bf16=True)){others}"
        ]

    def _half_dtype(self) -> torch.dtype | None:
        """The dtype of the first half parameter that is not quantized, which the model computes in."""
        for tensor in self._casts.base:
            if tensor.parameter.dtype in HALF_DTYPES and not is_quantized_parameter(
                tensor.parameter
            ):
                return tensor.parameter.dtype
        return None
