"""What is wrapped around a model: names map back, and adapters are told from the base."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kbitwrap import KbitPreparedModel
from kbitwrap.model.records import key_of
from kbitwrap.model.tree import ModelTree
from kbitwrap.model.wrappers import canonical_fqn
from support import zoo
from support.wrapped import Tiny, checkpointed, compiled, ddp, fsdp1, fsdp2, lora


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------
# Names.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fqn", "canonical"),
    [
        ("", ""),
        ("weight", "weight"),
        ("model.layers.0.q_proj.weight", "model.layers.0.q_proj.weight"),
        # PEFT.
        ("base_model.model.lm_head.weight", "lm_head.weight"),
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("model.layers.0.q_proj.base_layer", "model.layers.0.q_proj"),
        ("base_model.model.lm_head.original_module.weight", "lm_head.weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.lm_head.modules_to_save.my-adapter.weight", "lm_head.weight"),
        ("base_model.model.lm_head.modules_to_save.weight", "lm_head.weight"),
        ("base_model.model.score.modules_to_save.default.dense.weight", "score.dense.weight"),
        ("base_model.model.model.embed_tokens.token_adapter.base_layer.weight", "model.embed_tokens.weight"),
        # DDP, FSDP1, compile, activation checkpointing, and one around the other.
        ("module.lm_head.weight", "lm_head.weight"),
        ("_orig_mod.lm_head.weight", "lm_head.weight"),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.q_proj.weight", "model.layers.0.q_proj.weight"),
        ("model.layers.0._checkpoint_wrapped_module.q_proj.weight", "model.layers.0.q_proj.weight"),
        ("model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.norm.bias", "model.layers.0.norm.bias"),
        ("_orig_mod.module.base_model.model.lm_head.base_layer.weight", "lm_head.weight"),
        ("module._orig_mod.base_model.model._orig_mod.lm_head.weight", "lm_head.weight"),
        ("model.layers.0._orig_mod.q_proj.base_layer.base_layer.weight", "model.layers.0.q_proj.weight"),
        # A wrapper is a module too.
        ("base_model.model", ""),
        ("module", ""),
        ("_orig_mod", ""),
        ("model.layers.0._orig_mod", "model.layers.0"),
        # Names that only look like a wrapper's.
        ("modules.0.weight", "modules.0.weight"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("encoder.base_layers.weight", "encoder.base_layers.weight"),
        ("encoder.my_base_layer.weight", "encoder.my_base_layer.weight"),
        ("base_model.encoder.weight", "base_model.encoder.weight"),
        ("base_model.modeling.weight", "base_model.modeling.weight"),
        ("token_adapters.weight", "token_adapters.weight"),
    ],
)
def test_a_wrapped_name_maps_back(fqn: str, canonical: str) -> None:
    assert canonical_fqn(fqn) == canonical
    assert canonical_fqn(canonical) == canonical


def layers_compiled(model: Any) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for i, layer in enumerate(module):
                module[i] = compiled(layer)
    return model


WRAPS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "nothing": (),
    "compile": (compiled,),
    "layers compiled": (layers_compiled,),
    "checkpoint": (checkpointed,),
    "root checkpointed": (checkpoint_wrapper,),
    "ddp": (ddp,),
    "fsdp1": (fsdp1,),
    "fsdp2": (fsdp2,),
    "peft": (lora,),
    "peft, ddp": (lora, ddp),
    "peft, compile": (lora, compiled),
    "compile, peft": (compiled, lora),
    "peft, ddp, compile": (lora, ddp, compiled),
    "peft, compile, ddp": (lora, compiled, ddp),
    "checkpoint, peft, ddp": (checkpointed, lora, ddp),
    "peft, checkpoint, compile": (lora, checkpointed, compiled),
    "peft, layers compiled, ddp": (lora, layers_compiled, ddp),
    "checkpoint, fsdp1": (checkpointed, fsdp1),
    "checkpoint, fsdp1, compile": (checkpointed, fsdp1, compiled),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning:torch")
@pytest.mark.filterwarnings("ignore:FSDP1 is deprecated:FutureWarning:torch")
@pytest.mark.parametrize("wraps", WRAPS.values(), ids=WRAPS)
def test_the_names_in_a_wrapped_model_map_back(wraps: tuple[Callable[[Any], Any], ...], one_process: None) -> None:
    model: nn.Module = Tiny()
    parameters = [fqn for fqn, _ in model.named_parameters()]
    owners = {id(module): fqn for fqn, module in model.named_modules()}
    for wrap in wraps:
        model = wrap(model)
    assert [canonical_fqn(fqn) for fqn, _ in model.named_parameters() if "lora_" not in fqn] == parameters
    # The modules that were there before, wrappers left out.
    found = {fqn: owners[id(module)] for fqn, module in model.named_modules() if id(module) in owners}
    assert {canonical_fqn(fqn): name for fqn, name in found.items()} == {fqn: fqn for fqn in owners.values()}
    # FSDP2 alone changes no name.
    assert any(fqn != name for fqn, name in found.items()) == (wraps not in ((), (fsdp2,)))


# ----------------------------------------------------------------------------------------------------
# Adapters.
# ----------------------------------------------------------------------------------------------------

CAUSAL = {"task_type": "CAUSAL_LM"}


ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: zoo.lora_config("llama"),
    "dora": lambda: zoo.lora_config("llama", use_dora=True),
    "lora on embeddings": lambda: zoo.lora_config("llama", target_modules=["embed_tokens", "q_proj"]),
    "lora and a copied head": lambda: zoo.lora_config("llama", modules_to_save=True),
    "lora and copied norms": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm"]),
    "lora and tokens": lambda: zoo.lora_config("llama", trainable_token_indices=[1, 2]),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=2),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, **CAUSAL),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, **CAUSAL),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=8, **CAUSAL),
}


every_adapter = pytest.mark.parametrize("make", ADAPTERS.values(), ids=ADAPTERS)


def named(model: nn.Module, ids: set[int]) -> set[str]:
    return {fqn for fqn, parameter in model.named_parameters() if id(parameter) in ids}


@every_adapter
def test_adapters_are_what_peft_added(make: Callable[[], Any]) -> None:
    base = zoo.load("llama")
    loaded = list(base.parameters())
    model = peft.get_peft_model(base, make())
    added = {id(p) for p in model.parameters()} - {id(p) for p in loaded}
    assert added
    assert named(model, ModelTree(model).adapter_ids) == named(model, added)
    # PEFT's own word on it: what it left trainable.
    assert named(model, ModelTree(model).adapter_ids) == {f for f, p in model.named_parameters() if p.requires_grad}


# Prompt methods put the model itself at ``base_model``, or a part in one called ``model``: no name tells these apart.
@pytest.mark.parametrize("make", list(ADAPTERS.values())[:-4], ids=list(ADAPTERS)[:-4])
def test_the_names_of_the_base_map_back(make: Callable[[], Any]) -> None:
    base = zoo.load("llama")
    loaded = [(fqn, parameter) for fqn, parameter in base.named_parameters()]
    model = peft.get_peft_model(base, make())
    names = {id(parameter): canonical_fqn(fqn) for fqn, parameter in model.named_parameters()}
    assert {fqn: names[id(parameter)] for fqn, parameter in loaded} == {fqn: fqn for fqn, _ in loaded}


@every_adapter
def test_preparing_freezes_the_base_and_leaves_the_adapter_trainable(make: Callable[[], Any]) -> None:
    base = zoo.load("llama")
    loaded = {id(p) for p in base.parameters()}
    model = peft.get_peft_model(base, make())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    prepared = KbitPreparedModel(model, gradient_checkpointing=False).prepare()
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert named(model, trainable & loaded) == set()
    assert named(model, trainable) == named(model, {id(p) for p in model.parameters()} - loaded)
    prepared.restore()
    assert all(p.requires_grad == p.is_floating_point() for p in model.parameters())


def test_two_adapters_are_adapters_active_or_not() -> None:
    base = zoo.load("llama")
    loaded = {id(p) for p in base.parameters()}
    model = peft.get_peft_model(base, zoo.lora_config("llama", modules_to_save=True))
    model.add_adapter("second", zoo.lora_config("llama", modules_to_save=True, r=2))
    added = {id(p) for p in model.parameters()} - loaded
    assert any("second" in fqn for fqn in named(model, added))
    for name in ("default", "second"):
        model.set_adapter(name)
        assert named(model, ModelTree(model).adapter_ids) == named(model, added)


def test_an_adapter_injected_without_a_peft_model_is_found() -> None:
    model = zoo.load("llama")
    loaded = {id(p) for p in model.parameters()}
    zoo.adapt_by_transformers(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert ModelTree(model).adapter_ids == {id(p) for p in model.parameters()} - loaded


def test_a_model_without_adapters_has_none() -> None:
    assert ModelTree(zoo.load("llama")).adapter_ids == set()
    assert ModelTree(Tiny()).adapter_ids == set()


def test_after_a_merge_there_are_none() -> None:
    model = peft.get_peft_model(zoo.load("llama", None), zoo.lora_config("llama")).merge_and_unload()
    assert ModelTree(model).adapter_ids == set()


# ----------------------------------------------------------------------------------------------------
# Tensors.
# ----------------------------------------------------------------------------------------------------


def test_named_tensors_are_the_named_parameters_with_their_owners() -> None:
    model = Tiny()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[1].norm = model.model.layers[0].norm
    found = ModelTree(model).tensors
    assert [(t.fqn, id(t.parameter)) for t in found] == [(fqn, id(p)) for fqn, p in model.named_parameters()]
    assert all(t.module._parameters[t.name] is t.parameter for t in found)


def test_storage_keys_are_equal_over_one_memory_alone() -> None:
    for device in ("cpu", "meta"):
        tensor = torch.zeros(4, 6, device=device)
        assert key_of(tensor) == key_of(tensor.t()) == key_of(nn.Parameter(tensor)[1:])
        assert key_of(tensor) != key_of(torch.zeros(4, 6, device=device))
        assert key_of(tensor) != key_of(tensor.clone())


# ----------------------------------------------------------------------------------------------------
# Walking once.
# ----------------------------------------------------------------------------------------------------


def test_a_tree_is_the_model_at_one_moment_and_is_walked_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    tree = ModelTree(model)
    assert len(tree.modules) == 2
    assert tree.modules is tree.modules
    assert tree.tensors is tree.tensors
    model.append(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert len(tree.modules) == 2
    again = tree.again()
    assert len(again.modules) == 3
    assert again.tensors[0].parameter is model[0].weight


def rename_child(model: nn.Sequential) -> None:
    model._modules["last"] = model._modules.pop("1")


def rename_parameter(model: nn.Sequential) -> None:
    model[0]._parameters = {"kernel": model[0].weight, "bias": model[0].bias}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.append(nn.ReLU()),
        lambda model: model.pop(1),
        lambda model: model[1].add_module("inner", nn.ReLU()),
        lambda model: setattr(model, "1", nn.ReLU()),
        lambda model: (model[1].add_module("inner", nn.ReLU()), delattr(model[2], "0")),
        lambda model: setattr(model[0], "bias", None),
        lambda model: model[1].register_parameter("scale", nn.Parameter(torch.ones(1))),
        rename_child,
        rename_parameter,
    ],
)
def test_a_model_that_is_walked_again_is_as_it_is_now(change: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.ReLU()))
    tree = ModelTree(model)
    model.eval()
    model[0].weight.data = torch.ones(2, 2)
    assert [(node.path, node.module) for node in tree.nodes] == [*model.named_modules()]
    change(model)
    again = tree.again()
    assert [(node.path, node.module) for node in again.nodes] == [*model.named_modules()]
    assert [tensor.path for tensor in again.tensors] == [name for name, _ in model.named_parameters()]


def test_another_number_of_rows_is_resized_and_another_width_or_a_shard_is_not() -> None:
    layer = nn.Embedding(4, 2)
    record = ModelTree(layer).record(ModelTree(layer).tensors[0])
    shard = nn.Parameter(torch.ones(2, 2))
    assert record.was_resized(shard)
    vars(shard)["_fsdp_flattened"] = True  # stands for FSDP1's mark: one process has no shard that is smaller
    found = [record.was_resized(parameter) for parameter in (layer.weight, nn.Parameter(torch.ones(4, 3)), shard)]
    assert found == [False, False, False]


def test_a_module_that_is_at_two_places_is_one_owner() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.append(model[0])
    tree = ModelTree(model)
    assert [tensor.path for tensor in tree.all_tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert tree.places(tree.tensors[0]) == [(model[0], "weight")]


# ----------------------------------------------------------------------------------------------------
# Names by structure.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning:torch")
@pytest.mark.filterwarnings("ignore:FSDP1 is deprecated:FutureWarning:torch")
@pytest.mark.parametrize("wraps", WRAPS.values(), ids=WRAPS)
def test_a_wrapped_model_is_named_by_structure(wraps: tuple[Callable[[Any], Any], ...], one_process: None) -> None:
    model: nn.Module = Tiny()
    names = {module: fqn for fqn, module in model.named_modules()}
    parameters = [fqn for fqn, _ in model.named_parameters()]
    for wrap in wraps:
        model = wrap(model)
    tree = ModelTree(model)
    assert {node.module: node.fqn for node in tree.base} == names
    assert [tensor.fqn for tensor in tree.base_tensors] == parameters
    assert all(model.get_submodule(t.path.rpartition(".")[0]) is t.module for t in tree.all_tensors)


@every_adapter
def test_a_base_under_any_adapter_is_named_by_structure(make: Callable[[], Any]) -> None:
    base = zoo.load("llama")
    names = {module: fqn for fqn, module in base.named_modules()}
    parameters = dict(base.named_parameters())
    tree = ModelTree(peft.get_peft_model(base, make()))
    found = {node.module: node.fqn for node in tree.base}
    assert found == {module: fqn for module, fqn in names.items() if module in found}
    assert {t.fqn: id(t.parameter) for t in tree.base_tensors} == {fqn: id(p) for fqn, p in parameters.items()}


def test_a_trained_copy_has_the_name_of_what_it_is_a_copy_of() -> None:
    model = peft.get_peft_model(zoo.load("llama"), zoo.lora_config("llama", modules_to_save=True))
    tree = ModelTree(model)
    copies = [t for t in tree.tensors if "modules_to_save" in t.path]
    assert [(t.fqn, id(t.parameter) in tree.adapter_ids) for t in copies] == [("lm_head.weight", True)]


def test_names_that_only_look_like_a_wrappers_are_kept(one_process: None) -> None:
    inner = nn.Sequential(OrderedDict({"module": nn.Linear(1, 1)}))
    model = nn.ModuleDict({"module": inner, "base_layer": nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)})})
    names = [fqn for fqn, _ in model.named_parameters()]
    assert [t.fqn for t in ModelTree(model).tensors] == names
    fully_shard(inner, mesh=init_device_mesh("cpu", (1,)))  # gives it a class of torch's
    assert [t.fqn for t in ModelTree(model).tensors] == names
