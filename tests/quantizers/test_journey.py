"""On every method of quantization, a whole journey with the real library: what is restored and exported is as it was.

    pytest tests/quantizers -k torchao

Outside the test paths: it needs the libraries of the extra ``test-quantizers``, and none of them is skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import zoo
from cells import CELLS
from files import read
from kbitwrap import ExportError, KbitPreparedModel, Manifest, Precision
from snapshot import Snapshot
from training import adapt, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:restore.. made:UserWarning"),  # the adapter is on top while restoring
]

EVERY = [(method, name, precision) for method, cells in CELLS.items() for name in cells for precision in Precision]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**zoo.inputs("llama", model)).logits


def contents(folder: Path) -> dict[str, object]:
    """What files hold. The format writes a file's metadata, of which torchao has some, in any order."""
    found: dict[str, object] = {}
    for name, data in read(folder).items():
        if name.endswith(".safetensors"):
            end = 8 + int.from_bytes(data[:8], "little")
            found[name] = json.loads(data[8:end]), data[end:]
        else:
            found[name] = data
    return found


@pytest.mark.parametrize(("method", "name", "precision"), EVERY)
def test_a_journey(method: str, name: str, precision: Precision, tmp_path: Path) -> None:
    """Prepared, trained, suspended, verified, resumed elsewhere, exported and restored."""
    cell = CELLS[method][name]
    model = cell.load()
    if cell.is_serializable:
        model.save_pretrained(tmp_path / "whole")
        whole = contents(tmp_path / "whole")
    expected = logits(model)
    before = Snapshot(model)

    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt("llama", model)
    prepared.adopt(peft_model)
    for seed in range(2):
        _, gradients = step("llama", peft_model, seed=seed)
        assert gradients
        assert all(gradient.any() and gradient.isfinite().all() for gradient in gradients.values())
    with prepared.suspended(), peft_model.disable_adapter():
        assert torch.equal(logits(peft_model), expected)
    assert not prepared.verify()

    prepared.manifest().save(tmp_path / "kbitwrap.json")
    manifest = Manifest.load(tmp_path / "kbitwrap.json")
    assert not any(tensor.tie_group for tensor in manifest.tensors.values())
    with KbitPreparedModel.from_manifest(cell.load(), manifest) as resumed:
        assert resumed.config == prepared.config

    if cell.is_serializable:
        prepared.export(tmp_path / "exported")
        assert contents(tmp_path / "exported") == whole
    else:
        with pytest.raises(ExportError, match=method):
            prepared.export(tmp_path / "exported")
        assert not (tmp_path / "exported").exists()

    prepared.restore()
    assert peft_model.unload() is model
    restored = Snapshot(model)
    assert before.diff(restored, moved=precision.upcasts_all) == []
    assert torch.equal(logits(model), expected)
