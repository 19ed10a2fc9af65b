"""The peak of loading is predicted to the byte, where each tensor is copied to the device that it is loaded onto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from torch.utils._python_dispatch import _disable_current_modes
from transformers import BitsAndBytesConfig, core_model_loading

from kbitwrap import StepMemory, predict_step
from kbitwrap.foresight.ledger import highest_levels
from kbitwrap.foresight.loading import loading_of
from kbitwrap.foresight.tracker import Watch
from kbitwrap.model.pretrained import meta_model
from support import forks, zoo
from support.foreseen import ReadAhead
from support.thorough import few


def copied(tensor: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
    """A tensor of a file, which is mapped into memory, as a device gets it."""
    with _disable_current_modes():
        found = tensor[...].to(dtype=dtype)
    return found.clone()


def most_while_loading(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, quantization_config: Any = None
) -> int:
    monkeypatch.setattr(core_model_loading, "_materialize_copy", copied)
    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", ReadAhead)
    cls: Any = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    watch = Watch(on_cuda=True, device="cpu")
    watch.enter("forward")
    with watch:
        model = cls.from_pretrained(
            folder, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=quantization_config
        )
    del model
    levels = highest_levels(watch.ledger.held(), watch.ledger.spans)
    return sum(levels["forward"].values())


def loading_bytes(model: Any) -> int:
    loading = loading_of(model)
    assert loading is not None
    return loading.peak_bytes


CASES = [
    ("llama", "nf4"),
    ("llama", "nf4-double"),
    ("mixtral", "nf4"),
    ("gpt2", "nf4"),
    ("mixtral", None),
    ("t5", None),
]


@pytest.mark.parametrize(("name", "quant"), few(CASES, [("llama", "nf4-double"), ("gpt2", "nf4"), ("mixtral", None)]))
def test_the_peak_of_loading_is_predicted_to_the_byte(
    name: str, quant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, folder = zoo.ARCHITECTURES[name], zoo.checkpoint(name)
    config = None if quant is None else zoo._quantization_config(row, quant, torch.bfloat16)
    model = meta_model(str(folder), config, torch.bfloat16)
    assert loading_bytes(model) == most_while_loading(name, folder, monkeypatch, config)


SAVED = [(name, quant) for name in ("gpt2", "mixtral", "t5") for quant in ("nf4", "nf4-double", "fp4", "int8")]


@pytest.mark.parametrize(("name", "quant"), few(SAVED, [("gpt2", "int8"), ("mixtral", "nf4"), ("t5", "nf4-double")]))
def test_the_peak_of_loading_what_was_saved_quantized_is_predicted_to_the_byte(
    name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.load(name, quant).save_pretrained(tmp_path)
    assert loading_bytes(meta_model(tmp_path)) == most_while_loading(name, tmp_path, monkeypatch)


@pytest.mark.parametrize(("name", "quant"), [("llama", "nf4"), ("gpt2", "int8"), ("t5", None)])
@pytest.mark.parametrize("is_saved", [False, True])
def test_the_bytes_of_files_that_are_mapped_while_they_are_copied_are_those_of_the_largest_tensor(
    name: str, quant: str | None, is_saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = zoo.checkpoint(name), None
    if is_saved:
        zoo.load(name, quant or "nf4").save_pretrained(tmp_path)
        folder = tmp_path
    elif quant is not None:
        config = zoo._quantization_config(zoo.ARCHITECTURES[name], quant, torch.bfloat16)
    sizes: list[int] = []

    def noted(tensor: Any, *args: Any) -> torch.Tensor:
        found = copied(tensor, *args)
        sizes.append(found.nbytes)
        return found

    cls: Any = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    monkeypatch.setattr(core_model_loading, "_materialize_copy", noted)
    cls.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=config)
    loading = loading_of(meta_model(folder, config, torch.bfloat16))
    assert loading is not None
    assert loading.mapped_bytes == max(sizes)


@pytest.mark.thorough
def test_a_mapped_file_takes_pages_that_are_clean_and_no_memory_of_its_own(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(config_of(hidden_size=512, intermediate_size=8192, vocab_size=32000))
    model.bfloat16().save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    del model
    # each tensor is copied, as it is onto a device, because the dtype is another
    found = json.loads(
        forks.run_program(
            f"""
import json, threading
from pathlib import Path
from transformers import LlamaForCausalLM

def held(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

names = "RssAnon", "RssFile"
before = {{name: held(name) for name in names}}
most = dict(before)
is_loaded = threading.Event()

def watch():
    while not is_loaded.wait(0.002):
        for name in names:
            most[name] = max(most[name], held(name))

watcher = threading.Thread(target=watch)
watcher.start()
model = LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, dtype="float32")
is_loaded.set()
watcher.join()
own = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps([most["RssFile"] - before["RssFile"], most["RssAnon"] - before["RssAnon"] - own]))
""",
            folder=tmp_path,
        ).stdout
    )
    mapped, beside = found
    assert mapped > 0.8 * size
    assert beside < 0.2 * size


def config_of(**sizes: int) -> Any:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    return transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **{**shape, "hidden_size": 64, **sizes})


def step_of(source: Any, **options: Any) -> StepMemory:
    """A step with small adapters in 8 bits, where loading holds a layer twice in 16 bits and once in 8."""
    lora = LoraConfig(r=1, target_modules=["q_proj"])
    settings = {"batch_size": 1, "seq_len": 8, "precision": "none", "lora": lora, "optimizer": None, **options}
    quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    return predict_step(source, quantization_config=quantization_config, dtype="bfloat16", **settings)


def test_a_step_says_where_loading_is_the_highest_point() -> None:
    wide = step_of(config_of(intermediate_size=1 << 15, vocab_size=64))
    assert wide.loading_bytes is not None
    assert wide.loading_bytes > wide.peak_bytes
    assert any("loading the model takes more" in note for note in wide.notes)
    assert "loading, before the step: " in str(wide)

    usual = step_of(config_of(), seq_len=512)
    assert not usual.notes
    assert usual.to_dict()["loading_bytes"] == usual.loading_bytes


def test_loading_is_not_told_on_a_cpu_or_of_a_model_that_was_loaded() -> None:
    assert step_of(config_of(), kernels="cpu").loading_bytes is None
    model = transformers.LlamaForCausalLM(config_of())
    assert predict_step(model, batch_size=1, seq_len=8, precision="none").loading_bytes is None
