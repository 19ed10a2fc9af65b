"""A preparation in force.

It holds the journal, the record of what was there before, and that of what was left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from ..config import Precision
from ..edits.base import Anchor, HeldOriginal
from ..edits.flags import Hold, WarnOfSaving
from ..edits.journal import Call, Edit, Journal
from ..edits.kept import lay_as_stored
from ..edits.storage import CopyChange, Store
from ..edits.training import AccelerateChange, FollowTrainMode
from ..errors import EditError, StateError, UnsupportedModelError
from ..model.checks import refuse_sharded_since, tree_of
from ..model.records import ParameterRecord, TensorRef
from ..model.tree import ModelTree, only_reading
from ..reports import LifecycleState, StateDiff
from ..tensors.devices import random_state
from . import advice
from .casts import Casts
from .comparison import Changes, changes_of
from .copies import Copies, half_copies
from .engines import notes_on
from .finding import find_again
from .moments import Moment, read_moment
from .original import Original
from .plan import Plan
from .planner import Planner
from .prepared_state import PreparedState
from .process import (
    LARGE_BLOCK_BYTES,
    bar,
    devices_of,
    empty_cache,
    plain_mode,
    refuse_retyping_under_ddp,
    reshard,
)

_logger = logging.getLogger(__name__)
_in_force: weakref.WeakValueDictionary[int, Preparation] = weakref.WeakValueDictionary()
# held by what changes a model: of two threads that prepare one, the second finds it
# held
changing = threading.RLock()


class Preparation:
    """The preparation of one model, from its first edit to its last undo.

    While it is in force, it is found again by the model.

    Attributes:
        original: What was there before the first plan was applied.
        left: What the last one left.
        after: Hooks, flags, modes and memory at its end, as the manifest records them.
        holder: The wrapper, held weakly: the model keeps it alive.
        journal: The changes made, and the way back.
        plans: The plans applied, one on top of the other.
        turned_on: The places of base parameters that a restore made trainable.
        put_back: The names of what a restore put back.
        kept_dtype: The records of adapters that a restore left in the dtype of their
            training. These three are added to by each of the calls that fail and are
            made again.
    """

    original: Original
    left: PreparedState
    after: Moment

    def __init__(self, holder: object) -> None:
        self.holder = weakref.ref(holder)
        self.journal = Journal()
        self.plans: list[Plan] = []
        self.turned_on: list[TensorRef] = []
        self.put_back: list[str] = []
        self.kept_dtype: list[ParameterRecord] = []

    @property
    def plan(self) -> Plan:
        """The last plan applied."""
        return self.plans[-1]

    @property
    def precisions(self) -> set[Precision]:
        """The precisions of the plans applied."""
        return {plan.config.precision for plan in self.plans}

    @property
    def upcasts_all(self) -> bool:
        """Whether half parameters were cast in their storage, or are upcast at use."""
        return any(p.config.precision.upcasts_all and p.casts for p in self.plans)

    @staticmethod
    def find(tree: ModelTree) -> Preparation | None:
        """The preparation that holds a model or a part of it.

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
        model = self.original.model() if model is None else model
        assert model is not None  # who calls holds it
        tree = ModelTree(model, self.original.records)
        if reshard(tree):
            tree = ModelTree(model, self.original.records)
        lay_as_stored(tree)
        find_again(self.original, tree)
        return tree

    def apply(self, plan: Plan, tree: ModelTree) -> None:
        """Apply a plan on top of what is applied, all or nothing.

        The first edit takes hold of the model, so that it keeps its wrapper.

        Raises:
            EditError: An edit failed; the model is as it was before this call.
        """
        with self._all_or_nothing(tree, "prepare"), plain_mode():
            config = plan.config
            edits: list[Any] = list(plan.edits)
            if not self.journal.changes:
                lay_as_stored(tree)
                edits.insert(0, Hold("hold", ("",), anchor=Anchor(self.holder())))
                self.original = Original(tree, audit=config.audit)
            stores = [edit for edit in plan.edits if isinstance(edit, Store)]
            if any(edit.dtype is not None for edit in stores):
                edits.append(WarnOfSaving("warn", ("",)))
            shown = bar(edits, "prepare", is_shown=config.progress)
            if config.empty_cache:
                self.journal.apply(_emptying_cache(shown), tree)
                empty_cache()
            else:
                self.journal.apply(shown, tree)
            # No edit replaces a module or a parameter: the walk is still that of the model.
            self.left = PreparedState(tree)
            self.after = read_moment(tree)
            self.plans = [*self.plans, plan]
            _in_force[id(self)] = self

    @contextlib.contextmanager
    def _all_or_nothing(self, tree: ModelTree, doing: str) -> Iterator[None]:
        """Take back what the body did to the model and to this, if it raises.

        An error that is not the journal's own becomes an ``EditError``.
        """
        attributes = dict(vars(self))
        num_changes = len(self.journal.changes)
        try:
            yield
        except BaseException as error:
            try:
                with plain_mode():
                    # Where the journal failed, it rolled its edits back already: there
                    # is nothing left to undo, and its error tells the outcome.
                    outcome = self.journal.roll_back(num_changes, tree, error)
            finally:
                vars(self).update(attributes)
                if not self.journal.changes:
                    self.release()
            if isinstance(error, EditError) or not isinstance(error, Exception):
                raise
            failed = f"could not {doing}: {error}; {outcome}"
            # From Python 3.12 on, the frame of this generator leads back to the error,
            # which would hold the model until a garbage collection.
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            raise EditError(failed, edit=None) from error

    def release(self) -> None:
        """Be found no more by the model, in which nothing is left to undo."""
        _in_force.pop(id(self), None)

    def adopt(self, peft_model: nn.Module) -> None:
        """Give new adapters their dtype, and norms of their blocks their arithmetic.

        It is all or nothing, and the plan grows by it. What accelerate sets on the
        model with the adapters is recorded, and undone by a restore.
        """
        # Of the base only forwards of modules are replaced: no parameter has to be
        # found again.
        model = cast("nn.Module", self.original.model())
        tree = ModelTree(model, self.original.records)
        _refuse_to_adopt(peft_model, tree)
        with only_reading():
            planner = Planner(tree, self.plan.config, tree.quantization)
            computes = [*planner.compute_norms(), *planner.compute_head()]
            # Those of prompt learning lie outside of the prepared model.
            whole = ModelTree(peft_model, self.original.records)
            around = Planner(whole, self.plan.config, tree.quantization)
            casts = around.cast_adapters
            told = self.plan.warnings
            found = advice.of_adapters(planner)
            new = [warning for warning in found if warning not in told]
        with self._all_or_nothing(tree, "adopt"):
            self.journal.apply([*computes, *casts], tree)
            taken = [one.model for one in self.journal.parts(AccelerateChange)]
            if all(model is not peft_model for model in taken):
                self.journal.record(AccelerateChange(peft_model))
            edited = [ref() for edit in computes for ref in edit.modules]
            self.left = self.left.reread(tree, set(filter(None, edited)))
            plan = dataclasses.replace(
                self.plan,
                edits=(*self.plan.edits, *computes, *casts),
                warnings=(*told, *new),
            )
            self.plans = [*self.plans[:-1], plan.grown_by(around)]
        for warning in new:
            warnings.warn(warning, UserWarning, stacklevel=3)

    def explain(self, error: BaseException | None) -> None:
        """Add to an error of torch about dtypes, as notes, what is known of its cause.

        Each note is added once.
        """
        is_suspended = getattr(self.holder(), "state", None) is LifecycleState.SUSPENDED
        notes = notes_on(error, self.plan.config.precision, is_suspended=is_suspended)
        if type(error) is RuntimeError and "dtype" in str(error):
            tree = self.tree()
            casts = Casts(tree, self.plan.config, tree.quantization)
            notes += advice.of_adapters(casts, is_suspended=is_suspended)
        # Before Python 3.11 errors have no notes: they are logged.
        add_note = getattr(error, "add_note", _logger.error)
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                add_note(note)

    def copies(self, tree: ModelTree) -> list[CopyChange]:
        """The changes that take back casts by others, and round copies of base modules.

        They are not in the journal: what others do is read when it has to be undone.
        """
        held = self.journal.parts(HeldOriginal)
        ours = {one.record for one in held}
        return Copies(self.original, tree).changes(ours)

    def changes(self, tree: ModelTree) -> Changes:
        """The parameters of the base that are not what a restore would have to give."""
        with only_reading():
            held = self.journal.parts(HeldOriginal)
            return changes_of(self.original, tree, held)

    def verify(self) -> StateDiff:
        """Compare the live model with what the preparation left."""
        with plain_mode():
            tree = self.tree()
            changes = self.changes(tree)
            base, found = self.original.base, changes.replaced
            replaced = {fqn: one for fqn, one in found.items() if fqn in base}
            return self.left.diff(tree, replaced, changes.drifted)

    def suspend(self, way_back: Journal, *, hold: bool) -> None:
        """Put back the state from before for a while, all or nothing.

        Args:
            way_back: The journal that leads back, at every moment.
            hold: Whether the model keeps the wrapper alive meanwhile.
        """
        with plain_mode():
            tree = self.tree()
            refuse_sharded_since(tree, changes_dtypes=self.upcasts_all)
            copies = self.copies(tree)
            refuse_retyping_under_ddp([*self.journal.parts(HeldOriginal), *copies])
            for tensor in tree.tensors:
                if id(tensor.parameter) not in tree.known:
                    # Copies have no marks while suspended: a record tells them from
                    # those made meanwhile.
                    tree.record(tensor)
            way_back.record(
                Call(random_state(devices_of(tree))), Call(self._upcast_copies)
            )
            self.journal.suspend(tree, way_back, copies)
            # What was put into the base follows the train mode of the module that it
            # sits in.
            edits: list[Edit] = [FollowTrainMode("record", ("",))]
            if hold:
                edits.append(Hold("hold", ("",), anchor=Anchor(self.holder())))
            way_back.apply(edits, tree)

    def _upcast_copies(self) -> None:
        """Store copies in float32 that were made of base modules while suspended.

        Those made while the model is prepared are in float32, and so are its
        activations. A copy that was there, and kept in half by somebody, stays so.
        """
        if not self.upcasts_all:
            return
        records = self.original.records
        for tensor in half_copies(self.original, self.tree()):
            parameter = tensor.parameter
            recorded = records.at(tensor.module, tensor.name)
            if recorded is None or not recorded.is_seen(parameter):
                records.mark(tensor.module).dtypes[tensor.name] = parameter.dtype
                parameter.data = parameter.data.float()

    def resume(self, way_back: Journal) -> None:
        """End a suspension.

        What failed stays in ``way_back``, and this may be called again.
        """
        with plain_mode():
            way_back.resume(self.tree())


