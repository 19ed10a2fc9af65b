"""``kbitwrap bench``: what preparing costs, PEFT's way and with each precision, side by side."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer
from rich.console import Group

from ..bench.settings import (
    CASES,
    CHUNKED,
    DEFAULT_LOSS_CASES,
    EXPORTED,
    LOSS_CASES,
    MERGED,
    MISTRAL_7B,
    ROLLOUT_CASES,
    SMALL,
    BenchError,
    LossSettings,
    Settings,
    default_cases,
)
from .console import (
    EXIT_DONE,
    EXIT_NO,
    Doing,
    InputError,
    Result,
    as_text,
    check_file,
    expect_installed,
    hanging,
    quiet_libraries,
)
from .plot import check_plot, writing
from .tables import table
from .usage import (
    TRAINED_QUANTS,
    Json,
    at_most_one,
    choice,
    device,
    flag,
    integer,
    option,
    path,
    rate,
    value,
)

# of the width: heads, feed-forward part and 4-bit blocks then divide it
_SIZE_MULTIPLE = 256
_STEP_TOKENS = 128
_IDENTITY_TOKENS = 32
_EXPORT_LAYERS = 8
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
_ALL_CASES = tuple(dict.fromkeys((*CASES, MERGED, *LOSS_CASES, *ROLLOUT_CASES)))
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
compared; with --rollout, such a trained model is compared with an engine's, which has the adapter on a base of its own.
Needs no network. The default needs 6 GB of memory.

Exit status: 0 done, 1 with --identity a number differs, 2 bad usage or bad input."""


