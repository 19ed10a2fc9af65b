"""Parameters found again, wherever others put them since they were recorded."""

from __future__ import annotations

from torch import nn

from ..model.quantization import is_rewritten
from ..model.records import ParameterRecord, key_of
from ..model.tree import ModelTree, NamedTensor, only_reading
from ..model.wrappers import is_sharded_tensor
from .fingerprints import is_changed
from .state import Original


def find_again(before: Original, tree: ModelTree) -> None:
    """Find every recorded parameter in a live model.

    Each is looked for in this order, until it is found. What is not was replaced.

    1. At its places, by its memory or its statistics; a shard by its place alone.
    2. Anywhere in the model, by its memory: others moved it.
    3. At its places, or under its name in a module that is new, by shape and sample: it
       got other memory. The shape alone counts for an adapter, and for a bias that its
       layer rewrites: both may be trained since.

    Args:
        before: The record of the base, and of adapters that were there before.
        tree: The live model, of which ``known`` and ``sharded`` are filled.
    """
    with only_reading():
        lost = []
        for record in before.parameters:
            found = record.at_places()
            shard = next(filter(is_sharded_tensor, found), None)
            seen = next(filter(record.is_seen, found), None)
            if shard is not None:
                tree.sharded[id(shard)] = record
            elif seen is not None:
                tree.known[id(seen)] = record
            # A parameter that is seen only in a module that was taken out of the model is
            # lost too.
            if shard is None and (seen is None or id(seen) not in tree.ids):
                lost.append(record)

        by_memory = {}
        for tensor in tree.tensors if lost else ():
            if id(tensor.parameter) not in tree.known:
                by_memory[key_of(tensor.parameter)] = tensor
        base = set(before.base.values())
        for record in lost:
            moved = [by_memory[key] for key in record.memory if key in by_memory]
            if moved and moved[0].parameter.shape == record.shape:
                record.moved(tree.places(moved[0]))
                tree.known[id(moved[0].parameter)] = record
            else:
                _find_by_value(before, tree, record, is_base=record in base)


def _find_by_value(
    before: Original, tree: ModelTree, record: ParameterRecord, *, is_base: bool
) -> None:
    """Find a parameter that has other memory now; the value of an adapter's is not compared."""
    there = tree.at_places(record)
    named = None if there else _tensor_of_name(before, tree, record)
    if named is not None:
        there = [named.parameter]
    if not there or there[0].shape != record.shape:
        return
    if is_base and not _is_recorded_value(before, record, there[0]):
        return
    if named is not None:
        record.moved(tree.places(named))
    record.saw(there[0])
    tree.known[id(there[0])] = record


def _tensor_of_name(
    before: Original, tree: ModelTree, record: ParameterRecord
) -> NamedTensor | None:
    """Return the parameter of a record's name, in a module that is new."""
    for tensor in tree.base_tensors if record.fqn in before.base else ():
        if tensor.fqn != record.fqn or id(tensor.parameter) in tree.known:
            continue
        # A marked module was there before, or is a copy of one that was. What has a
        # record was there before, or in a suspension.
        is_marked = before.records.mark_of(tensor.module) is not None
        was_there = before.records.at(tensor.module, tensor.name) is not None
        # a trainable parameter whose original was frozen is somebody else's
        is_others = tensor.parameter.requires_grad and not before.flag(record)
        if not (is_marked or was_there or is_others):
            return tensor
    return None


def _is_recorded_value(
    before: Original, record: ParameterRecord, parameter: nn.Parameter
) -> bool:
    """Return whether a parameter in other memory, as after a move to a device, is the recorded one by its value."""
    for owner, name in record.refs:
        module = owner()
        # A bias that its layer rewrites may have any value: it may be trained since.
        if module is not None and is_rewritten(module, name):
            return True
    is_sampled = record in before.samples
    return is_sampled and not is_changed(before.samples, record, parameter)
