"""What others did to a prepared model: export, manifest, verify and the report of a restore say the same of it."""

import gc
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor

import kbitwrap
from kbitwrap import ExportError, KbitPreparedModel, ManifestError, RestoreReport, UnsupportedModelError
from support.snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PRECISIONS = ("full", "compute", "norms", "none")


def block() -> nn.Sequential:
    """An embedding, a norm, a linear layer, an activation and a head that is not tied."""
    torch.manual_seed(0)
    layers = nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8, bias=False)
    return nn.Sequential(*layers).bfloat16()


def replaced(prepared: KbitPreparedModel, path: Any) -> tuple[str, ...]:
    """What the report says was replaced, where export, manifest and verify name it too."""
    differences = prepared.verify().differences
    with pytest.raises(ExportError) as refused:
        prepared.export(path / "base")
    with pytest.raises(ManifestError) as unmade:
        prepared.manifest()
    report = prepared.restore()
    assert refused.value.fqn == unmade.value.fqn
    assert refused.value.fqn in report.replaced
    assert set(report.replaced) <= differences.keys()
    assert report.trained == ()
    return report.replaced


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_frozen_weight_that_changed_is_named_by_all(precision: str, tmp_path: Any) -> None:
    model = block()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    with torch.no_grad():
        model[1].weight[3] += 1
    assert replaced(prepared, tmp_path) == ("1.weight",)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_that_was_tied_to_another_is_replaced(precision: str, tmp_path: Any) -> None:
    model = block()
    model[0].weight = nn.Parameter(torch.randn(8, 8).bfloat16())
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    model[4].weight = model[0].weight
    assert replaced(prepared, tmp_path) == ("4.weight",)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_trainable_weight_of_another_shape_stays_trainable(precision: str, tmp_path: Any) -> None:
    model = block().requires_grad_(False)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    model[4].weight = nn.Parameter(torch.zeros(9, 8).bfloat16())
    assert replaced(prepared, tmp_path) == ("4.weight",)
    assert [fqn for fqn, p in model.named_parameters() if p.requires_grad] == ["4.weight"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_second_name_of_a_modules_own_weight_is_no_replacement_and_is_not_exported(
    precision: str, tmp_path: Any
) -> None:
    model = block()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    manifest = prepared.manifest()
    layer = next(module for module in model if isinstance(module, nn.Linear))
    layer.register_parameter("second", layer._parameters["weight"])
    assert not prepared.verify()
    assert not manifest.diff(prepared.manifest())
    prepared.export(tmp_path / "base")
    assert load_file(tmp_path / "base" / "model.safetensors").keys() == manifest.tensors.keys()
    assert prepared.restore().replaced == ()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_that_is_made_of_others_in_another_dtype_is_replaced(precision: str, tmp_path: Any) -> None:
    model = block()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    parts = [model[1].weight.detach().to(torch.float64) for _ in range(2)]
    model[1].weight = nn.Parameter(TwoTensor(*parts), requires_grad=False)
    assert replaced(prepared, tmp_path) == ("1.weight",)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parameter_that_was_taken_away_is_replaced(precision: str, tmp_path: Any) -> None:
    model = block()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    model[2].bias = None
    assert replaced(prepared, tmp_path) == ("2.bias",)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parametrized_weight_is_replaced(precision: str, tmp_path: Any) -> None:
    model = block()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    parametrize.register_parametrization(model[2], "weight", nn.Identity())
    assert replaced(prepared, tmp_path) == ("2.weight",)


def test_a_module_without_parameters_is_no_part_of_the_base(tmp_path: Any) -> None:
    model = block()
    prepared = KbitPreparedModel(model).prepare()
    model[3] = nn.ReLU()
    gc.collect()
    prepared.export(tmp_path / "base")
    prepared.manifest()
    assert not prepared.verify()
    assert prepared.restore() == RestoreReport((), (), ())


@pytest.mark.parametrize(("is_saved", "named"), [(True, ("3.steps",)), (False, ())])
def test_a_buffer_that_the_model_wrote_is_reported_where_a_checkpoint_holds_it(
    is_saved: bool, named: tuple[str, ...]
) -> None:
    model = block()
    model[3].register_buffer("steps", torch.zeros(2), persistent=is_saved)
    prepared = KbitPreparedModel(model).prepare()
    model[3].steps += 1
    assert prepared.restore().trained == named


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: nn.Parameter(torch.eye(4).to_sparse()), "torch.sparse_coo"),
        (lambda: nn.Parameter(torch.eye(4).bfloat16().to_sparse_csr()), "torch.sparse_csr"),
        (lambda: nn.Parameter(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])), "nested"),
        (nn.UninitializedParameter, "not initialized"),
    ],
)
def test_a_tensor_without_its_own_memory_is_refused_by_name(make: Any, what: str) -> None:
    model = block()
    model[2].weight = make()
    for refuse in (KbitPreparedModel, kbitwrap.build_plan, kbitwrap.prepare_model_for_kbit_training):
        with pytest.raises(UnsupportedModelError, match=what) as error:
            refuse(model)
        assert error.value.fqn == "2.weight"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_made_in_inference_mode_is_refused_by_name_and_left_as_it_was(precision: str) -> None:
    with torch.inference_mode():
        model = block()
    before = Snapshot(model)
    for refuse in (KbitPreparedModel, kbitwrap.build_plan, kbitwrap.prepare_model_for_kbit_training):
        with pytest.raises(UnsupportedModelError, match="inference_mode") as error:
            refuse(model, precision=precision)
        assert error.value.fqn == "0.weight"
    assert not before.diff(Snapshot(model))


@pytest.mark.parametrize("precision", ["norms", "none"])
def test_a_bias_that_bitsandbytes_cast_in_inference_mode_is_no_reason_to_refuse(precision: str) -> None:
    model = block()
    model[2] = Linear4bit(8, 8, compute_dtype=torch.float16).to("cpu")
    model[2].bias.data = model[2].bias.data.bfloat16()
    with torch.inference_mode():
        model[2](torch.ones(1, 8).half())
    assert model[2].bias.is_inference()
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision, gradient_checkpointing=False):
        pass
    assert before.diff(Snapshot(model)) == []
