"""``kbitwrap bench``: what preparing costs, PEFT's way and with each precision, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

from ..bench.settings import (
    CASES,
    CHUNKED,
    EXPORTED,
    LOSS_CASES,
    MERGED,
    MISTRAL_7B,
    SMALL,
    BenchError,
    LossSettings,
    Settings,
    Shape,
    default_cases,
)
from .console import EXIT_DONE, EXIT_NO, InputError, add_command, format_table, quiet_libraries

_SIZE_MULTIPLE = 256  # of the width: heads, feed-forward part and 4-bit blocks then divide it
_STEP_TOKENS = 128
_IDENTITY_TOKENS = 32
_EXPORT_LAYERS = 8
_OF_STEPS = ("autocast", "reentrant", "modules_to_save")
_LOSS_SIZE_MULTIPLE = 64  # of 4-bit blocks
_NOT_OF_LOSS = ("vocab_size", "tied", "tokens", "compute_dtype", *_OF_STEPS)
_OF_LOSS = ("steps", "pretraining_steps", "learning_rate")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = add_command(
        subparsers,
        "bench",
        run,
        summary="measure PEFT's preparation and each precision on the same model",
        description="Build a model with random quantized weights, by default with the exact shapes of Mistral-7B-v0.3, "
        "and measure PEFT's preparation and each precision on it, each in a process of its own: time, live bytes, "
        "peaks; with --step, training steps on a smaller model; with --identity, whether compute gives PEFT's numbers. "
        "With --loss, train a small model on text that Python carries, and a LoRA on it as TRL does by default, and "
        "compare the losses of none and norms. "
        "Needs no network. The default needs 6 GB of memory. "
        "Exit status: 0 done, 1 with --identity a number differs, 2 bad usage or bad input.",
    )
    what = parser.add_argument_group("what to measure").add_mutually_exclusive_group()
    small = f"by default on {SMALL.num_layers} layers of width {SMALL.hidden_size}"
    what.add_argument("--step", action="store_true", help=f"take training steps too, {small}")
    what.add_argument(
        "--identity",
        action="store_true",
        help="compare loss and gradients with PEFT's, with and without autocast, reentrant checkpointing, "
        f"a trained head and a tied head, {small}",
    )
    what.add_argument(
        "--export",
        action="store_true",
        help="export the base while it is prepared, and a LoRA merged into it, beside safetensors' save_file with the "
        f"same bytes, by default of {_EXPORT_LAYERS} layers",
    )
    what.add_argument(
        "--loss",
        action="store_true",
        help="train a LoRA under TRL's defaults on a byte-level Llama that is trained first, with each precision and "
        "--repeats seeds, and compare the losses; minutes for each seed",
    )
    what.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="measure nothing: show the results that --json saved to this file",
    )
    parser.add_argument(
        "--case",
        action="append",
        choices=tuple(dict.fromkeys((*CASES, MERGED, *LOSS_CASES))),
        metavar="CASE",
        help=f"one of {', '.join(CASES)}; with --export, of {', '.join(EXPORTED)}; "
        f"with --loss, of {', '.join(LOSS_CASES)}; may be repeated "
        "(default: all that matter; with --identity, compute)",
    )
    parser.add_argument("--device", metavar="DEVICE", default="cpu", help="such as cuda (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=_positive, default=3, help="runs of each timing; with --loss, seeds (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_natural, default=0, help="random seed (default: %(default)s)")
    _add_settings(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the output to this file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the figures to this file, such as bench.svg; needs matplotlib"
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of the models and of their training."""
    size = parser.add_argument_group("model")
    size.add_argument("--layers", type=_positive, metavar="N", help="decoder layers")
    size.add_argument(
        "--hidden-size",
        type=_positive,
        metavar="N",
        help=f"width, a multiple of {_SIZE_MULTIPLE}; with --loss, of {_LOSS_SIZE_MULTIPLE}",
    )
    size.add_argument("--vocab-size", type=_positive, metavar="N", help="tokens in the vocabulary")
    size.add_argument("--tied", action="store_true", help="the head's weight is the embeddings'")
    step = parser.add_argument_group("training steps")
    step.add_argument(
        "--tokens",
        type=_positive,
        nargs="+",
        metavar="N",
        help=f"tokens in a batch, one or several numbers (default: {_STEP_TOKENS}; "
        f"with --identity, {_IDENTITY_TOKENS})",
    )
    step.add_argument(
        "--compute-dtype",
        choices=("bfloat16", "float32"),
        help="compute dtype of quantized layers (default: bfloat16; on a CPU float32, which is faster there)",
    )
    step.add_argument("--autocast", action="store_true", help="under bfloat16 autocast")
    step.add_argument("--reentrant", action="store_true", help="with reentrant checkpointing")
    step.add_argument("--modules-to-save", action="store_true", help="train a copy of the head beside the LoRA")
    step.add_argument(
        "--head-chunk-bytes",
        type=_positive,
        metavar="BYTES",
        default=8 << 20,
        help=f"size of the head's pieces in the case {CHUNKED} (default: %(default)s)",
    )
    loss = parser.add_argument_group("losses")
    for name, what_for in (("steps", "of the LoRA"), ("pretraining_steps", "of the model before it")):
        default = getattr(LossSettings, name)
        loss.add_argument(
            _option(name), type=_positive, metavar="N", help=f"training steps {what_for} (default: {default})"
        )
    loss.add_argument(
        "--learning-rate",
        type=_rate,
        metavar="RATE",
        help=f"of the LoRA, at the first step (default: {LossSettings.learning_rate:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, or read what was saved of one, and print what was measured.

    Args:
        arguments: The parsed options.

    Returns:
        0; 1 where numbers that are to be identical differ.

    Raises:
        InputError: The options, the device or a file cannot be used, or a case failed.
    """
    if arguments.plot is not None:
        _check_plot(arguments)
    result = _measure(arguments) if arguments.source is None else _read(arguments.source)
    try:
        text = json.dumps(result, indent=2) if arguments.json else _as_text(result)
        print(text)
        if arguments.output is not None:
            _write(arguments.output, f"{text}\n")
        if arguments.plot is not None:
            _plot(result, arguments.plot)
        from ..bench.runner import is_identical

        return EXIT_NO if "combinations" in result and not is_identical(result) else EXIT_DONE
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if arguments.source is None:
            raise
        raise InputError(f"--from: {str(arguments.source)!r} is not what --json prints: {error!r}") from error


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = _loss_settings(arguments) if arguments.loss else _settings(arguments)
    for name in ("bitsandbytes", "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"the benchmark needs {name}, which is not installed")
    from ..bench import runner
    from .loading import choose_device

    choose_device(settings.device)
    for path in (arguments.output, arguments.plot):
        if path is not None:
            _write(path, "")  # better to fail before minutes of measuring than after
    try:
        if isinstance(settings, LossSettings):
            with quiet_libraries():
                from ..bench.loss import run_loss

                return run_loss(settings, arguments.case or LOSS_CASES, _show)
        if arguments.identity:
            return runner.run_identity(settings, arguments.case or ("compute",), _show)
        return runner.run_benchmark(settings, arguments.case or default_cases(settings), _show)
    except BenchError as error:
        raise InputError(str(error)) from error


def _show(line: str) -> None:
    print(line, file=sys.stderr)


def _settings(arguments: argparse.Namespace) -> Settings:
    for name in _OF_LOSS:
        if getattr(arguments, name) is not None:
            raise InputError(f"{_option(name)} applies to losses only: add --loss")
    for name in _OF_STEPS:
        if getattr(arguments, name) and arguments.identity:
            raise InputError(f"--identity measures with and without {_option(name)}: leave {_option(name)} out")
        if getattr(arguments, name) and not arguments.step and name != "reentrant":
            raise InputError(f"{_option(name)} applies to training steps only: add --step")
    if arguments.tied and arguments.identity:
        raise InputError("--identity measures with and without --tied: leave --tied out")
    if arguments.export and not {*(arguments.case or ())} <= {*EXPORTED}:
        raise InputError(f"--export: expected a --case among {', '.join(EXPORTED)}")
    if MERGED in (arguments.case or ()) and not arguments.export:
        raise InputError(f"--case {MERGED} applies to exports only: add --export")
    for case in {*(arguments.case or ())} - {*CASES, MERGED}:
        raise InputError(f"--case {case} applies to losses only: add --loss")
    default_tokens = _IDENTITY_TOKENS if arguments.identity else _STEP_TOKENS
    return Settings(
        shape=_shape(arguments),
        device=arguments.device,
        repeats=arguments.repeats,
        seed=arguments.seed,
        step=arguments.step or arguments.identity,
        export=arguments.export,
        tokens=tuple(dict.fromkeys(arguments.tokens or [default_tokens])),
        compute_dtype=arguments.compute_dtype or ("float32" if arguments.device == "cpu" else "bfloat16"),
        autocast=arguments.autocast,
        reentrant=arguments.reentrant,
        modules_to_save=arguments.modules_to_save,
        head_chunk_bytes=arguments.head_chunk_bytes,
    )


def _loss_settings(arguments: argparse.Namespace) -> LossSettings:
    for name in _NOT_OF_LOSS:
        if getattr(arguments, name):
            raise InputError(f"--loss has a model and steps of its own: leave {_option(name)} out")
    if not {*(arguments.case or ())} <= {*LOSS_CASES}:
        raise InputError(f"--loss: expected a --case among {', '.join(LOSS_CASES)}")
    if (arguments.hidden_size or 0) % _LOSS_SIZE_MULTIPLE:
        raise InputError(f"--hidden-size: expected a multiple of {_LOSS_SIZE_MULTIPLE}, found {arguments.hidden_size}")
    given = {"hidden_size": arguments.hidden_size, "num_layers": arguments.layers}
    given |= {name: getattr(arguments, name) for name in _OF_LOSS}
    sizes = {name: value for name, value in given.items() if value is not None}
    return LossSettings(device=arguments.device, repeats=arguments.repeats, seed=arguments.seed, **sizes)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shape(arguments: argparse.Namespace) -> Shape:
    if arguments.hidden_size is not None and arguments.hidden_size % _SIZE_MULTIPLE:
        raise InputError(f"--hidden-size: expected a multiple of {_SIZE_MULTIPLE}, found {arguments.hidden_size}")
    shape = (SMALL if arguments.step or arguments.identity else MISTRAL_7B).resized(
        hidden_size=arguments.hidden_size,
        num_layers=arguments.layers or (_EXPORT_LAYERS if arguments.export else None),
        vocab_size=arguments.vocab_size,
    )
    return dataclasses.replace(shape, is_tied=arguments.tied)


def _as_text(result: dict[str, Any]) -> str:
    from ..bench import report

    if "losses" in result:
        return f"{report.loss_header(result)}\n\n{format_table(report.loss_rows(result))}"
    if "cases" in result and result["settings"]["export"]:
        tables = [report.export_rows(result)]
    elif "cases" in result:
        tables = [report.preparation_rows(result), report.allocator_rows(result)]
        if result["settings"]["step"]:
            tables.append(report.step_rows(result))
    else:
        tables = [report.identity_rows(result)]
    return "\n\n".join([report.header(result), *(format_table(rows) for rows in tables if rows)])


def _check_plot(arguments: argparse.Namespace) -> None:
    if arguments.identity or arguments.export:
        raise InputError(
            "--plot draws the costs of preparing and training, or losses: leave out --identity and --export"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib, which is not installed: pip install 'kbitwrap[plot]'")
    from ..bench.plot import SUFFIXES

    if arguments.plot.suffix not in SUFFIXES:
        raise InputError(f"--plot: expected a name that ends in {' or '.join(SUFFIXES)}, found {str(arguments.plot)!r}")


def _plot(result: dict[str, Any], path: Path) -> None:
    from ..bench.plot import draw, draw_losses

    try:
        (draw_losses if "losses" in result else draw)(result, path)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--from: cannot read {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--from: {str(path)!r} is not JSON: {error}") from error
    if not isinstance(result, dict) or not result.keys() & {"cases", "combinations", "losses"}:
        raise InputError(f"--from: {str(path)!r} is not what --json prints")
    return result


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot write {str(path)!r}: {error.strerror}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path, error) from error


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return value


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, found {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, found {value}")
    return value
