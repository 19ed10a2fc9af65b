"""``Manifest``: the record of a preparation, versioned and validated, as JSON.

Reading one parses text and compares values. Nothing is imported, executed, opened or unpickled because a manifest
names it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from .config import PrepareConfig, format_bytes
from .errors import ManifestError, ManifestVersionError
from .schema import ConfigRecord, Kind, ModelRecord, MomentRecord, Name, PlanRecord, Record, Row, TensorRecord, Text

FORMAT = "kbitwrap-manifest"
VERSIONS = (1,)
MAX_BYTES = 128 << 20
"""The largest manifest that is read, in bytes: about a million tensors."""


class Manifest(Record):
    """The record of a preparation: which model, how it was prepared, and every tensor's original content by digest.

    ``KbitPreparedModel.manifest()`` makes one. In JSON ``rows`` is called ``"tensors"``.

    Attributes:
        created: When, in UTC, as ISO 8601.
        versions: ``{distribution: version}`` of the libraries that were installed.
        model: Which model was prepared.
        config: The settings; ``prepare_config()`` makes a ``PrepareConfig`` of them.
        before: The model's hooks, flags, modes and memory before preparation.
        after: The same when it was prepared.
        plan: What the plan said, in bytes.
        kinds: What tensors share.
        ties: Groups of names that are one tensor.
        rows: ``{fqn: (index of the kind, digest)}``; ``tensors`` reads them.
    """

    format: Literal["kbitwrap-manifest"]
    version: Literal[1]
    created: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")]
    versions: dict[Text, Text]
    model: ModelRecord
    config: ConfigRecord
    before: MomentRecord
    after: MomentRecord
    plan: PlanRecord
    kinds: tuple[Kind, ...] = Field(strict=False)
    ties: tuple[Annotated[tuple[Name, ...], Field(strict=False, min_length=2)], ...] = Field(strict=False)
    rows: dict[Name, Row] = Field(alias="tensors")

    @model_validator(mode="after")
    def _is_consistent(self) -> Manifest:
        highest = max((row[0] for row in self.rows.values()), default=-1)
        if highest >= len(self.kinds):
            raise ValueError(f"a tensor is of kind {highest}, and there are {len(self.kinds)} kinds")
        tied = [name for names in self.ties for name in names]
        if len(set(tied)) < len(tied):
            raise ValueError("a tensor is tied twice")
        for names in self.ties:
            if len({self.rows.get(name) for name in names}) != 1 or names[0] not in self.rows:
                raise ValueError(f"{names[0]} and {names[1]} are tied, and not the same")
        return self

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """The tensors by canonical name, in the model's order."""
        return _Tensors(self)

    def prepare_config(self) -> PrepareConfig:
        """The settings of the preparation, as a ``PrepareConfig``."""
        return self.config.prepare_config()

    def to_json(self) -> str:
        """Write the manifest as JSON: indented, one tensor a line.

        Returns:
            The text, in ASCII.
        """
        data = self.model_dump(mode="json", by_alias=True)
        parts = []
        for key, value in data.items():
            if key in ("kinds", "ties"):
                body = _lines("[", (json.dumps(item) for item in value), "]")
            elif key == "tensors":
                body = _lines("{", (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in value.items()), "}")
            else:
                body = json.dumps(value, indent=2).replace("\n", "\n  ")
            parts.append(f"  {json.dumps(key)}: {body}")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest from JSON.

        Args:
            text: The JSON.

        Returns:
            The manifest.

        Raises:
            ManifestError: It is no JSON, no manifest, or says what cannot be meant.
            ManifestVersionError: It is of a version that this kbitwrap does not read.
        """
        if len(text) > MAX_BYTES:
            raise ManifestError(
                f"expected a manifest of at most {format_bytes(MAX_BYTES)}, found {len(text)} characters"
            )
        try:
            data = json.loads(
                text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_small
            )
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"not the JSON of a manifest: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else data
            raise ManifestError(f'expected JSON with "format": "{FORMAT}", found {_shown(found)}')
        version = data.get("version")
        if type(version) is not int or version not in VERSIONS:
            raise ManifestVersionError(
                f"expected a manifest of version {', '.join(map(str, VERSIONS))}, found {_shown(version)}; "
                "install the kbitwrap that wrote it, or a newer one",
                found=version,
                supported=VERSIONS,
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ManifestError(f"not a manifest: {_summary(error)}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read a manifest from a file.

        Args:
            path: The file.

        Returns:
            The manifest.

        Raises:
            ManifestError: The file cannot be read, is larger than 128 MiB, is no JSON, no manifest, or says what
                cannot be meant.
            ManifestVersionError: It is of a version that this kbitwrap does not read.
        """
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ManifestError(f"cannot read the manifest {os.fspath(path)!r}: {error}") from error
        if len(data) > MAX_BYTES:
            raise ManifestError(f"{os.fspath(path)!r} is larger than {format_bytes(MAX_BYTES)}: no manifest is")
        try:
            return cls.from_json(data.decode())
        except UnicodeDecodeError as error:
            raise ManifestError(f"{os.fspath(path)!r} is no manifest: not UTF-8: {error}") from error


class _Tensors(Mapping[str, TensorRecord]):
    """Makes each record when it is asked for: a manifest of 100,000 tensors loads in the time of its text."""

    def __init__(self, manifest: Manifest) -> None:
        self._rows = manifest.rows
        self._kinds = manifest.kinds
        self._ties = {name: group for group, names in enumerate(manifest.ties) for name in names}

    def __getitem__(self, fqn: str) -> TensorRecord:
        index, digest = self._rows[fqn]
        kind = self._kinds[index]
        return TensorRecord(
            fqn,
            kind.type,
            kind.shape,
            kind.original_dtype,
            kind.prepared_dtype,
            kind.requires_grad,
            kind.prepared_requires_grad,
            digest,
            self._ties.get(fqn),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _lines(opening: str, items: Iterator[str], closing: str) -> str:
    body = ",\n    ".join(items)
    return f"{opening}\n    {body}\n  {closing}" if body else opening + closing


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{_shown(text)} is too large a number")
    return value


def _small(text: str) -> int:
    # Python itself takes quadratic time to read a long integer.
    if len(text) > 20:
        raise ValueError(f"{_shown(text)} is too large a number")
    return int(text)


def _shown(value: Any) -> str:
    """What was found, cut short: it comes from outside."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _summary(error: ValidationError) -> str:
    """The first errors of a validation, one after the other."""
    found = error.errors(include_url=False, include_context=False)
    lines = [
        f"{'.'.join(str(part)[:80] for part in e['loc'])}: {e['msg']}, found {_shown(e['input'])}" for e in found[:3]
    ]
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(lines) + more
