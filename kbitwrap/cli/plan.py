"""``kbitwrap plan``: what preparing a model costs, from its config alone."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import ConfigError, Precision, UnsupportedModelError
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
from .plot import check_plot, draw
from .tables import table, with_bars
from .usage import (
    DEFAULT_QUANT,
    HALF_DTYPES,
    KINDS_OF_NF4,
    PRECISIONS,
    QUANTS,
    Json,
    choice,
    file_size,
    integer,
    num_bytes,
    path,
)

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


def _option(name: str, metavar: str, parser: Any, help: str) -> Any:
    return typer.Option(name, metavar=metavar, parser=parser, help=help)


def _count(name: str, help: str) -> Any:
    return _option(name, "NUMBER", integer(1), help)


_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a config.json, or a name on the hub."
    ),
]
_Quant = Annotated[
    str | None,
    choice(
        "--quant",
        choices=QUANTS,
        help=f"Quantization: {KINDS_OF_NF4}; {DEFAULT_QUANT}, if left out. A model that is quantized already keeps its "
        "own; with none, it is dequantized where transformers can.",
    ),
]
_Dtype = Annotated[
    str,
    choice(
        "--dtype",
        choices=HALF_DTYPES,
        help="Dtype of the tensors that are not quantized.",
    ),
]
_Precision = Annotated[
    list[str] | None,
    choice(
        "--precision",
        choices=(*PRECISIONS, PEFT),
        metavar="PRECISION...",
        help=f"Any of {', '.join(PRECISIONS)}, with --step also {PEFT}. All, if left out.",
    ),
]
_MemoryBudget = Annotated[
    int | None,
    _option(
        "--memory-budget",
        "BYTES",
        num_bytes,
        "The largest peak allowed while preparing, such as 512MiB.",
    ),
]
_Step = Annotated[bool, typer.Option("--step", help="Predict a training step.")]
_Seq = Annotated[
    int | None,
    _count(
        "--seq",
        "Tokens in a sequence, with --step; 2048, or the model's own longest if that is less, if left out.",
    ),
]
_Batch = Annotated[
    int | None, _count("--batch", "Sequences in a batch, with --step; 1, if left out.")
]
_Budget = Annotated[
    int | None,
    _option(
        "--budget",
        "BYTES",
        file_size,
        "The most that a step may hold, such as 8GiB, with --step.",
    ),
]
_Rank = Annotated[
    int | None,
    _count(
        "--rank", "LoRA's rank, on every linear layer, with --step; 16, if left out."
    ),
]
_Optimizer = Annotated[
    str | None,
    _option(
        "--optimizer",
        "NAME",
        str,
        "A name of TrainingArguments.optim, with --step; adamw_torch, if left out.",
    ),
]
_Autocast = Annotated[
    str | None,
    choice(
        "--autocast",
        choices=HALF_DTYPES,
        help="The dtype of autocast in the forward pass, with --step.",
    ),
]
_Kernels = Annotated[
    str | None,
    choice(
        "--kernels",
        choices=("cuda", "cpu"),
        help="The device of the step, with --step; cuda, if left out.",
    ),
]
_Plot = Annotated[
    Path | None,
    _option(
        "--plot",
        "FILE",
        path,
        "Draw it to this file, such as plan.svg; needs matplotlib.",
    ),
]
_Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the file of --plot if it exists.")
]


def command(
    model: _Model,
    quant: _Quant = None,
    dtype: _Dtype = "bfloat16",
    precision: _Precision = None,
    memory_budget: _MemoryBudget = None,
    step: _Step = False,
    seq: _Seq = None,
    batch: _Batch = None,
    budget: _Budget = None,
    rank: _Rank = None,
    optimizer: _Optimizer = None,
    autocast: _Autocast = None,
    kernels: _Kernels = None,
    plot: _Plot = None,
    overwrite: _Overwrite = False,
    json_: Json = False,
) -> int:
    """Plan, and print what was planned.

    Raises:
        InputError: The model cannot be planned for.
    """
    of_steps = {
        "seq": seq,
        "batch": batch,
        "budget": budget,
        "rank": rank,
        "optimizer": optimizer,
    }
    of_steps |= {"autocast": autocast, "kernels": kernels}
    if step and memory_budget is not None:
        raise InputError("--memory-budget is for preparing; with --step give --budget")
    if not step:
        _refuse_of_steps(of_steps, precision or ())
    if plot is not None:
        check_plot(plot, overwrite=overwrite, source=model)
    _expect_installed(quant)
    if not step:
        return _plan_preparation(
            PreparationRequest(model, quant, dtype, memory_budget, plot),
            precision or (),
            json_,
        )
    from .step import StepRequest, plan_steps

    request = StepRequest(
        model=model,
        quant=quant,
        dtype=dtype,
        seq_len=seq,
        batch_size=batch or 1,
        rank=rank or 16,
        optimizer=optimizer or "adamw_torch",
        autocast=autocast,
        kernels=kernels or "cuda",
        budget=budget,
        plot=plot,
    )
    return plan_steps(request, precision or (*PRECISIONS, PEFT), json_)


def _refuse_of_steps(of_steps: dict[str, Any], precisions: Sequence[str]) -> None:
    """Refuse what was given for training steps only."""
    named = [f"--{name}" for name, value in of_steps.items() if value is not None]
    if PEFT in precisions:
        named.append(f"--precision {PEFT}")
    if named:
        raise InputError(f"{named[0]} applies to training steps only: add --step")


def _expect_installed(quant: str | None) -> None:
    libraries = (
        ("transformers",) if quant == "none" else ("transformers", "bitsandbytes")
    )
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"planning needs {name}, which is not installed")


# ----------------------------------------------------------------------------------------------------
# What is planned.
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparationRequest:
    """A request for plans of preparations.

    Attributes:
        model: A folder, a ``config.json``, or a name on the hub.
        quant: The quantization; ``None`` for the model's own, or the default.
        dtype: The dtype of what is not quantized.
        budget: The largest peak allowed, in bytes, or ``None``.
        plot: The file to draw to, or ``None``.
    """

    model: str
    quant: str | None
    dtype: str
    budget: int | None
    plot: Path | None


def _plan_preparation(
    request: PreparationRequest, precisions: Sequence[str], as_json: bool
) -> int:
    """Plan preparations, and print what they cost; all precisions where none is named."""
    # With a budget all are planned, so that those that fit can be named.
    wanted = () if request.budget is not None else precisions
    with models(request.model), progress(f"planning for {request.model}"):
        plans = _plans(request.model, request.quant, request.dtype, wanted)
    planned = Planned(
        request,
        plans,
        tuple(name for name in plans if not precisions or name in precisions),
    )
    if request.plot is not None:
        _draw(planned, request.plot)
    if as_json:
        print(json.dumps(planned.to_dict(), indent=2))
    else:
        _show(planned)
    return EXIT_DONE if {*planned.asked} <= {*planned.fitting} else EXIT_NO


def _plans(
    model: str, quant: str | None, dtype: str, precisions: Sequence[str]
) -> dict[str, Plan]:
    """The plans by precision: those asked for, or all, and "full" for PEFT's row."""
    from .. import Plan

    wanted = [
        one
        for one in Precision
        if not precisions or one in (*precisions, Precision.FULL)
    ]
    plans = {}
    with quiet_libraries():
        quantization = choose_quantization(model, quant, dtype).config
        for precision in wanted:
            try:
                plans[precision.value] = Plan.for_pretrained(
                    model, quantization, dtype, precision=precision
                )
            except ConfigError as error:
                raise InputError(in_options(error)) from error
            except UnsupportedModelError as error:
                raise InputError(
                    f"the model {model!r} cannot be prepared: {in_options(error)}"
                ) from error
    return plans


