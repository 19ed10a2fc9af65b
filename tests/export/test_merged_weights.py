"""``merged_weights``: what ``export(merge_adapters=True)`` writes, handed out one tensor at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM

import kbitwrap.export.merged as merged_module
from kbitwrap import (
    ConfigError,
    ExportError,
    KbitPreparedModel,
    LifecycleState,
    ManifestError,
    StateError,
)
from kbitwrap.export.merged import MergedModule
from kbitwrap.tensors import lazy
from support import training, zoo
from support.files import tensors_of
from support.layers import LARGE_LAYERS, adapted_layers, layer_of
from support.memory import allocations, peak
from support.merging import base_weight, jitter
from support.snapshot import Snapshot, tensor_digest
from support.thorough import as_thorough, few

Named = Iterator[tuple[str, torch.Tensor]]


def prepared(name: str, quant: str = "nf4", **fields: Any) -> KbitPreparedModel:
    model = zoo.load(name, quant)
    checkpoints = zoo.ARCHITECTURES[name].supports_gradient_checkpointing
    return KbitPreparedModel(model, gradient_checkpointing=checkpoints, **fields).prepare()


def written_by_transformers(name: str, folder: Path, **options: Any) -> list[str]:
    """The names of a checkpoint's tensors in the order in which ``save_pretrained`` hands them over to be written."""
    plain = getattr(transformers, zoo.ARCHITECTURES[name].model_class).from_pretrained(folder)
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.modeling_utils, "safe_save_file", lambda tensors, *args, **kwargs: written.extend(tensors)
        )
        plain.save_pretrained(folder / "again", **options)
    return written


def assert_as_exported(wrapper: KbitPreparedModel, folder: Path, found: Named, **options: Any) -> list[str]:
    """The same names, and bit for bit the same tensors, in memory that belongs to nobody else."""
    wrapper.export(folder, merge_adapters=True, **options)
    expected = tensors_of(folder)
    held = {tensor.data_ptr() for tensor in (*wrapper.model.parameters(), *wrapper.model.buffers())}
    names = []
    for fqn, tensor in found:
        names.append(fqn)
        assert tensor_digest(tensor) == tensor_digest(expected[fqn]), fqn
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() not in held
        assert not tensor.requires_grad
        tensor.zero_()  # nothing that follows is computed from it
    assert len(names) == len(expected) == len({*names})
    return names


@pytest.mark.parametrize(
    ("name", "quant", "precision"),
    [
        as_thorough(("llama", "nf4", "norms")),
        as_thorough(("llama", "int8", "full")),
        as_thorough(("gemma2", "nf4-double", "full")),  # tied
        ("gpt2", "nf4", "compute"),  # transposed, tied
        as_thorough(("gpt2", "int8", "norms")),
        ("mixtral", "nf4", "full"),  # experts, split and renamed by save_pretrained
        as_thorough(("dbrx", "nf4", "compute")),
        as_thorough(("t5", "int8", "norms")),
        as_thorough(("whisper", "fp4", "norms")),
        as_thorough(("bert", "nf4", "full")),
        as_thorough(("qwen2_vl", "nf4", "norms")),
    ],
)
def test_each_tensor_is_the_one_that_an_export_writes(name: str, quant: str, precision: str, tmp_path: Path) -> None:
    wrapper = prepared(name, quant, precision=precision)
    adapted = training.adapt(name, wrapper.model)
    training.step(name, adapted)
    before = Snapshot(adapted)
    names = assert_as_exported(wrapper, tmp_path / "prepared", wrapper.merged_weights())
    assert names == written_by_transformers(name, tmp_path / "prepared", max_shard_size="1TB")
    # In several files too, unless there is a tensor, or a stack that tensors are cut from, which has one for itself.
    largest = max(tensor.nbytes for tensor in tensors_of(tmp_path / "prepared").values())
    if not any("experts" in fqn for fqn in names):
        assert names == written_by_transformers(name, tmp_path / "prepared", max_shard_size=largest)
        assert (tmp_path / "prepared/again/model.safetensors.index.json").exists()
    assert before.diff(Snapshot(adapted)) == []
    with wrapper.suspended():
        before = Snapshot(adapted)
        assert_as_exported(wrapper, tmp_path / "suspended", wrapper.merged_weights())
        assert before.diff(Snapshot(adapted)) == []


