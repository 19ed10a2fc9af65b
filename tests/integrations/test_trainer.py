"""A prepared model under Trainer: the numbers of PEFT, and nothing left on the base."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from kbitwrap import KbitPreparedModel, LifecycleState, StateError, UnsupportedModelError
from kbitwrap.integrations import prepared_trainer
from support import zoo
from support.files import saved
from support.snapshot import Snapshot, tensor_digest
from support.thorough import every_other, few
from support.trainers import (
    NUM_STEPS,
    RecordingTrainer,
    adapt,
    load_base,
    outcome,
    prompt,
    train,
    train_prepared,
    trainer_for,
)

PRECISIONS = ("full", "norms", "none")


pytestmark = [
    # These two names are those of every transformers that is supported; 5.23 calls them `activation_checkpointing…`.
    pytest.mark.filterwarnings(
        r"ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning:transformers\.training_args"
    ),
]


# ----------------------------------------------------------------------------------------------------
# Losses.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules_to_save", every_other([False, True]), ids=["lora", "lora-and-head"])
@pytest.mark.parametrize("bf16", [False, True], ids=["plain", "bf16"])
def test_full_trains_exactly_as_after_pefts_own_preparation(tmp_path: Path, bf16: bool, modules_to_save: bool) -> None:
    kwargs = {"bf16": bf16, "modules_to_save": modules_to_save, "gradient_checkpointing": False}
    theirs = load_base()
    peft.prepare_model_for_kbit_training(theirs, gradient_checkpointing_kwargs={"use_reentrant": False})

    ours = outcome(train_prepared(tmp_path, "full", **kwargs))

    assert ours == outcome(train(theirs, tmp_path, **kwargs))
    if not modules_to_save:
        assert ours != outcome(train_prepared(tmp_path, "none", **kwargs))


# ----------------------------------------------------------------------------------------------------
# Trainer's own checkpointing.
# ----------------------------------------------------------------------------------------------------


class Probe:
    """How a llama is checkpointed, seen from what runs rather than from attributes."""

    def __init__(self, model: nn.Module) -> None:
        self.num_calls = 0
        self.is_reentrant = False
        model.model.layers[0].mlp.register_forward_pre_hook(self._count)
        model.model.norm.register_forward_pre_hook(self._look)

    def _count(self, module: nn.Module, args: Any) -> None:
        self.num_calls += 1

    def _look(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert args[0].grad_fn is not None
        self.is_reentrant |= args[0].grad_fn.name() == "CheckpointFunctionBackward"

    def seen(self) -> str:
        return {
            (NUM_STEPS, False): "none",
            (2 * NUM_STEPS, False): "non-reentrant",
            (2 * NUM_STEPS, True): "reentrant",
        }[self.num_calls, self.is_reentrant]


WRAPPER: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": False},
    "non-reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


TRAINER: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": False},
    "non-reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


CASES = [(*pair, "norms") for pair in itertools.product(WRAPPER, TRAINER)]


CASES += [("non-reentrant", "reentrant", "full"), ("reentrant", "non-reentrant", "none")]


@pytest.fixture(scope="module")
def losses_without_checkpointing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("trainer")
    return {
        precision: train(
            KbitPreparedModel(load_base(), precision=precision, gradient_checkpointing=False).prepare().model,
            folder,
        ).losses
        for precision in PRECISIONS
    }


@pytest.mark.parametrize(("wrapper", "trainer", "precision"), few(CASES, CASES[::2]))
def test_trainers_checkpointing_wins_and_is_taken_back(
    tmp_path: Path,
    losses_without_checkpointing: dict[str, list[float]],
    wrapper: str,
    trainer: str,
    precision: str,
) -> None:
    model = load_base()
    probe = Probe(model)
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision, **WRAPPER[wrapper]) as prepared:
        run = train(prepared.model, tmp_path, **TRAINER[trainer])

    assert probe.seen() == (wrapper if trainer == "none" else trainer)
    assert run.losses == losses_without_checkpointing[precision]
    assert run.model.unload() is model
    assert before.diff(Snapshot(model), moved=precision == "full") == []
    assert not model.training
    assert model.config.use_cache


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_trainers_checkpointing_is_off_by_default(tmp_path: Path, name: str) -> None:
    # The second name is the newer one of the same setting; an older transformers has the first alone.
    assert not getattr(TrainingArguments(output_dir=str(tmp_path)), name, False)


def test_a_model_in_place_of_a_trainer_and_a_wrapper_in_place_of_a_model_are_refused(tmp_path: Path) -> None:
    model = zoo.load("llama")
    wrapper = KbitPreparedModel(model)
    for given in (model, wrapper):
        with pytest.raises(UnsupportedModelError, match=r"expected a Trainer, found a \w+: give the trainer"):
            prepared_trainer(given).__enter__()
    with pytest.raises(AttributeError, match=r"give prepared\.model in its place"):
        Trainer(wrapper, TrainingArguments(tmp_path, report_to="none", use_cpu=True))
    with pytest.raises(UnsupportedModelError, match=r"give the trainer prepared\.model"):  # as TRL does
        getattr(wrapper.config, "_name_or_path", "")


def test_each_train_call_adds_a_hook_and_restore_removes_them_all(tmp_path: Path) -> None:
    model = load_base()
    prepared = KbitPreparedModel(model).prepare()
    trainer = trainer_for(adapt(model), tmp_path, **TRAINER["non-reentrant"])
    assert not prepared.verify()
    for num_hooks in (1, 2):
        trainer.train()
        assert len(model.get_input_embeddings()._forward_hooks) == num_hooks
        assert not prepared.verify()
    with prepared.suspended():
        assert not model.get_input_embeddings()._forward_hooks
    assert len(model.get_input_embeddings()._forward_hooks) == 2
    prepared.restore()
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_verify_is_silent_on_a_setting_that_was_written_again(tmp_path: Path, mode: str) -> None:
    prepared = KbitPreparedModel(load_base(), **WRAPPER[mode]).prepare()
    run = train(prepared.model, tmp_path, **TRAINER[mode])
    assert not prepared.verify()
    # As TRL does, which enables it itself and then hands the model to the Trainer.
    run.model.enable_input_require_grads()
    run.train()
    assert len(prepared.model.get_input_embeddings()._forward_hooks) > 2
    assert not prepared.verify()


def test_verify_names_checkpointing_of_another_kind(tmp_path: Path) -> None:
    prepared = KbitPreparedModel(load_base()).prepare()
    train(prepared.model, tmp_path, **TRAINER["reentrant"])
    found = {what for rows in prepared.verify().differences.values() for what in rows}
    assert found == {"_gradient_checkpointing_func"}


def test_report_names_no_hook_that_restore_removed(tmp_path: Path) -> None:
    prepared = KbitPreparedModel(load_base()).prepare()
    train(prepared.model, tmp_path, **TRAINER["non-reentrant"])
    assert [name for name in prepared.restore().foreign if "hook" in name] == []


@pytest.mark.parametrize(("use_reentrant", "is_exact"), [(False, True), (True, False)])
def test_reentrant_checkpointing_loses_gradients_silently(use_reentrant: bool, is_exact: bool) -> None:
    def loss_and_gradients(**fields: Any) -> tuple[float, dict[str, object]]:
        torch.manual_seed(0)
        prepared = KbitPreparedModel(zoo.load("mixtral"), **fields).prepare()
        model = peft.get_peft_model(prepared.model, zoo.lora_config("mixtral")).train()
        loss = model(**zoo.inputs("mixtral", model), output_router_logits=True).loss
        loss.backward()
        trainable = [(fqn, p) for fqn, p in model.named_parameters() if p.requires_grad]
        return loss.item(), {fqn: tensor_digest(p.grad) for fqn, p in trainable}

    expected_loss, expected = loss_and_gradients(gradient_checkpointing=False)
    loss, gradients = loss_and_gradients(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert loss == expected_loss
    assert (gradients == expected) == is_exact


# ----------------------------------------------------------------------------------------------------
# What is left behind, and what is undone.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "bf16", "modules_to_save"),
    [
        ("full", False, False),
        ("full", True, True),
        ("norms", True, False),
        ("norms", False, True),
        ("none", True, False),
    ],
)
def test_what_training_leaves_on_the_base_is_undone(
    tmp_path: Path, precision: str, bf16: bool, modules_to_save: bool
) -> None:
    model = load_base()
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision):
        peft_model = adapt(model, modules_to_save=modules_to_save)
        trainer = trainer_for(peft_model, tmp_path, bf16=bf16)
        assert not model.config.use_cache
        trainer.train()
        assert model.training

    assert model.config.use_cache
    assert not model.training
    assert {m.training for fqn, m in model.named_modules() if fqn.endswith("lora_dropout.default")} == {True}
    assert ("forward" in vars(peft_model)) == bf16
    if modules_to_save:
        # Unloading leaves the trained copy in the head's place; the head itself is beside it until then.
        head = model.lm_head.original_module
        peft_model.unload()
        model.lm_head = head
    else:
        peft_model.unload()
    assert before.diff(Snapshot(model), moved=precision == "full") == []


class StoppedError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("full", StoppedError), ("norms", StoppedError), ("none", StoppedError), ("full", KeyboardInterrupt)],
)
def test_exception_passes_unchanged_and_the_base_is_restored(
    tmp_path: Path, precision: str, kind: type[BaseException]
) -> None:
    stop = kind("in the first step")
    model = load_base()
    before = Snapshot(model)

    def raise_it(model: nn.Module) -> None:
        raise stop

    with pytest.raises(kind) as caught, KbitPreparedModel(model, precision=precision) as prepared:  # noqa: PT012
        peft_model = adapt(model)
        trainer_for(peft_model, tmp_path, at_step_end=raise_it).train()

    assert caught.value is stop
    assert stop.__cause__ is None
    assert stop.__context__ is None
    assert prepared.state is LifecycleState.RESTORED
    peft_model.unload()
    assert before.diff(Snapshot(model), moved=precision == "full") == []


class CastingTrainer(RecordingTrainer):
    """Does to a PEFT model what TRL's trainers do: input gradients once more, and bfloat16 for what is trainable."""

    def __init__(self, model: peft.PeftModel, **kwargs: Any) -> None:
        model.enable_input_require_grads()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        super().__init__(model, **kwargs)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_trainer_that_casts_what_is_trainable_is_undone_too(tmp_path: Path, precision: str) -> None:
    model = load_base()
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision):
        run = train(model, tmp_path, modules_to_save=True, cls=CastingTrainer, bf16=True, **TRAINER["non-reentrant"])
        head = model.lm_head.original_module
        assert model.lm_head.modules_to_save.default.weight.dtype == torch.bfloat16
    run.model.unload()
    assert model.lm_head.weight.dtype == torch.bfloat16
    model.lm_head = head
    assert before.diff(Snapshot(model), moved=precision == "full") == []