_Step = Annotated[bool, flag("--step", f"Take training steps too, {_SMALL}.", _WHAT)]
_Predict = Annotated[
    bool,
    flag(
        "--predict",
        "Predict each step's memory too, and count a real one's, with --step.",
        _STEP,
    ),
]
_Identity = Annotated[
    bool,
    flag(
        "--identity",
        "Compare loss and gradients with PEFT's, with and without autocast, reentrant checkpointing, a trained "
        f"head and a tied head, {_SMALL}.",
        _WHAT,
    ),
]
_Export = Annotated[
    bool,
    flag(
        "--export",
        "Export the base while it is prepared, and a LoRA merged into it, beside safetensors' save_file with the "
        f"same bytes, by default of {_EXPORT_LAYERS} layers.",
        _WHAT,
    ),
]
_Loss = Annotated[
    bool,
    flag(
        "--loss",
        "Train a LoRA under TRL's defaults on a byte-level Llama that is trained first, with each precision and "
        "--repeats seeds, and compare the losses; minutes for each seed.",
        _WHAT,
    ),
]
_Rollout = Annotated[
    bool,
    flag(
        "--rollout",
        "Train a LoRA on small quantized models, and compare the trainer's distributions with those of an engine that "
        "has the adapter on the 16-bit base, or on the dequantized one; minutes for each seed.",
        _WHAT,
    ),
]
_Source = Annotated[
    Path | None,
    value(
        "--from",
        "FILE",
        path,
        "Measure nothing: show the results that --json saved to this file.",
        _WHAT,
    ),
]
_Case = Annotated[
    list[str] | None,
    choice(
        "--case",
        _ALL_CASES,
        f"Any of {', '.join(CASES)}; with --export, of {', '.join(EXPORTED)}; with --loss, of "
        f"{', '.join(LOSS_CASES)}; with --rollout, of {', '.join(ROLLOUT_CASES)}. All that matter, if left out; "
        "with --identity, compute.",
        metavar="CASE...",
    ),
]
_Device = Annotated[str, value("--device", "DEVICE", device, "Such as cuda.")]
_Repeats = Annotated[
    int,
    value(
        "--repeats",
        "N",
        integer(1),
        "Runs of each timing; with --loss and --rollout, seeds.",
    ),
]
_Seed = Annotated[int, value("--seed", "N", integer(0), "Random seed.")]
_Layers = Annotated[
    int | None, value("--layers", "N", integer(1), "Decoder layers.", _MODEL)
]
_HiddenSize = Annotated[
    int | None,
    value(
        "--hidden-size",
        "N",
        integer(1),
        f"Width, a multiple of {_SIZE_MULTIPLE}; with --loss and --rollout, of {_LOSS_SIZE_MULTIPLE}.",
        _MODEL,
    ),
]
_VocabSize = Annotated[
    int | None,
    value("--vocab-size", "N", integer(1), "Tokens in the vocabulary.", _MODEL),
]
_Tied = Annotated[bool, flag("--tied", "The head's weight is the embeddings'.", _MODEL)]
_Tokens = Annotated[
    list[int] | None,
    value(
        "--tokens",
        "N...",
        integer(1),
        f"Tokens in a batch, one or several numbers; {_STEP_TOKENS}, if left out; with --identity, "
        f"{_IDENTITY_TOKENS}.",
        _STEP,
    ),
]
_ComputeDtype = Annotated[
    str | None,
    choice(
        "--compute-dtype",
        ("bfloat16", "float32"),
        "Compute dtype of quantized layers; bfloat16, or on a CPU float32, which is faster there, if left "
        "out.",
        _STEP,
    ),
]
_Autocast = Annotated[
    bool | None,
    flag(
        "--autocast/--no-autocast",
        "Under bfloat16 autocast; --loss and --rollout have it, unless --no-autocast is given.",
        _STEP,
    ),
]
_Reentrant = Annotated[
    bool, flag("--reentrant", "With reentrant checkpointing.", _STEP)
]
_ModulesToSave = Annotated[
    bool,
    flag("--modules-to-save", "Train a copy of the head beside the LoRA.", _STEP),
]
_HeadChunkBytes = Annotated[
    int,
    value(
        "--head-chunk-bytes",
        "BYTES",
        integer(1),
        f"Size of the head's pieces in the case {CHUNKED}.",
        _STEP,
    ),
]
_Steps = Annotated[
    int | None,
    value(
        "--steps",
        "N",
        integer(1),
        f"Training steps of the LoRA; {LossSettings.steps}, if left out.",
        _LOSS,
    ),
]
_PretrainingSteps = Annotated[
    int | None,
    value(
        "--pretraining-steps",
        "N",
        integer(1),
        f"Training steps of the model before it; {LossSettings.pretraining_steps}, if left out.",
        _LOSS,
    ),
]
_LearningRate = Annotated[
    float | None,
    value(
        "--learning-rate",
        "RATE",
        rate,
        f"Of the LoRA, at the first step; {LossSettings.learning_rate:g}, if left out.",
        _LOSS,
    ),
]
_Quant = Annotated[
    str | None,
    choice("--quant", TRAINED_QUANTS, "Of the model; nf4, if left out.", _LOSS),
]
_Output = Annotated[
    Path | None,
    value("--output", "FILE", path, "Also write the output to this file."),
]
_Plot = Annotated[
    Path | None,
    value(
        "--plot",
        "FILE",
        path,
        "Draw the figures to this file, such as bench.svg; needs matplotlib.",
    ),
]
_Overwrite = Annotated[
    bool,
    flag("--overwrite", "Replace the files of --output and --plot if they exist."),
]


