"""TRL's GRPOTrainer, with a weight sync for each step.

The trainer is TRL's; vLLM needs a GPU, so the engine is a stand-in: it is called as TRL calls vLLM's `LLM`, keeps what
it is sent, and makes up completions. What vLLM does with the weights is not tested here.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation
from datasets import Dataset

from kbitwrap import ExportError, KbitPreparedModel, LifecycleState, StateError
from kbitwrap.integrations import prepared_trainer
from kbitwrap.integrations.trl import sync_merged_weights
from runs import block, reward, tokenizer
from support import zoo
from support.files import tensors_of
from support.snapshot import Snapshot, tensor_digest
from trl import GRPOConfig, GRPOTrainer

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
NUM_SYNCS = 20
# TRL 1.16 sets the field by the name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


class Engine:
    """A stand-in for vLLM's `LLM`, which cannot run here."""

    made: list[Engine]

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.syncs: list[dict[str, Any]] = [{}]
        self.at_sync: Callable[[dict[str, Any]], None] = lambda received: None
        model = SimpleNamespace(load_weights=self.load_weights)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker), model_config=SimpleNamespace(max_model_len=64)
        )
        self.random = random.Random(0)
        Engine.made.append(self)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.syncs[-1].update((fqn, tensor_digest(tensor)) for fqn, tensor in weights)

    def reset_prefix_cache(self) -> None:
        """The last call of a sync."""
        self.at_sync(self.syncs[-1])
        self.syncs.append({})

    def generate(self, prompts: Sequence[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        def completion() -> Any:
            ids = [self.random.randrange(zoo.FIRST_ORDINARY_ID, zoo.VOCAB_SIZE) for _ in range(4)]
            return SimpleNamespace(token_ids=ids, logprobs=[{i: SimpleNamespace(logprob=-1.0, rank=1)} for i in ids])

        return [
            SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[completion()]) for prompt in prompts
        ]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine.made = []
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", Engine, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # TRL sets them for vLLM, and trainers made later would train on several processes
        monkeypatch.delenv(name)


@pytest.fixture
def merged() -> Iterator[None]:
    undo = sync_merged_weights()
    yield
    undo()


def config_of(folder: Path, **settings: Any) -> GRPOConfig:
    options: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "use_cpu": True,
        "bf16": False,
        "max_steps": NUM_SYNCS,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return GRPOConfig(output_dir=str(folder), **options | settings)


def dataset() -> Dataset:
    return Dataset.from_dict({"prompt": [f"w{8 + i} w{9 + i}" for i in range(8)]})


def trainer_of(model: Any, folder: Path, *, lora: Any = None, **settings: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model,
        reward_funcs=reward,
        args=config_of(folder, **settings),
        train_dataset=dataset(),
        processing_class=tokenizer(),
        peft_config=zoo.lora_config("llama", task_type="CAUSAL_LM", **lora or {}),
    )


@pytest.mark.usefixtures("merged")
@pytest.mark.parametrize(("quant", "is_prepared_first"), [("int8", True), ("nf4", False)], ids=["int8", "nf4-made"])
def test_twenty_syncs_send_what_an_export_writes_and_leave_the_base(
    quant: str, is_prepared_first: bool, tmp_path: Path
) -> None:
    model = zoo.load("llama", quant)
    with contextlib.ExitStack() as stack:
        if is_prepared_first:
            prepared = stack.enter_context(KbitPreparedModel(model, gradient_checkpointing=False))
            trainer = trainer_of(model, tmp_path / "run")
        else:
            trainer = trainer_of(model, tmp_path / "run")
            prepared = stack.enter_context(prepared_trainer(trainer))
        digests = dict(prepared.manifest().tensors)
        (engine,) = Engine.made
        assert engine.options["quantization"] is None  # it is sent half weights
        number = iter(range(NUM_SYNCS))
        names = tensors_of(zoo.checkpoint("llama")).keys()

        def compare(received: dict[str, Any]) -> None:
            before = Snapshot(trainer.model)
            folder = tmp_path / str(next(number))
            assert received.keys() == names
            prepared.export(folder, merge_adapters=True, model=trainer.model)
            assert received == {fqn: tensor_digest(tensor) for fqn, tensor in tensors_of(folder).items()}
            assert before.diff(Snapshot(trainer.model)) == []

        engine.at_sync = compare
        trainer.train()
        assert trainer.state.global_step == len(engine.syncs) - 1 == NUM_SYNCS
        assert len({json.dumps(sorted(map(str, sync.items()))) for sync in engine.syncs[:-1]}) > 1  # it was trained
        assert dict(prepared.manifest().tensors) == digests
        assert not prepared.verify()
        trainer.model.unload()


@pytest.mark.filterwarnings("ignore:(Unm|M)erge lora module to 4-bit linear:UserWarning")
def test_without_it_the_base_drifts(tmp_path: Path) -> None:
    model = zoo.load("llama", "nf4")
    before = {fqn: tensor_digest(p) for fqn, p in model.named_parameters() if "proj" in fqn}
    sync_merged_weights()()
    trainer = trainer_of(model, tmp_path / "run", max_steps=2)
    assert Engine.made[0].options["quantization"] == "bitsandbytes"
    trainer.train()
    after = {
        fqn.replace("base_model.model.", "").replace(".base_layer", ""): p
        for fqn, p in trainer.model.named_parameters()
    }
    changed = [fqn for fqn, digest in before.items() if tensor_digest(after[fqn])[-1] != digest[-1]]
    assert changed


@pytest.mark.usefixtures("merged")
def test_a_model_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(zoo.load("llama", "nf4"), tmp_path / "run")
    with pytest.raises(StateError, match="is not prepared: prepare it before the trainer is made"):
        trainer.train()


@pytest.mark.usefixtures("merged")
def test_weights_that_the_engine_ties_and_training_took_apart_are_refused(tmp_path: Path) -> None:
    model = zoo.load("gemma2", "nf4")
    trainer = trainer_of(model, tmp_path / "run", lora={"target_modules": ["embed_tokens"], "init_lora_weights": True})
    with prepared_trainer(trainer), pytest.raises(ExportError, match=r"lm_head\.weight is tied in the engine"):
        trainer.train()
    (engine,) = Engine.made
    assert trainer.state.global_step == 1  # they were equal before it
    assert "model.embed_tokens.weight" in engine.syncs[0]
    assert "lm_head.weight" not in engine.syncs[0] | engine.syncs[1]


def test_its_undo_puts_trls_methods_back() -> None:
    cls = vllm_generation.VLLMGeneration
    methods = cls._iter_named_params, cls._init_vllm
    undo = sync_merged_weights()
    assert cls._iter_named_params is not methods[0]
    second = sync_merged_weights()
    second()
    assert cls._iter_named_params is not methods[0]
    undo()
    undo()
    assert (cls._iter_named_params, cls._init_vllm) == methods


@pytest.mark.usefixtures("merged")
def test_block_of_the_page(tmp_path: Path) -> None:
    names = {
        "arguments": config_of(tmp_path, max_steps=2),
        "model": zoo.load("llama"),
        "reward_funcs": reward,
        "train_dataset": dataset(),
        "tokenizer": tokenizer(),
        "lora_config": zoo.lora_config("llama", task_type="CAUSAL_LM"),
    }
    exec(block(PAGE, "GRPOTrainer("), names)
    assert names["prepared"].state is LifecycleState.RESTORED
    assert [len(sync) > 0 for sync in Engine.made[0].syncs] == [True, True, False]
