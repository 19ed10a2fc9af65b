"""Lays the figures out: what was run on, and the tables."""

from __future__ import annotations

from typing import Any

from .environment import where
from .settings import DISTANCES, LAST_STEPS

_MIB = 1024**2
_NONE = "-"
_OUT_OF_MEMORY = "out of memory"
# The last columns of a table of steps, which _numbers fills.
_NUMBERS = ("loss", "loss difference", "gradient difference")


def header(result: dict[str, Any]) -> str:
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
        f"timings   median (least - most) of {settings['repeats']}; ratios are to {compared} in this run",
        f"memory    {', '.join(sorted(methods))}",
    ]
    if settings["step"]:
        lines.append(
            f"{step}, {options['autocast']} autocast, {options['checkpointing']} checkpointing, "
            f"modules_to_save {options['modules_to_save']}, "
            f"head_chunk_bytes {settings['head_chunk_bytes']} under compute-chunked"
        )
    return "\n".join(lines)


def _model_line(shape: dict[str, Any]) -> str:
    return (
        f"model     Mistral in nf4 and bfloat16: hidden {shape['hidden_size']}, {shape['num_layers']} layers, "
        f"{shape['num_heads']} heads, {shape['num_kv_heads']} key-value heads, "
        f"intermediate {shape['intermediate_size']}, vocabulary {shape['vocab_size']}"
    )


def _step_line(settings: dict[str, Any]) -> str:
    tokens = ", ".join(map(str, settings["tokens"]))
    return f"step      {tokens} tokens, LoRA on all linears, quantized layers compute in {settings['compute_dtype']}"


def _options(settings: dict[str, Any]) -> dict[str, str]:
    """The options that may change the arithmetic of a step, in words."""
    return {
        "head": "tied" if settings["shape"]["is_tied"] else "not tied",
        "checkpointing": "reentrant" if settings["reentrant"] else "non-reentrant",
        "autocast": "bfloat16" if settings["autocast"] else "no",
        "modules_to_save": "lm_head" if settings["modules_to_save"] else "none",
    }


def _environment_lines(result: dict[str, Any]) -> list[str]:
    machine = result["environment"]["machine"]
    versions = [
        f"{name} {found}" for name, found in result["environment"]["versions"].items()
    ]
    memory = "unknown"
    if machine["memory_bytes"] is not None:
        memory = f"{machine['memory_bytes'] / 1024**3:.1f} GiB"
    return [
        f"machine   {machine['processor']}, {machine['num_cores']} cores, {machine['num_threads']} torch threads, "
        f"{memory} of memory, {machine['system']}; device {where(result)}",
        f"versions  {', '.join(versions)}",
    ]


def preparation_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of preparing and restoring.

    Args:
        result: What ``run_benchmark`` returned.

    Returns:
        The header and a row for each case.
    """
    columns = (
        "case",
        "prepare s",
        "ratio",
        "restore s",
        "live MiB added",
        "peak MiB preparing",
        "ratio",
    )
    rows: list[tuple[str, ...]] = [columns]
    for case in result["cases"]:
        rows.append(
            (
                case["case"],
                _seconds(case["prepare_seconds"]),
                _ratio(case, "prepare_seconds"),
                _seconds(case["restore_seconds"]),
                _mib(case["added_bytes"], 2),
                _mib(case["transient_peak_bytes"], 1),
                _ratio(case, "transient_peak_bytes"),
            )
        )
    return rows


def export_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of exporting.

    Args:
        result: What ``run_benchmark`` returned.

    Returns:
        The header and a row for each case.
    """
    columns = (
        "case",
        "MiB",
        "save_file s",
        "merge s",
        "export s",
        "throughput",
        "by CPU",
        "peak MiB",
        "largest tensor MiB",
        "bytes",
    )
    rows: list[tuple[str, ...]] = [columns]
    for case in result["cases"]:
        merge = case.get("merge_seconds")
        rows.append(
            (
                case["case"],
                _mib(case["export_bytes"], 0),
                _seconds(case["save_seconds"]),
                _seconds(merge) if merge else "",
                _seconds(case["export_seconds"]),
                _throughput(case, "seconds"),
                _throughput(case, "cpu_seconds"),
                _mib(case["export_peak_bytes"], 1),
                _mib(case["largest_bytes"], 1),
                "identical" if case["is_identical"] else "different",
            )
        )
    return rows


