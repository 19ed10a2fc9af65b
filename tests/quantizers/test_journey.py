"""On every method of quantization, a whole journey with the real library: what is restored and exported is as it was.

    pytest tests/quantizers -k torchao

Outside the test paths: it needs the libraries of the extra ``test-quantizers``, and none of them is skipped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from cells import CELLS, DTYPE, Answer, Cell, compressed_tensors, pretrained
from kbitwrap import ExportError, KbitPreparedModel, Manifest, ManifestError, Precision
from support import zoo
from support.files import read, tensors_of
from support.merging import assert_rounded_once, layers_of
from support.snapshot import Snapshot, tensor_digest
from support.thorough import few
from support.training import adapt, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*let no gradient through:UserWarning"),  # test_peft.py has which they are
    pytest.mark.filterwarnings("ignore:the config of this .* does not tell that it is quantized with hqq:UserWarning"),
    # By transformers, of every model that was given a device and is on the CPU, where its method asks accelerate.
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning"),
]

NAMES = [(method, name) for method, cells in CELLS.items() for name in cells]
EVERY = [(*name, precision, "llama") for name in NAMES for precision in Precision]
# With biases, and a head that is tied. Two do not train there, prepared or not: PEFT adds to AQLM's output in place,
# and Gemma's layers let no gradient through to all that is adapted in front of them.
TIED = [method for method in CELLS if method not in ("aqlm", "gemma")]
EVERY += [(method, next(iter(CELLS[method])), Precision.NORMS, "opt") for method in TIED]
# The default, and another precision with each.
ANOTHER = [precision for precision in Precision if precision is not Precision.NORMS]
CHOSEN = [(*name, ANOTHER[i % len(ANOTHER)], "llama") for i, name in enumerate(NAMES)]
CHOSEN += [case for case in EVERY if case[2] is Precision.NORMS]


def logits(model: nn.Module, architecture: str) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**zoo.inputs(architecture, model)).logits


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


def has_merged(cell: Cell, architecture: str, peft_model: nn.Module, folder: Path) -> bool:
    """Whether a checkpoint is the plain model: W + s B A (Hu et al. 2021) for the library's own W, and all else."""
    expected = pretrained(architecture)
    plain, info = type(expected).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert not hasattr(plain.config, "quantization_config")
    base = cell.load(architecture).named_modules()
    weights = {f"{fqn}.weight": cell.dequantize(m).double() for fqn, m in base if cell.is_quantized(m)}
    assert weights
    exact = {f"{fqn}.weight": layer for fqn, layer in layers_of(peft_model).items()}
    found, original = plain.state_dict(), expected.state_dict()
    assert found.keys() == original.keys()
    for fqn, tensor in found.items():
        assert tensor.dtype == DTYPE
        if fqn in exact:
            a, b = (exact[fqn].get_submodule(f"lora_{x}.default").weight.detach().double() for x in "AB")
            assert_rounded_once(tensor, weights[fqn] + (b @ a) * exact[fqn].scaling["default"])
        else:
            assert torch.equal(tensor, weights.get(fqn, original[fqn]).to(DTYPE)), fqn
    return True


