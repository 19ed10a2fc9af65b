"""Runs of other tools are merged and measured from their folders, without a record of ours.

The folders are laid out here as the tools' sources say, with PEFT's own files in them: axolotl saves the trained
model's config beside the adapter (`save_initial_configs`), LLaMA-Factory what its trainer logs (`run_sft`), Unsloth
names a base that was saved in 4 bits. No code of theirs is run. The folders of TRL's own trainers are in tests/trl.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from kbitwrap import ConfigError, KbitPreparedModel, Manifest, doctor, merge_checkpoint, stamp_adapter
from kbitwrap.cli import main
from support import zoo
from support.merging import assert_same_model, jitter

NF4 = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def load(base: Path, quantization: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": "cpu"}
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in float32, which the runs load in bfloat16."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(zoo.checkpoint("llama"), folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in nf4: `adapter`, the `config` of the trained model, and the live export of the merge as `merged`."""
    folder = tmp_path_factory.mktemp("trained")
    model = load(base, NF4)
    with KbitPreparedModel(model) as prepared:
        peft_model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        jitter(peft_model)
        peft_model.save_pretrained(folder / "adapter")
        prepared.export(folder / "merged", merge_adapters=True, model=peft_model)
    model.config.save_pretrained(folder / "config")
    return folder


def axolotl(trained: Path, folder: Path) -> Path:
    """The output folder of axolotl: the config of the quantized model, the adapter, and checkpoints."""
    shutil.copytree(trained / "adapter", folder)
    shutil.copy(trained / "config" / "config.json", folder)
    (folder / "debug.log").write_text("loading model", encoding="utf-8")
    checkpoint = folder / "checkpoint-2"
    checkpoint.mkdir()
    for name in ADAPTER:
        shutil.copy(folder / name, checkpoint)
    return folder


def llama_factory(trained: Path, folder: Path) -> Path:
    """The output folder of LLaMA-Factory: the adapter, and what its trainer saves."""
    shutil.copytree(trained / "adapter", folder)
    for name in ("all_results.json", "train_results.json"):
        (folder / name).write_text('{"epoch": 1.0, "train_loss": 1.5}', encoding="utf-8")
    (folder / "trainer_log.jsonl").write_text('{"current_steps": 2}\n', encoding="utf-8")
    torch.save({}, folder / "training_args.bin")
    return folder


def unsloth(trained: Path, base: Path, folder: Path) -> Path:
    """An adapter of Unsloth, whose base was saved in 4 bits."""
    saved = folder.with_name("base-bnb-4bit")
    load(base, NF4).save_pretrained(saved)
    shutil.copytree(trained / "adapter", folder)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = str(saved)
    config["auto_mapping"] = {
        "base_model_class": "LlamaForCausalLM",
        "parent_library": "transformers.models.llama.modeling_llama",
        "unsloth_fixed": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_folder_of_axolotl_says_how_its_base_was_quantized(trained: Path, tmp_path: Path) -> None:
    folder = axolotl(trained, tmp_path / "outputs")

    merge_checkpoint(None, folder, tmp_path / "merged", device="cpu")

    assert_same_model(tmp_path / "merged", trained / "merged")
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert "in nf4-double in training, which the config.json beside the adapter says" in card


def test_a_merge_by_any_tool_is_measured_against_a_folder_of_axolotl(trained: Path, base: Path, tmp_path: Path) -> None:
    folder = axolotl(trained, tmp_path / "outputs")

    report = doctor(trained / "merged", base=base, adapter=folder)

    assert report.merge is not None
    assert report.merge.onto == "trained"
    assert not report.findings


def test_a_quantization_that_contradicts_the_config_of_the_run_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = axolotl(trained, tmp_path / "outputs")
    other = {**NF4.to_dict(), "bnb_4bit_use_double_quant": False}

    with pytest.raises(
        ConfigError, match=r"config\.json beside the adapter .*bnb_4bit_use_double_quant: True, given: False"
    ):
        merge_checkpoint(None, folder, tmp_path / "merged", quantization_config=other, device="cpu")

    assert not (tmp_path / "merged").exists()


def test_a_stamp_of_a_folder_of_axolotl_knows_the_quantization(trained: Path, tmp_path: Path) -> None:
    folder = axolotl(trained, tmp_path / "outputs")

    manifest = stamp_adapter(folder, device="cpu")

    assert "how the base was quantized in training" not in manifest.unknown
    assert Manifest.load(folder / "kbitwrap.json").model.quantization.method == "bitsandbytes_4bit"


@pytest.mark.parametrize(
    "config",
    [{}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantization_config": "nf4"}],
    ids=["none", "of another library", "no mapping"],
)
def test_a_config_beside_an_adapter_that_says_nothing_is_not_taken_for_an_answer(
    config: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    folder = llama_factory(trained, tmp_path / "saves")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"it is not known how the base .* was quantized in training"):
        merge_checkpoint(None, folder, tmp_path / "merged", device="cpu")


def test_a_damaged_config_beside_an_adapter_is_one_clear_error(trained: Path, tmp_path: Path) -> None:
    folder = llama_factory(trained, tmp_path / "saves")
    (folder / "config.json").write_text("{", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        merge_checkpoint(None, folder, tmp_path / "merged", device="cpu")


def test_a_folder_of_llama_factory_is_merged_where_the_quantization_is_given(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = llama_factory(trained, tmp_path / "saves")
    merge = ["merge", str(folder), "--out", str(tmp_path / "merged")]

    assert main(merge) == 2
    assert "it is not known how the base" in capsys.readouterr().err
    assert main([*merge, "--quant", "nf4-double", "--dtype", "bfloat16"]) == 0

    assert_same_model(tmp_path / "merged", trained / "merged")
    assert main(["doctor", str(folder)]) == 0


def test_an_adapter_of_unsloth_is_merged_onto_its_base_in_4_bits(trained: Path, base: Path, tmp_path: Path) -> None:
    folder = unsloth(trained, base, tmp_path / "lora_model")

    assert main(["merge", str(folder), "--out", str(tmp_path / "merged")]) == 0

    assert_same_model(tmp_path / "merged", trained / "merged")
    assert (
        main(["doctor", str(tmp_path / "merged"), "--base", str(tmp_path / "base-bnb-4bit"), "--adapter", str(folder)])
        == 0
    )
