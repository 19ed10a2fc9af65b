"""``kbitwrap plan``: what preparing a model costs, from its config alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from .. import Precision
from .console import (
    EXIT_DONE,
    EXIT_NO,
    InputError,
    Result,
    expect_installed,
    hanging,
    show,
    show_json,
    warned,
)
from .hub import choose_quantization, described_by, refusing, working
from .plot import check_plot, draw
from .tables import Bars, add_column, figure, table
from .trainers import TRAINERS
from .usage import (
    DEFAULT_QUANT,
    HALF_DTYPES,
    KINDS_OF_4_BITS,
    PRECISIONS,
    QUANTS,
    Json,
    TrustRemoteCode,
    argument,
    at_most_one,
    choice,
    file_size,
    flag,
    integer,
    num_bytes,
    option,
    path,
    value,
)
from .ways import explained

if TYPE_CHECKING:
    from .. import Plan
    from .step import Predicted

SUMMARY = (
    "Say whether a training step fits, or what preparing costs, from a config alone."
)
PEFT = "peft"
_OF_STEPS = (PEFT, "unprepared")
_PEFTS = "PEFT's prepare_model_for_kbit_training"
HELP = """Say what a training step takes and whether that fits, from a model's config alone; or what preparing it costs.

  kbitwrap plan MODEL --step --budget 7GiB
  kbitwrap plan MODEL --step --trainer sft --device-memory 24GB
  kbitwrap plan MODEL

The first says whether a step of QLoRA fits 7 GiB, and which sequences and batches do. The second says so of TRL's
SFTTrainer, with its own defaults, on a GPU of 24 GB. The third is about preparing alone: what each precision and PEFT's
prepare_model_for_kbit_training add to the loaded model.

No weight is read, and no GPU is needed. A precision is a way to prepare: norms is the default, and full is what PEFT's
function does. The output explains each that it shows.

