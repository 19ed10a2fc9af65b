"""A preparation in force, from its first edit to its last undo."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from torch import nn

from ..config import Precision, PrepareConfig
from ..edits.base import Edit, OriginalSlot
from ..edits.flags import hold, warn_of_saving
from ..edits.journal import Call, Journal, TrainedPolicy, Undoing
from ..edits.kept import lay_as_stored
from ..edits.storage import Copy, ParameterStorage
from ..edits.training import (
    AcceleratePreparation,
    RuntimeState,
    Statistics,
    follow_train_mode,
    runtime_states,
)
from ..errors import ConfigError, RestoreError, StateError, UnsupportedModelError
from ..model.checks import (
    refuse_flat,
    refuse_sharded_since,
    refuse_transposed_scales,
    refuse_unreadable,
    tree_of,
)
from ..model.pretrained import meta_model
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, only_reading
from ..model.wrappers import is_sharded_tensor, unwrap
from ..reports import LifecycleState, RestoreReport, StateDiff
from ..tensors.devices import random_state
from . import advice
from .casts import Casts
from .comparison import (
    Changes,
    changed_buffers,
    changes_of,
    diff,
    others_in,
)
from .copies import casts_by_others, copies_of, upcast_copies
from .finding import find_again
from .fingerprints import is_changed
from .plan import Plan, edits_of_adapters
from .process import (
    LARGE_BLOCK_BYTES,
    bar,
    devices_of,
    empty_cache,
    plain_mode,
    refuse_retyping_under_ddp,
    reshard,
)
from .state import ModelState, Original
from .training_on import warn_of_training_on

_in_force: weakref.WeakValueDictionary[int, Preparation] = weakref.WeakValueDictionary()
# held by what changes a model: of two threads that prepare one, the second finds it
# held
changing = threading.RLock()


class Preparation:
    """The preparation of one model. While it is in force, it is found by the model."""

    # The state before the first plan was applied, and the state that the last one left.
    before: Original
    after: ModelState | None = None

    def __init__(self, holder: object) -> None:
        # The model keeps the wrapper alive.
        self.holder = weakref.ref(holder)
        # The way back.
        self.journal = Journal()
        # The plans applied, one on top of the other.
        self.plans: list[Plan] = []
        # The findings of restores that failed, for the next one to report.
        self._undone = Undoing()

    @classmethod
    def recording(
        cls, model: nn.Module, statistics: Statistics | None = None
    ) -> Preparation:
        """Return the preparation that holds a model, or else one of nothing, which changes nothing and is not found.

        What PEFT's own function cast to float32 counts as what it was cast from.

        Args:
            model: The model.
            statistics: What its layers may have rewritten, as it was before they ran.
        """
        tree, found = cls.tree_of(model)
        if found is not None:
            return found

        if statistics is None:
            statistics = Statistics(tree.records, [])
        tree = ModelTree(model, statistics.records)
        unrecorded = []
        for node in tree.modules:
            if tree.records.at(node.module, "weight") is None:
                unrecorded.append(node)
        refuse_transposed_scales(unrecorded)
        states = {one.record: one for one in statistics.states}
        for one in runtime_states(tree):
            states.setdefault(one.record, one)
        remedy = "Record it before it is sharded: give a callback to the trainer when that is made"
        refuse_unreadable(tree, allow_sharded=False, remedy=remedy)
        with contextlib.suppress(ConfigError):  # the model is none of transformers
            meta = meta_model(getattr(unwrap(model)[0], "config", None))
            for tensor, dtype in casts_by_others(tree, meta):
                tree.record(tensor).dtype = dtype
        preparation = cls(model)
        preparation.before, preparation.after = Original(tree), ModelState(tree)
        preparation.journal.save(*states.values())
        config = PrepareConfig(precision=Precision.NONE, gradient_checkpointing=False)
        preparation.plans = [Plan(config, None, (), {}, 0, 0, 0, 0)]
        return preparation

    @property
    def plan(self) -> Plan:
        """The last plan applied."""
        return self.plans[-1]

    @property
    def statistics(self) -> Statistics:
        """The fields of layers as they were, for another record of the model."""
        return Statistics(self.before.records, self.journal.of(RuntimeState))

    @property
    def is_in_force(self) -> bool:
        """Whether it is found by the model, which it changed."""
        return id(self) in _in_force

    @property
    def upcasts_all(self) -> bool:
        """Whether half parameters were cast in their storage, or are upcast at use."""
        return any(p.config.precision.upcasts_all and p.casts for p in self.plans)

    @staticmethod
    def find(tree: ModelTree) -> Preparation | None:
        """Find the preparation that holds a model or a part of it.

        It is found whatever was wrapped around the model since.
        """
        for preparation, other in _all_in_force():
            if not other.owners.isdisjoint(tree.owners):
                return preparation
        return None

    @staticmethod
    def tree_of(model: nn.Module) -> tuple[ModelTree, Preparation | None]:
        """Begin an operation on a model that may be prepared.

        Returns:
            The walk of the model, as ``tree`` makes it where it is prepared, and the
                preparation, or ``None``.
        """
        tree = tree_of(model)
        preparation = Preparation.find(tree)
        return tree if preparation is None else preparation.tree(model), preparation

    def tree(self, model: nn.Module | None = None) -> ModelTree:
        """Walk the prepared model, or what was made of it.

        Every recorded parameter that is there is found again; what others left sharded
        or laid out otherwise after a forward is as it is stored.
        """
        model = self.before.model() if model is None else model
        assert model is not None  # the caller holds it
        tree = ModelTree(model, self.before.records)
        if reshard(tree):
            tree = ModelTree(model, self.before.records)
        lay_as_stored(tree)
        find_again(self.before, tree)
        return tree

    def apply(self, plan: Plan, tree: ModelTree) -> None:
        """Apply a plan on top of what is applied, all or nothing.

        The first edit takes hold of the model, so that it keeps its wrapper.

        Raises:
            EditError: An edit failed; the model is as it was before this call.
        """
        config = plan.config

        def edits() -> Iterator[Edit]:
            found = list(plan.edits)
            if not self.journal.slots:
                lay_as_stored(tree)
                found.insert(0, hold(self.holder()))
                self.before = Original(tree, audit=config.audit)
            if any(edit.action == "store" for edit in found):
                found.append(Edit("warn", ("",), warn_of_saving))
            for edit in bar(found, "prepare", is_shown=config.progress):
                yield edit
                # A large cast's freed blocks are returned to the device before the next
                # edit, so that the peak is the plan's.
                if config.empty_cache and edit.transient_bytes >= LARGE_BLOCK_BYTES:
                    empty_cache()

        def settle() -> None:
            if config.empty_cache:
                empty_cache()
            # No edit replaces a module or a parameter: the walk is still the model's.
            self.after = ModelState(tree)
            self.plans = [*self.plans, plan]
            _in_force[id(self)] = self

        self._apply(edits(), tree, "prepare", settle)

    def _apply(
        self,
        edits: Iterable[Edit],
        tree: ModelTree,
        doing: str,
        settle: Callable[[], None],
    ) -> None:
        """Apply edits and settle what is in force then, all or nothing."""
        plans, after, num_slots = self.plans, self.after, len(self.journal.slots)
        try:
            with plain_mode():
                self.journal.apply(edits, tree, doing, settle)
        except BaseException:
            # An interrupt may come after the last edit: then the preparation stands.
            if len(self.journal.slots) == num_slots:
                self.plans, self.after = plans, after
            if not self.journal.slots:
                self.release()
            raise

    def release(self) -> None:
        """Be found no more by the model, in which nothing is left to undo."""
        _in_force.pop(id(self), None)

    def adopt(self, peft_model: nn.Module) -> None:
        """Give new adapters their dtype, and norms of their blocks their arithmetic.

        It is all or nothing, and the plan grows by it. The attributes that accelerate
        sets on the model with the adapters are recorded, and undone by a restore.
        """
        # Of the base only forwards of modules are replaced: no parameter has to be
        # found again.
        model = cast("nn.Module", self.before.model())
        tree = ModelTree(model, self.before.records)
        _refuse_to_adopt(peft_model, tree)
        with only_reading():
            casts = Casts(tree, self.plan.config, tree.quantization)
            # Those of prompt learning lie outside of the prepared model.
            whole = ModelTree(peft_model, self.before.records)
            around = Casts(whole, self.plan.config, tree.quantization)
            edits = edits_of_adapters(casts, around)
            found = advice.of_adapters(casts)
            new = [warning for warning in found if warning not in self.plan.warnings]

        def settle() -> None:
            taken = [one.model for one in self.journal.of(AcceleratePreparation)]
            if all(model is not peft_model for model in taken):
                self.journal.save(AcceleratePreparation(peft_model))
            computes = [edit for edit in edits if edit.action == "compute"]
            fqns = {fqn for edit in computes for fqn in edit.fqns}
            assert self.after is not None
            self.after = self.after.reread(tree, fqns)
            self.plans = [*self.plans[:-1], self.plan.grown_by(edits, around, new)]

        self._apply(edits, tree, "adopt", settle)
        for warning in new:
            warnings.warn(warning, UserWarning, stacklevel=3)

    def copies(self, tree: ModelTree) -> list[Copy]:
        """Return the slots of what others cast, and of copies of base modules.

        They are not in the journal: what others do is read when it has to be undone.
        """
        ours = {one.record for one in self.journal.of(OriginalSlot)}
        return copies_of(self.before, tree, ours)

    def changes(self, tree: ModelTree) -> Changes:
        """Return the parameters of the base that a restore would not give as they were."""
        with only_reading():
            return changes_of(self.before, tree, self.journal.of(OriginalSlot))

    def verify(self) -> StateDiff:
        """Compare the live model with what the preparation left."""
        with plain_mode():
            tree = self.tree()
            changes = self.changes(tree)
            for fqn in changes.replaced.keys() - self.before.base.keys():
                del changes.replaced[fqn]
            assert self.after is not None
            return diff(self.after, tree, changes)

    def suspend(self, way_back: Journal, *, is_held: bool) -> None:
        """Put back the state from before for a while, all or nothing.

        Args:
            way_back: The journal that leads back, at every moment.
            is_held: Whether the model keeps the wrapper alive meanwhile.
        """
        with plain_mode():
            tree = self.tree()
            refuse_sharded_since(tree, changes_dtypes=self.upcasts_all)
            copies = self.copies(tree)
            refuse_retyping_under_ddp([*self.journal.of(OriginalSlot), *copies])
            for tensor in tree.tensors:
                if id(tensor.parameter) not in tree.known:
                    # Copies have no marks while suspended: a record tells them from
                    # those made meanwhile.
                    tree.record(tensor)
            way_back.save(Call(random_state(devices_of(tree))))
            if self.upcasts_all:
                way_back.save(Call(lambda: upcast_copies(self.before, self.tree())))
            self.journal.suspend(tree, way_back, copies)
            # What was put into the base follows the train mode of the module that it
            # sits in.
            follow_train_mode(way_back, tree)
            if is_held:
                hold(self.holder()).apply(way_back, tree)

    def resume(self, way_back: Journal) -> None:
        """End a suspension.

        Slots that failed stay in ``way_back``, and another call undoes them.
        """
        with plain_mode():
            way_back.undo_or_raise(self.tree())

    def begin_restore(self, trained: TrainedPolicy) -> Callable[[], RestoreReport]:
        """Read the prepared model, and return the call that restores it.

        Args:
            trained: The policy for values that changed while they were stored upcast.

        Returns:
            The call, which may be made again after an interrupt.

        Raises:
            ConfigError: The originals that are to be put back are not held.
        """
        if trained == "discard":
            keeps = any(plan.config.keep_originals for plan in self.plans)
            stored = self.journal.of(ParameterStorage)
            if not keeps or any(one.kept is None for one in stored):
                raise ConfigError(
                    "restore(trained='discard') needs a preparation with keep_originals=True"
                )
        with plain_mode():
            tree = self.tree()
            refuse_flat(tree)
            changes = self.changes(tree)
            changed = {*changes.trained, *changes.drifted}
            # The slot of an upcast parameter reports it: the slot may hold the original.
            upcast = {}
            for one in self.journal.of(ParameterStorage):
                if one.cast_parameter() is not None:
                    upcast[one.record.fqn] = one.record
            # A copy whose undo failed is still in the journal.
            copies = [*self.journal.of(Copy), *self.copies(tree)]
            with only_reading():
                self._undone.turned_on += self.before.turned_on(tree)
        # It shares the lists of `_undone`: what this call finds is there for the next one.
        undoing = dataclasses.replace(self._undone, policy=trained, changed=changed)
        ours = {one.record for one in self.journal.of(OriginalSlot)}

        def is_unreported(fqn: str) -> bool:
            """Return whether a changed parameter is still to be reported.

            One without a slot is. One whose slot did not report it is if its value still
            differs from the recorded one: a slot that was made after the change took the
            changed value for the original.
            """
            record = upcast.get(fqn)
            if record is None:
                return True
            is_reported = fqn in (*undoing.trained, *undoing.replaced)
            parameter = record.live()
            if is_reported or parameter is None:
                return False
            return bool(is_changed(self.before.samples, record, parameter))

        def restore() -> RestoreReport:
            with plain_mode():
                # What cannot be undone stays in the journal, for another restore.
                self.journal.save(*[c for c in copies if c not in self.journal.slots])
                self._undo(tree, undoing)
                changes.trained = [*filter(is_unreported, changes.trained)]
                changes.drifted = [*filter(is_unreported, changes.drifted)]
                report = self._report(tree, undoing, changes, copies, ours)
                self.release()
                if self.plan.config.empty_cache:
                    empty_cache()
            warn_of_training_on(tree.model, undoing.turned_on)
            return report

        return restore

    def _undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Undo every edit; raise `RestoreError` for those that cannot be undone."""
        is_shown = self.plan.config.progress
        show = functools.partial(bar, what="restore", is_shown=is_shown)
        failures = {}
        for slot, error in self.journal.undo(tree, undoing, since=1, show=show):
            record = getattr(slot, "record", None)
            failures[type(slot).__name__ if record is None else record.fqn] = error
        if failures:
            named = [f"{name}: {error}" for name, error in failures.items()]
            raise RestoreError(
                f"not restored: {'; '.join(named)}. Everything else was; "
                "restore(trained='keep') or restore(trained='discard') settles what was "
                "trained",
                failures=failures,
            )
        # The hold on the wrapper is what is left.
        self.journal.undo_or_raise(tree)

    def _report(
        self,
        tree: ModelTree,
        undoing: Undoing,
        changes: Changes,
        copies: list[Copy],
        ours: set[ParameterRecord],
    ) -> RestoreReport:
        """Compare the model, of which all was undone, with what was there before."""
        kept_dtype = undoing.kept_dtype
        with only_reading():
            replaced, foreign = others_in(self.before, tree, kept_dtype)
            buffers = changed_buffers(self.before, tree)
        trained = []
        put_back = list(undoing.put_back)
        for copy in copies:
            if copy.is_resized:
                continue
            if not copy.is_base:
                trained.append(copy.record.fqn)
            elif copy.record not in ours:
                put_back.append(copy.record.fqn)  # cast by others
        trained += [*changes.trained, *undoing.trained, *buffers]
        replaced += [fqn for fqn in changes.replaced if fqn in self.before.base]
        replaced += [*changes.drifted, *undoing.replaced]

        kept = [record.fqn for record in kept_dtype]
        for tensor in tree.tensors:  # what is sharded keeps its dtype, in copies too
            sharded = tree.sharded.get(id(tensor.parameter))
            dtype = None
            if sharded is not None:
                dtype = sharded.dtype
            elif is_sharded_tensor(tensor.parameter):
                dtype = tree.records.dtype_before(tensor.module, tensor.name)
            if dtype not in (None, tensor.parameter.dtype):
                kept.append(tensor.fqn)

        return RestoreReport(
            trained=_once(trained),
            replaced=_once(replaced),
            foreign=_once(foreign),
            not_compared=_once(changes.not_compared),
            put_back=_once(put_back),
            kept_dtype=_once(kept),
        )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, each at its first place."""
    return tuple(dict.fromkeys(names))


def _refuse_to_adopt(peft_model: nn.Module, tree: ModelTree) -> None:
    """Raise for what was not made of the prepared model, or has no adapter."""
    inside = peft_model.modules() if isinstance(peft_model, nn.Module) else ()
    is_made_of = any(id(module) in tree.owners for module in inside)
    # Those of prompt learning lie outside of the prepared model, in what was made of
    # it.
    if is_made_of and (tree.adapter_ids or ModelTree(peft_model).adapter_ids):
        return
    what = "no adapter in this" if is_made_of else "another"
    raise UnsupportedModelError(
        f"adopt() expects a model with adapters that was made of the prepared "
        f"{type(tree.model).__name__}, such as get_peft_model(prepared.model, ...), "
        f"found {what} {type(peft_model).__name__}"
    )


def _all_in_force() -> list[tuple[Preparation, ModelTree]]:
    """Return the preparations in force, each with a walk of its model."""
    # Listed in one step: other threads may begin and end some meanwhile.
    found = [reference() for reference in _in_force.valuerefs()]
    models = [(one, one.before.model()) for one in found if one is not None]
    return [(one, ModelTree(model)) for one, model in models if model is not None]


def refuse_held(tree: ModelTree, but: Preparation | None = None) -> None:
    """Raise for a model of which another preparation than ``but`` holds a part.

    Such a part is a module, or a parameter that two models share.
    """
    for preparation, other in _all_in_force():
        shared = [one.path for one in tree.tensors if id(one.parameter) in other.ids]
        if preparation is but or not shared:
            continue
        what = ", or a part of it,"
        if other.owners.isdisjoint(tree.owners):
            name = type(other.model).__name__
            what = f" shares its {shared[0]} with a {name} that"
        raise StateError(
            f"this {type(tree.model).__name__}{what} is prepared already; restore() "
            "that first, or find its KbitPreparedModel with kbitwrap.prepared_of(model)",
            state=getattr(preparation.holder(), "state", None),
            expected=(LifecycleState.NEW, LifecycleState.RESTORED),
        )
