"""``kbitwrap plan --step``: what a training step takes, for each precision and for PEFT's way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from .. import StepPredictor
from .console import Result, hanging, warned
from .hub import choose_quantization, refusing, working
from .plot import draw_steps
from .tables import Rows, add_column, figure, table

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
        """Whether the step fits a budget.

        Args:
            budget: Bytes; ``None`` for no budget.
        """
        return budget is None or self.step.needed_bytes <= budget

    def to_dict(self, budget: int | None) -> Result:
        """As plain values, ready for JSON."""
        found = self.step.to_dict()
        if budget is not None:
            found["fits"] = self.fits(budget)
            found["longest_sequence"] = self.longest
            found["largest_batch"] = self.largest
        return found


@dataclass(frozen=True)
class Predicted:
    """The steps that were predicted.

    Attributes:
        request: What was asked for.
        quantization: The name of the model's quantization.
        found: The predictions, by precision.
    """

    request: StepRequest
    quantization: str
    found: dict[str, Prediction]

    @property
    def steps(self) -> dict[str, StepMemory]:
        """The steps, by precision."""
        return {name: one.step for name, one in self.found.items()}

    @property
    def batch(self) -> str:
        """The batch, in words."""
        step = next(iter(self.found.values())).step
        return f"{step.batch_size} x {step.seq_len:,} tokens"

    @property
    def fits(self) -> bool:
        """Whether every step fits the budget, or there is none."""
        return all(one.fits(self.request.budget) for one in self.found.values())

    def to_dict(self) -> Result:
        """As plain values, ready for JSON."""
        budget = self.request.budget
        steps = {name: one.to_dict(budget) for name, one in self.found.items()}
        return {
            "model": self.request.model,
            "budget_bytes": budget,
            "steps": steps,
        }

    def _verdict(self, budget: int) -> str:
        """The sentence that answers the question: with which precisions a budget is enough, and for what."""
        limit = f"{figure(budget, _GIB)} GiB"
        fitting = [name for name, one in self.found.items() if one.fits(budget)]
        others = [name for name in self.found if name not in fitting]
        request = self.request
        if not fitting:
            name = min(others, key=lambda other: self.steps[other].needed_bytes)
            found = self.found[name]
            needed = figure(found.step.needed_bytes, _GIB)
            shorter = ""
            if found.longest:
                shorter = f"; {request.batch_size} x {found.longest:,} do"
            return f"{limit}: {self.batch} do not fit, they take {needed} GiB with {name}{shorter}."

        name = max(fitting, key=lambda one: self.found[one].longest or 0)
        found = self.found[name]
        said = (
            f"{limit}: fits with {', '.join(fitting)}; with {name} up to {found.largest} x "
            f"{found.step.seq_len:,} tokens, or {request.batch_size} x {found.longest:,}."
        )
        if others:
            said += f" It does not with {', '.join(others)}."
        return said

    def draw(self, file: Path) -> None:
        """Draw the steps at their peaks."""
        title = f"{Path(self.request.model).name}: a step of {self.batch}, at its peak"
        draw_steps(
            self.steps,
            file,
            title,
            self.request.budget,
        )

    def parts(self) -> list[RenderableType]:
        """As texts and tables."""
        request = self.request
        steps = self.steps
        limit = ""
        if request.budget is not None:
            limit = f", budget {figure(request.budget, _GIB)}"
        rows = _by_precision(steps)
        same = []
        if request.budget is not None:
            same = _add_budget(rows, self.found, request.budget)
        parts: list[RenderableType] = []
        if request.budget is not None:
            parts.append(hanging(self._verdict(request.budget), 2))
        parts += [
            f"{request.model}: a step of {self.batch} on {request.kernels}, "
            f"{self.quantization}, LoRA of rank {request.rank}{limit}. In GiB:",
            table(rows, right=True),
        ]
        if same:
            parts.append(f"For each: {', '.join(same)}.")
        parts.append(table(_by_kind(steps), right=True))
        loading = steps[next(iter(steps))].loading_bytes
        if loading is not None:
            parts.append(
                f"Loading the model, before the step: {figure(loading, _GIB)} GiB."
            )
        if any(step.unknown for step in steps.values()):
            parts.append(_beside(list(steps.values())))
        notes = dict.fromkeys(note for step in steps.values() for note in step.notes)
        parts += [hanging(f"note: {note}", 2) for note in notes]
        warnings = warned({name: step.warnings for name, step in steps.items()})
        if warnings:
            parts.append(Group(*warnings))
        return parts


def predict_steps(request: StepRequest, precisions: Sequence[str]) -> Predicted:
    """Predict the steps.

    Args:
        request: What is asked for.
        precisions: The precisions, ``"peft"`` among them.

    Returns:
        The predictions.

    Raises:
        InputError: The model's step cannot be predicted.
    """
    model = request.model
    found = {}
    with working(model, f"building {model}") as doing:
        quantization = choose_quantization(model, request.quant, request.dtype)
        for number, precision in enumerate(precisions, 1):
            what = f"predicting {precision} ({number} of {len(precisions)})"

            def say(part: str, what: str = what) -> None:
                doing.now(f"{what}: {part}")

            with refusing(f"the step of {model!r} cannot be predicted"):
                config = quantization.config
                found[precision] = _predict(request, precision, config, say)
    return Predicted(request, quantization.name, found)


def _predict(
    request: StepRequest,
    precision: str,
    quantization_config: Any,
    say: Callable[[str], object],
) -> Prediction:
    """Predict the step of one precision, and with a budget what fits it.

    Args:
        request: What is asked for.
        precision: The precision, or ``"peft"``.
        quantization_config: As for ``from_pretrained``.
        say: Called with what is being predicted.

    Returns:
        The prediction.
    """
    from peft import LoraConfig

    predict = StepPredictor(
        request.model,
        precision=precision,
        lora=LoraConfig(r=request.rank, target_modules="all-linear"),
        quantization_config=quantization_config,
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
    largest = predict.largest_batch(request.budget, seq_len)
    return Prediction(step, longest, largest)


# ----------------------------------------------------------------------------------------------------
# What is shown of it.
# ----------------------------------------------------------------------------------------------------

_PHASES = {
    "before": "static_bytes",
    "forward": "forward_bytes",
    "backward": "backward_bytes",
    "optimizer": "optimizer_bytes",
    "peak": "peak_bytes",
}


def _by_precision(steps: Mapping[str, StepMemory]) -> Rows:
    """The rows of the precisions: the most bytes held in each phase."""
    rows = [["precision", *_PHASES]]
    for name, step in steps.items():
        sizes = [getattr(step, key) for key in _PHASES.values()]
        rows.append([name, *(figure(size, _GIB) for size in sizes)])
    return rows


def _add_budget(rows: Rows, found: Mapping[str, Prediction], budget: int) -> list[str]:
    """Add the columns that say what fits a budget.

    Args:
        rows: The rows of the precisions, which get the columns.
        found: The predictions, by precision.
        budget: The budget, in bytes.

    Returns:
        What is the same for every precision: it gets no column, and is said once.
    """
    predictions = list(found.values())
    seq_len = predictions[0].step.seq_len
    columns = {
        "fits": ["yes" if one.fits(budget) else "no" for one in predictions],
        "longest sequence": [f"{one.longest:,}" for one in predictions],
        f"largest batch at {seq_len:,}": [f"{one.largest:,}" for one in predictions],
    }
    same = []
    for header, cells in columns.items():
        if len(cells) > 1 and len(set(cells)) == 1:
            same.append(f"{header} {cells[0]}")
        else:
            add_column(rows, header, cells)
    return same


def _by_kind(steps: Mapping[str, StepMemory]) -> Rows:
    """The rows of what is held at the peak."""
    peaks = [step.by_kind for step in steps.values()]
    rows = [["held at the peak", *steps]]
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
