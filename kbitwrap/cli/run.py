"""``kbitwrap run``: a script in which PEFT's function is the drop-in."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, NoReturn
from unittest import mock

import typer

from .. import Precision
from ..foresight.imports import when_imported
from .console import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO,
    InputError,
    say,
    show,
    working,
)
from .limits import budget_of, budget_of_step, on_unified, verdict
from .usage import Budget, DeviceMemory, Unified, expect_one_at_most, given

SUMMARY = "Run a script in which PEFT's prepare_model_for_kbit_training is kbitwrap's."
HELP = (
    "Run a script in which PEFT's prepare_model_for_kbit_training is kbitwrap's; or say what its step will take.\n\n"
    "kbitwrap run --plan --device-memory 24GB train.py --epochs 3\n"
    "kbitwrap run --precision norms train.py --epochs 3\n\n"
    "The first says whether a step of the script fits a GPU of 24 GB, and trains nothing. The second trains, prepared "
    "by kbitwrap in place of PEFT: nothing in the script is edited. Options before SCRIPT are kbitwrap's, those after "
    "it the script's.\n\n"
    "The script is run as 'python SCRIPT ...' does, with kbitwrap's drop-in in the place of PEFT's function from the "
    "moment that PEFT is imported. Processes that the script starts are not affected.\n\n"
    "With --plan it runs until a trainer of transformers or TRL would train, prints what a step will take and whether "
    "that fits, and stops. Nothing is trained, and models have no weights unless --load is given. A script that "
    "computes with its model before it trains needs --load.\n\n"
    "Exit status: that of the script; 2 if it cannot be read. With --plan: 0 the step fits or there is nothing to fit, "
    "1 it does not, 2 it was not reached or cannot be predicted."
)
SETTINGS = {"allow_interspersed_args": False}
_NOT_CALLED = (
    "the script never called PEFT's prepare_model_for_kbit_training, so --precision changed nothing; TRL's trainers "
    "are prepared by prepared_trainer, and a model by KbitPreparedModel"
)


class _Stopped(BaseException):
    """Ends a script where its trainer would train; no ``except Exception`` of the script stops it."""


def command(
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
            help="What the drop-in prepares with: full, which is PEFT's way, compute, norms, adapted or none; full, if "
            "left out.",
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
    if not plan:
        return _run(script, arguments, _patched_when_imported(precision))

    from .. import instead_of_training

    trainers = []

    def stop(trainer: Any, settings: dict[str, Any]) -> NoReturn:
        trainers.append((trainer, settings))
        raise _Stopped

    stopping = instead_of_training(
        stop, precision=precision or Precision.FULL, loads=load
    )
    with contextlib.suppress(_Stopped, SystemExit):
        if _run(script, arguments, stopping) == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
    if not trainers:
        remedy = "" if load else "; its models have weights only with --load"
        raise InputError(f"the script ended before a trainer's train(){remedy}")
    return _tell_step(*trainers[0], limit, unified)


def _tell_step(
    trainer: Any,
    settings: dict[str, Any],
    limit: int | None,
    is_unified: bool,
) -> int:
    """Print what a step of a trainer takes, and whether it fits; return the exit status."""
    import torch

    from .. import StepPredictor, prepared_of

    prepared = prepared_of(trainer.model)
    if prepared is not None:
        settings = asdict(prepared.config)
        prepared.restore()
    kernels = "cpu" if trainer.args.use_cpu else "cuda"
    if kernels == "cuda" and torch.cuda.is_available() and limit is None:
        there = torch.cuda.get_device_properties(0)
        is_unified = bool(there.is_integrated)
        limit = budget_of(None, there.total_memory, is_unified)
    with working(f"predicting the step of {type(trainer).__name__}", is_script=True):
        predict = StepPredictor(trainer, kernels=kernels, **settings)
        step = predict()
        fits = limit is None or predict.fits(
            budget_of_step(step, limit, is_unified), step.batch_size, step.seq_len
        )
    if limit is not None:
        show(verdict(limit, {step.precision: fits}))
    show(str(step))
    if is_unified:
        show(on_unified(step.mapped_bytes))
    return EXIT_DONE if fits else EXIT_NO


def _run(
    script: str,
    arguments: list[str] | None,
    patches: contextlib.AbstractContextManager[None],
) -> int:
    """Run a script as ``__main__`` inside a context that patches libraries."""
    path = os.path.abspath(script)
    if not os.path.isfile(path):
        raise InputError(f"cannot read the script {path!r}")
    folder = os.path.dirname(os.path.realpath(path))
    argv = [script, *(arguments or [])]
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
def _patched_when_imported(precision: Precision | None) -> Iterator[None]:
    """Patch PEFT once it is imported, and not before: a script may set what torch and others read at their import.

    A script for which a precision was asked for, and that never called PEFT's function, is told so in the end.
    """
    was_called = False
    with contextlib.ExitStack() as stack:

        def patch(_: types.ModuleType) -> None:
            from .. import patched
            from ..prepared import PeftPreparedModel

            prepare = PeftPreparedModel.apply_on_top

            def noting(*args: Any) -> Any:
                nonlocal was_called
                was_called = True
                return prepare(*args)

            stack.enter_context(patched(precision or Precision.FULL))
            stack.enter_context(
                mock.patch.object(PeftPreparedModel, "apply_on_top", noting)
            )

        stack.enter_context(when_imported({"peft": patch}))
        try:
            yield
        finally:
            if precision and not was_called:
                say(_NOT_CALLED)
