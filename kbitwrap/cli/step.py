"""``kbitwrap plan --step``: what a training step takes, for each precision and for PEFT's way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group

from .. import StepPredictor
from .console import (
    EXIT_DONE,
    EXIT_NO,
    hanging,
    show,
    show_json,
    warned,
)
from .hub import choose_quantization, refusing, working
from .plot import draw_steps
from .tables import figure, table

if TYPE_CHECKING:
    from .. import StepMemory

_DEFAULT_SEQ_LEN = 2048
_GIB = 2**30
_BESIDE = (
    "Tensors alone are counted, and a budget is compared with them: the CUDA context, fragmentation and other programs "
    "on the device come on top."
)


@dataclass(frozen=True)
class StepRequest:
    """A request for predictions.

    Attributes:
        model: A folder, a ``config.json``, or a name on the hub.
        quant: The quantization; ``None`` for the model's own, or the default.
        dtype: The dtype of what is not quantized.
        seq_len: Tokens in a sequence; ``None`` for 2048, or the model's own longest if
            that is less.
        batch_size: Sequences in a batch.
        rank: LoRA's rank.
        optimizer: A name of ``TrainingArguments.optim``.
        autocast: The dtype of autocast, or ``None``.
        kernels: ``"cuda"`` or ``"cpu"``.
        budget: Bytes, or ``None``.
    """

    model: str
    quant: str | None
    dtype: str
    seq_len: int | None
    batch_size: int
    rank: int
    optimizer: str
    autocast: str | None
    kernels: str
    budget: int | None


@dataclass(frozen=True)
class Prediction:
    """The step of one precision, and with a budget the longest sequence and the largest batch that fit it."""

    step: StepMemory
    longest: int | None = None
    largest: int | None = None

    def fits(self, budget: int | None) -> bool:
        """Whether the step fits a budget, or there is none."""
        return budget is None or self.step.peak_bytes <= budget

    def to_dict(self, budget: int | None) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        found = self.step.to_dict()
        if budget is not None:
            found["fits"] = self.fits(budget)
            found["longest_sequence"] = self.longest
            found["largest_batch"] = self.largest
        return found


Predictions = dict[str, Prediction]
"""The predictions, by precision."""


def plan_steps(
    request: StepRequest, precisions: Sequence[str], plot: Path | None, as_json: bool
) -> int:
    """Predict, and print what was predicted.

    Args:
        request: What is asked for.
        precisions: The precisions, ``"peft"`` among them.
        plot: The file to draw to, or ``None``.
        as_json: Whether to print JSON.

    Returns:
        0 if every precision fits the budget, else 1.

    Raises:
        InputError: The model's step cannot be predicted.
    """
    model, budget = request.model, request.budget
    found: Predictions = {}
    with working(model, f"building {model}") as doing:
        quantization = choose_quantization(model, request.quant, request.dtype).name
        for number, precision in enumerate(precisions, 1):
            what = f"predicting {precision} ({number} of {len(precisions)})"
            with refusing(f"the step of {model!r} cannot be predicted"):
                found[precision] = _predict(request, precision, what, doing.now)
    if plot is not None:
        title = f"{Path(model).name}: a step of {_batch(found)}, at its peak"
        steps = {name: one.step for name, one in found.items()}
        draw_steps(steps, plot, title, budget)
    if as_json:
        predicted = {name: one.to_dict(budget) for name, one in found.items()}
        result = {"model": model, "budget_bytes": budget, "steps": predicted}
        show_json(result)
    else:
        _show(request, quantization, found)
    fits = [one.fits(budget) for one in found.values()]
    return EXIT_DONE if all(fits) else EXIT_NO


def _predict(
    request: StepRequest, precision: str, what: str, say: Callable[[str], object]
) -> Prediction:
    """Predict the step, and with a budget what fits it."""
    from peft import LoraConfig

    quantization = choose_quantization(request.model, request.quant, request.dtype)
    predict = StepPredictor(
        request.model,
        precision=precision,
        lora=LoraConfig(r=request.rank, target_modules="all-linear"),
        quantization_config=quantization.config,
        dtype=request.dtype,
        optimizer=request.optimizer,
        autocast=request.autocast,
        kernels=request.kernels,
    )
    say(f"{what}: the step")
    seq_len = request.seq_len
    if seq_len is None:
        seq_len = min(_DEFAULT_SEQ_LEN, predict.max_seq_len or _DEFAULT_SEQ_LEN)
    step = predict(request.batch_size, seq_len)
    if request.budget is None:
        return Prediction(step)
    say(f"{what}: the longest sequence")
    longest = predict.longest_sequence(request.budget, request.batch_size)
    say(f"{what}: the largest batch")
    return Prediction(step, longest, predict.largest_batch(request.budget, seq_len))


# ----------------------------------------------------------------------------------------------------
# What is shown of it.
# ----------------------------------------------------------------------------------------------------


def _batch(found: Predictions) -> str:
    step = next(iter(found.values())).step
    return f"{step.batch_size} x {step.seq_len:,} tokens"


def _show(request: StepRequest, quantization: str, found: Predictions) -> None:
    budget = request.budget
    limit = "" if budget is None else f", budget {figure(budget, _GIB)}"
    rows, same = _by_precision(budget, found)
    parts: list[Any] = [
        f"{request.model}: a step of {_batch(found)} on {request.kernels}, {quantization}, LoRA of rank "
        f"{request.rank}{limit}. In GiB:",
        table(rows, right=True),
    ]
    if same:
        parts.append(f"For each: {', '.join(same)}.")
    parts.append(table(_by_kind(found), right=True))
    steps = [one.step for one in found.values()]
    if any(step.unknown for step in steps):
        parts.append(_beside(steps))
    notes = dict.fromkeys(note for step in steps for note in step.notes)
    parts += [hanging(f"note: {note}", 2) for note in notes]
    if warnings := warned({name: one.step.warnings for name, one in found.items()}):
        parts.append(Group(*warnings))
    show(*parts)


def _by_precision(
    budget: int | None, found: Predictions
) -> tuple[list[list[str]], list[str]]:
    """The rows of the precisions, and what of a budget is the same in all of them, to be said once."""
    rows = [["precision", "before", "forward", "backward", "optimizer", "peak"]]
    for name, one in found.items():
        step = one.step
        phases = (step.forward_bytes, step.backward_bytes, step.optimizer_bytes)
        sizes = (step.static_bytes, *phases, step.peak_bytes)
        rows.append([name, *(figure(size, _GIB) for size in sizes)])
    same: list[str] = []
    if budget is None:
        return rows, same
    predictions = list(found.values())
    seq_len = predictions[0].step.seq_len
    columns = {
        "fits": ["yes" if one.fits(budget) else "no" for one in predictions],
        "longest sequence": [f"{one.longest:,}" for one in predictions],
        f"largest batch at {seq_len:,}": [f"{one.largest:,}" for one in predictions],
    }
    for header, cells in columns.items():
        if len(cells) > 1 and len(set(cells)) == 1:
            same.append(f"{header} {cells[0]}")
        else:
            for row, cell in zip(rows, [header, *cells], strict=True):
                row.append(cell)
    return rows, same


def _by_kind(found: Predictions) -> list[list[str]]:
    """The rows of what is held at the peak."""
    peaks = [one.step.by_kind for one in found.values()]
    rows = [["held at the peak", *found]]
    for kind in dict.fromkeys(kind for peak in peaks for kind in peak):
        sizes = [figure(peak.get(kind, 0), _GIB) for peak in peaks]
        rows.append([kind.replace("_", " "), *sizes])
    return rows


def _beside(steps: Sequence[StepMemory]) -> Group:
    """Say what a device holds beside the figures: the range of the unknown parts, and what no figure counts."""
    # each in short, without its number
    parts = dict.fromkeys(
        part.what.partition(",")[0].lstrip("0123456789 ")
        for step in steps
        for part in step.unknown
    )
    least = min(step.unknown_bytes[0] for step in steps)
    most = max(step.unknown_bytes[1] for step in steps)
    sign = "-" if least < 0 else ""
    unknown = (
        f"Unknown, beside each peak: {sign}{figure(abs(least), _GIB)} to {figure(most, _GIB)} "
        f"({'; '.join(parts)})."
    )
    return Group(hanging(unknown, 2), hanging(_BESIDE, 2))
