"""The edits of what training rewrites.

It rewrites train modes, caches, ``use_cache``, and fields of layers and of accelerate.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
from ..model.records import MARK, MemoryRef, ParameterRecord, Records
from ..model.tree import ModelTree, only_reading
from ..model.wrappers import is_sharded_tensor
from .base import (
    Attributes,
    Fields,
    ModuleAttributes,
    OriginalSlot,
    read_attributes,
    write_attributes,
)
from .journal import MISSING, Journal
from .kept import ForwardState

# Set by accelerate on the model that it is given: a forward under autocast, the forward
# before that, and a mark.
_ACCELERATE_ATTRIBUTES = ("forward", "_original_forward", "_is_accelerate_prepared")

# The most bytes of a tensor beside a weight that a record keeps alive, whatever device
# it is on.
_SMALL_BYTES = 1 << 16


class AcceleratePreparation(Attributes):
    """The attributes that ``Accelerator.prepare``, which a ``Trainer`` calls, sets.

    They are a forward under autocast, and a mark.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_ACCELERATE_ATTRIBUTES, [model])
        self.model = model

    def resume(self, tree: ModelTree, value: list[Fields]) -> None:
        """Write the attributes back; a ``forward`` that others replaced stays."""
        fields = value[0]
        wrapped = vars(self.model).get("_original_forward", MISSING)
        if wrapped is fields["_original_forward"]:
            fields = fields | read_attributes(self.model, ["forward"])

        write_attributes(self.model, fields)


def follow_train_mode(journal: Journal, tree: ModelTree) -> None:
    """Give modules outside the base the train mode of what contains them.

    They are adapters, wrappers and copies.
    """
    followers = [node for node in tree.nodes if node.path and not node.is_base]
    journal.save(Attributes(["training"], [node.module for node in followers]))
    modes: dict[str, bool] = {}
    for node in tree.nodes:  # from the outermost on
        if node.path and not node.is_base:
            node.module.training = modes[node.path.rpartition(".")[0]]
        modes[node.path] = node.module.training


class RuntimeState(OriginalSlot):
    """The fields that a bitsandbytes layer rewrites when it runs, as they were.

    ``Linear4bit`` fills in ``compute_dtype``, and on some CPUs repacks its weight in
    eval mode; ``Linear8bitLt`` moves its weight's statistics into ``state``, and writes
    there which columns held outliers. Small tensors are kept alive, and all statistics
    of 4 bits on the CPU, where repacking replaces them by an approximation. A weight
    that was replaced since (a merge) keeps its own state. A repacked weight holds the
    same nibbles in another order, so either layout is made from the other exactly.
    """

    def __init__(self, module: nn.Module, record: ParameterRecord) -> None:
        self.record = record
        self.dtype = record.dtype
        # of the weight in the trainable layout, in which it is sharded
        self.shape = record.shape
        self._module = weakref.ref(module)
        self.before = self.read()

    def read(self, tree: Any = None) -> tuple[Fields, dict[str, Fields]]:
        """Return the fields of the layer, and those of the owners of its statistics.

        Where the layer is gone, the fields are those from before.
        """
        module, weight = self._module(), self._weight()
        if module is None or weight is None:
            return self.before  # type: ignore[no-any-return]

        may_repack = weight.is_cpu and "state" not in vars(module)  # of 4 bits
        state = {}
        for owner in state_owners(module, weight):
            fields = owner.fields()
            if not may_repack:
                fields = {key: _weakly(value) for key, value in fields.items()}
            state[owner.name] = fields

        return read_attributes(module, RUNTIME_ATTRIBUTES), state

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
            self.give(weight, in_other_layout(weight, state))
            unpack_statistics(state)
            self.shape = weight.shape

        self._stop_repacking()

    def _stop_repacking(self) -> None:
        """Have the layer keep its weight's layout in eval mode too."""
        fields = vars(self._module())
        if fields.get(REPACKS):
            fields[REPACKS] = False

    def resume(self, tree: ModelTree, value: Any) -> None:
        """Put fields back, and the weight into their layout; ``undo`` does so with those from before.

        The weight's codes are neither held nor compared. A layer whose weight is sharded
        keeps the trainable layout: what it repacks is lost when the weight is gathered
        again, and its statistics would stay repacked.
        """
        module, weight = self._module(), self._weight()
        if module is None:
            return

        attributes, state = value
        write_attributes(module, attributes)
        is_sharded = weight is not None and is_sharded_tensor(weight)
        if is_sharded:
            self._stop_repacking()

        # another weight, as a merge makes one, keeps its own statistics
        if weight is None or not self.record.is_seen(weight):
            return

        quant_state = getattr(weight, "quant_state", None)
        was_repacked = is_repacked(state.get("quant_state", {}))
        if quant_state is not None and is_repacked(vars(quant_state)) != was_repacked:
            if is_sharded:
                return
            self.give(weight, in_other_layout(weight, quant_state))

        owners = state_owners(module, weight)
        # A layer may have moved a tensor from one of its owners to another.
        places = [owner.fields() for owner in owners]
        before = []
        for owner in owners:
            if owner.name in state:
                fields = _with_tensors(state[owner.name], owner.fields(), places)
                before.append((owner, fields))

        # All are written before any is removed: a field may be all that holds a tensor
        # of another.
        for owner, fields in before:
            vars(owner.holder).update(fields)

        for owner, fields in before:
            owner.replace(fields)

    def original(self, parameter: Tensor) -> Tensor:
        """Return the weight as it was before the layer repacked it.

        It is a copy, or the weight itself where the layer did not repack it.
        """
        return unpacked_copy(parameter, self._settle)

    def _settle(self, fields: Fields) -> None:
        """Replace the fields of copied 4-bit statistics by the recorded ones."""
        _, state = self.before
        if "quant_state" in state:
            values = _with_tensors(state["quant_state"], fields, [fields])
            fields.clear()
            fields.update(values)

    def original_quant_state(self, parameter: Tensor) -> Any:
        """Return the layer's 4-bit statistics from before repacking.

        They are for a weight that lost them when it was sharded.
        """
        module = self._module()
        if module is None:
            return None

        return unpacked_state(quant_state_of(module, parameter), self._settle)


