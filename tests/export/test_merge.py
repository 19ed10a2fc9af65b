"""A merged export: every architecture, whatever is trained, and whichever adapters are active."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

import kbitwrap.export.merged as merged_module
from kbitwrap import ExportError, KbitPreparedModel
from support import forks, pages, training, zoo
from support.files import tensors_of
from support.merging import assert_rounded_once, base_weight, export, jitter, layers_of, load, lora_weight, same_outputs
from support.snapshot import Snapshot
from support.thorough import few

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


ARCHITECTURES = list(zoo.ARCHITECTURES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge layers as small as these by rows too, in a few blocks."""
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 3000)


@pytest.fixture
def whole_layers(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge small layers whole, as they are outside of these tests."""
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 1 << 20)


def is_quantized(module: nn.Module) -> bool:
    return hasattr(module, "source_cls")  # transformers' mark on the layers that it replaced


# ----------------------------------------------------------------------------------------------------
# Every architecture.
# ----------------------------------------------------------------------------------------------------

QUANTIZED = [(name, "nf4") for name in ARCHITECTURES] + [
    (name, "int8") for name in ("llama", "gpt2", "t5", "opt", "mixtral", "bart", "whisper", "dbrx", "bert")
]


TIED = ["gemma2", "gpt2", "t5", "opt", "bart", "whisper", "bloom", "paligemma", "blip_2"]


# By default the core is merged by the next test, and some of the others by the one behind it.
@pytest.mark.parametrize(
    ("name", "quant"),
    few(QUANTIZED, [*((name, "nf4") for name in zoo.CORE[::4]), ("mixtral", "int8")]),
)
def test_adapted_weights_are_rounded_once_and_all_else_is_the_original(
    name: str, quant: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if quant == "nf4":
        request.getfixturevalue("whole_layers")
    model = zoo.load(name, quant)
    checkpoints = zoo.ARCHITECTURES[name].supports_gradient_checkpointing
    prepared = KbitPreparedModel(model, gradient_checkpointing=checkpoints).prepare()
    adapted = training.adapt(name, model)
    training.step(name, adapted)
    before = Snapshot(adapted)
    report = prepared.export(tmp_path / "merged", merge_adapters=True)
    assert before.diff(Snapshot(adapted)) == []
    layers = layers_of(adapted)
    assert set(report.merged) == set(layers)
    exact = {fqn: lora_weight(layer) for fqn, layer in layers.items()}
    quantized = {
        fqn.removeprefix("base_model.model.").replace(".base_layer", "")
        for fqn, module in adapted.named_modules()
        if is_quantized(module)
    }
    plain = load(name, tmp_path / "merged")
    assert type(plain) is type(model)
    assert plain.config.dtype == BFLOAT16
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    original = zoo.load(name, None)
    tensors = plain.state_dict()
    assert tensors.keys() == original.state_dict().keys()
    for fqn, tensor in original.state_dict().items():
        found, owner = tensors[fqn], fqn.rpartition(".")[0]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        if fqn.endswith("weight") and owner in exact:
            is_transposed = type(original.get_submodule(owner)).__name__ == "Conv1D"
            assert_rounded_once(found.T if is_transposed else found, exact[owner])
        elif fqn.endswith("weight") and owner in quantized:
            is_transposed = type(original.get_submodule(owner)).__name__ == "Conv1D"
            assert_rounded_once(found.T if is_transposed else found, base_weight(model.get_submodule(owner)))
        else:
            assert torch.equal(found, tensor), fqn


def head_and_embeddings(model: PreTrainedModel) -> tuple[nn.Parameter, nn.Parameter]:
    return model.get_output_embeddings().weight, model.get_input_embeddings().weight


def trained_modules(name: str, model: PreTrainedModel) -> dict[str, list[str]]:
    """What an adapter trains whole beside its LoRA, by the name of the case; where nothing is tied, one case tells."""
    head = zoo.ARCHITECTURES[name].head
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # of sound and images
        return {"head": [head]}
    fqn = next(fqn for fqn, module in model.named_modules() if module is embeddings)
    both = {"both": [head, fqn]}
    return {"nothing": [], "head": [head], "embeddings": [fqn], **both} if name in TIED else both


@pytest.mark.usefixtures("whole_layers", "not_repacking")  # which rounds what it computes to bfloat16
@pytest.mark.parametrize("name", few(ARCHITECTURES, zoo.ODD[::4]))
def test_the_plain_model_computes_what_the_adapted_one_does_whatever_is_trained(name: str, tmp_path: Path) -> None:
    # Everything in float32, so that nothing but the merge makes a difference.
    model = zoo.load(name, "nf4", FLOAT32)
    adapted: PeftModel | None = None
    torch.manual_seed(0)
    for case, trained in trained_modules(name, model).items():
        config = zoo.lora_config(name)
        config.modules_to_save = trained or None
        if adapted is None:
            adapted = get_peft_model(model, config, case)
        else:
            adapted.add_adapter(case, config)
        adapted.set_adapter(case)
        jitter(adapted)
        export(adapted, tmp_path / case)
        plain = same_outputs(name, adapted, tmp_path / case)
        batch = zoo.inputs(name, plain)
        with torch.no_grad():
            expected = plain(**batch)[0]
            with adapted.disable_adapter():
                assert (adapted(**batch)[0] - expected).abs().max() > 1e-3
        if name in TIED:
            head, embeddings = head_and_embeddings(plain)
            assert torch.equal(head, embeddings) == (head is embeddings) == (case == "nothing")


@pytest.mark.parametrize("kind", few(["SwitchTransformers", "LongT5"], ["LongT5"]))
def test_a_config_that_says_more_than_what_is_tied_still_says_it(kind: str, tmp_path: Path) -> None:
    """Both families read from `tie_word_embeddings` whether to scale what the head gets: it may not become false."""
    sizes: dict[str, Any] = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, decoder_start_token_id=0)).eval()
    batch = {"input_ids": torch.arange(8, 20)[None], "decoder_input_ids": torch.arange(20, 27)[None]}
    for case, trained in {"head": ["lm_head"], "embeddings": ["shared"], "both": ["lm_head", "shared"]}.items():
        config = peft.LoraConfig(target_modules=["q"], modules_to_save=trained)
        adapted = get_peft_model(copy.deepcopy(model), config, case)
        jitter(adapted, 0.1)
        export(adapted, tmp_path / case)
        plain = model_class.from_pretrained(tmp_path / case)
        with torch.no_grad():
            torch.testing.assert_close(plain(**batch).logits, adapted.eval()(**batch).logits, rtol=1e-3, atol=1e-4)


def test_a_module_of_two_places_that_is_adapted_at_one_of_them_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.Identity(), third=nn.Linear(4, 4)))
    model.second = model.first
    config = peft.LoraConfig(target_modules=["third"], modules_to_save=["first"])
    adapted = get_peft_model(model, config)
    with pytest.raises(ExportError, match=r"first: .*the module is second too, and is not adapted there"):
        export(adapted, tmp_path / "merged", base=model)


def test_a_module_of_two_places_that_is_adapted_at_both_is_merged_once(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.Identity()))
    adapted = get_peft_model(model, peft.LoraConfig(target_modules=["first"], init_lora_weights=False))
    model.second = model.first
    export(adapted, tmp_path / "merged", base=model)
    found = tensors_of(tmp_path / "merged")["first.weight"]
    torch.testing.assert_close(found.double(), lora_weight(model.first))


PRECISIONS = ["full", "compute", "norms", "none"]


# Each precision with each half dtype.
KINDS = [
    (quant, dtype, PRECISIONS[(i + j) % 4])
    for i, quant in enumerate(["nf4", "nf4-double", "fp4", "int8"])
    for j, dtype in enumerate([torch.bfloat16, torch.float16])
]


@pytest.mark.usefixtures("whole_layers")
@pytest.mark.parametrize(("quant", "dtype", "precision"), few(KINDS, KINDS[::3]))
def test_neither_preparation_nor_use_makes_a_difference(
    quant: str, dtype: torch.dtype, precision: str, tmp_path: Path
) -> None:
    adapted = training.adapt("gemma2", zoo.load("gemma2", quant, dtype))
    report = export(adapted, tmp_path / "plain", max_shard_size="20kB")
    assert len([file for file in report.files if file.endswith(".safetensors")]) > 1
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "plain").values()} == {dtype}
    tensors = tensors_of(tmp_path / "plain")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    for fqn, layer in layers_of(adapted).items():
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer))
    load("gemma2", tmp_path / "plain")
    model = zoo.load("gemma2", quant, dtype)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    adapted = training.adapt("gemma2", model).eval()
    with torch.no_grad():
        adapted(**zoo.inputs("gemma2", adapted))
    prepared.export(tmp_path / precision, merge_adapters=True, max_shard_size="20kB")
    with prepared.suspended():
        prepared.export(tmp_path / "suspended", merge_adapters=True, max_shard_size="20kB")
    for folder in (precision, "suspended"):
        for file in report.files:
            assert (tmp_path / folder / file).read_bytes() == (tmp_path / "plain" / file).read_bytes(), (folder, file)


def test_it_loads_where_neither_bitsandbytes_nor_peft_is_installed(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama")).eval()
    export(adapted, tmp_path / "merged")
    program = (
        "import sys\n"
        "sys.modules.update({'bitsandbytes': None, 'peft': None})\n"
        "import torch, transformers\n"
        f"model, info = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'merged')!r}, "
        "output_loading_info=True)\n"
        "assert not any(info.values()), info\n"
        "print(type(model).__name__, model.dtype, model(torch.arange(8, 16)[None]).logits.shape[-1])"
    )
    assert forks.run_program(program).stdout.split() == ["LlamaForCausalLM", "torch.bfloat16", str(zoo.VOCAB_SIZE)]


def test_a_base_that_was_loaded_quantized_from_a_checkpoint(tmp_path: Path) -> None:
    zoo.load("mixtral").save_pretrained(tmp_path / "quantized")
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "quantized")
    adapted = training.adapt("mixtral", model)
    export(adapted, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    assert not any("absmax" in name or "quant" in name for name in tensors)
    for fqn, layer in layers_of(adapted).items():
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer))
    load("mixtral", tmp_path / "merged")


# ----------------------------------------------------------------------------------------------------
# Which adapters are active.
# ----------------------------------------------------------------------------------------------------


def two_adapters(**fields: Any) -> PeftModel:
    adapted = training.adapt("llama", zoo.load("llama"), **fields)
    adapted.add_adapter("second", zoo.lora_config("llama", r=8, target_modules=["q_proj", "up_proj"]))
    return adapted


@pytest.mark.parametrize("active", [["default"], ["second"], ["default", "second"]])
def test_the_active_adapters_are_merged_and_no_others(active: list[str], tmp_path: Path) -> None:
    adapted = two_adapters()
    adapted.base_model.set_adapter(active)
    report = export(adapted, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers_of(adapted).items():
        here = tuple(name for name in active if name in layer.lora_A)
        assert (fqn in report.merged) == bool(here)
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer, here))


def test_adapters_inside_the_model_are_found_without_naming_what_is_around_it(tmp_path: Path) -> None:
    model = zoo.load("llama")
    adapted = training.adapt("llama", model)
    wrapper = KbitPreparedModel(model)
    inside = wrapper.export(tmp_path / "inside", merge_adapters=True)
    around = wrapper.export(tmp_path / "around", merge_adapters=True, model=adapted)
    assert inside.merged == around.merged != ()
    first, second = tensors_of(tmp_path / "inside"), tensors_of(tmp_path / "around")
    assert all(torch.equal(first[fqn], second[fqn]) for fqn in first)


def test_different_methods_on_one_layer_are_merged(tmp_path: Path) -> None:
    # Of a model that is not quantized: PEFT mixes methods on no other.
    adapted = peft.PeftMixedModel(
        zoo.load("llama", None, FLOAT32), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), "first"
    )
    adapted.add_adapter("second", peft.LoHaConfig(target_modules=["q_proj", "up_proj"], init_weights=False))
    adapted.set_adapter(["first", "second"])
    report = export(adapted, tmp_path / "merged")
    assert len(report.merged) == 4
    same_outputs("llama", adapted, tmp_path / "merged")


# ----------------------------------------------------------------------------------------------------
# What the documentation says.
# ----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "merges_measured.md"


@pytest.mark.thorough  # by default the demonstration's own merges are compared
def test_the_comparison_with_merging_into_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = pages.program(PAGE, "float64, rounded to bfloat16")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as output, torch.random.fork_rng(devices=[]):
        exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    printed = re.findall(r"^(.+): error ([\d.]+)% .*, ([\d.]+)% as", output.getvalue(), re.MULTILINE)
    table = re.findall(r"^\| (.+?) \| ([\d.]+)% \| ([\d.]+)% \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row[0] for row in printed] == [row[0] for row in table]
    for (_, *found), (_, *stated) in zip(printed, table, strict=True):
        assert [float(value) for value in found] == pytest.approx(
            [float(value) for value in stated], rel=0.03, abs=0.05
        )
    assert printed[0][1:] == printed[1][1:]
