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

from .. import Precision
from .console import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NO, InputError
from .usage import PRECISIONS, argument, choice

SUMMARY = "Run a script in which PEFT's prepare_model_for_kbit_training is kbitwrap's."
HELP = """Run a script in which PEFT's prepare_model_for_kbit_training is kbitwrap's.

It is run as 'python SCRIPT ...' does, with kbitwrap's drop-in in the place of PEFT's function from the moment that PEFT
is imported. Processes that the script starts are not affected. Options before SCRIPT are kbitwrap's, those after it the
script's.

Exit status: that of the script; 2 if it cannot be read."""
SETTINGS = {"allow_interspersed_args": False}


def command(
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
) -> int:
    """Run the script. 0 if it ended, 1 if it raised, 130 if it was interrupted; the traceback was printed.

    Raises:
        InputError: The script cannot be read.
        SystemExit: From the script.
    """
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
            with _patched_when_imported(precision):
                exec(loader.source_to_code(source, path), vars(main))
        except SystemExit:
            raise
        except BaseException as error:
            # As for a script: no frame above it is shown, and none at all where it
            # cannot be compiled.
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals is not vars(main):
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_NO
    return EXIT_DONE


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
def _patched_when_imported(precision: str) -> Iterator[None]:
    """Patch PEFT once it is imported, and not before: a script may set what torch and others read at their import."""
    with contextlib.ExitStack() as stack:
        finder = _Finder(precision, stack)
        if "peft" in sys.modules:
            finder.patch()
        else:
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        yield


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
