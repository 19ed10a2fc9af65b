"""Differences of a live model and the records of what it was.

Restore's report, ``verify``, export, the manifest and the doctor all read them, so that
they agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..edits.base import OriginalSlot
from ..edits.storage import ParameterStorage
from ..model.bitsandbytes_layers import quant_state_of
from ..model.quantization import is_rewritten, was_decompressed
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor
from ..model.wrappers import is_sharded_tensor, whole_shape
from ..reports import StateDiff
from ..tensors.bits import content_digest, is_dense
from ..tensors.lazy import values_of
from .fingerprints import is_changed
from .state import (
    HOOKS,
    ModelState,
    Original,
    Values,
    hooks_of,
    saved_buffers,
    values_of_module,
    values_of_parameter,
)

DECOMPRESSED = "was decompressed by its library when the model ran"
_FEW = 1 << 16  # elements of a buffer that is compared

# what was expected and what was found, by the names of differences
_Pairs = dict[str, tuple[Any, Any]]


@dataclass
class Changes:
    """The names of the base's parameters that are not as they were recorded."""

    # their value changed, and they may be trained
    trained: list[str] = field(default_factory=list)
    # their value changed although they were frozen
    drifted: list[str] = field(default_factory=list)
    # in their place is another, one of another shape, or none, by name with the reason;
    # parameters that were added are among them
    replaced: dict[str, str] = field(default_factory=dict)
    # sharded since: their values are on all ranks together
    not_compared: list[str] = field(default_factory=list)


def changes_of(
    before: Original,
    tree: ModelTree,
    held: Sequence[OriginalSlot],
) -> Changes:
    """Find what became of the base.

    First find the parameters that were replaced. Then compare the values of the others,
    but for quantized ones: one that was not replaced counts as unchanged. A parameter
    that changed was trained if it requires grad; else it drifted.

    Args:
        before: The record of the base.
        tree: The live model, in which the recorded parameters were found again.
        held: The slots that hold originals of parameters stored in another dtype: what
            they would put back is compared.

    Returns:
        The names, by what happened.
    """
    changes = Changes()
    to_compare = {}
    tensor_of = {tensor.fqn: tensor for tensor in tree.base_tensors}
    for fqn, record in before.base.items():
        tensor = tensor_of.pop(fqn, None)
        owner = before.owners[fqn.rpartition(".")[0]]()
        if tensor is None:
            changes.replaced[fqn] = _reason(owner, "is gone")
        elif owner is not tensor.module or not _is_recorded(record, tensor, tree):
            changes.replaced[fqn] = _reason(owner, "was replaced or resized")
        elif id(tensor.parameter) not in tree.known:
            changes.not_compared.append(record.fqn)
        # the codes of a quantized weight that is the recorded one are not compared
        elif record.quantized_class is None:
            to_compare[record] = tensor.parameter

    for fqn, tensor in tensor_of.items():  # of a name that the base did not have
        if not before.is_alias(tensor.module, tensor.name):
            changes.replaced[fqn] = _reason(tensor.module, "was added")

    holders = {one.record: one for one in held}
    for record, parameter in to_compare.items():
        if _is_changed(before, record, parameter, holders.get(record)):
            names = changes.trained if parameter.requires_grad else changes.drifted
            names.append(record.fqn)
    return changes


def _reason(module: nn.Module | None, otherwise: str) -> str:
    """Return ``DECOMPRESSED`` if a library decompressed the module, else another reason."""
    return DECOMPRESSED if module and was_decompressed(module) else otherwise


def _is_recorded(record: ParameterRecord, tensor: NamedTensor, tree: ModelTree) -> bool:
    """Whether a parameter is the one recorded, or that one sharded.

    A shard is told by its place, and by its 4-bit statistics where it has some.
    """
    parameter = tensor.parameter
    # A 4-bit layer that repacks its weight for the CPU gives it another shape and dtype.
    shape = whole_shape(parameter) if record.quant_state is None else None
    if shape is not None and shape.numel() != record.shape.numel():
        return False
    if tree.known.get(id(parameter)) is record:
        return True
    if tree.sharded.get(id(parameter)) is not record:
        return False
    if record.quant_state is None:
        return True
    return record.quant_state() is quant_state_of(tensor.module, parameter)


