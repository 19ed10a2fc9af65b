"""Ranges, with reasons, of the bytes that a CUDA device's allocator may count beside a prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import format_bytes
from ..tensors.allocator import ALLOCATION_BYTES, rounded_up
from .ledger import DEQUANTIZED, FORWARD
from .reserved import WORKSPACE_BYTES, Reserved

if TYPE_CHECKING:
    from .trace import Step

THREADS = 2  # the caller's, and that of autograd
FUSED_TOKENS = 1536  # bitsandbytes/backends/cuda/ops.py, `_gemm_4bit_custom_max_m`


@dataclass(frozen=True)
class Unknown:
    """Something that may add to the measured peak.

    Attributes:
        what: What it is.
        least_bytes: The least that it adds; less than 0 where it may spare memory.
        most_bytes: The most.
        is_bounded: Whether that is a bound.
    """

    what: str
    least_bytes: int
    most_bytes: int
    is_bounded: bool = True

    def __str__(self) -> str:
        return f"{format_bytes(self.least_bytes)} to {format_bytes(self.most_bytes)}: {self.what}"


def unknowns(
    step: Step,
    reserved: Reserved | None,
    tokens: int,
    sampled: int,
    *,
    has_int8: bool,
) -> tuple[Unknown, ...]:
    """Return the unknown parts of a step's peak on CUDA.

    Args:
        step: The predicted step.
        reserved: What is reserved for it, where that is known.
        tokens: The tokens of its batch.
        sampled: The bytes of the samples that a preparation keeps.
        has_int8: Whether the model has 8-bit layers.

    Returns:
        The parts, each with its range.
    """
    least, most = (THREADS * size for size in WORKSPACE_BYTES)
    found = [
        Unknown(
            "workspaces of cuBLAS for two threads, the larger ones from compute capability 9.0",
            least,
            most,
        )
    ]
    if reserved is not None:
        longer = (
            reserved.allocated
            - step.peak_bytes
            - least
            - rounded_up(sampled, ALLOCATION_BYTES)
        )
        found.append(
            Unknown(
                "blocks of the allocator that are longer than what they hold, as many as a run happens to get",
                0,
                longer,
            )
        )
    dequantized = 0
    if step.phases.get(FORWARD) == step.peak_bytes:
        dequantized = step.by_kind.get(DEQUANTIZED, 0)
    if dequantized and tokens <= FUSED_TOKENS:
        found.append(
            Unknown(
                f"weights dequantized in the forward pass, which a fused kernel may spare up to {FUSED_TOKENS} tokens",
                -dequantized,
                0,
            )
        )
    if sampled:
        found.append(
            Unknown(
                "samples of parameters, by which kbitwrap tells what training changed",
                sampled,
                sampled,
            )
        )
    if has_int8:
        found.append(
            Unknown(
                "columns of outliers in 8-bit layers: none are assumed, and no bound is known",
                0,
                0,
                is_bounded=False,
            )
        )
    return tuple(found)
