"""The edits that record what training rewrites: train modes, caches, ``use_cache``, layers' and accelerate's fields."""

from __future__ import annotations

import itertools
import operator
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..model.quantization import (
    KERNEL,
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
from ..model.records import MARK, MemoryRef, ParameterRecord
from ..model.tree import ModelTree, only_reading
from .base import (
    AttributesChange,
    AttributesNow,
    EditBase,
    HeldOriginal,
    Together,
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
    """A model as it was before a ``Trainer`` or ``Accelerator.prepare`` gave it a forward under autocast and a mark."""

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
    """Give modules outside the base (adapters, wrappers, copies) the train mode of the module that contains them."""

    def capture(self, tree: ModelTree) -> AttributesNow:
        """Record their modes, each module with the one to set."""
        modes = {"": tree.model.training}
        followers: dict[nn.Module, bool] = {}
        for node in tree.nodes:
            modes[node.path] = node.module.training
            if node.path and not node.is_base:
                container = node.path.rpartition(".")[0]
                modes[node.path] = followers[node.module] = modes[container]
        return AttributesNow(followers, ["training"])

    def apply(self, change: AttributesNow) -> None:
        """Set the modes."""
        for module, training in dict(change.holders).items():
            module.training = training


class RuntimeChange(HeldOriginal):
    """The fields that a bitsandbytes layer rewrites on itself when it runs, as they were.

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
        self._module = weakref.ref(module)
        fields = vars(module)
        self._attributes = {
            name: fields[name] for name in RUNTIME_ATTRIBUTES if name in fields
        }
        may_repack = weight.is_cpu and "state" not in fields  # of 4 bits
        self._state = {}
        for name, owner, keys in state_owners(module, weight):
            held = vars(owner)
            found = (
                held.copy()
                if keys is None
                else {key: held.get(key, MISSING) for key in keys}
            )
            self._state[name] = (
                found
                if may_repack
                else {key: _weakly(value) for key, value in found.items()}
            )

    def keep_unpacked(self) -> None:
        """Keep the trainable layout in eval mode too: the kernel for the other has no backward."""
        module = self._module()
        weight = None if module is None else module._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        if weight is not None and state is not None and is_repacked(vars(state)):
            self.write(weight, in_other_layout(weight, state))
            unpack_statistics(state)
        if module is not None and vars(module).get(REPACKS):
            vars(module)[REPACKS] = False

    def undo(self, tree: ModelTree) -> None:
        """Put the recorded fields back."""
        module = self._module()
        if module is None:
            return
        vars(module).update(self._attributes)
        weight = module._parameters.get("weight")
        all_owners = [] if weight is None else state_owners(module, weight)
        owners = [
            o
            for o in all_owners
            if o[0] in self._state and not self._is_as_recorded(*o)
        ]
        if weight is None or not owners or not self.record.is_seen(weight):
            return
        quant_state = getattr(weight, "quant_state", None)
        was_repacked = is_repacked(self._state.get("quant_state", {}))
        if quant_state is not None and is_repacked(vars(quant_state)) != was_repacked:
            self.write(weight, in_other_layout(weight, quant_state))
        # All values are looked up, and tensors written, before any is removed: a field
        # may be all that holds one.
        places = [vars(owner) for _, owner, _ in all_owners]
        values = [
            _values(self._state[name], vars(owner), places) for name, owner, _ in owners
        ]
        for (_, owner, _), value in zip(owners, values, strict=True):
            vars(owner).update(
                {
                    key: one
                    for key, one in value.items()
                    if isinstance(one, torch.Tensor)
                }
            )
        for (_, owner, keys), value in zip(owners, values, strict=True):
            owner.__dict__ = _replaced(vars(owner), value, keys)

    def _is_as_recorded(
        self, name: str, owner: Any, keys: tuple[str, ...] | None
    ) -> bool:
        recorded, fields = self._state[name], vars(owner)
        is_same = all(
            map(
                operator.is_,
                map(fields.get, recorded, itertools.repeat(MISSING)),
                recorded.values(),
            )
        )
        return is_same and (keys is not None or len(fields) == len(recorded))

    def now(self, tree: ModelTree) -> RuntimeChange:
        """Record the layer as it is now; if it is gone, return this record."""
        module = self._module()
        is_gone = module is None or module._parameters.get("weight") is None
        return self if module is None or is_gone else RuntimeChange(module, self.record)

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the weight as it was before the layer repacked it; the weight itself where the layer did not."""
        return unpacked_copy(parameter, self._settle)

    def _settle(self, fields: dict[str, Any]) -> None:
        """Replace the fields of copied 4-bit statistics by the recorded ones, where there are any."""
        held = self._state.get("quant_state")
        if held is not None:
            values = _values(held, fields, [fields])
            fields.clear()
            fields.update(_replaced({}, values, None))

    def original_quant_state(self, parameter: torch.Tensor) -> Any:
        """The layer's 4-bit statistics from before repacking, for a weight that lost them when it was sharded."""
        module = self._module()
        return (
            None
            if module is None
            else unpacked_state(quant_state_of(module, parameter), self._settle)
        )


class _HeldWeakly:
    """A tensor that is found among others by its memory, so that a record keeps no weight alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory = MemoryRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._shape = tensor.shape

    def find(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """The tensor, if it is one of these."""
        key, shape = self._memory.cdata, self._shape
        return next(
            (
                t
                for t in tensors
                if t.untyped_storage()._cdata == key and t.shape == shape
            ),
            None,
        )


def _weakly(value: Any) -> Any:
    """A value, held weakly if it is an 8-bit weight, or a tensor that is as large as the statistics of a 4-bit one."""
    if not isinstance(value, torch.Tensor):
        return value
    is_large = value.dtype == torch.int8 or value.nbytes > _SMALL_BYTES
    return _HeldWeakly(value) if is_large else value


def _values(
    recorded: dict[str, Any], fields: dict[str, Any], places: list[dict[str, Any]]
) -> dict[str, Any]:
    """The recorded values, with the current one for a tensor that is gone."""
    values = {}
    for key, value in recorded.items():
        if isinstance(value, _HeldWeakly):
            found = value.find(
                [
                    v
                    for place in places
                    for v in place.values()
                    if isinstance(v, torch.Tensor)
                ]
            )
            value = fields.get(key) if found is None else found
        values[key] = value
    return values


def _replaced(
    fields: dict[str, Any], values: dict[str, Any], keys: tuple[str, ...] | None
) -> dict[str, Any]:
    """The fields, with all, or those named in ``keys``, replaced by these values, in their order."""
    others = (
        {}
        if keys is None
        else {key: value for key, value in fields.items() if key not in keys}
    )
    return others | {
        key: value for key, value in values.items() if value is not MISSING
    }


@dataclass(frozen=True, kw_only=True)
class Record(EditBase):
    """Record what training rewrites, and keep layers in the layout, and with the kernel, that can be trained."""

    # those that rewrite their own fields
    layers: tuple[weakref.ref[nn.Module], ...] = field(default=(), repr=False)

    def capture(self, tree: ModelTree) -> Together:
        """Record all of it, as one change."""
        layers = {id(layer) for ref in self.layers if (layer := ref()) is not None}
        weights = [
            t for t in tree.all_tensors if t.name == "weight" and id(t.module) in layers
        ]
        with only_reading():
            runtime = {
                id(t.module): RuntimeChange(t.module, tree.record(t)) for t in weights
            }
        return Together(
            tree.records,
            AccelerateChange(tree.model),
            AttributesChange(tree, ("training", MARK)),  # adapters keep theirs
            *runtime.values(),
            KeptChange(tree),
            # Saving the model writes its dtype into its config.
            AttributesNow(
                [config for config in tree.configs if hasattr(config, "__dict__")],
                ["use_cache", "dtype"],
            ),
        )

    def apply(self, change: Together) -> None:
        """Keep layers in the layout, and with the kernel, that can be trained."""
        for ref in self.layers:
            fields = vars(ref())
            if fields.get(KERNEL, MISSING) is None:
                fields[KERNEL] = "train"
        for part in change.parts():
            if isinstance(part, RuntimeChange):
                part.keep_unpacked()
            elif isinstance(part, AttributesChange):
                for _, module in part.index.live():
                    change.records.mark(module)
