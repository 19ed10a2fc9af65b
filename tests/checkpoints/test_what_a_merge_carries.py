"""A merge carries over what else the base's folder holds, files and tensors, or names it."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kbitwrap import ExportError, QuantKind, doctor, inspect_checkpoint, merge_checkpoint
from support import zoo
from support.files import make_tokenizer, tensors_of
from support.thorough import few
from support.training import adapt

NF4 = transformers.BitsAndBytesConfig(**QuantKind.NF4.settings)
SMALL: dict[str, Any] = {"target_modules": ["q_proj"], "lora_alpha": 0.01}
# What the merge writes itself, and what holds weights.
OWN = ("config.json", "generation_config.json", "README.md", "model.safetensors.index.json")
TOKENIZER = ("tokenizer.model", "tekken.json", "qwen.tiktoken", "LICENSE", "additional_chat_templates/tools.jinja")
CODE = ("configuration_mine.py", "chat_template.json", "special_tokens_map.json", "assets/prompt.txt")
MODULES = ("1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/config.json", "sentence_bert_config.json")


def put(folder: Path, *names: str, content: str = "of the base") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def block(prefix: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tensors of a block that no class builds."""
    drawn = torch.Generator().manual_seed(3)
    names = ("mlp.experts.0.down_proj.weight", "mlp.gate.e_score_correction_bias", "eh_proj.weight", "norm.weight")
    shapes = ((32, 32), (4,), (16, 32), (32,))
    return {
        f"{prefix}.{name}": torch.randn(shape, generator=drawn).to(dtype)
        for name, shape in zip(names, shapes, strict=True)
    }


