"""What builds a trainer is run up to its training, and the step that is predicted is the one that it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import peft
import pytest
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import runs
from kbitwrap import instead_of_training, predict_step
from support import zoo
from support.foreseen import DEPRECATED, figures, tracked
from support.thorough import few

pytestmark = [
    pytest.mark.filterwarnings(DEPRECATED),
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning"),
]


class ReachedError(Exception):
    pass


def load(kind: str) -> Any:
    options: dict[str, Any] = {"num_labels": 1} if kind == "reward" else {}
    cls = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    return cls.from_pretrained(
        zoo.checkpoint("llama"), quantization_config=runs.NF4, dtype="bfloat16", device_map={"": "cpu"}, **options
    )


def dataset(kind: str) -> Dataset:
    """Rows of one length each, as a user has them."""
    answers = {"chosen": runs.text(1, 6), "rejected": runs.text(2, 6)}
    columns = {
        "sft": {"text": runs.text(0, 12)},
        "dpo": {"prompt": runs.text(0, 5)} | answers,
        "reward": answers,
    }
    return Dataset.from_list([columns[kind]] * 16)


def given_peft_config(kind: str, folder: Path) -> Any:
    cls = runs.TRAINERS[kind][0]
    lora = zoo.lora_config("llama", task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM")
    return cls(
        load(kind),
        args=runs.config_of(kind, folder),
        train_dataset=dataset(kind),
        processing_class=runs.tokenizer(),
        peft_config=lora,
    )


def given_a_name(kind: str, folder: Path) -> Any:
    cls = runs.TRAINERS[kind][0]
    loading = {"dtype": "bfloat16", "device_map": {"": "cpu"}}
    return cls(
        str(zoo.checkpoint("llama")),
        args=runs.config_of(kind, folder, model_init_kwargs=loading),
        train_dataset=dataset(kind),
        processing_class=runs.tokenizer(),
        quantization_config=runs.NF4,
        peft_config=zoo.lora_config("llama", task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM"),
    )


def given_a_peft_model(kind: str, folder: Path) -> Any:
    lora = zoo.lora_config("llama", task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM")
    return runs.TRAINERS[kind][0](
        peft.get_peft_model(load(kind), lora),
        args=runs.config_of(kind, folder),
        train_dataset=dataset(kind),
        processing_class=runs.tokenizer(),
    )


WAYS = [given_peft_config, given_a_name, given_a_peft_model]
CASES = [(kind, way) for kind in ("sft", "dpo", "reward") for way in WAYS]


def planned(build: Callable[[], Any], **options: Any) -> Any:
    """The step of the trainer that a function builds, without a weight, where it would train."""
    found = []

    def act(trainer: Any, settings: dict[str, Any]) -> NoReturn:
        assert all(parameter.is_meta for parameter in trainer.model.parameters())
        found.append(predict_step(trainer, kernels="cpu", exact=True, **settings))
        raise ReachedError

    with instead_of_training(act, **options), pytest.raises(ReachedError):
        build().train()
    return found[0]


@pytest.mark.parametrize(("kind", "build"), few(CASES, [CASES[0], CASES[5], CASES[6]]))
def test_a_step_is_predicted_where_the_training_of_a_script_would_begin(
    kind: str, build: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    step = planned(lambda: build(kind, tmp_path))
    assert figures(step) == figures(tracked(build(kind, tmp_path)))


class OwnTrainer(transformers.Trainer):
    """A trainer as people derive it, with a loss of their own."""

    def __init__(self, *args: Any, scale: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + self.scale * outputs.logits.float().square().mean()
        return (loss, outputs) if return_outputs else loss


def derived(folder: Path) -> Any:
    model = peft.prepare_model_for_kbit_training(load("sft"))
    tokenizer = runs.tokenizer()
    return OwnTrainer(
        peft.get_peft_model(model, zoo.lora_config("llama")),
        transformers.TrainingArguments(
            str(folder), use_cpu=True, max_steps=3, per_device_train_batch_size=2, report_to="none", save_strategy="no"
        ),
        train_dataset=dataset("sft").map(lambda row: tokenizer(row["text"]), remove_columns=["text"]),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        scale=0.1,
    )


def test_a_derived_trainer_is_run_as_it_is_with_its_own_collator(tmp_path: Path) -> None:
    step = planned(lambda: derived(tmp_path), precision="peft")
    assert figures(step) == figures(tracked(derived(tmp_path)))
