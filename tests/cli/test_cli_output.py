"""What is printed fits the width, has color on a terminal only, and a line of progress there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from kbitwrap import KbitPreparedModel
from kbitwrap.cli import main
from kbitwrap.cli.console import Doing, show
from kbitwrap.cli.tables import table
from support import zoo
from support.thorough import every_other

if sys.platform != "win32":
    import pty

ROOT = Path(__file__).parents[2]
ROWS = [
    ("case", "step s", "live MiB added", "peak MiB preparing", "ratio", "what was found"),
    ("peft", "17.280", "128.02", "191.9", "1.000", "a longer text, of which a part may be on the next line"),
    ("norms", "17.021", "0.00", "0.0", "0.062", "-"),
]


def test_a_table_that_fits_has_a_rule_under_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    show(table([("check", "result"), ("a longer name", "pass")]))
    assert capsys.readouterr().out == "check           result\n──────────────────────\na longer name   pass\n"


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_no_line_of_a_table_is_longer_than_the_width_and_no_figure_is_broken(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    show(table(ROWS))
    out = capsys.readouterr().out
    assert max(map(cell_len, out.splitlines())) <= columns
    for row in ROWS[1:]:
        assert all(cell in out for cell in row[:5])
    words = " ".join(" ".join(row) for row in ROWS).split()
    assert [word for word in words if word not in out] == []


def test_wide_characters_count_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    show(table([("name", "text"), ("模型" * 9, "x" * 25)]), "模型 " * 20)
    assert max(map(cell_len, capsys.readouterr().out.splitlines())) <= 30


def test_without_columns_a_pipe_has_no_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show("word " * 100)
    assert capsys.readouterr().out == f"{'word ' * 100}".rstrip() + "\n"


def test_markup_in_a_text_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    show("[bold]x[/bold] :smile: [1/2]")
    assert capsys.readouterr().out == "[bold]x[/bold] :smile: [1/2]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = zoo.load("llama", "nf4")
    with KbitPreparedModel(model, precision="full") as prepared:
        prepared.manifest().save(folder / "kbitwrap.json")
        model.save_pretrained(folder / "m")
    return folder


@pytest.mark.parametrize("columns", every_other([60, 80, 100]))
@pytest.mark.parametrize(
    "arguments",
    [["plan", "m", "--memory-budget", "1KiB"], ["doctor", "kbitwrap.json"], ["doctor", "m"]],
    ids=" ".join,
)
def test_no_line_of_a_command_is_longer_than_columns(
    arguments: list[str],
    columns: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(arguments) in (0, 1)
    out = capsys.readouterr().out
    assert max(map(cell_len, out.splitlines())) <= columns
    assert "\x1b" not in out
    assert not re.search(r" $", out, re.MULTILINE)


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize(
    "command", [[], *([name] for name in ("demo", "plan", "doctor", "merge", "stamp", "convert", "run"))], ids=" ".join
)
def test_no_line_of_help_is_longer_than_columns(
    command: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    # Typer colors it where GitHub's workflows run, which show it.
    assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", out).splitlines())) <= columns


@pytest.mark.parametrize("command", [[], ["plan"], ["doctor"], ["run"]], ids=" ".join)
def test_help_begins_with_examples_of_a_line_each(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command, "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    _, _, examples, *_ = "\n".join(lines).strip().split("\n\n")
    assert all(line.startswith(" ".join(["kbitwrap", *command])) for line in examples.splitlines())


def test_a_command_to_copy_is_one_for_a_shell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor", "m"]) == 1
    assert "\n  kbitwrap convert --from m --out DST --dtype bfloat16\n" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
@pytest.mark.parametrize("no_color", [False, True])
def test_color_is_for_terminals(no_color: bool) -> None:
    out = on_terminal("from kbitwrap.cli import main; main(['--help'])", **({"NO_COLOR": "1"} if no_color else {}))
    assert "Commands" in out
    assert bool(re.search(r"\x1b\[[\d;]*3\dm", out)) == (not no_color)


PROGRESS = (
    "import time\nfrom kbitwrap.cli.console import Doing\n"
    "doing = Doing('planning [b]m[/b]')\nwith doing:\n"
    "    time.sleep(0.3); doing.now('merging'); doing.written(5 << 20); time.sleep(0.3)\n"
)


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_a_line_of_progress_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    out = on_terminal(PROGRESS)
    assert "planning [b]m[/b]" in out
    assert "merging: 5 MiB written" in out
    doing = Doing("planning")
    with doing:
        doing.now("more")
        doing.written(3)
    assert capsys.readouterr() == ("", "")


def on_terminal(program: str, **variables: str) -> str:
    """What a program prints, on both streams, to a terminal."""
    ours, its = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **variables}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=its, stdout=its, stderr=its, env=environment
    ) as process:
        os.close(its)
        parts = []
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux says so where the other end was closed
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    assert process.returncode == 0
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("kbitwrap pl", ["plan"]),
        ("kbitwrap plan m --quant ", ["nf4", "nf4-double", "fp4", "fp4-double", "int8", "none"]),
        ("kbitwrap plan --me", None),
    ],
)
def test_a_shell_completes(typed: str, words: list[str] | None) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "_KBITWRAP_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    found = subprocess.run([sys.executable, "-m", "kbitwrap"], capture_output=True, text=True, env=environment)
    assert found.stdout.split() == (words or ["--memory-budget"])