@pytest.mark.parametrize("name", ["mixtral", "dbrx"])
def test_stacks_of_adapted_experts_are_in_order_and_computed_twice_at_most(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = prepared(name)
    names = {"mixtral": ["gate_up_proj", "down_proj"], "dbrx": ["mlp.w1", "mlp.v1", "mlp.w2"]}[name]
    stacks = [fqn for fqn, _ in wrapper.model.named_parameters() if fqn.endswith(tuple(names))]
    config = peft.LoraConfig(target_modules=[], target_parameters=stacks, init_lora_weights=False)
    peft.get_peft_model(wrapper.model, config)
    computed: list[str] = []
    make = MergedModule._rounded

    def counting(merged: MergedModule, name: str, *args: Any) -> lazy.LazyTensor:
        made = make(merged, name, *args)
        compute = made._compute
        made._compute = lambda: [computed.append(f"{merged.fqn}.{name}"), compute()][1]
        return made

    with monkeypatch.context() as patch:
        patch.setattr(MergedModule, "_rounded", counting)
        for _ in wrapper.merged_weights():
            pass
    assert {*stacks} <= {*computed}
    # A file has the first experts of all layers before the others.
    assert max(Counter(computed).values()) <= 2
    names = assert_as_exported(wrapper, tmp_path / "merged", wrapper.merged_weights())
    assert names == written_by_transformers(name, tmp_path / "merged", max_shard_size="1TB")


def test_trained_copies_take_the_place_of_the_originals(tmp_path: Path) -> None:
    wrapper = prepared("llama", precision="full")
    adapted = training.adapt("llama", wrapper.model, modules_to_save=True)
    jitter(adapted)
    wrapper.export(tmp_path / "base")
    assert_as_exported(wrapper, tmp_path / "merged", wrapper.merged_weights())
    trained = dict(wrapper.merged_weights())["lm_head.weight"]
    assert trained.dtype == torch.bfloat16
    assert not torch.equal(trained, tensors_of(tmp_path / "base")["lm_head.weight"])


def test_adapters_are_chosen_by_name(tmp_path: Path) -> None:
    wrapper = prepared("llama")
    adapted = training.adapt("llama", wrapper.model)
    adapted.add_adapter("second", zoo.lora_config("llama", init_lora_weights=False))
    jitter(adapted)
    found = {}
    for active in (["default"], ["second"], ["default", "second"]):
        adapted.base_model.set_adapter(active)
        wrapper.export(tmp_path / "-".join(active), merge_adapters=True)
        found["-".join(active)] = tensors_of(tmp_path / "-".join(active))
    adapted.base_model.set_adapter("default")
    for chosen, key in (
        (None, "default"),
        ("second", "second"),
        (iter(["second", "second"]), "second"),
        (("default", "second"), "default-second"),
    ):
        for fqn, tensor in wrapper.merged_weights(chosen):
            assert torch.equal(tensor, found[key][fqn]), (chosen, fqn)
    with adapted.disable_adapter():
        assert all(torch.equal(t, found["second"][fqn]) for fqn, t in wrapper.merged_weights("second"))
        base = dict(wrapper.merged_weights())
    assert all(torch.equal(tensor, base[fqn]) for fqn, tensor in wrapper.merged_weights([]))
    with pytest.raises(ConfigError, match=r"adapters: expected names out of \['default', 'second'\], found 'third'"):
        wrapper.merged_weights("third")


def test_two_trained_copies_of_one_module_are_refused() -> None:
    wrapper = prepared("llama")
    adapted = training.adapt("llama", wrapper.model, modules_to_save=True)
    adapted.add_adapter("second", zoo.lora_config("llama", modules_to_save=True))
    with pytest.raises(ExportError, match=r"ModulesToSaveWrapper .*only one can replace") as caught:
        wrapper.merged_weights(["default", "second"])
    assert caught.value.fqn == "lm_head"


@pytest.mark.filterwarnings("ignore:Unmerge lora module to 4-bit linear:UserWarning")
@pytest.mark.parametrize("passes", few([30, 1000], [30]))
def test_many_passes_leave_every_byte_of_the_base_where_peft_drifts(passes: int) -> None:
    model: Any = nn.Sequential(layer_of("nf4", 64), nn.RMSNorm(64).to(torch.bfloat16))
    model.is_loaded_in_4bit = True  # by which PEFT chooses its layer
    wrapper = KbitPreparedModel(model, gradient_checkpointing=False).prepare()
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    layer = model[0]
    exact = base_weight(layer.get_base_layer())
    digests, before = dict(wrapper.manifest().tensors), Snapshot(adapted)
    first = {fqn: tensor_digest(tensor) for fqn, tensor in wrapper.merged_weights()}
    for _ in range(passes - 2):
        for _ in wrapper.merged_weights():
            pass
    assert {fqn: tensor_digest(tensor) for fqn, tensor in wrapper.merged_weights()} == first
    assert before.diff(Snapshot(adapted)) == []
    assert dict(wrapper.manifest().tensors) == digests
    assert not wrapper.verify()
    for _ in range(10):
        adapted.merge_adapter()
        adapted.unmerge_adapter()
    drift = (base_weight(layer.get_base_layer()) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert drift > 0.01
    with pytest.raises(ManifestError, match="replaced"):
        wrapper.manifest()


LARGE_FULL = [case for case in LARGE_LAYERS if case[0] in ("linear", "embedding", "8 experts")]


@pytest.mark.filterwarnings("ignore:Sequential has neither:UserWarning")
@pytest.mark.parametrize(
    ("kind", "options", "precision"),
    # Under "full", what is not quantized is stored in float32.
    few([(*case, "norms") for case in LARGE_LAYERS], [(*case, "norms") for case in LARGE_LAYERS[1::8]])
    + few([(*case, "full") for case in LARGE_FULL], [(*case, "full") for case in LARGE_FULL[::4]]),
    ids=str,
)
def test_two_tensors_are_in_memory_at_most_beside_the_last(
    kind: str, options: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, tensor = 512, 2 * 512 * 512
    # as many blocks as a layer of 4096 times 4096 elements
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 4 * width * width // 32)
    model = adapted_layers(kind, width, **options).get_base_model()
    wrapper = KbitPreparedModel(model, gradient_checkpointing=False, precision=precision).prepare()
    sizes: list[int] = []

    def take_all() -> None:
        for _, last in wrapper.merged_weights():  # which is held while the next one is computed
            sizes.append(last.nbytes)

    allocated = allocations(take_all)
    assert sizes == [tensor] * 3 + [2 * width]
    assert tensor < peak(allocated) <= 3 * tensor
    assert sum(allocated) == 0


class TestStates:
    def test_a_wrapper_that_is_not_prepared_has_no_merged_weights(self) -> None:
        wrapper = KbitPreparedModel(zoo.load("llama", "nf4"))
        for state in (LifecycleState.NEW, LifecycleState.RESTORED):
            with pytest.raises(StateError, match="merged_weights") as caught:
                wrapper.merged_weights()
            assert (caught.value.state, caught.value.expected) == (
                state,
                (LifecycleState.PREPARED, LifecycleState.SUSPENDED),
            )
            wrapper.prepare().restore() if state is LifecycleState.NEW else None

    @pytest.mark.parametrize("num_taken", [0, 1])
    @pytest.mark.parametrize("change", ["suspend", "suspend, resume", "restore", "restore, prepare"])
    def test_a_change_of_state_on_the_way_raises(self, change: str, num_taken: int) -> None:
        wrapper = prepared("llama", precision="full")
        found = wrapper.merged_weights()
        for _ in range(num_taken):
            next(found)
        for call in change.split(", "):
            getattr(wrapper, call)()
        with pytest.raises(StateError, match=r"began while the model was prepared, .*again from the beginning"):
            next(found)
        assert list(found) == []

    def test_a_resumed_model_has_other_weights_to_hand_out(self) -> None:
        wrapper = prepared("llama", precision="full")
        with wrapper.suspended():
            found = wrapper.merged_weights()
            next(found)
        with pytest.raises(StateError, match="began while the model was suspended"):
            next(found)

    def test_no_mode_is_held_between_tensors(self, tmp_path: Path) -> None:
        wrapper = prepared("mixtral")
        training.adapt("mixtral", wrapper.model)
        modes = lazy._values, lazy._device
        before = [mode.get() for mode in modes]
        with torch.autocast("cpu", torch.bfloat16):
            for _ in wrapper.merged_weights():
                assert torch.is_grad_enabled()
                assert torch.is_autocast_enabled("cpu")
                assert [mode.get() for mode in modes] == before
        first, second = wrapper.merged_weights(), wrapper.merged_weights()
        for (fqn, tensor), (other, same) in zip(first, second, strict=True):  # in turn
            assert fqn == other
            assert torch.equal(tensor, same)

    def test_an_optimizer_step_on_the_way_counts_for_what_follows(self) -> None:
        wrapper = prepared("llama")
        adapted = training.adapt("llama", wrapper.model)
        before = dict(wrapper.merged_weights())
        found = wrapper.merged_weights()
        seen = dict([next(found) for _ in range(4)])
        jitter(adapted)
        after = dict(wrapper.merged_weights())
        assert all(torch.equal(tensor, before[fqn]) for fqn, tensor in seen.items())
        assert all(torch.equal(tensor, after[fqn]) for fqn, tensor in found)


def test_a_model_that_saves_itself_is_refused() -> None:
    class Own(LlamaForCausalLM):
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

    wrapper = prepared("llama")
    wrapper.model.__class__ = Own
    with pytest.raises(ExportError, match="Own has its own save_pretrained, so its tensors cannot be handed out"):
        wrapper.merged_weights()


def test_what_cannot_be_merged_is_refused_before_the_first_tensor() -> None:
    wrapper = prepared("llama")
    adapted = training.adapt("llama", wrapper.model)
    adapted.merge_adapter()
    with pytest.raises(ExportError):
        wrapper.merged_weights()


def test_modules_without_save_pretrained_are_handed_out_too(tmp_path: Path) -> None:
    model = adapted_layers("nf4", 64, **LARGE_LAYERS[0][1]).get_base_model()
    wrapper = KbitPreparedModel(model, gradient_checkpointing=False).prepare()
    assert isinstance(model, nn.Sequential)
    assert_as_exported(wrapper, tmp_path / "merged", wrapper.merged_weights())


def test_a_model_that_cannot_be_saved_is_refused_as_by_export(tmp_path: Path) -> None:
    model = zoo.load("llama")
    layers = model.model.layers
    layers[1].input_layernorm = layers[0].input_layernorm  # transformers saves no ties that the class does not declare
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    training.adapt("llama", model)
    for refused in (prepared.merged_weights, lambda: prepared.export(tmp_path / "export", merge_adapters=True)):
        with pytest.raises(ExportError, match=r"(?s)LlamaForCausalLM could not be saved: .*is as it was") as caught:
            refused()
        assert caught.value.__cause__ is not None
