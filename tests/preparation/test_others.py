"""What restore leaves other than it was, in dtype, flag, hook or value, it has put back or names in its report."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from kbitwrap import KbitPreparedModel, Precision, RestoreReport
from support import zoo
from support.snapshot import Snapshot
from support.training import adapt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PRECISIONS = tuple(Precision)
REENTRANT = {"use_reentrant": True}
NORM = "model.norm.weight"


def make_inputs_require_grad(module: nn.Module, args: Any, output: Any) -> None:
    """A user's hook, of the name of PEFT's."""


def names_in(report: RestoreReport) -> set[str]:
    return {name for names in report.to_dict().values() for name in names}


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_pefts_function_inside_the_block_is_taken_back(precision: Precision, quantization: str | None) -> None:
    model = zoo.load("llama", quantization)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=REENTRANT)
    differences = prepared.verify().differences
    with prepared.suspended():
        assert before.diff(Snapshot(model), moved=True) == []
    report = prepared.restore()
    assert before.diff(Snapshot(model), moved=True) == []
    cast = {fqn for fqn, what in differences.items() if "dtype" in what}
    assert cast or precision is Precision.FULL
    assert set(report.put_back) == cast
    assert (report.trained, report.replaced, report.foreign) == ((), (), ())


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_a_part_that_others_cast_gets_its_dtype_and_its_bits(precision: Precision) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision) as prepared:
        model.model.layers[0].float()
        model.model.norm.double()
    assert before.diff(Snapshot(model), moved=True) == []
    is_stored_upcast = precision in (Precision.FULL, Precision.COMPUTE)
    assert (NORM in prepared.restore().put_back) is not is_stored_upcast


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_a_cast_that_loses_values_is_named(precision: str) -> None:
    model = zoo.load("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(1e-30)  # no float16
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    model.model.norm.half()
    report = prepared.restore()
    assert NORM in report.replaced


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_a_base_that_others_cast_and_trained_is_rounded_and_named(precision: str) -> None:
    model = zoo.load("llama", None)
    prepared = KbitPreparedModel(model, precision=precision, freeze=False).prepare()
    model.float()
    prepared.verify()  # finds what was cast
    with torch.no_grad():
        model.model.norm.weight.add_(0.3)
    report = prepared.restore()
    assert report.trained == (NORM,)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_adapters_from_before_that_others_froze_are_named(precision: str) -> None:
    model = zoo.load("llama")
    peft_model = adapt("llama", model)
    prepared = KbitPreparedModel(peft_model, precision=precision).prepare()
    peft.prepare_model_for_kbit_training(peft_model)
    report = prepared.restore()
    frozen = {name for name, p in peft_model.named_parameters() if "lora_" in name and not p.requires_grad}
    assert frozen
    assert frozen <= set(report.foreign)
    assert peft_model.get_parameter("base_model.model.model.norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["full", "norms"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_hook_is_the_users_whatever_its_functions_name(is_before: bool, precision: str) -> None:
    model = zoo.load("llama")
    embeddings = model.get_input_embeddings()
    settings = {"precision": precision, "gradient_checkpointing_kwargs": REENTRANT}
    handle = embeddings.register_forward_hook(make_inputs_require_grad) if is_before else None
    prepared = KbitPreparedModel(model, **settings).prepare()
    assert len(embeddings._forward_hooks) == 1 + is_before  # the preparation's own beside it
    if handle is None:
        handle = embeddings.register_forward_hook(make_inputs_require_grad)
    with prepared.suspended():
        assert [*embeddings._forward_hooks] == [handle.id]
    report = prepared.restore()
    assert [*embeddings._forward_hooks] == [handle.id]
    added = () if is_before else ("model.embed_tokens: forward hook make_inputs_require_grad",)
    assert report.foreign == added


def test_a_hook_that_was_removed_is_named() -> None:
    model = zoo.load("llama")
    handle = model.lm_head.register_forward_hook(make_inputs_require_grad)
    prepared = KbitPreparedModel(model).prepare()
    handle.remove()
    assert prepared.restore().foreign == ("lm_head: forward hook make_inputs_require_grad was removed",)


class Enabling(nn.Module):
    """A model whose own method installs a hook of the name of transformers'."""

    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.gradient_checkpointing = True

    def enable_input_require_grads(self) -> None:
        def make_inputs_require_grads(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.requires_grad_(True)

        self.embedding.register_forward_hook(make_inputs_require_grads)


def test_the_hook_that_a_models_own_method_installs_for_a_preparation_is_removed() -> None:
    model = Enabling().bfloat16()
    model.is_loaded_in_4bit = True
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, gradient_checkpointing_kwargs=REENTRANT).prepare()
    assert len(model.embedding._forward_hooks) == 1
    report = prepared.restore()
    assert before.diff(Snapshot(model), moved=True) == []
    assert names_in(report) == set()


@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_saving_the_base_while_prepared_leaves_no_dtype_in_its_config(precision: str) -> None:
    model = zoo.load("llama")
    before = model.config.dtype
    with KbitPreparedModel(model, precision=precision) as prepared, tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        with prepared.suspended():
            assert model.config.dtype == before
    assert model.config.dtype == before
    assert type(model.config.dtype) is type(before)


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_running_statistics_that_a_forward_changed_are_named(precision: str) -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)).bfloat16().train()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    model.float()(torch.randn(2, 2, 3))
    assert prepared.restore().trained == ("1.num_batches_tracked",)  # the others were cast, and so put back
    prepared.prepare()
    model[1].running_mean.add_(1)
    assert prepared.restore().trained == ("1.running_mean",)


def test_a_copy_of_a_module_that_others_cast_gets_the_original_dtype() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    peft.prepare_model_for_kbit_training(model)
    peft_model = adapt("llama", model, modules_to_save=True)
    copied = peft_model.base_model.model.lm_head.modules_to_save.default.weight
    assert copied.dtype == torch.float32
    report = prepared.restore()
    assert copied.dtype == torch.bfloat16
    assert "lm_head.weight" in report.trained
    peft_model(**zoo.inputs("llama", model)).loss.backward()


@pytest.mark.filterwarnings("error:save_pretrained writes")
def test_a_save_of_float32_copies_warns_and_names_export(tmp_path: Path) -> None:
    model = zoo.load("llama", "nf4")
    with KbitPreparedModel(model, precision="full") as prepared:
        for saved in (model, copy.deepcopy(model)):
            with pytest.warns(UserWarning, match=r"stored in float32 .* export"):
                saved.save_pretrained(tmp_path / "float32")
        with prepared.suspended():
            model.save_pretrained(tmp_path / "suspended")
        peft_model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        peft_model.save_pretrained(tmp_path / "adapter")
        peft_model.unload()
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path / "restored")
    with KbitPreparedModel(model, precision="norms"):
        model.save_pretrained(tmp_path / "norms")
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("suspended", "restored", "norms")]
    assert len(set(written)) == 1
    assert (tmp_path / "float32/model.safetensors").stat().st_size > len(written[0])


def test_a_part_that_others_cast_after_it_was_trained_is_suspended_in_its_dtype() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    norm = model.model.norm
    with torch.no_grad():
        norm.weight.mul_(1.5)
    norm.float()
    with prepared.suspended():
        assert norm.weight.dtype == torch.bfloat16
    assert norm.weight.dtype == torch.float32
    prepared.restore()
    assert norm.weight.dtype == torch.bfloat16