def _throughput(case: dict[str, Any], kind: str) -> str:
    """The time that the parts of an export take alone, computing what is merged and writing, by the export's."""
    alone = case[f"save_{kind}"]["median"]
    merge = case.get(f"merge_{kind}")
    if merge:
        alone += merge["median"]
    export = case[f"export_{kind}"]["median"]
    return f"{alone / export:.2f}"


def allocator_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of what CUDA's caching allocator holds before, after and at the peak of preparing.

    Args:
        result: What ``run_benchmark`` returned.

    Returns:
        The header and a row for each case, or nothing where no case ran on CUDA.
    """
    on_cuda = [case for case in result["cases"] if case["allocator"] is not None]
    if not on_cuda:
        return []
    columns = ["case"]
    for kind in ("allocated", "reserved"):
        columns += [
            f"{kind} MiB {figure}" for figure in ("before", "after", "added", "peak")
        ]
    rows = [tuple(columns)]
    for case in on_cuda:
        allocated = _held(case["allocator"], "allocated")
        reserved = _held(case["allocator"], "reserved")
        rows.append((case["case"], *allocated, *reserved))
    return rows


def _held(allocator: dict[str, Any], kind: str) -> list[str]:
    """The bytes held before and after, those added, and the peak."""
    before = allocator["before"][f"{kind}_bytes"]
    after = allocator["after"][f"{kind}_bytes"]
    peak = allocator["after"][f"{kind}_peak_bytes"]
    return [_mib(value, 1) for value in (before, after, after - before, peak)]


def step_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of training steps.

    Args:
        result: What ``run_benchmark`` returned, with steps.

    Returns:
        The header, and for each number of tokens a row for each case.
    """
    columns = (
        "tokens",
        "case",
        "step peak MiB",
        "ratio",
        "system MiB",
        "step s",
        "ratio",
    )
    rows: list[tuple[str, ...]] = [(*columns, *_NUMBERS)]
    for index, tokens in enumerate(result["settings"]["tokens"]):
        for case in result["cases"]:
            step = case["steps"][index]
            row = (
                str(tokens),
                case["case"],
                _mib(step["peak_bytes"], 1),
                _ratio(step, "peak_bytes"),
                _mib(step["system_peak_bytes"], 1),
                _seconds(step["seconds"]) if step["seconds"] else _OUT_OF_MEMORY,
                _ratio(step, "seconds"),
            )
            rows.append((*row, *_numbers(step)))
    return rows


def prediction_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of predicted steps beside real ones.

    Args:
        result: What ``run_benchmark`` returned, with steps that were predicted.

    Returns:
        The header, and for each number of tokens a row for each case.
    """
    columns = (
        "tokens",
        "case",
        "predicted MiB",
        "tracked MiB",
        "predicted - tracked, bytes",
        "allocator MiB",
        "ratio",
    )
    rows: list[tuple[str, ...]] = [columns]
    for index, tokens in enumerate(result["settings"]["tokens"]):
        for case in result["cases"]:
            step = case["steps"][index]
            predicted = step["predicted"]["peak_bytes"]
            tracked = step.get("tracked_bytes")
            peak = step["peak_bytes"]
            rows.append(
                (
                    str(tokens),
                    case["case"],
                    _mib(predicted, 1),
                    _mib(tracked, 1),
                    _NONE if tracked is None else f"{predicted - tracked:+d}",
                    _mib(peak, 1),
                    _NONE if peak is None else f"{predicted / peak:.4f}",
                )
            )
    return rows


def identity_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of differences from PEFT's numbers.

    Args:
        result: What ``run_identity`` returned.

    Returns:
        The header, and for each combination and number of tokens a row for each case.
    """
    columns = (
        "case",
        "head",
        "checkpointing",
        "autocast",
        "modules_to_save",
        "tokens",
        "gradients",
    )
    rows: list[tuple[str, ...]] = [(*columns, *_NUMBERS)]
    for combination in result["combinations"]:
        options = _options(combination["settings"])
        for case in combination["cases"]:
            for step in case["steps"]:
                gradients = str(step["num_gradients"] or _NONE)
                row = (case["case"], *options.values(), str(step["tokens"]), gradients)
                rows.append((*row, *_numbers(step)))
    return rows


