"""The programs of docs/stories.md run, each in a process of its own, in one folder; their asserts are the claims."""

from __future__ import annotations

import re
from pathlib import Path

import forks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "stories.md"


def programs() -> dict[str, str]:
    """The one program of each section, by heading."""
    _, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {}
    for section in sections:
        (program,) = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        found[section.partition("\n")[0]] = program
    return found


def test_the_stories_are_true(tmp_path: Path) -> None:
    outputs = {}
    for number, (heading, program) in enumerate(programs().items()):
        if number == 0:
            (tmp_path / "tiny.py").write_text(program, encoding="utf-8")
        outputs[heading] = forks.run_program(program, folder=tmp_path).stdout
    assert list(outputs) == [
        "A small model to try it on",
        "Prepare in a with-block",
        "Undo before the merge",
        "Keep the record with the run",
        "Resume from it in a new process",
    ]
    assert "LlamaForCausalLM full" in outputs["Keep the record with the run"]
    refusal = outputs["Resume from it in a new process"]
    assert "config.precision: expected 'full', found 'norms'" in refusal
    assert "No step was taken" in refusal
