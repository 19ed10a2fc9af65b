"""Lays the figures out: what was run on, and the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .environment import where
from .settings import LAST_STEPS, Figures

Row = tuple[str, ...]

_MIB = 1024**2
_NONE = "-"
_OUT_OF_MEMORY = "out of memory"


# ----------------------------------------------------------------------------------------------------
# The lines before the tables.
# ----------------------------------------------------------------------------------------------------


def header(result: Figures) -> str:
    """The lines before the tables: machine, versions, model and settings.

    Args:
        result: What ``run_benchmark`` or ``run_identity`` returned.

    Returns:
        The lines.
    """
    settings = result["settings"]
    model = _model_line(settings["shape"])
    step = _step_line(settings)
    lines = _environment_lines(result)
    if "combinations" in result:
        return "\n".join([*lines, model, step])
    options = _options(settings)
    compared = "save_file's medians" if settings["export"] else "PEFT's medians"
    methods = {case["memory_method"] for case in result["cases"]}
    lines += [
        f"{model}, head {options['head']}",
        f"timings   median (least - most) of {settings['repeats']}; "
        f"ratios are to {compared} in this run",
        f"memory    {', '.join(sorted(methods))}",
    ]
    if settings["step"]:
        lines.append(
            f"{step}, {options['autocast']} autocast, "
            f"{options['checkpointing']} checkpointing, "
            f"modules_to_save {options['modules_to_save']}, "
            f"head_chunk_bytes {settings['head_chunk_bytes']} under compute-chunked"
        )
    return "\n".join(lines)


def _model_line(shape: Figures) -> str:
    return (
        "model     Mistral in nf4 and bfloat16: "
        "hidden {hidden_size}, {num_layers} layers, {num_heads} heads, "
        "{num_kv_heads} key-value heads, intermediate {intermediate_size}, "
        "vocabulary {vocab_size}"
    ).format_map(shape)


def _step_line(settings: Figures) -> str:
    tokens = ", ".join(map(str, settings["tokens"]))
    return (
        f"step      {tokens} tokens, LoRA on all linears, "
        f"quantized layers compute in {settings['compute_dtype']}"
    )


def _options(settings: Figures) -> dict[str, str]:
    """The options that may change the arithmetic of a step, in words."""
    return {
        "head": "tied" if settings["shape"]["is_tied"] else "not tied",
        "checkpointing": "reentrant" if settings["reentrant"] else "non-reentrant",
        "autocast": "bfloat16" if settings["autocast"] else "no",
        "modules_to_save": "lm_head" if settings["modules_to_save"] else "none",
    }


def _environment_lines(result: Figures) -> list[str]:
    machine = result["environment"]["machine"]
    versions = [
        f"{name} {found}" for name, found in result["environment"]["versions"].items()
    ]
    memory = "unknown"
    if machine["memory_bytes"] is not None:
        memory = f"{machine['memory_bytes'] / 1024**3:.1f} GiB"
    return [
        f"machine   {machine['processor']}, {machine['num_cores']} cores, "
        f"{machine['num_threads']} torch threads, {memory} of memory, "
        f"{machine['system']}; device {where(result)}",
        f"versions  {', '.join(versions)}",
    ]


_LOSS_LINES = """\
model     Llama over bytes in {quant} and bfloat16, hidden {hidden_size}, \
{num_layers} layers, pretrained for {pretraining_steps} steps on pydoc's topics
training  LoRA of rank {rank} on all linears, {lower} autocast, learning rate \
{learning_rate:g} falling to 0, {steps} steps of {batch_size} blocks of {length} bytes \
of the standard library's source
seeds     {repeats}, each with a base, adapters and an order of its own, alike in all \
cases; () is the deviation between seeds, ± the standard error of a mean over them
losses    of a byte: of {num_held_out} blocks that are held out, before training \
{before}; and of training, the mean of the last {last} steps
off       the distance from float64 with the same adapters, in parts of that, before \
and after training"""
_ROLLOUT_LINES = """\
models    over bytes in bfloat16, hidden {hidden_size}, {num_layers} layers, \
pretrained for {pretraining_steps} steps on pydoc's topics
training  LoRA of rank {rank} on all linears of the quantized model, {lower} autocast, \
learning rate {learning_rate:g} falling to 0, {steps} steps of {batch_size} blocks of \
{length} bytes of the standard library's source
engine    the adapter beside the layers of a base in bfloat16, the original one or the \
dequantized one, or of one that the engine quantizes
seeds     {repeats}, each with bases and adapters of its own
KL        of the trainer's distribution and the engine's, in nats a byte of \
{num_held_out} blocks that are held out; log p off is the mean difference of the \
log-probability of the text's own byte"""


