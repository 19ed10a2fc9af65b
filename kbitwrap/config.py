"""The settings of a preparation, ``Precision`` and ``PrepareConfig``, and the kinds of quantization."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, NoReturn

from .errors import ConfigError, UnsupportedModelError

StrPath = str | os.PathLike[str]
"""A path; where a model is asked for, also its name on the hub."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


class Precision(str, Enum):
    """Use of float32 in a prepared model, and its cost in memory.

    Example:
        >>> from kbitwrap import Precision
        >>> Precision("norms") is Precision.NORMS
        True
    """

    FULL = "full"
    """PEFT's: every unquantized half-precision parameter is *stored* in float32, twice its bytes."""
    COMPUTE = "compute"
    """Bit-identical to ``"full"``: embeddings, head and experts are *upcast as they are used* and stay stored in half;
    parameters used in other ways (norms, biases, convolutions) are stored in float32,
    and the plan gives the reason."""
    NORMS = "norms"
    """Norms compute in float32 and return what the unprepared norm returns; nothing more is stored."""
    ADAPTED = "adapted"
    """As ``"norms"``, only in blocks that hold an adapter: given a PEFT model, or told by ``adopt``."""
    NONE = "none"
    """As loaded: freezing and checkpointing only."""

    __str__ = str.__str__

    @property
    def upcasts_all(self) -> bool:
        """Whether every unquantized half parameter computes as float32, so that a copy of it is stored in float32."""
        return self in (Precision.FULL, Precision.COMPUTE)


class QuantKind(str, Enum):
    """A kind of quantization by bitsandbytes: the words of ``--quant``.

    Example:
        >>> from kbitwrap import QuantKind
        >>> QuantKind("fp4").settings["bnb_4bit_quant_type"]
        'fp4'
    """

    NF4 = "nf4"
    """nf4 in 4 bits, without double quantization."""
    NF4_DOUBLE = "nf4-double"
    """The same with double quantization."""
    FP4 = "fp4"
    """fp4 in 4 bits, without double quantization: what ``load_in_4bit=True`` alone makes."""
    FP4_DOUBLE = "fp4-double"
    """The same with double quantization."""
    INT8 = "int8"
    """8 bits."""
    NONE = "none"
    """Not quantized."""

    __str__ = str.__str__

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of transformers' ``BitsAndBytesConfig``; of ``"none"`` there are none."""
        if self is QuantKind.NONE:
            return {}
        if self is QuantKind.INT8:
            return {"load_in_8bit": True}
        quant_type, _, double = self.value.partition("-")
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quant_type,
            "bnb_4bit_use_double_quant": bool(double),
        }


def parse_bytes(value: int | str) -> int:
    """Read a number of bytes: an integer, or a string such as ``"512MiB"`` (powers of 1024) or ``"8 GB"`` (of 1000)."""
    if type(value) is int and value >= 0:  # no bool
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            return int(Decimal(match[1]) * _UNITS[match[2].lower()])
    raise ConfigError(
        f"expected a number of bytes such as 536870912 or '512MiB', found {value!r}; "
        "units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024)"
    )


