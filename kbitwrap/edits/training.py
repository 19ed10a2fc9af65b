"""The edits that record what training rewrites.

It rewrites train modes, caches, ``use_cache``, and fields of layers and of accelerate.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model.bitsandbytes_layers import (
    REPACKS,
    RUNTIME_ATTRIBUTES,
    in_other_layout,
    is_repacked,
    quant_state_of,
    state_owners,
    unpack_statistics,
    unpacked_copy,
    unpacked_state,
)
from ..model.quantization import KERNEL, has_runtime_state
from ..model.records import MARK, MemoryRef, ParameterRecord
from ..model.tree import ModelTree, Node, only_reading
from ..model.wrappers import is_sharded_tensor
from .base import (
    AttributesChange,
    AttributesNow,
    EditBase,
    Fields,
    HeldOriginal,
    read_attributes,
    write_attributes,
)
from .journal import MISSING
from .kept import KeptChange

# Set by accelerate on the model that it is given: a forward under autocast, the forward
# before that, and a mark.
_ACCELERATE_ATTRIBUTES = ("forward", "_original_forward", "_is_accelerate_prepared")

# The most bytes of a tensor beside a weight that a record keeps alive, whatever device
# it is on.
_SMALL_BYTES = 1 << 16


class AccelerateChange(AttributesNow):
    """A model as it was before ``Accelerator.prepare``, which a ``Trainer`` calls.

    That gives it a forward under autocast, and a mark.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__([model], _ACCELERATE_ATTRIBUTES)
        self.model = model

    def undo(self, tree: ModelTree) -> None:
        """Put the attributes back; a ``forward`` that others replaced stays."""
        values = self._values[0]
        wrapped = vars(self.model).get("_original_forward", MISSING)
        if wrapped is values["_original_forward"]:
            values = values | read_attributes(self.model, ["forward"])

        write_attributes(self.model, values)


@dataclass(frozen=True, kw_only=True)
class FollowTrainMode(EditBase):
    """Give modules outside the base the train mode of what contains them.

    Such modules are adapters, wrappers and copies.
    """

    def capture(self, tree: ModelTree) -> list[AttributesNow]:
        """Record their modes."""
        followers = [node.module for node in tree.nodes if _follows(node)]
        return [AttributesNow(followers, ["training"])]

    def apply(self, changes: list[AttributesNow], tree: ModelTree) -> None:
        """Set the modes, from the outermost module on."""
        modes: dict[str, bool] = {}
        for node in tree.nodes:
            if _follows(node):
                container = node.path.rpartition(".")[0]
                node.module.training = modes[container]
            modes[node.path] = node.module.training


def _follows(node: Node) -> bool:
    """Whether a module is outside of the base, and inside of another."""
    return bool(node.path) and not node.is_base


