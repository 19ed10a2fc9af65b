"""The output head in float32 from its half weight: the numbers, what trains on it, and the way back."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from kbitwrap import KbitPreparedModel, Manifest, ManifestError, build_plan
from kbitwrap.edits import stand_ins
from kbitwrap.edits.stand_ins import HeadForward
from support import zoo
from support.memory import allocations
from support.snapshot import Snapshot
from support.thorough import each_once, every_other, few
from support.training import adapt, step

AUTOCAST = pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])


class Seen:
    """What a head was given and returned at its last call, and the gradient that its input got."""

    def __init__(self, head: nn.Module) -> None:
        head.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.hidden, self.logits = args[0], output
        if self.hidden.requires_grad:
            self.hidden.register_hook(lambda gradient: setattr(self, "gradient", gradient))


def stored_head(head: nn.Module, hidden: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a head gives whose weight, and input, are stored in another dtype: PEFT's in float32."""
    bias = None if head.bias is None else head.bias.to(dtype)
    return F.linear(hidden.to(dtype), head.weight.to(dtype), bias)


# Not tied, tied, tied under another name, a forward of its own, an encoder before it.
@AUTOCAST
@pytest.mark.parametrize(
    ("name", "dtype"), each_once(["llama", "gemma2", "whisper", "falcon", "bart"], [torch.bfloat16, torch.float16])
)
@pytest.mark.filterwarnings("ignore:.*has neither a quantization attribute:UserWarning")
def test_the_logits_are_those_of_a_head_stored_in_float32(name: str, dtype: torch.dtype, autocast: bool) -> None:
    model = zoo.load(name, "nf4" if zoo.ARCHITECTURES[name].is_quantized else None, dtype=dtype)
    with KbitPreparedModel(model, head="float32") as prepared:
        assert prepared.plan.added_bytes == prepared.plan.peak_bytes == 0
        head = model.get_output_embeddings()
        seen = Seen(head)
        peft_model = adapt(name, model)
        with torch.autocast("cpu", dtype, enabled=autocast):
            output = peft_model(**zoo.inputs(name, model))
        assert seen.hidden.dtype == head.weight.dtype == model.get_input_embeddings().weight.dtype == dtype
        assert model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.long)).dtype == dtype
        assert output.logits.dtype == seen.logits.dtype == torch.float32
        assert torch.equal(seen.logits, stored_head(head, seen.hidden))
        output.loss.backward()
        assert seen.gradient.dtype == dtype


