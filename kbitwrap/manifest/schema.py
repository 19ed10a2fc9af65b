"""The types of a manifest's parts, as they stand in its JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)

from ..config import PrepareConfig

MAX_COUNT = (1 << 63) - 1

Text = Annotated[
    str, StringConstraints(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")
]
ModuleName = Annotated[
    str,
    StringConstraints(
        max_length=1024, pattern=r"^([^\p{C}/\\.:]+(\.[^\p{C}/\\.:]+)*)?$"
    ),
]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
SignedCount = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]


class ManifestPart(BaseModel):
    """The base of every part of a manifest.

    It is frozen, strict about types, and without unknown fields.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        from_attributes=True,
    )

    @classmethod
    def new_fields(cls) -> dict[str, Any]:
        """Return the fields that version 1 of the manifest lacks, with their defaults."""
        new = {}
        for name, field in cls.model_fields.items():
            if not field.is_required():
                new[name] = field.default
        return new


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; ``ValueError`` is raised on doubled keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _readable(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse a lone surrogate at any depth: JSON can hold it, and no text file can."""
    json.dumps(value, ensure_ascii=False).encode()
    return value


# A tensor's name is never used as a path; names that look like paths are refused all
# the same.
Name = Annotated[
    str,
    StringConstraints(max_length=1024, pattern=r"^[^\p{C}/\\.:]+(\.[^\p{C}/\\.:]+)*$"),
]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Settings = Annotated[dict[Text, JsonValue], AfterValidator(_readable)]
DType = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


class QuantizationRecord(ManifestPart):
    """The quantization of the model.

    It is the method, such as ``"bitsandbytes_4bit"``, and the settings in its config.
    """

    method: Text | None
    config: Settings


class ModelRecord(ManifestPart):
    """The model that was prepared.

    ``name_or_path`` is a note to the reader, never opened and not compared with a
    model. The SHA-256 (hex) is of its config, if it has one, without the values that
    change by use. ``dtype`` is the original one of its first floating-point parameter
    that is not quantized.
    """

    class_name: Text = Field(alias="class")
    name_or_path: Text
    config_sha256: Sha256 | None
    dtype: DType | None
    quantization: QuantizationRecord


class AdapterRecord(ManifestPart):
    """An adapter on the base.

    The SHA-256 (hex) is of its config, without the values that saving and loading
    change. Its dtypes are those of its own parameters, sorted; copies of the base's
    that it trains do not count.
    """

    config_sha256: Sha256
    dtypes: tuple[DType, ...] = Field(strict=False, max_length=64)


class ConfigRecord(ManifestPart):
    """The fields of ``PrepareConfig``.

    A class among ``norm_modules`` is recorded by its name, and matches by name.
    """

    # A field with a default is one of version 2: `Manifest` and this class alone are asked
    # for such fields. One that is added later needs version 3, because a kbitwrap that
    # reads version 2 refuses fields that it does not know.

    precision: Literal["full", "compute", "norms", "adapted", "none"]
    freeze: bool
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: Settings
    input_require_grads: bool | None
    head: Literal["float32"] | None = None
    head_chunk_bytes: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None
    adapter_dtype: Literal["float32", "bfloat16"] | None = None
    norm_modules: tuple[Text, ...] = Field(strict=False, max_length=256)
    memory_budget: Count | Annotated[str, StringConstraints(max_length=64)] | None
    audit: bool = False
    keep_originals: bool
    empty_cache: bool
    progress: bool

    @model_validator(mode="after")
    def _is_valid(self) -> ConfigRecord:
        self.prepare_config()
        return self

    @classmethod
    def of(cls, config: PrepareConfig) -> ConfigRecord:
        """Record the settings."""
        norms = [getattr(norm, "__name__", norm) for norm in config.norm_modules]
        fields = {**vars(config), "norm_modules": norms}
        fields["precision"] = config.precision.value
        return cls(**fields)

    def prepare_config(self) -> PrepareConfig:
        """Return the settings as a ``PrepareConfig``.

        ``ConfigError`` is raised where one is invalid.
        """
        return PrepareConfig(**self.model_dump())


class StateRecord(ManifestPart):
    """Hooks, flags and modes at one moment.

    Modules are named by their canonical names; ``""`` is the model itself.

    ``input_gradient_hooks`` counts those of each module that has any, ``checkpointing``
    names the modules whose ``gradient_checkpointing`` is true, ``use_cache`` is the
    config's, and the modules counted are those of the base.
    """

    input_gradient_hooks: dict[ModuleName, Count]
    checkpointing: tuple[ModuleName, ...] = Field(strict=False)
    use_cache: bool | None
    num_modules: Count
    num_training: Count


class MemoryRecord(ManifestPart):
    """Memory at one moment, in bytes.

    It is that of the parameters' storages, each counted once, and what the allocator
    counts. The latter is over all accelerators that hold parameters, and ``None`` where
    there is none whose allocator counts.
    """

    parameter_bytes: Count
    allocated_bytes: Count | None
    reserved_bytes: Count | None


class MomentRecord(ManifestPart):
    """State and memory of a model at one moment."""

    state: StateRecord
    memory: MemoryRecord


class RoleBytes(ManifestPart):
    """A row of a plan's table.

    It is the number of parameters, their bytes as loaded, and the bytes added.
    """

    count: Count
    bytes: Count
    added_bytes: SignedCount


class PlanRecord(ManifestPart):
    """The figures of a plan, in bytes. Names as in ``Plan``."""

    added_bytes: SignedCount
    peak_bytes: Count
    cache_bytes: Count
    record_bytes: Count
    by_role: dict[Text, RoleBytes]


class Kind(ManifestPart):
    """The values that many tensors share.

    They are the shape, and the storage dtype and the flag, as loaded and while
    prepared.

    ``"quantization"`` are the statistics of a quantized weight; a ``"buffer"`` is
    persistent.
    """

    type: Literal["parameter", "quantization", "buffer"]
    shape: tuple[Count, ...] = Field(strict=False, max_length=64)
    original_dtype: DType
    prepared_dtype: DType
    requires_grad: bool
    prepared_requires_grad: bool


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a manifest.

    Attributes:
        fqn: Its canonical name: the one it has in a checkpoint of the unwrapped model.
        type: ``"parameter"``, ``"quantization"`` (the statistics of a quantized weight)
            or ``"buffer"`` (persistent).
        shape: The shape.
        original_dtype: The storage dtype as loaded, such as ``"bfloat16"``.
        prepared_dtype: The storage dtype while prepared.
        requires_grad: The flag before preparation.
        prepared_requires_grad: The flag while prepared.
        digest: The 64-bit digest of the original content, 16 hex digits.
        tie_group: Tensors of the same group are one tensor; ``None`` for a tensor that
            is not tied.
    """

    fqn: str
    type: str
    shape: tuple[int, ...]
    original_dtype: str
    prepared_dtype: str
    requires_grad: bool
    prepared_requires_grad: bool
    digest: str
    tie_group: int | None


Row = Annotated[tuple[Annotated[int, Field(ge=0)], Digest], Field(strict=False)]
"""A tensor: the index of its kind, and its digest."""
