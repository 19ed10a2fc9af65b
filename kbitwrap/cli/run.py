"""``kbitwrap run``: a script in which PEFT's function is the drop-in."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from .. import Precision
from .console import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NO, InputError
from .usage import (
    PRECISIONS,
    argument,
    at_most_one,
    choice,
    file_size,
    flag,
    option,
    value,
)

SUMMARY = "Run a script in which PEFT's prepare_model_for_kbit_training is kbitwrap's."
HELP = """Run a script in which PEFT's prepare_model_for_kbit_training is kbitwrap's; or say what its step will take.

  kbitwrap run --plan --device-memory 24GB train.py --epochs 3
  kbitwrap run --precision norms train.py --epochs 3

The first says whether a step of the script fits a GPU of 24 GB, and trains nothing. The second trains, prepared by
kbitwrap in place of PEFT: nothing in the script is edited. Options before SCRIPT are kbitwrap's, those after it the
script's.

The script is run as 'python SCRIPT ...' does, with kbitwrap's drop-in in the place of PEFT's function from the moment
that PEFT is imported. Processes that the script starts are not affected.

With --plan it runs until a trainer of transformers or TRL would train, prints what a step will take and whether that
fits, and stops. Nothing is trained, and models have no weights unless --load is given. A script that computes with its
model before it trains needs --load.

Exit status: that of the script; 2 if it cannot be read. With --plan: 0 the step fits or there is nothing to fit, 1 it
does not, 2 it was not reached or cannot be predicted."""
SETTINGS = {"allow_interspersed_args": False}
_NOT_CALLED = (
    "kbitwrap: in this process {} never called PEFT's prepare_model_for_kbit_training, so --precision {} changed "
    "nothing; TRL's trainers are prepared by prepared_trainer, and a model by KbitPreparedModel"
)


_Plan = Annotated[
    bool,
    flag("--plan", "Print what a training step will take, and stop before the first."),
]
_Budget = Annotated[
    int | None,
    value(
        "--budget",
        "BYTES",
        file_size,
        "The most that all tensors may take, the model's among them, such as 7GiB, with --plan. The CUDA context comes "
        "on top.",
    ),
]
_DeviceMemory = Annotated[
    int | None,
    value(
        "--device-memory",
        "BYTES",
        file_size,
        "In place of --budget: the memory of the GPU, such as 24GB, with --plan; that of the GPU here, if neither is "
        "given.",
    ),
]
_Load = Annotated[
    bool, flag("--load", "Load the models that the script loads, with --plan.")
]


def command(
    context: typer.Context,
    script: Annotated[str, argument("SCRIPT", str, "A Python file.")],
    arguments: Annotated[
        list[str] | None,
        argument("[ARGUMENTS]...", str, "The script's own arguments and options."),
    ] = None,
    precision: Annotated[
        str,
        choice(
            "--precision",
            PRECISIONS,
            "What the drop-in prepares with; 'full' is PEFT's way.",
        ),
    ] = Precision.FULL.value,
    plan: _Plan = False,
    budget: _Budget = None,
    device_memory: _DeviceMemory = None,
    load: _Load = False,
) -> int:
    """Run the script. 0 if it ended, 1 if it raised, 130 if it was interrupted; the traceback was printed.

    With ``plan`` the status is the answer whether its step fits.

    Raises:
        InputError: The script cannot be read.
        SystemExit: From the script.
    """
    at_most_one(context, budget=budget, device_memory=device_memory)
    given = {"budget": budget, "device_memory": device_memory, "load": load or None}
    named = [option(name) for name, one in given.items() if one is not None]
    if named and not plan:
        raise InputError(f"{named[0]} is for --plan")
    if not plan:
        source: Any = context.get_parameter_source("precision")
        told = "" if source.name == "DEFAULT" else _NOT_CALLED.format(script, precision)
        return _run(script, arguments, _patched_when_imported(precision, told))
    from .rehearse import Rehearsal, Stopped

    rehearsal = Rehearsal(precision, budget, device_memory, load)
    try:
        status = _run(script, arguments, rehearsal.in_force())
        if status == EXIT_INTERRUPTED:
            return status
        how = "the script raised" if status else "the script ended"
    except Stopped:
        how = "the script was stopped"
    except SystemExit as left:
        how = f"the script ended with status {left.code!r}"
    return rehearsal.ended(how)


def _num_calls() -> int:
    """The calls of the drop-in so far, in a process that may not have loaded it."""
    drop_in = sys.modules.get("kbitwrap.drop_in")
    return 0 if drop_in is None else len(drop_in.CALLS)


def _run(
    script: str,
    arguments: list[str] | None,
    changed: contextlib.AbstractContextManager[None],
) -> int:
    """Run a script as ``__main__``, with libraries changed."""
    path = os.path.abspath(script)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        raise InputError(
            f"cannot read the script {path!r}: {error.strerror}"
        ) from error
    main = types.ModuleType("__main__")
    vars(main).update(
        __file__=path, __loader__=loader, __builtins__=builtins, __cached__=None
    )
    with _process_of(main, [script, *(arguments or [])]):
        try:
            with changed:
                exec(loader.source_to_code(source, path), vars(main))
        except SystemExit:
            raise
        except BaseException as error:
            if _is_own(error):
                raise
            # As for a script: no frame above it is shown, and none at all where it
            # cannot be compiled.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals is not vars(main):
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_NO
    return EXIT_DONE


def _is_own(error: BaseException) -> bool:
    """Whether an exception is the end of a rehearsal."""
    return type(error).__module__ == f"{__package__}.rehearse"


@contextlib.contextmanager
def _process_of(main: types.ModuleType, argv: list[str]) -> Iterator[None]:
    """Let the process be that of a script: its module, its arguments, and its folder first on the path."""
    before = sys.modules["__main__"], sys.argv, sys.path.copy()
    try:
        sys.modules["__main__"], sys.argv = main, argv
        # then no script's folder is there
        if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
            sys.path[:1] = [os.path.dirname(os.path.realpath(str(main.__file__)))]
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before


@contextlib.contextmanager
def _patched_when_imported(precision: str, not_called: str) -> Iterator[None]:
    """Patch PEFT once it is imported, and not before: a script may set what torch and others read at their import.

    What is told of a script that never called PEFT's function is printed in the end.
    """
    num_calls = _num_calls()
    with contextlib.ExitStack() as stack:
        finder = _Finder(precision, stack)
        if "peft" in sys.modules:
            finder.patch()
        else:
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        try:
            yield
        finally:
            if not_called and _num_calls() == num_calls:
                print(not_called, file=sys.stderr)


class _Finder:
    """Finds PEFT as the other finders do, and patches it as soon as it has been executed."""

    def __init__(self, precision: str, stack: contextlib.ExitStack) -> None:
        self._precision = precision
        self._stack = stack

    def patch(self) -> None:
        """Patch PEFT until the script ends."""
        from .. import patched

        self._stack.enter_context(patched(self._precision))

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> Any:
        """Find PEFT's package; ``None`` for every other."""
        if name != "peft":
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        spec: Any = next(
            filter(None, (finder.find_spec(name, path, target) for finder in finders)),
            None,
        )
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                del spec.loader.exec_module
                execute(module)
                self.patch()

            spec.loader.exec_module = exec_module
        return spec
