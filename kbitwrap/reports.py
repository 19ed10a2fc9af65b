"""The reports and differences that the library's calls return, and how these, and every table, are written as text."""

from __future__ import annotations

import json
import re
import reprlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from .errors import Different

_IN_LIBRARY = re.compile(rf"{__package__}\.(?!cli\.)")
_OF_ADAPTER = re.compile(r"\.lora_")
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxtuple = _repr.maxlist = 12


def caller_level() -> int:
    """Return the ``stacklevel`` for a warning that names the line that called the library, be it the command line's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and _IN_LIBRARY.match(frame.f_globals["__name__"]):
        level, frame = level + 1, frame.f_back
    return level


def shown(value: Any) -> str:
    """Write a value for a message, cut short because it may come from outside."""
    return _repr.repr(value)


def in_one_line(error: BaseException) -> str:
    """Write an error's message in one line, and no more of it than a screen; its class where it has none."""
    text = textwrap.shorten(str(error), 1000, placeholder=" ...")
    return text or type(error).__name__


def table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows as aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        _, *others = map(str.rjust, row, widths)
        lines.append("  ".join([row[0].ljust(widths[0]), *others]))
    return "\n".join(lines)


def first_of(texts: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """Write the first of many texts in one line, and how many more there are."""
    named = separator.join(texts[:limit])
    num_left = len(texts) - limit
    return f"{named} and {num_left:,} more" if num_left > 0 else named


def few(texts: Sequence[str], limit: int = 12) -> list[str]:
    """Return the first of many texts, and how many more there are."""
    num_left = len(texts) - limit
    left = [f"... and {num_left:,} more"] if num_left > 0 else []
    return [*texts[:limit], *left]


class Report:
    """A report, whose ``repr`` is one line."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[call-overload, no-any-return]

    def _brief(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        brief = self._brief()
        if not brief.isprintable():
            brief = ascii(brief)
        if len(brief) > 100:
            brief = f"{brief[:97]}..."
        return f"{type(self).__name__}({brief})"


class LifecycleState(str, Enum):
    """The state of a ``KbitPreparedModel``. In every state but ``PREPARED`` the model stores the original dtypes."""

    NEW = "new"
    """Planned; the model is untouched."""
    PREPARED = "prepared"
    """The plan is applied; the record of the original state is held."""
    SUSPENDED = "suspended"
    """Inside ``suspended()``: the original state for a while; trained float32 values are held beside it."""
    RESTORED = "restored"
    """Undone; nothing is held. ``prepare`` starts again."""

    __str__ = str.__str__


@dataclass(frozen=True, repr=False)
class RestoreReport(Report):
    """The changes by others that a restore found. Names are those of the unprepared model, where it has one.

    It is read from the restored model: a dtype, flag, hook or value that is other than
    before ``prepare`` is named.

    Attributes:
        trained: Trainable parameters whose value changed, the float32 copies that PEFT
            made of base modules, and small buffers of the checkpoint that hold other
            values, as running statistics do. ``restore(trained=...)`` decided whether
            those that were stored upcast kept that value.
        replaced: Names at which another parameter stands than the one that was prepared
            (after a merge, for ``modules_to_save``, after a replaced embedding), frozen
            parameters that hold other values, and parameters that have another dtype,
            shape or flag than before.
        foreign: Modules, hooks and attributes that others added, by their present
            names, hooks that others removed, and adapters from before whose dtype or
            flag others changed; they were left alone.
        not_compared: Parameters that were sharded since: whether their values changed
            was not looked at.
        put_back: Buffers and plain attributes of the base's modules that its forward,
            or others, made or changed, and parameters that others cast; they are as
            they were.
        kept_dtype: Parameters that have another dtype than before: trained adapters,
            which stayed in ``adapter_dtype``, the dtype that they were trained in, and
            what was sharded since and is stored in float32; ``export`` writes its
            original.
    """

    trained: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    kept_dtype: tuple[str, ...] = ()

    def _brief(self) -> str:
        counts = []
        for name, fqns in vars(self).items():
            if fqns:
                counts.append(f"{len(fqns)} {name.replace('_', ' ')}")
        return ", ".join(counts) or "nothing changed by others"

    def __str__(self) -> str:
        lines = ["restored"]
        for name, fqns in vars(self).items():
            others = fqns
            if name == "foreign":
                others = tuple(fqn for fqn in fqns if not _OF_ADAPTER.search(fqn))
            if others != fqns:
                lines.append(
                    "your adapter is still on the model: unload() takes it off"
                )
            if others:
                lines.append(f"{name.replace('_', ' ')}: {', '.join(few(others))}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Differences(Report):
    """Differences between what was expected and what was found; false where there are none. ``""`` is the whole."""

    different: Different = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    _empty = "no difference"

    def __bool__(self) -> bool:
        return bool(self.different or self.missing or self.unexpected)

    def lines(self) -> list[str]:
        """Write the differences as text, one line each."""
        lines = []
        for fqn, rows in self.different.items():
            where = f"{fqn}: " if fqn else ""
            for what, (expected, found) in rows.items():
                told = f"expected {shown(expected)}, found {shown(found)}"
                lines.append(f"{where}{what}: {told}")

        lines += [f"{fqn}: missing" for fqn in self.missing]
        lines += [f"{fqn}: unexpected" for fqn in self.unexpected]
        return lines

    def summary(self) -> str:
        """Write the differences as one line of text: the first five of them, and the number of the others.

        Where of the whole only the quantization differs, tensors differ with it: they are counted.
        """
        whole = {**self.different.get("", {})}
        whole.pop("tensors", None)  # one digest of all
        lines = []
        for name, (expected, found) in whole.items():
            setting = name.removeprefix("model.quantization.config.")
            if setting == name:
                return first_of(self.lines(), 5, "; ")
            lines.append(f"{setting}: expected {shown(expected)}, found {shown(found)}")
        if not lines:
            return first_of(self.lines(), 5, "; ")
        num_tensors = len(self.different) - 1 + len(self.missing) + len(self.unexpected)
        counted = f"; {num_tensors:,} tensors differ with it" if num_tensors else ""
        return f"another quantization: {'; '.join(lines)}{counted}"

    def _brief(self) -> str:
        return self.summary() or self._empty

    def __str__(self) -> str:
        return "\n".join(few(self.lines())) or self._empty


class StateDiff(Differences):
    """Differences of a live model from what its preparation left. Empty, and false, where there are none.

    Attributes:
        differences: ``{fqn: {what: (expected, found)}}``. ``what`` is ``"parameter"``,
            ``"dtype"``, ``"shape"``, ``"requires_grad"``, ``"forward"``, an
            attribute of checkpointing, ``"input_gradient_hooks"`` (whether there is
            one, where one is needed), ``"upcast"`` (the weights that are upcast at
            use), or ``"value"`` (compared by a sample, or by all of it with
            ``audit``).
    """

    _empty = "as preparation left it"

    @property
    def differences(self) -> Different:
        """``{fqn: {what: (expected, found)}}``."""
        return self.different

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as strings, ready for JSON: ``{fqn: {what: [expected, found]}}``."""
        found = {}
        for fqn, rows in self.different.items():
            found[fqn] = {what: [*map(str, pair)] for what, pair in rows.items()}
        return found


@dataclass(frozen=True)
class ShardingOutcome:
    """The outcome of one precision under an engine.

    Attributes:
        trains: Whether the engine takes the prepared model and trains it with right
            numbers.
        restores: Whether ``restore`` and ``suspended`` work under the engine.
        exports: Whether ``export`` and ``manifest`` do.
        notes: Why something does not work, what to do instead, and what to mind.
    """

    trains: bool
    restores: bool
    exports: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class ShardingReport(Report):
    """The outcome of each precision under an engine, told before it happens. ``print`` gives a table.

    Attributes:
        engine: ``"ddp"``, ``"fsdp1"``, ``"fsdp2"``, ``"zero2"`` or ``"zero3"``.
        param_dtype: The dtype that the engine computes in, or ``None`` for that of the
            parameters.
        outcomes: ``{precision: outcome}``.
    """

    engine: str
    param_dtype: str | None
    outcomes: Mapping[str, ShardingOutcome]

    def _brief(self) -> str:
        trains = [name for name, outcome in self.outcomes.items() if outcome.trains]
        precisions = ", ".join(trains) or "none"
        return f"{self.engine!r}, trains with: {precisions}"

    def __str__(self) -> str:
        rows = [["precision", "trains", "restore, suspended", "export, manifest"]]
        noted: dict[str, list[str]] = {}  # the precisions of each note
        for name, outcome in self.outcomes.items():
            works = (outcome.trains, outcome.restores, outcome.exports)
            rows.append([name, *["yes" if one else "no" for one in works]])
            for note in outcome.notes:
                noted.setdefault(note, []).append(name)

        said = f"engine {self.engine!r}, param_dtype {self.param_dtype}"
        notes = [f"{', '.join(names)}: {note}" for note, names in noted.items()]
        return "\n".join([said, table(rows), *notes])


@dataclass(frozen=True)
class TensorMeasure:
    """The figures of one adapted tensor of a merge.

    Attributes:
        kept: The part of its delta that is there: the projection of its change on it.
        error: The rest of the change, beside the delta, as a part of the delta's length.
        bits: The bits of an element of the dtype that it is stored in.
        num_clipped: The elements that were to be beyond the range of their group's
            codes, by more than an eighth of its scale; a merge counts them where its
            layers stay quantized.
    """

    kept: float
    error: float
    bits: int
    num_clipped: int = 0


@dataclass(frozen=True, repr=False)
class ExportReport(Report):
    """The checkpoint that an export wrote.

    Attributes:
        path: The folder written.
        files: The names of the files in it, sorted.
        num_tensors: The number of tensors written.
        num_bytes: Their size, in bytes.
        converted: The fqns of the tensors written in another dtype than they had.
        merged: The fqns of the layers that adapters were merged into.
        seconds: The time it took, in seconds.
        saved_bytes: The bytes by which the tensors are smaller than in the checkpoint
            that was read.
        is_merge: Whether adapters were to be merged; where ``merged`` is empty, the
            model had no active one.
        tensors: The figures of each merged tensor, by its name, where they were
            measured: by ``merge_checkpoint``, and of layers that stay quantized.
        kept: The part of the deltas of all these that is there; ``None`` without any.
        error: What is beside, as a part of their length; ``None`` without any.
        notes: What to mind of a merge, such as that the adapter names another base, and
            what the base's folder holds that was left behind.
    """

    path: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    converted: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    seconds: float = 0.0
    saved_bytes: int = 0
    is_merge: bool = False
    tensors: Mapping[str, TensorMeasure] = field(default_factory=dict)
    kept: float | None = None
    error: float | None = None
    notes: tuple[str, ...] = ()

    def _brief(self) -> str:
        return f"{self.num_tensors} tensors, {self.num_bytes:,} bytes, {shown(str(self.path))}"

    def __str__(self) -> str:
        parts = [
            f"{self.num_tensors} tensors",
            f"{self.num_bytes:,} bytes",
            f"{self.seconds:.1f} s",
        ]
        if self.converted:
            parts.append(f"{len(self.converted)} converted")
        if self.is_merge:
            parts.append(f"{len(self.merged)} layers merged")
        if self.kept is not None:
            parts.append(f"{self.kept:.1%} of the delta kept")
        line = f"{self.path}: {', '.join(parts)}"
        is_random = any(one.bits < 16 for one in self.tensors.values())
        if self.error is None or is_random:  # in the sums of a layer that cancels
            return line
        return f"{line}; rounding is off by {self.error:.1%} of the delta (a larger delta loses less)"