@dataclass(frozen=True)
class Cost:
    """The bytes that a preparation adds.

    Attributes:
        added: Those that stay.
        peak: The most while preparing.
        cached: Those that it frees and an allocator keeps.
    """

    added: int
    peak: int
    cached: int = 0

    @classmethod
    def of_peft(cls, full: Plan) -> Cost:
        """The cost of PEFT's function: the casts of "full", in the model's order in place of the largest first."""
        edits = full.to_dict()["edits"]
        (order,) = [edit["fqns"] for edit in edits if edit["action"] == "freeze"]
        places = {fqn: place for place, fqn in enumerate(order)}

        def place_of(cast: dict[str, Any]) -> int:
            return min(places[fqn] for fqn in cast["fqns"])

        casts = [edit for edit in edits if edit["action"] == "store"]
        live = peak = 0
        for cast in sorted(casts, key=place_of):
            peak = max(peak, live + cast["transient_bytes"])
            live += cast["added_bytes"]
        return cls(live, peak, full.cache_bytes)

    def to_dict(self) -> dict[str, int]:
        """As plain values, ready for JSON."""
        return {
            "added_bytes": self.added,
            "peak_bytes": self.peak,
            "cache_bytes": self.cached,
        }


@dataclass(frozen=True)
class Planned:
    """The plans of a request, by precision; some were made to be compared with, and were not asked for."""

    request: PreparationRequest
    plans: dict[str, Plan]
    asked: tuple[str, ...]

    @property
    def full(self) -> Plan:
        """The plan of "full", which does what PEFT's function does."""
        return self.plans[Precision.FULL.value]

    @property
    def shown(self) -> dict[str, Plan]:
        """The plans that were asked for."""
        return {name: self.plans[name] for name in self.asked}

    @property
    def fitting(self) -> list[str]:
        """The precisions that fit the budget; with none, those asked for."""
        budget = self.request.budget
        if budget is None:
            return [*self.asked]
        return [name for name, plan in self.plans.items() if plan.peak_bytes <= budget]

    @property
    def loaded(self) -> int:
        """The bytes of the loaded model's parameters."""
        return sum(row["bytes"] for row in self.full.by_role.values())

    @functools.cached_property
    def peft(self) -> Cost:
        """The cost of PEFT's own preparation."""
        return Cost.of_peft(self.full)

    @property
    def costs(self) -> dict[str, Cost]:
        """The cost of PEFT's preparation and of each precision."""
        ours = {
            name: Cost(plan.added_bytes, plan.peak_bytes)
            for name, plan in self.shown.items()
        }
        return {PEFT: self.peft, **ours}

    @property
    def added(self) -> dict[str, dict[str, int]]:
        """The bytes that each of them adds, by role."""
        return {
            name: _added_by_role(plan)
            for name, plan in ((PEFT, self.full), *self.shown.items())
        }

    def to_dict(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        fitting = self.fitting
        return {
            "model": self.request.model,
            "dtype": self.request.dtype,
            "quantization": self.full.quantization,
            "memory_budget_bytes": self.request.budget,
            "loaded_bytes": self.loaded,
            "peft": self.peft.to_dict(),
            "fits": {name: name in fitting for name in self.asked},
            "fitting": fitting,
            "plans": {name: _figures(plan) for name, plan in self.shown.items()},
        }


def _added_by_role(plan: Plan) -> dict[str, int]:
    return {role: row["added_bytes"] for role, row in plan.by_role.items()}


def _figures(plan: Plan) -> dict[str, Any]:
    left_out = ("precision", "quantization", "edits")
    return {key: value for key, value in plan.to_dict().items() if key not in left_out}


# ----------------------------------------------------------------------------------------------------
# What is shown of it.
# ----------------------------------------------------------------------------------------------------


def _show(planned: Planned) -> None:
    request = planned.request
    quantization = planned.full.quantization or "none"
    parts: list[Any] = [
        f"{request.model}: quantization {quantization}, {request.dtype}, {_mib(planned.loaded)} loaded. In MiB:"
    ]
    if any(planned.peft.to_dict().values()):  # else none adds anything
        parts.append(_by_precision(planned))
    parts.append(_by_role(planned))
    if notes := _notes(planned):
        parts.append(joined(notes))
    show(*parts)


def _by_precision(planned: Planned) -> Any:
    """The cost of each precision in all, with a bar of its peak on which the budget is marked."""
    budget, costs = planned.request.budget, planned.costs
    rows = [["precision", "added", "after", "peak", "freed to cache"]]
    for name, cost in costs.items():
        figures = (cost.added, planned.loaded + cost.added, cost.peak, cost.cached)
        rows.append([name, *map(_mib, figures)])
    title = "peak"
    if budget is not None:
        title = f"peak, budget {_mib(budget)}"
        rows[0].append("fits")
        for row, cost in zip(rows[1:], costs.values(), strict=True):
            row.append("yes" if cost.peak <= budget else "no")
    drawn, left = with_bars(
        rows, title, [[cost.peak] for cost in costs.values()], budget
    )
    return table(drawn, right=True, left=left)


def _by_role(planned: Planned) -> Any:
    """Parameters and loaded bytes by role, and what is added to them; what adds the same is one column."""
    by_role = planned.full.by_role
    columns: dict[tuple[int, ...], list[str]] = {}
    for name, roles in planned.added.items():
        sizes = tuple(roles[role] for role in by_role)
        if any(sizes):
            columns.setdefault(sizes, []).append(name)
    rows = [
        [
            "role",
            "parameters",
            "loaded",
            *(f"+{', '.join(names)}" for names in columns.values()),
        ]
    ]
    bars = []
    for place, (role, row) in enumerate(by_role.items()):
        added = [_mib(sizes[place]) for sizes in columns]
        rows.append([role, str(row["count"]), _mib(row["bytes"]), *added])
        bars.append([row["bytes"], row["added_bytes"]])
    count = sum(row["count"] for row in by_role.values())
    rows.append(
        [
            "total",
            str(count),
            _mib(planned.loaded),
            *(_mib(sum(sizes)) for sizes in columns),
        ]
    )
    title = f"loaded +{PEFT}" if columns else "loaded"
    drawn, left = with_bars(rows, title, [*bars, []])
    return table(drawn, right=True, left=left)


def _notes(planned: Planned) -> list[Any]:
    """The lines below the tables: precisions that add nothing, warnings, and those that fit a budget."""
    notes = []
    if idle := [
        name for name, roles in planned.added.items() if not any(roles.values())
    ]:
        notes.append(hanging(f"Nothing is added by {', '.join(idle)}.", 2))
    if samples := max(
        (plan.sample_bytes for plan in planned.shown.values()), default=0
    ):
        notes.append(
            hanging(
                f"Beside it, samples of the parameters take {_mib(samples)} while prepared.",
                2,
            )
        )
    if planned.peft.cached:
        notes.append(hanging(f"PEFT's function ({PEFT}): {_CACHE}.", 2))
    notes += warned({name: plan.warnings for name, plan in planned.shown.items()})
    fitting = planned.fitting
    if not {*planned.asked} <= {*fitting}:
        notes.append(
            hanging(
                f"Within the memory budget: {', '.join(fitting) or 'no precision'}", 2
            )
        )
    return notes


def _draw(planned: Planned, file: Path) -> None:
    """Draw the parameters when prepared, by role, with the peaks and the budget."""
    request, by_role = planned.request, planned.full.by_role
    bars = {}
    for name, roles in planned.added.items():
        bars[name] = {role: row["bytes"] + roles[role] for role, row in by_role.items()}
    marks = {name: planned.loaded + cost.peak for name, cost in planned.costs.items()}
    budget = None if request.budget is None else planned.loaded + request.budget
    draw(
        bars,
        file,
        f"{Path(request.model).name}: parameters when prepared, by role",
        marks=marks,
        budget=budget,
    )


def _mib(num_bytes: int) -> str:
    """Mebibytes; a number above zero is never shown as zero."""
    if num_bytes == 0:
        return "0"
    digits = 1 if num_bytes >= 2**20 else 3
    return f"{max(num_bytes / 2**20, 0.001):,.{digits}f}"
