"""The settings of a benchmark: the model's shape and the options, as plain values that travel between processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

PEFT = "peft"
PEFT_UNCLEARED = "peft-uncleared"
"""PEFT's function with ``auto_clear_cache=False``: as it was when huggingface/peft#3265 was reported."""
CHUNKED = "compute-chunked"
"""``"compute"`` with ``head_chunk_bytes``."""
PLOT_SUFFIXES = (".svg", ".png", ".pdf")
CASES = (PEFT, PEFT_UNCLEARED, "full", "compute", CHUNKED, "norms", "adapted", "none")


Figures = dict[str, Any]
"""Figures and settings by name, ready for JSON."""


class BenchError(Exception):
    """A benchmark that cannot be run. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a Mistral model.

    Attributes:
        hidden_size: Width of the residual stream; a multiple of 64.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        intermediate_size: Width of the feed-forward part; a multiple of 64.
        vocab_size: Rows of the embeddings and of the head.
        is_tied: The head's weight is the embeddings'.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool = False

    def resized(
        self, *, hidden_size: int | None, num_layers: int | None, vocab_size: int | None
    ) -> Shape:
        """Another size of the same shape.

        Args:
            hidden_size: Another width, the others following it; a multiple of 256.
            num_layers: Another number of layers.
            vocab_size: Another vocabulary.

        Returns:
            The shape; ``None`` leaves a size as it is.

        Example:
            >>> MISTRAL_7B.resized(
            ...     hidden_size=1024, num_layers=4, vocab_size=None
            ... ).num_kv_heads
            2
        """
        changes: Figures = {}
        if hidden_size is not None:
            head_size = min(128, hidden_size // 4)
            num_heads = hidden_size // head_size
            changes |= {
                "hidden_size": hidden_size,
                "intermediate_size": hidden_size * 7 // 2,
            }
            changes |= {"num_heads": num_heads, "num_kv_heads": max(1, num_heads // 4)}
        if num_layers is not None:
            changes["num_layers"] = num_layers
        if vocab_size is not None:
            changes["vocab_size"] = vocab_size
        return dataclasses.replace(self, **changes)


MISTRAL_7B = Shape(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14336,
    vocab_size=32768,
)
"""Mistral-7B-v0.3's."""
SMALL = MISTRAL_7B.resized(hidden_size=1024, num_layers=4, vocab_size=None)
"""A model with a real vocabulary on which a CPU can take a training step."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one benchmark.

    Attributes:
        shape: The model's shape.
        device: Where the model is.
        repeats: How often each timing is taken; 0 takes none and no peaks, and leaves
            loss and gradients.
        seed: Seed of all that is random.
        step: Take training steps.
        predict: Predict them too, and track them.
        export: Export the prepared base, or what is merged into it, and nothing else.
        tokens: Tokens in the batch of a training step: one or several numbers, each
            measured.
        compute_dtype: The dtype that quantized layers compute in.
        autocast: Take the steps under bfloat16 autocast.
        reentrant: Checkpoint activations in the reentrant way.
        modules_to_save: Train a copy of the output head beside the LoRA.
        head_chunk_bytes: The largest float32 piece of the head alive at once, in the
            case ``"compute-chunked"``.
    """

    shape: Shape
    device: str = "cpu"
    repeats: int = 3
    seed: int = 0
    step: bool = False
    predict: bool = False
    export: bool = False
    tokens: tuple[int, ...] = (128,)
    compute_dtype: str = "float32"
    autocast: bool = False
    reentrant: bool = False
    modules_to_save: bool = False
    head_chunk_bytes: int = 8 << 20

    def to_dict(self) -> Figures:
        """The settings as plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Figures) -> Settings:
        """Read the settings back.

        Args:
            values: What ``to_dict`` returned.

        Returns:
            The settings.
        """
        return cls(
            **{
                **values,
                "shape": Shape(**values["shape"]),
                "tokens": tuple(values["tokens"]),
            }
        )


MERGED = "merged"
"""``"norms"``, with a LoRA on every linear layer that the export merges."""
EXPORTED = ("full", "compute", "norms", MERGED)
"""The cases of an export: everything, little and nothing is stored in another dtype than it is written in; a merge."""


def default_cases(settings: Settings) -> tuple[str, ...]:
    """The cases that are measured where none is named: those whose figures can differ from all others'.

    Args:
        settings: What is measured.

    Returns:
        Their names.
    """
    if settings.export:
        return EXPORTED
    has_cache = settings.device.partition(":")[0] == "cuda"
    left_out = {PEFT_UNCLEARED: not has_cache, CHUNKED: not settings.step}
    return tuple(case for case in CASES if not left_out.get(case))


FLOAT64 = "float64"
"""The dequantized model, its adapters and their training in float64, where what rounding adds is out of sight."""
DEFAULT_LOSS_CASES = ("none", "norms", "none-float32", "norms-float32", PEFT, FLOAT64)
"""``"none"`` and ``"norms"`` have adapters in bfloat16, as TRL has by default; all others have them in float32."""
LOSS_CASES = (*DEFAULT_LOSS_CASES, "full-float32")
"""``"full-float32"`` computes what PEFT's function does, so it is trained where it is named only."""
ROLLOUT_CASES = (
    "llama-nf4",
    "llama-int8",
    "qwen3-nf4",
    "qwen3-int8",
    "gemma-nf4",
    "gemma-int8",
)
"""The architecture of a model that is trained beside an engine, and how it is quantized there."""
LAST_STEPS = 20
"""Steps at the end of a training of which the mean loss is taken."""
DISTANCES = ("logits_distance", "gradient_distance")
"""The figures that say how far a case is from float64, in parts of what float64 gives."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of the loss curves: a byte-level Llama, pretrained from nothing, and how a LoRA on it is trained.

    Attributes:
        device: Where the models are.
        repeats: Seeds. Each has a base of its own, and draws of its own for the
            adapters and the order of the data.
        seed: The first seed.
        hidden_size: Width of the model; a multiple of 64.
        num_layers: Decoder layers.
        pretraining_steps: Steps in which the base is trained.
        steps: Steps in which the adapters are trained.
        batch_size: Blocks of text in a batch.
        length: Bytes in a block.
        learning_rate: The adapters', at the first step. It falls linearly to 0.
        rank: The adapters'.
        num_held_out: Blocks of text that no training sees.
        quant: ``"nf4"`` or ``"int8"``.
        autocast: Train the adapters under bfloat16 autocast.
    """

    device: str = "cpu"
    repeats: int = 3
    seed: int = 0
    hidden_size: int = 128
    num_layers: int = 4
    pretraining_steps: int = 300
    steps: int = 100
    batch_size: int = 8
    length: int = 128
    learning_rate: float = 2e-4
    rank: int = 16
    num_held_out: int = 64
    quant: str = "nf4"
    autocast: bool = True