class RuntimeChange(HeldOriginal):
    """The fields that a bitsandbytes layer rewrites when it runs, as they were.

    ``Linear4bit`` fills in ``compute_dtype``, and on some CPUs repacks its weight in
    eval mode; ``Linear8bitLt`` moves its weight's statistics into ``state``, and writes
    there which columns held outliers. Small tensors are kept alive, and all statistics
    of 4 bits on the CPU, where repacking replaces them by an approximation. A weight
    that was replaced since (a merge) keeps its own state. A repacked weight holds the
    same nibbles in another order, so either layout is made from the other exactly.
    """

    def __init__(self, module: nn.Module, record: ParameterRecord) -> None:
        weight = module._parameters["weight"]
        assert weight is not None
        self.record = record
        self.dtype = record.dtype
        # of the weight in the trainable layout, in which it is sharded
        self.shape = record.shape
        self._module = weakref.ref(module)
        self._attributes = read_attributes(module, RUNTIME_ATTRIBUTES)
        self._state: dict[str, Fields] = {}
        may_repack = weight.is_cpu and "state" not in vars(module)  # of 4 bits
        for owner in state_owners(module, weight):
            fields = owner.fields()
            if not may_repack:
                fields = {key: _weakly(value) for key, value in fields.items()}
            self._state[owner.name] = fields

    def _weight(self) -> nn.Parameter | None:
        module = self._module()
        return None if module is None else module._parameters.get("weight")

    def keep_unpacked(self) -> None:
        """Keep the trainable layout in eval mode too.

        The kernel for the other layout has no backward.
        """
        weight = self._weight()
        state = getattr(weight, "quant_state", None)
        if weight is not None and state is not None and is_repacked(vars(state)):
            self.write(weight, in_other_layout(weight, state))
            unpack_statistics(state)
            self.shape = weight.shape

        self._stop_repacking()

    def _stop_repacking(self) -> None:
        """Have the layer keep its weight's layout in eval mode too."""
        fields = vars(self._module())
        if fields.get(REPACKS):
            fields[REPACKS] = False

    def undo(self, tree: ModelTree) -> None:
        """Put the recorded fields back.

        A layer whose weight is sharded keeps the trainable layout: what it repacks is
        lost when the weight is gathered again, and its statistics would stay repacked.
        """
        module, weight = self._module(), self._weight()
        if module is None:
            return

        write_attributes(module, self._attributes)
        is_sharded = weight is not None and is_sharded_tensor(weight)
        if is_sharded:
            self._stop_repacking()

        if weight is None or not self.record.is_seen(weight):
            return

        quant_state = getattr(weight, "quant_state", None)
        was_repacked = is_repacked(self._state.get("quant_state", {}))
        if quant_state is not None and is_repacked(vars(quant_state)) != was_repacked:
            if is_sharded:
                return
            self.write(weight, in_other_layout(weight, quant_state))

        owners = state_owners(module, weight)
        # A layer may have moved a tensor from one of its owners to another.
        tensors = _by_memory([owner.fields() for owner in owners])
        before = []
        for owner in owners:
            if owner.name in self._state:
                recorded = self._state[owner.name]
                fields = _with_tensors(recorded, owner.fields(), tensors)
                before.append((owner, fields))

        # All are written before any is removed: a field may be all that holds a tensor
        # of another.
        for owner, fields in before:
            vars(owner.holder).update(fields)

        for owner, fields in before:
            owner.replace(fields)

    def now(self, tree: ModelTree) -> RuntimeChange:
        """Record the layer as it is now; if it is gone, return this record."""
        module = self._module()
        if module is None or self._weight() is None:
            return self

        return RuntimeChange(module, self.record)

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The weight as it was before the layer repacked it.

        It is a copy, or the weight itself where the layer did not repack it.
        """
        return unpacked_copy(parameter, self._settle)

    def _settle(self, fields: Fields) -> None:
        """Replace the fields of copied 4-bit statistics by the recorded ones."""
        if "quant_state" in self._state:
            tensors = _by_memory([fields])
            values = _with_tensors(self._state["quant_state"], fields, tensors)
            fields.clear()
            fields.update(values)

    def original_quant_state(self, parameter: torch.Tensor) -> Any:
        """The layer's 4-bit statistics from before repacking.

        They are for a weight that lost them when it was sharded.
        """
        module = self._module()
        if module is None:
            return None

        return unpacked_state(quant_state_of(module, parameter), self._settle)


def _weakly(value: Any) -> Any:
    """A value, held weakly if it is a large tensor.

    That is an 8-bit weight, or as large as the statistics of a 4-bit one.
    """
    if not isinstance(value, torch.Tensor):
        return value

    if value.dtype != torch.int8 and value.nbytes <= _SMALL_BYTES:
        return value

    return MemoryRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def _by_memory(places: list[Fields]) -> dict[int, torch.Tensor]:
    """The tensors among the fields of objects, by the keys of their memory."""
    found = {}
    for place in places:
        for value in place.values():
            if isinstance(value, torch.Tensor):
                found[value.untyped_storage()._cdata] = value

    return found


def _with_tensors(
    recorded: Fields, fields: Fields, tensors: dict[int, torch.Tensor]
) -> Fields:
    """The recorded fields, with a tensor again for each that is held weakly.

    It is the one that lies in that memory; where none does, the current value.
    """
    found = dict(recorded)
    for key, value in recorded.items():
        if isinstance(value, MemoryRef):
            found[key] = tensors.get(value.cdata, fields.get(key))

    return found


@dataclass(frozen=True, kw_only=True)
class Record(EditBase):
    """Record what training rewrites, and keep layers trainable.

    They keep the layout, and the kernel, that has a backward.
    """

    def capture(self, tree: ModelTree) -> list[Any]:
        """Record all of it."""
        runtime = {}
        with only_reading():
            for tensor in tree.all_tensors:
                module = tensor.module
                if tensor.name == "weight" and has_runtime_state(module):
                    runtime[module] = RuntimeChange(module, tree.record(tensor))

        configs = [config for config in tree.configs if hasattr(config, "__dict__")]
        return [
            AccelerateChange(tree.model),
            AttributesChange(tree, ("training", MARK)),  # adapters keep theirs
            *runtime.values(),
            KeptChange(tree),
            # Saving the model writes its dtype into its config.
            AttributesNow(configs, ["use_cache", "dtype"]),
        ]

    def apply(self, changes: list[Any], tree: ModelTree) -> None:
        """Keep layers trainable, and mark all modules.

        By the mark, copies that others make of the modules are told from modules of
        theirs.
        """
        for change in changes:
            if isinstance(change, RuntimeChange):
                change.keep_unpacked()
        for node in tree.modules:
            tree.records.mark(node.module)
            fields = vars(node.module)
            is_unset = fields.get(KERNEL, MISSING) is None
            if is_unset and has_runtime_state(node.module):
                fields[KERNEL] = "train"
