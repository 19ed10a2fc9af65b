"""``kbitwrap plan --step``: what a training step takes, for each precision and for PEFT's way."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import ConfigError, StepPredictor, UnsupportedModelError
from .console import EXIT_DONE, EXIT_NO, InputError, first_line, hanging, joined, progress, quiet_libraries, show
from .hub import models, quantization_config
from .plot import draw_steps
from .tables import table

if TYPE_CHECKING:
    from .. import StepMemory


@dataclass(frozen=True)
class StepRequest:
    """A request for predictions.

    Attributes:
        model: A folder, a ``config.json``, or a name on the hub.
        quant: The quantization.
        dtype: The dtype of what is not quantized.
        seq_len: Tokens in a sequence.
        batch_size: Sequences in a batch.
        rank: LoRA's rank.
        optimizer: A name of ``TrainingArguments.optim``.
        autocast: The dtype of autocast, or ``None``.
        kernels: ``"cuda"`` or ``"cpu"``.
        budget: Bytes, or ``None``.
        plot: The file to draw to, or ``None``.
    """

    model: str
    quant: str
    dtype: str
    seq_len: int
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
            found |= {"fits": self.fits(budget), "longest_sequence": self.longest, "largest_batch": self.largest}
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
    with models(request.model), progress(f"building {request.model}") as doing, quiet_libraries():
        for number, precision in enumerate(precisions, 1):
            say = functools.partial(_say, doing, f"{precision} ({number} of {len(precisions)})")
            found[precision] = _predict(request, precision, say)
    fits = {name: one.fits(request.budget) for name, one in found.items()}
    if request.plot is not None:
        title = f"{Path(request.model).name}: a step of {request.batch_size} x {request.seq_len:,} tokens, at its peak"
        draw_steps({name: one.step for name, one in found.items()}, request.plot, title, request.budget)
    if as_json:
        result = {
            "model": request.model,
            "budget_bytes": request.budget,
            "steps": {name: one.to_dict(request.budget) for name, one in found.items()},
        }
        print(json.dumps(result, indent=2))
    else:
        _show(request, found)
    return EXIT_DONE if all(fits.values()) else EXIT_NO


def _say(doing: Any, precision: str, what: str) -> None:
    doing.now(f"predicting {precision}: {what}")


def _predict(request: StepRequest, precision: str, say: Any) -> Prediction:
    from peft import LoraConfig

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"You passed `quantization_config` or equivalent parameters", UserWarning)
            predict = StepPredictor(
                request.model,
                precision=precision,
                lora=LoraConfig(r=request.rank, target_modules="all-linear"),
                quantization_config=quantization_config(request.quant, request.dtype),
                dtype=request.dtype,
                optimizer=request.optimizer,
                autocast=request.autocast,
                kernels=request.kernels,
            )
            say("the step")
            step = predict(request.batch_size, request.seq_len)
            if request.budget is None:
                return Prediction(step)
            say("the longest sequence")
            longest = predict.longest_sequence(request.budget, request.batch_size)
            say("the largest batch")
            return Prediction(step, longest, predict.largest_batch(request.budget, request.seq_len))
    except ConfigError as error:
        raise InputError(first_line(error)) from error
    except UnsupportedModelError as error:
        raise InputError(f"the step of {request.model!r} cannot be predicted: {first_line(error)}") from error


def _show(request: StepRequest, found: dict[str, Prediction]) -> None:
    rows = [["precision", "before", "forward", "backward", "optimizer", "peak"]]
    if request.budget is not None:
        rows[0] += ["fits", "longest sequence", f"largest batch at {request.seq_len:,}"]
    for name, one in found.items():
        step = one.step
        figures = (step.static_bytes, step.forward_bytes, step.backward_bytes, step.optimizer_bytes, step.peak_bytes)
        row = [name, *map(_gib, figures)]
        if request.budget is not None:
            row += ["yes" if one.fits(request.budget) else "no", f"{one.longest:,}", f"{one.largest:,}"]
        rows.append(row)
    # What is the same on every row is said once.
    places = [place for place in range(6, len(rows[0])) if len({row[place] for row in rows[1:]}) == 1]
    same = ", ".join(f"{rows[0][place]} {rows[1][place]}" for place in places) if len(rows) > 2 else ""
    rows = [[cell for place, cell in enumerate(row) if not same or place not in places] for row in rows]
    kinds = dict.fromkeys(kind for one in found.values() for kind in one.step.by_kind)
    held = [["held at the peak", *found]]
    for kind in kinds:
        held.append([kind.replace("_", " "), *(_gib(one.step.by_kind.get(kind, 0)) for one in found.values())])
    budget = "" if request.budget is None else f", budget {_gib(request.budget)}"
    show(
        f"{request.model}: a step of {request.batch_size} x {request.seq_len:,} tokens on {request.kernels}, "
        f"{request.quant}, LoRA of rank {request.rank}{budget}. In GiB:",
        table(rows, right=True),
        *([f"For each: {same}."] if same else []),
        table(held, right=True),
        *_beside(found),
        *(hanging(f"note: {note}", 2) for note in dict.fromkeys(n for one in found.values() for n in one.step.notes)),
    )


def _beside(found: dict[str, Prediction]) -> list[Any]:
    """Say what a device holds beside the figures: the range of the unknown parts, and what no figure counts."""
    steps = [one.step for one in found.values()]
    parts = dict.fromkeys(part.what.partition(",")[0].lstrip("0123456789 ") for step in steps for part in step.unknown)
    if not parts:
        return []
    least, most = min(step.unknown_bytes[0] for step in steps), max(step.unknown_bytes[1] for step in steps)
    sign = "-" * (least < 0)
    lines = [
        f"Unknown, beside each peak: {sign}{_gib(abs(least))} to {_gib(most)} ({'; '.join(parts)}).",
        "Tensors alone are counted, and a budget is compared with them: the CUDA context, fragmentation and other "
        "programs on the device come on top.",
    ]
    return [joined(hanging(line, 2) for line in lines)]


def _gib(num_bytes: int) -> str:
    """Gibibytes; a number above zero is never shown as zero."""
    return "0" if num_bytes == 0 else f"{max(num_bytes / 2**30, 0.001):,.3f}"
