"""``kbitwrap plan --step``: what a training step takes, for each precision and for PEFT's way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from .. import Precision, StepPredictor
from .console import Result, hanging, warned
from .hub import choose_quantization, described_by, refusing, working
from .plot import draw_steps
from .tables import Rows, add_column, figure, table
from .trainers import adapters, arguments, called
from .usage import DEFAULT_QUANT, PRECISIONS
from .ways import explained

if TYPE_CHECKING:
    from .. import StepMemory

_DEFAULT_SEQ_LEN = 2048
_LARGER_QUANTS = ("int8", "none")
_GIB = 2**30
_MIB = 2**20
_CONTEXT_BYTES = (287_047_680, 666_632_192)
_ON_TOP = (
    "Tensors alone are counted. The CUDA context comes on top, {least} to {most} GiB, measured with kernels loaded as "
    "they are used and with all of them (pytorch#86509), and so do fragmentation and other programs on the device."
)
_TAKEN_OFF = (
    "The CUDA context takes {least} to {most} GiB, measured with kernels loaded as they are used and with all of "
    "them (pytorch#86509): the most is taken off. Fragmentation and other programs on the device come on top."
)


@dataclass(frozen=True)
class Limit:
    """The bytes that a step has to fit.

    Attributes:
        budget: The bytes that its tensors may take.
        device_memory: Those of the device, where it was that which was given.
    """

    budget: int
    device_memory: int | None = None

    def __str__(self) -> str:
        if self.device_memory is None:
            return f"{gib(self.budget)} GiB"
        return (
            f"{gib(self.device_memory)} GiB of device memory, "
            f"{gib(self.budget)} beside the CUDA context"
        )


def limit_of(budget: int | None, device_memory: int | None) -> Limit | None:
    """The limit that was given.

    Args:
        budget: Bytes for tensors, or ``None``.
        device_memory: Bytes of a device, or ``None``.

    Returns:
        The limit; ``None`` where there is none.
    """
    if device_memory is not None:
        return Limit(max(device_memory - _CONTEXT_BYTES[1], 0), device_memory)
    return None if budget is None else Limit(budget)


@dataclass(frozen=True)
class StepRequest:
    """A request for predictions.

    Attributes:
        model: A folder, a ``config.json``, or a name on the hub.
        quant: The quantization; ``None`` for the model's own, or the default.
        dtype: The dtype of what is not quantized.
        seq_len: Tokens in a sequence; ``None`` for those of the trainer, or else 2048,
            or the model's own longest if that is less.
        batch_size: Sequences in a batch; ``None`` for those of the trainer, or else 1.
        rank: LoRA's rank.
        optimizer: A name of ``TrainingArguments.optim``; ``None`` for the default.
        autocast: The dtype of autocast, or ``None`` for the default.
        kernels: ``"cuda"`` or ``"cpu"``.
        limit: What has to hold it, or ``None``.
        trainer: The trainer whose step it is, or ``None``.
        accumulate: Batches whose gradients it accumulates; ``None`` for the default.
        has_liger: Whether it trains with Liger's kernels.
        engine: What shards or repeats the model, or ``None``.
        num_devices: The number of devices.
        trust_remote_code: Whether the code that the model brings along is run.
    """

    model: str
    quant: str | None
    dtype: str
    seq_len: int | None
    batch_size: int | None
    rank: int
    optimizer: str | None
    autocast: str | None
    kernels: str
    limit: Limit | None
    trainer: str | None = None
    accumulate: int | None = None
    has_liger: bool = False
    engine: str | None = None
    num_devices: int = 1
    trust_remote_code: bool = False

    @property
    def budget(self) -> int | None:
        """The bytes that the step's tensors may take, or ``None``."""
        return None if self.limit is None else self.limit.budget

    @property
    def step(self) -> str:
        """The step, in words."""
        whose = "a step"
        if self.trainer is not None:
            whose += f" of {called(self.trainer)}"
        if self.engine is not None:
            whose += f" on each of {self.num_devices} devices ({self.engine})"
        return whose

    def predictor(self, precision: str, quantization_config: Any) -> StepPredictor:
        """The predictor of one precision.

        Args:
            precision: The precision, or ``"peft"``.
            quantization_config: As for ``from_pretrained``.

        Returns:
            The predictor.
        """
        settings: dict[str, Any] = {}
        if self.trainer is None:
            settings["optimizer"] = self.optimizer or "adamw_torch"
            settings["autocast"] = self.autocast
        else:
            settings["args"] = arguments(
                self.trainer,
                optimizer=self.optimizer,
                autocast=self.autocast,
                accumulate=self.accumulate,
                has_liger=self.has_liger,
            )
        return StepPredictor(
            described_by(self.model, self.trust_remote_code),
            precision=precision,
            lora=adapters(self.trainer, self.rank),
            quantization_config=quantization_config,
            dtype=self.dtype,
            kernels=self.kernels,
            engine=self.engine,
            num_devices=self.num_devices,
            **settings,
        )


