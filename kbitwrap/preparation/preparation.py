"""A preparation in force: the journal, the record of what was there before, and of what was left."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, cast

from torch import nn
from tqdm.auto import tqdm

from ..config import Precision, PrepareConfig
from ..edits.base import Anchor, EditBase, HeldOriginal, TrainedPolicy
from ..edits.flags import Hold
from ..edits.journal import Call, Edit, Journal
from ..edits.kept import KeptChange, lay_as_stored
from ..edits.storage import CopyChange, StorageChange, TrainedError
from ..edits.training import AccelerateChange, FollowTrainMode
from ..errors import (
    ConfigError,
    EditError,
    RestoreError,
    StateError,
    UnsupportedModelError,
)
from ..model.checks import refuse_sharded_since, tree_of
from ..model.records import ParameterRecord, TensorRef
from ..model.tree import ModelTree, NamedTensor, only_reading
from ..reports import LifecycleState, RestoreReport, StateDiff
from ..tensors.devices import random_state
from .engines import notes_on
from .moments import Moment
from .original import Changes, Original, read_moment
from .plan import Plan
from .planner import Planner
from .prepared_state import PreparedState
from .process import (
    LARGE_BLOCK_BYTES,
    devices_of,
    empty_cache,
    plain_mode,
    refuse_retyping_under_ddp,
    reshard,
)
from .training_on import warn_of_training_on

_logger = logging.getLogger(__name__)
_in_force: weakref.WeakValueDictionary[int, Preparation] = weakref.WeakValueDictionary()
# held by what changes a model: of two threads that prepare one, the second finds it
# held
changing = threading.RLock()


class Preparation:
    """The preparation of one model, from its first edit to its last undo; found again by the model."""

    plan: Plan  # the last one applied
    original: Original  # what was there before the first
    left: PreparedState  # what the last one left
    after: Moment  # at its end

    def __init__(self, holder: object) -> None:
        self.holder = weakref.ref(holder)  # the wrapper, which the model keeps alive
        self.journal = Journal()
        # of the plans applied, one on top of the other
        self.precisions: set[Precision] = set()
        self._upcasts_all = False
        self._keeps_originals = False
        self._turned_on: list[TensorRef] = []
        self._put_back: list[str] = []

    @staticmethod
    def find(tree: ModelTree) -> Preparation | None:
        """The preparation that holds a model or a part of it, whatever was wrapped around the model since."""
        for preparation in _all_in_force():
            model = preparation.original.model()
            if model is not None and not ModelTree(model).owners.isdisjoint(
                tree.owners
            ):
                return preparation
        return None

    @staticmethod
    def tree_of(model: nn.Module) -> tuple[ModelTree, Preparation | None]:
        """Begin an operation on a model that may be prepared: its tree, as `tree` makes it where it is."""
        tree = tree_of(model)
        preparation = Preparation.find(tree)
        return tree if preparation is None else preparation.tree(model), preparation

    def tree(self, model: nn.Module | None = None) -> ModelTree:
        """The prepared model now, or what was made of it, with every recorded parameter that is there found again."""
        model = self.original.model() if model is None else model
        assert model is not None
        tree = ModelTree(model, self.original.records)
        if reshard(tree):
            tree = ModelTree(model, self.original.records)
        lay_as_stored(tree)
        self.original.follow(tree)
        return tree

    def apply(self, plan: Plan, tree: ModelTree) -> None:
        """Apply a plan on top of what is applied, all or nothing, and take hold of the model."""
        before, start = dict(vars(self)), len(self.journal.changes)
        try:
            with plain_mode():
                edits: list[EditBase] = list(plan.edits)
                if not self.journal.changes:
                    lay_as_stored(tree)
                    edits.insert(0, Hold("hold", ("",), anchor=Anchor(self.holder())))
                    self.original = Original(tree, audit=plan.config.audit)
                self.journal.apply(
                    _emptying_cache(
                        _bar(edits, "prepare", plan.config), plan.config.empty_cache
                    ),
                    tree,
                )
                if plan.config.empty_cache:
                    empty_cache()
                tree = tree.again()
                self.left, self.after = PreparedState(tree), read_moment(tree)
                self.plan = plan
                self.precisions = {*self.precisions, plan.config.precision}
                self._upcasts_all |= plan.config.precision.upcasts_all and plan.casts
                self._keeps_originals |= plan.config.keep_originals
                _in_force[id(self)] = self
        except BaseException as error:
            with plain_mode():
                self.journal.roll_back(start, tree)
            vars(self).update(before)
            if not self.journal.changes:
                _in_force.pop(id(self), None)
            if isinstance(error, EditError) or not isinstance(error, Exception):
                raise
            raise EditError(
                f"could not prepare: {error}; the model is as it was", edit=None
            ) from error

    def adopt(self, peft_model: nn.Module) -> None:
        """Compute norms of blocks with new adapters as the precision says, all or nothing; the plan grows by it."""
        # Only forwards of modules are replaced: no parameter has to be found again.
        tree = ModelTree(
            cast("nn.Module", self.original.model()), self.original.records
        )
        inside = peft_model.modules() if isinstance(peft_model, nn.Module) else ()
        if not any(id(module) in tree.owners for module in inside):
            name = type(tree.model).__name__
            raise UnsupportedModelError(
                f"adopt() expects what was made of the prepared {name}, such as "
                f"get_peft_model(prepared.model, ...), found another {type(peft_model).__name__}"
            )
        # Those of prompt learning lie outside of the prepared model, in what was made
        # of it.
        if not (tree.adapter_ids or ModelTree(peft_model).adapter_ids):
            raise UnsupportedModelError(
                f"adopt() expects a model with adapters, found no adapter in this {type(peft_model).__name__}; make "
                "them first, with get_peft_model"
            )
        with only_reading():
            planner, told = (
                Planner(tree, self.plan.config, tree.quantization),
                self.plan.warnings,
            )
            computes = [*planner.compute_norms(), *planner.compute_head()]
            new = [
                warning
                for warning in planner.advice.of_adapters()
                if warning not in told
            ]
        before, start = dict(vars(self)), len(self.journal.changes)
        try:
            self.journal.apply(computes, tree)
            if all(
                change.model() is not peft_model
                for change in self.journal.parts(AccelerateChange)
            ):
                self.journal.record(AccelerateChange(peft_model))
            edited = {
                m
                for edit in computes
                for ref in edit.modules
                if (m := ref()) is not None
            }
            self.left = self.left.reread(tree, edited)
            if computes or new:
                self.plan = dataclasses.replace(
                    self.plan,
                    edits=(*self.plan.edits, *computes),
                    warnings=(*told, *new),
                )
        except BaseException:
            self.journal.roll_back(start, tree)
            vars(self).update(before)
            raise
        for warning in new:
            warnings.warn(warning, UserWarning, stacklevel=3)

    def explain(self, error: BaseException | None) -> None:
        """Add to an error of torch about dtypes, as notes, what is known of its cause, each once."""
        is_suspended = getattr(self.holder(), "state", None) is LifecycleState.SUSPENDED
        notes = notes_on(error, self.plan.config.precision, is_suspended=is_suspended)
        if type(error) is RuntimeError and "dtype" in str(error):
            tree = self.tree()
            planner = Planner(tree, self.plan.config, tree.quantization)
            notes += planner.advice.of_adapters(is_suspended=is_suspended)
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                # before Python 3.11 errors have no notes
                getattr(error, "add_note", _logger.error)(note)

    def copies(self, tree: ModelTree) -> list[CopyChange]:
        """The changes that take back casts by others, and float32 copies that PEFT made of base modules."""
        return self.original.copies(
            tree, [held.record for held in self.journal.parts(HeldOriginal)]
        )

    def _half_copies(self, tree: ModelTree) -> list[NamedTensor]:
        return self.original.half_copies(tree) if self._upcasts_all else []

    def _upcast_copies(self, known: Sequence[ParameterRecord]) -> None:
        """Store copies of base modules in float32 that were made since, in half: as those made while prepared are."""
        for tensor in self._half_copies(self.tree()):
            if not any(record.is_seen(tensor.parameter) for record in known):
                self.original.records.mark(tensor.module).dtypes[tensor.name] = (
                    tensor.parameter.dtype
                )
                tensor.parameter.data = tensor.parameter.data.float()

    def changes(self, tree: ModelTree) -> Changes:
        """The parameters of the base that are not what a restore would have to give."""
        with only_reading():
            return self.original.changes(tree, self.journal.parts(HeldOriginal))

    def verify(self) -> StateDiff:
        """Compare the live model with what the preparation left."""
        with plain_mode():
            tree = self.tree()
            return self.left.diff(tree, self.changes(tree).drifted)

    def undoing(self, trained: TrainedPolicy) -> Callable[[], RestoreReport]:
        """Read the model, and return the call, to be made again after a failure, that undoes all and reports it."""
        has_originals = all(
            one.kept is not None for one in self.journal.parts(StorageChange)
        )
        if trained == "discard" and not (self._keeps_originals and has_originals):
            raise ConfigError(
                "restore(trained='discard') needs a preparation with keep_originals=True"
            )
        with plain_mode():
            tree = self.tree()
            refuse_sharded_since(tree, changes_dtypes=self._upcasts_all)
            changes = self.changes(tree) if trained == "error" else Changes()
            with only_reading():
                # some stayed where they were an error
                copies = [*self.journal.parts(CopyChange), *self.copies(tree)]
                training = [t for t in tree.tensors if t.parameter.requires_grad]
                trainable = {
                    tree.known.get(id(t.parameter), tree.records.at(t.module, t.name))
                    for t in training
                }
                turned_on = self._turned_on + self.original.turned_on(tree)
        held, rewritten = (
            self.journal.parts(HeldOriginal),
            self.journal.parts(KeptChange),
        )
        changed = {*changes.trained, *changes.drifted}

        def undo() -> RestoreReport:
            with plain_mode():
                self._turned_on = turned_on
                for one in held:
                    one.decide(trained)
                for copy in copies:
                    copy.decide(
                        "keep" if copy.is_base and copy.fqn not in changed else trained
                    )
                self.journal.record(
                    *[copy for copy in copies if copy not in self.journal.changes]
                )
                failures = self._undo(tree)
                for one in (*held, *copies):
                    one.decide("keep")
                self._put_back += [name for one in rewritten for name in one.put_back]
                if failures:
                    named = [
                        str(e) if isinstance(e, TrainedError) else f"{name}: {e}"
                        for name, e in failures.items()
                    ]
                    raise RestoreError(
                        f"not restored: {'; '.join(named)}. Everything else was; restore(trained='keep') or "
                        "restore(trained='discard') settles what was trained",
                        failures=failures,
                    )
                self.journal.resume(tree)
                report = self._report(held, copies, trainable)
                _in_force.pop(id(self), None)
                if self.plan.config.empty_cache:
                    empty_cache()
            return report

        return undo

    def _undo(self, tree: ModelTree) -> dict[str, Exception]:
        """Undo every change but the wrapper's hold on the model, and return the failures by name."""
        failures: dict[str, Exception] = {}
        for change, error in self.journal.undo(
            tree, since=1, show=lambda found: _bar(found, "restore", self.plan.config)
        ):
            if not isinstance(error, Exception):
                raise error
            if isinstance(error, TrainedError):
                failures |= {fqn: TrainedError([fqn]) for fqn in error.fqns}
            else:
                failures[getattr(change, "fqn", type(change).__name__)] = error
        return failures

    def _report(
        self,
        held: Sequence[HeldOriginal],
        copies: Sequence[CopyChange],
        trainable: Collection[ParameterRecord | None],
    ) -> RestoreReport:
        """Compare the model, of which all was undone, with the record of what was there before."""
        tree = self.tree()
        with only_reading():
            changes = self.original.changes(tree, trainable=trainable)
            replaced, foreign = self.original.added(tree)
            buffers = self.original.changed_buffers(tree)
        trained = [
            copy.fqn for copy in copies if not (copy.is_base or copy.is_resized)
        ] + changes.trained
        trained += [
            one.fqn for one in held if one.was_trained and one.record in trainable
        ]
        trained += buffers
        replaced += [*self.original.gone(changes), *changes.drifted]
        replaced += [
            one.fqn for one in held if one.was_altered and one.record not in trainable
        ]
        ours = {one.record for one in held}
        cast_by_others = [
            copy
            for copy in copies
            if copy.is_base and not copy.is_resized and copy.record not in ours
        ]
        put_back = self._put_back + [copy.fqn for copy in cast_by_others]
        lists = trained, replaced, foreign, changes.not_compared, put_back
        return RestoreReport(*(tuple(dict.fromkeys(names)) for names in lists))

    def warn_of_training_on(self) -> None:
        """Say after a restore, to those who train on, that the base under an adapter is trained too."""
        model = self.original.model()
        if model is not None:
            warn_of_training_on(model, self._turned_on)

    def suspend(self, way_back: Journal, *, hold: bool) -> None:
        """Put back the state from before for a while, all or nothing; ``hold`` keeps the wrapper alive meanwhile."""
        with plain_mode():
            tree = self.tree()
            refuse_sharded_since(tree, changes_dtypes=self._upcasts_all)
            copies = self.copies(tree)
            refuse_retyping_under_ddp([*self.journal.parts(HeldOriginal), *copies])
            for tensor in tree.tensors:
                if id(tensor.parameter) not in tree.known:
                    tree.record(tensor)  # copies lose their marks until it is resumed
            known = [tree.record(tensor) for tensor in self._half_copies(tree)]
            way_back.record(
                Call(random_state(devices_of(tree))),
                Call(functools.partial(self._upcast_copies, known)),
            )
            self.journal.suspend(tree, way_back, copies)
            # What was put into the base follows the train mode of the module that it
            # sits in.
            edits: list[Edit] = [FollowTrainMode("record", ("",))]
            if hold:
                edits.append(Hold("hold", ("",), anchor=Anchor(self.holder())))
            way_back.apply(edits, tree)

    def resume(self, way_back: Journal) -> None:
        """End a suspension; what failed stays in ``way_back``, and this may be called again."""
        with plain_mode():
            way_back.resume(self.tree())