# ----------------------------------------------------------------------------------------------------
# After the merge.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules_to_save", every_other([False, True]), ids=["lora", "lora-and-head"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_merged_model_is_that_of_a_base_never_prepared(tmp_path: Path, precision: str, modules_to_save: bool) -> None:
    model = load_base()
    with KbitPreparedModel(model, precision=precision):
        peft_model = train(model, tmp_path, modules_to_save=modules_to_save).model
        head = model.lm_head.modules_to_save.default.weight if modules_to_save else model.lm_head.weight
    adapter = peft.get_peft_model_state_dict(peft_model)
    adapter = {fqn: tensor.clone() for fqn, tensor in adapter.items()}
    merged = peft_model.merge_and_unload()

    never_prepared = adapt(load_base(), modules_to_save=modules_to_save)
    peft.set_peft_model_state_dict(never_prepared, adapter)
    expected = never_prepared.merge_and_unload()

    assert merged is model
    assert [fqn for fqn, p in merged.named_parameters() if p.dtype == torch.float32] == []
    assert merged.lm_head.weight is head
    assert head.dtype == torch.bfloat16
    found = saved(merged, tmp_path / "merged", "5GB")
    assert found == saved(expected, tmp_path / "expected", "5GB")
    assert "model.safetensors" in found
    merged.requires_grad_(False)
    assert not merged(**prompt(merged)).logits.requires_grad
    tokens = merged.generate(**prompt(merged), max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, expected.generate(**prompt(merged), max_new_tokens=8, do_sample=False))


