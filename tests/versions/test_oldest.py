"""A whole journey with the oldest transformers that is supported, and the PEFT and bitsandbytes of its day.

    pip install -c .ci/constraints-oldest.txt -e ".[test]" && pytest tests/versions

Outside the test paths: the other tests need what newer versions have.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import nn

import kbitwrap
from kbitwrap import ExportError, KbitPreparedModel, Manifest, Precision
from support import zoo
from support.files import read, saved, tensors_of
from support.snapshot import Snapshot, tensor_digest
from support.thorough import each_once, few
from support.training import adapt, step

ARCHITECTURES = ("llama", "opt", "gemma2", "mixtral")  # plain; with biases; tied and scaled; with stacks of experts
QUANTS = ("nf4", "int8")
DTYPE = torch.bfloat16

pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # That bitsandbytes calls a function of torch that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:_check_is_size will be removed:FutureWarning"),
    # Reentrant checkpointing without the hook of PEFT's function, which is compared here: it has no gradients either.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]


def logits(name: str, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**zoo.inputs(name, model)).logits


def test_the_versions_are_the_oldest() -> None:
    assert transformers.__version__.startswith("4.56.")


# By default every quantization in every precision, each with the next architecture.
EVERY = list(itertools.product(ARCHITECTURES, QUANTS, Precision))
CHOSEN = [(ARCHITECTURES[i % 4], *values) for i, values in enumerate(itertools.product(QUANTS, Precision))]


@pytest.mark.parametrize(("name", "quant", "precision"), few(EVERY, CHOSEN))
def test_a_journey(name: str, quant: str, precision: Precision, tmp_path: Path) -> None:
    """Prepared, trained, suspended, verified, resumed elsewhere, exported, merged and restored."""
    model = zoo.load(name, quant, DTYPE)
    whole = saved(model, tmp_path / "whole", "5GB")
    expected = logits(name, model)
    before = Snapshot(model)

    prepared = KbitPreparedModel(model, precision=precision, **zoo.fields(name)).prepare()
    peft_model = adapt(name, model)
    prepared.adopt(peft_model)
    _, gradients = step(name, peft_model)
    assert gradients
    assert all(gradient.any() and gradient.isfinite().all() for gradient in gradients.values())
    with prepared.suspended(), peft_model.disable_adapter():
        assert torch.equal(logits(name, peft_model), expected)
    assert not prepared.verify()

    prepared.manifest().save(tmp_path / "kbitwrap.json")
    manifest = Manifest.load(tmp_path / "kbitwrap.json")
    with KbitPreparedModel.from_manifest(zoo.load(name, quant, DTYPE), manifest) as resumed:
        assert resumed.config == prepared.config
    prepared.export(tmp_path / "exported")
    assert read(tmp_path / "exported") == whole
    prepared.export(tmp_path / "merged", merge_adapters=True)
    merged = type(model).from_pretrained(tmp_path / "merged", dtype="auto")
    assert {parameter.dtype for parameter in merged.parameters()} == {DTYPE}
    written = {fqn: tensor_digest(tensor) for fqn, tensor in tensors_of(tmp_path / "merged").items()}
    assert {fqn: tensor_digest(tensor) for fqn, tensor in prepared.merged_weights()} == written

    prepared.restore()
    assert peft_model.unload() is model
    vars(model).pop("peft_config", None)  # that PEFT leaves it
    assert before.diff(Snapshot(model), moved=precision.upcasts_all) == []
    assert torch.equal(logits(name, model), expected)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("lm_head", "T5ForConditionalGeneration.forward computes something else where tie_word_embeddings is false"),
        ("shared", "the module is encoder.embed_tokens too, and is not adapted there"),
    ],
)
def test_a_merge_that_no_checkpoint_of_this_version_can_hold_is_refused(
    module: str, message: str, tmp_path: Path
) -> None:
    model = zoo.load("t5", None, torch.float32)
    config = peft.LoraConfig(target_modules=["q"], modules_to_save=[module])
    adapted = peft.get_peft_model(model, config)
    _, gradients = step("t5", adapted)
    assert gradients
    wrapper = KbitPreparedModel(model, gradient_checkpointing=False)
    with pytest.raises(ExportError, match=message):
        wrapper.export(tmp_path / "merged", merge_adapters=True, model=adapted)


@pytest.mark.parametrize(("name", "quant", "reentrant"), each_once(ARCHITECTURES, QUANTS, [True, False]))
def test_the_drop_in_gives_pefts_numbers(name: str, quant: str, reentrant: bool) -> None:
    results = []
    for prepare in (peft.prepare_model_for_kbit_training, kbitwrap.prepare_model_for_kbit_training):
        model = zoo.load(name, quant, DTYPE)
        prepare(model, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        results.append(step(name, adapt(name, model)))
    kbitwrap.restore(model)
    (their_loss, theirs), (our_loss, ours) = results
    assert torch.equal(their_loss, our_loss)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[fqn], ours[fqn]) for fqn in theirs)
