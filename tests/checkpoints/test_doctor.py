"""Runs with one fault each, which the doctor finds and names, and sound runs, in which it finds none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import nn

from kbitwrap import ConfigError, DoctorReport, KbitPreparedModel, ManifestError, convert_checkpoint, doctor
from support import trainers, training, zoo
from support.repacked import repacked
from support.thorough import few

pytestmark = [
    # Training on after `restore` is not what these do.
    pytest.mark.filterwarnings("ignore:restore\\(\\) made:UserWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),  # 5.23 renames it
    pytest.mark.filterwarnings("ignore:Unmerge lora module to 4-bit:UserWarning:peft"),
]

# What the doctor calls each fault.
FLOAT32 = "float32 was left by a preparation"
OTHER_BASE = "the base is not the one in the manifest, or it drifted"
DRIFTED = "the base drifted since it was prepared"
ZERO = "lora_B is zero in every layer"
NOT_FINITE = "an adapter is not finite"
LAYERS = "layers are not quantized"
SCALES = "scales lie in another order than their 4-bit weights"
TIED = "tied weights came apart"
MERGED = "an adapter was merged into 4-bit weights"
OPTIMIZER = "the optimizer has a state for parameters that are not the adapter's"


def faults(report: DoctorReport) -> list[str]:
    return [finding.what for finding in report.findings]


# ----------------------------------------------------------------------------------------------------
# Sound runs.
# ----------------------------------------------------------------------------------------------------


def saved(name: str, quant: str | None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        zoo.load(name, quant, dtype).save_pretrained(folder, **options)
        return folder

    return make


def prepared_and_trained(precision: str) -> Callable[[Path], nn.Module]:
    def make(folder: Path) -> nn.Module:
        model = zoo.load("llama")
        KbitPreparedModel(model, precision=precision).prepare()
        trainer = trainers.trainer_for(trainers.adapt(model), folder)
        trainer.train()
        assert model.config.use_cache is False
        return trainer.model

    return make


def restored(folder: Path) -> nn.Module:
    model = zoo.load("gemma2", "int8")
    with KbitPreparedModel(model, precision="full"):
        peft_model = training.adapt("gemma2", model, modules_to_save=True)
        training.step("gemma2", peft_model)
    return peft_model


def merged_experts(folder: Path) -> Path:
    model = zoo.load("mixtral")
    with KbitPreparedModel(model) as prepared:
        training.step("mixtral", training.adapt("mixtral", model))
        prepared.export(folder, merge_adapters=True)
    return folder


def merged_with_a_head_of_its_own(folder: Path) -> Path:
    """T5's class ties its head whatever the config says; the file says that it is not tied."""
    model = zoo.load("t5")
    with KbitPreparedModel(model) as prepared:
        training.step("t5", training.adapt("t5", model, modules_to_save=True))
        prepared.export(folder, merge_adapters=True)
    return folder


def quantized_experts(folder: Path) -> nn.Module:
    model = zoo.load("mixtral")
    for module in model.modules():
        for name in [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3]:
            replace_parameter_4bit(module, name)
    return model


def experts_named(folder: Path) -> Path:
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "mlp.experts"])
    zoo.load("mixtral", quantization_config=settings).save_pretrained(folder)
    return folder


def adapter_folder(folder: Path) -> Path:
    model = training.adapt("bert", zoo.load("bert"), modules_to_save=True)
    training.step("bert", model)
    model.save_pretrained(folder)
    return folder


def beside_a_frozen_reference(folder: Path) -> Path:
    """As TRL trains a model that has an adapter: in bfloat16, beside a copy of what it was, in float32."""
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        peft_model = trainers.adapt(prepared.model, init_lora_weights=True)
        for parameter in peft_model.parameters():
            parameter.data = parameter.data.bfloat16() if parameter.requires_grad else parameter.data
        peft_model.add_adapter("ref", zoo.lora_config("llama", init_lora_weights=True))
        trainers.save_run(peft_model, folder)
    return folder


def pickled_adapters(folder: Path) -> Path:
    """Two adapters, by `torch.save`."""
    model = training.adapt("llama", zoo.load("llama"))
    model.add_adapter("other", zoo.lora_config("llama", r=2))
    model.save_pretrained(folder, safe_serialization=False)
    return folder


def prompts(folder: Path) -> Path:
    """The encoder that computes them is trained, and not saved."""
    settings = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)
    model = peft.get_peft_model(zoo.load("llama", dtype=torch.float32), settings)
    trainers.trainer_for(model, folder, save_strategy="steps", save_steps=3).train()
    return folder


def packed_in_bfloat16(folder: Path) -> Path:
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    zoo.load("llama", quantization_config=settings).save_pretrained(folder)
    return folder