def test_after_pefts_own_preparation_the_merged_model_is_another(tmp_path: Path) -> None:
    model = load_base()
    peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    merged = train(model, tmp_path).model.merge_and_unload()
    assert [fqn for fqn, p in merged.named_parameters() if p.dtype == torch.float32] != []
    merged.requires_grad_(False)
    assert merged(**prompt(merged)).logits.requires_grad
    size = len(saved(load_base(), tmp_path / "loaded", "5GB")["model.safetensors"])
    assert len(saved(merged, tmp_path / "merged", "5GB")["model.safetensors"]) > size


# ----------------------------------------------------------------------------------------------------
# Resuming, and DistributedDataParallel.
# ----------------------------------------------------------------------------------------------------


def test_resuming_needs_the_same_preparation(tmp_path: Path) -> None:
    whole = outcome(train_prepared(tmp_path, "full", save_strategy="steps", save_steps=NUM_STEPS // 2))
    checkpoint = tmp_path / f"checkpoint-{NUM_STEPS // 2}"

    def resumed(precision: str) -> tuple[list[float], dict[str, object]]:
        prepared = KbitPreparedModel(load_base(), precision=precision).prepare()
        trainer = trainer_for(adapt(prepared.model), tmp_path)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return outcome(trainer)

    assert resumed("full") == (whole[0][NUM_STEPS // 2 :], whole[1])
    assert resumed("none")[0] != whole[0][NUM_STEPS // 2 :]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone: what is synchronized does not depend on how many there are."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class SynchronizedModel:
    """A DDP model that records which parameters' gradients it synchronizes."""

    def __init__(self, model: peft.PeftModel) -> None:
        self.peft_model = model
        self.model = DistributedDataParallel(model)
        self.model.register_comm_hook(None, self._record)
        self.synchronized: set[int] = set()

    def _record(self, state, bucket):  # torch compares the annotations, and refuses postponed ones
        self.synchronized.update(id(parameter) for parameter in bucket.parameters())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def step(self) -> float:
        self.synchronized.clear()
        loss = self.model(**zoo.inputs("llama", self.peft_model)).loss
        loss.backward()
        return loss.item()

    def unsynchronized(self) -> set[str]:
        gradients = [(fqn, p) for fqn, p in self.peft_model.named_parameters() if p.grad is not None]
        return {fqn for fqn, p in gradients if id(p) not in self.synchronized}


@pytest.mark.usefixtures("process_group")
def test_ddp_synchronizes_no_base_parameter_after_a_restore() -> None:
    prepared = KbitPreparedModel(load_base()).prepare()
    ddp = SynchronizedModel(adapt(prepared.model))
    ddp.step()
    assert ddp.synchronized
    assert ddp.unsynchronized() == set()
    with prepared.suspended():
        ddp.peft_model.generate(**prompt(ddp.peft_model), max_new_tokens=8, do_sample=False)
    ddp.step()
    assert ddp.unsynchronized() == set()
    prepared.restore()
    ddp.step()
    base = {fqn for fqn, p in ddp.peft_model.named_parameters() if p.requires_grad and "lora_" not in fqn}
    assert base
    assert ddp.unsynchronized() == base


@pytest.mark.usefixtures("process_group")
def test_ddp_synchronizes_after_a_suspension_all_that_it_did_before_or_the_suspension_is_refused() -> None:
    for precision, retypes in (("norms", False), ("full", True)):
        prepared = KbitPreparedModel(load_base(), precision=precision).prepare()
        ddp = SynchronizedModel(adapt(prepared.model, modules_to_save=True))
        ddp.step()
        with pytest.raises(StateError, match="lm_head") if retypes else contextlib.nullcontext(), prepared.suspended():
            pass
        ddp.step()
        assert not ddp.unsynchronized()