def loss_header(result: Figures) -> str:
    """The lines before the table of losses: machine, versions, model and training.

    Args:
        result: What ``run_loss`` returned.

    Returns:
        The lines.
    """
    # Results saved before there was a choice do not name it.
    settings = {"quant": "nf4", "autocast": True, **result["settings"]}
    lines = _LOSS_LINES.format(
        **settings,
        lower=_lower(settings),
        before=_with_deviation(result["losses"][0]["base_loss"]),
        last=LAST_STEPS,
    )
    return "\n".join([*_environment_lines(result), lines])


def rollout_header(result: Figures) -> str:
    """The lines before the table of rollouts: machine, versions, models, training and engine.

    Args:
        result: What ``run_rollout`` returned.

    Returns:
        The lines.
    """
    settings = result["settings"]
    lines = _ROLLOUT_LINES.format(**settings, lower=_lower(settings))
    return "\n".join([*_environment_lines(result), lines])


def _lower(settings: Figures) -> str:
    """The word for the dtype of autocast."""
    return "bfloat16" if settings["autocast"] else "no"


# ----------------------------------------------------------------------------------------------------
# How figures are shown.
# ----------------------------------------------------------------------------------------------------


def _mib(digits: int) -> Callable[[int], str]:
    return lambda num_bytes: f"{num_bytes / _MIB:.{digits}f}"


def _with_deviation(spread: Figures) -> str:
    deviation = spread["deviation"]
    shown = _NONE if deviation is None else f"{deviation:.4f}"
    return f"{spread['mean']:.4f} ({shown})"


def _with_error(spread: Figures) -> str:
    error = spread["error"]
    shown = _NONE if error is None else f"{error:.5f}"
    return f"{spread['mean']:+.5f} ± {shown}"


