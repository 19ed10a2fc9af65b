"""What the base computes for a few tokens is recorded, changes nothing, and is compared when a run is resumed."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from transformers import (
    BigBirdConfig,
    BigBirdForMaskedLM,
    RwkvConfig,
    RwkvForCausalLM,
    Trainer,
    TrainingArguments,
)

from kbitwrap import KbitPreparedModel, Manifest, doctor
from kbitwrap.integrations import KbitTrainerCallback
from kbitwrap.tensors.bits import content_digest
from support import forks, zoo
from support.snapshot import Snapshot, tensor_digest
from support.trainers import EVERY_STEP, NAME, NUM_STEPS, adapt, load_base, outcome, train_prepared, trainer_for

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:fan_in_fan_out is set to False:UserWarning"),
]
SAID = "the base has the same bytes as in the first run, and computes other logits"


def lora(name: str, model: nn.Module, **fields: Any) -> nn.Module:
    return peft.get_peft_model(model, zoo.lora_config(name, **fields))


def of_prompts(name: str, model: nn.Module) -> nn.Module:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def by_transformers(name: str, model: nn.Module) -> nn.Module:
    zoo.adapt_by_transformers(model, zoo.lora_config(name))
    return model


def two_adapters(name: str, model: nn.Module) -> nn.Module:
    adapted: Any = lora(name, model)
    adapted.add_adapter("frozen", zoo.lora_config(name))
    return adapted


def prefixes_of_attention(name: str, model: nn.Module) -> nn.Module:
    config = peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


KINDS = {
    "LoRA": lora,
    "LoRA and a head": lambda name, model: lora(name, model, modules_to_save=True),
    "prompts": of_prompts,
    "transformers' own": by_transformers,
    "two adapters": two_adapters,
}


def begin(model: nn.Module, folder: Path, **fields: Any) -> str | None:
    """Return what the callback records of the logits when training begins; nothing of the model is changed."""
    callback = KbitTrainerCallback()
    args = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True, **fields)
    trainer = Trainer(model=model, args=args, callbacks=[callback])
    before, numbers = Snapshot(model), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    callback.on_train_begin(args, trainer.state, trainer.control, model=model)
    assert before.diff(Snapshot(model)) == []
    assert torch.equal(numbers[0], torch.get_rng_state())
    assert numbers[1] == random.getstate()
    assert (numbers[2] == np.random.get_state()[1]).all()
    logits: str | None = callback.state()["numerics"]["logits"]
    return logits


def logits_alone(model: Any, **inputs: Any) -> str:
    """Compute the digest by transformers alone, in train mode, in which nothing drops out here."""
    ids = torch.arange(16)[None]
    with torch.no_grad():
        return f"{content_digest(model.train()(input_ids=ids, **inputs).logits):016x}"


# ----------------------------------------------------------------------------------------------------
# What is recorded.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant", ["nf4", "int8", None])
def test_the_logits_are_those_of_the_base_whatever_adapts_it_and_computing_them_changes_nothing(
    quant: str | None, kind: str, tmp_path: Path
) -> None:
    model = KINDS[kind]("llama", load_base(quant)).train()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            parameter.data.fill_(0.1)
    assert begin(model, tmp_path) == begin(model, tmp_path) == logits_alone(load_base(quant))


@pytest.mark.parametrize("quant", ["nf4", "int8", None])
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "bert", "t5", "gemma2", "vit", "clip"])
def test_models_of_all_kinds_are_left_as_they_are_and_some_have_no_logits_of_tokens_alone(
    name: str, quant: str | None, tmp_path: Path
) -> None:
    found = begin(lora(name, zoo.load(name, quant)).train(), tmp_path)
    assert (found is None) == (name in ("vit", "clip"))
    if found is not None:
        alone = zoo.load(name, quant)
        inputs = {"decoder_input_ids": torch.arange(16)[None]} if name == "t5" else {}
        assert found == logits_alone(alone, **inputs)


def test_a_run_under_autocast_computes_them_under_autocast(tmp_path: Path) -> None:
    for half, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with torch.autocast("cpu", dtype):
            expected = logits_alone(load_base(None, torch.float32))
        assert begin(lora("llama", load_base(None, torch.float32)), tmp_path, **{half: True}) == expected
    plain = lora("llama", load_base(None, torch.float32))
    assert begin(plain, tmp_path) == logits_alone(load_base(None, torch.float32)) != expected


@pytest.mark.parametrize("quant", ["nf4", "int8", None])
@pytest.mark.parametrize("precision", ["none", "norms", "compute", "full"])
def test_a_prepared_model_computes_them_as_prepared_and_is_restored_as_ever(
    precision: str, quant: str | None, tmp_path: Path
) -> None:
    model = load_base(quant)
    before = Snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a model is not quantized
        prepared = KbitPreparedModel(model, precision=precision).prepare()
    adapted: Any = lora("llama", model)
    assert begin(adapted.train(), tmp_path) is not None
    adapted.unload()
    prepared.restore()
    assert before.diff(Snapshot(model), moved=True) == []


def test_there_are_none_where_the_base_is_trained_or_its_adapters_cannot_be_turned_off(tmp_path: Path) -> None:
    biased = lora("gpt2", zoo.load("gpt2"), bias="all")
    assert begin(biased, tmp_path) is None
    assert begin(prefixes_of_attention("llama", load_base()), tmp_path) is None


def of_rank(rank: int, join: forks.Join, folder: Path) -> None:
    model = lora("llama", load_base())
    alone = logits_alone(load_base())
    with join():
        trainer = trainer_for(
            model, folder, callbacks=[KbitTrainerCallback()], ddp_backend="gloo", per_device_train_batch_size=1
        )
        trainer.train()
        if rank == 0:
            assert Manifest.load(folder).logits == alone


def test_ranks_that_train_whole_models_record_them(tmp_path: Path) -> None:
    forks.run_ranks(of_rank, tmp_path)


# ----------------------------------------------------------------------------------------------------
# What training computes with the callback, and without.
# ----------------------------------------------------------------------------------------------------


def run(name: str, quant: str | None, folder: Path, callback: KbitTrainerCallback | None) -> tuple[list[float], Any]:
    """Train with dropout; return the losses, and what was trained."""
    torch.manual_seed(0)
    model = lora(name, zoo.load(name, quant), lora_dropout=0.1)
    batches = [zoo.inputs(name, model, seed=seed) for seed in range(NUM_STEPS)]
    rows = [{key: tensor[row] for key, tensor in batch.items()} for batch in batches for row in (0, 1)]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=NUM_STEPS, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[callback] if callback else [])
    trainer.train()
    losses = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return losses, {fqn: tensor_digest(p) for fqn, p in model.named_parameters()}


@pytest.mark.parametrize("quant", ["nf4", "int8", None])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit", "mixtral"])
def test_training_with_the_callback_is_that_without_bit_for_bit(name: str, quant: str | None, tmp_path: Path) -> None:
    alone, with_it = (run(name, quant, tmp_path, callback) for callback in (None, KbitTrainerCallback()))
    assert len(set(alone[0])) == NUM_STEPS
    assert with_it[0] == alone[0]
    assert list(with_it[1].values()) == list(alone[1].values())


def rwkv() -> nn.Module:
    """A model that divides weights, in place, where it runs in eval mode."""
    sizes = {"vocab_size": 100, "hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 64}
    return RwkvForCausalLM(RwkvConfig(num_hidden_layers=4, context_length=64, rescale_every=2, **sizes))


def big_bird() -> nn.Module:
    """A model that replaces its attention, for good, where a sequence is short."""
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sparse = {"intermediate_size": 64, "block_size": 4, "num_random_blocks": 1, "attention_type": "block_sparse"}
    return BigBirdForMaskedLM(BigBirdConfig(max_position_embeddings=512, **sizes, **sparse))


@pytest.mark.parametrize(("make", "targets"), [(rwkv, ["key", "value"]), (big_bird, ["query", "value"])])
def test_models_that_rewrite_themselves_when_they_run_are_left_as_they_are(
    make: Any, targets: list[str], tmp_path: Path
) -> None:
    model = peft.get_peft_model(make(), peft.LoraConfig(r=4, target_modules=targets)).train()
    classes = [type(module) for module in model.modules()]
    logits = begin(model, tmp_path)
    assert (logits is None) == (make is rwkv)
    assert [type(module) for module in model.modules()] == classes


def test_hooks_of_others_are_not_called(tmp_path: Path) -> None:
    model: Any = lora("llama", load_base()).train()
    called = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: called.append(args))
        module.register_forward_pre_hook(lambda *args: called.append(args))
    assert begin(model, tmp_path) == logits_alone(load_base())
    assert called == []
    model(input_ids=torch.arange(16)[None])
    assert called


# ----------------------------------------------------------------------------------------------------
# What a resume compares.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trainer_for(adapt(load_base()), tmp_path / "run", callbacks=[KbitTrainerCallback()], **EVERY_STEP).train()
    return tmp_path / "run" / "checkpoint-1"


def resume(model: nn.Module, checkpoint: Path, folder: Path) -> tuple[list[str], Any]:
    trainer = trainer_for(adapt(model), folder, callbacks=[KbitTrainerCallback()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert len(trainer.losses) == NUM_STEPS - 1
    return [str(one.message) for one in caught if SAID in str(one.message)], trainer


def of_other_kernels() -> nn.Module:
    """A base of the same bytes, whose activation is computed in another way."""
    model: Any = load_base()
    model.model.layers[0].mlp.act_fn = nn.GELU()
    return model


def rewrite(checkpoint: Path, **versions: str | None) -> None:
    """Record other versions with a checkpoint than it was trained with; ``None`` for none."""
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    recorded = state["stateful_callbacks"]["KbitTrainerCallback"]["numerics"]["versions"]
    for name, version in versions.items():
        if version is None:
            del recorded[name]
        else:
            recorded[name] = version
    path.write_text(json.dumps(state))


def test_a_resume_that_computes_the_same_says_nothing_whatever_the_versions(checkpoint: Path, tmp_path: Path) -> None:
    said, first = resume(load_base(), checkpoint, tmp_path / "same")
    rewrite(checkpoint, torch="2.0.0", transformers="5.0.0")
    also_said, second = resume(load_base(), checkpoint, tmp_path / "again")
    assert (said, also_said) == ([], [])
    assert outcome(first) == outcome(second)


def test_a_resume_that_computes_other_logits_says_so_once_names_what_changed_and_goes_on(
    checkpoint: Path, tmp_path: Path
) -> None:
    [said], _ = resume(of_other_kernels(), checkpoint, tmp_path / "kernels")
    assert said == (
        f"{SAID}: no library's version changed: the device, its kernels or threads, or the dtype of the run is "
        "another; training continues"
    )
    installed = Manifest.load(checkpoint).versions
    rewrite(checkpoint, torch="2.0.0", peft=None, python="3.0.0")
    [said], _ = resume(of_other_kernels(), checkpoint, tmp_path / "versions")
    assert said == (
        f"{SAID}: since then peft (not installed) became {installed['peft']}, torch 2.0.0 became "
        f"{installed['torch']}; training continues"
    )


def test_a_record_from_before_there_were_logits_is_resumed_without_a_word(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["KbitTrainerCallback"]["numerics"]
    path.write_text(json.dumps(state))
    assert resume(of_other_kernels(), checkpoint, tmp_path / "again")[0] == []


def test_a_run_that_was_prepared_is_compared_too(tmp_path: Path) -> None:
    train_prepared(tmp_path / "run", "compute", callbacks=[KbitTrainerCallback()], **EVERY_STEP)
    for model, number in ((load_base(), 0), (of_other_kernels(), 1)):
        prepared = KbitPreparedModel(model, precision="compute").prepare()
        assert len(resume(prepared.model, tmp_path / "run" / "checkpoint-1", tmp_path / "again")[0]) == number


# ----------------------------------------------------------------------------------------------------
# The manifest, and the doctor.
# ----------------------------------------------------------------------------------------------------


def test_the_manifest_keeps_them_and_they_are_no_difference(checkpoint: Path) -> None:
    manifest = Manifest.load(checkpoint)
    assert manifest.logits == logits_alone(load_base())
    data = json.loads((checkpoint / NAME).read_text())
    assert (data["version"], data["logits"]) == (2, manifest.logits)
    del data["logits"]
    older = Manifest.from_json(json.dumps(data))
    assert (older.logits, older.essence()) == (None, manifest.essence())
    assert not older.diff(manifest)


def test_the_doctor_says_which_versions_are_others_since(checkpoint: Path) -> None:
    def line() -> Any:
        [found] = [one for one in doctor(checkpoint).looked_at if one.what == "numerics"]
        assert found.outcome == "fine"
        return found.evidence

    manifest = Manifest.load(checkpoint)
    installed = manifest.versions["torch"]
    assert line().startswith(f"the base's logits were {manifest.logits}, with python")
    assert f"torch {installed}, " in line()
    assert line().endswith("; the same are installed")
    path = checkpoint / NAME
    path.write_text(path.read_text().replace(f'"torch": "{installed}"', '"torch": "2.0.0"'))
    assert line().endswith(f"; since then torch 2.0.0 became {installed}")
