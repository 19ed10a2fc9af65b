"""What layers rewrite on themselves when they run in eval mode, on a model that is prepared or about to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import kbitwrap
from cells import CELLS, aqlm, gptqmodel
from kbitwrap import KbitPreparedModel, Precision, UnsupportedModelError
from support import zoo
from support.files import read
from support.snapshot import Snapshot
from support.training import adapt, step

pytestmark = [
    # By transformers, of every model that was given a device and is on the CPU, where its method asks accelerate.
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning"),
]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**zoo.inputs("llama", model)).logits


if "aqlm" in CELLS:
    # One codebook of 256 entries: aqlm's kernel for the CPU, in float32, takes codes that the layer's first forward
    # transposes. No adapter trains on it there, prepared or not: PEFT adds to its output in place.
    load = aqlm(8, torch.float32)

    @pytest.fixture(autouse=True)
    def one_thread() -> None:
        """The kernel's threads add to one array without a lock, so it computes the same twice on one thread only."""
        import numba

        numba.set_num_threads(1)

    @pytest.mark.parametrize("precision", Precision, ids=str)
    def test_codes_that_a_layer_transposed_are_those_of_the_checkpoint_again(
        precision: Precision, tmp_path: Path
    ) -> None:
        model = load("llama")
        model.save_pretrained(tmp_path / "whole")
        expected, before = logits(load("llama")), Snapshot(model)
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        peft_model = adapt("llama", model)

        def compute() -> None:
            with peft_model.disable_adapter():
                assert torch.equal(logits(peft_model), expected)
            codes = model.model.layers[0].mlp.gate_proj.codes
            assert codes.shape[1] == 128  # as the kernel takes them

        compute()
        assert not prepared.verify()
        compute()
        manifest = prepared.manifest()
        compute()
        prepared.export(tmp_path / "exported")
        assert read(tmp_path / "exported") == read(tmp_path / "whole")
        compute()
        with prepared.suspended():
            assert model.model.layers[0].mlp.gate_proj.codes.shape[0] == 128
            compute()
            assert not prepared.manifest().diff(manifest)
            compute()
        assert not prepared.verify()
        compute()
        report = prepared.restore()
        assert report.replaced == report.trained == ()
        peft_model.unload()
        for module in model.modules():
            module._parameters.pop("qweight", None)  # PEFT's second name
        ignored = [": gemm_op", ": use_gemv_rule", ".codes: pointer"]
        assert before.diff(Snapshot(model), ignore=ignored) == []
        assert torch.equal(logits(model), expected)

    def test_a_model_that_ran_before_is_recorded_and_exported_as_one_that_did_not(tmp_path: Path) -> None:
        model = load("llama")
        model.save_pretrained(tmp_path / "whole")
        expected = logits(model)
        with KbitPreparedModel(model) as prepared:
            prepared.manifest().check(load("llama"))
            KbitPreparedModel.from_manifest(load("llama"), prepared.manifest())
            assert torch.equal(logits(model), expected)
        assert torch.equal(logits(model), expected)
        KbitPreparedModel(model).export(tmp_path / "exported")
        assert read(tmp_path / "exported") == read(tmp_path / "whole")
        assert torch.equal(logits(model), expected)


# Those of gptqmodel whose kernel for a CPU in eval mode has no backward: what chose it once keeps it in train mode.
CHOOSING = {method: CELLS[method]["4-bit"].load for method in ("gptq", "awq") if method in CELLS}
if CHOOSING:
    CHOOSING["awq-fused"] = gptqmodel("awq", 4, "torch_fused_awq")  # its kernel is a child of the layer

    @pytest.mark.parametrize("evaluated", ["prepared", "adapted", "suspended"])
    @pytest.mark.parametrize("name", CHOOSING)
    def test_a_model_that_is_evaluated_while_prepared_gets_the_gradients_of_one_that_is_not(
        name: str, evaluated: str, tmp_path: Path
    ) -> None:
        load = CHOOSING[name]
        inference = logits(load("llama"))
        expected = step("llama", adapt("llama", load("llama")))
        model = load("llama")
        model.save_pretrained(tmp_path / "whole")
        before = Snapshot(model)
        prepared = KbitPreparedModel(model).prepare()
        if evaluated == "prepared":
            logits(model)
        elif evaluated == "suspended":
            with prepared.suspended():
                assert torch.equal(logits(model), inference)
                prepared.export(tmp_path / "exported")
            assert read(tmp_path / "exported") == read(tmp_path / "whole")
        peft_model = adapt("llama", model)
        if evaluated == "adapted":
            peft_model.eval()(**zoo.inputs("llama", model))  # under autograd, which the first layers do not see
        loss, gradients = step("llama", peft_model)
        assert torch.equal(loss, expected[0])
        assert gradients.keys() == expected[1].keys()
        assert all(torch.equal(gradient, expected[1][fqn]) for fqn, gradient in gradients.items())
        prepared.restore()
        assert peft_model.unload() is model
        assert before.diff(Snapshot(model)) == []
        assert torch.equal(logits(model), inference)

    @pytest.mark.parametrize("name", CHOOSING)
    def test_a_model_that_was_evaluated_before_is_refused(name: str) -> None:
        model = CHOOSING[name]("llama")
        with KbitPreparedModel(model) as prepared:
            pass
        assert prepared.restore().put_back == ()  # nothing ran
        logits(model)
        before = Snapshot(model)
        for prepare in (KbitPreparedModel, kbitwrap.prepare_model_for_kbit_training):
            with pytest.raises(UnsupportedModelError, match=r"ran in eval mode, .* has no backward: .* load") as error:
                prepare(model)
            assert error.value.fqn in dict(model.named_modules())
        assert before.diff(Snapshot(model)) == []
