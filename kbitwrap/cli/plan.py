"""``kbitwrap plan``: what preparing a model costs, or what a training step takes, from its config alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

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
    holds_adapter,
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
    "This is the cost of preparing alone; --step shows what a training step takes. Reserved is what CUDA's caching "
    "allocator holds of the device once the model is prepared; once it is loaded, {}. In each row but that of peft it "
    "counts samples of {}, by which kbitwrap tells whether training changed a parameter; no other column does."
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
    if kernels == "cpu" and device_memory is not None:
        raise InputError(
            "--device-memory is of a device for CUDA, of which its context is taken off: with --kernels cpu give "
            "--budget"
        )
    if trainer is None and accumulate is not None:
        raise InputError("--accumulate applies to the step of a trainer: add --trainer")
    if (engine is None) != (devices is None):
        raise InputError("--engine and --devices are given together")
    if holds_adapter(model):
        with working(f"reading {model}"):
            from ..checkpoints.adapters import read_adapter
            from ..checkpoints.base import named_base

            base = named_base(read_adapter(model))
        raise InputError(f"{model!r} holds an adapter: plan its base, {base!r}")

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
            device_memory,
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
        from .. import build_plan
        from ..foresight.loading import events_of, loading_of
        from ..foresight.reserved import Prepared, casts_of, plan_of_peft
        from ..model.pretrained import meta_model, read_config
        from ..model.tree import ModelTree

        source = read_config(model, True) if trust_remote_code else model
        kind, config = choose_quantization(source, model, quant, dtype)
        base = meta_model(source, config, dtype)
        plans = {}
        for precision in PRECISIONS:
            plans[precision.value] = build_plan(base, precision=precision)
        full = plans[Precision.FULL.value]
        peft = plan_of_peft(full)
        loaded = events_of(loading_of(base), ModelTree(base))
        # PEFT's function empties the cache once, in the end.
        prepared = {PEFT: Prepared(loaded, [*casts_of(peft), None], 0)}
        for name, plan in plans.items():
            prepared[name] = Prepared(loaded, casts_of(plan), plan.sample_bytes)

    of_peft: Result = {
        "added_bytes": peft.added_bytes,
        "peak_bytes": peft.peak_bytes,
        "cache_bytes": peft.cache_bytes,
    }
    ours = {name: plan.to_dict() for name, plan in plans.items() if name in asked}
    shown = {PEFT: of_peft, **ours}
    for name, way in shown.items():
        way.pop("edits", None)
        way["reserved_by_phase"] = prepared[name].reserved_by_phase
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
        "peft": of_peft,
        "fits": {name: fits[name] for name in ours},
        "fitting": [name for name in fits if fits[name]],
        "plans": ours,
    }

    ways = [["precision", "adds", "at its peak", "reserved"]]
    for name, way in shown.items():
        by_phase = way["reserved_by_phase"]
        figures = way["added_bytes"], way["peak_bytes"], by_phase["prepared"]
        ways.append([name, *map(format_bytes, figures)])
    roles = [["parameters", "tensors", "loaded", f"added by {PEFT}"]]
    for role, row in full.by_role.items():
        sizes = row["bytes"], row["added_bytes"]
        roles.append([role, str(row["count"]), *map(format_bytes, sizes)])
    once_loaded = of_peft["reserved_by_phase"]["loaded"]
    samples = max(plan.sample_bytes for plan in plans.values())
    parts: list[RenderableType] = [
        f"{model}: preparing it, in {kind} and {dtype}",
        table(ways, right=True),
        explained(shown),
        table(roles, right=True),
        _BESIDE.format(format_bytes(once_loaded), format_bytes(samples)),
        *each_once("warnings", ours),
    ]
    if memory_budget is not None:
        # It names those too that were not asked for: they may be the remedy.
        parts.insert(0, verdict(format_bytes(memory_budget), fits))
    return result, parts, all(fits[name] for name in ours)
