"""``Manifest``: the record of a preparation, versioned and validated, as JSON.

Reading one only parses text and compares values: nothing named in it is imported,
executed, opened or unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator
from torch import nn

from ..config import PrepareConfig, StrPath, format_bytes
from ..errors import ManifestError, ManifestMismatchError, ManifestVersionError
from ..export.staging import atomic_write, refuse_special
from ..preparation.preparation import Preparation
from ..preparation.process import devices
from ..reports import Report, first_of, shown
from .contents import Contents, read_contents, versions
from .diff import (
    ManifestDiff,
    Values,
    all_values,
    compare,
    of_whole,
    values_as_loaded,
)
from .schema import (
    AdapterRecord,
    ConfigRecord,
    Count,
    Digest,
    Kind,
    ManifestPart,
    ModelRecord,
    MomentRecord,
    Name,
    PlanRecord,
    Row,
    TensorRecord,
    Text,
    unique_keys,
)

FORMAT = "kbitwrap-manifest"
MANIFEST_NAME = "kbitwrap.json"
"""The name of the file beside an adapter or a checkpoint."""
VERSIONS = (1, 2)
DTYPES_OF_4_BITS = "the dtypes that 4-bit layers compute in and are stored in"
"""The words for them in a manifest that was made afterwards and does not know them: they change no weight."""
NOT_PREPARED = "not prepared"
"""The word for it in the manifest of a run whose model kbitwrap did not prepare."""
_SETTINGS_OF_4_BITS = (
    "model.quantization.config.bnb_4bit_compute_dtype",
    "model.quantization.config.bnb_4bit_quant_storage",
)
# Settings that change no result and no storage.
_OPERATIONAL = {"memory_budget", "audit", "keep_originals", "empty_cache", "progress"}
MAX_BYTES = 128 << 20
"""The largest manifest that is read, in bytes: about a million tensors."""
_BEGINNING = 256  # bytes, in which a manifest names its format


class Manifest(Report, ManifestPart):
    """The record of a preparation.

    It holds the model, the settings, and the digest of every tensor's original content.
    ``KbitPreparedModel.manifest()`` makes one. In JSON ``rows`` is called
    ``"tensors"``.

    Attributes:
        version: 1, or 2 where a field is used that version 1 does not have.
        created: The time in UTC, as ISO 8601.
        versions: ``{distribution: version}`` of the libraries that were installed.
        world_size: The number of processes that train together.
        visible_devices: The number of accelerators that the process sees, those that
            hold parameters counted as one.
        accelerator: The type of device that held parameters, such as ``"xpu"``;
            ``None`` for a CPU and for CUDA.
        model: The model that was prepared.
        config: The settings; ``prepare_config()`` makes a ``PrepareConfig`` of them.
        adapters: The adapters that were on the base when the manifest was made, by
            name.
        before: The model's hooks, flags, modes and memory before preparation.
        after: The same at the end of preparation.
        plan: The figures of the plan, in bytes.
        unknown: What nobody recorded, in a manifest that was made after the run
            (`stamp_adapter`), whose fields for it say nothing; ``"not prepared"`` in that
            of a run that a callback recorded and nothing prepared; empty in one that a
            preparation made.
        logits: The digest of what the base computed for the tokens 0 to 15 when
            training began, in 16 hex digits, in the manifest of a callback; ``None``
            where nothing was computed.
        kinds: The values that tensors share.
        ties: Groups of names that are one tensor.
        rows: ``{fqn: (index of the kind, digest)}``; ``tensors`` reads them.
    """

    format: Literal["kbitwrap-manifest"]
    version: Literal[1, 2]
    created: Annotated[
        str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")
    ]
    versions: dict[Text, Text]
    world_size: Count = 1
    visible_devices: Count = 1
    accelerator: Text | None = None
    model: ModelRecord
    config: ConfigRecord
    adapters: dict[Text, AdapterRecord] = Field({})
    before: MomentRecord
    after: MomentRecord
    plan: PlanRecord
    unknown: tuple[Text, ...] = Field((), strict=False, max_length=64)
    logits: Digest | None = None
    kinds: tuple[Kind, ...] = Field(strict=False)
    ties: tuple[Annotated[tuple[Name, ...], Field(strict=False, min_length=2)], ...] = (
        Field(strict=False)
    )
    rows: dict[Name, Row] = Field(alias="tensors")

    __str__ = Report.__repr__

    def _brief(self) -> str:
        return (
            f"{shown(self.model.class_name)}, {self.config.precision!r}, "
            f"{len(self.rows)} tensors, {self.created}"
        )

    @model_validator(mode="after")
    def _is_consistent(self) -> Manifest:
        for fqn, (kind, _) in self.rows.items():
            if kind >= len(self.kinds):
                raise ValueError(f"the kind of {fqn} is not there")

        tied: set[str] = set()
        for names in self.ties:
            rows = {self.rows.get(name) for name in names}
            if None in rows or len(rows) > 1 or not tied.isdisjoint(names):
                raise ValueError(
                    f"{', '.join(names)} are tied, but their records differ, or one is "
                    "tied twice"
                )
            tied.update(names)

        for prefix, part in (("", self), ("config.", self.config)):
            new = part.new_fields().keys() & part.model_fields_set
            if self.version == 1 and new:
                raise ValueError(f"version 1 has no field {prefix}{min(new)}")

        return self

    @property
    def device_type(self) -> str:
        """The type of device that the model was on.

        Version 1 tells CUDA from a CPU by the memory that it measured.
        """
        return self.accelerator or (
            "cpu" if self.before.memory.allocated_bytes is None else "cuda"
        )

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """The tensors by canonical name, in the model's order."""
        # Made when they are first read, so that a manifest of 100,000 tensors loads in
        # the time of its text.
        kinds = [vars(kind) for kind in self.kinds]
        groups = {fqn: group for group, fqns in enumerate(self.ties) for fqn in fqns}
        return {
            fqn: TensorRecord(
                fqn=fqn, **kinds[index], digest=digest, tie_group=groups.get(fqn)
            )
            for fqn, (index, digest) in self.rows.items()
        }

    @classmethod
    def of(cls, preparation: Preparation, **fields: Any) -> Manifest:
        """Record the preparation of a model, suspended or not, with other values of some fields.

        ``KbitPreparedModel.manifest`` documents it.
        """
        if len({plan.config.precision for plan in preparation.plans}) > 1:
            raise ManifestError(
                "prepare_model_for_kbit_training was called again with another "
                "precision, and a manifest records one preparation; restore() the "
                "model and prepare it once"
            )

        plan, tree = preparation.plan, preparation.tree()
        contents = read_contents(tree, preparation, progress=plan.config.progress)
        for fqn in contents.trained:
            raise ManifestError(
                f"{fqn} was trained since the model was prepared, so that a "
                "manifest made now would record the trained value as the "
                "original; make the manifest before training",
                fqn=fqn,
            )
        kinds: dict[Kind, int] = {}
        ties: dict[int, list[str]] = {}
        rows = {}
        with _refusing("cannot record this preparation"):
            for fqn, tensor in contents.tensors.items():
                kind = Kind.model_validate(tensor)
                rows[fqn] = kinds.setdefault(kind, len(kinds)), tensor.digest
                if tensor.tie_group is not None:
                    ties.setdefault(tensor.tie_group, []).append(fqn)
            data = {
                "format": FORMAT,
                "version": VERSIONS[-1],
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "versions": versions(),
                **devices(tree),
                "model": contents.model,
                "config": ConfigRecord.of(plan.config),
                "adapters": contents.adapters,
                "before": preparation.before.moment,
                "after": preparation.after and preparation.after.moment,
                "plan": plan,
                "unknown": () if preparation.is_in_force else (NOT_PREPARED,),
                "kinds": list(kinds),
                "ties": list(ties.values()),
                "tensors": rows,
                **fields,
            }
            return cls.model_validate(data)._of_lowest_version()

    def _of_lowest_version(self) -> Manifest:
        """Return this manifest with the lowest version that can hold all of it."""
        version = 1
        for part in (self, self.config):
            for name, default in part.new_fields().items():
                if getattr(part, name) != default:
                    version = 2
        return self.model_copy(update={"version": version})

    def prepare_config(self) -> PrepareConfig:
        """Return the settings of the preparation, as a ``PrepareConfig``.

        Raises:
            ManifestError: They are not known.
        """
        if NOT_PREPARED in self.unknown:
            raise ManifestError(
                "the manifest is of a run whose model was not prepared: train without "
                "the block, as that run did"
            )
        if self.unknown:
            raise ManifestError(
                "the manifest was made after the run, which nobody recorded: it says "
                f"nothing of {', '.join(self.unknown)}"
            )
        return self.config.prepare_config()

    def check(self, model: nn.Module, *, adapters: bool = False) -> None:
        """Compare a model with the one that was recorded; changes nothing.

        Compared are class, config, quantization, dtype, and the names, shapes, dtypes,
        ties and content of all tensors of the base, as they were loaded: of a model
        that is prepared, what ``restore`` would put back. No part of it are
        ``requires_grad``, where the model was loaded from and the versions of
        libraries. A config that differs is a warning where it was recorded with another
        version of transformers, which may write it differently.

        Args:
            model: A model as loaded, prepared or suspended, with adapters inside and
                around it or without.
            adapters: Whether to compare the adapters inside it too: their names,
                configs and dtypes.

        Raises:
            ManifestMismatchError: It is another model; ``missing``, ``unexpected`` and
                ``different`` say how.
            ManifestError: Adapters are merged into the model.
            UnsupportedModelError: It is on the meta device, or is sharded and not
                prepared; of one that was sharded since, all ranks make the call.

        Example:
            >>> import warnings, torch, kbitwrap
            >>> # A warning says that this model is not quantized.
            >>> warnings.simplefilter("ignore", UserWarning)
            >>> model = torch.nn.Linear(2, 2).bfloat16()
            >>> with kbitwrap.KbitPreparedModel(model, precision="full") as prepared:
            ...     manifest = prepared.manifest()
            >>> manifest.check(model)
            >>> torch.nn.init.zeros_(model.bias).requires_grad
            True
            >>> manifest.check(model)
            Traceback (most recent call last):
            ...
            kbitwrap.errors.ManifestMismatchError: ... bias: digest: expected ..., found '...'...
        """
        tree, preparation = Preparation.tree_of(model)
        contents = read_contents(tree, preparation, progress=self.config.progress)
        self.refuse_other(contents, adapters=adapters)

    def refuse_other(
        self,
        contents: Contents,
        *,
        adapters: bool = False,
        unknown: Collection[str] = (),
    ) -> None:
        """Raise as `check` does unless contents are the recorded ones, as far as they were read.

        Args:
            contents: The contents of a model.
            adapters: Whether to compare its adapters too.
            unknown: The names of tensors that may be others.
        """
        ours = {"model": self.model.model_dump(by_alias=True)}
        theirs = {"model": contents.model}
        if adapters:
            ours["adapters"] = {name: vars(one) for name, one in self.adapters.items()}
            theirs["adapters"] = contents.adapters
        expected = values_as_loaded(self.tensors)
        found = values_as_loaded(contents.tensors)
        if contents.unread:
            expected = {fqn: expected[fqn] for fqn in expected if fqn in found}
        ignored = ["model.name_or_path", *unknown]
        if DTYPES_OF_4_BITS in self.unknown:
            ignored += _SETTINGS_OF_4_BITS
            # a 4-bit weight, which has a ``quant_map`` beside it, has the same bytes, and
            # so the same digest, in any storage
            for values in (*expected.values(), *found.values()):
                if f"{values['fqn']}.quant_map" in self.rows:
                    del values["shape"], values["original_dtype"]

        recorded = self.versions.get("transformers")
        installed = versions().get("transformers")
        is_same = self.model.config_sha256 == contents.model["config_sha256"]
        if recorded != installed and not is_same:
            ignored.append("model.config_sha256")
            warnings.warn(
                "the model's config differs from the recorded one, but transformers "
                f"{installed} may write the same config differently than {recorded}, "
                "with which the manifest was made",
                UserWarning,
                stacklevel=3,
            )

        differences = compare(
            of_whole(ours) | expected, of_whole(theirs) | found, ignored
        )
        if differences:
            raise ManifestMismatchError(
                f"this {contents.model['class']} is not the base that the run recorded, "
                f"{self.model.class_name} from {self.model.name_or_path!r}: load that "
                f"one. What differs: {differences.summary()}",
                **vars(differences),
            )

    def diff(self, other: Manifest) -> ManifestDiff:
        """Compare two manifests.

        All is compared but when and where they were made, what memory was measured and
        what the base computed.

        Args:
            other: The other manifest.

        Returns:
            How it differs from this one.
        """
        return compare(self._values(), other._values())

    def _values(self) -> Values:
        """Return all values but those in which two manifests of one preparation differ.

        These are when and where they were made, their version, what memory was measured
        and what the base computed.
        """
        where = ("version", "created", "world_size", "visible_devices", "accelerator")
        exclude: Any = dict.fromkeys((*where, "logits", "kinds", "ties", "rows"), True)
        exclude.update(before={"memory"}, after={"memory"})
        whole = self.model_dump(mode="json", by_alias=True, exclude=exclude)
        return of_whole(whole) | all_values(self.tensors)

    def essence(self) -> dict[str, Any]:
        """Return what a resumed training must have in common with the first run, as plain JSON.

        Preparations with the same essence train alike.

        Returns:
            ``"config"`` and ``"model"`` as in the manifest, without settings that
            change no number and without ``name_or_path``; ``"tensors"``, a SHA-256
            (hex) over all tensors, without the content of trainable ones;
            ``"transformers"``, its version; and where nothing was prepared,
            ``"prepared"``, which is false.
        """
        digest = hashlib.sha256()
        # `requires_grad` depends on whether the adapter or the preparation came first
        left_out = ("fqn", "requires_grad", "tied")
        for fqn, values in sorted(all_values(self.tensors, left_out).items()):
            if values["prepared_requires_grad"]:
                del values["digest"]  # training changes the content
            digest.update(json.dumps([fqn, *values.values()]).encode())

        exclude = {"config": _OPERATIONAL, "model": {"name_or_path"}}
        data = self.model_dump(
            mode="json",
            by_alias=True,
            exclude_defaults=True,
            include={"config", "model"},
            exclude=exclude,
        )
        if NOT_PREPARED in self.unknown:
            data["prepared"] = False
        return {
            **data,
            "tensors": digest.hexdigest(),
            "transformers": self.versions.get("transformers"),
        }

    def diff_essence(self, expected: Mapping[str, Any]) -> ManifestDiff:
        """Compare an essence that was recorded with this manifest's.

        A config that differs is no difference where it was recorded with another
        version of transformers, which may write the same config differently.

        Args:
            expected: The recorded essence.

        Returns:
            The differences, at the name ``""``; ``diff`` names the tensors that differ.
        """
        found = self.essence()
        were_prepared = expected.get("prepared", True), found.get("prepared", True)
        if were_prepared[0] != were_prepared[1]:
            return ManifestDiff({"": {"prepared": were_prepared}})
        ignored = ["transformers"]
        if expected.get("transformers") != found["transformers"]:
            ignored.append("model.config_sha256")

        return compare(of_whole(expected), of_whole(found), ignored)

    def to_json(self) -> str:
        """Write the manifest as indented JSON text, in ASCII."""
        data = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest from JSON.

        Args:
            text: The JSON.

        Returns:
            The manifest.

        Raises:
            ManifestError: The text is not JSON, not a manifest, or an invalid one.
            ManifestVersionError: It has a version that this kbitwrap does not read.
        """
        return cls._read(text.encode(errors="surrogatepass"), "the manifest")

    @classmethod
    def _read(cls, text: bytes, source: str) -> Manifest:
        if len(text) > MAX_BYTES:
            raise ManifestError(
                f"{source}: expected a manifest of at most {format_bytes(MAX_BYTES)}, "
                "found a larger one"
            )

        try:
            data = json.loads(text.decode(), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{source}: expected JSON in UTF-8: {error}") from error

        if isinstance(data, dict) and data.get("format") == FORMAT:
            version = data.get("version")
            if type(version) is not int or version not in VERSIONS:
                raise ManifestVersionError(
                    f"{source}: expected version {VERSIONS[0]} or {VERSIONS[1]}, found "
                    f"{shown(version)}; install the kbitwrap that wrote it, or a newer one",
                    found=version,
                    supported=VERSIONS,
                )

        with _refusing(f"{source} is no valid manifest"):
            return cls.model_validate(data)._of_lowest_version()

    def save(self, path: StrPath) -> None:
        """Write the manifest to a file, atomically.

        If it cannot be written whole, the file stays as it was.

        Args:
            path: The file; a manifest that exists is replaced, and so is any file
                called ``kbitwrap.json``.

        Raises:
            ExportError: It cannot be written, or another file is there.
        """
        atomic_write(path, self.to_json().encode(), owns=_is_replaced)

    @classmethod
    def load(cls, path: StrPath) -> Manifest:
        """Read a manifest from a file.

        Args:
            path: The file, or a folder that holds it as ``kbitwrap.json``, such as an
                adapter's.

        Returns:
            The manifest.

        Raises:
            ManifestError: The file cannot be read, is larger than 128 MiB, or holds no
                valid manifest.
            ManifestVersionError: It has a version that this kbitwrap does not read.
        """
        file = Path(path)
        try:
            if file.is_dir():
                file /= MANIFEST_NAME
            refuse_special(file)
            with open(file, "rb") as opened:
                text = opened.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ManifestError(
                f"cannot read the manifest {str(file)!r}: {error}"
            ) from error

        return cls._read(text, repr(str(file)))


@contextlib.contextmanager
def _refusing(complaint: str) -> Iterator[None]:
    """Raise pydantic's refusals as a ``ManifestError`` of the first few complaints, with the first one's tensor."""
    try:
        yield
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        lines = []
        for entry in found:
            where = shown(".".join(map(str, entry["loc"])))
            lines.append(f"{where}: {entry['msg']}, found {shown(entry['input'])}")
        refusal = ManifestError(f"{complaint}: {first_of(lines, 3, '; ')}")
        place = found[0]["loc"]
        if len(place) > 1 and place[0] == "tensors":
            refusal.fqn = str(place[1])
        raise refusal from error


def _is_replaced(path: Path) -> bool:
    """Return whether a file may be replaced by a manifest.

    It is one, is called as one, or is empty.
    """
    if path.name == MANIFEST_NAME:
        return True
    with open(path, "rb") as file:
        beginning = file.read(_BEGINNING)
    return not beginning or FORMAT.encode() in beginning
