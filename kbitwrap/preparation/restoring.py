"""The restore of a model.

It reads the model before anything is undone, undoes everything, and reports.
"""

from __future__ import annotations

import functools

from ..edits.adapters import AdaptersChange
from ..edits.base import HeldOriginal, TrainedPolicy
from ..edits.kept import KeptChange
from ..edits.storage import CopyChange, StorageChange, TrainedError
from ..errors import ConfigError, RestoreError
from ..model.checks import refuse_flat
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, only_reading
from ..model.wrappers import is_sharded_tensor
from ..reports import RestoreReport
from .comparison import changed_buffers, changed_hooks, changes_of, others_in
from .preparation import Preparation
from .process import bar, empty_cache, plain_mode
from .training_on import warn_of_training_on


class Restoring:
    """One restore of a model.

    When it is made, it reads the model as it is prepared. The call undoes everything,
    and may be made again after an interrupt.

    Args:
        preparation: What is to be undone.
        trained: What is done with values that changed while they were stored upcast.
    """

    def __init__(self, preparation: Preparation, trained: TrainedPolicy) -> None:
        self._preparation = preparation
        journal = preparation.journal
        if trained == "discard":
            _refuse_without_originals(preparation)
        with plain_mode():
            tree = self._tree = preparation.tree()
            refuse_flat(tree)
            changed: set[str] = set()
            if trained == "error":
                changes = preparation.changes(tree)
                changed.update(changes.trained, changes.drifted)
            self._held = journal.parts(HeldOriginal)
            # Some stayed in the journal where they were an error.
            self._copies = [*journal.parts(CopyChange), *preparation.copies(tree)]
            self._rewritten = journal.parts(KeptChange)
            self._adapters = journal.parts(AdaptersChange)
            with only_reading():
                self._trainable = _trainable(tree)
                turned_on = preparation.original.turned_on(tree)
            self._turned_on = preparation.turned_on + turned_on
        # what is done with each value that changed
        self._policies = [(one, trained) for one in self._held]
        for copy in self._copies:
            is_unchanged = copy.is_base and copy.fqn not in changed
            policy: TrainedPolicy = "keep" if is_unchanged else trained
            self._policies.append((copy, policy))

    def __call__(self) -> RestoreReport:
        """Undo everything, and report what is otherwise than it was.

        Raises:
            RestoreError: Something could not be undone. All else was.
        """
        preparation = self._preparation
        journal = preparation.journal
        with plain_mode():
            preparation.turned_on = self._turned_on
            # What cannot be undone stays in the journal, for another restore.
            new = [copy for copy in self._copies if copy not in journal.changes]
            journal.record(*new)
            for one, policy in self._policies:
                one.policy = policy
            failures = self._undo()
            for one, _ in self._policies:
                one.policy = "keep"
            for kept in self._rewritten:
                preparation.put_back += kept.put_back
            for adapters in self._adapters:
                preparation.kept_dtype += adapters.kept
            if failures:
                raise _error_of(failures)
            # The hold on the wrapper is what is left: all else is undone.
            journal.resume(self._tree)
            report = self._report()
            preparation.release()
            if preparation.plan.config.empty_cache:
                empty_cache()
        warn_of_training_on(self._tree.model, self._turned_on)
        return report

    def _undo(self) -> dict[str, Exception]:
        """Undo every change but the wrapper's hold on the model.

        Returns:
            The failures, by the names of what could not be undone.
        """
        is_shown = self._preparation.plan.config.progress
        show = functools.partial(bar, what="restore", is_shown=is_shown)
        failures: dict[str, Exception] = {}
        found = self._preparation.journal.undo(self._tree, since=1, show=show)
        for change, error in found:
            if not isinstance(error, Exception):
                raise error
            failures[getattr(change, "fqn", type(change).__name__)] = error
        return failures

    def _report(self) -> RestoreReport:
        """Compare the model, of which all was undone, with what was there before."""
        original, tree = self._preparation.original, self._tree
        kept_dtype = self._preparation.kept_dtype
        with only_reading():
            changes = changes_of(original, tree, trainable=self._trainable)
            replaced, foreign = others_in(original, tree, kept_dtype)
            foreign += changed_hooks(original, tree)
            buffers = changed_buffers(original, tree)
        trained: list[str] = []
        put_back = list(self._preparation.put_back)
        ours = {one.record for one in self._held}
        for copy in self._copies:
            if copy.is_resized:
                continue
            if not copy.is_base:
                trained.append(copy.fqn)
            elif copy.record not in ours:
                put_back.append(copy.fqn)  # cast by others
        trained += changes.trained
        replaced += [fqn for fqn in changes.replaced if fqn in original.base]
        replaced += changes.drifted
        # What was stored upcast is told by its own change, which had the original.
        for one in self._held:
            if one.record in self._trainable:
                if one.was_trained:
                    trained.append(one.fqn)
            elif one.was_altered:
                replaced.append(one.fqn)
        trained += buffers
        return RestoreReport(
            trained=_once(trained),
            replaced=_once(replaced),
            foreign=_once(foreign),
            not_compared=_once(changes.not_compared),
            put_back=_once(put_back),
            kept_dtype=_once([record.fqn for record in kept_dtype] + self._sharded()),
        )

    def _sharded(self) -> list[str]:
        """The parameters that keep the dtype they are stored in, because they are sharded.

        They are those of the base, and copies of it that PEFT made.
        """
        tree = self._tree
        records = self._preparation.original.records
        found = []
        for tensor in tree.tensors:
            record = tree.sharded.get(id(tensor.parameter))
            dtype = record.dtype if record else None
            if record is None and is_sharded_tensor(tensor.parameter):
                dtype = records.dtype_before(tensor.module, tensor.name)
            if dtype is not None and dtype != tensor.parameter.dtype:
                found.append(tensor.fqn)

        return found


def _once(names: list[str]) -> tuple[str, ...]:
    """The names, each at its first place."""
    return tuple(dict.fromkeys(names))


def _trainable(tree: ModelTree) -> set[ParameterRecord | None]:
    """The records of what may be trained, also of what others put in its place."""
    found: set[ParameterRecord | None] = set()
    for tensor in tree.tensors:
        if tensor.parameter.requires_grad:
            at = tree.records.at(tensor.module, tensor.name)
            found.add(tree.known.get(id(tensor.parameter), at))
    return found


def _refuse_without_originals(preparation: Preparation) -> None:
    """Raise where the original bits of what was cast are not all held."""
    is_asked_for = any(plan.config.keep_originals for plan in preparation.plans)
    stored = preparation.journal.parts(StorageChange)
    if not is_asked_for or any(one.kept is None for one in stored):
        raise ConfigError(
            "restore(trained='discard') needs a preparation with keep_originals=True"
        )


def _error_of(failures: dict[str, Exception]) -> RestoreError:
    """The error that names everything that could not be undone."""
    named = [
        str(error) if isinstance(error, TrainedError) else f"{name}: {error}"
        for name, error in failures.items()
    ]
    return RestoreError(
        f"not restored: {'; '.join(named)}. Everything else was; "
        "restore(trained='keep') or restore(trained='discard') settles what was "
        "trained",
        failures=failures,
    )