def _weakly(value: Any) -> Any:
    """Return a value, held weakly if it is a large tensor.

    Large are 8-bit weights, and tensors of the size of a 4-bit weight's statistics.
    """
    if not isinstance(value, Tensor):
        return value

    if value.dtype != torch.int8 and value.nbytes <= _SMALL_BYTES:
        return value

    return MemoryRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def _with_tensors(before: Fields, fields: Fields, places: list[Fields]) -> Fields:
    """Return recorded fields, with a tensor again for each that is held weakly.

    It is the one of those in ``places`` that lies in that memory; where none does, the
    current value, which is in ``fields``.
    """
    tensors = {}
    for value in [value for place in places for value in place.values()]:
        if isinstance(value, Tensor):
            tensors[value.untyped_storage()._cdata] = value

    found = dict(before)
    for key, value in before.items():
        if isinstance(value, MemoryRef):
            found[key] = tensors.get(value.cdata, fields.get(key))
    return found


def runtime_states(tree: ModelTree) -> list[RuntimeState]:
    """Record the fields that layers rewrite when they run."""
    runtime = {}
    with only_reading():
        for tensor in tree.all_tensors:
            module = tensor.module
            if tensor.name == "weight" and has_runtime_state(module):
                runtime[module] = RuntimeState(module, tree.record(tensor))
    return [*runtime.values()]


class Statistics(NamedTuple):
    """The fields that layers rewrite when they run, as a model had them, for a record of it that is made later."""

    records: Records
    states: list[RuntimeState]

    @classmethod
    def of(cls, model: nn.Module) -> Statistics:
        """Record the fields of a model's layers."""
        tree = ModelTree(model)
        return cls(tree.records, runtime_states(tree))


def record(journal: Journal, tree: ModelTree) -> None:
    """Record what training rewrites, keep layers trainable, and mark all modules.

    Layers keep the layout, and the kernel, that has a backward. By the marks, copies
    that others make of the modules are told from modules of theirs.
    """
    runtime = runtime_states(tree)
    configs = [config for config in tree.configs if hasattr(config, "__dict__")]
    journal.save(
        # Saving the model writes its dtype into its config.
        Attributes(["use_cache", "dtype"], configs),
        ForwardState(tree),
        *reversed(runtime),
        ModuleAttributes(("training", MARK), tree),  # adapters keep theirs
        AcceleratePreparation(tree.model),
    )
    for state in runtime:
        state.keep_unpacked()
    for node in tree.modules:
        tree.records.mark(node.module)
        fields = vars(node.module)
        is_unset = fields.get(KERNEL, MISSING) is None
        if is_unset and has_runtime_state(node.module):
            fields[KERNEL] = "train"