def _refuse_to_adopt(peft_model: nn.Module, tree: ModelTree) -> None:
    """Raise for what was not made of the prepared model, or has no adapter."""
    inside = peft_model.modules() if isinstance(peft_model, nn.Module) else ()
    name, given = type(tree.model).__name__, type(peft_model).__name__
    if not any(id(module) in tree.owners for module in inside):
        raise UnsupportedModelError(
            f"adopt() expects what was made of the prepared {name}, such as "
            f"get_peft_model(prepared.model, ...), found another {given}"
        )
    # Those of prompt learning lie outside of the prepared model, in what was made of
    # it.
    if not (tree.adapter_ids or ModelTree(peft_model).adapter_ids):
        raise UnsupportedModelError(
            f"adopt() expects a model with adapters, found no adapter in this {given}; "
            "make them first, with get_peft_model"
        )


def _all_in_force() -> list[tuple[Preparation, ModelTree]]:
    """The preparations in force, each with a walk of its model."""
    # Listed in one step: other threads may begin and end some meanwhile.
    found = [reference() for reference in _in_force.valuerefs()]
    models = [(one, one.original.model()) for one in found if one is not None]
    return [(one, ModelTree(model)) for one, model in models if model is not None]


def explain(error: BaseException) -> None:
    """Add to an error what any preparation that is in force knows of its cause."""
    for preparation, _ in _all_in_force():
        preparation.explain(error)


