"""``kbitwrap plan``: what preparing a model costs, from its config alone."""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import ConfigError, Precision, PrepareConfig, UnsupportedModelError
from .console import EXIT_DONE, EXIT_NO, InputError, add_command, first_line, format_table, quiet_libraries

if TYPE_CHECKING:
    from .. import Plan


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = add_command(
        subparsers,
        "plan",
        run,
        summary="show what preparing a model costs, from its config alone",
        description="Plan the preparation of a model from its config, without reading a weight, and print what each "
        "precision adds, by role. Exit status: 0 every precision asked for fits the memory budget (or there is none), "
        "1 one does not, 2 bad usage or bad input.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a name on the hub")
    parser.add_argument(
        "--quant",
        choices=("nf4", "int8", "none"),
        default="nf4",
        help="quantization; a model that is quantized already keeps its own (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="dtype of the tensors that are not quantized (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        metavar="PRECISION",
        nargs="+",
        action="extend",
        choices=[precision.value for precision in Precision],
        help=f"any of {', '.join(Precision)} (default: all)",
    )
    parser.add_argument(
        "--memory-budget",
        metavar="BYTES",
        type=_budget,
        help="the largest peak allowed while preparing, such as 512MiB",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan, and print what was planned.

    Args:
        arguments: The parsed options.

    Returns:
        0 if all that was asked for fits, else 1.

    Raises:
        InputError: The model cannot be planned for.
    """
    _expect_installed(arguments.quant)
    plans = _plans(arguments)
    budget = arguments.memory_budget
    fitting = [name for name, plan in plans.items() if budget is None or plan.peak_bytes <= budget]
    asked = [name for name in plans if not arguments.precision or name in arguments.precision]
    shown = {name: plans[name] for name in asked}
    if arguments.json:
        result = {
            "model": arguments.model,
            "dtype": arguments.dtype,
            "quantization": next(iter(plans.values())).quantization,
            "memory_budget_bytes": budget,
            "fits": {name: name in fitting for name in asked},
            "fitting": fitting,
            "plans": {name: _figures(plan) for name, plan in shown.items()},
        }
        print(json.dumps(result, indent=2))
    else:
        _print(arguments, shown, fitting)
    return EXIT_DONE if set(asked) <= set(fitting) else EXIT_NO


def _plans(arguments: argparse.Namespace) -> dict[str, Plan]:
    """The plans by precision: of those asked for, and with a budget of all, since those that fit are named."""
    from .. import Plan

    wanted = {*(arguments.precision or Precision)}
    if arguments.memory_budget is not None:
        wanted = {*Precision}
    with quiet_libraries(), warnings.catch_warnings():
        # As when it is loaded: a model that is quantized already keeps its own quantization. The plan says which.
        warnings.filterwarnings("ignore", r"You passed `quantization_config` or equivalent parameters", UserWarning)
        quantization = quantization_config(arguments.quant, arguments.dtype)
        try:
            return {
                precision.value: Plan.for_pretrained(
                    arguments.model, quantization, arguments.dtype, precision=precision
                )
                for precision in Precision
                if precision in wanted
            }
        except ConfigError as error:
            raise InputError(first_line(error)) from error
        except UnsupportedModelError as error:
            raise InputError(f"the model {arguments.model!r} cannot be prepared: {first_line(error)}") from error


def quantization_config(quant: str, dtype: str | None) -> Any:
    """Make the config of a kind of quantization.

    Args:
        quant: ``"nf4"``, ``"int8"`` or ``"none"``.
        dtype: The dtype that 4-bit layers compute in; ``None`` for the library's default.

    Returns:
        The config for ``from_pretrained``; ``None`` for ``"none"``.
    """
    from transformers import BitsAndBytesConfig

    if quant == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return BitsAndBytesConfig(load_in_8bit=True) if quant == "int8" else None


def _figures(plan: Plan) -> dict[str, Any]:
    return {key: value for key, value in plan.to_dict().items() if key not in ("precision", "quantization", "edits")}


def _print(arguments: argparse.Namespace, plans: dict[str, Plan], fitting: Sequence[str]) -> None:
    budget = arguments.memory_budget
    quantization = next(iter(plans.values())).quantization or "none"
    print(f"{arguments.model}: quantization {quantization}, {arguments.dtype}. In MiB:\n")
    rows = [["precision", "added", "peak", "PEFT's cache"] + ([] if budget is None else ["budget", "fits"])]
    for name, plan in plans.items():
        row = [name, _mib(plan.added_bytes), _mib(plan.peak_bytes), _mib(plan.cache_bytes)]
        rows.append(row + ([] if budget is None else [_mib(budget), "yes" if name in fitting else "no"]))
    print(_right_aligned(rows))
    print(f"\n{_right_aligned(_by_role(plans))}")
    for warning in dict.fromkeys(warning for plan in plans.values() for warning in plan.warnings):
        named = [name for name, plan in plans.items() if warning in plan.warnings]
        print(f"\nwarning ({', '.join(named)}): {warning}")
    if not set(plans) <= set(fitting):
        print(f"\nWithin the memory budget: {', '.join(fitting) or 'no precision'}")


def _by_role(plans: dict[str, Plan]) -> list[list[str]]:
    """Parameters and loaded bytes by role, and what each precision adds."""
    first = next(iter(plans.values()))
    rows = [["role", "parameters", "loaded", *(f"+ {name}" for name in plans)]]
    for role, figures in first.by_role.items():
        added = [_mib(plan.by_role[role]["added_bytes"]) for plan in plans.values()]
        rows.append([role, str(figures["count"]), _mib(figures["bytes"]), *added])
    totals = {key: sum(row[key] for row in first.by_role.values()) for key in ("count", "bytes")}
    added = [_mib(plan.added_bytes) for plan in plans.values()]
    return [*rows, ["total", str(totals["count"]), _mib(totals["bytes"]), *added]]


def _right_aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned left, and the others, numbers, right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return format_table(
        [[row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows]
    )


def _mib(num_bytes: int) -> str:
    """Mebibytes; a number above zero is never shown as zero."""
    return "0" if num_bytes == 0 else f"{max(num_bytes / 2**20, 0.001):,.{1 if num_bytes >= 2**20 else 3}f}"


def _budget(text: str) -> int:
    try:
        value = PrepareConfig(memory_budget=text).memory_budget_bytes
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    assert value is not None
    return value


def _expect_installed(quant: str) -> None:
    for name in ("transformers", *(("bitsandbytes",) if quant != "none" else ())):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"planning needs {name}, which is not installed")
