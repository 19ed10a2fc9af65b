"""``kbitwrap bench``: what preparing costs, PEFT's way and with each precision, side by side."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from ..bench.files import replacing
from ..bench.settings import (
    CASES,
    CHUNKED,
    DEFAULT_LOSS_CASES,
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
from .console import (
    EXIT_DONE,
    EXIT_NO,
    InputError,
    as_text,
    check_file,
    hanging,
    joined,
    progress,
    quiet_libraries,
)
from .plot import check_plot
from .tables import table
from .usage import (
    TRAINED_QUANTS,
    Json,
    at_most_one,
    choice,
    device,
    integer,
    option,
    path,
    rate,
)

# of the width: heads, feed-forward part and 4-bit blocks then divide it
_SIZE_MULTIPLE = 256
_STEP_TOKENS = 128
_IDENTITY_TOKENS = 32
_EXPORT_LAYERS = 8
_OF_STEPS = ("autocast", "reentrant", "modules_to_save")
_LOSS_SIZE_MULTIPLE = 64  # of 4-bit blocks
_NOT_OF_LOSS = (
    "vocab_size",
    "tied",
    "tokens",
    "compute_dtype",
    "predict",
    "reentrant",
    "modules_to_save",
)
_OF_LOSS = ("steps", "pretraining_steps", "learning_rate", "quant")
_HEADER_INDENT = 10  # of the lines before the tables: their first word stands alone
_ALL_CASES = tuple(dict.fromkeys((*CASES, MERGED, *LOSS_CASES)))
_SMALL = f"by default on {SMALL.num_layers} layers of width {SMALL.hidden_size}"
_WHAT, _MODEL, _STEP, _LOSS = (
    "What to measure (one of these)",
    "Model",
    "Training steps",
    "Losses",
)

SUMMARY = "Measure PEFT's preparation and each precision on the same model."
HELP = """Measure PEFT's preparation and each precision on the same model.

A model with random quantized weights is built, by default with the exact shapes of Mistral-7B-v0.3, and PEFT's
preparation and each precision are measured on it, each in a process of its own: time, live bytes, peaks; with --step,
training steps on a smaller model; with --identity, whether compute gives PEFT's numbers. With --loss, a small model is
trained on text that Python carries, and a LoRA on it as TRL does by default, and the losses of none and norms are
compared. Needs no network. The default needs 6 GB of memory.

