"""A base whose folder brings code along: it is merged and measured where its code may run, and only there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    dynamic_module_utils,
)

from kbitwrap import ConfigError, KbitPreparedModel, QuantKind, doctor, merge_checkpoint
from kbitwrap.cli import main
from support.files import tensors_of

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""
NF4 = BitsAndBytesConfig(**QuantKind.NF4.settings)
CLASSES = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base with code of its own, and an adapter that was trained on it in nf4."""
    folder = tmp_path_factory.mktemp("mine")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "base")
    path = folder / "base" / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    changed = {**content, "model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": CLASSES}
    path.write_text(json.dumps(changed), encoding="utf-8")
    (folder / "base" / "mine.py").write_text(CODE, encoding="utf-8")

    patch = pytest.MonkeyPatch()
    patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    model = AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.bfloat16, quantization_config=NF4, trust_remote_code=True
    )
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    with KbitPreparedModel(model) as prepared:
        adapted = peft.get_peft_model(model, lora)
        adapted.save_pretrained(folder / "adapter")
        prepared.export(folder / "exported", merge_adapters=True)
        model = adapted.unload()
    narrow = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(model, narrow).save_pretrained(folder / "narrow")
    yield folder
    patch.undo()


def test_its_code_runs_only_where_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    base, adapter, merged = run / "base", run / "adapter", tmp_path / "merged"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        merge_checkpoint(base, adapter, merged, quantization_config=NF4)
    assert not merged.exists()
    merge_checkpoint(base, adapter, merged, quantization_config=NF4, trust_remote_code=True)
    assert tensors_of(merged).keys() == tensors_of(run / "exported").keys()
    for name, tensor in tensors_of(run / "exported").items():
        assert torch.equal(tensor, tensors_of(merged)[name])

    with pytest.raises(ConfigError, match="trust_remote_code"):
        doctor(merged, base=base, adapter=adapter, quant=NF4)
    for quantization in (NF4, None):  # without it doctor finds the one that fits
        report = doctor(merged, base=base, adapter=adapter, quant=quantization, trust_remote_code=True)
        assert report.merge is not None
        assert report.merge.onto == "trained"
        assert not report.findings


def test_a_merge_that_stays_quantized_is_checked_and_examined_by_its_code(run: Path, tmp_path: Path) -> None:
    base, adapter, merged = run / "base", run / "narrow", tmp_path / "merged"
    given: dict[str, Any] = {"quantization_config": NF4, "trust_remote_code": True}
    merge_checkpoint(base, adapter, merged, merge_as="mixed", check=True, **given)
    report = doctor(merged, base=base, adapter=adapter, quant=NF4, trust_remote_code=True)
    assert report.merge is not None
    assert (report.merge.onto, report.findings) == ("trained", ())


def test_the_commands_take_the_option(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = str(tmp_path / "merged")
    merge = ["merge", str(run / "base"), str(run / "adapter"), "--out", merged, "--quant", "nf4"]
    examine = ["doctor", merged, "--base", str(run / "base"), "--adapter", str(run / "adapter"), "--quant", "nf4"]
    assert main(merge) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert main([*merge, "--trust-remote-code"]) == 0
    capsys.readouterr()
    assert main(examine) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert main([*examine, "--trust-remote-code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["merge"]["onto"] == "trained"


def test_a_dequantized_base_is_compared_on_the_device_that_is_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = str(tmp_path / "served")
    options = ["--quant", "nf4", "--device", "cpu", "--trust-remote-code"]
    assert main(["merge", str(run / "base"), "--no-adapter", "--out", served, *options]) == 0
    assert main(["doctor", served, "--base", str(run / "base"), *options, "--verbose"]) == 0
    assert "are those of the base, dequantized" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_plan_reads_it_where_its_code_may_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", str(run / "base")]
    step = [*plan, "--step", "--seq", "32", "--precision", "norms"]
    for command in (plan, step):
        assert main(command) == 2
        assert "--trust-remote-code" in capsys.readouterr().err
    assert main([*plan, "--trust-remote-code", "--json"]) == 0
    by_role = json.loads(capsys.readouterr().out)["plans"]["full"]["by_role"]
    assert by_role["quantized"]["count"] == 7
    assert main([*step, "--trust-remote-code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]["norms"]["peak_bytes"] > 0
