"""Lays the figures out: what was run on, and the tables."""

from __future__ import annotations

from typing import Any

from .environment import where
from .settings import LAST_STEPS

_MIB = 1024**2
_NONE = "-"
_OUT_OF_MEMORY = "out of memory"
_DISTANCES = ("logits_distance", "gradient_distance")


def header(result: dict[str, Any]) -> str:
    """The lines before the tables: machine, versions, model and settings.

    Args:
        result: What ``run_benchmark`` or ``run_identity`` returned.

    Returns:
        The lines.
    """
    settings = result["settings"]
    shape = settings["shape"]
    model = (
        f"model     Mistral in nf4 and bfloat16: hidden {shape['hidden_size']}, {shape['num_layers']} layers, "
        f"{shape['num_heads']} heads, {shape['num_kv_heads']} key-value heads, "
        f"intermediate {shape['intermediate_size']}, vocabulary {shape['vocab_size']}"
    )
    step = (
        f"step      {', '.join(map(str, settings['tokens']))} tokens, LoRA on all linears, quantized layers compute in "
        f"{settings['compute_dtype']}"
    )
    lines = _environment_lines(result)
    if "combinations" in result:
        return "\n".join([*lines, model, step])
    compared = "save_file's medians" if settings["export"] else "PEFT's medians"
    lines += [
        f"{model}, head {'tied' if shape['is_tied'] else 'not tied'}",
        f"timings   median (least - most) of {settings['repeats']}; ratios are to {compared} in this run",
        f"memory    {', '.join(sorted({case['memory_method'] for case in result['cases']}))}",
    ]
    if settings["step"]:
        lines.append(
            f"{step}, {'bfloat16' if settings['autocast'] else 'no'} autocast, "
            f"{'reentrant' if settings['reentrant'] else 'non-reentrant'} checkpointing, "
            f"modules_to_save {'lm_head' if settings['modules_to_save'] else 'none'}, "
            f"head_chunk_bytes {settings['head_chunk_bytes']} under compute-chunked"
        )
    return "\n".join(lines)


def _environment_lines(result: dict[str, Any]) -> list[str]:
    machine = result["environment"]["machine"]
    memory = machine["memory_bytes"]
    return [
        f"machine   {machine['processor']}, {machine['num_cores']} cores, {machine['num_threads']} torch threads, "
        f"{'unknown' if memory is None else f'{memory / 1024**3:.1f} GiB'} of memory, {machine['system']}; "
        f"device {where(result)}",
        "versions  " + ", ".join(f"{name} {found}" for name, found in result["environment"]["versions"].items()),
    ]


def preparation_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of preparing and restoring.

    Args:
        result: What ``run_benchmark`` returned.

    Returns:
        The header and a row for each case.
    """
    columns = ("case", "prepare s", "ratio", "restore s", "live MiB added", "peak MiB preparing", "ratio")
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
    return [
        columns,
        *(
            (
                case["case"],
                _mib(case["export_bytes"], 0),
                _seconds(case["save_seconds"]),
                _seconds(case["merge_seconds"]) if case.get("merge_seconds") else "",
                _seconds(case["export_seconds"]),
                _throughput(case, "seconds"),
                _throughput(case, "cpu_seconds"),
                _mib(case["export_peak_bytes"], 1),
                _mib(case["largest_bytes"], 1),
                "identical" if case["is_identical"] else "different",
            )
            for case in result["cases"]
        ),
    ]


def _throughput(case: dict[str, Any], kind: str) -> str:
    """The time that the parts of an export take alone, computing what is merged and writing, by the export's."""
    parts = (case[f"save_{kind}"], case.get(f"merge_{kind}"))
    return f"{sum(part['median'] for part in parts if part) / case[f'export_{kind}']['median']:.2f}"


