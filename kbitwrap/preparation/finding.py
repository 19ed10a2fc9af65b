"""Parameters found again, wherever others put them since they were recorded.

First by their memory, at their places and then in the whole model; last by their values,
at their places or else by name. A parameter that none of these finds was replaced. Those
of adapters, which are cast and trained, are what is at their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..model.quantization import is_rewritten
from ..model.records import ParameterRecord, Place, key_of
from ..model.tree import ModelTree, NamedTensor, only_reading
from ..model.wrappers import is_sharded_tensor
from .original import Original

_Records = list[ParameterRecord]


def find_again(original: Original, tree: ModelTree) -> None:
    """Find every recorded parameter in a live model.

    Args:
        original: The record of the base, and of adapters that were there before.
        tree: The live model, of which ``known`` and ``sharded`` are filled.
    """
    with only_reading():
        lost = _find_at_places(original, tree)
        if lost:
            lost = _find_by_memory(tree, lost)
        if lost:
            lost = _find_adapters(original, tree, lost)
        if lost:
            _find_by_value(original, tree, lost)


def _find_at_places(original: Original, tree: ModelTree) -> _Records:
    """Find parameters where they were, as they were or sharded.

    Returns:
        The records of those that are lost.
    """
    lost = []
    for record in original.flags:
        found = record.at_places()
        shard = next(filter(is_sharded_tensor, found), None)
        seen = next(filter(record.is_seen, found), None)
        if shard is not None:
            tree.sharded[id(shard)] = record
        elif seen is not None:
            tree.known[id(seen)] = record
        # Others may have taken the module out of the model.
        if shard is None and (seen is None or id(seen) not in tree.ids):
            lost.append(record)
    return lost


def _find_by_memory(tree: ModelTree, lost: _Records) -> _Records:
    """Find parameters at places that they did not have, by their memory.

    Returns:
        The records of those that are still lost.
    """
    by_memory: dict[Any, NamedTensor] = {}
    for tensor in tree.tensors:
        if id(tensor.parameter) not in tree.known:
            by_memory[key_of(tensor.parameter)] = tensor
    still_lost = []
    for record in lost:
        found = [by_memory[key] for key in record.memory if key in by_memory]
        if not found or found[0].parameter.shape != record.shape:
            still_lost.append(record)
            continue
        record.moved(tree.places(found[0]))
        tree.known[id(found[0].parameter)] = record
    return still_lost


def _find_adapters(original: Original, tree: ModelTree, lost: _Records) -> _Records:
    """Find parameters of adapters that were there before, whatever their values are now.

    Returns:
        The records of those that are still lost.
    """
    base = set(original.parameters)
    still_lost = []
    for record in lost:
        there = [] if record in base else tree.at_places(record)
        if not there or there[0].shape != record.shape:
            still_lost.append(record)
            continue
        record.saw(there[0])
        tree.known[id(there[0])] = record
    return still_lost


@dataclass
class _Candidate:
    """A parameter that may be a recorded one."""

    record: ParameterRecord
    parameter: nn.Parameter
    # where it is, unless it is where it was
    places: Sequence[Place] = ()


def _find_by_value(original: Original, tree: ModelTree, lost: _Records) -> None:
    """Find parameters that got other memory, as a move to another device gives it.

    What is at their place, or else has their name, must hold their values.
    """
    unknown = _unknown(original, tree)
    candidates = []
    for record in lost:
        candidate = _candidate(original, tree, record, unknown)
        if candidate is not None:
            candidates.append(candidate)
    values = [(one.record, one.parameter) for one in candidates]
    changed = original.fingerprints.changed(values)
    for one in candidates:
        # A rewritten bias got its memory from its layer, and may be trained since.
        if one.record in changed and not _is_rewritten(one.record):
            continue
        one.record.moved(one.places)
        one.record.saw(one.parameter)
        tree.known[id(one.parameter)] = one.record


def _unknown(original: Original, tree: ModelTree) -> dict[str, NamedTensor]:
    """The base's parameters, by name, that may be recorded ones at new places."""
    found = {}
    for tensor in tree.base_tensors:
        # A marked module was there before, or is a copy of one that was; what has a
        # record was there then, or in a suspension.
        is_marked = original.records.mark_of(tensor.module) is not None
        was_there = original.records.at(tensor.module, tensor.name) is not None
        is_known = id(tensor.parameter) in tree.known
        if not (is_known or is_marked or was_there):
            found[tensor.fqn] = tensor
    return found


def _candidate(
    original: Original,
    tree: ModelTree,
    record: ParameterRecord,
    unknown: Mapping[str, NamedTensor],
) -> _Candidate | None:
    """The parameter at a lost one's place, or else of its name, if it has its shape."""
    if record not in original.fingerprints.samples:
        return None
    there = tree.at_places(record)
    named = unknown.get(record.fqn)
    if there:
        found = _Candidate(record, there[0])
    elif named is None:
        return None
    elif named.parameter.requires_grad and not original.flags[record]:
        return None  # trained though the original was frozen: somebody else's
    else:
        found = _Candidate(record, named.parameter, tree.places(named))
    return found if found.parameter.shape == record.shape else None


def _is_rewritten(record: ParameterRecord) -> bool:
    """Whether a layer that the parameter is in rewrites it when it runs."""
    for ref in record.refs:
        owner = ref.owner()
        if owner is not None and is_rewritten(owner, ref.name):
            return True
    return False
