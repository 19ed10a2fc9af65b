"""A live model compared with the record of what it was.

Restore's report, ``verify``, export, the manifest and the doctor all read the result,
so that they agree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..edits.base import HeldOriginal
from ..edits.storage import StorageChange
from ..model.bitsandbytes_layers import quant_state_of
from ..model.quantization import was_decompressed
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor, join
from ..model.wrappers import is_sharded_tensor, whole_shape
from ..tensors.bits import content_digest, is_dense
from ..tensors.lazy import values_of
from .original import Original, hooks_of

DECOMPRESSED = "was decompressed by its library when the model ran"
_FEW = 1 << 16  # elements of a buffer that is compared

_Parameters = dict[ParameterRecord, nn.Parameter]


@dataclass(frozen=True)
class Replacement:
    """The fate of a parameter, or of a module that holds it."""

    fqn: str  # of the parameter or the module
    what: str


@dataclass
class Changes:
    """The names of the base's parameters that are not as they were recorded."""

    # their value changed, and they may be trained
    trained: list[str] = field(default_factory=list)
    # their value changed although they were frozen
    drifted: list[str] = field(default_factory=list)
    # another, of another shape, or none is there; those added are named too
    replaced: dict[str, Replacement] = field(default_factory=dict)
    # sharded since: their values are on all ranks together
    not_compared: list[str] = field(default_factory=list)


def changes_of(
    original: Original,
    tree: ModelTree,
    held: Sequence[HeldOriginal] = (),
    trainable: Collection[Any] | None = None,
) -> Changes:
    """Find what became of the base, in one read of each device.

    First what is at the places of its parameters is told from what was, then the
    values of those that are there. Whatever changed was trained where it may be
    trained, else it drifted.

    Args:
        original: The record of the base.
        tree: The live model, in which the recorded parameters were found again.
        held: The changes that hold originals of parameters stored in another dtype:
            what they would put back is compared.
        trainable: The records of what may be trained; ``None``: what may be now.

    Returns:
        The names, by what happened.
    """
    found = Changes()
    there = _compare_places(original, tree, found)
    unquantized = {
        record: parameter
        for record, parameter in there.items()
        if record.quantized_class is None
    }
    changed = _changed_values(original, unquantized, held)
    for record, parameter in unquantized.items():
        if record not in changed:
            continue
        is_trainable = parameter.requires_grad
        if trainable is not None:
            is_trainable = record in trainable
        if is_trainable:
            found.trained.append(record.fqn)
        else:
            found.drifted.append(record.fqn)
    return found


def _compare_places(original: Original, tree: ModelTree, found: Changes) -> _Parameters:
    """Note what is at the places of the base instead of what was.

    Returns:
        The recorded parameters that are there, whose values can be compared.
    """
    there: _Parameters = {}
    live = {tensor.fqn: tensor for tensor in tree.base_tensors}
    live_modules = {node.fqn for node in tree.plain_base}
    for fqn, record in original.base.items():
        module_fqn = fqn.rpartition(".")[0]
        tensor = live.pop(fqn, None)
        if tensor is None:
            gone = _outermost(fqn, live_modules)
            owner = record.refs[0].owner()
            found.replaced[fqn] = _replacement(gone, owner, "is gone")
        elif original.modules[module_fqn]() is not tensor.module:
            found.replaced[fqn] = Replacement(module_fqn, "was replaced")
        elif not _is_recorded(record, tensor, tree):
            what = "was replaced or resized"
            found.replaced[fqn] = _replacement(fqn, tensor.module, what)
        elif id(tensor.parameter) in tree.known:
            there[record] = tensor.parameter
        else:
            found.not_compared.append(record.fqn)
    # What is left has a name that the base did not have.
    for fqn, tensor in live.items():
        if not original.is_alias(tensor.module, tensor.name):
            added = _outermost(fqn, original.modules)
            found.replaced[fqn] = _replacement(added, tensor.module, "was added")
    return there


def _outermost(fqn: str, modules: Collection[str]) -> str:
    """The outermost module that holds a parameter and is not one of these.

    It is what is named of a removed layer, say; the parameter where there is none.
    """
    parts = fqn.split(".")
    for number in range(1, len(parts)):
        module_fqn = ".".join(parts[:number])
        if module_fqn not in modules:
            return module_fqn
    return fqn


