"""``kbitwrap run``: a script in which PEFT's function is the drop-in."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NoReturn
from unittest import mock

import typer

from .. import KbitWrapError, Precision
from ..foresight.imports import when_imported
from ..reports import first_of
from .console import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO,
    InputError,
    first_line,
    say,
    show,
    working,
)
from .limits import budget_of, budget_of_step, memory_of
from .usage import (
    PRECISIONS,
    Budget,
    DeviceMemory,
    Unified,
    expect_one_at_most,
    given,
)

SUMMARY = "Run a script in which PEFT's prepare_model_for_kbit_training is kbitwrap's."
HELP = (
    "Run a script in which PEFT's prepare_model_for_kbit_training is kbitwrap's; or say what its step will take.\n\n"
    "kbitwrap run --plan --device-memory 24GiB train.py --epochs 3\n"
    "kbitwrap run --precision norms train.py --epochs 3\n\n"
    "The first says whether a step of the script fits a GPU of 24 GiB, and trains nothing. The second trains, prepared "
    "by kbitwrap in place of PEFT: nothing in the script is edited. Options before SCRIPT are kbitwrap's, those after "
    "it the script's; one that has the name of kbitwrap's own is the script's after 'kbitwrap run -- SCRIPT'.\n\n"
    "The script is run as 'python SCRIPT ...' does, with kbitwrap's drop-in in the place of PEFT's function from the "
    "moment that PEFT is imported. Processes that the script starts are not affected.\n\n"
    "With --plan it runs until a trainer of transformers or TRL would train, prints what a step will take and whether "
    "that fits, and stops. Nothing is trained, and models have no weights unless --load is given. A script that "
    "computes with its model before it trains needs --load.\n\n"
    "Exit status: that of the script; 2 if it cannot be read. With --plan: 0 the step fits or there is nothing to fit, "
    "1 it does not, 2 it was not reached or cannot be predicted."
)
SETTINGS = {"allow_interspersed_args": False}
# FSDP takes what "compute" puts in front of a weight for the weight.
_FSDP = re.compile(r"fsdp|fully_shard", re.IGNORECASE)
_OWN = ("--plan", "--precision", "--budget", "--device-memory", "--unified", "--load")


class _Stopped(BaseException):
    """Ends a script where its trainer would train; no ``except Exception`` of the script stops it."""


def command(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENTS", help="The script's own arguments and options."
        ),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(
            metavar="PRECISION",
            help="The precision of the drop-in: full, which is what PEFT's function does, compute, norms, adapted or "
            "none; if left out, compute, which gives PEFT's numbers in less memory, and full where SCRIPT uses FSDP.",
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print what a training step will take, and stop before the first.",
        ),
    ] = False,
    budget: Budget = None,
    device_memory: DeviceMemory = None,
    unified: Unified = False,
    load: Annotated[
        bool,
        typer.Option(
            "--load",
            help="Load the models that the script loads.",
            rich_help_panel="Options with --plan",
        ),
    ] = False,
) -> int:
    """Run the script. 0 if it ended, 1 if it raised, 130 if it was interrupted; the traceback was printed.

    With ``plan`` the status is the answer whether its step fits.

    Raises:
        InputError: The script cannot be read, or its step not planned.
        SystemExit: From the script.
    """
    expect_one_at_most(budget=budget, device_memory=device_memory)
    of_plan = given(
        budget=budget, device_memory=device_memory, unified=unified, load=load
    )
    if of_plan and not plan:
        raise InputError(f"{of_plan[0]} is for --plan")
    limit = budget_of(budget, device_memory, unified)
    if not os.path.isfile(script):
        raise InputError(f"cannot read the script {os.path.abspath(script)!r}")
    arguments, why = arguments or [], ""
    text = Path(script).read_text("utf-8", errors="replace")
    before_script = context.obj[: len(context.obj) - len(arguments) - 1]
    if before_script[-1] != "--":
        _refuse_misplaced(arguments, text)
    said = [text, *arguments, *os.environ.keys() & {"ACCELERATE_USE_FSDP"}]
    if precision is None and _FSDP.search("\n".join(said)):
        precision, why = (
            Precision.FULL,
            ", because FSDP is named in the script, its arguments or the environment",
        )
    precision = precision or Precision.COMPUTE
    if not plan:
        return _run(script, arguments, _watching(precision, why))

    from .. import instead_of_training

    trainers = []

    def stop(trainer: Any, settings: dict[str, Any]) -> NoReturn:
        trainers.append((trainer, settings))
        raise _Stopped

    stopping = instead_of_training(stop, precision=precision, loads=load)
    with contextlib.suppress(_Stopped, SystemExit):
        if _run(script, arguments, stopping) == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
    if not trainers:
        remedy = "" if load else "; its models have weights only with --load"
        if "backward(" in text:
            remedy += (
                "; for a loop without a trainer 'kbitwrap plan MODEL --step' answers"
            )
        raise InputError(f"the script ended before a trainer's train(){remedy}")
    return _tell_step(*trainers[0], limit, device_memory, unified)


def _refuse_misplaced(arguments: list[str], text: str) -> None:
    """Refuse an option of ``run`` that stands among the script's arguments, unless it may be the script's.

    ``--plan`` is always refused: to pass it on would be to train. Another is the script's
    where the script's text names it, or where its value is none of kbitwrap's.
    """
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == "--":
            return
        name, _, value = argument.partition("=")
        named = re.escape(name[2:]).replace(r"\-", "[-_]")
        is_own = name in _OWN and not re.search(rf"\b{named}\b", text)
        if name == "--precision" and (value or following) not in PRECISIONS:
            is_own = False
        if is_own or name == "--plan":
            raise InputError(
                f"{name} stands after SCRIPT, so the script would get it: put it before SCRIPT, or -- before SCRIPT if "
                "it is the script's"
            )


def _tell_step(
    trainer: Any,
    settings: dict[str, Any],
    limit: int | None,
    device_memory: int | None,
    is_unified: bool,
) -> int:
    """Print what a step of a trainer takes, and whether it fits; return the exit status.

    A step that has to fit a device's memory is predicted for CUDA, also where the script
    trains on a CPU.
    """
    import torch

    from .. import StepPredictor, prepared_of
    from .step import of_batch, parts_of

    prepared = prepared_of(trainer.model)
    if prepared is not None:
        settings = asdict(prepared.config)
        prepared.restore()
    kernels = "cuda"
    if trainer.args.use_cpu and device_memory is None:
        kernels = "cpu"
    elif trainer.args.use_cpu:
        say(
            "note: the script trains on a CPU (use_cpu); its step is predicted for a GPU of --device-memory"
        )
    elif torch.cuda.is_available() and limit is None:
        there = torch.cuda.get_device_properties(0)
        is_unified = bool(there.is_integrated)
        device_memory = there.total_memory
        limit = budget_of(None, device_memory, is_unified)
    with working(f"predicting the step of {type(trainer).__name__}", is_script=True):
        predict = StepPredictor(trainer, kernels=kernels, **settings)
        step = predict()
        fits = limit is None or predict.fits(
            budget_of_step(step, limit, is_unified), step.batch_size, step.seq_len
        )
    title = f"a step of {type(trainer).__name__}, {of_batch(step)}"
    steps = {step.precision: {**step.to_dict(), "fits": fits}}
    memory = "" if limit is None else memory_of(limit, device_memory)
    show(*parts_of(title, step, steps, memory, is_unified))
    return EXIT_DONE if fits else EXIT_NO


def _run(
    script: str,
    arguments: list[str],
    patches: contextlib.AbstractContextManager[None],
) -> int:
    """Run a script as ``__main__`` inside a context that patches libraries."""
    path = os.path.abspath(script)
    folder = os.path.dirname(os.path.realpath(path))
    argv = [script, *arguments]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", [folder, *sys.path[1:]]),
    ):
        try:
            with patches:
                runpy.run_path(path, run_name="__main__")
        except (SystemExit, _Stopped):
            raise
        except BaseException as error:
            # As for a script: no frame above it is shown, and none at all where it
            # cannot be compiled.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != path:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_NO
    return EXIT_DONE


@contextlib.contextmanager
def _watching(precision: Precision, why: str) -> Iterator[None]:
    """Let a script prepare by the drop-in, record the base beside each adapter that it saves, and tell of both.

    PEFT is patched once it is imported, and not before: a script may set what torch and others read at their import.

    Args:
        precision: What the drop-in prepares with.
        why: Why that was chosen, for the line at the end, or nothing.
    """
    prepared: list[str] = []  # the class of the model, for each call
    recorded: dict[str, None] = {}  # the folders of adapters
    statistics: Any = weakref.WeakKeyDictionary()  # by bases
    manifests: Any = weakref.WeakKeyDictionary()  # by bases

    def patch(peft: Any) -> None:
        from transformers import PreTrainedModel

        from .. import Manifest, patched
        from ..checkpoints.adapters import rewrites_base
        from ..edits.training import Statistics
        from ..model.wrappers import unwrap
        from ..preparation.preparation import Preparation
        from ..prepared import PeftPreparedModel

        tuner_class = peft.tuners.tuners_utils.BaseTuner
        prepare = PeftPreparedModel.apply_on_top
        adapt = tuner_class.__init__
        save_adapters = peft.PeftModel.save_pretrained
        save_model = PreTrainedModel.save_pretrained

        def record(model: Any) -> None:
            with contextlib.suppress(KbitWrapError):  # a save says why
                recorded_now = Manifest.of(Preparation.recording(model))
                manifests[unwrap(model)[0]] = recorded_now

        def prepare_noting(model: Any, *args: Any) -> None:
            prepare(model, *args)
            prepared.append(type(model).__name__)
            record(model)  # now: rank 0 saves alone what FSDP shards

        def adapt_noting(
            tuner: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any
        ) -> None:
            base = unwrap(model)[0]
            if base not in statistics:  # which an evaluation may rewrite
                statistics[base] = Statistics.of(base)
            configs = peft_config
            if not isinstance(configs, dict):
                configs = {"": configs}
            for config in configs.values():
                if rewrites_base(vars(config)) and base not in manifests:
                    record(model)
            adapt(tuner, model, peft_config, *args, **kwargs)

        def note(model: Any, place: Path) -> None:
            if not (place / "adapter_config.json").is_file():
                return  # not saved, or by another process
            base = unwrap(model)[0]
            try:
                manifest = manifests.get(base)
                if manifest is None:
                    preparation = Preparation.recording(model, statistics.get(base))
                    manifest = Manifest.of(preparation)
                manifest.save(place / "kbitwrap.json")
                recorded[str(place)] = None
            except (KbitWrapError, OSError) as error:
                say(f"no manifest beside {place}: {first_line(error)}")

        def save_adapters_noting(model: Any, *args: Any, **kwargs: Any) -> None:
            save_adapters(model, *args, **kwargs)
            given = signature(save_adapters).bind(model, *args, **kwargs).arguments
            folder = Path(given["save_directory"])
            for name in given.get("selected_adapters") or model.peft_config:
                note(model, folder if name == "default" else folder / name)

        def save_model_noting(model: Any, *args: Any, **kwargs: Any) -> None:
            save_model(model, *args, **kwargs)
            given = signature(save_model).bind(model, *args, **kwargs).arguments
            if getattr(model, "_hf_peft_config_loaded", False):
                note(model, Path(given["save_directory"]))

        stack.enter_context(patched(precision))
        for owner, name, noting in (
            (PeftPreparedModel, "apply_on_top", prepare_noting),
            (tuner_class, "__init__", adapt_noting),
            (peft.PeftModel, "save_pretrained", save_adapters_noting),
            (PreTrainedModel, "save_pretrained", save_model_noting),
        ):
            stack.enter_context(mock.patch.object(owner, name, noting))

    with contextlib.ExitStack() as stack:
        stack.enter_context(when_imported({"peft": patch}))
        try:
            yield
        finally:
            told = "PEFT's function was not called: nothing was prepared"
            if prepared:
                models = " and ".join(dict.fromkeys(prepared))
                times = "once" if len(prepared) == 1 else f"{len(prepared)} times"
                told = f"PEFT's function was called {times}: {models} prepared with {precision}{why}"
            saved = first_of([*recorded]) or "none"
            if os.environ.get("RANK", "0") == "0":
                say(f"{told}; adapters saved, with kbitwrap.json: {saved}")
