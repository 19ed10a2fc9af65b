"""``kbitwrap plan``: what preparing a model costs, from its config alone."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import ConfigError, Precision, UnsupportedModelError
from .console import EXIT_DONE, EXIT_NO, InputError, first_line, hanging, joined, progress, quiet_libraries, show
from .hub import models, quantization_config
from .plot import check_plot, draw
from .tables import table, with_bars
from .usage import HALF_DTYPES, KINDS_OF_NF4, PRECISIONS, QUANTS, Json, choice, integer, num_bytes, path

if TYPE_CHECKING:
    from .. import Plan

SUMMARY = "Show what preparing a model costs, from its config alone."
PEFT = "peft"
_CACHE = "what it frees stays in the allocator's cache until that is emptied, as new versions of it do at the end"
HELP = """Show what preparing a model costs, from its config alone; with --step, what a training step takes.

No weight is read, and no code of the model's folder is run. Without --step, what each precision adds is printed, and
PEFT's own preparation ("peft") beside them, then what it is added to. With it, the most that a step with LoRA
holds in each phase and what it is held for; with --budget also which fit, and for each the longest sequence and the
largest batch that do: that takes a minute or two for a model of 7B.

Exit status: 0 every precision asked for fits the budget (or there is none), 1 one does not, 2 bad usage or bad
input."""


def _count(name: str, help: str) -> Any:
    return typer.Option(name, metavar="NUMBER", parser=integer(1), help=help)


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a config.json, or a name on the hub.")],
    quant: Annotated[
        str,
        choice(
            "--quant",
            choices=QUANTS,
            help=f"Quantization: {KINDS_OF_NF4}. A model that is quantized already keeps its own.",
        ),
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
    seq: Annotated[int | None, _count("--seq", "Tokens in a sequence, with --step; 2048, if left out.")] = None,
    batch: Annotated[int | None, _count("--batch", "Sequences in a batch, with --step; 1, if left out.")] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            metavar="BYTES",
            parser=num_bytes,
            help="The most that a step may hold, such as 8GiB, with --step.",
        ),
    ] = None,
    rank: Annotated[
        int | None, _count("--rank", "LoRA's rank, on every linear layer, with --step; 16, if left out.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            help="A name of TrainingArguments.optim, with --step; adamw_torch, if left out.",
        ),
    ] = None,
    autocast: Annotated[
        str | None,
        choice("--autocast", choices=HALF_DTYPES, help="The dtype of autocast in the forward pass, with --step."),
    ] = None,
    kernels: Annotated[
        str | None,
        choice("--kernels", choices=("cuda", "cpu"), help="The device of the step, with --step; cuda, if left out."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", parser=path, help="Draw it to this file, such as plan.svg; needs matplotlib."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --plot if it exists.")] = False,
    json_: Json = False,
) -> int:
    """Plan, and print what was planned.

    Raises:
        InputError: The model cannot be planned for.
    """
    of_steps = {"seq": seq, "batch": batch, "budget": budget, "rank": rank, "optimizer": optimizer}
    of_steps |= {"autocast": autocast, "kernels": kernels}
    named = [f"--{name}" for name, value in of_steps.items() if value is not None]
    if not step and (named := named + [f"--precision {PEFT}"] * (PEFT in (precision or ()))):
        raise InputError(f"{named[0]} applies to training steps only: add --step")
    if step and memory_budget is not None:
        raise InputError("--memory-budget is for preparing; with --step give --budget")
    if plot is not None:
        check_plot(plot, overwrite=overwrite)
    _expect_installed(quant)
    if step:
        from .step import StepRequest, plan_steps

        optimizer, kernels = optimizer or "adamw_torch", kernels or "cuda"
        request = StepRequest(
            model, quant, dtype, seq or 2048, batch or 1, rank or 16, optimizer, autocast, kernels, budget, plot
        )
        return plan_steps(request, precision or (*PRECISIONS, PEFT), json_)
    with models(model), progress(f"planning for {model}"):
        plans = _plans(model, quant, dtype, None if memory_budget is not None else precision)
    asked = [name for name in plans if not precision or name in precision]
    searched = plans if memory_budget is not None else asked
    fitting = [name for name in searched if memory_budget is None or plans[name].peak_bytes <= memory_budget]
    shown = {name: plans[name] for name in asked}
    peft = _peft(plans[Precision.FULL.value])
    loaded = sum(row["bytes"] for row in plans[Precision.FULL.value].by_role.values())
    costs = {PEFT: peft, **{name: {**_costs(plan), "cache_bytes": 0} for name, plan in shown.items()}}
    added = {PEFT: _added(plans[Precision.FULL.value]), **{name: _added(plan) for name, plan in shown.items()}}
    if plot is not None:
        _draw(plot, model, costs, added, plans[Precision.FULL.value], memory_budget)
    if json_:
        result = {
            "model": model,
            "dtype": dtype,
            "quantization": next(iter(plans.values())).quantization,
            "memory_budget_bytes": memory_budget,
            "loaded_bytes": loaded,
            "peft": peft,
            "fits": {name: name in fitting for name in asked},
            "fitting": fitting,
            "plans": {name: _figures(plan) for name, plan in shown.items()},
        }
        print(json.dumps(result, indent=2))
    else:
        quantization = next(iter(shown.values())).quantization or "none"
        show(
            f"{model}: quantization {quantization}, {dtype}, {_mib(loaded)} loaded. In MiB:",
            *([_by_precision(costs, loaded, memory_budget)] if any(peft.values()) else []),  # else none adds anything
            _by_role(plans[Precision.FULL.value], added),
            *_notes(shown, added, fitting, peft),
        )
    return EXIT_DONE if set(asked) <= set(fitting) else EXIT_NO


def _plans(model: str, quant: str, dtype: str, precisions: Sequence[str] | None) -> dict[str, Plan]:
    """The plans by precision: those asked for, "full" for PEFT's row, and with a budget all, to name those that fit."""
    from .. import Plan

    with quiet_libraries(), warnings.catch_warnings():
        # As when it is loaded: a model that is quantized already keeps its own quantization. The plan says which.
        warnings.filterwarnings("ignore", r"You passed `quantization_config` or equivalent parameters", UserWarning)
        config = quantization_config(quant, dtype)
        try:
            return {
                precision.value: Plan.for_pretrained(model, config, dtype, precision=precision)
                for precision in Precision
                if not precisions or precision in (*precisions, Precision.FULL)
            }
        except ConfigError as error:
            raise InputError(first_line(error)) from error
        except UnsupportedModelError as error:
            raise InputError(f"the model {model!r} cannot be prepared: {first_line(error)}") from error


