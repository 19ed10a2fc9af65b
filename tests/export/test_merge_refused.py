"""A merge that is not exact is refused by name, and leaves hooks, modes and random numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import nn

import kbitwrap.export.merged as merged_module
from kbitwrap import ExportError, KbitPreparedModel
from support import training, zoo
from support.files import tensors_of
from support.merging import assert_rounded_once, export, jitter, layers_of, lora_weight
from support.snapshot import Snapshot


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge layers as small as these by rows too, in a few blocks."""
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 3000)


# ----------------------------------------------------------------------------------------------------
# Every method.
# ----------------------------------------------------------------------------------------------------

TARGETS = ["q_proj", "down_proj"]


# ----------------------------------------------------------------------------------------------------
# What is refused, and what is left alone.
# ----------------------------------------------------------------------------------------------------


def adapted_llama(config: peft.PeftConfig, quant: str = "nf4") -> PeftModel:
    return get_peft_model(zoo.load("llama", quant, use_cache=False), config)


PHIMOE = transformers.PhimoeConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_local_experts=2,
)
PROMPTS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "prompt tuning": (lambda: adapted_llama(peft.PromptTuningConfig(**PROMPTS)), "PROMPT_TUNING adds to the input"),
    "prefix tuning": (lambda: adapted_llama(peft.PrefixTuningConfig(**PROMPTS)), "PREFIX_TUNING adds to the input"),
    "p-tuning": (lambda: adapted_llama(peft.PromptEncoderConfig(**PROMPTS)), "P_TUNING adds to the input"),
    "adapted attention": (
        lambda: adapted_llama(peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")),
        "has no method that merges",
    ),
    "activated LoRA": (
        lambda: adapted_llama(
            peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[9], task_type="CAUSAL_LM")
        ),
        "Linear4bit (lora) with the adapters ['default']",
    ),
    "a router of tasks": (lambda: adapted_llama(peft.PolyConfig(target_modules=["q_proj"])), "Linear (poly)"),
    "a method that is nowhere linear": (
        lambda: adapted_llama(peft.LilyConfig(target_modules=["q_proj"])),
        "Linear (lily)",
    ),
    # PEFT lets it read the int8 codes as though they were weights, so it is nothing that a merge could keep.
    "a method that reads what is quantized": (
        lambda: adapted_llama(peft.HRAConfig(target_modules=["q_proj"]), "int8"),
        "as though it were its weight: train this method on a base that is not quantized",
    ),
    "a method of the shape of what is quantized": (
        lambda: adapted_llama(peft.LoHaConfig(target_modules=["q_proj"])),
        "as though it were its weight: train this method on a base that is not quantized",
    ),
    "a layer that returns more than its product": (
        lambda: get_peft_model(
            transformers.PhimoeForCausalLM(PHIMOE), peft.LoraConfig(target_modules=["router"], init_lora_weights=False)
        ),
        "PhimoeTopKRouter returns no tensor that PEFT could add to, but a tuple",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_exactly_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    adapted = make()
    jitter(adapted)
    before = Snapshot(adapted)
    with pytest.raises(ExportError, match="cannot be merged exactly") as caught:
        export(adapted, tmp_path / "merged")
    assert message in str(caught.value)
    places = ("", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn", "model.layers.0.mlp.router")
    assert caught.value.fqn in places
    assert not (tmp_path / "merged").exists()
    assert before.diff(Snapshot(adapted)) == []


def exported_by_rows(config: peft.PeftConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Export what is merged in several blocks a layer; the rows of each module in which a merge was compared."""
    compared: list[int] = []
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 16 * 64 * 4)
    probe = merged_module.probe_of
    monkeypatch.setattr(
        merged_module, "probe_of", lambda plain: [compared.append(plain.weight.shape[0]), probe(plain)][1]
    )
    adapted = adapted_llama(config)
    jitter(adapted)
    export(adapted, folder)
    return compared


def test_a_merge_is_compared_in_all_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = exported_by_rows(peft.LoraConfig(target_modules=["q_proj"]), tmp_path / "merged", monkeypatch)
    assert compared == [16] * 9  # two layers of 64 rows; a block of the kind was tried out before


@pytest.mark.parametrize("block", range(4))
def test_a_block_that_is_merged_wrongly_is_refused(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge, calls = peft.tuners.lora.layer.Linear.merge, iter(range(1 << 30))

    def wrong(layer: Any, *args: Any, **kwargs: Any) -> None:
        merge(layer, *args, **kwargs)
        if next(calls) == 1 + block:  # after the one that is tried out
            layer.get_base_layer().weight.data *= 1.001

    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "merge", wrong)
    with pytest.raises(ExportError, match="the merged layer computes another output"):
        exported_by_rows(peft.LoraConfig(target_modules=TARGETS), tmp_path / "merged", monkeypatch)
    assert not (tmp_path / "merged").exists()


def test_values_that_a_merge_left_of_earlier_rows_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HiRA's would, which keeps its base: that of the rows that it merged first, without a copy for each block."""
    merge, bases = peft.tuners.hira.layer.Linear.merge, []

    def keeping(layer: Any, *args: Any, **kwargs: Any) -> None:
        base = layer.get_base_layer()
        bases.append(base.weight.data.clone())
        base.weight.data.copy_(bases[-2] if len(bases) > 2 else bases[-1])
        merge(layer, *args, **kwargs)

    monkeypatch.setattr(peft.tuners.hira.layer.Linear, "merge", keeping)
    with pytest.raises(ExportError, match="the merged layer computes another output"):
        exported_by_rows(peft.HiraConfig(target_modules=TARGETS), tmp_path / "merged", monkeypatch)


def test_gates_that_see_the_input_are_refused(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"), task_type="CAUSAL_LM")
    adapted.save_pretrained(tmp_path / "adapter")
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=64, xlora_depth=1, adapters={"a": str(tmp_path / "adapter")}
    )
    mixture = get_peft_model(zoo.load("llama", use_cache=False), config)
    with pytest.raises(ExportError, match="the weights of its adapters depend on the input"):
        export(mixture, tmp_path / "merged")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_layer_that_computes_zeros_is_merged(value: float, tmp_path: Path) -> None:
    """Of zeros, or adapted so that nothing is left but what rounding leaves of the output."""
    model = nn.Sequential(nn.Linear(48, 80, bias=False))
    config = peft.LoraConfig(target_modules=["0"], r=1, lora_alpha=1)
    adapted = get_peft_model(model, config)
    layer = layers_of(adapted)["0"]
    for parameter, filled in (
        (layer.base_layer.weight, -value),
        (layer.lora_A["default"].weight, 1),
        (layer.lora_B["default"].weight, value),
    ):
        nn.init.constant_(parameter, filled)
    export(adapted, tmp_path / "merged")
    assert not tensors_of(tmp_path / "merged")["0.weight"].any()


@pytest.mark.parametrize(
    ("options", "indices", "message"),
    [
        ({"max_norm": 1.0}, [3], "the embedding renormalizes the rows that it looks up"),
        ({}, [3, -1], "index -1 is out of bounds"),
        ({}, [3, 64], "index 64 is out of bounds"),
    ],
)
def test_embeddings_that_cannot_be_merged_exactly_are_refused(
    options: dict[str, Any], indices: list[int], message: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Embedding(64, 32, **options))
    adapted = get_peft_model(model, peft.TrainableTokensConfig(target_modules=["0"], token_indices=[3, 5]))
    layers_of(adapted)["0"].token_indices["default"] = indices
    with pytest.raises(ExportError, match=message) as caught:
        export(adapted, tmp_path / "merged")
    assert caught.value.fqn == "0"


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit")
def test_a_merged_adapter_is_refused(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"))
    wrapper = KbitPreparedModel(adapted)
    adapted.merge_adapter()
    with pytest.raises(ExportError) as caught:
        wrapper.export(tmp_path / "merged", merge_adapters=True)
    assert caught.value.fqn == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(("value", "message"), [(math.nan, "not finite"), (1e6, "beyond the range of torch.float16")])
def test_values_that_the_dtype_cannot_hold_are_refused(value: float, message: str, tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama", "nf4", torch.float16))
    # The last layer, of a kind that is tried out elsewhere: found while the files are written.
    with torch.no_grad():
        layers_of(adapted)["model.layers.1.mlp.down_proj"].lora_B["default"].weight[3, 1] = value
    with pytest.raises(ExportError, match=message) as caught:
        export(adapted, tmp_path / "merged")
    assert caught.value.fqn == "model.layers.1.mlp.down_proj"
    assert list(tmp_path.iterdir()) == []


def test_a_forward_that_was_replaced_is_refused(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"))
    layer = layers_of(adapted)["model.layers.0.self_attn.q_proj"]
    layer.forward = lambda x: x
    with pytest.raises(ExportError, match="its forward was replaced"):
        export(adapted, tmp_path / "merged")


def test_autocast_makes_no_difference(tmp_path: Path) -> None:
    model = training.adapt("llama", zoo.load("llama"))
    jitter(model)
    export(model, tmp_path / "plain")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        export(model, tmp_path / "autocast")
        assert torch.is_autocast_enabled("cpu")
    plain, found = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "autocast")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {name: t.tolist() for name, t in plain.items()}


def test_random_numbers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(seed: int) -> None:
        raise AssertionError("the generators of every device would be seeded")

    adapted = training.adapt("llama", zoo.load("llama"), lora_dropout=0.5)
    adapted.train()
    layers = layers_of(adapted)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    state = torch.get_rng_state()
    export(adapted, tmp_path / "merged")
    assert torch.equal(torch.get_rng_state(), state)
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers.items():
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer))


def test_hooks_on_an_adapted_layer_are_neither_run_nor_copied(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"))
    layer = layers_of(adapted)["model.layers.0.self_attn.q_proj"]

    class Uncopyable:
        def __call__(self, *args: object) -> None:
            raise AssertionError("run")

        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("copied")

    layer.register_forward_hook(Uncopyable())
    layer.lora_A["default"].register_forward_pre_hook(Uncopyable())
    export(adapted, tmp_path / "merged")