def _is_changed(
    before: Original,
    record: ParameterRecord,
    parameter: nn.Parameter,
    holder: OriginalSlot | None,
) -> bool:
    """Whether a restore would give a parameter another value than recorded.

    An original that is kept is compared element by element. All values are compared by
    samples, and by digests too, where these were asked for: an original that is held may
    have been changed before it was taken.
    """
    storage = holder if isinstance(holder, ParameterStorage) else None
    value: torch.Tensor = parameter
    is_trained = torch.tensor(False)
    if storage and storage.kept is not None and storage.stores_other(parameter):
        value = storage.kept
        is_trained = storage.compare(parameter.data)[0]
    # Samples are rounded to the recorded dtype, as a restore rounds what was cast.
    is_other = is_changed(before.samples, record, value)
    if is_trained | is_other.to(is_trained.device):  # the device is waited for once
        return True
    if record not in before.digests:
        return False
    if holder is not None and value is parameter:
        value = holder.original(parameter)
    return content_digest(values_of(value)) != before.digests[record]()


def diff(after: ModelState, tree: ModelTree, changes: Changes) -> StateDiff:
    """Compare a live model with the state that a preparation left.

    Adapters do not count.

    Args:
        after: The state.
        tree: The live model, in which the recorded parameters were found again.
        changes: The changes of the base.

    Returns:
        The differences by fqn, each a pair of what was expected and what was found.
    """
    found: defaultdict[str, _Pairs] = defaultdict(dict)
    for fqn, what in changes.replaced.items():
        found[fqn]["parameter"] = "the prepared one", what
    for fqn in [*changes.trained, *changes.drifted]:
        found[fqn]["value"] = "the original value", "another value"

    for tensor in tree.base_tensors:
        record = tree.found(tensor.parameter)
        if record is None or record not in after.parameters:
            continue
        ignored = set()
        if id(tensor.parameter) in tree.sharded:
            ignored.add("shape")
        # A quantized layer casts its bias to the dtype that it computes in.
        if is_rewritten(tensor.module, tensor.name):
            ignored.add("dtype")
        now = values_of_parameter(tensor.parameter)
        found[tensor.fqn] |= _differences(after.parameters[record], now, ignored)

    for node in tree.base:
        expected = after.modules.get(node.fqn)
        if expected is not None:
            # A hook where none is needed changes nothing; transformers adds one
            # whenever it enables checkpointing.
            ignored = set() if expected[HOOKS] else {HOOKS}
            now = values_of_module(node.module)
            found[node.fqn] |= _differences(expected, now, ignored)
    return StateDiff({fqn: pairs for fqn, pairs in found.items() if pairs})


def _differences(expected: Values, found: Values, ignored: Collection[str]) -> _Pairs:
    """Return the values that differ, each with the one found instead."""
    return {
        name: (value, found[name])
        for name, value in expected.items()
        if name not in ignored and found[name] != value
    }


def others_in(
    before: Original, tree: ModelTree, kept_dtype: Collection[ParameterRecord]
) -> tuple[list[str], list[str]]:
    """Find the parameters that are not as they were, and what others added.

    Args:
        before: The record of the model.
        tree: The live model, in which the recorded parameters were found again.
        kept_dtype: The records of adapters whose dtype may be another.

    Returns:
        The fqns of the base's parameters with another flag, dtype or shape, or in whose
            place another is; and the paths of parameters that were not there, with the
            hooks that were added or removed. A hook is told by its id: a user's
            function may have any name.
    """
    replaced = []
    foreign = []
    for tensor in tree.tensors:
        parameter, record = tensor.parameter, tree.found(tensor.parameter)
        if record is not None:
            ignored = {"dtype"} if record in kept_dtype else set()
            if record.quantized_class is not None:
                ignored.add("shape")
            was, now = before.parameters[record], values_of_parameter(parameter)
            # The shape and dtype of a shard say nothing.
            if is_sharded_tensor(parameter) or not _differences(was, now, ignored):
                continue
        is_base = tensor.fqn in before.base
        # a copy inside a wrapper, under the base's name
        is_in_wrapper = record is None and tensor.fqn != tensor.path
        if is_base:
            replaced.append(tensor.fqn)
        if is_in_wrapper or not is_base:
            foreign.append(tensor.path)

    hooks = hooks_of(tree)
    foreign += [line for key, line in hooks.items() if key not in before.hooks]
    for key, line in before.hooks.items():
        if key not in hooks:
            foreign.append(f"{line} was removed")
    return replaced, foreign


def changed_buffers(before: Original, tree: ModelTree) -> list[str]:
    """Return the names of small buffers of the checkpoint with other values than before.

    Running statistics are such. One that is gone is named too.
    """
    live = saved_buffers(tree)
    found = []
    for fqn, recorded in before.buffers.items():
        buffer = live.get(fqn)
        if buffer is None:
            found.append(fqn)
            continue
        is_compared = buffer.numel() <= _FEW and is_dense(buffer)
        if is_compared and content_digest(buffer) != recorded.digest():
            found.append(fqn)
    return found