def repacked_and_saved(folder: Path, quant: str) -> Path:
    repacked(zoo.load("llama", quant)).save_pretrained(folder)
    return folder


def trained_itself(folder: Path) -> Path:
    model = zoo.load("llama")
    with KbitPreparedModel(model, freeze=False) as prepared:
        manifest = prepared.manifest()
        training.step("llama", model)
    model.save_pretrained(folder)
    manifest.save(folder / "kbitwrap.json")
    return folder


def without_a_config(folder: Path) -> Path:
    zoo.load("llama").save_pretrained(folder)
    (folder / "config.json").unlink()
    return folder / "model.safetensors"


SOUND: dict[str, Callable[[Path], Any]] = {
    "nf4": saved("llama", "nf4"),
    "nf4 with nested statistics, float16": saved("llama", "nf4-double", torch.float16),
    "int8": saved("llama", "int8"),
    "float32": saved("llama", "nf4", torch.float32),
    "not quantized": saved("qwen3", None),
    "sharded": saved("gpt2", "nf4", max_shard_size="50KB"),
    "what an architecture keeps in float32": saved("t5", "int8", torch.float16),
    "encoder": saved("bert", "nf4"),
    "vision": saved("llava", "nf4"),
    "tied": saved("gemma2", "nf4"),
    "merged experts": merged_experts,
    "merged with a head of its own": merged_with_a_head_of_its_own,
    "experts named in the config": experts_named,
    "quantized experts, live": quantized_experts,
    "full, live": prepared_and_trained("full"),
    "compute, live": prepared_and_trained("compute"),
    "norms, live": prepared_and_trained("norms"),
    "restored, live": restored,
    "adapter": adapter_folder,
    "two adapters in bin files": pickled_adapters,
    "beside a frozen reference": beside_a_frozen_reference,
    "prompts": prompts,
    "packed in bfloat16": packed_in_bfloat16,
    "repacked, live": lambda folder: repacked(zoo.load("llama")),
    "repacked with nested statistics": lambda folder: repacked_and_saved(folder, "nf4-double"),
    "the base was trained": trained_itself,
    "without a config": without_a_config,
}


@pytest.mark.parametrize("kind", few(SOUND, [*SOUND][::3]))
def test_a_sound_run_has_no_fault(kind: str, tmp_path: Path) -> None:
    report = doctor(SOUND[kind](tmp_path / "run"))
    assert report.findings == ()
    assert not report


def test_a_run_is_sound_beside_a_live_base_and_so_is_its_merged_export(runs: Path) -> None:
    assert doctor(runs / "run", base=zoo.load("llama")).findings == ()
    assert doctor(runs / "merged", base=runs / "base", adapter=runs / "run").findings == ()


def test_a_run_is_sound_where_its_base_is_quantized_when_it_is_loaded(runs: Path) -> None:
    assert doctor(runs / "run", base=zoo.checkpoint("llama")).findings == ()


@pytest.mark.parametrize("quant", ["int8", "nf4-double", "fp4"])
def test_the_base_is_loaded_as_the_manifest_says(quant: str, tmp_path: Path) -> None:
    settings = zoo._quantization_config(zoo.ARCHITECTURES["llama"], quant, torch.float16)
    settings.llm_int8_skip_modules = ["lm_head", "layers.1"]
    with KbitPreparedModel(zoo.load("llama", dtype=torch.float16, quantization_config=settings)) as prepared:
        training.adapt("llama", prepared.model, layers_to_transform=[0]).save_pretrained(tmp_path)
        prepared.manifest().save(tmp_path / "kbitwrap.json")
    assert doctor(tmp_path, base=zoo.checkpoint("llama")).findings == ()


def test_a_head_that_was_made_for_the_task_is_no_other_base(tmp_path: Path) -> None:
    settings = zoo._quantization_config(zoo.ARCHITECTURES["bert"], "nf4", torch.bfloat16)
    model = transformers.LlamaForSequenceClassification.from_pretrained(
        zoo.checkpoint("llama"), quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    with KbitPreparedModel(model) as prepared:
        peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2)).save_pretrained(tmp_path / "run")
        prepared.manifest().save(tmp_path / "run" / "kbitwrap.json")
    assert OTHER_BASE not in faults(doctor(tmp_path / "run", base=zoo.checkpoint("llama")))


def test_what_needs_more_than_was_given_is_not_measured(runs: Path) -> None:
    (line,) = doctor(runs / "run").not_measured
    assert line.startswith("whether the base is the manifest's")


# ----------------------------------------------------------------------------------------------------
# Faults.
# ----------------------------------------------------------------------------------------------------


def left_in_float32(folder: Path) -> Path:
    peft.prepare_model_for_kbit_training(zoo.load("llama")).save_pretrained(folder)
    return folder


