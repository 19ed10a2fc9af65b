"""Parameters found again, wherever others put them since they were recorded.

They are looked for first by their memory, at their places and then in the whole model;
last by their values, at their places or else by name. A parameter that none of these
finds was replaced. A parameter of an adapter, which is cast and trained, is the one at
its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..model.quantization import is_rewritten
from ..model.records import ParameterRecord, Place, key_of
from ..model.tree import ModelTree, NamedTensor, only_reading
from ..model.wrappers import is_sharded_tensor
from .fingerprints import is_changed
from .state import Original

_Records = list[ParameterRecord]


def find_again(before: Original, tree: ModelTree) -> None:
    """Find every recorded parameter in a live model.

    Args:
        before: The record of the base, and of adapters that were there before.
        tree: The live model, of which ``known`` and ``sharded`` are filled.
    """
    with only_reading():
        lost: _Records = []
        for record in before.parameters:
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
        if lost:
            lost = _find_by_memory(before, tree, lost)
        if lost:
            _find_by_value(before, tree, lost)


def _find_by_memory(before: Original, tree: ModelTree, lost: _Records) -> _Records:
    """Find parameters at places that they did not have, by their memory.

    A parameter of an adapter is the one at its place, whatever its values are now.

    Returns:
        The records of those that are still lost.
    """
    base = set(before.base.values())
    by_memory: dict[Any, NamedTensor] = {}
    for tensor in tree.tensors:
        if id(tensor.parameter) not in tree.known:
            by_memory[key_of(tensor.parameter)] = tensor

    still_lost = []
    for record in lost:
        found = [by_memory[key] for key in record.memory if key in by_memory]
        there = [] if record in base else tree.at_places(record)
        if found and found[0].parameter.shape == record.shape:
            record.moved(tree.places(found[0]))
            tree.known[id(found[0].parameter)] = record
        elif there and there[0].shape == record.shape:
            record.saw(there[0])
            tree.known[id(there[0])] = record
        else:
            still_lost.append(record)
    return still_lost


def _find_by_value(before: Original, tree: ModelTree, lost: _Records) -> None:
    """Find parameters that got other memory, as a move to another device gives it.

    The parameter at their place, or else of their name, must hold their values.
    """
    unknown: dict[str, NamedTensor] = {}  # at new places
    for tensor in tree.base_tensors:
        # A marked module was there before, or is a copy of one that was; what has a
        # record was there then, or in a suspension.
        is_marked = before.records.mark_of(tensor.module) is not None
        was_there = before.records.at(tensor.module, tensor.name) is not None
        is_known = id(tensor.parameter) in tree.known
        if not (is_known or is_marked or was_there):
            unknown[tensor.fqn] = tensor

    candidates: dict[ParameterRecord, nn.Parameter] = {}
    places: dict[ParameterRecord, Sequence[Place]] = {}
    for record in lost:
        there = tree.at_places(record)
        named = unknown.get(record.fqn)
        if record not in before.samples:
            continue
        if there:
            candidate = there[0]
        elif named is None:
            continue
        elif named.parameter.requires_grad and not before.flag(record):
            continue  # trained though the original was frozen: somebody else's
        else:
            candidate = named.parameter
            places[record] = tree.places(named)
        if candidate.shape == record.shape:
            candidates[record] = candidate

    for record, candidate in candidates.items():
        # A rewritten bias got its memory from its layer, and may be trained since.
        owners = [(ref.owner(), ref.name) for ref in record.refs]
        rewrites = any(one is not None and is_rewritten(one, n) for one, n in owners)
        if rewrites or not is_changed(before.samples, record, candidate):
            record.moved(places.get(record, ()))
            record.saw(candidate)
            tree.known[id(candidate)] = record
