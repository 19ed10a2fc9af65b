"""`kbitwrap convert`, `kbitwrap merge`, and what `kbitwrap doctor` says of float32: output and exit status."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from kbitwrap import KbitPreparedModel, convert_checkpoint
from kbitwrap.cli import main
from support import forks, training, zoo
from support.files import tensors_of
from support.merging import base_weight
from support.snapshot import tensor_digest
from support.thorough import every_other, few


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it was loaded, as it was saved while prepared, and the manifest."""
    folder = tmp_path_factory.mktemp("saved")
    model = zoo.load("llama", "nf4")
    model.save_pretrained(folder / "original")
    with KbitPreparedModel(model, precision="full") as prepared:
        prepared.manifest().save(folder / "kbitwrap.json")
        model.config.use_cache = False
        model.save_pretrained(folder / "prepared")
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status, out, _ = run(capsys, *arguments, "--json")
    return status, json.loads(out)


# ----------------------------------------------------------------------------------------------------
# What doctor says of float32, and of a manifest.
# ----------------------------------------------------------------------------------------------------


def test_doctor_finds_what_a_preparation_left(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run_json(capsys, "doctor", saved / "prepared")
    found = result["checkpoint"]
    wasted = {name: t.nbytes // 2 for name, t in load_file(saved / "prepared" / "model.safetensors").items()}
    originals = load_file(saved / "original" / "model.safetensors")
    assert status == 1
    assert found["leftovers"] == {
        name: wasted[name] for name, tensor in originals.items() if tensor.dtype == torch.bfloat16
    }
    assert found["wasted_bytes"] == 33408
    assert (found["config_dtype"], found["half_dtype"], found["is_quantized"]) == ("float32", "bfloat16", True)
    assert found["suggestion"] == f"kbitwrap convert --from {saved / 'prepared'} --out DST --dtype bfloat16"


def test_doctor_prints_what_was_left(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "doctor", saved / "prepared")
    assert (status, err) == (1, "")
    lines = out.splitlines()
    stored = "35 float32 (72,320 bytes), 28 uint8 (37,962 bytes); config dtype: float32"
    assert f"{saved / 'prepared'}: 63 tensors, 110,282 bytes, quantized: {stored}" in lines
    assert any(line.startswith("left in float32: tensors: 7: lm_head.weight, ") for line in lines)
    assert any(line.endswith("and 4 more") for line in lines)
    assert f"  kbitwrap convert --from {saved / 'prepared'} --out DST --dtype bfloat16" in lines


def test_its_suggestion_works(saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "a folder's name"
    source.symlink_to(saved / "prepared")
    _, result = run_json(capsys, "doctor", source)
    command = shlex.split(result["checkpoint"]["suggestion"].replace("DST", str(tmp_path / "out")))
    assert run(capsys, *command[1:])[0] == 0
    assert run(capsys, "doctor", tmp_path / "out")[0] == 0


def test_doctor_of_a_clean_checkpoint(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "doctor", saved / "original", "--verbose")
    assert status == 0
    assert "dtypes: fine: no float32 that the architecture does not load" in out
    assert "suggestion" not in run_json(capsys, "doctor", saved / "original")[1]["checkpoint"]


@pytest.mark.parametrize("name", every_other(["t5", "gpt_oss", "blip_2", "mamba", "wav2vec2"]))
@pytest.mark.parametrize("quant", ["int8", None])
def test_what_an_architecture_keeps_in_float32_is_no_leftover(
    name: str, quant: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    zoo.load(name, quant, torch.float16).save_pretrained(tmp_path / "model")
    assert run_json(capsys, "doctor", tmp_path / "model")[1]["checkpoint"]["leftovers"] == {}


def test_a_float32_model_is_clean_and_said_to_tell_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run_json(capsys, "doctor", zoo.checkpoint("llama"))
    assert (status, result["checkpoint"]["leftovers"]) == (0, {})
    assert result["not_measured"] == [
        "whether it is a merge, and how much of the adapter it holds: give the adapter that was merged (adapter, "
        "--adapter)",
        "whether a preparation left float32: all is float32, and nothing says that the original was 16-bit; if it was: "
        "`kbitwrap convert --dtype bfloat16`",
    ]


def test_doctor_finds_a_partly_upcast_merged_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.weight": torch.ones(4, 4).half(), "model.norm.weight": torch.ones(4)}
    save_file({**tensors, "lm_head.weight": torch.ones(8, 4)}, tmp_path / "model.safetensors")
    status, result = run_json(capsys, "doctor", tmp_path / "model.safetensors")
    found = result["checkpoint"]
    assert (status, found["wasted_bytes"], found["is_quantized"]) == (1, 72, False)
    assert found["leftovers"] == {"model.norm.weight": 8, "lm_head.weight": 64}
    assert found["suggestion"].endswith("--dtype float16")


def test_the_half_dtype_is_that_of_the_base_beside_adapters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    adapters = {
        "base_model.model.lm_head.modules_to_save.default.weight": torch.ones(2, 2),
        "base_model.model.q_proj.lora_A.default.weight": torch.ones(2, 2).half(),
        "base_model.model.q_proj.lora_B.default.weight": torch.ones(2, 2).half(),
    }
    base = {"base_model.model.q_proj.base_layer.weight": torch.ones(2, 2).bfloat16()}
    save_file({**adapters, **base}, tmp_path / "model.safetensors")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    status, result = run_json(capsys, "doctor", tmp_path)
    found = result["checkpoint"]
    assert status == 1  # the empty file is a fault
    assert found["half_dtype"] == "bfloat16"


def test_names_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_file({"norm\x1b[2J\n.weight": torch.ones(2), "b": torch.ones(2).half()}, tmp_path / "model.safetensors")
    status, out, _ = run(capsys, "doctor", tmp_path)
    assert status == 1
    assert r"norm\x1b[2J\n.weight" in out
    assert "\x1b" not in out


def test_doctor_of_a_manifest(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "doctor", saved / "kbitwrap.json")
    assert status == 0
    rows = dict(re.split(" {2,}", line) for line in out.splitlines() if "  " in line)
    assert rows["model.class"] == "'LlamaForCausalLM'"
    assert rows["model.quantization.method"] == "'bitsandbytes_4bit'"
    assert rows["config.precision"] == "'full'"
    assert rows["config.freeze"] == "True"
    assert rows["versions.torch"] == repr(torch.__version__)
    assert rows["plan.added_bytes"] == rows["measured_added_bytes"] == "33408"
    status, result = run_json(capsys, "doctor", saved / "kbitwrap.json")
    assert (status, result["kind"], result["plan"]["added_bytes"]) == (0, "manifest", 33408)
    assert result["tensors"]["parameter"] == 21
    assert len(result["stored_in_another_dtype"]) == 7
    data = json.loads((saved / "kbitwrap.json").read_text())
    data |= {"version": 2, "adapters": {"mine": {"config_sha256": "0" * 64, "dtypes": ["bfloat16", "float32"]}}}
    (saved / "adapted.json").write_text(json.dumps(data))
    said = run(capsys, "doctor", saved / "adapted.json")[1]
    assert re.search(r"\nadapters.mine.dtypes +\['bfloat16', 'float32'\]\n", said)
    assert run(capsys, "doctor", saved / "kbitwrap.json", "--base", "m")[0] == 2


def test_doctor_of_a_folder_says_what_its_manifest_records(
    saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(saved / "original", tmp_path / "run")
    shutil.copy(saved / "kbitwrap.json", tmp_path / "run")
    alone = run_json(capsys, "doctor", saved / "kbitwrap.json")[1]
    assert run_json(capsys, "doctor", tmp_path / "run")[1]["manifest"] == alone
    rows = run(capsys, "doctor", saved / "kbitwrap.json")[1]
    assert run(capsys, "doctor", tmp_path / "run", "--verbose")[1].endswith(rows)
    last = run(capsys, "doctor", tmp_path / "run")[1].splitlines()[-1]
    assert last.startswith("the manifest is of LlamaForCausalLM from ")
    assert last.endswith("; --verbose prints what it records")


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04K\x01.", b'{"format": "kbitwrap-manifest", "version": 9}'])
def test_doctor_refuses_other_files(content: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("file", "file.json"):
        (tmp_path / name).write_bytes(content)
    paths = (tmp_path / "file", tmp_path / "file.json", tmp_path / "none", tmp_path, tmp_path / (300 * "n"))
    for path in paths:
        status, out, err = run(capsys, "doctor", path)
        assert (status, out) == (2, "")
        assert err.startswith("kbitwrap: error: ")
        assert len(err.splitlines()) == 1


HOSTILE = """
import pickle, sys
from pathlib import Path

class Trap:
    def __reduce__(self):
        return (print, ("trapped by pickle",))

folder = Path(sys.argv[1])
(folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
(folder / "configuration.py").write_text("print('trapped by import')")
config = '{"model_type": "trap", "auto_map": {"AutoConfig": "configuration.Trap"}, "architectures": ["Trap"]}'
(folder / "config.json").write_text(config)
from kbitwrap.cli import main
print(main(["doctor", str(folder)]))
import torch
from safetensors.torch import save_file
save_file({"a.weight": torch.ones(2).half(), "norm.weight": torch.ones(2)}, folder / "model.safetensors")
print(main(["doctor", str(folder)]))
"""


def test_nothing_is_unpickled_or_imported(tmp_path: Path) -> None:
    found = forks.run_program(HOSTILE, str(tmp_path))
    assert "trapped by" not in found.stdout + found.stderr
    first, second = found.stdout.split("\n1\n")[:2]
    assert "no code in it was run" in first
    assert "float32 was left by a preparation" in second
    assert found.stdout.endswith("\n1\n")


# ----------------------------------------------------------------------------------------------------
# convert
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [["--manifest", "kbitwrap.json"], ["--like", "original"], ["--dtype", "bfloat16"]])
def test_export(how: list[str], saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    value = how[1] if how[0] == "--dtype" else saved / how[1]
    command = ("convert", "--from", saved / "prepared", "--out", tmp_path / "out", how[0], value)
    status, result = run_json(capsys, *command)
    assert status == 0
    assert (result["saved_bytes"], result["num_tensors"], len(result["converted"])) == (33408, 63, 7)
    assert result["path"] == str(tmp_path / "out")
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights == (saved / "original" / "model.safetensors").read_bytes()

    status, out, err = run(capsys, *command)
    assert (status, out) == (2, "")
    assert "exists and is not empty" in err
    status, out, _ = run(capsys, *command, "--overwrite")
    assert status == 0
    assert out.startswith(f"{tmp_path / 'out'}: 63 tensors, 76,874 bytes")
    assert out.endswith("7 converted\n")


def test_export_in_shards(saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ("convert", "--from", saved / "prepared", "--out", tmp_path / "out", "--dtype", "bfloat16")
    assert run(capsys, *command, "--max-shard-size", "30KB")[0] == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert run(capsys, *command, "--overwrite", "--max-shard-size", "a few")[0] == 2


def test_a_checkpoint_of_another_model_is_no_match(
    saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    convert_checkpoint(saved / "prepared", tmp_path / "in", dtype="bfloat16")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, tmp_path / "in" / "model.safetensors")
    status, out, err = run(
        capsys, "convert", "--from", tmp_path / "in", "--out", tmp_path / "out", "--manifest", saved / "kbitwrap.json"
    )
    assert (status, out) == (1, "")
    assert "model.norm.weight: shape: expected (64,), found (3,)" in err
    options = ("--from", tmp_path / "in", "--out", tmp_path / "out", "--manifest", saved / "kbitwrap.json")
    assert run_json(capsys, "convert", *options) == (
        1,
        {"matches": False, "unexpected": [], "different": {"model.norm.weight": {"shape": [[64], [3]]}}},
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--from", "none", "--dtype", "bfloat16"],
        ["--from", "prepared"],
        ["--from", "prepared", "--manifest", "none.json"],
        ["--from", "prepared", "--manifest", "prepared/config.json"],
        ["--from", "prepared", "--like", "none"],
    ],
)
def test_bad_input_is_one_line(
    options: list[str], saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = [str(saved / o) if not o.startswith("-") and o != "bfloat16" else o for o in options]
    status, out, err = run(capsys, "convert", *paths, "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    assert err.startswith("kbitwrap: error: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--from", "a"],
        ["--out", "b"],
        ["--from", "a", "--out", "b", "--dtype", "float16", "--like", "c"],
        ["--from", "a", "--out", "", "--overwrite"],
    ],
)
def test_bad_usage(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "convert", *options)
    assert (status, out, err.count("\n")) == (2, "", 1)


# ----------------------------------------------------------------------------------------------------
# merge
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as PEFT saves it, with the manifest of its run."""
    folder = tmp_path_factory.mktemp("trained")
    with KbitPreparedModel(zoo.load("llama", "nf4")) as prepared:
        peft_model = training.adapt("llama", prepared.model)
        peft_model.save_pretrained(folder)
        prepared.manifest().save(folder / "kbitwrap.json")
        peft_model.unload()
    return folder


def test_merge_writes_a_half_model(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = zoo.checkpoint("llama")
    status, result = run_json(capsys, "merge", base, trained, "--out", tmp_path / "out", "--device", "cpu")
    assert status == 0
    assert len(result["merged"]) == 2 * len(zoo.ARCHITECTURES["llama"].targets)
    assert result["num_tensors"] == len(tensors_of(tmp_path / "out"))
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.parametrize("form", ["mixed", "quantized"])
def test_merge_writes_the_other_forms(
    form: str, trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base, out, adapter = zoo.checkpoint("llama"), tmp_path / "out", tmp_path / "adapter"
    shutil.copytree(trained, adapter)
    tensors = tensors_of(adapter)  # with a delta as small as one that was trained
    save_file({name: tensor * 0.05 for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    options = ("--device", "cpu", "--as", form, "--check")
    status, result = run_json(capsys, "merge", base, adapter, "--out", out, *options)
    assert status == 0
    assert result["tensors"].keys() == {f"{fqn}.weight" for fqn in result["merged"]}
    is_quantized = form == "quantized"
    for fqn, tensor in result["tensors"].items():
        assert tensors_of(out)[fqn].dtype == (torch.uint8 if is_quantized else torch.bfloat16)
        assert tensor["bits"] == (4 if is_quantized else 16)
    card = (out / "README.md").read_text()
    assert "of what the adapter adds is in these weights" in card
    assert ("rounding them is off by" in card) == (not is_quantized)  # at random, it cancels


def test_merge_writes_the_dequantized_base_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base, out = zoo.checkpoint("llama"), tmp_path / "out"
    options = ("--no-adapter", "--quant", "nf4", "--dtype", "bfloat16", "--device", "cpu")
    status, result = run_json(capsys, "merge", base, "--out", out, *options)
    assert (status, result["merged"], result["is_merge"]) == (0, [], False)
    layer = zoo.load("llama", "nf4").model.layers[0].self_attn.q_proj
    found = tensors_of(out)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, base_weight(layer).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["base", "adapter", "--as", "int4"], "--as"),
        (["base", "adapter", "--as", "quantized", "--seed", "-1"], "Invalid value for '--seed'"),
        (["base", "adapter", "--no-adapter"], "or BASE alone with --no-adapter, found base adapter"),
        (
            ["base", "adapter", "more"],
            "or BASE alone with --no-adapter, found base adapter more",
        ),
        (["--no-adapter"], "Missing argument"),
    ],
)
def test_options_of_forms_that_do_not_fit_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = run(capsys, "merge", *arguments, "--out", tmp_path / "out")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_an_adapter_that_is_not_there_is_looked_for_on_no_hub(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("peft.PeftConfig.from_pretrained", ask)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", ask)
    status, _, err = run(capsys, "merge", "some-adapter", "--out", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert "there is no adapter_config.json with adapter_model.safetensors in 'some-adapter'" in err


@pytest.mark.parametrize("quant", few(["nf4", "nf4-double", "fp4", "fp4-double", "int8"], ["fp4-double", "int8"]))
def test_a_quantization_that_was_only_said_is_the_one_that_is_used_and_no_record(
    quant: str, trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base, adapter = zoo.checkpoint("llama"), tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_bytes((trained / name).read_bytes())
    status, _, err = run(capsys, "merge", base, adapter, "--out", tmp_path / "out")
    assert status == 2
    assert "give the manifest of the run, or the quantization (--quant; 'none' for none)" in err
    options = ("--quant", quant, "--dtype", "bfloat16", "--device", "cpu")
    status, _, err = run(capsys, "merge", base, adapter, "--out", tmp_path / "out", *options)
    assert (status, len(err.splitlines())) == (0, 1)
    assert (
        err == f"kbitwrap: note: nothing records how the base was quantized, so --quant {quant} was taken at its word\n"
    )
    assert (
        f"were in {quant} in training, which the caller said, and nothing recorded confirms."
        in (tmp_path / "out/README.md").read_text()
    )
    with KbitPreparedModel(zoo.load("llama", quant)) as prepared:
        peft_model = PeftModel.from_pretrained(prepared.model, adapter)
        prepared.export(tmp_path / "live", merge_adapters=True, model=peft_model)
        peft_model.unload()
    wanted = {name: tensor_digest(tensor) for name, tensor in tensors_of(tmp_path / "live").items()}
    assert {name: tensor_digest(tensor) for name, tensor in tensors_of(tmp_path / "out").items()} == wanted


def test_merge_needs_a_base_that_the_manifest_records(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("merge", zoo.checkpoint("llama"), trained, "--out", tmp_path / "out", "--quant", "int8")
    status, out, err = run(capsys, *options)
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    status, result = run_json(capsys, *options)
    assert (status, result["matches"]) == (1, False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base": "none"}, "there is no model at"),
        ({"adapter": "none"}, "there is no adapter_config.json"),
        ({"--manifest": "none.json"}, "none.json"),
        ({"--device": "mps"}, "device 'mps' is not available"),
    ],
)
def test_bad_input_to_merge_is_one_line(
    changed: dict[str, str], message: str, trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = {"base": str(zoo.checkpoint("llama")), "adapter": str(trained), "--out": str(tmp_path / "out"), **changed}
    given.update({name: str(tmp_path / given[name]) for name in ("base", "adapter", "--manifest") if name in changed})
    positional = [given.pop("base"), given.pop("adapter")]
    status, out, err = run(capsys, "merge", *positional, *(part for option in given.items() for part in option))
    assert (status, out) == (2, "")
    assert err.startswith("kbitwrap: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