Exit status: 0 done, 1 with --identity a number differs, 2 bad usage or bad input."""


def _number(
    name: str, least: int, help: str, panel: str | None = None, metavar: str = "N"
) -> Any:
    return typer.Option(
        name, metavar=metavar, parser=integer(least), help=help, rich_help_panel=panel
    )


def _flag(name: str, help: str, panel: str) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel)


def command(
    step: Annotated[
        bool, _flag("--step", f"Take training steps too, {_SMALL}.", _WHAT)
    ] = False,
    predict: Annotated[
        bool,
        _flag(
            "--predict",
            "Predict each step's memory too, and count a real one's, with --step.",
            _STEP,
        ),
    ] = False,
    identity: Annotated[
        bool,
        _flag(
            "--identity",
            "Compare loss and gradients with PEFT's, with and without autocast, reentrant checkpointing, a trained "
            f"head and a tied head, {_SMALL}.",
            _WHAT,
        ),
    ] = False,
    export: Annotated[
        bool,
        _flag(
            "--export",
            "Export the base while it is prepared, and a LoRA merged into it, beside safetensors' save_file with the "
            f"same bytes, by default of {_EXPORT_LAYERS} layers.",
            _WHAT,
        ),
    ] = False,
    loss: Annotated[
        bool,
        _flag(
            "--loss",
            "Train a LoRA under TRL's defaults on a byte-level Llama that is trained first, with each precision and "
            "--repeats seeds, and compare the losses; minutes for each seed.",
            _WHAT,
        ),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            parser=path,
            help="Measure nothing: show the results that --json saved to this file.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        choice(
            "--case",
            choices=_ALL_CASES,
            metavar="CASE...",
            help=f"Any of {', '.join(CASES)}; with --export, of {', '.join(EXPORTED)}; with --loss, of "
            f"{', '.join(LOSS_CASES)}. All that matter, if left out; with --identity, compute.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", parser=device, help="Such as cuda."),
    ] = "cpu",
    repeats: Annotated[
        int, _number("--repeats", 1, "Runs of each timing; with --loss, seeds.")
    ] = 3,
    seed: Annotated[int, _number("--seed", 0, "Random seed.")] = 0,
    layers: Annotated[
        int | None, _number("--layers", 1, "Decoder layers.", _MODEL)
    ] = None,
    hidden_size: Annotated[
        int | None,
        _number(
            "--hidden-size",
            1,
            f"Width, a multiple of {_SIZE_MULTIPLE}; with --loss, of {_LOSS_SIZE_MULTIPLE}.",
            _MODEL,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, _number("--vocab-size", 1, "Tokens in the vocabulary.", _MODEL)
    ] = None,
    tied: Annotated[
        bool, _flag("--tied", "The head's weight is the embeddings'.", _MODEL)
    ] = False,
    tokens: Annotated[
        list[int] | None,
        _number(
            "--tokens",
            1,
            f"Tokens in a batch, one or several numbers; {_STEP_TOKENS}, if left out; with --identity, "
            f"{_IDENTITY_TOKENS}.",
            _STEP,
            "N...",
        ),
    ] = None,
    compute_dtype: Annotated[
        str | None,
        choice(
            "--compute-dtype",
            choices=("bfloat16", "float32"),
            help="Compute dtype of quantized layers; bfloat16, or on a CPU float32, which is faster there, if left "
            "out.",
            rich_help_panel=_STEP,
        ),
    ] = None,
    autocast: Annotated[
        bool | None,
        _flag(
            "--autocast/--no-autocast",
            "Under bfloat16 autocast; --loss has it, unless --no-autocast is given.",
            _STEP,
        ),
    ] = None,
    reentrant: Annotated[
        bool, _flag("--reentrant", "With reentrant checkpointing.", _STEP)
    ] = False,
    modules_to_save: Annotated[
        bool,
        _flag("--modules-to-save", "Train a copy of the head beside the LoRA.", _STEP),
    ] = False,
    head_chunk_bytes: Annotated[
        int,
        _number(
            "--head-chunk-bytes",
            1,
            f"Size of the head's pieces in the case {CHUNKED}.",
            _STEP,
            "BYTES",
        ),
    ] = 8 << 20,
    steps: Annotated[
        int | None,
        _number(
            "--steps",
            1,
            f"Training steps of the LoRA; {LossSettings.steps}, if left out.",
            _LOSS,
        ),
    ] = None,
    pretraining_steps: Annotated[
        int | None,
        _number(
            "--pretraining-steps",
            1,
            f"Training steps of the model before it; {LossSettings.pretraining_steps}, if left out.",
            _LOSS,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            metavar="RATE",
            parser=rate,
            help=f"Of the LoRA, at the first step; {LossSettings.learning_rate:g}, if left out.",
            rich_help_panel=_LOSS,
        ),
    ] = None,
    quant: Annotated[
        str | None,
        choice(
            "--quant",
            choices=TRAINED_QUANTS,
            help="Of the model; nf4, if left out.",
            rich_help_panel=_LOSS,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            parser=path,
            help="Also write the output to this file.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            parser=path,
            help="Draw the figures to this file, such as bench.svg; needs matplotlib.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace the files of --output and --plot if they exist.",
        ),
    ] = False,
    json_: Json = False,
) -> int:
    """Run the benchmark, or read what was saved of one, and print what was measured.

    Returns 0; 1 where numbers that are to be identical differ.

    Raises:
        InputError: The options, the device or a file cannot be used, or a case failed.
    """
    given = SimpleNamespace(**locals())
    at_most_one(
        step=step, identity=identity, export=export, loss=loss, **{"from": source}
    )
    if plot is not None:
        _check_plot(given)
    settings = (
        None
        if source is not None
        else _loss_settings(given)
        if loss
        else _settings(given)
    )
    if output is not None:
        check_file(output, "--output", overwrite=overwrite, source=source)
    result = _read(source) if source is not None else _measure(given, settings)
    try:
        text = f"{json.dumps(result, indent=2)}\n" if json_ else _as_text(result)
        print(text, end="")
        if output is not None:
            _write(output, text)
        if plot is not None:
            _plot(result, plot)
        from ..bench.runner import is_identical

        return (
            EXIT_NO
            if "combinations" in result and not is_identical(result)
            else EXIT_DONE
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if source is None:
            raise
        raise InputError(
            f"--from: {str(source)!r} is not what --json prints: {error!r}"
        ) from error


def _measure(
    given: SimpleNamespace, settings: Settings | LossSettings | None
) -> dict[str, Any]:
    for name in ("bitsandbytes", "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"the benchmark needs {name}, which is not installed")
    with progress("importing torch") as doing:
        from ..bench import runner
        from .loading import choose_device

        choose_device(given.device)
        doing.now("measuring")

        def say(line: str) -> None:
            with doing.aside():
                print(line, file=sys.stderr)

        try:
            if isinstance(settings, LossSettings):
                with quiet_libraries():
                    from ..bench.loss import run_loss

                    return run_loss(settings, given.case or DEFAULT_LOSS_CASES, say)
            assert settings is not None
            if given.identity:
                return runner.run_identity(settings, given.case or ("compute",), say)
            return runner.run_benchmark(
                settings, given.case or default_cases(settings), say
            )
        except BenchError as error:
            raise InputError(str(error)) from error


def _settings(given: SimpleNamespace) -> Settings:
    for name in _OF_LOSS:
        if getattr(given, name) is not None:
            raise InputError(f"{option(name)} applies to losses only: add --loss")
    asked = {name: getattr(given, name) for name in _OF_STEPS} | {
        "autocast": given.autocast is not None
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        if given.identity:
            raise InputError(
                f"--identity measures with and without {option(name)}: leave {option(name)} out"
            )
        if not given.step and name != "reentrant":
            raise InputError(
                f"{option(name)} applies to training steps only: add --step"
            )
    if given.predict and not given.step:
        raise InputError("--predict applies to training steps only: add --step")
    if given.tied and given.identity:
        raise InputError(
            "--identity measures with and without --tied: leave --tied out"
        )
    if given.export and not {*(given.case or ())} <= {*EXPORTED}:
        raise InputError(f"--export: expected a --case among {', '.join(EXPORTED)}")
    if MERGED in (given.case or ()) and not given.export:
        raise InputError(f"--case {MERGED} applies to exports only: add --export")
    for case in {*(given.case or ())} - {*CASES, MERGED}:
        raise InputError(f"--case {case} applies to losses only: add --loss")
    default_tokens = _IDENTITY_TOKENS if given.identity else _STEP_TOKENS
    return Settings(
        shape=_shape(given),
        device=given.device,
        repeats=given.repeats,
        seed=given.seed,
        step=given.step or given.identity,
        predict=given.predict,
        export=given.export,
        tokens=tuple(dict.fromkeys(given.tokens or [default_tokens])),
        compute_dtype=given.compute_dtype
        or ("float32" if given.device == "cpu" else "bfloat16"),
        autocast=bool(given.autocast),
        reentrant=given.reentrant,
        modules_to_save=given.modules_to_save,
        head_chunk_bytes=given.head_chunk_bytes,
    )


def _loss_settings(given: SimpleNamespace) -> LossSettings:
    for name in _NOT_OF_LOSS:
        if getattr(given, name):
            raise InputError(
                f"--loss has a model and steps of its own: leave {option(name)} out"
            )
    if not {*(given.case or ())} <= {*LOSS_CASES}:
        raise InputError(f"--loss: expected a --case among {', '.join(LOSS_CASES)}")
    if (given.hidden_size or 0) % _LOSS_SIZE_MULTIPLE:
        raise InputError(
            f"--hidden-size: expected a multiple of {_LOSS_SIZE_MULTIPLE}, found {given.hidden_size}"
        )
    sizes = {"hidden_size": given.hidden_size, "num_layers": given.layers}
    sizes |= {name: getattr(given, name) for name in (*_OF_LOSS, "autocast")}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    return LossSettings(
        device=given.device, repeats=given.repeats, seed=given.seed, **sizes
    )


def _shape(given: SimpleNamespace) -> Shape:
    if given.hidden_size is not None and given.hidden_size % _SIZE_MULTIPLE:
        raise InputError(
            f"--hidden-size: expected a multiple of {_SIZE_MULTIPLE}, found {given.hidden_size}"
        )
    shape = (SMALL if given.step or given.identity else MISTRAL_7B).resized(
        hidden_size=given.hidden_size,
        num_layers=given.layers or (_EXPORT_LAYERS if given.export else None),
        vocab_size=given.vocab_size,
    )
    return dataclasses.replace(shape, is_tied=given.tied)


def _as_text(result: dict[str, Any]) -> str:
    from ..bench import report

    header = report.loss_header if "losses" in result else report.header
    if "losses" in result:
        tables = [report.loss_rows(result)]
    elif "cases" in result and result["settings"]["export"]:
        tables = [report.export_rows(result)]
    elif "cases" in result:
        tables = [report.preparation_rows(result), report.allocator_rows(result)]
        if result["settings"]["step"]:
            tables.append(report.step_rows(result))
        if result["settings"].get("predict"):
            tables.append(report.prediction_rows(result))
    else:
        tables = [report.identity_rows(result)]
    lines = joined(
        hanging(line, _HEADER_INDENT) for line in header(result).splitlines()
    )
    return as_text(
        lines,
        *(table(rows, keys=1 + (rows[0][0] == "tokens")) for rows in tables if rows),
    )


def _check_plot(given: SimpleNamespace) -> None:
    if given.identity or given.export:
        raise InputError(
            "--plot draws the costs of preparing and training, or losses: leave out --identity and --export"
        )
    check_plot(given.plot, overwrite=given.overwrite, source=given.source)


def _plot(result: dict[str, Any], path: Path) -> None:
    from ..bench.plot import draw, draw_losses

    try:
        with replacing(path) as unfinished:
            (draw_losses if "losses" in result else draw)(result, unfinished)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"--from: cannot read {str(path)!r}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise InputError(f"--from: {str(path)!r} is not JSON: {error}") from error
    if not isinstance(result, dict) or not result.keys() & {
        "cases",
        "combinations",
        "losses",
    }:
        raise InputError(f"--from: {str(path)!r} is not what --json prints")
    return result


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot write {str(path)!r}: {error.strerror}")


def _write(path: Path, text: str) -> None:
    try:
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path, error) from error