def test_the_logits_are_as_near_to_the_exact_ones_as_float32_comes() -> None:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(512, 4096, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(64, 512, generator=generator).bfloat16()
    exact = stored_head(head, hidden, torch.float64)
    half_error = (head(hidden).double() - exact).abs().max()
    for chunk_bytes in (None, 512 * 4 * 100):
        forward = HeadForward(head, chunk_bytes)
        error = (forward(hidden).double() - exact).abs().max()
        assert error <= (stored_head(head, hidden).double() - exact).abs().max()
        assert error < half_error / 1000


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A Llama that has learned a noisy chain of 512 tokens, as a checkpoint in bfloat16, and a batch."""
    torch.manual_seed(0)
    vocabulary = 512
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=32, **widths))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def batch() -> torch.Tensor:
        ids = torch.randint(0, vocabulary, (16, 1))
        for _ in range(31):
            following = torch.where(torch.rand(16, 1) < 0.1, torch.randint(0, vocabulary, (16, 1)), ids[:, -1:] * 5 + 7)
            ids = torch.cat([ids, following % vocabulary], 1)
        return ids

    for _ in range(120):
        ids = batch()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 2  # 6.2 where nothing was learned
    folder = tmp_path_factory.mktemp("trained")
    model.bfloat16().save_pretrained(folder)
    return folder, batch()


@pytest.mark.usefixtures("not_repacking")  # the engine's body is that of the training
@pytest.mark.parametrize(
    ("autocast", "precision", "dtype"),
    few(
        itertools.product([False, True], ["norms", "adapted", "none"], [torch.bfloat16, torch.float16]),
        [(True, "norms", torch.bfloat16)],
    ),
)
def test_the_log_probabilities_come_to_those_of_an_engine_with_a_float32_head(
    trained: tuple[Path, torch.Tensor], dtype: torch.dtype, precision: str, autocast: bool
) -> None:
    """The engine has the same half body, computed by the same kernels: the head is what the two can differ in."""
    folder, ids = trained
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=dtype)

    def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
        return logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])

    seen, gaps = Seen(model.lm_head), {}
    with torch.no_grad():
        model.eval()(input_ids=ids)
        engine = log_probabilities(stored_head(model.lm_head, seen.hidden))
        for head in (None, "float32"):
            with (
                KbitPreparedModel(model, precision=precision, head=head),
                torch.autocast("cpu", dtype, enabled=autocast),
            ):
                found = log_probabilities(model.train()(input_ids=ids).logits)
            gaps[head] = (found - engine).abs().mean().item()
        # What is left is of the hidden states, which only float32 norms make others.
        assert torch.equal(found, log_probabilities(stored_head(model.lm_head, seen.hidden)))
    assert gaps["float32"] <= gaps[None] / 2
    assert (gaps["float32"] == 0) == (precision != "norms")


@AUTOCAST
@pytest.mark.parametrize("precision", every_other(["norms", "none"]))
def test_a_copy_that_is_trained_has_float32_logits_too(precision: str, autocast: bool) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision, head="float32").prepare()
    peft_model = adapt("llama", model, modules_to_save=True)
    copied = model.lm_head.modules_to_save["default"]
    seen = Seen(copied)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = peft_model(**zoo.inputs("llama", model)).logits
    assert torch.equal(seen.logits, stored_head(copied, seen.hidden))
    logits.square().sum().backward()
    reference = copied.weight.detach().float().requires_grad_()
    F.linear(seen.hidden.detach().float(), reference).square().sum().backward()
    assert copied.weight.dtype == copied.weight.grad.dtype == torch.bfloat16
    assert torch.equal(copied.weight.grad, reference.grad.bfloat16())
    value = copied.weight.detach().clone()
    with peft_model.disable_adapter(), torch.no_grad():
        assert peft_model(**zoo.inputs("llama", model)).logits.dtype == torch.float32
    with prepared.suspended(), torch.no_grad():
        assert peft_model(**zoo.inputs("llama", model)).logits.dtype == torch.bfloat16
    assert peft_model(**zoo.inputs("llama", model)).logits.dtype == torch.float32
    assert not prepared.verify()
    prepared.restore()
    assert torch.equal(copied.weight, value)
    with torch.no_grad():
        assert peft_model(**zoo.inputs("llama", model)).logits.dtype == torch.bfloat16
    assert not [module for module in peft_model.modules() if "forward" in vars(module)]


def test_copies_that_were_there_before_are_prepared_too() -> None:
    peft_model = adapt("llama", zoo.load("llama"), modules_to_save=True)
    with KbitPreparedModel(peft_model, precision="adapted", head="float32"):
        assert peft_model(**zoo.inputs("llama", peft_model)).logits.dtype == torch.float32
        with peft_model.disable_adapter():
            assert peft_model(**zoo.inputs("llama", peft_model)).logits.dtype == torch.float32


@AUTOCAST
@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_on_the_head_adds_to_float32_logits(use_dora: bool, autocast: bool) -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model, head="float32") as prepared:
        peft_model = adapt("llama", model, target_modules=["lm_head", "q_proj"], use_dora=use_dora)
        prepared.adopt(peft_model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = peft_model(**zoo.inputs("llama", model))
        assert output.logits.dtype == torch.float32
        output.loss.backward()
        gradients = {fqn: p.grad for fqn, p in peft_model.named_parameters() if p.requires_grad}
        assert all(g is not None and g.isfinite().all() for g in gradients.values())
        assert any("lm_head" in fqn and g.abs().max() > 0 for fqn, g in gradients.items())
        assert not prepared.verify()


def test_a_base_that_is_trained_itself_gets_its_gradients() -> None:
    model = zoo.load("gemma2")
    with KbitPreparedModel(model, head="float32", freeze=False, precision="none"):
        model.lm_head.weight.requires_grad_(True)
        output = model(**zoo.inputs("gemma2", model))
        assert output.logits.dtype == torch.float32
        output.loss.backward()
        assert model.lm_head.weight.grad.dtype == torch.bfloat16


def test_a_tied_head_that_is_trained_gets_the_gradient_of_both_uses() -> None:
    gradients = []
    for head in (None, "float32"):
        model = zoo.load("gemma2")
        with KbitPreparedModel(model, head=head, freeze=False):
            model.lm_head.weight.requires_grad_(True)
            output = model(**zoo.inputs("gemma2", model))
            output.loss.backward()
            gradients.append(model.lm_head.weight.grad)
        assert output.logits.dtype == (torch.bfloat16 if head is None else torch.float32)
    assert gradients[0].dtype == gradients[1].dtype == torch.bfloat16
    torch.testing.assert_close(*gradients, rtol=0.05, atol=gradients[0].abs().max().item() / 50)


@pytest.mark.parametrize("chunk_bytes", [None, 64 * 4 * 10])
def test_the_float32_pieces_of_the_head_are_bounded(chunk_bytes: int | None) -> None:
    head = nn.Linear(64, 2000, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.randn(1, 64).bfloat16().requires_grad_()
    sizes = allocations(lambda: HeadForward(head, chunk_bytes)(hidden).sum().backward())
    # Without pieces the weight, forward and backward; with them nothing larger than the logits.
    assert max(sizes) == (64 * 2000 * 4 if chunk_bytes is None else 2000 * 4)


def test_no_float32_weight_lives_between_forward_and_backward() -> None:
    head = nn.Linear(64, 300, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.randn(2, 64).bfloat16().requires_grad_()
    output = HeadForward(head, None)(hidden)
    gc.collect()
    alive = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.float32]
    assert not [t for t in alive if t.numel() == 64 * 300]
    output.sum().backward()
    assert hidden.grad is not None


@pytest.mark.usefixtures("not_repacking")  # repacking gives weights other memory
@pytest.mark.parametrize("precision", ["norms", "adapted", "none"])
def test_the_way_back_is_exact_and_the_record_tells_it(precision: str, tmp_path: Path) -> None:
    model = zoo.load("gemma2")
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision, head="float32", head_chunk_bytes=4096).prepare()
    heads = [edit for edit in prepared.plan.edits if edit.fqns == ("lm_head",)]
    assert [(edit.action, str(edit.role)) for edit in heads] == [("compute", "output embeddings")]
    peft_model = adapt("gemma2", model)
    step("gemma2", peft_model)
    manifest = prepared.manifest()
    prepared.export(tmp_path / "base")
    with prepared.suspended(), torch.no_grad():
        assert model(**zoo.inputs("gemma2", model)).logits.dtype == torch.bfloat16
    with torch.inference_mode():
        assert model(**zoo.inputs("gemma2", model)).logits.dtype == torch.float32
    assert not prepared.verify()
    prepared.restore()
    assert before.diff(Snapshot(peft_model.unload()), ignore=("requires_grad",)) == []
    again = zoo.load("gemma2")
    original = again.state_dict()
    del original["lm_head.weight"]  # tied
    with safe_open(tmp_path / "base" / "model.safetensors", "pt") as file:
        assert {*file.keys()} == original.keys()
        assert all(torch.equal(file.get_tensor(name), value) for name, value in original.items())
    # The manifest has a field that version 1 does not know.
    assert manifest.version == 2
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.config.head == "float32"
    content = {name: value for name, value in json.loads(manifest.to_json()).items() if name != "adapters"}
    with pytest.raises(ManifestError, match=r"version 1 has no field config\.head"):
        Manifest.from_json(json.dumps({**content, "version": 1}))
    with KbitPreparedModel.from_manifest(again, manifest), torch.no_grad():
        assert again(**zoo.inputs("gemma2", again)).logits.dtype == torch.float32


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_where_the_head_is_float32_anyway_it_changes_nothing(precision: str) -> None:
    plain, asked = (build_plan(zoo.load("llama"), precision=precision, head=head) for head in (None, "float32"))
    assert [edit.describe() for edit in plain.edits] == [edit.describe() for edit in asked.edits]
    assert plain.warnings == asked.warnings


def test_a_model_without_a_half_head_is_told_so() -> None:
    with pytest.warns(UserWarning, match="head='float32' changes nothing"):
        KbitPreparedModel(zoo.load("bert"), head="float32").prepare()
    assert not any("head=" in w for w in build_plan(zoo.load("llama"), head="float32").warnings)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_the_whole_model_is_compiled_in_one_graph() -> None:
    steps = []
    for is_compiled in (False, True):
        model = zoo.load("gemma2")
        KbitPreparedModel(model, head="float32", gradient_checkpointing=False).prepare()
        peft_model = adapt("gemma2", model)
        torch._dynamo.reset()
        steps.append(
            step(
                "gemma2", torch.compile(peft_model, backend="aot_eager", fullgraph=True) if is_compiled else peft_model
            )
        )
    (their_loss, theirs), (our_loss, ours) = steps
    assert torch.equal(their_loss, our_loss)
    for gradient, other in zip(theirs.values(), ours.values(), strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("bf16", [False, True])
def test_under_trainer_the_loss_is_computed_from_float32_logits(
    bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.state.AcceleratorState._shared_state", {})  # what it sets is of the process
    model = zoo.load("llama")
    with KbitPreparedModel(model, head="float32") as prepared:
        peft_model = adapt("llama", model)
        seen = Seen(model.lm_head)
        row = {name: value[0] for name, value in zoo.inputs("llama", model).items()}
        arguments = TrainingArguments(
            tmp_path,
            bf16=bf16,
            max_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        Trainer(peft_model, arguments, train_dataset=[row, row]).train()
        assert seen.hidden.dtype == seen.gradient.dtype == torch.bfloat16
        assert seen.logits.dtype == torch.float32
        assert torch.equal(seen.logits, stored_head(model.lm_head, seen.hidden))
        assert not prepared.verify()


def test_a_head_that_was_resized_is_named_and_taken_up_again_by_adopting() -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model, head="float32") as prepared:
        model.resize_token_embeddings(model.config.vocab_size + 64, mean_resizing=False)
        assert "lm_head" in str(prepared.verify())
        prepared.adopt(adapt("llama", model))
        assert model(**zoo.inputs("llama", model)).logits.dtype == torch.float32


def test_where_a_device_multiplies_halves_it_is_given_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    # The device without values stands in for CUDA: tests/gpu has the numbers. In it a mix of dtypes is an error.
    monkeypatch.setattr(stand_ins, "multiplies_half", lambda left, half: left.dtype == half.dtype)
    head = nn.Linear(64, 300, bias=False, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.empty(2, 3, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    logits = HeadForward(head, None)(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (2, 3, 300))
    logits.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    # Without the product of halves: another dtype, a bias, which is added in float32.
    assert HeadForward(head, None)(hidden.float()).dtype == torch.float32
    biased = nn.Linear(64, 300, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    assert HeadForward(biased, None)(hidden).dtype == torch.float32