def allocator_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of what CUDA's caching allocator holds before, after and at the peak of preparing.

    Args:
        result: What ``run_benchmark`` returned.

    Returns:
        The header and a row for each case, or nothing where no case ran on CUDA.
    """
    rows: list[tuple[str, ...]] = []
    for case in result["cases"]:
        if case["allocator"] is not None:
            before, after = case["allocator"]["before"], case["allocator"]["after"]
            row = [case["case"]]
            for name in ("allocated", "reserved"):
                held = (before[f"{name}_bytes"], after[f"{name}_bytes"])
                row += [_mib(value, 1) for value in (*held, held[1] - held[0], after[f"{name}_peak_bytes"])]
            rows.append(tuple(row))
    if rows:
        figures = ("before", "after", "added", "peak")
        columns = [f"{name} MiB {figure}" for name in ("allocated", "reserved") for figure in figures]
        rows.insert(0, ("case", *columns))
    return rows


def step_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of training steps.

    Args:
        result: What ``run_benchmark`` returned, with steps.

    Returns:
        The header, and for each number of tokens a row for each case.
    """
    columns = ("tokens", "case", "step peak MiB", "ratio", "system MiB", "step s", "ratio")
    rows: list[tuple[str, ...]] = [(*columns, "loss", "loss difference", "gradient difference")]
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
    columns = ("tokens", "case", "predicted MiB", "tracked MiB", "predicted - tracked, bytes", "allocator MiB", "ratio")
    rows: list[tuple[str, ...]] = [columns]
    for index, tokens in enumerate(result["settings"]["tokens"]):
        for case in result["cases"]:
            step = case["steps"][index]
            predicted, tracked, peak = step["predicted"]["peak_bytes"], step.get("tracked_bytes"), step["peak_bytes"]
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
    options = ("case", "head", "checkpointing", "autocast", "modules_to_save", "tokens", "gradients")
    rows: list[tuple[str, ...]] = [(*options, "loss", "loss difference", "gradient difference")]
    for combination in result["combinations"]:
        settings = combination["settings"]
        for case in combination["cases"]:
            for step in case["steps"]:
                row = (
                    case["case"],
                    "tied" if settings["shape"]["is_tied"] else "not tied",
                    "reentrant" if settings["reentrant"] else "non-reentrant",
                    "bfloat16" if settings["autocast"] else "no",
                    "lm_head" if settings["modules_to_save"] else "none",
                    str(step["tokens"]),
                    str(step["num_gradients"] or _NONE),
                )
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
    before = result["losses"][0]["base_loss"]
    steps = f"{settings['steps']} steps of {settings['batch_size']} blocks of {settings['length']} bytes"
    return "\n".join(
        [
            *_environment_lines(result),
            f"model     Llama over bytes in {settings.get('quant', 'nf4')} and bfloat16, "
            f"hidden {settings['hidden_size']}, "
            f"{settings['num_layers']} layers, pretrained for {settings['pretraining_steps']} steps on pydoc's topics",
            f"training  LoRA of rank {settings['rank']} on all linears, "
            f"{'bfloat16' if settings.get('autocast', True) else 'no'} autocast, "
            f"learning rate {settings['learning_rate']:g} falling to 0, {steps} of the standard library's source",
            f"seeds     {settings['repeats']}, each with a base, adapters and an order of its own, alike in all cases; "
            "() is the deviation between seeds, ± the standard error of a mean over them",
            f"losses    of a byte: of {settings['num_held_out']} blocks that are held out, before training "
            f"{_with_deviation(before)}; and of training, the mean of the last {LAST_STEPS} steps",
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
    columns = ("case", "adapters", "train loss", "held-out loss", "minus", "train difference", "held-out difference")
    rows: list[tuple[str, ...]] = [(*columns, "logits off", "gradients off", "logits off after", "gradients off after")]
    for case in result["losses"]:
        other = case.get("difference")
        distances = [f"{case[key][when]['mean']:.3%}" for when in ("start", "end") for key in _DISTANCES]
        rows.append(
            (
                case["case"],
                case["adapters"],
                f"{case['end_loss']['mean']:.4f}",
                _with_deviation(case["held_out_loss"]),
                other["case"] if other else _NONE,
                *(_with_error(other[key]) if other else _NONE for key in ("end_loss", "held_out_loss")),
                *distances,
            )
        )
    return rows


def _with_deviation(spread: dict[str, Any]) -> str:
    return f"{spread['mean']:.4f} ({_NONE if spread['deviation'] is None else format(spread['deviation'], '.4f')})"


def _with_error(spread: dict[str, Any]) -> str:
    return f"{spread['mean']:+.5f} ± {_NONE if spread['error'] is None else format(spread['error'], '.5f')}"


def _numbers(step: dict[str, Any]) -> tuple[str, str, str]:
    loss = _OUT_OF_MEMORY if step["loss"] is None else f"{step['loss']:.7f}"
    return loss, _difference(step.get("loss_difference")), _difference(step.get("largest_gradient_difference"))


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