def refuse_held(tree: ModelTree, but: Preparation | None = None) -> None:
    """Raise for a model of which another preparation than ``but`` holds a part.

    Such a part is a module, or a parameter that two models share.
    """
    paths = {id(tensor.parameter): tensor.path for tensor in tree.tensors}
    for preparation, other in _all_in_force():
        if preparation is but:
            continue
        ids = [id(tensor.parameter) for tensor in other.tensors]
        shared = [paths[key] for key in ids if key in paths]
        if not other.owners.isdisjoint(tree.owners):
            what = ", or a part of it,"
        elif shared:
            name = type(other.model).__name__
            what = f" shares its {shared[0]} with a {name} that"
        else:
            continue
        raise StateError(
            f"this {type(tree.model).__name__}{what} is prepared already; restore() "
            "that first, or find its wrapper with kbitwrap.prepared_of(model)",
            state=getattr(preparation.holder(), "state", None),
            expected=(LifecycleState.NEW, LifecycleState.RESTORED),
        )


def _emptying_cache(edits: Iterable[Any]) -> Iterator[Any]:
    """The edits, with freed memory given back between them.

    When the next one is asked for, a large cast's freed blocks are returned to the
    device first, so that the peak is the plan's.
    """
    for edit in edits:
        yield edit
        if edit.transient_bytes >= LARGE_BLOCK_BYTES:
            empty_cache()
