"""Runs pytest on a simulated device: ``python tests/device/run.py cuda|sim [--zoo] ARGUMENTS``.

With ``--zoo`` the models of the zoo lie on the device, in tests that were written for a CPU too. Tests that are marked
``real_gpu`` are left out. A folder with a ``__main__.py``, such as docs/figures, is run as a program instead.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import device


def put_zoo_on(kind: str) -> None:
    """Have the zoo load its models on the device."""
    from support import zoo

    load = zoo._from_pretrained

    def load_on_device(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{"device_map": {"": f"{kind}:0"}, **kwargs})

    zoo._from_pretrained = load_on_device


def main(kind: str, *arguments: str) -> int:
    device.start(kind)
    if Path(arguments[0], "__main__.py").exists():
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(__file__).parents[2]))
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else bool(ended.code)
        return 0
    import pytest

    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests)]
    given = [argument for argument in arguments if argument != "--zoo"]
    if len(given) < len(arguments):
        put_zoo_on(kind)
    ignored = "ignore::pytest.PytestAssertRewriteWarning"  # the zoo was imported before pytest could rewrite it
    return int(pytest.main(["-p", "no:cacheprovider", "-W", ignored, "-m", "not real_gpu", *given]))


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # tensors that are freed after the device's allocator would be an error
