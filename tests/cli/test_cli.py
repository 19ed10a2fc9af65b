"""The command line as a whole: libraries are quiet meanwhile, importing it is light, help, version, interrupts."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from kbitwrap.cli import demo, main
from kbitwrap.cli.console import InputError, checked_device, quiet_libraries


def exit_status(*arguments: str) -> int:
    """The exit status, whether it is returned or raised as by the console script's ``sys.exit``."""
    with pytest.raises(SystemExit) as found:
        raise SystemExit(main(arguments))
    return found.value.code


@pytest.mark.parametrize("error", [InputError, None])
def test_libraries_are_loud_again(error: type[Exception] | None) -> None:
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    libraries = [logging.getLogger(name) for name in ("transformers", "bitsandbytes", "DeepSpeed")]
    try:
        before = [library.isEnabledFor(logging.WARNING) for library in libraries]
        with contextlib.suppress(InputError), quiet_libraries():
            assert not any(library.isEnabledFor(logging.WARNING) for library in libraries)
            assert not transformers_logging.is_progress_bar_enabled()
            if error is not None:
                raise error
        assert [library.isEnabledFor(logging.WARNING) for library in libraries] == before
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        if not shows_bars:
            transformers_logging.disable_progress_bar()


def test_a_device_that_is_not_there_is_named_with_what_to_give_instead() -> None:
    assert checked_device("cpu") == "cpu"
    for name in (f"cuda:{torch.cuda.device_count()}", "cuda:x", "tpu", "meta"):
        with pytest.raises(InputError, match=rf"--device: device '{name}' is not available: .+ give cpu"):
            checked_device(name)


def test_interruption_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", lambda *_: interrupt())
    assert exit_status("demo") == 130
    assert capsys.readouterr().err == "kbitwrap: interrupted\n"


# An interpreter that has imported nothing, and writes to a pipe that nobody reads any more.
BARE = """
import sys
import kbitwrap.cli
kbitwrap.cli.build_command()
assert not {"torch", "transformers", "peft", "bitsandbytes"} & sys.modules.keys(), "importing is not light"
input()
sys.exit(kbitwrap.cli.main(sys.argv[1:]))
"""


def test_importing_is_light_and_a_closed_pipe_prints_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BARE, "--version"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(b"\n")
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert exit_status(*arguments) == 0
    assert "Usage: kbitwrap" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--version") == 0
    assert capsys.readouterr().out.startswith("kbitwrap ")


def test_without_a_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status() == 2
    captured = capsys.readouterr()
    assert "demo" in captured.err
    assert captured.out == ""
