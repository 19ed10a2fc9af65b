"""``kbitwrap plan``: what preparing a model costs, from its config alone."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import ConfigError, Precision, UnsupportedModelError
from .console import EXIT_DONE, EXIT_NO, InputError, first_line, hanging, progress, quiet_libraries, show
from .hub import models, quantization_config
from .tables import table
from .usage import HALF_DTYPES, PRECISIONS, QUANTS, Json, choice, integer, num_bytes

if TYPE_CHECKING:
    from .. import Plan

SUMMARY = "Show what preparing a model costs, from its config alone."
PEFT = "peft"
HELP = """Show what preparing a model costs, from its config alone; with --step, what a training step takes.

No weight is read. Without --step, what each precision adds is printed by role. With it, the most that a step with LoRA
holds in each phase and what it is held for, for each precision and for PEFT's own preparation ("peft"); with --budget
also which fit, and for each the longest sequence and the largest batch that do.

Exit status: 0 every precision asked for fits the budget (or there is none), 1 one does not, 2 bad usage or bad
input."""


def _count(name: str, help: str) -> Any:
    return typer.Option(name, metavar="NUMBER", parser=integer(1), help=help)


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a config.json, or a name on the hub.")],
    quant: Annotated[
        str, choice("--quant", choices=QUANTS, help="Quantization; a model that is quantized already keeps its own.")
    ] = "nf4",
    dtype: Annotated[
        str, choice("--dtype", choices=HALF_DTYPES, help="Dtype of the tensors that are not quantized.")
    ] = "bfloat16",
    precision: Annotated[
        list[str] | None,
        choice(
            "--precision",
            choices=(*PRECISIONS, PEFT),
            metavar="PRECISION...",
            help=f"Any of {', '.join(PRECISIONS)}, with --step also {PEFT}. All, if left out.",
        ),
    ] = None,
    memory_budget: Annotated[
        int | None,
        typer.Option(
            "--memory-budget",
            metavar="BYTES",
            parser=num_bytes,
            help="The largest peak allowed while preparing, such as 512MiB.",
        ),
    ] = None,
    step: Annotated[bool, typer.Option("--step", help="Predict a training step.")] = False,
    seq: Annotated[int, _count("--seq", "Tokens in a sequence, with --step.")] = 2048,
    batch: Annotated[int, _count("--batch", "Sequences in a batch, with --step.")] = 1,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget", metavar="BYTES", parser=num_bytes, help="The most that a step may hold, such as 8GiB."
        ),
    ] = None,
    rank: Annotated[int, _count("--rank", "LoRA's rank, on every linear layer, with --step.")] = 16,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="A name of TrainingArguments.optim, with --step.")
    ] = "adamw_torch",
    autocast: Annotated[
        str | None,
        choice("--autocast", choices=HALF_DTYPES, help="The dtype of autocast in the forward pass, with --step."),
    ] = None,
    kernels: Annotated[
        str, choice("--kernels", choices=("cuda", "cpu"), help="The device that the step is predicted for.")
    ] = "cuda",
    json_: Json = False,
) -> int:
    """Plan, and print what was planned.

    Raises:
        InputError: The model cannot be planned for.
    """
    if not step and (budget is not None or PEFT in (precision or ())):
        raise InputError(f"--budget and the precision {PEFT!r} are for --step; --memory-budget is for preparing")
    if step and memory_budget is not None:
        raise InputError("--memory-budget is for preparing; with --step give --budget")
    _expect_installed(quant)
    if step:
        from .step import StepRequest, plan_steps

        request = StepRequest(model, quant, dtype, seq, batch, rank, optimizer, autocast, kernels, budget)
        return plan_steps(request, precision or (*PRECISIONS, PEFT), json_)
    with models(model), progress(f"planning for {model}"):
        plans = _plans(model, quant, dtype, None if memory_budget is not None else precision)
    fitting = [name for name, plan in plans.items() if memory_budget is None or plan.peak_bytes <= memory_budget]
    asked = [name for name in plans if not precision or name in precision]
    shown = {name: plans[name] for name in asked}
    if json_:
        result = {
            "model": model,
            "dtype": dtype,
            "quantization": next(iter(plans.values())).quantization,
            "memory_budget_bytes": memory_budget,
            "fits": {name: name in fitting for name in asked},
            "fitting": fitting,
            "plans": {name: _figures(plan) for name, plan in shown.items()},
        }
        print(json.dumps(result, indent=2))
    else:
        quantization = next(iter(shown.values())).quantization or "none"
        show(
            f"{model}: quantization {quantization}, {dtype}. In MiB:",
            table(_costs(shown, memory_budget, fitting), right=True),
            table(_by_role(shown), right=True),
            *_notes(shown, fitting),
        )
    return EXIT_DONE if set(asked) <= set(fitting) else EXIT_NO


def _plans(model: str, quant: str, dtype: str, precisions: Sequence[str] | None) -> dict[str, Plan]:
    """The plans by precision: of those asked for, and with a budget of all, since those that fit are named."""
    from .. import Plan

    with quiet_libraries(), warnings.catch_warnings():
        # As when it is loaded: a model that is quantized already keeps its own quantization. The plan says which.
        warnings.filterwarnings("ignore", r"You passed `quantization_config` or equivalent parameters", UserWarning)
        config = quantization_config(quant, dtype)
        try:
            return {
                precision.value: Plan.for_pretrained(model, config, dtype, precision=precision)
                for precision in Precision
                if not precisions or precision in precisions
            }
        except ConfigError as error:
            raise InputError(first_line(error)) from error
        except UnsupportedModelError as error:
            raise InputError(f"the model {model!r} cannot be prepared: {first_line(error)}") from error


def _figures(plan: Plan) -> dict[str, Any]:
    return {key: value for key, value in plan.to_dict().items() if key not in ("precision", "quantization", "edits")}


def _costs(plans: dict[str, Plan], budget: int | None, fitting: Sequence[str]) -> list[list[str]]:
    """What each precision costs in all, and whether it fits."""
    rows = [["precision", "added", "peak", "PEFT's cache"] + ([] if budget is None else ["budget", "fits"])]
    for name, plan in plans.items():
        row = [name, _mib(plan.added_bytes), _mib(plan.peak_bytes), _mib(plan.cache_bytes)]
        rows.append(row + ([] if budget is None else [_mib(budget), "yes" if name in fitting else "no"]))
    return rows


def _by_role(plans: dict[str, Plan]) -> list[list[str]]:
    """Parameters and loaded bytes by role, and what each precision adds."""
    first = next(iter(plans.values()))
    rows = [["role", "parameters", "loaded", *(f"+{name}" for name in plans)]]
    for role, figures in first.by_role.items():
        added = [_mib(plan.by_role[role]["added_bytes"]) for plan in plans.values()]
        rows.append([role, str(figures["count"]), _mib(figures["bytes"]), *added])
    totals = {key: sum(row[key] for row in first.by_role.values()) for key in ("count", "bytes")}
    added = [_mib(plan.added_bytes) for plan in plans.values()]
    return [*rows, ["total", str(totals["count"]), _mib(totals["bytes"]), *added]]


def _notes(plans: dict[str, Plan], fitting: Sequence[str]) -> list[Any]:
    """The warnings, each with its precisions, and what fits where something does not."""
    notes = []
    for warning in dict.fromkeys(warning for plan in plans.values() for warning in plan.warnings):
        named = [name for name, plan in plans.items() if warning in plan.warnings]
        notes.append(hanging(f"warning ({', '.join(named)}): {warning}", 2))
    if not set(plans) <= set(fitting):
        notes.append(hanging(f"Within the memory budget: {', '.join(fitting) or 'no precision'}", 2))
    return notes


def _mib(num_bytes: int) -> str:
    """Mebibytes; a number above zero is never shown as zero."""
    return "0" if num_bytes == 0 else f"{max(num_bytes / 2**20, 0.001):,.{1 if num_bytes >= 2**20 else 3}f}"


def _expect_installed(quant: str) -> None:
    for name in ("transformers", *(("bitsandbytes",) if quant != "none" else ())):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"planning needs {name}, which is not installed")
