"""``kbitwrap plan``: what preparing a model costs, or what a training step takes, from its config alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType

from .. import Precision, QuantKind
from ..config import format_bytes
from .console import (
    EXIT_DONE,
    EXIT_NO,
    QUANT_BY_CONFIG,
    InputError,
    Result,
    each_once,
    show_result,
    working,
)
from .limits import budget_of, verdict
from .quantization import choose_quantization
from .tables import table
from .trainers import TrainerName
from .usage import (
    DEFAULT_QUANT,
    PRECISIONS,
    Budget,
    DeviceMemory,
    HalfDtype,
    Json,
    TrustRemoteCode,
    Unified,
    expect_one_at_most,
    given,
    num_bytes,
)
from .ways import WAYS, Way, explained

if TYPE_CHECKING:
    from .. import Plan

SUMMARY = (
    "Say whether a training step fits, or what preparing costs, from a config alone."
)
HELP = (
    "Say what a training step takes and whether that fits, from a model's config alone; or what preparing it costs.\n\n"
    "kbitwrap plan MODEL --step --budget 7GiB\n"
    "kbitwrap plan MODEL --step --trainer sft --device-memory 24GiB\n"
    "kbitwrap plan MODEL\n\n"
    "The first says whether a step of QLoRA fits 7 GiB, and which sequences and batches do. The second says so of "
    "TRL's SFTTrainer, with its own defaults, on a GPU of 24 GiB. The third is about preparing alone: what each "
    "precision and PEFT's prepare_model_for_kbit_training add to the loaded model.\n\n"
    "No weight is read, and no GPU is needed. Of the precisions, norms is kbitwrap's default, and full is what "
    "PEFT's function does. The output explains each that it shows.\n\n"
    "Exit status: 0 every precision shown fits the budget (or there is none), 1 one does not, 2 bad usage or bad "
    "input."
)
PEFT = "peft"
_BESIDE = (
    "This is the cost of preparing alone; --step shows what a training step takes. Beside it stand {} of samples, by "
    "which kbitwrap tells whether training changed a parameter. PEFT's function leaves {} in the allocator's cache "
    "until that is emptied; its newer versions empty it at the end."
)
_WITH_STEP = "Options with --step"
_of_step = functools.partial(typer.Option, rich_help_panel=_WITH_STEP)


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a config.json, or a name on the hub."
        ),
    ],
    step: Annotated[
        bool,
        typer.Option(
            "--step",
            help="Say what a training step takes, with LoRA on every linear layer.",
        ),
    ] = False,
    quant: Annotated[
        QuantKind | None,
        typer.Option(
            metavar="KIND",
            help=f"Quantization; {DEFAULT_QUANT}, if left out. {QUANT_BY_CONFIG}. A model that is quantized already "
            "keeps its own; none dequantizes it, where transformers can.",
        ),
    ] = None,
    dtype: Annotated[
        HalfDtype,
        typer.Option(
            metavar="DTYPE",
            help="Dtype of the tensors that are not quantized, bfloat16 or float16.",
        ),
    ] = "bfloat16",
    precision: Annotated[
        list[Way] | None,
        typer.Option(
            metavar="PRECISION...",
            help=f"Precisions to compare, one or several of {', '.join(PRECISIONS)}; with --step also {PEFT}, which is "
            f"PEFT's function, and unprepared, which is as loaded. If left out, with --step: norms and {PEFT}, or "
            "norms and unprepared with a --trainer of TRL, which prepares nothing; without --step: all.",
        ),
    ] = None,
    budget: Budget = None,
    device_memory: DeviceMemory = None,
    unified: Unified = False,
    seq: Annotated[
        int | None,
        _of_step(
            metavar="N",
            min=1,
            help="Tokens in a sequence. If left out: the default of --trainer; without it 2048, or the model's own "
            "longest if that is less.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        _of_step(
            metavar="N",
            min=1,
            help="Sequences in a batch. If left out: the default of --trainer, or 1 without it.",
        ),
    ] = None,
    trainer: Annotated[
        TrainerName | None,
        _of_step(
            metavar="KIND",
            help="The step of TRL's trainer of this kind (sft, dpo, grpo, reward) or of transformers' own (trainer), "
            "with its defaults for batch, length, loss, optimizer, autocast and checkpointing.",
        ),
    ] = None,
    accumulate: Annotated[
        int | None,
        _of_step(
            metavar="N",
            min=1,
            help="Batches whose gradients are accumulated in a step, with --trainer.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        _of_step(
            metavar="N",
            min=1,
            help="LoRA's rank; 16, if left out.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        _of_step(
            metavar="NAME",
            help="A name of TrainingArguments.optim; adamw_torch, if left out.",
        ),
    ] = None,
    autocast: Annotated[
        HalfDtype | None,
        _of_step(
            metavar="DTYPE",
            help="The dtype of autocast in the forward pass, bfloat16 or float16.",
        ),
    ] = None,
    kernels: Annotated[
        Literal["cuda", "cpu"] | None,
        _of_step(
            help="The device of the step; cuda, if left out.",
        ),
    ] = None,
    engine: Annotated[
        Literal["ddp", "fsdp2"] | None,
        _of_step(
            help="The step on one of several devices, with --devices.",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        _of_step(
            metavar="N",
            min=2,
            help="The number of devices, with --engine.",
        ),
    ] = None,
    memory_budget: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            parser=num_bytes,
            help="The most that preparing may add to the loaded model, such as 512MiB. It is no budget of a step, "
            "which --budget is.",
            rich_help_panel="Options without --step",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Plan, and print what was planned.

    Raises:
        InputError: The model cannot be planned for.
    """
    of_steps: dict[str, Any] = {
        "rank": rank,
        "seq": seq,
        "batch": batch,
        "trainer": trainer,
        "accumulate": accumulate,
        "optimizer": optimizer,
        "autocast": autocast,
        "kernels": kernels,
        "engine": engine,
        "devices": devices,
    }
    found = given(
        budget=budget, device_memory=device_memory, unified=unified, **of_steps
    )
    if found and not step:
        raise InputError(
            f"{found[0]} applies to training steps only: add --step. The budget of preparing alone is --memory-budget"
        )
    if step and memory_budget is not None:
        raise InputError(
            "--memory-budget is for what preparing adds; the budget of a whole step is --budget"
        )
    expect_one_at_most(budget=budget, device_memory=device_memory)
    if trainer is None and accumulate is not None:
        raise InputError("--accumulate applies to the step of a trainer: add --trainer")
    if (engine is None) != (devices is None):
        raise InputError("--engine and --devices are given together")

    ways = WAYS[:-1]
    if step:
        is_of_trl = trainer not in (None, "trainer")
        usual = Way.UNPREPARED.value if is_of_trl else PEFT
        ways = [usual, Precision.NORMS.value]
    if precision:
        ways = [way.value for way in precision]
    if step:
        from .step import plan_steps

        budget_bytes = budget_of(budget, device_memory, unified)
        result, parts, fits = plan_steps(
            model,
            ways,
            budget_bytes,
            unified,
            quant,
            dtype,
            trust_remote_code,
            **of_steps,
        )
    else:
        result, parts, fits = _plan_preparation(
            model, ways, memory_budget, quant, dtype, trust_remote_code
        )
    show_result(result, parts, json_)
    return EXIT_DONE if fits else EXIT_NO