def _figures(plan: Plan) -> dict[str, Any]:
    return {key: value for key, value in plan.to_dict().items() if key not in ("precision", "quantization", "edits")}


def _costs(plan: Plan) -> dict[str, int]:
    return {"added_bytes": plan.added_bytes, "peak_bytes": plan.peak_bytes}


def _added(plan: Plan) -> dict[str, int]:
    return {role: row["added_bytes"] for role, row in plan.by_role.items()}


def _peft(full: Plan) -> dict[str, int]:
    """The cost of PEFT's function: the casts of "full", in the model's order in place of the largest first."""
    edits = full.to_dict()["edits"]
    (order,) = [edit["fqns"] for edit in edits if edit["action"] == "freeze"]
    places = {fqn: place for place, fqn in enumerate(order)}
    casts = [edit for edit in edits if edit["action"] == "store"]
    live = peak = 0
    for edit in sorted(casts, key=lambda edit: min(places[fqn] for fqn in edit["fqns"])):
        peak = max(peak, live + edit["transient_bytes"])
        live += edit["added_bytes"]
    return {"added_bytes": live, "peak_bytes": peak, "cache_bytes": full.cache_bytes}


def _by_precision(costs: dict[str, dict[str, int]], loaded: int, budget: int | None) -> Any:
    """The cost of each precision in all, with a bar of its peak on which the budget is marked."""
    rows = [["precision", "added", "after", "peak", "freed to cache"]]
    for name, cost in costs.items():
        added, peak = cost["added_bytes"], cost["peak_bytes"]
        rows.append([name, *map(_mib, (added, loaded + added, peak, cost["cache_bytes"]))])
    if budget is not None:
        fits = ["yes" if cost["peak_bytes"] <= budget else "no" for cost in costs.values()]
        rows = [[*row, cell] for row, cell in zip(rows, ["fits", *fits], strict=True)]
    title = "peak" if budget is None else f"peak, budget {_mib(budget)}"
    drawn, left = with_bars(rows, title, [[cost["peak_bytes"]] for cost in costs.values()], budget)
    return table(drawn, right=True, left=left)


