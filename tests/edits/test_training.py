"""4-bit layers that repack their weights in eval mode, as bitsandbytes has them do on CPUs with AVX512-BF16.

Every test runs twice, with layers that repack and with layers that do not: what is promised is the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from bitsandbytes import functional
from torch import nn

import kbitwrap
from kbitwrap import ExportError, KbitPreparedModel, ManifestError, UnsupportedModelError
from support import settings, zoo
from support.files import SHARD, read, saved
from support.snapshot import Snapshot, tensor_digest
from support.thorough import each_once, every_other, few
from support.training import adapt, step

LAYOUTS = ("repacking", "not_repacking")
IN_BFLOAT16 = "nf4 in bfloat16"
QUANTS = ("nf4", "nf4-double", "fp4", IN_BFLOAT16)


@pytest.fixture(params=LAYOUTS, autouse=True)
def repacks(request: pytest.FixtureRequest) -> bool:
    request.getfixturevalue(request.param)
    return request.param == "repacking"


def load(quant: str, dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    """A model, whose 4-bit weights may lie in storage of bfloat16, which FSDP1 asks for."""
    if quant != IN_BFLOAT16:
        return zoo.load("llama", quant, dtype)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    return zoo.load("llama", "nf4", dtype, quantization_config=config)


def evaluate(model: nn.Module, name: str = "llama") -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**zoo.inputs(name, model)).logits


def num_packed(model: nn.Module) -> int:
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    return sum(getattr(state, "packing_format_for_cpu", False) for state in states)


def num_quantized(model: nn.Module) -> int:
    return sum(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())


def bytes_of(model: nn.Module) -> dict[str, tuple[object, ...]]:
    return {fqn: tensor_digest(parameter) for fqn, parameter in model.named_parameters()}


def round_statistics(model: nn.Module) -> None:
    """Give each block a scale that bfloat16 can hold, which repacking does not change."""
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            state.absmax = state.absmax.bfloat16().float()


@pytest.mark.parametrize("quant", QUANTS)
def test_layers_repack_in_eval_mode_where_this_says_so(quant: str, repacks: bool) -> None:
    model = load(quant)
    before = bytes_of(model)
    evaluate(model)
    assert num_packed(model) == (num_quantized(model) if repacks else 0)
    assert (bytes_of(model) == before) is not repacks


@pytest.mark.parametrize(("quant", "precision"), each_once(QUANTS, ["full", "compute", "norms", "none"]))
def test_evaluation_while_prepared_changes_nothing(quant: str, precision: str) -> None:
    model = load(quant)
    original = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    before = bytes_of(model)
    evaluate(model)
    assert num_packed(model) == 0
    assert bytes_of(model) == before
    assert not prepared.verify()
    prepared.restore()
    assert original.diff(Snapshot(model), moved=precision in ("full", "compute")) == []


@pytest.mark.parametrize("first", every_other(["before", "prepared", "suspended"]))
def test_gradients_after_an_evaluation_are_those_without_it(first: str) -> None:
    def gradients(evaluated: str | None) -> dict[str, torch.Tensor]:
        model = zoo.load("llama", "nf4")  # scales that are bfloat16, as the weights were: repacking rounds none of them
        if evaluated == "before":
            evaluate(model)
        prepared = KbitPreparedModel(model).prepare()
        adapted = adapt("llama", model)
        if evaluated == "prepared":
            evaluate(adapted)
        if evaluated == "suspended":
            with prepared.suspended():
                evaluate(adapted)
        return step("llama", adapted)[1]

    expected, found = gradients(None), gradients(first)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)


@pytest.mark.parametrize(
    ("quant", "precision"),
    few(
        itertools.product(QUANTS, ["full", "compute", "norms"]),
        [("nf4", "full"), ("fp4", "compute"), (IN_BFLOAT16, "norms")],
    ),
)
def test_a_suspended_model_evaluates_as_the_original_and_resumes_exactly(
    quant: str, precision: str, repacks: bool
) -> None:
    expected = evaluate(load(quant))
    model = load(quant)
    original, loaded = Snapshot(model), bytes_of(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    step_before, logits = bytes_of(model), evaluate(model)
    during = Snapshot(model)
    for _ in range(2):
        with prepared.suspended():
            assert original.diff(Snapshot(model), moved=True) == []
            assert bytes_of(model) == loaded
            assert torch.equal(evaluate(model), expected)
            assert num_packed(model) == (num_quantized(model) if repacks else 0)
        assert bytes_of(model) == step_before
        assert during.diff(Snapshot(model), moved=True, ignore=(": attributes",)) == []
        assert torch.equal(evaluate(model), logits)
        assert not prepared.verify()
    prepared.restore()
    assert original.diff(Snapshot(model), moved=True) == []
    assert torch.equal(evaluate(model), expected)


@pytest.mark.parametrize(
    ("quant", "asks_for_state"),
    few(itertools.product(QUANTS, [True, False]), [("nf4-double", False), (IN_BFLOAT16, True)]),
)
def test_a_base_that_ran_before_is_put_back_as_it_was(quant: str, asks_for_state: bool, repacks: bool) -> None:
    model = load(quant)
    expected = evaluate(model)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    assert num_packed(model) == 0
    manifest = prepared.manifest()
    adapted = adapt("llama", model)
    step("llama", adapted)
    evaluate(adapted)
    with prepared.suspended(), adapted.disable_adapter():
        assert num_packed(model) == (num_quantized(model) if repacks else 0)
        assert torch.equal(evaluate(adapted), expected)
        if asks_for_state:
            model.state_dict()  # where bitsandbytes unpacks
    if asks_for_state:
        model.state_dict()
    assert num_packed(model) == 0
    assert not prepared.verify()
    manifest.check(model)
    prepared.restore()
    adapted.unload()
    assert before.diff(Snapshot(model), moved=True) == []
    assert torch.equal(evaluate(model), expected)


@pytest.mark.parametrize(
    ("quant", "when"),
    few(
        itertools.product(["nf4", "nf4-double"], ["prepared", "suspended", "restored"]),
        [("nf4", "prepared"), ("nf4-double", "restored")],
    ),
)
def test_an_export_is_of_the_weights_as_loaded(quant: str, when: str, tmp_path: Path) -> None:
    expected = saved(load(quant), tmp_path / "before")
    model = load(quant)
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    adapt("llama", model)
    plain = tmp_path / "plain"
    prepared.export(plain, merge_adapters=True)
    if when == "suspended":
        with prepared.suspended():
            evaluate(model)
            prepared.export(tmp_path / "export", max_shard_size=SHARD)
            model.state_dict()  # bitsandbytes unpacks the weights for it, and leaves its approximate statistics
            prepared.export(tmp_path / "again", max_shard_size=SHARD)
            prepared.export(tmp_path / "merged", merge_adapters=True)
    else:
        evaluate(model)
        with prepared.suspended():
            evaluate(model)
        if when == "restored":
            prepared.restore()
        for folder in ("export", "again"):
            prepared.export(tmp_path / folder, max_shard_size=SHARD)
        prepared.export(tmp_path / "merged", merge_adapters=True)
    assert read(tmp_path / "export") == read(tmp_path / "again") == expected
    file = "model.safetensors"
    assert (tmp_path / "merged" / file).read_bytes() == (plain / file).read_bytes()


@pytest.mark.parametrize("quant", few(["nf4", "fp4", IN_BFLOAT16], ["fp4", IN_BFLOAT16]))
def test_a_base_that_ran_before_is_exported_like_a_fresh_load(quant: str, tmp_path: Path) -> None:
    fresh, model = load(quant, torch.float16), load(quant, torch.float16)
    round_statistics(fresh)
    round_statistics(model)
    expected = saved(fresh, tmp_path / "before")
    adapt("llama", fresh)
    adapt("llama", model)
    evaluate(model)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model)
    prepared.export(tmp_path / "new", max_shard_size=SHARD)
    prepared.export(tmp_path / "merged new", merge_adapters=True)
    assert before.diff(Snapshot(model)) == []
    prepared.prepare()
    prepared.export(tmp_path / "prepared", max_shard_size=SHARD)
    with prepared.suspended():
        prepared.export(tmp_path / "suspended", max_shard_size=SHARD)
    KbitPreparedModel(fresh).export(tmp_path / "merged", merge_adapters=True)
    assert all(read(tmp_path / folder) == expected for folder in ("new", "prepared", "suspended"))
    file = "model.safetensors"
    assert (tmp_path / "merged new" / file).read_bytes() == (tmp_path / "merged" / file).read_bytes()


def down_projection(model: nn.Module) -> torch.Tensor:
    """The weight of a layer, computed by bitsandbytes; a row of it has several scales."""
    weight = model.model.layers[0].mlp.down_proj.weight
    return functional.dequantize_4bit(weight, weight.quant_state)


@pytest.mark.parametrize("repacks", ["repacking"], indirect=True)
def test_a_base_whose_scales_bitsandbytes_left_in_the_other_order_is_refused(repacks: None, tmp_path: Path) -> None:
    model = zoo.load("llama", "nf4")
    right = down_projection(model)
    manifest = KbitPreparedModel(zoo.load("llama", "nf4")).prepare().manifest()
    new = KbitPreparedModel(model)
    evaluate(model)
    model.save_pretrained(tmp_path / "saved")  # where it lays back the weights, and not their scales
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map={"": "cpu"})
    calls: list[tuple[Callable[[], object], type[Exception]]] = [
        (new.prepare, UnsupportedModelError),
        (lambda: new.export(tmp_path / "export"), ExportError),
        (lambda: new.export(tmp_path / "merged", merge_adapters=True), ExportError),
    ]
    for one in (model, loaded):
        assert not torch.allclose(down_projection(one), right, rtol=0.01)
        calls.append((functools.partial(KbitPreparedModel, one), UnsupportedModelError))
        calls.append((functools.partial(manifest.check, one), ManifestError))
    for call, error in calls:
        with pytest.raises(error, match="q_proj: the scales lie in the order"):
            call()


@pytest.mark.parametrize("quant", few(QUANTS, ["nf4-double", IN_BFLOAT16]))
def test_a_manifest_is_of_the_weights_as_loaded(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(quant)
    prepared = KbitPreparedModel(model).prepare()
    first = prepared.manifest()
    evaluate(model)
    second = prepared.manifest()
    with prepared.suspended():
        evaluate(model)
        third = prepared.manifest()
        third.check(model)
    prepared.restore()
    assert not first.diff(second)
    assert not first.diff(third)
    first.check(model)
    settings.repack(monkeypatch, False)
    first.check(load(quant))


def test_the_drop_in_trains_after_an_evaluation_as_after_none() -> None:
    def gradients(prepare: Callable[..., nn.Module], *, is_evaluated: bool = False) -> dict[str, torch.Tensor]:
        model = zoo.load("llama", "nf4")
        if is_evaluated:
            evaluate(model)
        prepare(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        adapted = adapt("llama", model)
        if is_evaluated:
            evaluate(adapted)
        return step("llama", adapted)[1]

    expected = gradients(peft.prepare_model_for_kbit_training)
    found = gradients(kbitwrap.prepare_model_for_kbit_training, is_evaluated=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)
