"""The exact base, exported while prepared: the very files that were saved before, and a model that was not touched."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kbitwrap.export.export
import kbitwrap.export.writer
from kbitwrap import (
    ConfigError,
    EditError,
    ExportError,
    KbitPreparedModel,
    UnsupportedModelError,
)
from kbitwrap.bench.memory import MemoryMeter
from kbitwrap.export.twin import build_twin
from kbitwrap.export.writer import write_safetensors
from kbitwrap.model.tree import ModelTree
from kbitwrap.tensors.lazy import LazyTensor
from support import forks, zoo
from support.files import SHARD, read, saved, tensors_of
from support.killing import fork, lock_alone
from support.snapshot import Snapshot
from support.thorough import each_once
from support.training import adapt, step

pytestmark = [
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Falcon's linear layers stay unquantized, so a preparation says that the model is not checkpointed.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]


# ----------------------------------------------------------------------------------------------------
# The very files that were saved before.
# ----------------------------------------------------------------------------------------------------


def around_nothing(model: nn.Module) -> nn.Module:
    return model


def lora(model: nn.Module) -> nn.Module:
    return adapt("llama", model)


def two_adapters(model: nn.Module) -> nn.Module:
    peft_model = adapt("llama", model, modules_to_save=True)
    peft_model.add_adapter("second", zoo.lora_config("llama", modules_to_save=True))
    peft_model.set_adapter("second")
    return peft_model


def by_transformers(model: nn.Module) -> nn.Module:
    model.add_adapter(zoo.lora_config("llama"))
    return model


def injected(model: nn.Module) -> nn.Module:
    return peft.inject_adapter_in_model(zoo.lora_config("llama"), model)


def trained_tokens(model: nn.Module) -> nn.Module:
    return get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5, 9]))


def adapted_embeddings(model: nn.Module) -> nn.Module:
    return get_peft_model(model, peft.LoraConfig(target_modules=["embed_tokens", "lm_head", "q_proj"]))


def prompt_tuning(model: nn.Module) -> nn.Module:
    return get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def prefix_tuning(model: nn.Module) -> nn.Module:
    # PEFT refuses it; transformers had another name for it before 5.23.
    new = getattr(model, "activation_checkpointing_disable", None)
    (new or model.gradient_checkpointing_disable)()
    return get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def adaption_prompt(model: nn.Module) -> nn.Module:
    return get_peft_model(model, peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1))


def ln_tuning(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it knows no RMSNorm, and goes on
        return get_peft_model(model, peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]))


def oft(model: nn.Module) -> nn.Module:
    return get_peft_model(model, peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(lora(model), backend="eager")


def compiled_inside(model: nn.Module) -> nn.Module:
    peft_model = lora(model)
    layers = peft_model.base_model.model.model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    return peft_model


WRAPS = [
    around_nothing,
    lora,
    two_adapters,
    by_transformers,
    injected,
    trained_tokens,
    adapted_embeddings,
    prompt_tuning,
    prefix_tuning,
    adaption_prompt,
    ln_tuning,
    oft,
    compiled,
    compiled_inside,
]


@pytest.mark.parametrize(
    ("wrap", "precision", "when"), each_once(WRAPS, ["full", "compute", "norms"], ["before", "after"])
)
def test_wrappers_and_adapters_are_left_out_of_an_export(
    wrap: Callable[[nn.Module], nn.Module], precision: str, when: str, tmp_path: Path
) -> None:
    model = zoo.load("llama")
    expected = saved(model, tmp_path / "before")
    if when == "before":
        live = wrap(model)
        prepared = KbitPreparedModel(live, precision=precision).prepare()
    else:
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        live = wrap(model)
    before = Snapshot(live)
    prepared.export(tmp_path / "inside", max_shard_size=SHARD)
    prepared.export(tmp_path / "around", model=live, max_shard_size=SHARD)
    assert before.diff(Snapshot(live)) == []
    assert read(tmp_path / "inside") == expected
    assert read(tmp_path / "around") == expected


def test_in_a_process_group(tmp_path: Path) -> None:
    model = zoo.load("llama")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    peft_model = lora(model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(peft_model)
        prepared.export(tmp_path / "export", model=parallel, max_shard_size=SHARD)
    finally:
        torch.distributed.destroy_process_group()
    assert read(tmp_path / "export") == expected


def test_any_process_of_a_group_writes_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load("llama")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model).prepare()
    # What transformers reads to let only the first process write.
    module = sys.modules[transformers.PreTrainedModel.should_save_on_this_rank.__module__]
    monkeypatch.setattr(module, "_is_torch_distributed_initialized", lambda: True)
    monkeypatch.setattr(module, "_get_torch_distributed_rank", lambda: 1)
    assert set(saved(model, tmp_path / "theirs")) < set(expected)
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected


def test_configs_are_those_from_before(tmp_path: Path) -> None:
    model = zoo.load("llava")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    model.config.use_cache = False
    model.config.text_config.pad_token_id = 7
    model.config.text_config.pretraining_tp = 2
    model.config.problem_type = "regression"
    model.config.dtype = torch.float32
    model.generation_config.use_cache = False
    model.generation_config.eos_token_id = 7
    during = Snapshot(model)
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected
    assert during.diff(Snapshot(model)) == []
    assert model.config.problem_type == "regression"


def test_modules_that_share_a_config_share_the_exported_one() -> None:
    model = zoo.load("llama")
    assert model.model.config is model.config
    twin = build_twin(ModelTree(model)).model
    assert twin.model.config is twin.config is not model.config


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_nan_payloads_and_layouts(precision: str, tmp_path: Path) -> None:
    model = zoo.load("llama")
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.view(-1)[:].copy_(patterns[-model.model.embed_tokens.weight.numel() :])
        model.model.norm.weight.copy_(patterns[0x7F80 + (1 << 15) - 16 :][: model.model.norm.weight.numel()])
        head = model.lm_head.weight
        head.data = head.data.t().contiguous().t()
    assert not head.is_contiguous()
    assert model.model.norm.weight.isnan().any()
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected


@pytest.mark.parametrize("keep_originals", [False, True])
def test_different_parameters_over_one_memory(keep_originals: bool, tmp_path: Path) -> None:
    model = zoo.load("gemma2")
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full", keep_originals=keep_originals).prepare()
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    report = prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected
    assert "model.embed_tokens.weight" in report.converted


def test_parameters_over_one_memory_that_were_trained_apart_are_exported_as_restore_leaves_them(tmp_path: Path) -> None:
    model = zoo.load("llama")
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)
    embeddings = model.model.embed_tokens.weight.detach().clone()
    prepared = KbitPreparedModel(model, precision="full", freeze=False).prepare()
    with torch.no_grad():
        model.lm_head.weight -= 0.1
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    prepared.restore()
    assert torch.equal(model.model.embed_tokens.weight, embeddings)
    assert not torch.equal(model.lm_head.weight, embeddings)
    assert read(tmp_path / "export") == saved(model, tmp_path / "restored")


@pytest.mark.parametrize("quant", ["nf4", "nf4-double"])
def test_weights_that_a_cpu_repacked(quant: str, tmp_path: Path) -> None:
    import bitsandbytes as bnb

    model = zoo.load("llama", quant)
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    packed = 0
    for module in model.modules():
        # What `Linear4bit.forward` does in eval mode where the CPU has AVX512-BF16.
        if isinstance(module, bnb.nn.Linear4bit) and module.weight.quant_state.shape[0] % 32 == 0:
            weight = module.weight
            weight.data, weight.quant_state = bnb.functional._convert_weight_packed_for_cpu(
                weight.data, weight.quant_state
            )
            packed += 1
    assert packed
    before = Snapshot(model)
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert before.diff(Snapshot(model)) == []
    assert read(tmp_path / "export") == expected


@pytest.mark.parametrize("keep_originals", [False, True])
def test_trained_base_parameters_are_exported_as_restore_leaves_them(keep_originals: bool, tmp_path: Path) -> None:
    model = zoo.load("llama")
    untrained = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full", freeze=False, keep_originals=keep_originals).prepare()
    step("llama", model)
    before = Snapshot(model)
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert before.diff(Snapshot(model)) == []
    prepared.restore()
    assert read(tmp_path / "export") == saved(model, tmp_path / "restored")
    assert read(tmp_path / "export") != untrained


def test_before_preparing_and_after_restoring(tmp_path: Path) -> None:
    model = zoo.load("llama")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full")
    prepared.export(tmp_path / "new", max_shard_size=SHARD)
    prepared.prepare()
    peft_model = adapt("llama", model, modules_to_save=True)
    step("llama", peft_model)
    prepared.restore()
    prepared.export(tmp_path / "restored", max_shard_size=SHARD)
    assert read(tmp_path / "new") == read(tmp_path / "restored") == expected


def test_a_preparation_that_failed_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module) -> None:
        raise RuntimeError("injected")

    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="full")
    with monkeypatch.context() as patch:
        patch.setattr("kbitwrap.preparation.preparation.PreparedState", fail)
        with pytest.raises(EditError, match="injected"):
            prepared.prepare()
    model.config.bos_token_id = 7
    model.resize_token_embeddings(zoo.VOCAB_SIZE + 4)
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == saved(model, tmp_path / "after")


# transformers itself cannot save such a model: what read the quantized weights has no way back.
@pytest.mark.parametrize(
    ("name", "quant"), [("llama", "nf4"), ("llama", "int8"), ("gpt2", "nf4-double"), ("mixtral", "nf4")]
)
def test_a_base_that_was_loaded_quantized(name: str, quant: str, tmp_path: Path) -> None:
    expected = saved(zoo.load(name, quant), tmp_path / "before")
    auto = transformers.AutoModelForCausalLM
    with KbitPreparedModel(
        auto.from_pretrained(tmp_path / "before", device_map={"": "cpu"}), precision="full"
    ) as prepared:
        step(name, adapt(name, prepared.model))
        prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected


def test_the_drop_in_prepared_twice(tmp_path: Path) -> None:
    model = zoo.load("llama")
    expected = saved(model, tmp_path / "before")
    kbitwrap.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    peft_model = lora(model)
    kbitwrap.prepare_model_for_kbit_training(peft_model, gradient_checkpointing_kwargs={"use_reentrant": False})
    prepared = kbitwrap.prepared_of(peft_model)
    assert prepared is not None
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected


def test_an_export_loads_as_any_checkpoint(tmp_path: Path) -> None:
    model = zoo.load("llama")
    original = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    with KbitPreparedModel(model, precision="full") as prepared:
        prepared.export(tmp_path / "export")
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "export", device_map={"": "cpu"}, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found = loaded.state_dict()
    assert found.keys() == original.keys()
    assert all(
        torch.equal(found[fqn].view(-1).view(torch.uint8), original[fqn].view(-1).view(torch.uint8)) for fqn in found
    )


def test_the_export_page_shows_the_real_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "export.md"
    section = page.read_text(encoding="utf-8").partition("## The exact base\n")[2].partition("\n## ")[0]
    (block,) = re.findall("```python\n(.*?)```", section, re.DOTALL)
    model = zoo.load("llama")
    expected = saved(model, tmp_path / "before", "5GB")
    monkeypatch.chdir(tmp_path)
    exec(block, {"model": model})
    assert read(tmp_path / "run" / "base") == expected
    # What saving a prepared model itself gives.
    KbitPreparedModel(model, precision="full").prepare()
    prepared = saved(model, tmp_path / "prepared", "5GB")
    assert json.loads(prepared["config.json"])["dtype"] == "float32"
    assert len(prepared["model.safetensors"]) > 1.5 * len(expected["model.safetensors"])


# ----------------------------------------------------------------------------------------------------
# Other ways to be saved.
# ----------------------------------------------------------------------------------------------------


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """One of the classes that save in a way of their own."""

    def save_pretrained(self, save_directory: str | Path, **kwargs: object) -> None:
        super().save_pretrained(save_directory, **kwargs)
        Path(save_directory, "extra.txt").write_text("extra")


def write_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give transformers' ``save_pretrained`` another name for the function that writes a file."""
    own = transformers.PreTrainedModel.save_pretrained
    names = tuple("write_file" if name == "safe_save_file" else name for name in own.__code__.co_names)
    scope = {**own.__globals__, "write_file": own.__globals__["safe_save_file"]}
    renamed = types.FunctionType(
        own.__code__.replace(co_names=names), scope, own.__name__, own.__defaults__, own.__closure__
    )
    renamed.__kwdefaults__ = own.__kwdefaults__
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", renamed)