def _by_role(full: Plan, added: dict[str, dict[str, int]]) -> Any:
    """Parameters and loaded bytes by role, and what is added to them; what adds the same is one column."""
    columns: dict[tuple[int, ...], list[str]] = {}
    for name, roles in added.items():
        columns.setdefault(tuple(roles[role] for role in full.by_role), []).append(name)
    columns = {sizes: names for sizes, names in columns.items() if any(sizes)}
    rows = [["role", "parameters", "loaded", *(f"+{', '.join(names)}" for names in columns.values())]]
    bars = []
    for place, (role, row) in enumerate(full.by_role.items()):
        rows.append([role, str(row["count"]), _mib(row["bytes"]), *(_mib(sizes[place]) for sizes in columns)])
        bars.append([row["bytes"], row["added_bytes"]])
    totals = {key: sum(row[key] for row in full.by_role.values()) for key in ("count", "bytes")}
    rows.append(["total", str(totals["count"]), _mib(totals["bytes"]), *(_mib(sum(sizes)) for sizes in columns)])
    drawn, left = with_bars(rows, f"loaded +{PEFT}" if columns else "loaded", [*bars, []])
    return table(drawn, right=True, left=left)


def _notes(
    plans: dict[str, Plan], added: dict[str, dict[str, int]], fitting: Sequence[str], peft: dict[str, int]
) -> list[Any]:
    """The lines below the tables: precisions that add nothing, warnings, and those that fit a budget."""
    notes = []
    if idle := [name for name, roles in added.items() if not any(roles.values())]:
        notes.append(hanging(f"Nothing is added by {', '.join(idle)}.", 2))
    if samples := max((plan.sample_bytes for plan in plans.values()), default=0):
        notes.append(hanging(f"Beside it, samples of the parameters take {_mib(samples)} while prepared.", 2))
    if peft["cache_bytes"]:
        notes.append(hanging(f"PEFT's function ({PEFT}): {_CACHE}.", 2))
    for warning in dict.fromkeys(warning for plan in plans.values() for warning in plan.warnings):
        named = [name for name, plan in plans.items() if warning in plan.warnings]
        notes.append(hanging(f"warning ({', '.join(named)}): {warning}", 2))
    if not set(plans) <= set(fitting):
        notes.append(hanging(f"Within the memory budget: {', '.join(fitting) or 'no precision'}", 2))
    return [joined(notes)] if notes else []


def _draw(
    file: Path,
    model: str,
    costs: dict[str, dict[str, int]],
    added: dict[str, dict[str, int]],
    full: Plan,
    budget: int | None,
) -> None:
    bars = {
        name: {role: row["bytes"] + roles[role] for role, row in full.by_role.items()} for name, roles in added.items()
    }
    loaded = sum(row["bytes"] for row in full.by_role.values())
    marks = {name: loaded + cost["peak_bytes"] for name, cost in costs.items()}
    title = f"{Path(model).name}: parameters when prepared, by role"
    draw(bars, file, title, marks=marks, budget=None if budget is None else loaded + budget)


def _mib(num_bytes: int) -> str:
    """Mebibytes; a number above zero is never shown as zero."""
    return "0" if num_bytes == 0 else f"{max(num_bytes / 2**20, 0.001):,.{1 if num_bytes >= 2**20 else 3}f}"


def _expect_installed(quant: str) -> None:
    for name in ("transformers", *(("bitsandbytes",) if quant != "none" else ())):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"planning needs {name}, which is not installed")
