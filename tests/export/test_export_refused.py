"""What is not exported, and what a failed export leaves; its memory, its report and its bar."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from peft import get_peft_model
from safetensors.torch import load_file
from torch import nn

import kbitwrap.export.export
import kbitwrap.export.writer
from kbitwrap import ConfigError, ExportError, KbitPreparedModel, UnsupportedModelError
from kbitwrap.export.writer import write_safetensors
from kbitwrap.tensors.lazy import LazyTensor
from support import forks, zoo
from support.files import SHARD, read, saved
from support.killing import fork, lock_alone
from support.memory import resident_peak
from support.snapshot import Snapshot
from support.thorough import each_once
from support.training import adapt

pytestmark = [
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Falcon's linear layers stay unquantized, so a preparation says that the model is not checkpointed.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]


# ----------------------------------------------------------------------------------------------------
# What is no exact base any more.
# ----------------------------------------------------------------------------------------------------


def merge(model: nn.Module) -> str:
    adapt("llama", model).merge_adapter()
    return "model.layers.0.self_attn.q_proj.weight"


def merge_embeddings(model: nn.Module) -> str:
    get_peft_model(model, peft.LoraConfig(target_modules=["embed_tokens"])).merge_adapter()
    return "model.embed_tokens"


def merge_and_unload(model: nn.Module) -> str:
    adapt("llama", model).merge_and_unload()
    return "model.layers.0.self_attn.q_proj.weight"


def unload_a_trained_copy(model: nn.Module) -> str:
    adapt("llama", model, modules_to_save=True).unload()
    return "lm_head.weight"


def resize(model: nn.Module) -> str:
    model.resize_token_embeddings(160, mean_resizing=False)
    return "model.embed_tokens.weight"


def replace_a_parameter(model: nn.Module) -> str:
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.data * 2)
    return "model.norm.weight"


def resize_in_place(model: nn.Module) -> str:
    model.model.norm.weight.data = model.model.norm.weight.data[:4].clone()
    return "model.norm.weight"


def add_a_module(model: nn.Module) -> str:
    model.model.extra = nn.Linear(2, 2)
    return "model.extra.weight"


def remove_a_layer(model: nn.Module) -> str:
    del model.model.layers[-1]
    return f"model.layers.{len(model.model.layers)}.self_attn.q_proj.weight"


CHANGES = [
    merge,
    merge_embeddings,
    merge_and_unload,
    unload_a_trained_copy,
    resize,
    replace_a_parameter,
    resize_in_place,
    add_a_module,
    remove_a_layer,
]


@pytest.mark.parametrize(("change", "precision"), each_once(CHANGES, ["full", "compute", "norms"]))
def test_a_replaced_or_changed_base_is_refused_by_name(
    change: Callable[[nn.Module], str], precision: str, tmp_path: Path
) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    fqn = change(model)
    with pytest.raises(ExportError, match=rf"^{fqn}[ :].*export before .*load the base again") as caught:
        prepared.export(tmp_path / "export")
    assert caught.value.fqn == fqn
    assert list(tmp_path.iterdir()) == []


def test_another_model(tmp_path: Path) -> None:
    prepared = KbitPreparedModel(zoo.load("llama")).prepare()
    for other in (zoo.load("llama"), "llama"):
        with pytest.raises(
            UnsupportedModelError, match=r"model: expected this LlamaForCausalLM or a model made from it"
        ):
            prepared.export(tmp_path / "export", model=other)
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------
# Where it goes.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["five", "5XB", 0, -1, 1.5, None])
def test_an_invalid_shard_size_is_refused(size: object, tmp_path: Path) -> None:
    prepared = KbitPreparedModel(zoo.load("llama")).prepare()
    with pytest.raises(ConfigError, match="max_shard_size: expected bytes or a string such as '5GB', found"):
        prepared.export(tmp_path / "export", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_destination_is_refused(tmp_path: Path) -> None:
    model = zoo.load("llama")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    prepared.export(tmp_path / "export")
    first = read(tmp_path / "export")
    with pytest.raises(ExportError, match="overwrite=True"):
        prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == first
    prepared.export(tmp_path / "export", max_shard_size=SHARD, overwrite=True)
    assert read(tmp_path / "export") == expected


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_save_leaves_the_destination_as_it_was(overwrite: bool, tmp_path: Path) -> None:
    model = zoo.load("llama")
    model.generation_config.temperature = -1.0  # transformers refuses to save it
    prepared = KbitPreparedModel(model, precision="full").prepare()
    (tmp_path / "export").mkdir()
    if overwrite:
        (tmp_path / "export" / "config.json").write_text("old")
    before, files = Snapshot(model), read(tmp_path / "export")
    with pytest.raises(ExportError, match=r"(?s)LlamaForCausalLM could not be saved: .*is as it was") as caught:
        prepared.export(tmp_path / "export", overwrite=overwrite)
    assert caught.value.__cause__ is not None
    assert before.diff(Snapshot(model)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert read(tmp_path / "export") == files


def test_an_unwritable_destination_is_refused(tmp_path: Path) -> None:
    prepared = KbitPreparedModel(zoo.load("llama")).prepare()
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="file"):
        prepared.export(tmp_path / "file" / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def export_to_a_full_disk(folder: Path) -> type | None:
    # Files may have half of the bytes that the weights need.
    prepared = KbitPreparedModel(zoo.load("llama"), precision="full").prepare()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    with pytest.raises(ExportError) as caught:
        prepared.export(folder)
    return type(caught.value.__cause__)


def test_a_full_disk_is_an_export_error(tmp_path: Path) -> None:
    assert forks.run(export_to_a_full_disk, tmp_path / "export") is OSError
    assert list(tmp_path.iterdir()) == []


def kill_exports(root: Path) -> int:
    """Kill thirty exports at random moments.

    Returns:
        How many had not come to their end.
    """
    lock_alone()
    prepared = KbitPreparedModel(zoo.load("llama"), precision="full").prepare()
    prepared.export(root / "expected", max_shard_size=SHARD)
    expected = read(root / "expected")

    def start(destination: Path, overwrite: bool) -> int:
        return fork(lambda path: prepared.export(path, max_shard_size=SHARD, overwrite=overwrite), [destination])

    begin = time.perf_counter()
    assert os.waitpid(start(root / "export0", True), 0)[1] == 0
    longest = 2 * (time.perf_counter() - begin)
    draw = random.Random(0)
    num_killed = 0
    for attempt in range(30):
        destination = root / f"export{attempt % 2}"  # leftovers of the one before last are cleaned up
        overwrite = attempt % 4 < 2
        if destination.exists() and not overwrite:
            shutil.rmtree(destination)
        was_there = destination.exists()
        child = start(destination, overwrite)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        is_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        num_killed += is_killed
        longest *= 1.25 if is_killed else 0.8  # how busy the machine is changes
        assert not was_there or destination.exists()
        if destination.exists():
            # A hidden folder that was left there is removed by the next export.
            found = [path for path in destination.iterdir() if not path.name.startswith(".kbitwrap-")]
            assert {path.name: path.read_bytes() for path in found} == expected, attempt
    for name in ("export0", "export1"):
        prepared.export(root / name, max_shard_size=SHARD, overwrite=True)
    assert sorted(path.name for path in root.iterdir()) == ["expected", "export0", "export1"]
    return num_killed


@pytest.mark.thorough
def test_killed_at_any_moment_it_leaves_all_or_nothing(tmp_path: Path) -> None:
    # Neither every try nor none came to its end, or the moments were no good.
    assert 3 <= forks.run(kill_exports, tmp_path) <= 27


# ----------------------------------------------------------------------------------------------------
# What it costs, and what it says.
# ----------------------------------------------------------------------------------------------------


def exported_memory(folder: Path) -> tuple[int, int, int, int]:
    """The bytes of the largest tensor, of all, of the export, and how much it took at most."""
    config = transformers.LlamaConfig(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")  # the values play no part
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    largest = max(p.nbytes for p in model.parameters())
    total = sum(p.nbytes for p in model.parameters())
    prepared = KbitPreparedModel(model, precision="full", gradient_checkpointing=False).prepare()
    prepared.export(folder / "first")  # what is imported and cached once
    reports = []
    peak = resident_peak(lambda: reports.append(prepared.export(folder / "second")))
    return largest, total, reports[0].num_bytes, peak


@pytest.mark.thorough
def test_memory_stays_below_two_tensors(tmp_path: Path) -> None:
    largest, total, num_bytes, peak = forks.run(exported_memory, tmp_path)
    assert num_bytes == total > 2.5 * largest  # all of it at once would be too much
    assert peak <= 2 * largest


def test_tensors_are_written_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load("mixtral")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    written = []

    def write(path: str, tensors: dict[str, torch.Tensor], *arguments: object, **options: object) -> int:
        written.extend(tensors.items())
        # transformers goes on to write an index and nothing else.
        return write_safetensors(path, tensors, *arguments, **options)

    monkeypatch.setattr(kbitwrap.export.writer, "write_safetensors", write)
    report = prepared.export(tmp_path / "export")
    assert report.num_tensors == len(written)
    lazy = {name for name, tensor in written if isinstance(tensor, LazyTensor)}
    # Fused experts, too, are split without being computed.
    assert {name for name in lazy if "experts.1." in name}
    assert {name for name, tensor in written if tensor.dtype == torch.bfloat16} <= lazy


def test_the_report(tmp_path: Path) -> None:
    model = zoo.load("llama")
    report = KbitPreparedModel(model, precision="full").prepare().export(tmp_path / "export")
    assert report.path == tmp_path / "export"
    assert report.files == ("config.json", "generation_config.json", "model.safetensors")
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert set(report.converted) == {fqn for fqn, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    assert report.merged == ()
    assert report.seconds > 0


@pytest.mark.parametrize("progress", [False, True])
def test_the_progress_bar(progress: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = KbitPreparedModel(zoo.load("llama"), progress=progress).prepare()
    capsys.readouterr()
    prepared.export(tmp_path / "export")
    assert ("export:" in capsys.readouterr().err) == progress