def _all_in_force() -> list[Preparation]:
    """The preparations in force, listed in one step: other threads may begin and end some meanwhile."""
    found = [reference() for reference in _in_force.valuerefs()]
    return [preparation for preparation in found if preparation is not None]


def explain(error: BaseException) -> None:
    """Add to an error what any preparation that is in force knows of its cause."""
    for preparation in _all_in_force():
        preparation.explain(error)


def refuse_held(tree: ModelTree, but: Preparation | None = None) -> None:
    """Raise for a model of which another preparation than ``but`` holds a part: a module's, or a shared parameter."""
    for preparation in _all_in_force():
        model = preparation.original.model()
        if model is None or preparation is but:
            continue
        name, paths = (
            type(tree.model).__name__,
            {id(t.parameter): t.path for t in tree.tensors},
        )
        other = ModelTree(model)
        shared = [
            paths[id(t.parameter)] for t in other.tensors if id(t.parameter) in paths
        ]
        is_part = not other.owners.isdisjoint(tree.owners)
        if is_part or shared:
            what = (
                ", or a part of it,"
                if is_part
                else f" shares its {shared[0]} with a {type(model).__name__} that"
            )
            raise StateError(
                f"this {name}{what} is prepared already; restore() that first, or find its wrapper with "
                "kbitwrap.prepared_of(model)",
                state=getattr(preparation.holder(), "state", None),
                expected=(LifecycleState.NEW, LifecycleState.RESTORED),
            )


def _bar(items: Sequence[Any], what: str, config: PrepareConfig) -> Iterable[Any]:
    """The items, with a progress bar on standard error if that was asked for."""
    return (
        cast("Iterable[Any]", tqdm(items, desc=what, unit="edit", leave=False))
        if config.progress
        else items
    )


def _emptying_cache(edits: Iterable[EditBase], is_wanted: bool) -> Iterator[Any]:
    """The edits; when the next one is asked for, a large cast's freed blocks are returned to the device first."""
    for edit in edits:
        yield edit
        if is_wanted and edit.transient_bytes >= LARGE_BLOCK_BYTES:
            empty_cache()