def format_bytes(num_bytes: int) -> str:
    """Write a number of bytes in binary units, such as ``"512.5 MiB"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


_YES_OR_NO = (
    "freeze",
    "gradient_checkpointing",
    "audit",
    "keep_originals",
    "empty_cache",
    "progress",
)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": tuple(precision.value for precision in Precision),
    "input_require_grads": (None, True, False),
    "head": (None, "float32"),
    "adapter_dtype": (None, "float32", "bfloat16"),
    **dict.fromkeys(_YES_OR_NO, (True, False)),
}


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """The settings of one preparation. Every field is also a keyword of ``KbitPreparedModel`` and ``build_plan``.

    Args:
        precision: A ``Precision`` or its value.
        freeze: Set ``requires_grad=False`` on the base parameters. Adapter parameters
            are never touched.
        gradient_checkpointing: Enable activation checkpointing. A quantized model that
            does not support it is refused with ``UnsupportedModelError`` before
            anything changes.
        gradient_checkpointing_kwargs: Passed to ``torch.utils.checkpoint.checkpoint``;
            what the model's own method takes, such as transformers' ``every_n_layers``
            and ``offload``, goes to that.
        input_require_grads: ``None`` hooks the input embeddings only where reentrant
            checkpointing needs it, and makes a checkpointed block's input require grad
            where an adapter needs it (aLoRA); ``True`` and ``False`` force the hook on
            the embeddings.
        head: ``"float32"``: the output head multiplies in float32 and returns float32
            logits, under autocast too, from its half weight, which is upcast as it is
            used. ``"full"`` and ``"compute"`` upcast it anyway.
        head_chunk_bytes: With ``"compute"`` or ``head="float32"``: the largest float32
            piece of the output head alive at once, in bytes. ``None`` computes it in
            one piece, which is bit-identical to ``"full"`` on every shape; in pieces,
            the matrix library may block the product differently.
        adapter_dtype: The dtype that adapters are trained in: ``"float32"`` or
            ``"bfloat16"``; ``None`` leaves them as they are. Adapters that exist are
            cast by ``prepare``, those made later by ``adopt``; Parameter objects stay.
            ``restore`` leaves trained ones in this dtype, and reports it. Trained copies
            of base modules (``modules_to_save``, a reward model's head) follow the
            precision.
        norm_modules: Further norms: classes, or class-name patterns (regular
            expressions, matched in full).
        memory_budget: Bytes, or a string such as ``"512MiB"``. A plan whose peak is
            over it raises ``MemoryBudgetError`` before anything changes.
        audit: Record a whole digest of every unquantized tensor when preparing, so that
            ``verify``, ``export``, ``manifest`` and ``restore`` know of every change to
            it. Without it they compare a sampled fingerprint.
        keep_originals: Keep a host copy of every parameter that is cast, so that
            ``restore(trained="discard")`` can put values back that training changed.
            Costs the parameters' original bytes in host memory; on a CPU twice while
            suspended, because a suspended model may be written to.
        empty_cache: Return freed blocks to the device after preparing and restoring.
        progress: Show a progress bar over long work, on standard error.

    Raises:
        ConfigError: A value is invalid.

    Example:
        >>> from kbitwrap import PrepareConfig
        >>> PrepareConfig(precision="full").precision
        <Precision.FULL: 'full'>
    """

    precision: Precision = Precision.NORMS
    freeze: bool = True
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: Mapping[str, Any] = field(
        default_factory=lambda: {"use_reentrant": False}
    )
    input_require_grads: bool | None = None
    head: Literal["float32"] | None = None
    head_chunk_bytes: int | None = None
    adapter_dtype: Literal["float32", "bfloat16"] | None = None
    norm_modules: tuple[type | str, ...] = ()
    memory_budget: int | str | None = None
    audit: bool = False
    keep_originals: bool = False
    empty_cache: bool = True
    progress: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            # 1 and 0 are equal to True and False
            if value not in choices or type(value) is int:
                expected = f"one of {', '.join(map(repr, choices))}"
                raise ConfigError(f"{name}: expected {expected}, found {value!r}")

        chunk = self.head_chunk_bytes
        if chunk is not None and (type(chunk) is not int or chunk <= 0):  # no bool
            raise ConfigError(
                f"head_chunk_bytes: expected None or a positive number of bytes, found {chunk!r}"
            )

        kwargs = self.gradient_checkpointing_kwargs
        if not isinstance(kwargs, Mapping) or not all(
            isinstance(key, str) for key in kwargs
        ):
            raise ConfigError(
                "gradient_checkpointing_kwargs: expected a mapping of keyword arguments of "
                f"torch.utils.checkpoint.checkpoint, found {kwargs!r}"
            )

        norms = self.norm_modules
        if isinstance(norms, (type, str)):
            norms = (norms,)
        if not isinstance(norms, (tuple, list)) or not all(
            isinstance(norm, (type, str)) for norm in norms
        ):
            raise ConfigError(
                f"norm_modules: expected a tuple of classes or class-name patterns, found {norms!r}"
            )
        for pattern in norms:
            if isinstance(pattern, type):
                continue
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(
                    f"norm_modules: {pattern!r:.80} is not a regular expression: {error}"
                ) from error

        if self.memory_budget is not None:
            parse_bytes(self.memory_budget)
        object.__setattr__(self, "precision", Precision(self.precision))
        object.__setattr__(self, "gradient_checkpointing_kwargs", dict(kwargs))
        object.__setattr__(self, "norm_modules", tuple(norms))

    @property
    def _name_or_path(self) -> NoReturn:
        """Raise: TRL asks the config of a model for it, and was given the wrapper in place of the model."""
        raise UnsupportedModelError(
            "expected a model, found the KbitPreparedModel that wraps it: give the trainer prepared.model"
        )

    @property
    def memory_budget_bytes(self) -> int | None:
        """The memory budget in bytes, or ``None``."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)

    @classmethod
    def of(
        cls, config: PrepareConfig | None, fields: Mapping[str, Any]
    ) -> PrepareConfig:
        """Merge a config, ``None`` for the defaults, with fields given as keywords, which win.

        Raises:
            ConfigError: A name is not that of a field, or a value is invalid.
        """
        if config is not None and not isinstance(config, PrepareConfig):
            raise ConfigError(
                f"config: expected a PrepareConfig or None, found {type(config).__name__}; "
                "give single settings as keywords, such as precision='norms'"
            )
        names = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in names:
                raise ConfigError(
                    f"unknown field {name!r}; the fields are {', '.join(names)}"
                )
        return dataclasses.replace(config or cls(), **fields)