@pytest.mark.parametrize(("method", "name", "precision", "architecture"), few(EVERY, CHOSEN))
def test_a_journey(
    method: str, name: str, precision: Precision, architecture: str, tmp_path: Path, answer: Answer
) -> None:
    """Prepared, trained, suspended, verified, resumed elsewhere, exported and restored."""
    cell = CELLS[method][name]
    model = cell.load(architecture)
    if cell.is_serializable:
        model.save_pretrained(tmp_path / "whole")
        whole = contents(tmp_path / "whole")
    expected = logits(cell.load(architecture), architecture)  # some layers repack their weights when they first run
    before = Snapshot(model)

    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt(architecture, model)
    prepared.adopt(peft_model)
    for seed in range(2):
        _, gradients = step(architecture, peft_model, seed=seed)
        assert gradients
        assert all(gradient.any() and gradient.isfinite().all() for gradient in gradients.values())
    with prepared.suspended(), peft_model.disable_adapter():
        assert torch.equal(logits(peft_model, architecture), expected)
    assert not prepared.verify()

    prepared.manifest().save(tmp_path / "kbitwrap.json")
    manifest = Manifest.load(tmp_path / "kbitwrap.json")
    tied = {fqn for fqn, tensor in manifest.tensors.items() if tensor.tie_group is not None}
    assert tied == ({"model.decoder.embed_tokens.weight", "lm_head.weight"} if architecture == "opt" else set())
    with KbitPreparedModel.from_manifest(cell.load(architecture), manifest) as resumed:
        assert resumed.config == prepared.config

    if cell.is_serializable:
        prepared.export(tmp_path / "exported")
        assert contents(tmp_path / "exported") == whole
    else:
        with pytest.raises((TypeError, ValueError)) as refused:
            cell.load(architecture).save_pretrained(tmp_path / "whole")
        with pytest.raises(ExportError, match=re.escape(str(refused.value))):
            prepared.export(tmp_path / "exported")
        assert not (tmp_path / "exported").exists()
    if cell.can_merge:
        report = prepared.export(tmp_path / "merged", merge_adapters=True)
        assert set(report.merged) == set(layers_of(peft_model))
        assert has_merged(cell, architecture, peft_model, tmp_path / "merged")
        merged = {fqn: tensor_digest(tensor) for fqn, tensor in tensors_of(tmp_path / "merged").items()}
        assert {fqn: tensor_digest(tensor) for fqn, tensor in prepared.merged_weights()} == merged
        for form in ("mixed", "quantized"):
            with pytest.raises(ExportError, match=rf"merge_as: '{form}'.*quantized with {method}; merge it as 'half'"):
                prepared.export(tmp_path / form, merge_adapters=True, merge_as=form)
    else:
        with pytest.raises(ExportError, match=rf"quantized with {method}.*export without merging"):
            prepared.export(tmp_path / "merged", merge_adapters=True)
        assert not (tmp_path / "merged").exists()

    prepared.restore()
    assert peft_model.unload() is model
    for module in model.modules():
        for left in cell.left:
            module._parameters.pop(left, None)
    ignored = [f": {left}" for left in cell.left]
    assert before.diff(Snapshot(model), moved=precision.upcasts_all, ignore=ignored) == []
    assert torch.equal(logits(model, architecture), expected)

    row = f"{method}-{name}"
    answer(row, "block", f"`{precision}`")
    answer(row, "export", "as `save_pretrained`" if cell.is_serializable else "refused, as by `save_pretrained`")
    answer(row, "merged export", "yes" if cell.can_merge else "refused by name")


if "compressed-tensors" in CELLS:

    def test_what_decompressed_a_model_since_it_was_prepared_is_named_with_the_way_out(tmp_path: Path) -> None:
        load = compressed_tensors(has_run=False)
        prepared = KbitPreparedModel(load("llama")).prepare()
        prepared.manifest().check(load("llama"))
        plain = {fqn: tensor.clone() for fqn, tensor in prepared.merged_weights()}
        logits(prepared.model, "llama")
        message = r"decompressed by its library when the model ran.*run the model before it is prepared"
        with pytest.raises(ManifestError, match=message) as caught:
            prepared.manifest()
        assert caught.value.fqn == "model.layers.0.self_attn.q_proj.weight_packed"
        with pytest.raises(ExportError, match=message):
            prepared.export(tmp_path / "exported")
        assert "model.layers.0.self_attn.q_proj.weight_packed" in prepared.restore().replaced
        layer = prepared.model.model.layers[0].self_attn.q_proj
        assert torch.equal(plain["model.layers.0.self_attn.q_proj.weight"], layer.weight)