def loss_header(result: dict[str, Any]) -> str:
    """The lines before the table of losses: machine, versions, model and training.

    Args:
        result: What ``run_loss`` returned.

    Returns:
        The lines.
    """
    settings = result["settings"]
    before = _with_deviation(result["losses"][0]["base_loss"])
    # Results saved before there was a choice do not name it.
    quant = settings.get("quant", "nf4")
    autocast = "bfloat16" if settings.get("autocast", True) else "no"
    steps = f"{settings['steps']} steps of {settings['batch_size']} blocks of {settings['length']} bytes"
    return "\n".join(
        [
            *_environment_lines(result),
            f"model     Llama over bytes in {quant} and bfloat16, hidden {settings['hidden_size']}, "
            f"{settings['num_layers']} layers, pretrained for {settings['pretraining_steps']} steps on pydoc's topics",
            f"training  LoRA of rank {settings['rank']} on all linears, {autocast} autocast, "
            f"learning rate {settings['learning_rate']:g} falling to 0, {steps} of the standard library's source",
            f"seeds     {settings['repeats']}, each with a base, adapters and an order of its own, alike in all cases; "
            "() is the deviation between seeds, ± the standard error of a mean over them",
            f"losses    of a byte: of {settings['num_held_out']} blocks that are held out, before training "
            f"{before}; and of training, the mean of the last {LAST_STEPS} steps",
            "off       the distance from float64 with the same adapters, in parts of that, before and after training",
        ]
    )


def loss_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of losses, their paired differences, and the distances from exact arithmetic.

    Args:
        result: What ``run_loss`` returned.

    Returns:
        The header and a row for each case.
    """
    columns = (
        "case",
        "adapters",
        "train loss",
        "held-out loss",
        "minus",
        "train difference",
        "held-out difference",
        "logits off",
        "gradients off",
        "logits off after",
        "gradients off after",
    )
    rows: list[tuple[str, ...]] = [columns]
    for case in result["losses"]:
        minus = train_difference = held_out_difference = _NONE
        if "difference" in case:
            difference = case["difference"]
            minus = difference["case"]
            train_difference = _with_error(difference["end_loss"])
            held_out_difference = _with_error(difference["held_out_loss"])
        start = [f"{case[key]['start']['mean']:.3%}" for key in DISTANCES]
        end = [f"{case[key]['end']['mean']:.3%}" for key in DISTANCES]
        rows.append(
            (
                case["case"],
                case["adapters"],
                f"{case['end_loss']['mean']:.4f}",
                _with_deviation(case["held_out_loss"]),
                minus,
                train_difference,
                held_out_difference,
                *start,
                *end,
            )
        )
    return rows


def _with_deviation(spread: dict[str, Any]) -> str:
    deviation = spread["deviation"]
    shown = _NONE if deviation is None else f"{deviation:.4f}"
    return f"{spread['mean']:.4f} ({shown})"


def _with_error(spread: dict[str, Any]) -> str:
    error = spread["error"]
    shown = _NONE if error is None else f"{error:.5f}"
    return f"{spread['mean']:+.5f} ± {shown}"


def _numbers(step: dict[str, Any]) -> tuple[str, str, str]:
    """The loss, and how far it and the gradients are from PEFT's."""
    loss = _OUT_OF_MEMORY if step["loss"] is None else f"{step['loss']:.7f}"
    loss_difference = _difference(step.get("loss_difference"))
    gradient_difference = _difference(step.get("largest_gradient_difference"))
    return loss, loss_difference, gradient_difference


def _seconds(timing: dict[str, Any]) -> str:
    if not timing:
        return _NONE
    return f"{timing['median']:.3f} ({timing['least']:.3f} - {timing['most']:.3f})"


def _ratio(case: dict[str, Any], key: str) -> str:
    ratio = case.get("ratio_to_peft", {}).get(key)
    return _NONE if ratio is None else f"{ratio:.3f}"


def _mib(num_bytes: int | None, digits: int) -> str:
    return _NONE if num_bytes is None else f"{num_bytes / _MIB:.{digits}f}"


def _difference(value: float | None) -> str:
    if value is None:
        return _NONE
    return "0" if value == 0 else f"{value:.2e}"