def left_in_float32_live(folder: Path) -> nn.Module:
    return peft.prepare_model_for_kbit_training(zoo.load("llama"))


def merged_and_unmerged(folder: Path) -> nn.Module:
    model = zoo.load("llama")
    KbitPreparedModel(model).prepare()
    peft_model = trainers.adapt(model)
    peft_model.merge_adapter()
    peft_model.unmerge_adapter()
    return peft_model


def not_trained(folder: Path) -> Path:
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        trainers.save_run(
            trainers.adapt(prepared.model, init_lora_weights=True), folder, learning_rate=0.0, save_strategy="no"
        )
    return folder


def diverged(folder: Path) -> Path:
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        trainers.save_run(
            trainers.adapt(prepared.model), folder, learning_rate=1e30, save_strategy="no", max_grad_norm=0.0
        )
    return folder


def falcon(folder: Path) -> Path:
    zoo.load("falcon").save_pretrained(folder)
    return folder


def untied(folder: Path) -> Path:
    model = zoo.load("gemma2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    model.save_pretrained(folder)
    return folder


def untied_live(folder: Path) -> nn.Module:
    model = zoo.load("gemma2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    return model


def read_after_it_was_repacked(folder: Path) -> nn.Module:
    model = repacked(zoo.load("llama"))
    model.state_dict()
    return model


def more_is_trained(folder: Path) -> Path:
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        manifest = prepared.manifest()
        peft_model = trainers.adapt(prepared.model)
        for name, parameter in peft_model.named_parameters():
            if "norm" in name:
                parameter.requires_grad = True
        trainers.trainer_for(peft_model, folder, save_strategy="steps", save_steps=3).train()
        manifest.save(folder / "checkpoint-3" / "kbitwrap.json")
    return folder


FAULTY: dict[str, tuple[str | tuple[str, ...], Callable[[Path], Any], str, str]] = {
    "float32 left": (FLOAT32, left_in_float32, "", "model.embed_tokens.weight"),
    "float32 left, live": (FLOAT32, left_in_float32_live, "LlamaForCausalLM", "model.embed_tokens.weight"),
    "merged and unmerged": ((DRIFTED, MERGED), merged_and_unmerged, "PeftModelForCausalLM", "q_proj"),
    "zero": (ZERO, not_trained, "", "adds nothing"),
    "not finite": (NOT_FINITE, diverged, "", "lora_A"),
    "experts": (LAYERS, saved("mixtral", "nf4"), "", "block_sparse_moe.experts.0.w1.weight"),
    "layers of a class of its own": (LAYERS, falcon, "", "dense_h_to_4h"),
    "untied": (TIED, untied, "", "lm_head.weight"),
    "untied, live": (TIED, untied_live, "Gemma2ForCausalLM", "lm_head.weight"),
    "saved after it was repacked": (
        SCALES,
        lambda folder: repacked_and_saved(folder, "nf4"),
        "",
        "layers.0.mlp.down_proj.weight",
    ),
    "read after it was repacked, live": (SCALES, read_after_it_was_repacked, "LlamaForCausalLM", "q_proj.weight"),
    "more is trained": (OPTIMIZER, more_is_trained, "checkpoint-3", "25 states, 20 saved tensors"),
}


@pytest.mark.parametrize("kind", FAULTY)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # of the losses that are not finite
def test_a_fault_is_found_with_its_evidence(kind: str, tmp_path: Path) -> None:
    fault, make, where, evidence = FAULTY[kind]
    report = doctor(make(tmp_path / "run"))
    assert faults(report) == ([fault] if isinstance(fault, str) else [*fault])
    finding = report.findings[0]
    assert finding.where == where or finding.where == str(tmp_path / "run" / where)
    assert evidence in finding.evidence
    assert finding.remedy


def test_another_base_than_the_manifests_is_found(runs: Path, tmp_path: Path) -> None:
    other = zoo.load("llama")
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    other.save_pretrained(tmp_path / "other")
    for base in (other, tmp_path / "other", runs / "requantized", zoo.checkpoint("mistral")):
        report = doctor(runs / "run", base=base)
        assert faults(report) == [OTHER_BASE]
        assert report.findings[0].where == str(runs / "run" / "checkpoint-3")
    assert "model.norm.weight" in doctor(runs / "run", base=other).findings[0].evidence


def test_a_base_saved_beside_its_manifest_is_compared_with_it(runs: Path, tmp_path: Path) -> None:
    for base, expected in (("base", []), ("merged", []), ("requantized", [OTHER_BASE, MERGED])):
        folder = shutil.copytree(runs / base, tmp_path / base)
        shutil.copy(runs / "run" / "checkpoint-3" / "kbitwrap.json", folder)
        assert sorted(faults(doctor(folder))) == sorted(expected)


def test_a_base_is_not_compared_with_a_manifest_of_an_accelerator_that_is_not_here(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run" / "checkpoint-3", tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / "kbitwrap.json").read_text())
    (tmp_path / "kbitwrap.json").write_text(json.dumps({**data, "version": 2, "accelerator": "xpu"}))
    report = doctor(tmp_path, base=zoo.checkpoint("llama"))
    assert faults(report) == []
    assert any("on a machine with xpu" in what for what in report.not_measured)


def test_an_adapter_merged_into_4_bit_weights_is_found_and_measured(runs: Path) -> None:
    report = doctor(runs / "requantized")
    assert faults(report) == [MERGED]
    assert "not measured" in report.findings[0].evidence
    assert report.findings[0].remedy.startswith("merge again: kbitwrap merge ADAPTER")
    for base in (runs / "base", zoo.checkpoint("llama")):
        report = doctor(runs / "requantized", base=base, adapter=runs / "run")
        assert faults(report) == [MERGED]
        survived, _, _ = report.findings[0].evidence.partition("%")
        assert 50 < int(survived) < 110
        assert report.not_measured == ()
    assert faults(doctor(runs / "base", base=runs / "base", adapter=runs / "run")) == ["no delta"]


def test_a_merged_model_is_measured_where_the_checkpoints_of_its_run_lie_in_its_folder(
    runs: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(runs / "merged", tmp_path / "merged")
    shutil.copytree(runs / "run" / "checkpoint-3", folder / "checkpoint-3")
    report = doctor(folder, base=runs / "base", adapter=runs / "run")
    assert report.findings == ()
    assert report.merge is not None
    assert report.merge.kept > 0.9


DORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, use_dora=True)
HIRA = peft.HiraConfig(r=4, target_modules=["q_proj", "v_proj"], init_weights=False)  # multiplies the weight


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [DORA, HIRA], ids=["dora", "hira"])
@pytest.mark.filterwarnings("ignore:Merge hira module to 4-bit:UserWarning:peft")
def test_what_is_measured_is_what_the_adapter_changes(settings: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(zoo.load("llama"), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 1.5 if "magnitude" in name else 1
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    before = torch.get_rng_state()
    (finding,) = doctor(tmp_path / "merged", base=zoo.checkpoint("llama"), adapter=tmp_path / "adapter").findings
    assert torch.equal(torch.get_rng_state(), before)
    survived, error = (int(word.rstrip("%")) for word in finding.evidence.split() if word.endswith("%"))
    assert 90 < survived < 110
    assert error < 50


# ----------------------------------------------------------------------------------------------------
# What cannot be examined.
# ----------------------------------------------------------------------------------------------------


def test_a_folder_with_nothing_to_examine_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"found no \.safetensors or \.bin file"):
            doctor(path)


def test_an_adapter_that_does_not_fit_the_base_is_refused(runs: Path, tmp_path: Path) -> None:
    training.adapt("mixtral", zoo.load("mixtral"), r=3).save_pretrained(tmp_path)
    config = (runs / "run" / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(
        ConfigError, match=r"does not fit the base: .* size mismatch for .*; give the base that was trained on"
    ):
        doctor(runs / "requantized", base=runs / "base", adapter=tmp_path)


def test_a_damaged_manifest_is_refused(runs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(runs / "run" / "checkpoint-3", tmp_path / "run")
    (folder / "kbitwrap.json").write_text("{")
    with pytest.raises(ManifestError):
        doctor(folder)


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def test_no_pickle_is_run(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(runs / "run" / "checkpoint-3", tmp_path / "run")
    torch.save({"state": {}, "evil": Evil()}, folder / "optimizer.pt")
    report = doctor(folder, base=runs / "base")
    assert report.findings == ()
    assert "what the optimizer trained" in report.not_measured[0]
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"a.lora_B.weight": torch.ones(1), "evil": Evil()}, folder / "adapter_model.bin")
    (finding,) = doctor(folder).findings
    assert "no code in it was run" in finding.evidence
    assert not Path("executed").exists()


def test_examining_a_live_model_changes_nothing(tmp_path: Path) -> None:
    from support.snapshot import Snapshot

    model = prepared_and_trained("compute")(tmp_path)
    before = Snapshot(model)
    doctor(model)
    assert before.diff(Snapshot(model)) == []


def test_what_the_doctor_finds_can_be_mended(tmp_path: Path) -> None:
    convert_checkpoint(left_in_float32(tmp_path / "left"), tmp_path / "out", dtype="bfloat16")
    assert not doctor(tmp_path / "out")


def test_an_unknown_word_for_a_quantization_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quant: expected one of nf4, nf4-double, .*, none, found '4bit'"):
        doctor(tmp_path, base=tmp_path, quant="4bit")
