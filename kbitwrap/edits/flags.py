"""The edits of ``requires_grad`` flags, and those of a model's own attributes."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor, only_reading
from ..model.wrappers import loaded_class
from .base import ANCHOR_ATTRIBUTE, Anchor, Apply, Attributes, Edit
from .journal import Journal, Slot, Undoing

Values = dict[ParameterRecord, bool]


class Flags(Slot):
    """The ``requires_grad`` flags of parameters.

    Args:
        before: The flags before the edit, by the records of the parameters.
    """

    def __init__(self, before: Values) -> None:
        self.before = before

    def read(self, tree: ModelTree) -> Values:
        """Return the flags of the parameters that are there."""
        found = self._found(tree, self.before)
        return {record: parameter.requires_grad for record, parameter in found}

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Set the flags back."""
        for record, parameter in self._found(tree, self.before):
            _set_flag(parameter, self.before[record])

    def resume(self, tree: ModelTree, value: Values) -> None:
        """Set the flags back, but for those that others set in the suspension."""
        for record, parameter in self._found(tree, value, is_resuming=True):
            if parameter.requires_grad == self.before[record]:
                _set_flag(parameter, value[record])

    def _found(
        self, tree: ModelTree, flags: Values, *, is_resuming: bool = False
    ) -> Iterator[tuple[ParameterRecord, nn.Parameter]]:
        """Yield the parameters that are there, with their records.

        The parameters that others made by resizing are among them.
        """
        live = tree.live
        for record in flags:
            parameter = live[record] if record in live else record.there()
            if parameter is not None:
                yield record, parameter

        for record, tensor in tree.resized(flags):
            # Others may train what was resized: only the edit's own freezing is undone.
            if flags[record] or is_resuming:
                yield record, tensor.parameter


def _set_flag(parameter: nn.Parameter, flag: bool) -> None:
    if parameter.requires_grad != flag and parameter.is_leaf:
        # Only in the mode that it was made in can its flag be set.
        with torch.inference_mode(parameter.is_inference()):
            parameter.requires_grad_(flag)


def freeze(*, is_frozen: bool, freeze_adapters: bool) -> Apply:
    """Record the flags of what is prepared, and set them to false where asked."""

    def apply(journal: Journal, tree: ModelTree) -> None:
        before = {}
        with only_reading():
            for tensor in prepared_tensors(tree, freeze_adapters):
                before[tree.record(tensor)] = tensor.parameter.requires_grad

        journal.save(Flags(before))
        for record, flag in before.items():
            parameter = record.there()
            if is_frozen and flag and parameter is not None:
                parameter.requires_grad_(False)

    return apply


def prepared_tensors(tree: ModelTree, freeze_adapters: bool) -> list[NamedTensor]:
    """Return the parameters to prepare, each once.

    They are all but adapters', unless those are frozen too.
    """
    adapters = set() if freeze_adapters else tree.adapter_ids
    return [t for t in tree.tensors if id(t.parameter) not in adapters]


def hold(wrapper: object) -> Edit:
    """Tie the wrapper's life to the model's, by an attribute on the model."""

    def apply(journal: Journal, tree: ModelTree) -> None:
        journal.save(Attributes([ANCHOR_ATTRIBUTE], [tree.model]))
        vars(tree.model)[ANCHOR_ATTRIBUTE] = Anchor(wrapper)

    return Edit("hold", ("",), apply)


def warn_of_saving(journal: Journal, tree: ModelTree) -> None:
    """Warn where ``save_pretrained`` writes what the preparation stores in float32.

    Only where the method is that of transformers is it replaced.
    """
    journal.save(Attributes(["save_pretrained"], [tree.model]))
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
