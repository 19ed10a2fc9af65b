"""Killing a process at random moments, over and over: what it leaves must be whole or not there."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import tqdm

from support import forks


def lock_alone() -> None:
    """Let children that are killed not lock their parent.

    tqdm shares its lock with forked children, and monitors its bars in a thread that takes it: a child that is killed
    while it holds the lock would leave it locked for its parent and for every later child.
    """
    tqdm.tqdm.set_lock(threading.RLock())
    tqdm.tqdm.monitor_interval = 0


def fork(write: Callable[[Path], object], destinations: Iterable[Path]) -> int:
    """The id of a child that writes to each destination and ends."""
    child = os.fork()
    if child:
        return child
    try:
        for destination in destinations:
            write(destination)
        os._exit(0)
    finally:
        os._exit(1)


def kill_at_random(program: str, folder: Path, tries: int, *, seed: int = 0) -> Iterator[list[Path]]:
    """Let a program write to one destination after the other, and kill it at random moments.

    It is Python that defines `write(destination)` and may read `folder`. A child forked from it, with everything
    imported, writes to `folder / "0"`, `folder / "1"`, and so on, until it is killed with SIGKILL.

    Args:
        program: The program.
        folder: Where destinations are; it holds nothing else.
        tries: How many times to kill it.
        seed: Seed of the moments.

    Yields:
        What is in the folder: before the kills, after each, and when another child has written once in the end.
    """
    ours, theirs = forks.context().Pipe()
    server = forks.context().Process(target=_serve, args=(program, folder, tries, seed, theirs), daemon=True)
    server.start()
    theirs.close()
    try:
        for _ in range(tries + 2):
            assert ours.recv() == "dead"
            yield list(folder.iterdir())
            ours.send("checked")
    finally:
        server.kill()
        server.join()
        ours.close()


def _serve(program: str, folder: Path, tries: int, seed: int, connection: Connection) -> None:
    lock_alone()
    namespace = {"folder": folder}
    exec(program, namespace)
    write: Callable[[Path], object] = namespace["write"]  # type: ignore[assignment]
    write(folder / "first")
    # A child's whole run is timed, for it takes longer: the memory that it writes to is copied first.
    start = time.perf_counter()
    assert os.waitpid(fork(write, [folder / "whole"]), 0)[1] == 0
    longest = time.perf_counter() - start

    def check() -> None:
        connection.send("dead")
        connection.recv()

    check()
    moments = random.Random(seed)
    for attempt in range(tries):
        child = fork(write, (folder / f"{attempt}-{number}" for number in itertools.count()))
        time.sleep(moments.uniform(0, 2 * longest))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        check()
    assert os.waitpid(fork(write, [folder / "last"]), 0)[1] == 0
    check()
