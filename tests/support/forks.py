"""New processes that have everything imported: each is forked from a server that has, and never runs a model.

A function that runs in one is pickled by module and name: it is defined at the top of a module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import io
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, get_context, resource_tracker, util
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

PRELOADED = "support.preloaded"
WORLD_SIZE = 2
_groups: list[Any] = []


def start() -> None:
    """Import what processes need, and start their server as a fork of this process, which has run no model yet.

    A server of multiprocessing's own making is a new interpreter, which imports for seconds what is imported here.
    """
    importlib.import_module(PRELOADED)
    os.register_at_fork(after_in_child=_renew_threads)
    forkserver.set_forkserver_preload([])
    resource_tracker.ensure_running()  # it is a process that `spawnv_passfds` makes too
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _renew_threads() -> None:
    """Have torch make its pool of threads anew now: after a fork it does so at the first use, and not thread-safely.

    Where the main thread and one of autograd's use it first at once, torch aborts with "Invalid thread pool!".
    """
    torch = sys.modules["torch"]
    torch.set_num_threads(torch.get_num_threads())


def _fork(path: str, args: list[str], fds: list[int]) -> int:
    """What `spawnv_passfds` does with the arguments `-c COMMAND`, in a fork."""
    with warnings.catch_warnings():
        # Other threads wait for messages of pytest-xdist; the server does not need the locks that they may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest captures what is printed here
        faulthandler.enable()  # what ends by a signal says where it was
        for fd in set(map(int, os.listdir("/dev/fd"))) - {0, 1, 2, *fds}:
            with contextlib.suppress(OSError):  # the folder's own
                os.close(fd)
        exec(args[-1], {})
    finally:
        os._exit(0)


@functools.cache
def context() -> ForkServerContext:
    """The context whose processes are forks of the server."""
    return get_context("forkserver")


def run(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, or raises, in a new process."""
    with ProcessPoolExecutor(1, mp_context=context()) as pool:
        return pool.submit(_quietly, function, *args).result()


def _quietly(function: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")
    importlib.import_module(PRELOADED)  # with its settings, where multiprocessing made a server anew that had ended
    return function(*args)


class Printed(NamedTuple):
    """What a program has printed."""

    stdout: str
    stderr: str


def run_program(text: str, *arguments: str, folder: Path | None = None) -> Printed:
    """Run a program in a new process, whose arguments are these and whose folder is this.

    Raises:
        Exception: What the program raises.
    """
    return Printed(*run(_execute, text, arguments, folder))


def _execute(text: str, arguments: tuple[str, ...], folder: Path | None) -> tuple[str, str]:
    sys.argv = ["-c", *arguments]
    if folder is not None:
        os.chdir(folder)
        sys.path.insert(0, "")
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
    return output.getvalue(), errors.getvalue()


Join = Callable[..., contextlib.AbstractContextManager[None]]


def run_ranks(function: Callable[..., None], *args: Any, world_size: int = WORLD_SIZE) -> None:
    """Call `function(rank, join, *args)` in new processes; `with join():` they are one gloo group."""
    started = start_ranks(function, *args, world_size=world_size)
    while not started.join():
        pass


def start_ranks(function: Callable[..., None], *args: Any, world_size: int = WORLD_SIZE) -> Any:
    """Start what `run_ranks` waits for: torch's `ProcessContext`."""
    import torch.multiprocessing

    context()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return torch.multiprocessing.start_processes(
        _enter, (function, port, world_size, args), nprocs=world_size, join=False, start_method="forkserver"
    )


def _enter(rank: int, function: Callable[..., None], port: int, world_size: int, args: tuple[Any, ...]) -> None:
    @contextlib.contextmanager
    def join(**options: Any) -> Iterator[None]:
        from torch import distributed

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
        distributed.init_process_group("gloo", rank=rank, world_size=world_size, **options)
        # Held to the end of the process: DDP's reducer, the last to hold it otherwise, waits for the group's threads
        # with Python's lock, for which one of these may wait.
        _groups.append(distributed.group.WORLD)
        try:
            yield
        finally:
            distributed.destroy_process_group()

    _quietly(function, rank, join, *args)


def loaded_modules() -> set[str]:
    """The names of the modules that this process has imported."""
    return set(sys.modules)
