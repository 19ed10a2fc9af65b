"""``kbitwrap bench``: what preparing costs, PEFT's way and with each precision, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from ..bench.settings import CASES, MISTRAL_7B, SMALL, BenchError, Settings, Shape
from .console import EXIT_DONE, InputError, format_table

_SIZE_MULTIPLE = 256  # of the width: heads, feed-forward part and 4-bit blocks then divide it


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "bench",
        help="measure PEFT's preparation and each precision on the same model",
        description="Build a model with random quantized weights, by default with the exact shapes of Mistral-7B-v0.3, "
        "and measure PEFT's preparation and each precision on it, each in a process of its own: time, live bytes, "
        "peaks; with --step, training steps on a smaller model. Needs no network. The default needs 6 GB of memory. "
        "Exit status: 0 done, 2 bad usage or bad input.",
    )
    parser.add_argument(
        "--case", action="append", choices=CASES, metavar="CASE", help=f"one of {', '.join(CASES)}; may be repeated"
    )
    parser.add_argument("--device", metavar="DEVICE", default="cpu", help="such as cuda (default: %(default)s)")
    parser.add_argument("--repeats", type=_positive, default=3, help="runs of each timing (default: %(default)s)")
    parser.add_argument("--seed", type=_natural, default=0, help="seed of all that is random (default: %(default)s)")
    size = parser.add_argument_group("model")
    size.add_argument("--layers", type=_positive, metavar="N", help="decoder layers")
    size.add_argument("--hidden-size", type=_positive, metavar="N", help=f"width, a multiple of {_SIZE_MULTIPLE}")
    size.add_argument("--vocab-size", type=_positive, metavar="N", help="tokens in the vocabulary")
    size.add_argument("--tied", action="store_true", help="the head's weight is the embeddings'")
    step = parser.add_argument_group("training steps")
    step.add_argument(
        "--step",
        action="store_true",
        help=f"take training steps too, by default on {SMALL.num_layers} layers of width {SMALL.hidden_size}",
    )
    step.add_argument("--tokens", type=_positive, default=128, help="tokens in a batch (default: %(default)s)")
    step.add_argument(
        "--compute-dtype",
        choices=("bfloat16", "float32"),
        help="what quantized layers compute in (default: bfloat16, but float32 on a CPU, which is faster in it)",
    )
    step.add_argument("--autocast", action="store_true", help="under bfloat16 autocast")
    step.add_argument("--reentrant", action="store_true", help="with reentrant checkpointing")
    step.add_argument("--modules-to-save", action="store_true", help="train a copy of the head beside the LoRA")
    step.add_argument(
        "--head-chunk-bytes", type=_positive, metavar="BYTES", help="under compute, the head in pieces of this size"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of tables")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write what is printed to this file too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark and print what was measured.

    Args:
        arguments: The parsed options.

    Returns:
        0.

    Raises:
        InputError: The options, the device or the file cannot be used, or a case failed.
    """
    settings = _settings(arguments)
    for name in ("bitsandbytes", "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"the benchmark needs {name}, which is not installed")
    from ..bench.runner import run_benchmark
    from .loading import choose_device

    choose_device(settings.device)
    if arguments.output is not None:
        _write(arguments.output, "")
    try:
        result = run_benchmark(settings, arguments.case or CASES, lambda line: print(line, file=sys.stderr))
    except BenchError as error:
        raise InputError(str(error)) from error
    text = json.dumps(result, indent=2) if arguments.json else _as_text(result)
    print(text)
    if arguments.output is not None:
        _write(arguments.output, f"{text}\n")
    return EXIT_DONE


def _settings(arguments: argparse.Namespace) -> Settings:
    if not arguments.step:
        for name in ("autocast", "modules_to_save"):
            if getattr(arguments, name):
                raise InputError(f"--{name.replace('_', '-')} is about training steps, and needs --step")
    return Settings(
        shape=_shape(arguments),
        device=arguments.device,
        repeats=arguments.repeats,
        seed=arguments.seed,
        step=arguments.step,
        tokens=arguments.tokens,
        compute_dtype=arguments.compute_dtype or ("float32" if arguments.device == "cpu" else "bfloat16"),
        autocast=arguments.autocast,
        reentrant=arguments.reentrant,
        modules_to_save=arguments.modules_to_save,
        head_chunk_bytes=arguments.head_chunk_bytes,
    )


def _shape(arguments: argparse.Namespace) -> Shape:
    if arguments.hidden_size is not None and arguments.hidden_size % _SIZE_MULTIPLE:
        raise InputError(f"--hidden-size: expected a multiple of {_SIZE_MULTIPLE}, found {arguments.hidden_size}")
    shape = (SMALL if arguments.step else MISTRAL_7B).resized(
        hidden_size=arguments.hidden_size, num_layers=arguments.layers, vocab_size=arguments.vocab_size
    )
    return dataclasses.replace(shape, is_tied=arguments.tied)


def _as_text(result: dict[str, Any]) -> str:
    from ..bench.report import header, preparation_rows, step_rows

    parts = [header(result), format_table(preparation_rows(result))]
    if result["settings"]["step"]:
        parts.append(format_table(step_rows(result)))
    return "\n\n".join(parts)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output: cannot write {str(path)!r}: {error.strerror}") from error


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, found {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, found {value}")
    return value
