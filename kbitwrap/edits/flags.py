"""The edits of ``requires_grad`` flags and of the attribute by which a model keeps its wrapper alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor, only_reading
from .base import ANCHOR_ATTRIBUTE, Anchor, AttributesNow, ChangeBase, EditBase


class FlagsChange(ChangeBase):
    """Parameters' ``requires_grad`` flags as they were; with ``left``, those that a suspension left instead."""

    def __init__(
        self,
        flags: Iterable[tuple[ParameterRecord, bool]],
        left: dict[ParameterRecord, bool] | None = None,
    ) -> None:
        self.flags, self._left = dict(flags), left

    def undo(self, tree: ModelTree) -> None:
        """Set the recorded flags back, but for those that others set while the model was suspended."""
        with only_reading():
            changed = [
                (p, self.flags[r]) for r, p in self._live(tree) if self._is_ours(r, p)
            ]
            # Others may train what was resized: only the preparation's own freezing is
            # undone.
            resized = [
                (record, tensor.parameter)
                for record, tensor in tree.resized(self.flags)
            ]
            own = [
                (r, p) for r, p in resized if self.flags[r] or self._left is not None
            ]
            changed += [(p, self.flags[r]) for r, p in own if self._is_ours(r, p)]
        for parameter, flag in changed:
            if parameter.is_leaf:
                # the mode that it was made in
                with torch.inference_mode(parameter.is_inference()):
                    parameter.requires_grad_(flag)

    def _is_ours(self, record: ParameterRecord, parameter: torch.Tensor) -> bool:
        """Whether a flag is another, and not one that others set while the model was suspended."""
        is_left = self._left is None or parameter.requires_grad == self._left[record]
        return is_left and parameter.requires_grad != self.flags[record]

    def now(self, tree: ModelTree) -> FlagsChange:
        """Record the current flags."""
        with only_reading():
            resized = [
                (record, tensor.parameter)
                for record, tensor in tree.resized(self.flags)
            ]
            return FlagsChange(
                [(r, p.requires_grad) for r, p in [*self._live(tree), *resized]],
                left=self.flags,
            )

    def _live(self, tree: ModelTree) -> list[tuple[ParameterRecord, torch.Tensor]]:
        """The parameters that are there."""
        found = tree.live
        live = [
            (record, found[record] if record in found else record.there())
            for record in self.flags
        ]
        return [
            (record, parameter) for record, parameter in live if parameter is not None
        ]


@dataclass(frozen=True, kw_only=True)
class Freeze(EditBase):
    """Record every base parameter's ``requires_grad``, adapters' too if asked, and set it false where asked."""

    freeze: bool = True
    freeze_adapters: bool = False

    def capture(self, tree: ModelTree) -> FlagsChange:
        """Record the flags."""
        with only_reading():
            tensors = prepared_tensors(tree, self.freeze_adapters)
            return FlagsChange(
                [(tree.record(t), t.parameter.requires_grad) for t in tensors]
            )

    def apply(self, change: FlagsChange) -> None:
        """Set the flags to false where asked."""
        for record, flag in change.flags.items() if self.freeze else ():
            if flag and (parameter := record.there()) is not None:
                parameter.requires_grad_(False)


def prepared_tensors(tree: ModelTree, freeze_adapters: bool) -> list[NamedTensor]:
    """The parameters to prepare, each once: all but adapters', unless those are frozen too."""
    adapters = set() if freeze_adapters else tree.adapter_ids
    return [t for t in tree.tensors if id(t.parameter) not in adapters]


@dataclass(frozen=True, kw_only=True)
class Hold(EditBase):
    """Tie the wrapper's life to the model's, by an attribute on the model."""

    anchor: Anchor = field(default_factory=Anchor, repr=False)

    def capture(self, tree: ModelTree) -> AttributesNow:
        """Record that the attribute is absent."""
        return AttributesNow([tree.model], [ANCHOR_ATTRIBUTE])

    def apply(self, change: AttributesNow) -> None:
        """Set the attribute."""
        for model in change.holders:
            vars(model)[ANCHOR_ATTRIBUTE] = self.anchor