def command(
    context: typer.Context,
    step: _Step = False,
    predict: _Predict = False,
    identity: _Identity = False,
    export: _Export = False,
    loss: _Loss = False,
    rollout: _Rollout = False,
    source: _Source = None,
    case: _Case = None,
    device: _Device = "cpu",
    repeats: _Repeats = 3,
    seed: _Seed = 0,
    num_layers: _Layers = None,
    hidden_size: _HiddenSize = None,
    vocab_size: _VocabSize = None,
    tied: _Tied = False,
    tokens: _Tokens = None,
    compute_dtype: _ComputeDtype = None,
    autocast: _Autocast = None,
    reentrant: _Reentrant = False,
    modules_to_save: _ModulesToSave = False,
    head_chunk_bytes: _HeadChunkBytes = 8 << 20,
    steps: _Steps = None,
    pretraining_steps: _PretrainingSteps = None,
    learning_rate: _LearningRate = None,
    quant: _Quant = None,
    output: _Output = None,
    plot: _Plot = None,
    overwrite: _Overwrite = False,
    json_: Json = False,
) -> int:
    """Run the benchmark, or read what was saved of one, and print what was measured.

    Returns 0; 1 where numbers that are to be identical differ.

    Raises:
        InputError: The options, the device or a file cannot be used, or a case failed.
    """
    given = SimpleNamespace(**locals())
    whats = {"step": step, "identity": identity, "export": export}
    trained = {"loss": loss, "rollout": rollout}
    at_most_one(context, **whats, **trained, **{"from": source})
    if plot is not None:
        _check_plot(given)
    settings: Settings | LossSettings | None = None
    if source is None:
        is_trained = loss or rollout
        settings = _loss_settings(given) if is_trained else _settings(given)
    if output is not None:
        check_file(output, "--output", overwrite=overwrite, source=source)
    if settings is not None:
        return _tell(_measure(settings, given), given)
    result = _read(given.source)
    try:
        return _tell(result, given)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"--from: {str(source)!r} is not what --json prints: {error!r}"
        ) from error


def _tell(result: Result, given: SimpleNamespace) -> int:
    """Print, write and draw what was measured; returns the exit status."""
    text = f"{json.dumps(result, indent=2)}\n" if given.json_ else _as_text(result)
    print(text, end="")
    if given.output is not None:
        with writing(given.output) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    if given.plot is not None:
        from ..bench.plot import draw, draw_losses

        with writing(given.plot) as unfinished:
            (draw_losses if "losses" in result else draw)(result, unfinished)
    from ..bench.runner import is_identical

    is_different = "combinations" in result and not is_identical(result)
    return EXIT_NO if is_different else EXIT_DONE


def _measure(settings: Settings | LossSettings, given: SimpleNamespace) -> Result:
    expect_installed("the benchmark", "bitsandbytes", "peft", "transformers")
    with Doing("importing torch") as doing:
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
                    from ..bench.rollout import run_rollout

                    if given.rollout:
                        return run_rollout(settings, given.case or ROLLOUT_CASES, say)
                    return run_loss(settings, given.case or DEFAULT_LOSS_CASES, say)
            if given.identity:
                return runner.run_identity(settings, given.case or ("compute",), say)
            cases = given.case or default_cases(settings)
            return runner.run_benchmark(settings, cases, say)
        except BenchError as error:
            raise InputError(str(error)) from error


# ----------------------------------------------------------------------------------------------------
# What was asked for.
# ----------------------------------------------------------------------------------------------------


def _settings(given: SimpleNamespace) -> Settings:
    for name in _OF_LOSS:
        if getattr(given, name) is not None:
            raise InputError(
                f"{option(name)} applies to what is trained only: add --loss or --rollout"
            )
    _check_steps(given)
    cases = {*(given.case or ())}
    if given.export and not cases <= {*EXPORTED}:
        raise InputError(f"--export: expected a --case among {', '.join(EXPORTED)}")
    if MERGED in cases and not given.export:
        raise InputError(f"--case {MERGED} applies to exports only: add --export")
    for case in cases - {*CASES, MERGED}:
        what = "--rollout" if case in ROLLOUT_CASES else "--loss"
        raise InputError(f"--case {case} applies to {what} only: add {what}")
    shape = SMALL if given.step or given.identity else MISTRAL_7B
    _check_multiple(given, _SIZE_MULTIPLE)
    layers = given.num_layers
    if layers is None and given.export:
        layers = _EXPORT_LAYERS
    shape = shape.resized(
        hidden_size=given.hidden_size, num_layers=layers, vocab_size=given.vocab_size
    )
    tokens = given.tokens or [_IDENTITY_TOKENS if given.identity else _STEP_TOKENS]
    compute_dtype = "float32" if given.device == "cpu" else "bfloat16"
    chosen = {
        "shape": dataclasses.replace(shape, is_tied=given.tied),
        "step": given.step or given.identity,
        "tokens": tuple(dict.fromkeys(tokens)),
        "compute_dtype": given.compute_dtype or compute_dtype,
    }
    return Settings(**{**_of_options(Settings, given), **chosen})


