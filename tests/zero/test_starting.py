"""Where DeepSpeed does not start, each of its tests is skipped and says why; where it starts, none is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.starting import why_deepspeed_does_not_start

FOLDER = Path(__file__).parent
BROKEN = 'raise ImportError("libcudart.so.12: cannot open shared object file")'
WHY = {
    "import": "ImportError: libcudart.so.12: cannot open shared object file",
    "group": "RuntimeError: .*Unable to find address for: no-such-device",
}
FAILING = "def test_that_fails():\n    assert False\n"


@pytest.fixture(scope="session", autouse=True)
def deepspeed_starts() -> None:
    """These tests run where it does not start, too."""


def run_pytest(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize("what", WHY)
def test_where_it_does_not_start_each_test_is_skipped_and_says_why(what: str, tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text(BROKEN)
    environments = {
        "import": {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        "group": {"GLOO_SOCKET_IFNAME": "no-such-device"},
    }
    ran = run_pytest(FOLDER / "test_zero.py", **environments[what])
    assert ran.returncode == 0, ran.stdout
    assert re.search(rf"SKIPPED \[\d+\] .*: DeepSpeed does not start here: {WHY[what]}", ran.stdout), ran.stdout
    assert re.search(r"= \d+ skipped in ", ran.stdout), ran.stdout


def test_a_test_that_fails_is_a_failure_where_it_starts(tmp_path: Path) -> None:
    outcome = "failed" if why_deepspeed_does_not_start() is None else "skipped"
    shutil.copy(FOLDER / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(FAILING)
    ran = run_pytest(tmp_path, PYTHONPATH=os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    assert re.search(f"= 1 {outcome} in ", ran.stdout), ran.stdout