def wrap_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    own = transformers.PreTrainedModel.save_pretrained

    @functools.wraps(own)
    def wrapper(*args: object, **kwargs: object) -> None:
        own(*args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", wrapper)


def test_a_class_that_overrides_save_pretrained_is_materialized_with_a_warning(tmp_path: Path) -> None:
    model = zoo.load("llama")
    model.__class__ = LlamaForCausalLM
    expected = saved(model, tmp_path / "before")
    assert "extra.txt" in expected
    prepared = KbitPreparedModel(model, precision="full").prepare()
    before = Snapshot(model)
    with pytest.warns(UserWarning, match="LlamaForCausalLM has its own save_pretrained, so .* at once"):
        prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert before.diff(Snapshot(model)) == []
    assert read(tmp_path / "export") == expected


@pytest.mark.parametrize("change", [write_by_another_name, wrap_saving])
def test_an_unknown_save_pretrained_is_materialized_with_a_warning(
    change: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("gemma2")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamed = prepared.export(tmp_path / "streamed", max_shard_size=SHARD)
    change(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be computed and written one at a time") as caught:
        report = prepared.export(tmp_path / "export", max_shard_size=SHARD)
    (warning,) = caught
    tensors = tensors_of(tmp_path / "export").values()
    num_bytes = sum(tensor.nbytes for tensor in tensors if tensor.dtype == torch.bfloat16)
    message = str(warning.message)
    assert f"transformers {transformers.__version__} does not write files by calling safe_save_file" in message
    assert f"{len(report.converted)} of them, {num_bytes:,} bytes, are held in memory at once" in message
    assert warning.filename == __file__
    assert read(tmp_path / "export") == expected
    assert (report.num_tensors, report.num_bytes) == (streamed.num_tensors, streamed.num_bytes)
    assert (report.num_tensors, report.num_bytes) == (len(tensors), sum(tensor.nbytes for tensor in tensors))


def test_there_is_no_warning_where_no_tensor_has_to_be_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("gemma2")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    write_by_another_name(monkeypatch)
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
@pytest.mark.parametrize("shard", ["5GB", 100])
def test_a_plain_torch_model_is_exported(shard: int | str, tmp_path: Path) -> None:
    model = Plain().bfloat16()
    expected = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    prepared = KbitPreparedModel(model, precision="full").prepare()
    before = Snapshot(model)
    report = prepared.export(tmp_path / "export", max_shard_size=shard)
    assert before.diff(Snapshot(model)) == []
    found = tensors_of(tmp_path / "export")
    assert found.keys() == expected.keys()
    assert all(found[fqn].dtype == expected[fqn].dtype and torch.equal(found[fqn], expected[fqn]) for fqn in found)
    assert report.num_tensors == len(expected)
    assert report.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    if shard == "5GB":
        assert report.files == ("model.safetensors",)
    else:
        index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert set(index["weight_map"].values()) == {file for file in report.files if file.endswith(".safetensors")}


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
def test_names_that_wrappers_use_too(tmp_path: Path) -> None:
    names = ("module", "_orig_mod", "base_model", "model")
    inner = nn.ModuleDict({name: nn.LayerNorm(2 + i) for i, name in enumerate(names)})
    model = nn.Sequential(OrderedDict(module=inner, other=nn.LayerNorm(7))).bfloat16()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with KbitPreparedModel(model, precision="full") as prepared:
        assert set(prepared.manifest().tensors) == set(expected)
        prepared.export(tmp_path / "export")
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: t.tolist() for name, t in tensors.items()} == {name: t.tolist() for name, t in expected.items()}


class Container(nn.Module):
    """A model around one of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder = model
        self.projection = nn.Linear(8, 8).bfloat16()


class SavedContainer(Container):
    """One that writes itself, as sentence embedders do: the model in a folder, its own weights in another."""

    def save_pretrained(self, folder: Path) -> None:
        self.encoder.save_pretrained(folder / "encoder")
        (folder / "projection").mkdir(parents=True)
        save_file(self.projection.state_dict(), folder / "projection" / "weights.safetensors")


@pytest.mark.parametrize("merge_adapters", [False, True])
def test_a_container_that_cannot_save_itself_is_refused_and_the_part_that_can_is_named(
    merge_adapters: bool, tmp_path: Path
) -> None:
    model = Container(zoo.load("llama"))
    prepared = KbitPreparedModel(model, gradient_checkpointing=False).prepare()
    with (
        pytest.raises(ExportError, match="prepare and export encoder by itself") as caught,
        pytest.warns(UserWarning, match="no adapter") if merge_adapters else contextlib.nullcontext(),
    ):
        prepared.export(tmp_path / "export", merge_adapters=merge_adapters)
    assert caught.value.fqn == "encoder"
    assert list(tmp_path.iterdir()) == []
    prepared.restore()
    expected = saved(model.encoder, tmp_path / "before")
    KbitPreparedModel(model.encoder, precision="full").prepare().export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected


def test_a_container_that_saves_itself_is_exported_by_its_own_function(tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {
            f"{part}/{name}": data for part in ("encoder", "projection") for name, data in read(folder / part).items()
        }

    model = SavedContainer(zoo.load("llama"))
    model.save_pretrained(tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full", gradient_checkpointing=False).prepare()
    adapt("llama", model.encoder)
    before = Snapshot(model)
    with pytest.warns(UserWarning, match="SavedContainer has its own save_pretrained.* are held in memory at once"):
        report = prepared.export(tmp_path / "export")
    assert files(tmp_path / "export") == files(tmp_path / "before")
    assert report.files == tuple(sorted(files(tmp_path / "export")))
    assert report.num_tensors == sum(len(tensors_of(tmp_path / "export" / part)) for part in ("encoder", "projection"))
    assert {"projection.weight", "encoder.lm_head.weight"} <= {*report.converted}
    assert before.diff(Snapshot(model)) == []


def test_an_extra_state_that_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    class Stateful(Plain):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    prepared = KbitPreparedModel(Stateful().bfloat16()).prepare()
    with pytest.raises(ExportError, match=r"_extra_state: expected a tensor.*found dict") as caught:
        prepared.export(tmp_path / "export")
    assert caught.value.fqn == "_extra_state"
    assert list(tmp_path.iterdir()) == []


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
    return "lm_head"


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
    return "model.extra"


def remove_a_layer(model: nn.Module) -> str:
    del model.model.layers[-1]
    return f"model.layers.{len(model.model.layers)}"


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
    """Kill sixty exports at random moments.

    Returns:
        How many had not come to their end.
    """
    lock_alone()
    prepared = KbitPreparedModel(zoo.load("llama"), precision="full").prepare()
    prepared.export(root / "expected", max_shard_size=SHARD)
    expected = read(root / "expected")

    def start(destination: Path, overwrite: bool) -> int:
        return fork(lambda path: prepared.export(path, max_shard_size=SHARD, overwrite=overwrite), [destination])

    times = []
    for _ in range(5):
        begin = time.perf_counter()
        assert os.waitpid(start(root / "export0", True), 0)[1] == 0
        times.append(time.perf_counter() - begin)
    draw = random.Random(0)
    num_killed = 0
    for attempt in range(60):
        destination = root / f"export{attempt % 2}"  # leftovers of the one before last are cleaned up
        overwrite = attempt % 4 < 2
        if destination.exists() and not overwrite:
            shutil.rmtree(destination)
        was_there = destination.exists()
        child = start(destination, overwrite)
        time.sleep(draw.uniform(0, sorted(times)[2]))
        os.kill(child, signal.SIGKILL)
        num_killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert not was_there or destination.exists()
        if destination.exists():
            # A hidden folder that was left there is removed by the next export.
            found = [path for path in destination.iterdir() if not path.name.startswith(".kbitwrap-")]
            assert {path.name: path.read_bytes() for path in found} == expected, attempt
    for name in ("export0", "export1"):
        prepared.export(root / name, max_shard_size=SHARD, overwrite=True)
    assert sorted(path.name for path in root.iterdir()) == ["expected", "export0", "export1"]
    return num_killed


def test_killed_at_any_moment_it_leaves_all_or_nothing(tmp_path: Path) -> None:
    # Neither every try nor none came to its end, or the moments were no good.
    assert 5 <= forks.run(kill_exports, tmp_path) <= 55


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
    meter = MemoryMeter(torch.device("cpu"))
    assert meter.method == "VmHWM, reset before"
    meter.start()
    report = prepared.export(folder / "second")
    return largest, total, report.num_bytes, meter.peak()


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
