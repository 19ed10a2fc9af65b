"""The blocks of the page on Trainer, run as they are printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kbitwrap import LifecycleState, Manifest
from support import pages, zoo
from support.snapshot import Snapshot
from support.trainers import NUM_STEPS, dataset, prompt

PAGES = ("trainer.md", "block.md", "resume.md")


pytestmark = [
    # These two names are those of every transformers that is supported; 5.23 calls them `activation_checkpointing…`.
    pytest.mark.filterwarnings(
        r"ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning:transformers\.training_args"
    ),
]


# ----------------------------------------------------------------------------------------------------
# The page's code.
# ----------------------------------------------------------------------------------------------------


def code_blocks() -> list[str]:
    return [block.text for name in PAGES for block in pages.blocks(pages.DOCS / name, "python")]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs the one block that holds a text, in a folder of its own, and returns the names it leaves."""
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> dict[str, Any]:
        (block,) = (block for block in code_blocks() if text in block)
        torch.manual_seed(0)
        model = zoo.load("llama")
        names = {
            "model": model,
            "lora_config": zoo.lora_config("llama", task_type="CAUSAL_LM", lora_dropout=0.1),
            "train_dataset": dataset(model),
            "eval_dataset": dataset(model)[:2],
            "prompt": prompt(model),
        }
        before = Snapshot(model)
        exec(compile(block, "block", "exec"), names)
        assert names["prepared"].state is LifecycleState.RESTORED
        names["diff"] = lambda: before.diff(Snapshot(names["peft_model"].unload()), moved="full" in block)
        return names

    return run


# The page leaves `dataloader_pin_memory` to its default, which asks for an accelerator.
as_on_a_machine_without_accelerator = pytest.mark.filterwarnings(
    r"ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning:torch\.utils\.data"
)


@pytest.mark.usefixtures("not_repacking")  # the base has run when it is compared
@as_on_a_machine_without_accelerator
def test_block_that_trains_and_merges(page: Callable[[str], dict[str, Any]]) -> None:
    names = page("train_dataset=train_dataset).train()")
    assert {p.dtype for p in names["merged"].parameters()} == {torch.bfloat16}
    with torch.no_grad():
        merged = names["merged"](**prompt(names["merged"])).logits
        adapted = names["peft_model"].eval()(**prompt(names["model"])).logits
        assert names["diff"]() == []
        base = names["model"](**prompt(names["model"])).logits
    assert (merged - adapted).norm() < (base - adapted).norm() / 20


@pytest.mark.usefixtures("not_repacking")  # repacking gives weights other memory
@as_on_a_machine_without_accelerator
def test_block_with_a_callback(page: Callable[[str], dict[str, Any]]) -> None:
    names = page("class Sample")
    assert len(names["sample"].samples) == 3
    assert names["diff"]() == []


@as_on_a_machine_without_accelerator
def test_block_that_evaluates_suspended(page: Callable[[str], dict[str, Any]]) -> None:
    names = page("SuspendedEvaluation(")
    losses = [row["eval_loss"] for row in names["trainer"].state.log_history if "eval_loss" in row]
    assert len(losses) == 3
    with torch.no_grad():
        assert losses[-1] == zoo.loss("llama", names["peft_model"].eval(), zoo.inputs("llama", names["model"])).item()


@as_on_a_machine_without_accelerator
def test_block_with_checkpoints(page: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    names = page("KbitTrainerCallback(prepared)\n    Trainer(")
    manifests = [Manifest.load(path) for path in tmp_path.glob("run/checkpoint-*/kbitwrap.json")]
    assert len(manifests) == 3
    assert names["diff"]() == []
    for manifest in manifests:
        manifest.check(names["model"])


def test_block_with_an_optimizer(page: Callable[[str], dict[str, Any]]) -> None:
    names = page("torch.optim.AdamW(p for p in")
    assert {int(state["step"]) for state in names["optimizer"].state.values()} == {2 * NUM_STEPS}
    assert names["diff"]() == []
