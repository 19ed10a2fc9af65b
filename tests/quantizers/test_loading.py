"""Exports that no config describes: read by the page's program, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from transformers import PreTrainedModel

from cells import CELLS, DTYPE, Answer, pretrained
from kbitwrap import (
    ExportError,
    KbitPreparedModel,
    Precision,
    UnsupportedModelError,
    build_plan,
    convert_checkpoint,
    doctor,
    inspect_checkpoint,
    predict_step,
)
from support import pages, zoo
from support.merging import layers_of
from support.snapshot import Snapshot
from support.thorough import each_once
from support.training import adapt, is_checkpointing, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*let no gradient through:UserWarning"),  # test_peft.py has which they are
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning"),  # so it cannot merge
]

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
CONFIGS = [Int8WeightOnlyConfig, Float8WeightOnlyConfig]


def logits(model: nn.Module, architecture: str = "llama") -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**zoo.inputs(architecture, model)).logits


def read_again(folder: Path) -> PreTrainedModel:
    """The program by which the page reads an export of an HQQ model."""
    program = pages.program(PAGE, "HQQLinear")
    names: dict[str, object] = {}
    exec(program.replace('"run/base"', repr(str(folder))), names)
    model = names["model"]
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.mark.parametrize(("name", "architecture"), each_once(list(CELLS["hqq"]), ["llama", "opt"]))
def test_an_export_of_hqq_says_how_it_is_read_and_is_read_so(
    name: str, architecture: str, tmp_path: Path, answer: Answer
) -> None:
    model = CELLS["hqq"][name].load(architecture)
    prepared = KbitPreparedModel(model).prepare()
    with pytest.warns(UserWarning, match="does not tell that it is quantized with hqq") as caught:
        prepared.export(tmp_path / "export", max_shard_size=20_000)
    assert [warning.filename for warning in caught] == [__file__]
    prepared.restore()
    read = read_again(tmp_path / "export")
    expected, found = model.state_dict(), read.state_dict()
    assert found.keys() == expected.keys()
    for fqn, value in expected.items():
        assert torch.equal(found[fqn], value) if isinstance(value, torch.Tensor) else found[fqn] == value, fqn
    if architecture == "llama":
        read.model.rotary_emb.to(DTYPE)  # as HQQ's function does
    assert torch.equal(logits(read, architecture), logits(model, architecture))
    assert build_plan(read).quantization == "hqq"
    answer(f"hqq-{name}", "export", "read by a [program](export.md#models-that-hqq-quantized)")


@pytest.mark.parametrize(("config", "precision"), each_once(CONFIGS, list(Precision)))
def test_a_model_that_torchaos_function_quantized_is_prepared_as_one(
    config: Callable[[], object], precision: Precision, tmp_path: Path
) -> None:
    model = pretrained("llama")
    quantize_(model, config())
    expected, before = logits(model), Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision)
    assert prepared.plan.quantization == "torchao"
    assert not prepared.plan.casts
    prepared.prepare()
    assert is_checkpointing(model)
    peft_model = adapt("llama", model)
    prepared.adopt(peft_model)
    step("llama", peft_model)
    assert not prepared.verify()
    assert prepared.manifest().model.quantization.method == "torchao"
    with pytest.raises(ExportError, match="no quantizer of transformers made it") as caught:
        prepared.export(tmp_path / "export")
    assert caught.value.fqn == "model.layers.0.self_attn.q_proj.weight"
    assert not (tmp_path / "export").exists()
    report = prepared.export(tmp_path / "merged", merge_adapters=True)
    assert set(report.merged) == set(layers_of(peft_model))
    prepared.restore()
    assert peft_model.unload() is model
    assert before.diff(Snapshot(model)) == []
    assert torch.equal(logits(model), expected)


def test_a_model_that_quantos_own_function_quantized_is_prepared_as_one() -> None:
    from optimum.quanto import freeze, qint8, quantize

    model = pretrained("llama")
    quantize(model, weights=qint8)
    freeze(model)
    with KbitPreparedModel(model) as prepared:
        assert prepared.plan.quantization == "quanto"
        assert is_checkpointing(model)


SETTINGS = {
    "torchao": lambda: transformers.TorchAoConfig(Int8WeightOnlyConfig()),
    "quanto": lambda: transformers.QuantoConfig(weights="int8"),
    "hqq": lambda: transformers.HqqConfig(group_size=32),
}


@pytest.mark.parametrize("method", SETTINGS)
def test_a_step_with_weights_that_loading_would_replace_is_refused(method: str) -> None:
    folder, settings = str(zoo.checkpoint("llama")), SETTINGS[method]()
    with pytest.raises(UnsupportedModelError, match=f"quantized with {method}, which makes tensors of its own"):
        predict_step(folder, quantization_config=settings, batch_size=1, seq_len=8)


@pytest.mark.parametrize(
    ("method", "name"), [(m, n) for m, cells in CELLS.items() for n, cell in cells.items() if cell.is_serializable]
)
def test_no_float32_of_the_librarys_own_is_taken_for_a_leftover(method: str, name: str, tmp_path: Path) -> None:
    CELLS[method][name].load("llama").save_pretrained(tmp_path / "saved")
    assert not inspect_checkpoint(tmp_path / "saved")
    assert doctor(tmp_path / "saved").findings == ()
    report = convert_checkpoint(tmp_path / "saved", tmp_path / "converted", dtype="bfloat16")
    assert report.converted == ()
