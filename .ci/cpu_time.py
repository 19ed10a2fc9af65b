"""Run a command, and print the CPU time that it took: ``python .ci/cpu_time.py WHAT COMMAND ...``.

All of its processes count, those too that outlive the one that started them: on Linux they become children of this one,
which waits for them. The exit status is the command's.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SECONDS_FOR_ORPHANS = 30


def wait_for_orphans() -> None:
    """Wait until no child is left, or for a while: a child counts only when it has ended and was waited for."""
    end = time.monotonic() + SECONDS_FOR_ORPHANS
    while time.monotonic() < end:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not found:
            time.sleep(0.1)
    print("a process that the command started goes on, and is not counted", file=sys.stderr)


def main(what: str, *command: str) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is interrupted too, and ends
    status = process.wait()
    wait_for_orphans()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = usage.ru_utime + usage.ru_stime
    print(f"{what}: {total:.0f} s of CPU time ({usage.ru_utime:.0f} user, {usage.ru_stime:.0f} system)", flush=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
