"""TRL's SFT, DPO, GRPO and Reward trainers, prepared by one line after they were made.

Every statement of docs/trl.md, but for those on vLLM, is held here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import runs
from kbitwrap import (
    ConfigError,
    KbitPreparedModel,
    LifecycleState,
    Manifest,
    ManifestMismatchError,
    Precision,
    StateError,
    prepared_of,
)
from kbitwrap.integrations import KbitTrainerCallback, SuspendedEvaluation, prepared_trainer
from runs import NUM_STEPS, TRAINERS, leaving_nothing, outcome, trainer_for
from support import zoo
from support.snapshot import Snapshot
from support.training import is_checkpointing
from trl import SFTTrainer

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
SOURCES = ("model", "name", "peft")

pytestmark = [
    # TRL 1.16 sets the field by the name that transformers 5.23 deprecates, and calls two methods so.
    pytest.mark.filterwarnings(r"ignore:`gradient_checkpointing\w*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def train(kind: str, source: str, folder: Path, precision: str | None, **settings: Any) -> Any:
    """Train, in the block where there is a precision."""
    trainer = trainer_for(kind, source, folder, **settings)
    if precision is None:
        trainer.train()
        return trainer
    with leaving_nothing(trainer, moved=Precision(precision).upcasts_all):
        with prepared_trainer(trainer, precision=precision) as prepared:
            trainer.train()
            assert not prepared.verify()
        assert prepared.state is LifecycleState.RESTORED
        assert prepared_of(trainer.model) is None
    return trainer


# ----------------------------------------------------------------------------------------------------
# What a trainer does, and what the line changes.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", TRAINERS)
def test_none_trains_exactly_as_trl_alone(kind: str, source: str, tmp_path: Path) -> None:
    alone = outcome(train(kind, source, tmp_path, None))
    assert len(set(alone[0])) == NUM_STEPS
    assert outcome(train(kind, source, tmp_path, "none")) == alone
    assert outcome(train(kind, source, tmp_path, "norms")) != alone


@pytest.mark.parametrize("kind", TRAINERS)
def test_one_argument_trains_adapters_in_float32_as_a_cast_by_hand_does(kind: str, tmp_path: Path) -> None:
    by_hand = trainer_for(kind, "model", tmp_path)
    for name, parameter in by_hand.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    with leaving_nothing(by_hand), prepared_trainer(by_hand, precision="none"):
        by_hand.train()

    trainer = trainer_for(kind, "model", tmp_path)
    adapters = {name: p for name, p in trainer.model.named_parameters() if "lora_" in name}
    assert {parameter.dtype for parameter in adapters.values()} == {torch.bfloat16}
    with leaving_nothing(trainer), prepared_trainer(trainer, precision="none", adapter_dtype="float32") as prepared:
        trainer.train()
        assert not prepared.verify()
    assert outcome(trainer) == outcome(by_hand)
    assert outcome(trainer) != outcome(train(kind, "model", tmp_path, "none"))
    assert len(prepared.restore().kept_dtype) == len(adapters)
    assert {parameter.dtype for parameter in adapters.values()} == {torch.float32}
    assert any(not torch.equal(parameter, parameter.bfloat16()) for parameter in adapters.values())
    # The head that a reward's trainer trains is a copy of the base's, and no adapter.
    others = {p.dtype for n, p in trainer.model.named_parameters() if p.requires_grad and n not in adapters}
    assert others == ({torch.bfloat16} if kind == "reward" else set())


def test_a_reference_that_the_constructor_computed_unprepared_is_refused(tmp_path: Path) -> None:
    settings = {"precompute_ref_log_probs": True, "bf16": False}
    trainer = trainer_for("dpo", "model", tmp_path, **settings)
    refused = pytest.raises(ConfigError, match=r"^precompute_ref_log_probs: .* KbitPreparedModel\(model\)\.prepare\(\)")
    with refused, prepared_trainer(trainer, precision="full"):
        raise AssertionError
    assert prepared_of(trainer.model) is None
    losses = []
    for given in (settings, {"bf16": False}):
        prepared = KbitPreparedModel(runs.load("dpo"), precision="full", gradient_checkpointing=False).prepare()
        first = trainer_for("dpo", "model", tmp_path, model=prepared.model, **given)
        first.train()
        losses.append(first.losses)
        prepared.restore()
    # The constructor computes batches of another size.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_prepared_first_the_callback_gives_what_the_trainer_makes_its_dtype(tmp_path: Path) -> None:
    trainer = trainer_for("sft", "model", tmp_path)
    with prepared_trainer(trainer, precision="none", adapter_dtype="float32"):
        trainer.train()
    prepared = KbitPreparedModel(
        runs.load("sft"), precision="none", adapter_dtype="float32", gradient_checkpointing=False
    ).prepare()
    first = trainer_for("sft", "model", tmp_path, model=prepared.model, callbacks=[KbitTrainerCallback(prepared)])
    first.train()
    assert outcome(first) == outcome(trainer)
    assert prepared.restore().kept_dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one(dtype: str, tmp_path: Path) -> None:
    def run(**kwargs: Any) -> Any:
        trainer = trainer_for("sft", "model", tmp_path, save_strategy="steps", save_steps=1)
        with leaving_nothing(trainer), prepared_trainer(trainer, adapter_dtype=dtype):
            trainer.train(**kwargs)
        return outcome(trainer)

    losses, weights = run()
    assert run(resume_from_checkpoint=str(tmp_path / "checkpoint-1")) == (losses[1:], weights)


def forbidden(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("TRL called PEFT's preparation")


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainer_prepares_nothing_but_casts_what_is_trainable(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft, "prepare_model_for_kbit_training", forbidden)
    trainer = trainer_for(kind, "model", tmp_path, lora={"use_dora": True})
    base = trainer.model.get_base_model()
    trainable = {fqn: p.dtype for fqn, p in trainer.model.named_parameters() if p.requires_grad}
    assert any("lora_A" in fqn for fqn in trainable)
    assert any("score" in fqn for fqn in trainable) == (kind == "reward")
    for fqn, dtype in trainable.items():
        assert dtype == (torch.float32 if "magnitude" in fqn else torch.bfloat16)
    assert {p.dtype for p in trainer.model.parameters() if not p.requires_grad} == {torch.bfloat16, torch.uint8}
    assert not is_checkpointing(base)
    assert base.get_input_embeddings()._forward_hooks
    assert ("forward" in vars(base)) == (kind != "reward")
    assert not base.config.use_cache
    assert getattr(trainer, "ref_model", None) is None


@pytest.mark.parametrize(
    ("precision", "source"),
    [
        ("full", "model"),
        ("compute", "peft"),
        ("norms", "model"),
        ("norms", "peft"),
        ("adapted", "peft"),
        ("none", "model"),
    ],
)
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_reference_computes_as_the_policy_does(kind: str, precision: str, source: str, tmp_path: Path) -> None:
    """What was not trained yet is its own reference: the loss and the divergence say so exactly."""
    lora = {"init_lora_weights": source == "model"}  # which adds nothing; an adapter that does has a copy for reference
    trainer = train(kind, source, tmp_path, precision, lora=lora, max_steps=1, logging_steps=1)
    assert ("ref" in trainer.model.peft_config) == (source == "peft")
    if kind == "dpo":
        assert trainer.losses == [torch.tensor(2.0).log().item()]
    else:
        assert trainer.state.log_history[0]["kl"] == 0.0


def test_reference_model_of_ones_own_is_not_prepared(tmp_path: Path) -> None:
    trainer = trainer_for("dpo", "model", tmp_path, ref_model=zoo.load("llama"))
    before = Snapshot(trainer.ref_model)
    with prepared_trainer(trainer, precision="full"):
        assert prepared_of(trainer.ref_model) is None
        assert before.diff(Snapshot(trainer.ref_model)) == []


@pytest.mark.parametrize("kwargs", [{}, {"bf16": False}], ids=["bf16", "plain"])
def test_full_and_compute_train_exactly_as_after_pefts_preparation(kwargs: dict[str, Any], tmp_path: Path) -> None:
    model = zoo.load("llama")
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    theirs = trainer_for("sft", "model", tmp_path, model=model, **kwargs)
    theirs.train()
    for precision in ("full", "compute"):
        assert outcome(train("sft", "model", tmp_path, precision, **kwargs)) == outcome(theirs)


@pytest.mark.parametrize("kind", TRAINERS)
def test_prepared_first_the_model_is_as_loaded_but_for_two_attributes_of_trl(kind: str, tmp_path: Path) -> None:
    model = runs.load(kind)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision="full", gradient_checkpointing=False).prepare()
    trainer = trainer_for(kind, "model", tmp_path, model=model)
    prepared.adopt(trainer.model)
    trainer.train()
    prepared.restore()
    score = vars(model)["_modules"].get("score")  # a copy of it was trained, which stays when the adapter goes
    trainer.model.unload()
    if score is not None:
        model.score = score.original_module
    changed = {line.partition(": ")[2].partition(": ")[0] for line in before.diff(Snapshot(model), moved=True)}
    assert changed - {"attributes", "model_tags"} == ({"forward"} if kind != "reward" else set())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False}},
    ],
    ids=["off", "reentrant", "with-arguments"],
)
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_checkpointing_is_the_trainers(kind: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    is_on = kwargs.get("gradient_checkpointing", True)
    trainer = trainer_for(kind, "model", tmp_path, max_steps=1, **kwargs)
    with leaving_nothing(trainer), prepared_trainer(trainer, precision="none") as prepared:
        assert is_checkpointing(trainer.model) == is_on
        trainer.train()
        assert is_checkpointing(trainer.model) == is_on
        assert not prepared.verify()
        config = prepared.manifest().prepare_config()
        assert config.gradient_checkpointing == is_on


def test_fields_go_to_the_preparation_and_win(tmp_path: Path) -> None:
    trainer = trainer_for("sft", "model", tmp_path)
    with leaving_nothing(trainer), prepared_trainer(trainer, gradient_checkpointing=False, audit=True) as prepared:
        assert prepared.model is trainer.model
        assert (prepared.config.gradient_checkpointing, prepared.config.audit) == (False, True)


# ----------------------------------------------------------------------------------------------------
# Ends of the block.
# ----------------------------------------------------------------------------------------------------


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def failing_reward(completions: list[str], **columns: Any) -> list[float]:
    raise RuntimeError("no reward")


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_interrupt_restores_the_base(precision: str, tmp_path: Path) -> None:
    trainer = trainer_for("sft", "model", tmp_path, callbacks=[Stop()])
    with (
        leaving_nothing(trainer, moved=precision == "full"),
        pytest.raises(KeyboardInterrupt),
        prepared_trainer(trainer, precision=precision),
    ):
        trainer.train()
    assert len(trainer.losses) == 2


def test_error_in_a_rollout_restores_the_base(tmp_path: Path) -> None:
    trainer = trainer_for("grpo", "model", tmp_path, reward_funcs=failing_reward)
    with leaving_nothing(trainer), pytest.raises(RuntimeError, match="no reward"), prepared_trainer(trainer):
        trainer.train()


def test_rollouts_are_generated_prepared_and_an_error_there_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for("grpo", "model", tmp_path)

    def generate(model: nn.Module, **kwargs: Any) -> None:
        prepared = prepared_of(model)
        assert prepared is not None
        assert prepared.state is LifecycleState.PREPARED
        assert not is_checkpointing(model)  # TRL turns it off, and an error leaves it so
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(trainer.model), "generate", generate)
    with leaving_nothing(trainer), pytest.raises(RuntimeError, match="out of memory"), prepared_trainer(trainer):
        trainer.train()


def test_model_that_was_prepared_before_is_refused_and_stays_prepared(tmp_path: Path) -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model) as prepared:
        trainer = SFTTrainer(
            model,
            args=runs.config_of("sft", tmp_path),
            train_dataset=runs.dataset("sft"),
            processing_class=runs.tokenizer(),
            peft_config=zoo.lora_config("llama", task_type="CAUSAL_LM"),
        )
        callbacks = list(trainer.callback_handler.callbacks)
        with pytest.raises(StateError, match="is prepared already"), prepared_trainer(trainer):
            pass
        assert trainer.callback_handler.callbacks == callbacks
        assert prepared.state is LifecycleState.PREPARED
        trainer.model.unload()


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_training_twice_is_training_twice(num_blocks: int, tmp_path: Path) -> None:
    alone = trainer_for("sft", "model", tmp_path)
    alone.train()
    alone.train()
    trainer = trainer_for("sft", "model", tmp_path)
    for _ in range(num_blocks):
        with leaving_nothing(trainer), prepared_trainer(trainer, precision="none"):
            for _ in range(2 // num_blocks):
                trainer.train()
    assert len(trainer.losses) == 2 * NUM_STEPS
    assert outcome(trainer) == outcome(alone)


# ----------------------------------------------------------------------------------------------------
# Evaluation, checkpoints.
# ----------------------------------------------------------------------------------------------------


class States(TrainerCallback):
    """Notes in which state the model is evaluated."""

    def __init__(self) -> None:
        self.seen: list[LifecycleState] = []

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        prepared = prepared_of(model)
        assert prepared is not None
        self.seen.append(prepared.state)


@pytest.mark.usefixtures("not_repacking")  # repacking gives weights other memory
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_evaluation_may_be_suspended(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome(train(kind, "model", tmp_path, "norms"))
    settings: dict[str, Any] = {"eval_dataset": runs.dataset(kind), "eval_strategy": "steps", "eval_steps": 1}
    train(kind, "model", tmp_path, "norms", callbacks=[prepared_states := States()], **settings)
    assert set(prepared_states.seen) == {LifecycleState.PREPARED}
    suspending(kind, monkeypatch)
    trainer = train(kind, "model", tmp_path, "norms", callbacks=[states := States()], **settings)
    assert set(states.seen) == {LifecycleState.SUSPENDED}
    assert outcome(trainer) == expected


def suspending(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trainers of a kind evaluate in the original state."""
    cls, arguments = TRAINERS[kind]
    suspended = type(f"Suspended{cls.__name__}", (SuspendedEvaluation, cls), {})
    monkeypatch.setitem(TRAINERS, kind, (suspended, arguments))


