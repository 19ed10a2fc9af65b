"""An export of the base is byte for byte what `save_pretrained` wrote before, whatever is around it."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from peft import get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kbitwrap.export.export
import kbitwrap.export.writer
from kbitwrap import EditError, KbitPreparedModel
from kbitwrap.export.twin import build_twin
from kbitwrap.model.tree import ModelTree
from support import zoo
from support.files import SHARD, read, saved
from support.repacked import repacked
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
    zoo.adapt_by_transformers(model, zoo.lora_config("llama"))
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
    model = zoo.load("llama", quant)
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    before = Snapshot(repacked(model))
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
        patch.setattr("kbitwrap.preparation.preparation.ModelState", fail)
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
    with pytest.warns(UserWarning, match="use export, or save inside suspended"):
        prepared = saved(model, tmp_path / "prepared", "5GB")
    assert json.loads(prepared["config.json"])["dtype"] == "float32"
    assert len(prepared["model.safetensors"]) > 1.5 * len(expected["model.safetensors"])
