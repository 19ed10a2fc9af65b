"""``kbitwrap plan --step``: what a training step takes, for each precision and for PEFT's way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import ConfigError, StepPredictor, UnsupportedModelError
from .console import (
    EXIT_DONE,
    EXIT_NO,
    InputError,
    hanging,
    joined,
    progress,
    quiet_libraries,
    show,
    warned,
)
from .hub import choose_quantization, in_options, models
from .plot import draw_steps
from .tables import table

if TYPE_CHECKING:
    from .. import StepMemory

_DEFAULT_SEQ_LEN = 2048
_OF_BUDGET = 6  # the columns before those of a budget
_BESIDE = (
    "Tensors alone are counted, and a budget is compared with them: the CUDA context, fragmentation and other programs "
    "on the device come on top."
)

Say = Callable[[str], None]
"""Says what is being predicted now."""


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
        plot: The file to draw to, or ``None``.
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
    plot: Path | None


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
            found |= {
                "fits": self.fits(budget),
                "longest_sequence": self.longest,
                "largest_batch": self.largest,
            }
        return found


def plan_steps(request: StepRequest, precisions: Sequence[str], as_json: bool) -> int:
    """Predict, and print what was predicted.

    Args:
        request: What is asked for.
        precisions: The precisions, ``"peft"`` among them.
        as_json: Whether to print JSON.

    Returns:
        0 if every precision fits the budget, else 1.

    Raises:
        InputError: The model's step cannot be predicted.
    """
    found: dict[str, Prediction] = {}
    with (
        models(request.model),
        progress(f"building {request.model}") as doing,
        quiet_libraries(),
    ):
        quantization = choose_quantization(
            request.model, request.quant, request.dtype
        ).name
        for number, precision in enumerate(precisions, 1):

            def say(
                what: str, which: str = f"{precision} ({number} of {len(precisions)})"
            ) -> None:
                doing.now(f"predicting {which}: {what}")

            found[precision] = _predict(request, precision, say)
    if request.plot is not None:
        _draw(request, found, request.plot)
    if as_json:
        print(json.dumps(_to_dict(request, found), indent=2))
    else:
        _show(request, quantization, found)
    fits = [one.fits(request.budget) for one in found.values()]
    return EXIT_DONE if all(fits) else EXIT_NO


def _to_dict(request: StepRequest, found: dict[str, Prediction]) -> dict[str, Any]:
    steps = {name: one.to_dict(request.budget) for name, one in found.items()}
    return {"model": request.model, "budget_bytes": request.budget, "steps": steps}


def _draw(request: StepRequest, found: dict[str, Prediction], file: Path) -> None:
    title = (
        f"{Path(request.model).name}: a step of {_batch(request, found)}, at its peak"
    )
    draw_steps(
        {name: one.step for name, one in found.items()}, file, title, request.budget
    )


def _batch(request: StepRequest, found: dict[str, Prediction]) -> str:
    return f"{request.batch_size} x {_seq_len(found):,} tokens"


def _seq_len(found: dict[str, Prediction]) -> int:
    return next(iter(found.values())).step.seq_len


def _predict(request: StepRequest, precision: str, say: Say) -> Prediction:
    try:
        return _predict_all(request, precision, say)
    except ConfigError as error:
        raise InputError(in_options(error)) from error
    except UnsupportedModelError as error:
        raise InputError(
            f"the step of {request.model!r} cannot be predicted: {in_options(error)}"
        ) from error


def _predict_all(request: StepRequest, precision: str, say: Say) -> Prediction:
    """Predict the step, and with a budget what fits it."""
    from peft import LoraConfig

    predict = StepPredictor(
        request.model,
        precision=precision,
        lora=LoraConfig(r=request.rank, target_modules="all-linear"),
        quantization_config=choose_quantization(
            request.model, request.quant, request.dtype
        ).config,
        dtype=request.dtype,
        optimizer=request.optimizer,
        autocast=request.autocast,
        kernels=request.kernels,
    )
    say("the step")
    seq_len = request.seq_len
    if seq_len is None:
        seq_len = min(_DEFAULT_SEQ_LEN, predict.max_seq_len or _DEFAULT_SEQ_LEN)
    step = predict(request.batch_size, seq_len)
    if request.budget is None:
        return Prediction(step)
    say("the longest sequence")
    longest = predict.longest_sequence(request.budget, request.batch_size)
    say("the largest batch")
    return Prediction(step, longest, predict.largest_batch(request.budget, seq_len))


# ----------------------------------------------------------------------------------------------------
# What is shown of it.
# ----------------------------------------------------------------------------------------------------


def _show(
    request: StepRequest, quantization: str, found: dict[str, Prediction]
) -> None:
    rows, same = _by_precision(request, found)
    budget = "" if request.budget is None else f", budget {_gib(request.budget)}"
    parts: list[Any] = [
        f"{request.model}: a step of {_batch(request, found)} on {request.kernels}, {quantization}, LoRA of rank "
        f"{request.rank}{budget}. In GiB:",
        table(rows, right=True),
    ]
    if same:
        parts.append(f"For each: {same}.")
    parts.append(table(_by_kind(found), right=True))
    parts += _beside(found)
    notes = dict.fromkeys(note for one in found.values() for note in one.step.notes)
    parts += [hanging(f"note: {note}", 2) for note in notes]
    if warnings := warned({name: one.step.warnings for name, one in found.items()}):
        parts.append(joined(warnings))
    show(*parts)


def _by_precision(
    request: StepRequest, found: dict[str, Prediction]
) -> tuple[list[list[str]], str]:
    """The rows of the precisions, and what is the same in all of them, to be said once."""
    rows = [["precision", "before", "forward", "backward", "optimizer", "peak"]]
    for name, one in found.items():
        step = one.step
        phases = (step.forward_bytes, step.backward_bytes, step.optimizer_bytes)
        rows.append([name, *map(_gib, (step.static_bytes, *phases, step.peak_bytes))])
    if request.budget is not None:
        rows[0] += ["fits", "longest sequence", f"largest batch at {_seq_len(found):,}"]
        for row, one in zip(rows[1:], found.values(), strict=True):
            fits = "yes" if one.fits(request.budget) else "no"
            row += [fits, f"{one.longest:,}", f"{one.largest:,}"]
    if len(found) < 2:
        return rows, ""
    kept, same = [], []
    for place, (header, *cells) in enumerate(zip(*rows, strict=True)):
        if place >= _OF_BUDGET and len(set(cells)) == 1:
            same.append(f"{header} {cells[0]}")
        else:
            kept.append(place)
    return [[row[place] for place in kept] for row in rows], ", ".join(same)


def _by_kind(found: dict[str, Prediction]) -> list[list[str]]:
    """The rows of what is held at the peak."""
    steps = [one.step for one in found.values()]
    rows = [["held at the peak", *found]]
    for kind in dict.fromkeys(kind for step in steps for kind in step.by_kind):
        sizes = [_gib(step.by_kind.get(kind, 0)) for step in steps]
        rows.append([kind.replace("_", " "), *sizes])
    return rows


def _beside(found: dict[str, Prediction]) -> list[Any]:
    """Say what a device holds beside the figures: the range of the unknown parts, and what no figure counts."""
    steps = [one.step for one in found.values()]
    parts = dict.fromkeys(
        _in_short(part.what) for step in steps for part in step.unknown
    )
    if not parts:
        return []
    least = min(step.unknown_bytes[0] for step in steps)
    most = max(step.unknown_bytes[1] for step in steps)
    sign = "-" if least < 0 else ""
    unknown = f"Unknown, beside each peak: {sign}{_gib(abs(least))} to {_gib(most)} ({'; '.join(parts)})."
    return [joined(_hung([unknown, _BESIDE]))]


def _in_short(what: str) -> str:
    """What an unknown part is, without its number."""
    return what.partition(",")[0].lstrip("0123456789 ")


def _hung(lines: Iterable[str]) -> list[Any]:
    return [hanging(line, 2) for line in lines]


def _gib(num_bytes: int) -> str:
    """Gibibytes; a number above zero is never shown as zero."""
    return "0" if num_bytes == 0 else f"{max(num_bytes / 2**30, 0.001):,.3f}"
