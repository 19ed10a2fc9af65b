"""Bases that bitsandbytes quantizes when they are read: their bits are those of a base that is loaded quantized."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM
from transformers.quantizers.base import HfQuantizer

import kbitwrap.export.merged as merged_module
import kbitwrap.model.bitsandbytes_layers as layers_module
import kbitwrap.tensors.bits as bits_module
from kbitwrap import ConfigError, ManifestMismatchError, QuantKind, doctor, merge_checkpoint, stamp_adapter
from kbitwrap.checkpoints.adapters import read_adapter
from kbitwrap.checkpoints.base import load_adapted, load_base
from kbitwrap.checkpoints.base_quantization import GIVEN, BaseQuantization
from kbitwrap.manifest.contents import Contents, read_contents
from kbitwrap.model.bitsandbytes_layers import dequantizer, is_pending, make_pending, quantized_layer
from kbitwrap.model.pretrained import layers_to_quantize
from kbitwrap.model.quantization import is_quantized_layer
from kbitwrap.model.tree import ModelTree
from support import zoo
from support.memory import allocations, peak
from support.merging import jitter
from support.thorough import every_other, few

BFLOAT16 = torch.bfloat16
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BFLOAT16)
CASES = [
    (name, quant)
    for name, quant in itertools.product(zoo.ARCHITECTURES, ("nf4", "int8", "fp4", "nf4-double"))
    if quant in zoo.ARCHITECTURES[name].quants and zoo.ARCHITECTURES[name].is_quantized
]
CHOSEN = [
    ("gemma2", "nf4"),  # a tied head
    ("gpt2", "nf4-double"),  # weights that lie transposed
    ("mixtral", "fp4"),  # stacks of experts
    ("t5", "int8"),  # kept in float32 in part
]

# tied, and their last parameter is a linear layer's before that, and another's after
TIED = "MobileBertForMaskedLM VoxtralRealtimeForConditionalGeneration"


def save(name: str, folder: Path, dtype: torch.dtype) -> Path:
    model_class = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    model_class.from_pretrained(zoo.checkpoint(name), dtype=dtype).save_pretrained(folder)
    return folder


def given(settings: BitsAndBytesConfig) -> BaseQuantization:
    return BaseQuantization(settings.to_dict(), GIVEN)


def load(folder: Path, settings: BitsAndBytesConfig, *, may_be_pending: bool = True) -> tuple[int, Contents]:
    """The number of layers that are pending, and all that a manifest records of the model."""
    model = load_base(folder, None, None, given(settings), may_be_pending=may_be_pending).model
    return sum(map(is_pending, model.modules())), read_contents(ModelTree(model), None)


@pytest.mark.parametrize(("name", "quant"), few(CASES, CHOSEN))
@pytest.mark.parametrize("dtype", few([BFLOAT16, torch.float16], [BFLOAT16]))
def test_a_pending_base_is_the_one_that_transformers_loads(
    name: str, quant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save(name, tmp_path / "base", dtype)
    settings = zoo._quantization_config(zoo.ARCHITECTURES[name], quant, dtype)
    num_pending, found = load(folder, settings)
    assert num_pending
    assert load(folder, settings, may_be_pending=False) == (0, found)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_head_that_is_quantized_too_is_pending_unless_it_is_tied(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / "base", BFLOAT16)
    settings = BitsAndBytesConfig(**NF4.to_dict() | {"llm_int8_skip_modules": ["none"]})
    _, found = load(folder, settings)
    assert load(folder, settings, may_be_pending=False) == (0, found)
    assert ("lm_head.weight.absmax" in found.tensors) == (name == "llama")


def test_a_layer_is_pending_that_is_last_before_weights_are_tied_and_not_after(tmp_path: Path) -> None:
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    text |= {
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "vocab_size_per_layer_input": 128,
        "layer_types": ["full_attention"],
    }
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"num_key_value_heads": 4, "head_dim": 16, "patch_size": 4}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision)
    transformers.Gemma4ForConditionalGeneration(config).to(BFLOAT16).save_pretrained(tmp_path / "base")
    _, found = load(tmp_path / "base", NF4)
    assert load(tmp_path / "base", NF4, may_be_pending=False) == (0, found)
    assert "model.embed_vision.embedding_projection.weight.absmax" in found.tensors


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_a_base_is_quantized_on_a_cpu_where_the_config_allows_for_parts_on_it(quant: str, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "base", BFLOAT16)
    settings = zoo._quantization_config(zoo.ARCHITECTURES["llama"], quant, BFLOAT16)
    _, expected = load(folder, settings)
    settings.llm_int8_enable_fp32_cpu_offload = True
    for may_be_pending in (True, False):
        _, found = load(folder, settings, may_be_pending=may_be_pending)
        assert found.tensors == expected.tensors


class Chosen(BaseException):
    """Ends a load when the layers are chosen."""


def chosen_by_transformers(cls: Any, config: Any, settings: BitsAndBytesConfig) -> set[str]:
    """The names of the layers that a load quantizes, which ends before it allocates any."""
    models = []
    preprocess = HfQuantizer.preprocess_model

    def choose(quantizer: Any, model: Any, **options: Any) -> None:
        preprocess(quantizer, model, **options)
        models.append(model)
        raise Chosen

    with mock.patch.object(HfQuantizer, "preprocess_model", choose), contextlib.suppress(Chosen):
        cls.from_pretrained(None, config=config, state_dict={}, quantization_config=settings, dtype=BFLOAT16)
    return {fqn for fqn, module in models[0].named_modules() if is_quantized_layer(module)}


def heads() -> set[str]:
    """The names of all classes that predict tokens: those whose head may be tied to the embeddings."""
    found = set()
    for name in ("CausalLM", "ImageTextToText", "MaskedLM", "MultimodalLM", "Seq2SeqLM", "SpeechSeq2Seq"):
        for classes in getattr(transformers, f"AutoModelFor{name}")._model_mapping.values():
            found |= {*(classes if isinstance(classes, (list, tuple)) else [classes])}
    # A checkpoint's own code registers classes too.
    return {cls.__name__ for cls in found if cls.__module__.startswith("transformers.")}


@pytest.mark.thorough
@pytest.mark.parametrize("names", ["all", TIED])
def test_the_layers_to_quantize_are_those_that_transformers_chooses(names: str) -> None:
    wrong, built = {}, 0
    for name in sorted(heads()) if names == "all" else names.split():
        cls, model = getattr(transformers, name), None
        with torch.device("meta"), contextlib.suppress(Exception):  # not each has a config that makes one by default
            model = cls(cls.config_class())
        if model is None:
            continue
        model.tie_weights()
        built += 1
        _, layers = layers_to_quantize(model, NF4)
        if differing := chosen_by_transformers(cls, cls.config_class(), NF4) ^ {*layers}:
            wrong[name] = sorted(differing)
    assert wrong == {}
    assert built >= (300 if names == "all" else 2)


def test_what_would_be_converted_is_loaded_quantized() -> None:
    settings = zoo._quantization_config(zoo.ARCHITECTURES["llama"], "nf4", BFLOAT16)
    model = load_base(zoo.checkpoint("llama"), None, None, given(settings), BFLOAT16, may_be_pending=True).model
    assert not any(map(is_pending, model.modules()))
    assert any(map(is_quantized_layer, model.modules()))


@pytest.mark.parametrize("quant", every_other(["nf4", "int8"]))
@pytest.mark.parametrize(
    ("options", "is_left_pending"), [({}, True), ({"use_dora": True}, False), ({"init_lora_weights": "olora"}, False)]
)
def test_a_base_is_quantized_where_peft_makes_an_adapter_from_its_weights(
    quant: str, options: dict[str, Any], is_left_pending: bool, tmp_path: Path
) -> None:
    folder = save("llama", tmp_path / "base", BFLOAT16)
    settings = zoo._quantization_config(zoo.ARCHITECTURES["llama"], quant, BFLOAT16)
    model = zoo.load("llama", quant)
    peft.get_peft_model(model, zoo.lora_config("llama", **options)).save_pretrained(tmp_path / "adapter")
    trained, adapted = load_adapted(folder, read_adapter(tmp_path / "adapter"), None, given(settings))
    assert any(map(is_pending, adapted.modules())) == is_left_pending
    assert trained.model is adapted.get_base_model()  # type: ignore[operator]


def test_a_pending_base_is_never_changed_by_an_adapter(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "base", BFLOAT16)
    model = LlamaForCausalLM.from_pretrained(folder)
    # takes the largest singular values from the weights, and refuses quantized ones
    config = zoo.lora_config("llama", init_lora_weights="pissa")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"does not fit the base: .*PiSSA"):
        load_adapted(folder, read_adapter(tmp_path / "adapter"), None, given(NF4))


def layers(quant: str, width: int, storage: torch.dtype = torch.uint8) -> tuple[nn.Module, nn.Module]:
    """A layer that is quantized as usual, and a pending one."""
    import bitsandbytes

    torch.manual_seed(0)
    weight = torch.randn(96, width, dtype=BFLOAT16)

    def layer() -> Any:
        made: Any
        if quant == "int8":
            made = bitsandbytes.nn.Linear8bitLt(width, 96, bias=False, has_fp16_weights=False)
        else:
            kind, _, double = quant.partition("-")
            made = bitsandbytes.nn.Linear4bit(
                width, 96, bias=False, quant_type=kind, compress_statistics=bool(double), quant_storage=storage
            )
        made.source_cls = nn.Linear  # as transformers notes it
        make_pending(made, weight)
        return made

    return layer().to("cpu"), layer()


@pytest.mark.parametrize("storage", [torch.uint8, BFLOAT16], ids=str)
@pytest.mark.parametrize("width", [64, 128, 96])  # the last makes blocks of more than a row
@pytest.mark.parametrize("quant", ["nf4", "fp4-double", "int8"])
def test_rows_are_those_of_the_whole_weight(
    quant: str, width: int, storage: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "_AT_ONCE", 4096)
    usual, pending = layers(quant, width, storage)
    whole = dequantizer(usual)(...)
    for layer in (usual, pending):
        read = dequantizer(layer)
        assert torch.equal(read(...), whole)
        for rows in (slice(0, 1), slice(7, 64), slice(95, 96)):
            assert torch.equal(read(rows), whole[rows])


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_a_pending_weight_is_quantized_once_for_all_who_read_it_at_a_time(
    quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = mock.Mock(wraps=layers_module._quantized)
    monkeypatch.setattr(layers_module, "_quantized", counted)
    _, pending = layers(quant, 64)
    for times in (1, 2):
        readers = [dequantizer(pending), dequantizer(pending)]
        assert torch.equal(readers[0](...), readers[1](...))
        assert counted.call_count == times
        assert not is_pending(quantized_layer(pending))
        assert is_pending(pending)
        del readers  # nobody else holds what was quantized


@pytest.mark.thorough
def test_a_measure_holds_two_tensors_at_most_and_never_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As few values at a time as of tensors that are a hundred times as large.
    monkeypatch.setattr(layers_module, "_AT_ONCE", 1 << 14)
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(bits_module, "_PIECE", 1 << 16)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8, vocab_size=512
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).to(BFLOAT16)
    model.save_pretrained(tmp_path / "base")
    quantized = sum(layer.weight.numel() // 2 for layer in model.model.layers.modules() if type(layer) is nn.Linear)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    jitter(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    stamp_adapter(tmp_path / "adapter", tmp_path / "base", quantization_config=NF4)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")

    def measure() -> None:
        report = doctor(tmp_path / "merged", base=tmp_path / "base", adapter=tmp_path / "adapter")
        assert report.findings == ()
        assert report.merge is not None
        assert report.merge.onto == "trained"

    tensor = 2 * 512 * 1024
    mapped = {(tmp_path / name / "model.safetensors").stat().st_size for name in ("base", "merged")}
    assert quantized > 3 * tensor
    most = peak(size for size in allocations(measure) if abs(size) not in mapped)
    assert 0 < most <= 2 * tensor


@pytest.fixture
def merge(tmp_path: Path) -> Path:
    """A base, an adapter with a manifest, and their merge."""
    folder = save("llama", tmp_path / "base", BFLOAT16)
    adapted = peft.get_peft_model(zoo.load("llama"), zoo.lora_config("llama"))
    jitter(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    stamp_adapter(tmp_path / "adapter", folder, quantization_config=NF4)
    merge_checkpoint(folder, tmp_path / "adapter", tmp_path / "merged")
    return tmp_path


def test_a_base_is_quantized_once_to_be_used_and_compared_with_its_manifest(
    merge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_layers = sum(map(is_quantized_layer, zoo.load("llama").modules()))
    counted = mock.Mock(wraps=layers_module._quantized)
    monkeypatch.setattr(layers_module, "_quantized", counted)
    assert doctor(merge / "merged", base=merge / "base", adapter=merge / "adapter").findings == ()
    num_kinds = len([kind for kind in QuantKind if kind.settings])
    # on one of them a merge is tried out, and on one each kind of quantization
    assert counted.call_count == num_layers + 1 + num_kinds
    counted.reset_mock()
    merge_checkpoint(merge / "base", merge / "adapter", merge / "again")
    assert counted.call_count == num_layers + 1


def test_a_base_with_another_value_in_a_pending_layer_is_refused(merge: Path) -> None:
    other = LlamaForCausalLM.from_pretrained(merge / "base")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1.0
    other.save_pretrained(merge / "other")
    with pytest.raises(ManifestMismatchError, match=r"layers\.1\.mlp\.up_proj\.weight: digest"):
        merge_checkpoint(merge / "other", merge / "adapter", merge / "again")
    assert not (merge / "again").exists()
    report = doctor(merge / "merged", base=merge / "other", adapter=merge / "adapter")
    assert report.merge is None
    [finding] = report.findings
    assert finding.what == "the base is not the one that the adapter's manifest records"
    assert "layers.1.mlp.up_proj.weight: digest" in finding.evidence