def _difference(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


_MIB_0, _MIB_1, _MIB_2 = map(_mib, range(3))
_SECONDS = "{0[median]:.3f} ({0[least]:.3f} - {0[most]:.3f})".format
_RATIO = "{:.3f}".format
_LOSS = "{:.4f}".format
_PARTS = "{:.3%}".format


@dataclass(frozen=True)
class Measure:
    """A figure, and the column that it is shown in.

    Attributes:
        title: The header of the column, with the unit.
        key: Its key in the result; of a figure in a part of it all keys, with dots.
        form: What makes a text of it.
        missing: What is shown where it was not measured.
    """

    title: str
    key: str
    form: Callable[[Any], str] = str
    missing: str = _NONE

    def cell(self, result: Figures) -> str:
        """The figure of a result, as text."""
        found: Any = result
        for key in self.key.split("."):
            found = found.get(key)
            if found is None or found == []:
                return self.missing
        return self.form(found)


def _table(measures: Iterable[Measure], results: Iterable[Figures]) -> list[Row]:
    """The header, and a row for each result."""
    measures = tuple(measures)
    rows = [tuple(measure.title for measure in measures)]
    for result in results:
        rows.append(tuple(measure.cell(result) for measure in measures))
    return rows


# ----------------------------------------------------------------------------------------------------
# The tables.
# ----------------------------------------------------------------------------------------------------

_CASE = Measure("case", "case")
_TOKENS = Measure("tokens", "tokens")
_PREPARATION = (
    _CASE,
    Measure("prepare s", "prepare_seconds", _SECONDS),
    Measure("ratio", "ratio_to_peft.prepare_seconds", _RATIO),
    Measure("restore s", "restore_seconds", _SECONDS),
    Measure("live MiB added", "added_bytes", _MIB_2),
    Measure("peak MiB preparing", "transient_peak_bytes", _MIB_1),
    Measure("ratio", "ratio_to_peft.transient_peak_bytes", _RATIO),
)
_EXPORT = (
    _CASE,
    Measure("MiB", "export_bytes", _MIB_0),
    Measure("save_file s", "save_seconds", _SECONDS),
    Measure("merge s", "merge_seconds", _SECONDS, missing=""),
    Measure("export s", "export_seconds", _SECONDS),
    Measure("throughput", "throughput", "{:.2f}".format),
    Measure("by CPU", "cpu_throughput", "{:.2f}".format),
    Measure("peak MiB", "export_peak_bytes", _MIB_1),
    Measure("largest tensor MiB", "largest_bytes", _MIB_1),
    Measure(
        "bytes", "is_identical", {True: "identical", False: "different"}.__getitem__
    ),
)
# The last columns of a table of steps.
_NUMBERS = (
    Measure("loss", "loss", "{:.7f}".format, _OUT_OF_MEMORY),
    Measure("loss difference", "loss_difference", _difference),
    Measure("gradient difference", "largest_gradient_difference", _difference),
)
_STEP = (
    _TOKENS,
    _CASE,
    Measure("step peak MiB", "peak_bytes", _MIB_1),
    Measure("ratio", "ratio_to_peft.peak_bytes", _RATIO),
    Measure("system MiB", "system_peak_bytes", _MIB_1),
    Measure("step s", "seconds", _SECONDS, _OUT_OF_MEMORY),
    Measure("ratio", "ratio_to_peft.seconds", _RATIO),
    *_NUMBERS,
)
_PREDICTION = (
    _TOKENS,
    _CASE,
    Measure("predicted MiB", "predicted.peak_bytes", _MIB_1),
    Measure("tracked MiB", "tracked_bytes", _MIB_1),
    Measure("predicted - tracked, bytes", "difference", "{:+d}".format),
    Measure("allocator MiB", "peak_bytes", _MIB_1),
    Measure("ratio", "ratio", "{:.4f}".format),
)
_IDENTITY = (
    _CASE,
    Measure("head", "head"),
    Measure("checkpointing", "checkpointing"),
    Measure("autocast", "autocast"),
    Measure("modules_to_save", "modules_to_save"),
    _TOKENS,
    Measure("gradients", "num_gradients"),
    *_NUMBERS,
)
_LOSSES = (
    _CASE,
    Measure("adapters", "adapters"),
    Measure("train loss", "end_loss.mean", _LOSS),
    Measure("held-out loss", "held_out_loss", _with_deviation),
    Measure("minus", "difference.case"),
    Measure("train difference", "difference.end_loss", _with_error),
    Measure("held-out difference", "difference.held_out_loss", _with_error),
    Measure("logits off", "logits_distance.start.mean", _PARTS),
    Measure("gradients off", "gradient_distance.start.mean", _PARTS),
    Measure("logits off after", "logits_distance.end.mean", _PARTS),
    Measure("gradients off after", "gradient_distance.end.mean", _PARTS),
)
_ROLLOUTS = (
    _CASE,
    Measure("loss before", "base_loss.mean", _LOSS),
    Measure("trained", "held_out_loss.mean", _LOSS),
    Measure("KL, original base", "original.divergence.mean", _difference),
    Measure("dequantized", "dequantized.divergence.mean", _difference),
    Measure("quantized", "quantized.divergence.mean", _difference),
    Measure("log p off, original", "original.logp_difference.mean", _difference),
    Measure("dequantized", "dequantized.logp_difference.mean", _difference),
    Measure("quantized", "quantized.logp_difference.mean", _difference),
)


def preparation_rows(result: Figures) -> list[Row]:
    """The table of preparing and restoring.

    Args:
        result: What ``run_benchmark`` returned.

    Returns:
        The header and a row for each case.
    """
    return _table(_PREPARATION, result["cases"])


def export_rows(result: Figures) -> list[Row]:
    """The table of exporting.

    Args:
        result: What ``run_benchmark`` returned.

    Returns:
        The header and a row for each case.
    """
    cases = []
    for case in result["cases"]:
        throughput = _throughput(case, "seconds")
        by_cpu = _throughput(case, "cpu_seconds")
        cases.append({**case, "throughput": throughput, "cpu_throughput": by_cpu})
    return _table(_EXPORT, cases)


def _throughput(case: Figures, kind: str) -> float:
    """The time that the parts of an export take alone, computing what is merged and writing, by the export's."""
    alone: float = case[f"save_{kind}"]["median"]
    merge = case.get(f"merge_{kind}")
    if merge:
        alone += merge["median"]
    return alone / case[f"export_{kind}"]["median"]  # type: ignore[no-any-return]


def allocator_rows(result: Figures) -> list[Row]:
    """The table of what CUDA's caching allocator holds before, after and at the peak of preparing.

    Args:
        result: What ``run_benchmark`` returned.

    Returns:
        The header and a row for each case, or nothing where no case ran on CUDA.
    """
    measures = [_CASE]
    for kind in ("allocated", "reserved"):
        for figure in ("before", "after", "added", "peak"):
            title = f"{kind} MiB {figure}"
            measures.append(Measure(title, f"{kind}.{figure}", _MIB_1))
    held = []
    for case in result["cases"]:
        if case["allocator"] is not None:
            allocated = _held(case["allocator"], "allocated")
            reserved = _held(case["allocator"], "reserved")
            held.append({**case, "allocated": allocated, "reserved": reserved})
    return _table(measures, held) if held else []


def _held(allocator: Figures, kind: str) -> dict[str, int]:
    """The bytes held before and after, those added, and the peak."""
    before = allocator["before"][f"{kind}_bytes"]
    after = allocator["after"][f"{kind}_bytes"]
    peak = allocator["after"][f"{kind}_peak_bytes"]
    return {"before": before, "after": after, "added": after - before, "peak": peak}


def _steps(result: Figures) -> Iterator[Figures]:
    """The steps of all cases, those of the same number of tokens together."""
    for index in range(len(result["settings"]["tokens"])):
        for case in result["cases"]:
            yield {**case["steps"][index], "case": case["case"]}


def step_rows(result: Figures) -> list[Row]:
    """The table of training steps.

    Args:
        result: What ``run_benchmark`` returned, with steps.

    Returns:
        The header, and for each number of tokens a row for each case.
    """
    return _table(_STEP, _steps(result))


def prediction_rows(result: Figures) -> list[Row]:
    """The table of predicted steps beside real ones.

    Args:
        result: What ``run_benchmark`` returned, with steps that were predicted.

    Returns:
        The header, and for each number of tokens a row for each case.
    """
    steps = []
    for step in _steps(result):
        predicted = step["predicted"]["peak_bytes"]
        if step.get("tracked_bytes") is not None:
            step["difference"] = predicted - step["tracked_bytes"]
        if step["peak_bytes"] is not None:
            step["ratio"] = predicted / step["peak_bytes"]
        steps.append(step)
    return _table(_PREDICTION, steps)


def identity_rows(result: Figures) -> list[Row]:
    """The table of differences from PEFT's numbers.

    Args:
        result: What ``run_identity`` returned.

    Returns:
        The header, and for each combination and number of tokens a row for each case.
    """
    steps = []
    for combination in result["combinations"]:
        options = _options(combination["settings"])
        for case in combination["cases"]:
            for step in case["steps"]:
                steps.append({**step, **options, "case": case["case"]})
    return _table(_IDENTITY, steps)


def loss_rows(result: Figures) -> list[Row]:
    """The table of losses, their paired differences, and the distances from exact arithmetic.

    Args:
        result: What ``run_loss`` returned.

    Returns:
        The header and a row for each case.
    """
    return _table(_LOSSES, result["losses"])


def rollout_rows(result: Figures) -> list[Row]:
    """The table of trainers beside engines.

    Args:
        result: What ``run_rollout`` returned.

    Returns:
        The header and a row for each case.
    """
    return _table(_ROLLOUTS, result["rollouts"])
