"""A manifest made after a run that nobody recorded: it tells another base, and names what it does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from kbitwrap import (
    ConfigError,
    KbitPreparedModel,
    Manifest,
    ManifestError,
    ManifestMismatchError,
    QuantKind,
    doctor,
    merge_checkpoint,
    stamp_adapter,
)
from support import zoo
from support.merging import assert_same_model
from support.thorough import every_other

NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A base in bfloat16, an adapter on it in 4 bits, without a manifest, and its live export."""
    base = LlamaForCausalLM.from_pretrained(zoo.checkpoint("llama"), dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    model = zoo.load("llama")
    with KbitPreparedModel(model) as prepared:
        adapted = get_peft_model(model, zoo.lora_config("llama"))
        adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        adapted.save_pretrained(tmp_path / "adapter")
        prepared.manifest().save(tmp_path / "recorded.json")
        prepared.export(tmp_path / "live", merge_adapters=True, model=adapted)
    return tmp_path


def test_a_stamped_run_is_merged_as_a_recorded_one(run: Path) -> None:
    manifest = stamp_adapter(run / "adapter", quantization_config=NF4)
    recorded = Manifest.load(run / "recorded.json")
    assert manifest.rows == recorded.rows
    assert manifest.unknown
    assert recorded.unknown == ()
    assert Manifest.load(run / "adapter" / "kbitwrap.json") == manifest
    merge_checkpoint(None, run / "adapter", run / "out", check=True)
    assert_same_model(run / "out", run / "live")
    card = (run / "out" / "README.md").read_text()
    assert "in nf4 in training, which the caller said when the manifest was made, and nothing recorded confirms" in card
    report = doctor(run / "out", base=run / "base", adapter=run / "adapter")
    assert not report.findings
    assert (
        str(report.merge)
        .splitlines()[0]
        .endswith("in nf4, as was given when the run was stamped; nothing records whether it was trained on these")
    )


def test_what_nothing_proves_is_unknown(run: Path) -> None:
    manifest = stamp_adapter(run / "adapter")
    assert "how the base was quantized in training" in manifest.unknown
    with pytest.raises(ConfigError, match=r"it is not known how the base .* was quantized"):
        merge_checkpoint(None, run / "adapter", run / "out")
    merge_checkpoint(None, run / "adapter", run / "out", quantization_config=NF4)
    assert_same_model(run / "out", run / "live")
    with pytest.raises(ManifestError, match="says nothing of how the model was prepared"):
        KbitPreparedModel.from_manifest(zoo.load("llama", quant=None), manifest)


@pytest.mark.parametrize("dtypes", every_other([{"compute": torch.bfloat16}, {}, {"storage": torch.bfloat16}]))
def test_a_stamp_of_a_kind_takes_the_base_of_the_run_in_any_compute_and_storage_dtype(
    run: Path, dtypes: dict[str, torch.dtype]
) -> None:
    kind = QuantKind.NF4.settings
    stamp_adapter(run / "adapter", quantization_config=BitsAndBytesConfig(**kind))
    manifest = Manifest.load(run / "adapter" / "kbitwrap.json")

    def load(**settings: Any) -> Any:
        config = BitsAndBytesConfig(
            **{**kind, **settings},
            bnb_4bit_compute_dtype=dtypes.get("compute"),
            bnb_4bit_quant_storage=dtypes.get("storage"),
        )
        return LlamaForCausalLM.from_pretrained(run / "base", quantization_config=config, dtype=torch.bfloat16)

    manifest.check(load())
    for settings in ({"bnb_4bit_quant_type": "fp4"}, {"bnb_4bit_use_double_quant": True}):
        with pytest.raises(ManifestMismatchError):
            manifest.check(load(**settings))


def test_a_manifest_is_never_replaced(run: Path) -> None:
    stamp_adapter(run / "adapter", quantization_config=NF4)
    with pytest.raises(ConfigError, match="the run has its manifest"):
        stamp_adapter(run / "adapter", quantization_config=NF4)


def test_an_adapter_of_another_base_is_not_stamped(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not fit the base|no place for"):
        stamp_adapter(run / "adapter", zoo.checkpoint("gpt2"), quantization_config=NF4)
    assert not (run / "adapter" / "kbitwrap.json").exists()


def others(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Twenty wrong bases, and how they were quantized: other seeds, few changes, another quantization."""
    found = []
    for seed in range(8):
        model = LlamaForCausalLM.from_pretrained(zoo.checkpoint("llama"), dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += (0.02 * torch.randn(parameter.shape, generator=generator)).bfloat16()
        model.save_pretrained(folder / f"seed-{seed}")
        found.append((folder / f"seed-{seed}", {}))
    for number in range(8):
        model = LlamaForCausalLM.from_pretrained(zoo.checkpoint("llama"), dtype=torch.bfloat16)
        parameter = list(model.parameters())[2 * number]
        parameter.data.view(-1)[number] += parameter.data.abs().max()
        model.save_pretrained(folder / f"revision-{number}")
        found.append((folder / f"revision-{number}", {}))
    base = folder / "base"
    found.append((base, {"bnb_4bit_quant_type": "fp4"}))
    found.append((base, {"bnb_4bit_use_double_quant": True}))
    found.append((base, {"load_in_4bit": False, "load_in_8bit": True}))
    found.append((base, {"llm_int8_skip_modules": ["q_proj"]}))
    return found


@pytest.mark.thorough
def test_twenty_wrong_bases_are_told(run: Path) -> None:
    stamp_adapter(run / "adapter", quantization_config=NF4)
    wrong = others(run)
    assert len(wrong) == 20
    for base, settings in wrong:
        with pytest.raises((ManifestMismatchError, ConfigError)):
            merge_checkpoint(base, run / "adapter", run / "out", quantization_config=NF4 | settings)
    report = doctor(run / "adapter", base=wrong[0][0])
    assert [finding.what for finding in report.findings] == ["the base is not the one in the manifest, or it drifted"]
    assert doctor(run / "adapter", base=run / "base").findings == ()
