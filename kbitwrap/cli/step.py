"""``kbitwrap plan --step``: what a training step takes, for each precision and for PEFT's function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from .. import StepMemory, StepPredictor
from ..config import format_bytes
from ..foresight.ledger import KINDS
from ..model.pretrained import read_config
from .console import Result, each_once, working
from .limits import budget_of_step, memory_of, on_unified, verdict
from .quantization import choose_quantization
from .tables import table
from .trainers import arguments
from .ways import explained

_DEFAULT_SEQ_LEN = 2048
_PHASES = {
    "before": "static_bytes",
    "forward": "forward_bytes",
    "backward": "backward_bytes",
    "optimizer": "optimizer_bytes",
    "peak": "peak_bytes",
    "reserved": "reserved_bytes",
}
_LOADING = "Loading the model, before the step, takes {}. It has to fit as well."
_RESERVED = (
    "Up to the peak, tensors alone are counted. What has to fit is what CUDA's caching allocator reserves for them and "
    "for the smaller workspaces of cuBLAS, less what it can release before memory runs out."
)
_NOT_RESERVED = (
    "Tensors alone are counted. What CUDA's caching allocator reserves for them is not known where FSDP2 shards the "
    "model: the peak has to fit with the least that is unknown, and the allocator takes more."
)
_ON_TOP = (
    "Not counted are the larger workspaces, 48 MiB more from compute capability 9.0; outliers of 8-bit layers, which "
    "have no bound; the CUDA context, 0.267 to 0.621 GiB (pytorch#86509), the most of which is taken off "
    "--device-memory; and other programs. Unknown is what the device's allocator may count beside the peak: it is in "
    "no other row."
)


def plan_steps(
    model: str,
    ways: Sequence[str],
    budget: int | None,
    device_memory: int | None,
    is_unified: bool,
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

    The arguments are those of ``kbitwrap plan``, but for ``budget``: the bytes that
    `budget_of` makes of ``--budget`` or ``--device-memory``.

    Returns:
        What was predicted, the same as texts and tables, and whether all fit.

    Raises:
        InputError: The model's step cannot be predicted.
    """
    rank = rank or 16
    kernels = kernels or "cuda"
    steps = {}
    with working(f"building {model}", trust_remote_code) as doing:
        from peft import LoraConfig

        source = read_config(model, True) if trust_remote_code else model
        kind, config = choose_quantization(source, model, quant, dtype)
        task = "SEQ_CLS" if trainer == "reward" else None
        settings = {
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
        for way in ways:
            doing.now(f"predicting {way}")
            predict = StepPredictor(source, precision=way, **settings)
            tokens = seq
            if tokens is None and trainer in (None, "trainer"):
                tokens = min(_DEFAULT_SEQ_LEN, predict.max_seq_len or _DEFAULT_SEQ_LEN)
            step = predict(batch, tokens)
            steps[way] = step.to_dict()
            if budget is not None:
                of_step = budget_of_step(step, budget, is_unified)
                steps[way].update(
                    fits=predict.fits(of_step, step.batch_size, step.seq_len),
                    longest_sequence=predict.longest_sequence(of_step, step.batch_size),
                    largest_batch=predict.largest_batch(of_step, step.seq_len),
                )

    # `step` is the last way's: batch, length and files are the same for all
    result = {
        "model": model,
        "trainer": trainer,
        "budget_bytes": budget,
        "steps": steps,
    }
    details = [of_batch(step), kind, f"LoRA of rank {rank}"]
    if trainer is not None:
        details.append(f"--trainer {trainer}")
    if engine is not None:
        details.append(f"{engine} on {devices} devices")
    title = f"{model}: a step of {', '.join(details)}"
    memory = "" if budget is None else memory_of(budget, device_memory)
    parts = parts_of(title, step, steps, memory, is_unified)
    fits = [one["fits"] for one in steps.values() if "fits" in one]
    return result, parts, all(fits)


def of_batch(step: StepMemory) -> str:
    """Say what batch a step was predicted for."""
    return f"{step.batch_size} x {step.seq_len:,} tokens on {step.kernels}"


def parts_of(
    title: str,
    step: StepMemory,
    steps: Mapping[str, Result],
    memory: str,
    is_unified: bool,
) -> list[RenderableType]:
    """Lay the predictions out, the answer first.

    Args:
        title: Whose step it is.
        step: One of the predictions; batch, length and files are the same for all.
        steps: The predictions as plain values, by precision.
        memory: What a step has to fit, in words, or ``""``.
        is_unified: Whether that is the host's memory too.
    """
    warnings = each_once("warnings", steps)
    lead = [title, *warnings]
    if memory:
        fits = {way: one["fits"] for way, one in steps.items()}
        too_large = [one for one in steps.values() if not one["fits"]]
        smaller = ""
        if too_large and "largest_batch" in too_large[0]:
            largest = min(one["largest_batch"] for one in too_large)
            longest = min(one["longest_sequence"] for one in too_large)
            if largest:
                smaller = f"{largest} x {step.seq_len:,}"
            elif longest:
                smaller = f"{step.batch_size} x {longest:,}"
        batch = f"{step.batch_size} x {step.seq_len:,}"
        lead = [verdict(memory, fits, batch, smaller), *warnings, title]
    parts = [*lead, *_tables_of(steps)]
    if is_unified:
        parts.append(on_unified(step.mapped_bytes))
    return parts


def _tables_of(steps: Mapping[str, Result]) -> list[RenderableType]:
    """Lay the predictions out: the peaks of the phases, what fits, and what is held at the peak."""
    first, *_ = steps.values()
    shown = [name for name, key in _PHASES.items() if first[key] is not None]
    phases = [["precision", *shown]]
    sizes = [
        [
            "precision",
            "fits",
            f"longest sequence at batch {first['batch_size']}",
            f"largest batch at {first['seq_len']:,}",
        ]
    ]
    for way, step in steps.items():
        # what is reserved is not known everywhere
        found = [step[key] for key in _PHASES.values() if step[key] is not None]
        phases.append([way, *map(format_bytes, found)])
        if "largest_batch" in step:
            fits = "yes" if step["fits"] else "no"
            longest, largest = step["longest_sequence"], step["largest_batch"]
            sizes.append([way, fits, f"{longest:,}", f"{largest:,}"])
    held = [["held at the peak", *steps]]
    for kind in KINDS:
        found = [step["by_kind"].get(kind, 0) for step in steps.values()]
        if any(found):
            held.append([kind.replace("_", " "), *map(format_bytes, found)])
    unknown = [step["unknown_bytes"] for step in steps.values()]
    least, most = zip(*unknown, strict=True)
    if any(least) or any(most):
        held.append(["unknown, at least", *map(format_bytes, least)])
        held.append(["unknown, at most", *map(format_bytes, most)])

    parts: list[RenderableType] = [table(phases, right=True)]
    if len(sizes) > 1:
        parts.append(table(sizes, right=True))
    parts += [explained(steps), table(held, right=True)]
    if first["loading_bytes"] is not None:
        parts.append(_LOADING.format(format_bytes(first["loading_bytes"])))
    causes = [part["what"] for step in steps.values() for part in step["unknown"]]
    if first["kernels"] == "cuda":
        is_known = first["reserved_bytes"] is not None
        parts.append(f"{_RESERVED if is_known else _NOT_RESERVED} {_ON_TOP}")
    parts += [f"unknown: {cause}" for cause in dict.fromkeys(causes)]
    return [*parts, *each_once("notes", steps)]
