"""The exception tree.

::

    KbitWrapError(Exception)
    ├ ConfigError(ValueError)            an invalid setting
    ├ UnsupportedModelError(TypeError)   .fqn  what was found where, and what to do
    ├ MemoryBudgetError(MemoryError)     .plan .budget_bytes .fitting  what would fit
    ├ StateError(RuntimeError)           .state .expected
    ├ EditError(RuntimeError)            .edit  the model is unchanged
    ├ RestoreError(RuntimeError)         .failures  everything else was restored
    ├ ExportError(RuntimeError)          .fqn  nothing was left at the destination
    └ ManifestError(ValueError)          .fqn  invalid, or none can be made
      ├ ManifestVersionError             .found .supported
      └ ManifestMismatchError            .missing .unexpected .different

Each error is also the builtin exception that a caller who does not know kbitwrap would
catch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

Different = Mapping[str, Mapping[str, tuple[Any, Any]]]
"""By the name of a tensor, and by what it has: what was expected, and what was found."""


@dataclass(eq=False, repr=False)
class KbitWrapError(Exception):
    """The base class of all errors that kbitwrap raises; ``message`` says what is wrong and what to do."""

    message: str = ""

    def __post_init__(self) -> None:
        self.args = (self.message,)

    def __reduce__(self) -> Any:
        """Copy and unpickle by the fields: an exception's own way passes ``args`` alone."""
        given = {f.name: vars(self)[f.name] for f in fields(self)}
        return functools.partial(type(self), **given), (), vars(self)


class ConfigError(KbitWrapError, ValueError):
    """Invalid setting: an unknown field, an unknown value, or a contradiction."""


@dataclass(eq=False, repr=False, kw_only=True)
class UnsupportedModelError(KbitWrapError, TypeError):
    """The model cannot be prepared as asked.

    Attributes:
        fqn: The fully qualified name of the first module or parameter in the way;
            ``""`` is the model itself.
    """

    fqn: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class MemoryBudgetError(KbitWrapError, MemoryError):
    """The plan needs more memory than ``memory_budget`` allows; nothing was changed.

    Attributes:
        plan: The ``Plan`` that does not fit.
        budget_bytes: The budget, in bytes.
        fitting: The values of the precisions whose plan would fit, leanest last.
    """

    plan: Any
    budget_bytes: int
    fitting: tuple[str, ...] = ()


@dataclass(eq=False, repr=False, kw_only=True)
class StateError(KbitWrapError, RuntimeError):
    """The call is not possible in the state that the wrapper, or the model, is in.

    Attributes:
        state: The state found, or ``None`` where another wrapper holds the model.
        expected: The states in which the call is possible.
    """

    state: Any = None
    expected: tuple[Any, ...] = ()


@dataclass(eq=False, repr=False, kw_only=True)
class EditError(KbitWrapError, RuntimeError):
    """An edit failed while preparing. Every edit before it was undone; ``__cause__`` is the reason.

    Attributes:
        edit: The edit that failed.
    """

    edit: Any


@dataclass(eq=False, repr=False, kw_only=True)
class RestoreError(KbitWrapError, RuntimeError):
    """A part of the model could not be restored. Everything else was.

    Attributes:
        failures: The exceptions, by a description or the fully qualified name of what
            was not restored.
    """

    failures: Mapping[str, Exception]


@dataclass(eq=False, repr=False, kw_only=True)
class ExportError(KbitWrapError, RuntimeError):
    """A checkpoint could not be written. Nothing was left at the destination; ``__cause__``, if any, is the reason.

    Attributes:
        fqn: The fully qualified name of the tensor or module in the way; ``""`` if
            there is no single one.
    """

    fqn: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class ManifestError(KbitWrapError, ValueError):
    """Invalid manifest, or a model whose manifest cannot be made.

    Attributes:
        fqn: The fully qualified name of the tensor in the way; ``""`` if there is no
            single one.
    """

    fqn: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class ManifestVersionError(ManifestError):
    """The manifest has a version that this kbitwrap does not read.

    Attributes:
        found: The version found.
        supported: The versions that can be read.
    """

    found: Any
    supported: tuple[int, ...]


@dataclass(eq=False, repr=False, kw_only=True)
class ManifestMismatchError(ManifestError):
    """A model is not the one that the manifest records. Nothing was changed.

    Attributes:
        missing: Names that the manifest has and the model has not.
        unexpected: Names that the model has and the manifest has not.
        different: ``{fqn: {what: (expected, found)}}``; the name ``""`` is the model
            itself.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    different: Different = field(default_factory=dict)