Exit status: 0 every precision asked for fits the budget (or there is none), 1 one does not, 2 bad usage or bad
input."""

_WITH_STEP = "Options with --step"


_Model = Annotated[
    str, argument("MODEL", str, "A folder, a config.json, or a name on the hub.")
]
_Quant = Annotated[
    str | None,
    choice(
        "--quant",
        QUANTS,
        f"Quantization: {KINDS_OF_4_BITS}; {DEFAULT_QUANT}, if left out. A model that is quantized already keeps its "
        "own; none dequantizes it, where transformers can.",
    ),
]
_Dtype = Annotated[
    str,
    choice("--dtype", HALF_DTYPES, "Dtype of the tensors that are not quantized."),
]
_Precision = Annotated[
    list[str] | None,
    choice(
        "--precision",
        (*PRECISIONS, *_OF_STEPS),
        f"Ways to prepare, one or several of {', '.join(PRECISIONS)}; with --step also {PEFT}, and unprepared, which "
        "is as loaded. All but unprepared, if left out.",
        metavar="PRECISION...",
    ),
]
_MemoryBudget = Annotated[
    int | None,
    value(
        "--memory-budget",
        "BYTES",
        num_bytes,
        "The most that preparing may add to the loaded model, such as 512MiB. It is no budget of a step, which "
        "--budget is.",
        panel="Options without --step",
    ),
]
_Step = Annotated[
    bool,
    flag("--step", "Say what a training step takes, with LoRA on every linear layer."),
]
_Trainer = Annotated[
    str | None,
    choice(
        "--trainer",
        TRAINERS,
        "The step of TRL's trainer of this kind, or of transformers' own (trainer), with its defaults for batch, "
        "length, loss, optimizer, autocast and checkpointing.",
        panel=_WITH_STEP,
    ),
]
_Seq = Annotated[
    int | None,
    value(
        "--seq",
        "NUMBER",
        integer(1),
        "Tokens in a sequence. If left out: the default of --trainer; without it 2048, or the model's own longest if "
        "that is less.",
        panel=_WITH_STEP,
    ),
]
_Batch = Annotated[
    int | None,
    value(
        "--batch",
        "NUMBER",
        integer(1),
        "Sequences in a batch. If left out: the default of --trainer, or 1 without it.",
        panel=_WITH_STEP,
    ),
]
_Accumulate = Annotated[
    int | None,
    value(
        "--accumulate",
        "NUMBER",
        integer(1),
        "Batches whose gradients are accumulated in a step, with --trainer.",
        panel=_WITH_STEP,
    ),
]
_Liger = Annotated[
    bool,
    flag(
        "--liger",
        "Train with Liger's kernels, with --trainer; not predicted yet, so refused.",
        panel=_WITH_STEP,
    ),
]
_Engine = Annotated[
    str | None,
    choice(
        "--engine",
        ("ddp", "fsdp2"),
        "The step on one of several devices, with --devices.",
        panel=_WITH_STEP,
    ),
]
_Devices = Annotated[
    int | None,
    value(
        "--devices",
        "NUMBER",
        integer(2),
        "The number of devices, with --engine.",
        panel=_WITH_STEP,
    ),
]
_Budget = Annotated[
    int | None,
    value(
        "--budget",
        "BYTES",
        file_size,
        "The most that all tensors may take, the model's among them, such as 7GiB. The CUDA context comes on top.",
        panel=_WITH_STEP,
    ),
]
_DeviceMemory = Annotated[
    int | None,
    value(
        "--device-memory",
        "BYTES",
        file_size,
        "In place of --budget: the memory of the GPU, such as 24GB, of which the CUDA context is taken off.",
        panel=_WITH_STEP,
    ),
]
_Rank = Annotated[
    int | None,
    value(
        "--rank",
        "NUMBER",
        integer(1),
        "LoRA's rank; 16, if left out.",
        panel=_WITH_STEP,
    ),
]
_Optimizer = Annotated[
    str | None,
    value(
        "--optimizer",
        "NAME",
        str,
        "A name of TrainingArguments.optim; adamw_torch, if left out.",
        panel=_WITH_STEP,
    ),
]
_Autocast = Annotated[
    str | None,
    choice(
        "--autocast",
        HALF_DTYPES,
        "The dtype of autocast in the forward pass.",
        panel=_WITH_STEP,
    ),
]
_Kernels = Annotated[
    str | None,
    choice(
        "--kernels",
        ("cuda", "cpu"),
        "The device of the step; cuda, if left out.",
        panel=_WITH_STEP,
    ),
]
_Plot = Annotated[
    Path | None,
    value(
        "--plot",
        "FILE",
        path,
        "Draw it to this file, such as plan.svg; needs matplotlib.",
    ),
]
_Overwrite = Annotated[
    bool, flag("--overwrite", "Replace the file of --plot if it exists.")
]


def command(
    context: typer.Context,
    model: _Model,
    step: _Step = False,
    quant: _Quant = None,
    dtype: _Dtype = "bfloat16",
    precision: _Precision = None,
    budget: _Budget = None,
    device_memory: _DeviceMemory = None,
    seq: _Seq = None,
    batch: _Batch = None,
    trainer: _Trainer = None,
    accumulate: _Accumulate = None,
    liger: _Liger = False,
    rank: _Rank = None,
    optimizer: _Optimizer = None,
    autocast: _Autocast = None,
    kernels: _Kernels = None,
    engine: _Engine = None,
    devices: _Devices = None,
    memory_budget: _MemoryBudget = None,
    plot: _Plot = None,
    overwrite: _Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Plan, and print what was planned.

    Raises:
        InputError: The model cannot be planned for.
    """
    if step and memory_budget is not None:
        raise InputError(
            "--memory-budget is for what preparing adds; the budget of a whole step is --budget"
        )
    if not step:
        _refuse_of_steps(
            precision or (),
            seq=seq,
            batch=batch,
            trainer=trainer,
            accumulate=accumulate,
            liger=liger or None,
            engine=engine,
            devices=devices,
            budget=budget,
            device_memory=device_memory,
            rank=rank,
            optimizer=optimizer,
            autocast=autocast,
            kernels=kernels,
        )
    at_most_one(context, budget=budget, device_memory=device_memory)
    if trainer is None and (accumulate is not None or liger):
        name = "--liger" if liger else "--accumulate"
        raise InputError(f"{name} applies to the step of a trainer: add --trainer")
    if (engine is None) != (devices is None):
        raise InputError("--engine and --devices are given together")
    if plot is not None:
        check_plot(plot, overwrite=overwrite, source=model)
    expect_installed("planning", "transformers")
    if quant != "none":
        expect_installed("planning", "bitsandbytes")
    if not step:
        # With a budget all are planned, so that those that fit can be named.
        wanted = () if memory_budget is not None else (precision or ())
        with working(model, f"planning for {model}", trust_remote_code):
            quantization = choose_quantization(model, quant, dtype)
            source = described_by(model, trust_remote_code)
            plans = _plans(model, source, quantization.config, dtype, wanted)
        asked = {name: plans[name] for name in plans if name in (precision or plans)}
        loaded_in = quantization.name if quantization.config is not None else None
        planned = Planned(model, dtype, memory_budget, plans, asked, loaded_in)
        return _tell(planned, plot, json_)
    from .step import StepRequest, limit_of, predict_steps

    request = StepRequest(
        model=model,
        quant=quant,
        dtype=dtype,
        seq_len=seq,
        batch_size=batch,
        rank=rank or 16,
        optimizer=optimizer,
        autocast=autocast,
        kernels=kernels or "cuda",
        limit=limit_of(budget, device_memory),
        trainer=trainer,
        accumulate=accumulate,
        has_liger=liger,
        engine=engine,
        num_devices=devices or 1,
        trust_remote_code=trust_remote_code,
    )
    predicted = predict_steps(request, precision or (*PRECISIONS, PEFT))
    return _tell(predicted, plot, json_)