@pytest.mark.usefixtures("not_repacking")  # repacking gives weights other memory
def test_suspended_evaluation_goes_before_trls_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suspending("sft", monkeypatch)
    states = States()
    trainer = trainer_for("sft", "model", tmp_path, callbacks=[states], eval_dataset=runs.dataset("sft"))
    with leaving_nothing(trainer), prepared_trainer(trainer):
        trainer.train()
        trainer.evaluate()
    assert set(states.seen) == {LifecycleState.SUSPENDED}


def resume(folder: Path, precision: str | None) -> tuple[list[float], dict[str, object]]:
    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer = trainer_for("sft", "model", folder, **settings)
    if precision is None:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        return outcome(trainer)
    with leaving_nothing(trainer), prepared_trainer(trainer, precision=precision):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    return outcome(trainer)


def test_checkpoints_hold_the_record_and_are_resumed_on_no_other_preparation(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    alone = train("sft", "model", tmp_path / "alone", None, **settings)
    train("sft", "model", tmp_path / "ours", "none", **settings)
    assert not (tmp_path / "alone" / "checkpoint-1" / "kbitwrap.json").exists()
    manifest = Manifest.load(tmp_path / "ours" / "checkpoint-1" / "kbitwrap.json")
    assert manifest.prepare_config().precision == "none"
    with pytest.raises(ManifestMismatchError, match="expected 'none', found 'norms'"):
        resume(tmp_path / "ours", "norms")
    with pytest.warns(UserWarning, match="was bfloat16 at step 1, and is float32 now: its losses differ"):
        resumed = resume(tmp_path / "ours", "none")
    assert resumed == resume(tmp_path / "alone", None)
    assert resumed[0] != alone.losses[1:]  # PEFT loads the adapter in float32
    assert resumed[0] == pytest.approx(alone.losses[1:], rel=1e-2)


# ----------------------------------------------------------------------------------------------------
# The page's code.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["model_name,", "add_fused_lm_head("])
def test_block_of_the_page(text: str, tmp_path: Path) -> None:
    options = {} if "head" in text else {"model_init_kwargs": {"dtype": "bfloat16", "device_map": "cpu"}}
    names = {
        "arguments": runs.config_of("sft", tmp_path, gradient_checkpointing="head" not in text, **options),
        "quantization_config": runs.NF4,
        "train_dataset": runs.dataset("sft"),
        "tokenizer": runs.tokenizer(),
        "lora_config": zoo.lora_config("llama", task_type="CAUSAL_LM"),
        "model_name": str(zoo.checkpoint("llama")),
        "model": zoo.load("llama"),
    }
    exec(runs.block(PAGE, text), names)
    assert names["prepared"].state is LifecycleState.RESTORED
    assert names["trainer"].state.global_step == NUM_STEPS
