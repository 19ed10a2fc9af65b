"""The schema of a manifest: what its JSON may hold, and nothing else. Types alone; ``Manifest`` is in its own room."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from .config import PrepareConfig
from .errors import ConfigError

_MAX_COUNT = (1 << 63) - 1


def small_int(text: str) -> int:
    """Read an integer of at most 20 characters: Python itself takes quadratic time to read a long one."""
    if len(text) > 20:
        raise ValueError(f"an integer of {len(text)} characters is too large")
    return int(text)


def _can_be_read(value: dict[str, Any]) -> dict[str, Any]:
    """Raise for a lone surrogate or a long integer at any depth, which JSON can hold and no manifest is read with."""
    text = json.dumps(value, ensure_ascii=False)
    text.encode()
    json.loads(text, parse_int=small_int)
    return value


Text = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
# A tensor's name is used as a key and never as a path; what could be taken for one is refused all the same.
Name = Annotated[str, StringConstraints(max_length=1024, pattern=r"^[^\p{C}/\\.:]+(\.[^\p{C}/\\.:]+)*$")]
ModuleName = Annotated[str, StringConstraints(max_length=1024, pattern=r"^([^\p{C}/\\.:]+(\.[^\p{C}/\\.:]+)*)?$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Settings = Annotated[dict[Text, JsonValue], AfterValidator(_can_be_read)]
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
SignedCount = Annotated[int, Field(ge=-_MAX_COUNT, le=_MAX_COUNT)]
DType = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


class Record(BaseModel):
    """What every part of a manifest is: frozen, nothing converted, no field unknown."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class QuantizationRecord(Record):
    """How the model is quantized.

    Attributes:
        method: ``"bitsandbytes_4bit"``, ``"bitsandbytes_8bit"``, another method's name, or ``None``.
        config: Its settings, as the model's config says them.
    """

    method: Text | None
    config: Settings


class ModelRecord(Record):
    """Which model was prepared.

    Attributes:
        class_name: Its class (``"class"`` in JSON).
        name_or_path: Where it was loaded from; a note to the reader, never opened and not compared with a model.
        config_sha256: SHA-256 (hex) of its config without what changes by use; ``None`` for a model without config.
        dtype: The original dtype of its first floating-point parameter that is not quantized.
        quantization: How it is quantized.
    """

    class_name: Text = Field(alias="class")
    name_or_path: Text
    config_sha256: Sha256 | None
    dtype: DType | None
    quantization: QuantizationRecord


class ConfigRecord(Record):
    """The fields of ``PrepareConfig``. A class among ``norm_modules`` is recorded by its name, and matches by name."""

    precision: Literal["full", "compute", "norms", "adapted", "none"]
    freeze: bool
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: Settings
    input_require_grads: bool | None
    head_chunk_bytes: Annotated[int, Field(ge=1, le=_MAX_COUNT)] | None
    norm_modules: tuple[Text, ...] = Field(strict=False, max_length=256)
    memory_budget: Count | Annotated[str, StringConstraints(max_length=64)] | None
    audit: bool = False
    keep_originals: bool
    empty_cache: bool
    progress: bool

    @model_validator(mode="after")
    def _can_be_meant(self) -> ConfigRecord:
        self.prepare_config()
        return self

    def prepare_config(self) -> PrepareConfig:
        """The settings as a ``PrepareConfig``.

        Raises:
            ConfigError: They cannot be meant.
        """
        try:
            return PrepareConfig(**self.model_dump())
        except (OverflowError, RecursionError) as error:
            raise ConfigError(f"norm_modules: not a regular expression that can be compiled: {error}") from error


class StateRecord(Record):
    """Hooks, flags and modes at one moment. Modules are named by their canonical names; ``""`` is the model itself.

    Attributes:
        input_gradient_hooks: ``{module: number of hooks}`` where there are any.
        checkpointing: Modules whose ``gradient_checkpointing`` is true.
        use_cache: ``config.use_cache``; ``None`` where there is none.
        num_modules: Modules of the base.
        num_training: How many of them are in train mode.
    """

    input_gradient_hooks: dict[ModuleName, Count]
    checkpointing: tuple[ModuleName, ...] = Field(strict=False)
    use_cache: bool | None
    num_modules: Count
    num_training: Count


class RoleBytes(Record):
    """A row of a plan's table: parameters, their bytes as loaded, and the bytes added."""

    count: Count
    bytes: Count
    added_bytes: SignedCount


class PlanRecord(Record):
    """What the plan said, in bytes. Names as in ``Plan``."""

    added_bytes: SignedCount
    peak_bytes: Count
    cache_bytes: Count
    record_bytes: Count
    by_role: dict[Text, RoleBytes]


class MemoryRecord(Record):
    """What was measured at one moment, in bytes.

    Attributes:
        parameter_bytes: Held by the parameters' storages, each counted once.
        allocated_bytes: ``torch.cuda.memory_allocated`` over all devices that hold parameters; ``None`` without CUDA.
        reserved_bytes: ``torch.cuda.memory_reserved``, likewise.
    """

    parameter_bytes: Count
    allocated_bytes: Count | None
    reserved_bytes: Count | None


class MomentRecord(Record):
    """The model's state and memory at one moment."""

    state: StateRecord
    memory: MemoryRecord


class Kind(Record):
    """What many tensors share.

    Attributes:
        type: ``"parameter"``, ``"quantization"`` (the statistics of a quantized weight) or ``"buffer"`` (persistent).
        shape: The shape.
        original_dtype: The storage dtype as loaded.
        prepared_dtype: The storage dtype while prepared.
        requires_grad: The flag before preparation.
        prepared_requires_grad: The flag while prepared.
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
        type: ``"parameter"``, ``"quantization"`` or ``"buffer"``.
        shape: The shape.
        original_dtype: The storage dtype as loaded, such as ``"bfloat16"``.
        prepared_dtype: The storage dtype while prepared.
        requires_grad: The flag before preparation.
        prepared_requires_grad: The flag while prepared.
        digest: The 64-bit digest of the original content, 16 hex digits.
        tie_group: Tensors of the same group are one tensor; ``None`` where it is no other's.
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