def _refuse_of_steps(precisions: Sequence[str], **of_steps: object) -> None:
    """Refuse what was given for training steps only."""
    named = [option(name) for name, value in of_steps.items() if value is not None]
    named += [f"--precision {name}" for name in _OF_STEPS if name in precisions]
    if named:
        other = ""
        if named[0] == "--budget":
            other = ", or give --memory-budget for what preparing alone adds"
        raise InputError(
            f"{named[0]} applies to training steps only: add --step{other}"
        )


# ----------------------------------------------------------------------------------------------------
# What is planned.
# ----------------------------------------------------------------------------------------------------

Plans = dict[str, "Plan"]
"""Plans by precision."""


def _plans(
    model: str, source: Any, quantization: Any, dtype: str, precisions: Sequence[str]
) -> Plans:
    """The plans by precision: those asked for, or all, and "full" for PEFT's row.

    Args:
        model: The model, as it was named.
        source: What it is built from.
        quantization: As for ``from_pretrained``.
        dtype: The dtype of what is not quantized.
        precisions: Those asked for; all where there are none.

    Returns:
        The plans.
    """
    from .. import Plan

    plans: Plans = {}
    for precision in PRECISIONS:
        if precisions and precision not in (*precisions, Precision.FULL):
            continue
        with refusing(f"the model {model!r} cannot be prepared"):
            plans[precision] = Plan.for_pretrained(
                source, quantization, dtype, precision=precision
            )
    return plans


@dataclass(frozen=True)
class Way:
    """A way to prepare, and the bytes that it adds.

    Attributes:
        name: A precision, or ``"peft"``.
        by_role: Those that stay, by role, and ``added`` all of them.
        peak: The most while preparing.
        cached: Those that it frees and an allocator keeps.
    """

    name: str
    by_role: dict[str, int]
    added: int
    peak: int
    cached: int = 0

    @classmethod
    def of(cls, name: str, plan: Plan) -> Way:
        """The way of a plan."""
        by_role = {role: row["added_bytes"] for role, row in plan.by_role.items()}
        return cls(name, by_role, plan.added_bytes, plan.peak_bytes)

    @classmethod
    def of_peft(cls, full: Plan) -> Way:
        """The way of PEFT's function: the casts of "full", in the model's order in place of the largest first."""
        edits = full.to_dict()["edits"]
        (order,) = [edit["fqns"] for edit in edits if edit["action"] == "freeze"]
        places = {fqn: place for place, fqn in enumerate(order)}

        def place_of(cast: Result) -> int:
            return min(places[fqn] for fqn in cast["fqns"])

        casts = [edit for edit in edits if edit["action"] == "store"]
        added = peak = 0
        for cast in sorted(casts, key=place_of):
            peak = max(peak, added + cast["transient_bytes"])
            added += cast["added_bytes"]
        return dataclasses.replace(
            cls.of(PEFT, full), added=added, peak=peak, cached=full.cache_bytes
        )


