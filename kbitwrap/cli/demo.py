"""``kbitwrap demo``: prepare a small quantized model, train it, restore it, and check every promise on the way."""

from __future__ import annotations

import argparse
import importlib.util
import json

from .. import Precision, PrepareConfig
from .console import EXIT_DONE, EXIT_NO, InputError, add_command, format_table, quiet_libraries

_MAX_SEED = 2**63 - 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = add_command(
        subparsers,
        "demo",
        run,
        summary="prepare, train and restore a small quantized model, and check each step",
        description="Build a small model, load it quantized, prepare it, train a LoRA on it, generate from it while "
        "suspended, restore it and merge the LoRA; check the model after each step. "
        "Needs no network. Exit status: 0 every check passed, 1 one failed, 2 bad usage or bad input.",
    )
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="a causal language model to use in place of the small built-in one"
    )
    parser.add_argument("--quant", choices=("nf4", "int8"), default="nf4", help="quantization (default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=[precision.value for precision in Precision],
        default=PrepareConfig().precision.value,
        help="where float32 is used (default: %(default)s)",
    )
    parser.add_argument("--device", metavar="DEVICE", help="such as cpu or cuda:1 (default: cuda if there is one)")
    parser.add_argument("--steps", type=_positive, default=30, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=_seed, default=0, help="random seed (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration and print what was measured.

    Args:
        arguments: The parsed options.

    Returns:
        0 if every check passed, else 1.

    Raises:
        InputError: The model or the device cannot be used.
    """
    _expect_installed()
    with quiet_libraries():
        from .demo_run import Demo

        show = (lambda text: None) if arguments.json else print
        demo = Demo(
            model=arguments.model,
            quant=arguments.quant,
            precision=Precision(arguments.precision),
            device=arguments.device,
            steps=arguments.steps,
            seed=arguments.seed,
            show=show,
        )
        result = demo.run()
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        rows = [(row["name"], row["measured"], "pass" if row["passed"] else "FAIL") for row in result["checks"]]
        seconds = ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items())
        num_passed = sum(row["passed"] for row in result["checks"])
        print(f"\n{format_table([('check', 'measured', 'result'), *rows])}")
        print(f"\n{num_passed} of {len(rows)} checks passed. Seconds: {seconds}")
    return EXIT_DONE if result["passed"] else EXIT_NO


def _expect_installed() -> None:
    for name in ("bitsandbytes", "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"the demonstration needs {name}, which is not installed")


def _positive(text: str) -> int:
    return _integer(text, 1, None)


def _seed(text: str) -> int:
    return _integer(text, 0, _MAX_SEED)


def _integer(text: str, least: int, most: int | None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, found {text!r}") from None
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"expected an integer {bounds}, found {value}")
    return value
