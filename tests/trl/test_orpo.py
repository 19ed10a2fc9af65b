"""TRL's ORPOTrainer and CPOTrainer, which call PEFT's preparation themselves, with the drop-in in its place."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import Trainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from kbitwrap import patched, prepared_of, restore
from runs import block, tokenizer
from support import zoo
from support.snapshot import Snapshot
from support.trainers import trained_weights

NUM_STEPS = 3
PAGE = Path(__file__).parents[2] / "docs" / "block.md"
pytestmark = [
    # TRL 1.16 sets the field by the name that transformers 5.23 deprecates.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]


class RecordingTrainer(Trainer):
    """Keeps each step's loss as it is: the log's is rounded."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        vars(self).setdefault("losses", []).append(loss.item())
        return loss


class RecordingORPO(RecordingTrainer, ORPOTrainer):
    pass


class RecordingCPO(RecordingTrainer, CPOTrainer):
    pass


CONFIGS: dict[Any, Any] = {RecordingORPO: ORPOConfig, RecordingCPO: CPOConfig}


def arguments_of(config: Any, folder: Path) -> Any:
    options: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "max_length": 16,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return config(output_dir=str(folder), **options)


def dataset() -> Dataset:
    rows = [{"prompt": f"w{8 + i}", "chosen": f"w{9 + i} w{20 + i}", "rejected": f"w{50 + i} w{70}"} for i in range(8)]
    return Dataset.from_list(rows)


def trainer_of(cls: Any, model: Any, folder: Path) -> Any:
    return cls(
        model,
        args=arguments_of(CONFIGS[cls], folder),
        train_dataset=dataset(),
        processing_class=tokenizer(),
        peft_config=zoo.lora_config("llama", task_type="CAUSAL_LM"),
    )


@pytest.mark.parametrize(("cls", "quant"), [(RecordingORPO, "nf4"), (RecordingORPO, "int8"), (RecordingCPO, "nf4")])
def test_losses_and_weights_are_those_with_pefts_own_and_the_base_comes_back(
    cls: Any, quant: str, tmp_path: Path
) -> None:
    found = {}
    for precision in (None, "full", "compute", "norms"):
        model = zoo.load("llama", quant)
        before = Snapshot(model)
        with contextlib.nullcontext() if precision is None else patched(precision):
            trainer = trainer_of(cls, model, tmp_path)
            trainer.train()
        found[precision] = trainer.losses, trained_weights(trainer.model)
        prepared = prepared_of(trainer.model)
        assert (prepared is None) is (precision is None)
        if prepared is not None:
            assert prepared.config.precision == precision
            base = trainer.model.unload()
            restore(base)
            del base.model_tags  # TRL's own, as the page on TRL says
            assert before.diff(Snapshot(base), moved=True) == []
    assert found[None] == found["full"] == found["compute"] != found["norms"]
    assert len(set(found["full"][0])) == NUM_STEPS


def test_block_of_the_page(tmp_path: Path) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    names = {
        "model": model,
        "arguments": arguments_of(ORPOConfig, tmp_path),
        "train_dataset": dataset(),
        "tokenizer": tokenizer(),
        "lora_config": zoo.lora_config("llama", task_type="CAUSAL_LM"),
    }
    exec(block(PAGE, "patched(precision"), names)
    assert names["trainer"].state.global_step == NUM_STEPS
    base = names["trainer"].model.unload()
    del base.model_tags  # TRL's own, as the page on TRL says
    assert before.diff(Snapshot(base), moved=True) == []
