"""Killing a process at random moments, over and over: what it leaves must be whole or not there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
_READY = "ready"
# tqdm shares its lock with forked children, and monitors its bars in a thread that takes it: a child that is killed
# while it holds the lock would leave it locked for its parent and for every later child.
LOCKED_ALONE = """
import threading, tqdm
tqdm.tqdm.set_lock(threading.RLock())
tqdm.tqdm.monitor_interval = 0
"""


def kill_at_random(program: str, folder: Path, tries: int, check: Callable[[Path], None], *, seed: int = 0) -> int:
    """Let a program write to one destination after the other, and kill it at random moments.

    It is Python that defines `write(destination)` and may read `folder`. A child forked from it, with everything
    imported, writes to `folder / "0"`, `folder / "1"`, and so on, until it is killed with SIGKILL.

    Args:
        program: The program.
        folder: Where destinations are; it holds nothing else.
        tries: How many times to kill it.
        check: Called with each destination that there is after a kill.
        seed: Seed of the moments.

    Returns:
        How many temporaries were left over by the kills.
    """
    moments = random.Random(seed)
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER.format(program=LOCKED_ALONE + program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "KILLED_FOLDER": str(folder)},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        assert server.stdout.readline().strip() == _READY
        start = time.perf_counter()
        server.stdin.write("\n")
        server.stdin.flush()
        assert server.stdout.readline().strip() == "written"
        longest = time.perf_counter() - start
        left_over = 0
        for _ in range(tries):
            server.stdin.write("\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            time.sleep(moments.uniform(0, 2 * longest))
            os.kill(child, signal.SIGKILL)
            assert server.stdout.readline().strip() == "dead"
            for path in folder.iterdir():
                if path.name.startswith("."):
                    left_over += 1
                else:
                    check(path)
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()
    return left_over


# The first line asks for one whole run, each further one for a child that is then killed. A forked child starts with
# everything imported, so that all the time there is to be killed in is spent writing. The whole run is a child's too,
# after one to import everything: a child takes longer, for the memory that it writes to is copied first.
_SERVER = """
import itertools, os, sys
from pathlib import Path

folder = Path(os.environ["KILLED_FOLDER"])
{program}
write(folder / "first")
print("ready", flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    write(folder / "whole")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("written", flush=True)
for start in itertools.count():
    if not sys.stdin.readline():
        break
    child = os.fork()
    if child == 0:
        for number in itertools.count():
            write(folder / f"{{start}}-{{number}}")
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""