def _plan_preparation(
    model: str,
    asked: Sequence[str],
    memory_budget: int | None,
    quant: str | None,
    dtype: str,
    trust_remote_code: bool,
) -> tuple[Result, list[RenderableType], bool]:
    """Plan the preparations asked for.

    Returns:
        What was planned, the same as texts and tables, and whether it fits the budget.
    """
    with working(f"planning for {model}", trust_remote_code):
        from .. import Plan
        from ..model.pretrained import read_config

        source = read_config(model, True) if trust_remote_code else model
        kind, config = choose_quantization(source, model, quant, dtype)
        plans = {}
        for precision in PRECISIONS:
            plans[precision.value] = Plan.for_pretrained(
                source, config, dtype, precision=precision
            )

    full = plans[Precision.FULL.value]
    added, peak = _added_by_peft(full)
    peft = {
        "added_bytes": added,
        "peak_bytes": peak,
        "cache_bytes": full.cache_bytes,
    }
    ours = {name: plan.to_dict() for name, plan in plans.items() if name in asked}
    for plan in ours.values():
        del plan["edits"]
    fits = {
        name: memory_budget is None or plan.peak_bytes <= memory_budget
        for name, plan in plans.items()
    }
    result = {
        "model": model,
        "dtype": dtype,
        "quantization": full.quantization,
        "memory_budget_bytes": memory_budget,
        "loaded_bytes": sum(row["bytes"] for row in full.by_role.values()),
        "peft": peft,
        "fits": {name: fits[name] for name in ours},
        "fitting": [name for name in fits if fits[name]],
        "plans": ours,
    }

    ways = [["precision", "adds", "at its peak"]]
    for name, way in {PEFT: peft, **ours}.items():
        sizes = way["added_bytes"], way["peak_bytes"]
        ways.append([name, *map(format_bytes, sizes)])
    roles = [["parameters", "tensors", "loaded", f"added by {PEFT}"]]
    for role, row in full.by_role.items():
        sizes = row["bytes"], row["added_bytes"]
        roles.append([role, str(row["count"]), *map(format_bytes, sizes)])
    samples = max(plan.sample_bytes for plan in plans.values())
    parts: list[RenderableType] = [
        f"{model}: preparing it, in {kind} and {dtype}",
        table(ways, right=True),
        explained([PEFT, *ours]),
        table(roles, right=True),
        _BESIDE.format(format_bytes(samples), format_bytes(full.cache_bytes)),
        *each_once("warnings", ours),
    ]
    if memory_budget is not None:
        # It names those too that were not asked for: they may be the remedy.
        parts.insert(0, verdict(memory_budget, fits))
    return result, parts, all(fits[name] for name in ours)


def _added_by_peft(full: Plan) -> tuple[int, int]:
    """Count the bytes that PEFT's function adds, and its peak: it casts in the model's order, as "full" does not."""
    (order,) = [edit.fqns for edit in full.edits if edit.action == "freeze"]
    casts = [edit for edit in full.edits if edit.action == "store"]
    casts.sort(key=lambda cast: min(map(order.index, cast.fqns)))
    added = peak = 0
    for cast in casts:
        peak = max(peak, added + cast.transient_bytes)
        added += cast.added_bytes
    return added, peak
