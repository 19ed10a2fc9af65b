"""What the config of a saved adapter says: how experts are laid out, and what the installed PEFT does not know."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper

from kbitwrap import ConfigError, merge_checkpoint
from support import zoo
from support.thorough import each_once
from support.training import step

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
FLOAT32 = torch.float32


def by_expert(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The factors that Unsloth's forward took until September 2026: each expert's columns of `lora_B` side by side."""
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    a = a.view(layer.num_experts, -1, a.shape[1])
    b = b.view(len(b), layer.num_experts, -1).transpose(0, 1)
    is_exchanged = layer._did_swap_in_out_features
    return (b, a, layer.scaling[adapter]) if is_exchanged else (a.mT, b.mT, layer.scaling[adapter])


def trained(name: str, folder: Path, **fields: Any) -> PeftModel:
    """An adapter on the experts, trained for one step and saved, with more fields in its config."""
    torch.manual_seed(0)
    adapted = get_peft_model(zoo.load(name, None, FLOAT32), zoo.lora_config(name, target_parameters=STACKS))
    step(name, adapted)
    adapted.save_pretrained(folder)
    write(folder, **fields)
    return adapted.eval()


def write(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def merge(name: str, folder: Path) -> Any:
    """The merged model, loaded."""
    out = folder.with_name("merged")
    merge_checkpoint(zoo.checkpoint(name), folder, out, quantization_config=False, dtype="float32", overwrite=True)
    return getattr(transformers, zoo.ARCHITECTURES[name].model_class).from_pretrained(out, dtype=FLOAT32).eval()


@pytest.fixture(scope="module")
def mixtrals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the experts of a Mixtral, which is not to be changed."""
    folder = tmp_path_factory.mktemp("mixtral") / "adapter"
    trained("mixtral", folder)
    return folder


def detail(layout: str) -> dict[str, Any]:
    """What Unsloth writes beside the layout."""
    names = [stack.partition(".")[2] for stack in STACKS]
    entries = {name: {"lora_B_layout": layout, "num_experts": 4} for name in names}
    return {"unsloth_fused_expert_lora": {"lora_A_layout": "grouped_by_expert", "parameters": entries}}


@pytest.mark.parametrize(
    ("name", "layout"),  # one keeps (out, in) in its stacks, the other (in, out)
    each_once(["mixtral", "gpt_oss"], ["rank_major", "grouped_by_expert"]),
)
def test_experts_are_merged_by_the_layout_of_the_forward_that_trained_them(
    layout: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = zoo.inputs(name, zoo.load(name, None, FLOAT32))
    folder = tmp_path / "adapter"
    with monkeypatch.context() as patch, torch.no_grad():
        if layout == "grouped_by_expert":
            patch.setattr(ParamWrapper, "get_delta_factors", by_expert)
        with torch.enable_grad():
            adapted = trained(name, folder, lora_B_layout=layout)
        expected = adapted(**batch).logits
    with torch.no_grad():
        torch.testing.assert_close(merge(name, folder)(**batch).logits, expected, rtol=1e-4, atol=1e-4)
        write(folder, lora_B_layout="absent", **detail(layout))
        torch.testing.assert_close(merge(name, folder)(**batch).logits, expected, rtol=1e-4, atol=1e-4)
        write(folder, unsloth_fused_expert_lora="absent")
        is_pefts = torch.allclose(merge(name, folder)(**batch).logits, expected, rtol=1e-2, atol=1e-2)
    assert is_pefts == (layout == "rank_major")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_B_layout": "by_column"}, r"and lora_B_layout: 'by_column'; expected 'grouped_by_expert' of the first"),
        ({"lora_B_layout": ["rank_major"]}, r"and lora_B_layout: \['rank_major'\]"),
        ({"unsloth_fused_expert_lora": {"lora_A_layout": "rank_major"}}, "says lora_A_layout: 'rank_major'"),
        ({**detail("by_column")}, "and lora_B_layout: 'by_column'"),
        ({"auto_mapping": {"unsloth_fixed": True}}, r"experts\.gate_up_proj, .*saved by Unsloth without lora_B_layout"),
        ({"peft_version": "0.18.1"}, r"experts\.gate_up_proj, where PEFT 0\.18\.1, which saved it"),
        ({"peft_version": "0.19.0"}, r"experts\.gate_up_proj, where PEFT 0\.19\.0, which saved it"),
        ({"peft_version": "absent"}, r"where PEFT before 0\.18"),
        ({"expert_layout": "swapped"}, r"does not know, .*\(expert_layout: 'swapped'\): install the PEFT that wrote"),
        ({"peft_type": "FUTURE"}, r"is of the type 'FUTURE', which PEFT .* does not know"),
    ],
)
def test_what_may_mean_other_numbers_is_refused_by_name(
    fields: dict[str, Any], message: str, mixtrals: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(mixtrals, tmp_path / "adapter")
    write(folder, **fields)
    with pytest.raises(ConfigError, match=message):
        merge("mixtral", folder)
    assert not (tmp_path / "merged").exists()


def test_versions_of_peft_that_read_these_stacks_alike_are_merged(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    adapted = trained("gpt_oss", folder, peft_version="0.18.1")
    batch = zoo.inputs("gpt_oss", adapted)
    with torch.no_grad():
        torch.testing.assert_close(merge("gpt_oss", folder)(**batch).logits, adapted(**batch).logits)
    write(folder, peft_version="0.19.0")
    with pytest.raises(ConfigError, match=rf"PEFT 0\.19\.0, .* the installed PEFT {re.escape(peft.__version__)}"):
        merge("gpt_oss", folder)