@dataclass(frozen=True)
class Prediction:
    """The step of one precision, and with a budget what fits it.

    Attributes:
        step: The step.
        longest: The tokens of the longest sequence that fits.
        largest: The sequences of the largest batch that fits.
        at_limits: The steps of these two.
        max_seq_len: The tokens of the longest sequence that the model takes; ``None``
            where nothing bounds it.
    """

    step: StepMemory
    longest: int | None = None
    largest: int | None = None
    at_limits: tuple[StepMemory, ...] = ()
    max_seq_len: int | None = None

    @property
    def most_unknown_bytes(self) -> int:
        """The most bytes beside the step, or one that is as large as fits, that are not known before."""
        return max(one.unknown_bytes[1] for one in (self.step, *self.at_limits))

    @property
    def is_bounded(self) -> bool:
        """Whether that is a bound: outliers of 8-bit layers have none."""
        return all(part.is_bounded for part in self.step.unknown)

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
        limit = self.request.limit
        steps = {name: one.to_dict(budget) for name, one in self.found.items()}
        return {
            "model": self.request.model,
            "trainer": self.request.trainer,
            "budget_bytes": budget,
            "device_memory_bytes": None if limit is None else limit.device_memory,
            "steps": steps,
        }

    def _verdict(self, limit: Limit) -> str:
        """The sentence that answers the question: whether a limit is enough, with which precisions, and for what."""
        found = self.found
        fitting = [name for name, one in found.items() if one.fits(limit.budget)]
        if not fitting:
            return f"{limit}: does not fit. {self._shortfall(limit)}"
        others = [name for name in found if name not in fitting]
        best = max(fitting, key=self._merit)
        said = f"{limit}: fits"
        if len(found) == 1:
            said += ", "
        else:
            said += f" with {', '.join(fitting)}; with {best} "
        said += f"at most {self._most(best)}.{self._beside(limit, best)}"
        if others:
            said += f" It does not fit with {', '.join(others)}."
        return said

    def _merit(self, name: str) -> tuple[int, int, bool]:
        """What the best of several precisions has most of; of equals, it is the default."""
        one = self.found[name]
        return one.longest or 0, one.largest or 0, name == Precision.NORMS

    def _most(self, name: str) -> str:
        """The largest batch and the longest sequence that fit with a precision, in words."""
        one = self.found[name]
        fitting = []
        if one.largest:
            fitting.append(f"batch {one.largest:,} of {one.step.seq_len:,} tokens")
        if one.longest:
            sequences = _sequences(one.step.batch_size, one.longest)
            if one.longest == one.max_seq_len:
                sequences += ", the model's longest"
            fitting.append(sequences)
        return ", or ".join(fitting)

    def _shortfall(self, limit: Limit) -> str:
        """The bytes of the precision that takes least, and the sizes that fit a limit with it."""
        steps = self.steps
        name = min(steps, key=lambda other: steps[other].needed_bytes)
        step = steps[name]
        loading = step.loading_bytes
        said = f"A step of {self.batch} takes {gib(step.peak_bytes)} GiB with {name}"
        if len(steps) > 1:
            said += ", the least of these"
        if loading is not None and loading > limit.budget:
            said = f"Loading the model alone takes {gib(loading)} GiB. {said}."
            if self.quantization in _LARGER_QUANTS:
                said += f" In 4 bits it takes less: --quant {DEFAULT_QUANT}."
            return said
        most = self._most(name)
        if most:
            said += f"; {most} would fit.{self._beside(limit, name)}"
        else:
            said += "; no sequence is short enough."
        if not steps.keys() >= {*PRECISIONS}:
            said += " Without --precision all precisions are tried."
        return said

    def _beside(self, limit: Limit, name: str) -> str:
        """The bytes that a device holds beside a limit that is filled, or that such a limit leaves no room for.

        Args:
            limit: The limit.
            name: The precision.
        """
        one = self.found[name]
        most = one.most_unknown_bytes
        if not most:  # on a CPU all is known
            return ""
        amount = (
            f"up to {gib(most)} GiB" if one.is_bounded else f"{gib(most)} GiB or more"
        )
        unknown = f"{amount} that no prediction knows"
        if limit.device_memory is None:
            low, high = map(gib, _CONTEXT_BYTES)
            return (
                f" Beside the {limit} the device has to hold {unknown}, "
                f"and {low} to {high} GiB of CUDA context."
            )
        said = f" Filled so, the device has no room for {unknown}"
        rest = (limit.budget - most) // _MIB
        return f"{said}; --budget {rest}MiB leaves it." if rest > 0 else f"{said}."

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
        limit = request.limit
        rows = _by_precision(steps)
        same: list[str] = []
        parts: list[RenderableType] = []
        within = ""
        if limit is not None:
            within = f", budget {figure(limit.budget, _GIB)}"
            same = _add_budget(rows, self.found, limit.budget)
            parts.append(hanging(self._verdict(limit), 2))
        parts += [
            f"{request.model}: {request.step}, {self.batch} on {request.kernels}, "
            f"{self.quantization}, LoRA of rank {request.rank}{within}. In GiB:",
            table(rows, right=True),
        ]
        if same:
            parts.append(f"For each: {', '.join(same)}.")
        parts.append(explained(steps))
        parts.append(table(_by_kind(steps), right=True))
        loading = steps[next(iter(steps))].loading_bytes
        if loading is not None:
            parts.append(
                f"Loading the model, before the step: {figure(loading, _GIB)} GiB."
            )
        if any(step.unknown for step in steps.values()):
            parts.append(_beside(list(steps.values()), limit))
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
    trusts = request.trust_remote_code
    with working(model, f"building {model}", trusts) as doing:
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
    predict = request.predictor(precision, quantization_config)
    say("the step")
    batch_size, seq_len = request.batch_size, request.seq_len
    if request.trainer is None:
        batch_size = batch_size or 1
    if seq_len is None and request.trainer in (None, "trainer"):
        seq_len = min(_DEFAULT_SEQ_LEN, predict.max_seq_len or _DEFAULT_SEQ_LEN)
    step = predict(batch_size, seq_len)
    if request.budget is None:
        return Prediction(step)
    say("the longest sequence")
    longest = predict.longest_sequence(request.budget, step.batch_size)
    say("the largest batch")
    largest = predict.largest_batch(request.budget, step.seq_len)
    sizes = {(step.batch_size, longest), (largest, step.seq_len)}
    at_limits = [predict(*size) for size in sizes if all(size)]
    return Prediction(step, longest, largest, tuple(at_limits), predict.max_seq_len)


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


def _beside(steps: Sequence[StepMemory], limit: Limit | None) -> Group:
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
        f"Add to each peak {sign}{figure(abs(least), _GIB)} to {figure(most, _GIB)} GiB, "
        f"which no prediction knows ({'; '.join(parts)})."
    )
    is_taken_off = limit is not None and limit.device_memory is not None
    on_top = _TAKEN_OFF if is_taken_off else _ON_TOP
    low, high = map(gib, _CONTEXT_BYTES)
    return Group(
        hanging(unknown, 2),
        hanging(on_top.format(least=low, most=high), 2),
    )


def gib(num_bytes: int) -> str:
    """Write bytes in GiB, without zeros at the end.

    Args:
        num_bytes: The bytes.
    """
    number = figure(num_bytes, _GIB)
    return number.rstrip("0").rstrip(".") if "." in number else number


def _sequences(number: int, tokens: int) -> str:
    """Sequences of so many tokens, in words."""
    if number == 1:
        return f"one sequence of {tokens:,}"
    return f"{number:,} sequences of {tokens:,}"
