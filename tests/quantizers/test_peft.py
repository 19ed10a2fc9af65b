"""The drop-in, `Trainer` and moves, on every method of quantization with the real library."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers

import kbitwrap
from cells import CELLS, Answer, pretrained
from kbitwrap import KbitPreparedModel, LifecycleState, Manifest, UnsupportedModelError, build_plan
from kbitwrap.integrations import KbitTrainerCallback
from support import zoo
from support.snapshot import Snapshot
from support.training import adapt, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*let no gradient through:UserWarning"),  # LOSING_GRADIENTS
    # PEFT's function leaves it to torch's default.
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning"),
]

EVERY = [(method, name) for method, cells in CELLS.items() for name in cells]
LOSING_GRADIENTS = {"int8-dynamic-activation", "int8-dynamic-activation-int4", "static-8-bit"}
# By transformers, prepared or not. Of torchao, it lets train what has an 8 before "weight" in the name of its class.
REFUSED_BY_TRAINER = {"int4-in-int8-weight-only", "int8-dynamic-activation-int4", "static-8-bit"}


def unmarked() -> transformers.PreTrainedModel:
    """A model that torchao's own function quantized, which leaves no attribute that tells of it."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = pretrained("llama")
    quantize_(model, Int8WeightOnlyConfig())
    return model


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")  # so it cannot merge
@pytest.mark.parametrize(("method", "name"), [*EVERY, *([("torchao", "unmarked")] if "torchao" in CELLS else [])])
def test_the_drop_in_trains_as_pefts_function_or_refuses_with_the_way_out(
    method: str, name: str, answer: Answer
) -> None:
    load = unmarked if name == "unmarked" else partial(CELLS[method][name].load, "llama")
    if method == "quanto":
        _refuses_quanto(load())
        answer(f"{method}-{name}", "drop-in", "refused: PEFT raises half-way")
        return
    found = []
    for function in (peft.prepare_model_for_kbit_training, kbitwrap.prepare_model_for_kbit_training):
        model = load()
        peft_model = adapt("llama", function(model))
        found.append([step("llama", peft_model, seed=seed) for seed in range(2)])
    for (loss, gradients), (expected_loss, expected) in zip(*found, strict=True):
        assert torch.equal(loss, expected_loss)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradient, expected[fqn]) for fqn, gradient in gradients.items())
    kbitwrap.restore(model)
    model.to("cpu")
    if load is not unmarked:
        answer(f"{method}-{name}", "drop-in", "as PEFT")


def _refuses_quanto(model: transformers.PreTrainedModel) -> None:
    """PEFT's function raises half-way."""
    before = Snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"of quanto.*KbitPreparedModel\(model\) prepares it") as caught:
        kbitwrap.prepare_model_for_kbit_training(model)
    assert caught.value.fqn == "model.layers.0.self_attn.q_proj.weight"
    assert before.diff(Snapshot(model)) == []


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_it_is_said_where_no_gradient_comes_through(method: str, name: str) -> None:
    model = CELLS[method][name].load("llama")
    before = Snapshot(model)
    warned = _losing(model)
    assert len(warned) == (name in LOSING_GRADIENTS)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        prepared = KbitPreparedModel(model).prepare()
    prepared.restore()
    assert [str(warning.message) for warning in heard] == warned
    assert before.diff(Snapshot(model)) == []
    layer = model.model.layers[0].mlp.gate_proj
    row = torch.ones(1, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
    output = layer(row)
    has_gradient = output.requires_grad and bool(torch.autograd.grad(output.sum(), row)[0].any())
    assert has_gradient == (not warned)


def _losing(model: torch.nn.Module) -> list[str]:
    return [warning for warning in build_plan(model).warnings if "let no gradient through" in warning]


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
def test_bitnets_packed_layer_is_said_to_let_no_gradient_through() -> None:
    from transformers.integrations.bitnet import BitLinear

    model = pretrained("llama")
    assert _losing(model) == []
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = BitLinear(mlp.gate_proj.in_features, mlp.gate_proj.out_features, bias=False, dtype=torch.bfloat16)
    (warning,) = _losing(model)
    assert warning.startswith("model.layers.0.mlp.gate_proj, and layers like it, let no gradient through")


if "gemma" in CELLS:

    def test_gemmas_layers_whose_steps_are_zero_let_gradients_through() -> None:
        model = CELLS["gemma"]["static-8-bit"].load("llama")
        assert len(_losing(model)) == 1
        for fqn, parameter in model.named_parameters():
            if fqn.endswith("activation_scale"):
                parameter.data.zero_()
        assert _losing(model) == []


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_a_model_moves_while_it_is_prepared_and_after(method: str, name: str) -> None:
    model = CELLS[method][name].load("llama")
    with KbitPreparedModel(model) as prepared:
        peft_model = adapt("llama", model)
        step("llama", peft_model)
        assert model.to("cpu") is model
        peft_model.to(torch.device("cpu"))
        assert not prepared.verify()
        prepared.manifest().check(model)
    report = prepared.restore()
    assert report.replaced == report.trained == ()
    assert model.to("cpu") is model


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_trainer_trains_with_the_callback_and_resumes(method: str, name: str, tmp_path: Path, answer: Answer) -> None:
    def trainer(model: torch.nn.Module) -> transformers.Trainer:
        batch = {key: value.tolist() for key, value in zoo.inputs("llama", model).items()}
        data = [{key: rows[i] for key, rows in batch.items()} for i in range(2)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
        )
        return transformers.Trainer(model, arguments, train_dataset=data, callbacks=[KbitTrainerCallback()])

    if name in REFUSED_BY_TRAINER:
        with pytest.raises(ValueError, match="do not support training"):
            trainer(adapt("llama", CELLS[method][name].load("llama")))
        answer(f"{method}-{name}", "Trainer", "refused by transformers")
        return
    losses = []
    for checkpoint in (None, str(tmp_path / "checkpoint-1")):
        model = CELLS[method][name].load("llama")
        with KbitPreparedModel(model) as prepared:
            losses.append(trainer(adapt("llama", model)).train(resume_from_checkpoint=checkpoint).training_loss)
            assert not prepared.verify()
        assert prepared.state is LifecycleState.RESTORED
    assert losses[0] > losses[1] > 0  # of two steps, and of the second alone
    answer(f"{method}-{name}", "Trainer", "yes")

    # what nothing prepares is recorded too
    logits = set()
    for checkpoint in (None, str(tmp_path / "checkpoint-1")):
        trainer(adapt("llama", CELLS[method][name].load("llama"))).train(resume_from_checkpoint=checkpoint)
        manifest = Manifest.load(tmp_path / "checkpoint-2")
        manifest.check(CELLS[method][name].load("llama"))
        logits.add(manifest.logits)
    assert len(logits) == 1
    assert None not in logits
