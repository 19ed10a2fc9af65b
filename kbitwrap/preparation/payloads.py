"""The parts of a manifest that are read while preparing: hooks, flags, modes, memory and the plan's figures."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_COUNT = (1 << 63) - 1

Text = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
ModuleName = Annotated[str, StringConstraints(max_length=1024, pattern=r"^([^\p{C}/\\.:]+(\.[^\p{C}/\\.:]+)*)?$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
SignedCount = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]


class Record(BaseModel):
    """The base of every part of a manifest: frozen, strict about types, without unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def new_fields(cls) -> dict[str, Any]:
        """The fields that version 1 of the manifest does not have, with their defaults."""
        return {name: field.default for name, field in cls.model_fields.items() if not field.is_required()}


class StateRecord(Record):
    """Hooks, flags and modes at one moment. Modules are named by their canonical names; ``""`` is the model itself.

    ``input_gradient_hooks`` counts those of each module that has any, ``checkpointing`` names the modules whose
    ``gradient_checkpointing`` is true, ``use_cache`` is the config's, and the modules counted are those of the base.
    """

    # A preparation makes it with `model_construct`, so that no module's name stops it; the manifest validates it.
    model_config = ConfigDict(revalidate_instances="always")

    input_gradient_hooks: dict[ModuleName, Count]
    checkpointing: tuple[ModuleName, ...] = Field(strict=False)
    use_cache: bool | None
    num_modules: Count
    num_training: Count


class MemoryRecord(Record):
    """Memory at one moment, in bytes: of the parameters' storages, each counted once, and as ``torch.cuda`` counts it.

    The latter is over all devices that hold parameters, and ``None`` without CUDA.
    """

    parameter_bytes: Count
    allocated_bytes: Count | None
    reserved_bytes: Count | None


class MomentRecord(Record):
    """State and memory of a model at one moment."""

    model_config = ConfigDict(revalidate_instances="always")  # as in `StateRecord`

    state: StateRecord
    memory: MemoryRecord


class RoleBytes(Record):
    """A row of a plan's table: the number of parameters, their bytes as loaded, and the bytes added."""

    count: Count
    bytes: Count
    added_bytes: SignedCount


class PlanRecord(Record):
    """The figures of a plan, in bytes. Names as in ``Plan``."""

    added_bytes: SignedCount
    peak_bytes: Count
    cache_bytes: Count
    record_bytes: Count
    by_role: dict[Text, RoleBytes]