@dataclass(frozen=True)
class Planned:
    """The plans for a model.

    Attributes:
        model: The model, as it was named.
        dtype: The dtype of what is not quantized.
        budget: The most that preparing may add at its peak, or ``None``.
        plans: All that were made, some to be compared with.
        asked: Those that were asked for.
        quant: The quantization that was chosen for it; ``None`` for the model's own, or
            for none.
    """

    model: str
    dtype: str
    budget: int | None
    plans: Plans
    asked: Plans
    quant: str | None = None

    @property
    def full(self) -> Plan:
        """The plan of "full", which does what PEFT's function does."""
        return self.plans[Precision.FULL.value]

    @property
    def fitting(self) -> list[str]:
        """The precisions that fit the budget; with none, those asked for."""
        if self.budget is None:
            return list(self.asked)
        return [
            name for name, plan in self.plans.items() if plan.peak_bytes <= self.budget
        ]

    @property
    def fits(self) -> bool:
        """Whether all that were asked for fit the budget, or there is none."""
        return {*self.asked} <= {*self.fitting}

    @property
    def loaded(self) -> int:
        """The bytes of the loaded model's parameters."""
        return sum(row["bytes"] for row in self.full.by_role.values())

    @functools.cached_property
    def ways(self) -> list[Way]:
        """PEFT's way and each precision that was asked for."""
        ours = [Way.of(name, plan) for name, plan in self.asked.items()]
        return [Way.of_peft(self.full), *ours]

    def to_dict(self) -> Result:
        """As plain values, ready for JSON."""
        peft = self.ways[0]
        fitting = self.fitting
        return {
            "model": self.model,
            "dtype": self.dtype,
            "quantization": self.full.quantization,
            "memory_budget_bytes": self.budget,
            "loaded_bytes": self.loaded,
            "peft": {
                "added_bytes": peft.added,
                "peak_bytes": peft.peak,
                "cache_bytes": peft.cached,
            },
            "fits": {name: name in fitting for name in self.asked},
            "fitting": fitting,
            "plans": {name: _figures(plan) for name, plan in self.asked.items()},
        }

    def parts(self) -> list[RenderableType]:
        """As texts and tables."""
        peft = self.ways[0]
        parts: list[RenderableType] = []
        if self.budget is not None:
            parts.append(hanging(self._verdict(self.budget), 2))
        parts.append(hanging(self._answer(), 2))
        if peft.added or peft.peak or peft.cached:  # else none adds anything
            parts.append(_by_precision(self))
            parts.append(explained([way.name for way in self.ways]))
        parts.append(_by_role(self))
        parts.append(Group(*_notes(self)))
        return parts

    def _verdict(self, budget: int) -> str:
        """The sentence that says which precisions a budget is enough for."""
        fitting = self.fitting
        over = [name for name in self.asked if name not in fitting]
        within = ", ".join(fitting) or "no precision"
        said = f"{_mib(budget)} MiB: preparing fits with {within}."
        if over:
            said += f" It does not fit with {', '.join(over)}."
        return said

    def _answer(self) -> str:
        """The sentence that says what each way to prepare adds."""
        names: dict[int, list[str]] = {}
        peft, *ours = self.ways
        for way in ours:
            names.setdefault(way.added, []).append(way.name)
        names.setdefault(peft.added, []).append(_PEFTS)
        added = []
        for size in sorted(names):
            much = f"{_mib(size)} MiB" if size else "nothing"
            *others, last = names[size]
            listed = f"{', '.join(others)} and {last}" if others else last
            added.append(f"{much} with {listed}")
        dtypes = self.dtype
        if self.full.quantization:
            dtypes = f"{self.quant or self.full.quantization} and {self.dtype}"
        loaded = f"{_mib(self.loaded)} MiB of parameters in {dtypes}"
        return f"Preparing {self.model} adds to {loaded}: {'; '.join(added)}."

    def draw(self, file: Path) -> None:
        """Draw the parameters when prepared, by role, with the peaks and the budget."""
        loaded = self.loaded
        by_role = self.full.by_role
        bars = {}
        marks = {}
        for way in self.ways:
            marks[way.name] = loaded + way.peak
            bars[way.name] = {
                role: row["bytes"] + way.by_role[role] for role, row in by_role.items()
            }
        budget = None if self.budget is None else loaded + self.budget
        title = f"{Path(self.model).name}: parameters when prepared, by role"
        draw(bars, file, title, marks=marks, budget=budget)


