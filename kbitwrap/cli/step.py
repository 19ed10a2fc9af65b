"""``kbitwrap plan --step``: what a training step takes, for each precision and for PEFT's way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import RenderableType

from .. import Precision, StepPredictor
from ..model.pretrained import read_config
from .console import Result, warned
from .hub import choose_quantization, refusing, working
from .limits import CUDA_CONTEXT, GIB, Limit, gib, verdict
from .tables import Rows, figure, table
from .trainers import arguments, called
from .usage import DEFAULT_QUANT, PRECISIONS
from .ways import explained

if TYPE_CHECKING:
    from .. import StepMemory

_DEFAULT_SEQ_LEN = 2048
_LARGER_QUANTS = ("int8", "none")
_ON_TOP = (
    f"Tensors alone are counted. The CUDA context comes on top, {CUDA_CONTEXT} GiB, measured with kernels loaded as "
    "they are used and with all of them (pytorch#86509), and so do fragmentation and other programs on the device."
)
_TAKEN_OFF = (
    f"The CUDA context takes {CUDA_CONTEXT} GiB, measured with kernels loaded as they are used and with all of "
    "them (pytorch#86509): the most is taken off. Fragmentation and other programs on the device come on top."
)
_PHASES = {
    "before": "static_bytes",
    "forward": "forward_bytes",
    "backward": "backward_bytes",
    "optimizer": "optimizer_bytes",
    "peak": "peak_bytes",
}


class Prediction(NamedTuple):
    """The step of one precision, and with a limit what fits it.

    Attributes:
        step: The step.
        fits: Whether it fits.
        longest: The tokens of the longest sequence that fits.
        largest: The sequences of the largest batch that fits.
        unknown_bytes: The most bytes beside the step, or one that is as large as fits,
            that are not known before.
        max_seq_len: The tokens of the longest sequence that the model takes; ``None``
            where nothing bounds it.
    """

    step: StepMemory
    fits: bool = True
    longest: int | None = None
    largest: int | None = None
    unknown_bytes: int = 0
    max_seq_len: int | None = None


Predictions = Mapping[str, Prediction]
"""Predictions by precision."""


def plan_steps(
    model: str,
    ways: Sequence[str],
    limit: Limit | None,
    quant: str | None,
    dtype: str,
    trust_remote_code: bool,
    *,
    rank: int | None,
    seq: int | None,
    batch: int | None,
    trainer: str | None,
    accumulate: int | None,
    optimizer: str | None,
    autocast: str | None,
    kernels: str | None,
    engine: str | None,
    devices: int | None,
) -> tuple[Result, list[RenderableType], bool]:
    """Predict the steps asked for.

    The arguments are those of ``kbitwrap plan``.

    Returns:
        What was predicted, the same as texts and tables, and whether all fit.

    Raises:
        InputError: The model's step cannot be predicted.
    """
    rank = rank or 16
    kernels = kernels or "cuda"
    found: dict[str, Prediction] = {}
    refused = refusing(f"the step of {model!r} cannot be predicted")
    with working(model, f"building {model}", trust_remote_code) as doing, refused:
        from peft import LoraConfig

        source = read_config(model, True) if trust_remote_code else model
        kind, config = choose_quantization(source, model, quant, dtype)
        task = "SEQ_CLS" if trainer == "reward" else None
        settings: dict[str, Any] = {
            "lora": LoraConfig(r=rank, target_modules="all-linear", task_type=task),
            "quantization_config": config,
            "dtype": dtype,
            "kernels": kernels,
            "engine": engine,
            "num_devices": devices or 1,
        }
        if trainer is None:
            settings["optimizer"] = optimizer or "adamw_torch"
            settings["autocast"] = autocast
            batch = batch or 1
        else:
            settings["args"] = arguments(
                trainer, optimizer=optimizer, autocast=autocast, accumulate=accumulate
            )
        for number, way in enumerate(ways, 1):
            doing.now(f"predicting {way} ({number} of {len(ways)})")
            predict = StepPredictor(source, precision=way, **settings)
            tokens = seq
            if tokens is None and trainer in (None, "trainer"):
                tokens = min(_DEFAULT_SEQ_LEN, predict.max_seq_len or _DEFAULT_SEQ_LEN)
            found[way] = _predict(predict, batch, tokens, limit)

    steps = {way: one.step for way, one in found.items()}
    step = next(iter(steps.values()))
    size = f"{step.batch_size} x {step.seq_len:,} tokens"
    budget = None if limit is None else limit.budget
    as_dicts = {}
    for way, one in found.items():
        as_dicts[way] = one.step.to_dict()
        if limit is not None:
            as_dicts[way].update(
                fits=one.fits, longest_sequence=one.longest, largest_batch=one.largest
            )
    result = {
        "model": model,
        "trainer": trainer,
        "budget_bytes": budget,
        "device_memory_bytes": None if limit is None else limit.device_memory,
        "steps": as_dicts,
    }

    whose = "a step" if trainer is None else f"a step of {called(trainer)}"
    if engine is not None:
        whose += f" on each of {devices} devices ({engine})"
    within = "" if budget is None else f", budget {figure(budget, GIB)}"
    title = f"{model}: {whose}, {size} on {kernels}, {kind}, LoRA of rank {rank}{within}. In GiB:"
    parts: list[RenderableType] = [title, *_tables(found, limit)]
    if limit is not None:
        parts.insert(0, _answer(found, limit, size, kind))
    return result, parts, all(one.fits for one in found.values())


def _predict(
    predict: StepPredictor,
    batch_size: int | None,
    seq_len: int | None,
    limit: Limit | None,
) -> Prediction:
    """Predict a step, and what fits a limit: the longest sequence of its batch, the largest batch of its length."""
    step = predict(batch_size, seq_len)
    if limit is None:
        return Prediction(step)
    longest = predict.longest_sequence(limit.budget, step.batch_size)
    largest = predict.largest_batch(limit.budget, step.seq_len)
    at_limits = [step]
    for size in {(step.batch_size, longest), (largest, step.seq_len)}:
        if all(size):
            at_limits.append(predict(*size))
    return Prediction(
        step,
        step.needed_bytes <= limit.budget,
        longest,
        largest,
        max(one.unknown_bytes[1] for one in at_limits),
        predict.max_seq_len,
    )


# ----------------------------------------------------------------------------------------------------
# The answer.
# ----------------------------------------------------------------------------------------------------


def _answer(found: Predictions, limit: Limit, batch: str, kind: str) -> str:
    """Say whether a limit is enough, with which precisions, and for what."""
    fits = {way: one.fits for way, one in found.items()}
    if not any(fits.values()):
        return verdict(limit, fits, f". {_shortfall(found, limit, batch, kind)}")

    def merit(way: str) -> tuple[int, int, bool]:
        one = found[way]
        return one.longest or 0, one.largest or 0, way == Precision.NORMS

    best = max((way for way in found if fits[way]), key=merit)
    joined = ", at most" if len(found) == 1 else f"; with {best} at most"
    details = f"{joined} {_most(found[best])}.{_beside_limit(found[best], limit)}"
    return verdict(limit, fits, details)


def _shortfall(found: Predictions, limit: Limit, batch: str, kind: str) -> str:
    """Say what the precision that takes least takes, and the sizes that fit a limit with it."""
    way = min(found, key=lambda other: found[other].step.needed_bytes)
    one = found[way]
    loading = one.step.loading_bytes
    said = f"A step of {batch} takes {gib(one.step.peak_bytes)} GiB with {way}"
    if len(found) > 1:
        said += ", the least of these"
    if loading is not None and loading > limit.budget:
        said = f"Loading the model alone takes {gib(loading)} GiB. {said}."
        if kind in _LARGER_QUANTS:
            said += f" In 4 bits it takes less: --quant {DEFAULT_QUANT}."
        return said
    most = _most(one)
    if most:
        said += f"; {most} would fit.{_beside_limit(one, limit)}"
    else:
        said += "; no sequence is short enough."
    if not found.keys() >= {*PRECISIONS}:
        said += " Without --precision all precisions are tried."
    return said


def _most(one: Prediction) -> str:
    """Write the largest batch and the longest sequence that fit with a precision, in words."""
    fitting = []
    if one.largest:
        fitting.append(f"batch {one.largest:,} of {one.step.seq_len:,} tokens")
    if one.longest:
        number = one.step.batch_size
        sequences = "one sequence" if number == 1 else f"{number:,} sequences"
        sequences += f" of {one.longest:,}"
        if one.longest == one.max_seq_len:
            sequences += ", the model's longest"
        fitting.append(sequences)
    return ", or ".join(fitting)


def _beside_limit(one: Prediction, limit: Limit) -> str:
    """Say what a device holds beside a limit that is filled, or what such a limit leaves no room for."""
    most = one.unknown_bytes
    if not most:  # on a CPU all is known
        return ""
    # outliers of 8-bit layers have no bound
    is_bounded = all(part.is_bounded for part in one.step.unknown)
    amount = f"up to {gib(most)} GiB" if is_bounded else f"{gib(most)} GiB or more"
    unknown = f"{amount} that no prediction knows"
    if limit.device_memory is None:
        return (
            f" Beside the {limit} the device has to hold {unknown}, "
            f"and {CUDA_CONTEXT} GiB of CUDA context."
        )
    said = f" Filled so, the device has no room for {unknown}"
    rest = (limit.budget - most) // 2**20
    return f"{said}; --budget {rest}MiB leaves it." if rest > 0 else f"{said}."


# ----------------------------------------------------------------------------------------------------
# The tables.
# ----------------------------------------------------------------------------------------------------


def _tables(found: Predictions, limit: Limit | None) -> list[RenderableType]:
    """Lay the predictions out, and say what is beside their figures."""
    steps = {way: one.step for way, one in found.items()}
    parts: list[RenderableType] = [table(_by_phase(steps), right=True)]
    if limit is not None:
        parts.append(table(_by_size(found), right=True))
    parts += [explained(steps), table(_by_kind(steps), right=True)]
    loading = next(iter(steps.values())).loading_bytes
    if loading is not None:
        parts.append(f"Loading the model, before the step: {figure(loading, GIB)} GiB.")
    if any(step.unknown for step in steps.values()):
        parts += _beside_peaks(list(steps.values()), limit)
    notes = dict.fromkeys(note for step in steps.values() for note in step.notes)
    parts += [f"note: {note}" for note in notes]
    parts += warned({way: step.warnings for way, step in steps.items()})
    return parts


def _by_phase(steps: Mapping[str, StepMemory]) -> Rows:
    """Make the rows of the precisions: the most bytes held in each phase."""
    rows = [["precision", *_PHASES]]
    for way, step in steps.items():
        sizes = [getattr(step, key) for key in _PHASES.values()]
        rows.append([way, *(figure(size, GIB) for size in sizes)])
    return rows


def _by_size(found: Predictions) -> Rows:
    """Make the rows of what fits a limit with each precision."""
    seq_len = next(iter(found.values())).step.seq_len
    rows = [["precision", "fits", "longest sequence", f"largest batch at {seq_len:,}"]]
    for way, one in found.items():
        fits = "yes" if one.fits else "no"
        rows.append([way, fits, f"{one.longest:,}", f"{one.largest:,}"])
    return rows


def _by_kind(steps: Mapping[str, StepMemory]) -> Rows:
    """Make the rows of what is held at the peak."""
    peaks = [step.by_kind for step in steps.values()]
    rows = [["held at the peak", *steps]]
    for kind in dict.fromkeys(kind for peak in peaks for kind in peak):
        sizes = [figure(peak.get(kind, 0), GIB) for peak in peaks]
        rows.append([kind.replace("_", " "), *sizes])
    return rows


def _beside_peaks(steps: Sequence[StepMemory], limit: Limit | None) -> list[str]:
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
    is_taken_off = limit is not None and limit.device_memory is not None
    return [
        f"Add to each peak {sign}{figure(abs(least), GIB)} to {figure(most, GIB)} GiB, "
        f"which no prediction knows ({'; '.join(parts)}).",
        _TAKEN_OFF if is_taken_off else _ON_TOP,
    ]