def with_tensors(folder: Path, more: dict[str, torch.Tensor]) -> Path:
    """Add tensors to a base, in a file of their own."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / first)
    save_file(more, folder / second, {"format": "pt"})
    where = {**dict.fromkeys(load_file(folder / first), first), **dict.fromkeys(more, second)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def base_of(name: str, folder: Path) -> Path:
    shutil.copytree(zoo.checkpoint(name), folder)
    return folder


def adapter_of(name: str, base: Path, folder: Path, **options: Any) -> Path:
    model = getattr(transformers, zoo.ARCHITECTURES[name].model_class).from_pretrained(base, dtype=torch.bfloat16)
    adapt(name, model, **options).save_pretrained(folder)
    return folder


def merge(base: Path, adapter: Path | None, out: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"quantization_config": NF4, "dtype": "bfloat16", **options}
    return merge_checkpoint(base, adapter, out, **given)


def assert_same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


FOLDERS = [
    ("llama", TOKENIZER, "mtp"),
    ("deepseek_v3", CODE, "model.layers.2"),
    ("qwen3", MODULES, "mtp.layers.0"),
]


@pytest.mark.parametrize(
    ("name", "files", "prefix", "has_tokenizer"),
    few(
        [(*case, has_tokenizer) for case in FOLDERS for has_tokenizer in (False, True)],
        [(*FOLDERS[1], True)],
    ),
)
def test_the_folder_holds_all_that_the_bases_holds_or_names_it(
    name: str, files: tuple[str, ...], prefix: str, has_tokenizer: bool, tmp_path: Path
) -> None:
    base = with_tensors(base_of(name, tmp_path / "base"), block(prefix))
    adapter = adapter_of(name, base, tmp_path / "adapter")
    make_tokenizer(8).save_pretrained(base)
    put(base, *files)
    put(base, ".gitattributes", "README.md", "pytorch_model.bin", "onnx/model.onnx")
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    (base / "modules.json").write_text(json.dumps(modules))
    if has_tokenizer:
        make_tokenizer(8).save_pretrained(adapter)
    for number, given in enumerate((adapter, None, adapter)):
        report = merge(base, given, tmp_path / str(number % 2), overwrite=True, max_shard_size=20_000, check=True)
        out = tmp_path / str(number % 2)
        assert_same_bytes(tensors_of(out), block(prefix))
        notes = " ".join(report.notes)
        for path in base.rglob("*"):
            expected = path.relative_to(base).as_posix()
            is_weights = path.suffix in (".safetensors", ".bin", ".onnx") and "2_Dense" not in expected
            if path.is_file() and not is_weights and expected not in (*OWN, ".gitattributes"):
                assert expected in notes or (out / expected).read_bytes() == path.read_bytes(), expected
        assert not {"pytorch_model.bin", "onnx/model.onnx", ".gitattributes"} & {*report.files}
        is_left = given is not None and has_tokenizer and "special_tokens_map.json" in files
        assert ("special_tokens_map.json" in notes) == is_left
        assert ("left behind" in (out / "README.md").read_text()) == is_left
    index = json.loads((tmp_path / "0" / "model.safetensors.index.json").read_text())
    held = tensors_of(tmp_path / "0")
    assert index["weight_map"].keys() == held.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held.values())
    report = doctor(tmp_path / "0", base=base, adapter=adapter, quant=NF4)
    assert not report, str(report)
    assert not inspect_checkpoint(tmp_path / "0")
    assert not doctor(tmp_path / "1", base=base, quant=NF4)


@pytest.mark.parametrize(
    ("merge_as", "saved_as"),
    few(
        itertools.product(["half", "mixed", "quantized"], ["float32", "nf4", "nf4 with codes"]),
        [("mixed", "float32"), ("half", "nf4 with codes")],
    ),
)
def test_a_block_is_carried_over_in_a_form_that_loaders_know(merge_as: str, saved_as: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    more = block("mtp", torch.bfloat16)
    given: dict[str, Any] = {"quantization_config": None, "dtype": None}
    if saved_as == "float32":
        given = {"quantization_config": NF4, "dtype": "bfloat16"}
        base_of("llama", base)
    else:
        zoo.load("llama").save_pretrained(base)
    if saved_as == "nf4 with codes":
        more = {**more, "mtp.fc.weight": torch.ones(8, 1, dtype=torch.uint8), "mtp.fc.weight.absmax": torch.ones(1)}
    adapter_of("llama", base, adapter, **SMALL)
    with_tensors(base, more)
    report = merge(base, adapter, tmp_path / "out", merge_as=merge_as, check=True, **given)
    held = tensors_of(tmp_path / "out")
    is_left = saved_as == "nf4 with codes" and merge_as == "half"
    card = (tmp_path / "out" / "README.md").read_text()
    if is_left:
        (note,) = report.notes
        assert " that a LlamaForCausalLM does not build were left out, because they are quantized, and" in note
        assert note in card
        assert not more.keys() & held.keys()
    else:
        assert_same_bytes(held, more)
        assert (report.notes, "does not build" in card) == ((), False)
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert bool(info["unexpected_keys"]) == (not is_left)
    assert info["unexpected_keys"] <= more.keys()
    assert not info["missing_keys"]
    if merge_as != "half" and saved_as != "nf4 with codes":
        assert "mtp" in model.config.quantization_config.llm_int8_skip_modules
    found = doctor(tmp_path / "out", base=base, adapter=adapter, quant=given["quantization_config"])
    assert [finding.what for finding in found.findings] == ["it lacks tensors that the base's files have"] * is_left


def test_doctor_names_what_another_tool_left_behind(tmp_path: Path) -> None:
    base = with_tensors(base_of("llama", tmp_path / "base"), block("mtp"))
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    adapted = adapt("llama", model)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    given: dict[str, Any] = {"base": base, "quant": False}
    (finding,) = doctor(tmp_path / "merged", adapter=tmp_path / "adapter", **given).findings
    assert finding.what == "it lacks tensors that the base's files have"
    assert finding.evidence.startswith("4 that a LlamaForCausalLM does not build: mtp.")


def test_a_classifier_takes_no_head_of_its_base(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    model = transformers.LlamaForSequenceClassification.from_pretrained(base, dtype=torch.bfloat16, num_labels=3)
    peft.get_peft_model(model, zoo.lora_config("llama", task_type="SEQ_CLS")).save_pretrained(tmp_path / "classifier")
    report = merge(base, tmp_path / "classifier", tmp_path / "classes", quantization_config=False)
    assert report.notes == ()
    assert "lm_head.weight" not in tensors_of(tmp_path / "classes")
    given: dict[str, Any] = {"base": base, "adapter": tmp_path / "classifier", "quant": False}
    assert not doctor(tmp_path / "classes", **given)


def test_a_tensor_in_a_layer_that_has_no_place_for_it_is_carried_over(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64, dtype=torch.bfloat16)}
    base = with_tensors(base_of("llama", tmp_path / "base"), bias)
    merge(base, None, tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), bias)


def test_buffers_and_tied_weights_in_old_files_are_nothing_to_carry(tmp_path: Path) -> None:
    base = base_of("gemma2", tmp_path / "base")
    embeddings = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    old = {"lm_head.weight": embeddings, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    with_tensors(base, old)
    adapter = adapter_of("gemma2", base, tmp_path / "adapter")
    report = merge(base, adapter, tmp_path / "out", quantization_config=False)
    assert report.notes == ()
    assert not old.keys() & tensors_of(tmp_path / "out").keys()
    assert not doctor(tmp_path / "out", base=base, adapter=adapter, quant=False)


def test_what_lies_beside_the_adapter_wins(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    adapter = adapter_of("llama", base, tmp_path / "adapter")
    make_tokenizer(8).save_pretrained(base)
    put(
        base,
        "tokenizer.model",
        "special_tokens_map.json",
        "chat_template.json",
        "preprocessor_config.json",
        "modules.json",
    )
    make_tokenizer(8).save_pretrained(adapter)
    put(adapter, "chat_template.jinja", "notes.txt", "training_args.bin", content="of the adapter")
    put(adapter, "1_Pooling/config.json", "2_Dense/model.safetensors", "logs/1.json", content="of the adapter")
    (adapter / "modules.json").write_text(json.dumps([{"path": "1_Pooling"}, {"path": "2_Dense"}]))
    report = merge(base, adapter, tmp_path / "out", quantization_config=False)
    (note,) = report.notes
    assert note.endswith("'chat_template.json', 'special_tokens_map.json'")
    out = tmp_path / "out"
    for name in ("chat_template.jinja", "1_Pooling/config.json", "2_Dense/model.safetensors"):
        assert (out / name).read_text() == "of the adapter"
    assert (out / "modules.json").read_text() == (adapter / "modules.json").read_text()
    assert (out / "tokenizer.model").read_text() == (out / "preprocessor_config.json").read_text() == "of the base"
    assert not {"notes.txt", "training_args.bin", "logs/1.json"} & {*report.files}

    # with another vocabulary, what holds the base's is none of the merge's
    make_tokenizer(9).save_pretrained(adapter)
    report = merge(base, adapter, out, quantization_config=False, overwrite=True)
    assert "'tokenizer.model'" in report.notes[0]
    assert "tokenizer.model" not in report.files


def test_links_of_a_snapshot_are_followed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--someone--Tiny"
    snapshot = cache / "snapshots" / "0123"
    base_of("llama", snapshot)
    put(cache, "blobs/abc", "refs/main")
    put(cache, "refs/main", content="0123")
    put(tmp_path, "secret/key")
    (snapshot / "tokenizer.model").symlink_to("../../blobs/abc")
    (snapshot / "loop").symlink_to(snapshot / "loop")
    (snapshot / "key").symlink_to(tmp_path / "secret" / "key")
    (snapshot / "secret").symlink_to(tmp_path / "secret")
    (snapshot / "pytorch_model.bin").symlink_to(tmp_path / "secret" / "key")
    put(snapshot, "mine.py", content="raise SystemExit('it ran')")
    adapter = adapter_of("llama", snapshot, tmp_path / "adapter")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for number, base in enumerate((snapshot, "someone/Tiny")):
        report = merge(base, adapter, tmp_path / str(number), quantization_config=False)
        assert {"tokenizer.model", "mine.py"} <= {*report.files}
        assert not (tmp_path / str(number) / "tokenizer.model").is_symlink()
        assert not {"key", "secret/key"} & {*report.files}
        assert report.notes[-1].endswith(": 'key', 'secret'")


def test_overwriting_refuses_a_folder_that_is_no_copy(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    put(base, "1_Pooling/config.json")
    given: dict[str, Any] = {"quantization_config": False, "overwrite": True}
    merge(base, None, tmp_path / "out", **given)
    put(tmp_path / "out", "1_Pooling/model.safetensors", content="theirs")
    with pytest.raises(ExportError, match="'1_Pooling'"):
        merge(base, None, tmp_path / "out", **given)