def _figures(plan: Plan) -> Result:
    left_out = ("precision", "quantization", "edits")
    return {key: value for key, value in plan.to_dict().items() if key not in left_out}


# ----------------------------------------------------------------------------------------------------
# What is told of it.
# ----------------------------------------------------------------------------------------------------


def _tell(found: Planned | Predicted, plot: Path | None, as_json: bool) -> int:
    """Draw and print what was found; returns the exit status."""
    if plot is not None:
        found.draw(plot)
    if as_json:
        show_json(found.to_dict())
    else:
        show(*found.parts())
    return EXIT_DONE if found.fits else EXIT_NO


def _by_precision(planned: Planned) -> Group:
    """The cost of each precision in all, with a bar of its peak on which the budget is marked."""
    budget = planned.budget
    ways = planned.ways
    rows = [["in MiB", "added", "peak while preparing", "parameters then"]]
    for way in ways:
        sizes = (way.added, way.peak, planned.loaded + way.added)
        rows.append([way.name, *map(_mib, sizes)])
    title = "peak"
    if budget is not None:
        title = f"peak, budget {_mib(budget)}"
        fits = ["yes" if way.peak <= budget else "no" for way in ways]
        add_column(rows, "fits", fits)
    bars = Bars(title, [[way.peak] for way in ways], budget)
    return table(rows, right=True, bars=bars)


def _by_role(planned: Planned) -> Group:
    """Parameters and loaded bytes by role, and what is added to them; what adds the same is one column."""
    by_role = planned.full.by_role
    columns: dict[tuple[int, ...], list[str]] = {}
    for way in planned.ways:
        if any(way.by_role.values()):
            columns.setdefault(tuple(way.by_role.values()), []).append(way.name)
    headers = [f"added by {', '.join(names)}" for names in columns.values()]
    rows = [["parameters, in MiB", "tensors", "loaded", *headers]]
    bars = []
    for place, (role, row) in enumerate(by_role.items()):
        added = [_mib(sizes[place]) for sizes in columns]
        rows.append([role, str(row["count"]), _mib(row["bytes"]), *added])
        bars.append([row["bytes"], row["added_bytes"]])
    count = sum(row["count"] for row in by_role.values())
    sums = [_mib(sum(sizes)) for sizes in columns]
    rows.append(["total", str(count), _mib(planned.loaded), *sums])
    title = f"loaded, added by {PEFT}" if columns else "loaded"
    return table(rows, right=True, bars=Bars(title, [*bars, []]))


def _notes(planned: Planned) -> list[str]:
    """The lines below the tables: what is beside their figures, warnings, and where to go on."""
    notes = []
    samples = max([plan.sample_bytes for plan in planned.asked.values()], default=0)
    if samples:
        notes.append(
            f"While a model is prepared, samples of its parameters take {_mib(samples)} MiB more: by them kbitwrap "
            "tells whether training changed a parameter."
        )
    cached = planned.ways[0].cached
    if cached:
        notes.append(
            f"PEFT's function frees {_mib(cached)} MiB, which stay in the allocator's cache until that is emptied; "
            "its newer versions empty it at the end."
        )
    notes = [hanging(note, 2) for note in notes]
    notes += warned({name: plan.warnings for name, plan in planned.asked.items()})
    notes.append(
        hanging(
            "This is the cost of preparing alone; --step shows what a training step takes.",
            2,
        )
    )
    return notes


def _mib(num_bytes: int) -> str:
    return figure(num_bytes, 2**20, 1 if num_bytes >= 2**20 else 3)