def _replacement(fqn: str, module: nn.Module | None, what: str) -> Replacement:
    """The fate of a module's parameter, unless its library itself replaced it."""
    if module is not None and was_decompressed(module):
        what = DECOMPRESSED
    return Replacement(fqn, what)


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


def _changed_values(
    original: Original, parameters: _Parameters, held: Sequence[HeldOriginal]
) -> set[ParameterRecord]:
    """The parameters of which a restore would give other values than were recorded.

    An original that is kept is compared element by element. All others are compared by
    samples, and by digests too, where these were asked for.
    """
    holders = {one.record: one for one in held}
    # of those compared with what is kept: whether they changed, not read yet
    answers: dict[ParameterRecord, torch.Tensor] = {}
    others: _Parameters = {}
    for record, parameter in parameters.items():
        holder = holders.get(record)
        if (
            isinstance(holder, StorageChange)
            and holder.kept is not None
            and holder.converts(parameter)
        ):
            answers[record] = holder.against_kept(parameter.data).is_trained
        else:
            others[record] = parameter
    # Samples are rounded to the recorded dtype, as a restore rounds what was cast.
    changed = original.fingerprints.changed(others.items(), answers)
    for record, digest in original.fingerprints.digests.items():
        if record not in others:
            continue
        holder = holders.get(record)
        value: torch.Tensor = others[record]
        if holder is not None:
            value = holder.read(value)
        if content_digest(values_of(value)) != digest():
            changed.add(record)
    return changed


def changed_buffers(original: Original, tree: ModelTree) -> list[str]:
    """The names of small buffers of the checkpoint that hold other values than before.

    Running statistics are such. One that is gone is named too.
    """
    live: dict[str, torch.Tensor | None] = {}
    for node in tree.base:
        for name, buffer in node.module._buffers.items():
            live[join(node.fqn, name)] = buffer
    found = []
    for fqn, recorded in original.buffers.items():
        buffer = live.get(fqn)
        if buffer is None:
            found.append(fqn)
        elif buffer.numel() > _FEW or not is_dense(buffer):
            continue
        elif content_digest(buffer) != recorded.digest():
            found.append(fqn)
    return found


def others_in(
    original: Original, tree: ModelTree, kept_dtype: Collection[ParameterRecord] = ()
) -> tuple[list[str], list[str]]:
    """Find the parameters that are not as they were, and those of others.

    Args:
        original: The record of the base.
        tree: The live model, in which the recorded parameters were found again.
        kept_dtype: The records of adapters whose dtype may be another.

    Returns:
        The fqns of the base's parameters with another flag, dtype or shape, or in whose
            place another is; and the paths of parameters that were not there.
    """
    replaced: list[str] = []
    foreign: list[str] = []
    for tensor in tree.tensors:
        key = id(tensor.parameter)
        record = tree.known.get(key) or tree.sharded.get(key)
        may_be_cast = record in kept_dtype
        if record is not None and _is_as_before(
            original, record, tensor.parameter, may_be_cast=may_be_cast
        ):
            continue
        is_base = tensor.fqn in original.base
        is_beside = record is None and tensor.fqn != tensor.path
        if is_base:
            replaced.append(tensor.fqn)
        if is_beside or not is_base:
            foreign.append(tensor.path)
    return replaced, foreign


def _is_as_before(
    original: Original,
    record: ParameterRecord,
    parameter: nn.Parameter,
    *,
    may_be_cast: bool,
) -> bool:
    """Whether a parameter has the flag, dtype and shape that it had.

    A shard is taken to have them: its shape says nothing.
    """
    if is_sharded_tensor(parameter):
        return True
    if parameter.dtype != record.dtype and not may_be_cast:
        return False
    if record.quantized_class is None and parameter.shape != record.shape:
        return False
    return parameter.requires_grad == original.flags[record]


def changed_hooks(original: Original, tree: ModelTree) -> list[str]:
    """The hooks that were added, and those that were removed, as lines of a report.

    A hook is told by its id: a user's function may have any name.
    """
    before, now = original.hooks, hooks_of(tree)
    added = [line for key, line in now.items() if key not in before]
    removed = [line for key, line in before.items() if key not in now]
    return [*added, *(f"{line} was removed" for line in removed)]
