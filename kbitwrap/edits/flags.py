"""The edits of ``requires_grad`` flags, and those of a model's own attributes."""

from __future__ import annotations

import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor, only_reading
from ..model.wrappers import loaded_class
from .base import ANCHOR_ATTRIBUTE, Anchor, AttributesNow, EditBase

Flags = dict[ParameterRecord, bool]


class FlagsChange:
    """Parameters' ``requires_grad`` flags, as they were.

    ``left`` are the flags that a suspension left in their place: where another is found
    when it ends, others set it, and it stays.
    """

    def __init__(self, flags: Flags, left: Flags | None = None) -> None:
        self.flags, self._left = flags, left

    def undo(self, tree: ModelTree) -> None:
        """Set the recorded flags back.

        Those that others set while the model was suspended stay.
        """
        for record, parameter in self._found(tree):
            flag = self.flags[record]
            now = parameter.requires_grad
            is_others = self._left is not None and now != self._left[record]
            if is_others or now == flag or not parameter.is_leaf:
                continue
            # Only in the mode that it was made in can its flag be set.
            with torch.inference_mode(parameter.is_inference()):
                parameter.requires_grad_(flag)

    def now(self, tree: ModelTree) -> FlagsChange:
        """Record the current flags."""
        found = self._found(tree)
        flags = {record: parameter.requires_grad for record, parameter in found}
        return FlagsChange(flags, left=self.flags)

    def _found(self, tree: ModelTree) -> list[tuple[ParameterRecord, nn.Parameter]]:
        """The parameters that are there, with their records.

        With them is what was made of parameters that others resized.
        """
        found = []
        live = tree.live
        for record in self.flags:
            parameter = live[record] if record in live else record.there()
            if parameter is not None:
                found.append((record, parameter))

        for record, tensor in tree.resized(self.flags):
            # Others may train what was resized: only the preparation's own freezing is
            # undone.
            if self.flags[record] or self._left is not None:
                found.append((record, tensor.parameter))

        return found


@dataclass(frozen=True, kw_only=True)
class Freeze(EditBase):
    """Record parameters' ``requires_grad``, and set it false where asked.

    The parameters are the base's, and adapters' too if asked.
    """

    freeze: bool = True
    freeze_adapters: bool = False

    def capture(self, tree: ModelTree) -> list[FlagsChange]:
        """Record the flags."""
        flags = {}
        with only_reading():
            for tensor in prepared_tensors(tree, self.freeze_adapters):
                flags[tree.record(tensor)] = tensor.parameter.requires_grad

        return [FlagsChange(flags)]

    def apply(self, changes: list[FlagsChange], tree: ModelTree) -> None:
        """Set the flags to false where asked."""
        for record, flag in changes[0].flags.items():
            parameter = record.there()
            if self.freeze and flag and parameter is not None:
                parameter.requires_grad_(False)


def prepared_tensors(tree: ModelTree, freeze_adapters: bool) -> list[NamedTensor]:
    """The parameters to prepare, each once.

    They are all but adapters', unless those are frozen too.
    """
    adapters = set() if freeze_adapters else tree.adapter_ids
    return [t for t in tree.tensors if id(t.parameter) not in adapters]


@dataclass(frozen=True, kw_only=True)
class Hold(EditBase):
    """Tie the wrapper's life to the model's, by an attribute on the model."""

    anchor: Anchor = field(default_factory=Anchor, repr=False)

    def capture(self, tree: ModelTree) -> list[AttributesNow]:
        """Record that the attribute is absent."""
        return [AttributesNow([tree.model], [ANCHOR_ATTRIBUTE])]

    def apply(self, changes: list[AttributesNow], tree: ModelTree) -> None:
        """Set the attribute."""
        vars(tree.model)[ANCHOR_ATTRIBUTE] = self.anchor


@dataclass(frozen=True, kw_only=True)
class WarnOfSaving(EditBase):
    """Warn where ``save_pretrained`` writes what the preparation stores in float32."""

    def capture(self, tree: ModelTree) -> list[AttributesNow]:
        """Record the attribute, which is absent unless others set it."""
        return [AttributesNow([tree.model], ["save_pretrained"])]

    def apply(self, changes: list[AttributesNow], tree: ModelTree) -> None:
        """Set the attribute where the method is that of transformers."""
        pretrained = loaded_class("transformers.modeling_utils", "PreTrainedModel")
        saves = getattr(type(tree.model), "save_pretrained", None)
        if saves is not None and saves is getattr(pretrained, "save_pretrained", None):
            vars(tree.model).setdefault(
                "save_pretrained", types.MethodType(save_pretrained, tree.model)
            )


def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn, and save as the model's class does.

    It has the method's name, by which a bound method is pickled.
    """
    if not getattr(model, "_hf_peft_config_loaded", False):
        warnings.warn(
            "save_pretrained writes what the preparation stored in float32 as float32: use export, or save inside "
            "suspended(), to write the original dtypes; 'kbitwrap convert' repairs a checkpoint",
            UserWarning,
            stacklevel=2,
        )
    return type(model).save_pretrained(model, *args, **kwargs)