def _of_options(
    settings: type[Settings | LossSettings], given: SimpleNamespace
) -> Result:
    """The fields of settings that options give, each the one of its name."""
    names = [field.name for field in dataclasses.fields(settings)]
    fields = {name: getattr(given, name, None) for name in names}
    return {name: value for name, value in fields.items() if value is not None}


def _check_steps(given: SimpleNamespace) -> None:
    """Refuse what is for training steps where none is taken, and what --identity tries both ways."""
    both_ways = ("reentrant", "modules_to_save", "tied")
    asked = [name for name in (*both_ways, "predict") if getattr(given, name)]
    if given.autocast is not None:
        asked.insert(0, "autocast")
    for name in asked:
        if given.identity and name != "predict":
            raise InputError(
                f"--identity measures with and without {option(name)}: leave {option(name)} out"
            )
        if not given.step and name not in ("reentrant", "tied"):
            raise InputError(
                f"{option(name)} applies to training steps only: add --step"
            )


def _check_multiple(given: SimpleNamespace, multiple: int) -> None:
    if (given.hidden_size or 0) % multiple:
        raise InputError(
            f"--hidden-size: expected a multiple of {multiple}, found {given.hidden_size}"
        )


def _loss_settings(given: SimpleNamespace) -> LossSettings:
    what = "--rollout" if given.rollout else "--loss"
    cases: tuple[str, ...] = ROLLOUT_CASES if given.rollout else LOSS_CASES
    named_by_case = ("quant",) if given.rollout else ()
    for name in (*_NOT_OF_LOSS, *named_by_case):
        if getattr(given, name):
            raise InputError(
                f"{what} has models and steps of its own: leave {option(name)} out"
            )
    if not {*(given.case or ())} <= {*cases}:
        raise InputError(f"{what}: expected a --case among {', '.join(cases)}")
    _check_multiple(given, _LOSS_SIZE_MULTIPLE)
    return LossSettings(**_of_options(LossSettings, given))


def _check_plot(given: SimpleNamespace) -> None:
    for name in ("identity", "export", "rollout"):
        if getattr(given, name):
            raise InputError(
                f"--plot draws the costs of preparing and training, or losses: leave out {option(name)}"
            )
    check_plot(given.plot, overwrite=given.overwrite, source=given.source)


# ----------------------------------------------------------------------------------------------------
# What is read, shown and written.
# ----------------------------------------------------------------------------------------------------


def _as_text(result: Result) -> str:
    from ..bench import report

    header = report.header
    if "losses" in result:
        header = report.loss_header
        tables = [report.loss_rows(result)]
    elif "rollouts" in result:
        header = report.rollout_header
        tables = [report.rollout_rows(result)]
    elif "combinations" in result:
        tables = [report.identity_rows(result)]
    elif result["settings"]["export"]:
        tables = [report.export_rows(result)]
    else:
        tables = [report.preparation_rows(result), report.allocator_rows(result)]
        if result["settings"]["step"]:
            tables.append(report.step_rows(result))
        if result["settings"].get("predict"):
            tables.append(report.prediction_rows(result))
    lines = [hanging(line, _HEADER_INDENT) for line in header(result).splitlines()]
    parts = [Group(*lines)]
    for rows in filter(None, tables):
        num_keys = 2 if rows[0][0] == "tokens" else 1
        parts.append(table(rows, keys=num_keys))
    return as_text(*parts)


def _read(path: Path) -> Result:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"--from: cannot read {str(path)!r}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise InputError(f"--from: {str(path)!r} is not JSON: {error}") from error
    kinds = {"cases", "combinations", "losses", "rollouts"}
    if not isinstance(result, dict) or kinds.isdisjoint(result):
        raise InputError(f"--from: {str(path)!r} is not what --json prints")
    return result
