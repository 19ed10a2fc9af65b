"""Right merges of every architecture, of kbitwrap's and of PEFT's making: no finding, and all of the delta is there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model

from kbitwrap import DoctorReport, KbitPreparedModel, QuantKind, doctor, merge_checkpoint
from support import zoo
from support.merging import jitter
from support.thorough import few

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [
    (name, quant, DTYPES)
    for name, quant in itertools.product(zoo.ARCHITECTURES, ("nf4", "int8", "fp4", "nf4-double"))
    if quant in zoo.ARCHITECTURES[name].quants
]
CHOSEN = [
    ("t5", "int8", DTYPES[:1]),
    ("gemma3", "nf4-double", DTYPES[1:2]),
    ("bert", "fp4", DTYPES[2:]),
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


def assert_right(report: DoctorReport) -> str:
    """A merge without a finding, with all of the delta; what it was merged onto."""
    assert report.findings == ()
    assert report.merge is not None
    assert abs(report.merge.kept - 1) <= 0.01
    return report.merge.onto


@pytest.mark.parametrize(("name", "quant", "dtypes"), few(CASES + CHOSEN, CHOSEN[1:2]))
def test_right_merges_of_an_architecture_have_no_finding(
    name: str, quant: str, dtypes: tuple[torch.dtype, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model: Any = zoo.load(name, quant)
    with KbitPreparedModel(model, precision="none", **zoo.fields(name)) as prepared:
        adapted = get_peft_model(model, zoo.lora_config(name))
        jitter(adapted)
        adapted.save_pretrained(tmp_path / "adapter")
        prepared.manifest().save(tmp_path / "adapter" / "kbitwrap.json")
        prepared.export(tmp_path / "merged", merge_adapters=True, model=adapted, max_shard_size="100KB")

    def examine(merged: str) -> str:
        return assert_right(doctor(tmp_path / merged, base=zoo.checkpoint(name), adapter=tmp_path / "adapter"))

    assert examine("merged") == "trained"
    model_class = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    for dtype in dtypes:
        base = model_class.from_pretrained(zoo.checkpoint(name), dtype=dtype)
        folder = str(dtype)
        PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / folder)
        examine(folder)


LLAMA = ["q_proj", "v_proj"]
METHODS: dict[str, Any] = {
    "adalora": peft.AdaLoraConfig(init_r=6, total_step=10, target_modules=LLAMA),
    "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=LLAMA),
    "ia3": peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    "lokr": peft.LoKrConfig(r=4, target_modules=["q_proj"]),
    "oft": peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"]),
    "rslora": peft.LoraConfig(r=4, use_rslora=True, target_modules=LLAMA),
    "tokens": peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "vera": peft.VeraConfig(r=4, target_modules=LLAMA),
    "with a head": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "with embeddings": peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
}


@pytest.mark.parametrize("dtype", few(DTYPES, DTYPES[:1]))
@pytest.mark.parametrize("method", few(METHODS, ["with a head"]))
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_every_method_that_peft_merges_is_measured(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_class = transformers.LlamaForCausalLM
    base = model_class.from_pretrained(zoo.checkpoint("llama"), dtype=torch.bfloat16, num_hidden_layers=1)
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    adapted = get_peft_model(base, METHODS[method])
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                scale = 0.5 if "lora_E" in name else 0.02  # the singular values of AdaLoRA
                parameter += (scale * torch.randn(parameter.shape)).to(parameter.dtype)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", quantization_config=False)
    again = PeftModel.from_pretrained(model_class.from_pretrained(tmp_path / "base", dtype=dtype), tmp_path / "adapter")
    again.merge_and_unload().save_pretrained(tmp_path / "peft")
    for merged in ("ours", "peft"):
        report = doctor(tmp_path / merged, base=tmp_path / "base", adapter=tmp_path / "adapter", quant=False)
        assert assert_right(report) == "trained"


IN_DTYPES = [
    ("bfloat16", "bfloat16", "float16"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("float16", "bfloat16", "bfloat16"),
    ("float32", "bfloat16", "bfloat16"),
    ("float32", "float32", "bfloat16"),
    ("float32", "bfloat16", "float16"),
]


@pytest.mark.parametrize(
    ("base", "run", "copy", "quantization"),
    few(
        [(*dtypes, quantization) for dtypes in IN_DTYPES for quantization in ("given", "fitting")],
        [(*IN_DTYPES[-1], "fitting")],
    ),
)
def test_a_right_merge_has_no_finding_in_any_dtype_of_base_run_and_copy(
    base: str, run: str, copy: str, quantization: str, tmp_path: Path
) -> None:
    model_class = transformers.LlamaForCausalLM
    model = model_class.from_pretrained(zoo.checkpoint("llama"), dtype=base, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    adapted = get_peft_model(model, zoo.lora_config("llama"))
    jitter(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    nf4 = transformers.BitsAndBytesConfig(**QuantKind.NF4.settings)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", quantization_config=nf4, dtype=run)
    model_class.from_pretrained(tmp_path / "ours", dtype=copy).save_pretrained(tmp_path / "copy")
    given = nf4 if quantization == "given" else None
    report = doctor(tmp_path / "copy", base=tmp_path / "base", adapter=tmp_path / "adapter", quant=given)
    assert assert_right(report) == "trained"
