"""Models that cannot be prepared are refused by name, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module

from kbitwrap import KbitPreparedModel, UnsupportedModelError, build_plan
from kbitwrap.model.checks import refuse_unsupported_tensors, tree_of
from support import zoo
from support.wrapped import Tiny, checkpointed, compiled, ddp, fsdp1, fsdp2, lora


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------
# What is refused.
# ----------------------------------------------------------------------------------------------------


def refused(model: Any, *, allow_meta: bool = False) -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_unsupported_tensors(tree_of(model), allow_meta=allow_meta)
    return caught.value


@pytest.mark.parametrize("model", [None, "meta-llama/Llama-3-8B", {}, torch.zeros(2), nn.Linear], ids=repr)
def test_an_object_that_is_not_a_module_is_refused(model: Any) -> None:
    error = refused(model, allow_meta=True)
    assert isinstance(error, TypeError)
    assert f"found {type(model).__name__}" in str(error)
    with pytest.raises(UnsupportedModelError):
        build_plan(model)


def test_a_model_without_parameters_is_refused() -> None:
    assert "ReLU has no parameters" in str(refused(nn.ReLU()))
    assert "no parameters" in str(refused(nn.Sequential(), allow_meta=True))


def test_the_first_parameter_on_meta_is_named() -> None:
    model = Tiny()
    model.model.layers[1].to("meta")
    assert refused(model).fqn == "model.layers.1.q_proj.weight"
    assert "build_plan works on the meta device" in str(refused(model))
    refuse_unsupported_tensors(tree_of(model), allow_meta=True)


def test_offloaded_weights_are_called_by_name() -> None:
    model = zoo.load("llama", None)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    error = refused(model)
    assert error.fqn == "model.embed_tokens.weight"
    assert "offload" in str(error)


def test_a_dtensor_is_refused_by_name(one_process: None) -> None:
    mesh = init_device_mesh("cpu", (1,))

    model = distribute_module(Tiny(), mesh)
    for allow_meta in (True, False):
        error = refused(model, allow_meta=allow_meta)
        assert error.fqn == "model.embed_tokens.weight"
        assert "DTensor" in str(error)


def test_fsdp2_is_refused_by_the_first_sharded_parameter(one_process: None) -> None:
    model = Tiny()
    fully_shard(model.model.layers[1], mesh=init_device_mesh("cpu", (1,)))
    assert refused(model, allow_meta=True).fqn == "model.layers.1.q_proj.weight"
    assert "before it is sharded" in str(refused(model))


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning:torch")
@pytest.mark.filterwarnings("ignore:FSDP1 is deprecated:FutureWarning:torch")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused_by_name(one_process: None, use_orig_params: bool) -> None:
    model = Tiny()
    layers = model.model.layers
    layers[1] = FullyShardedDataParallel(layers[1], use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    error = refused(model, allow_meta=True)
    assert error.fqn == "model.layers.1._fsdp_wrapped_module." + ("q_proj.weight" if use_orig_params else "_flat_param")
    assert "FSDP1" in str(error)


def test_the_marks_of_flat_and_partitioned_parameters_are_refused() -> None:
    for mark, name in (("_is_flat_param", "FSDP1"), ("ds_id", "ZeRO-3")):
        model = Tiny()
        # ds_id is a count from 0: present, not true.
        setattr(model.lm_head.weight, mark, True if mark == "_is_flat_param" else 0)
        for allow_meta in (True, False):
            error = refused(model, allow_meta=allow_meta)
            assert error.fqn == "lm_head.weight"
            assert name in str(error)


@pytest.mark.parametrize(
    "wraps",
    [(), (ddp,), (compiled,), (lora,), (checkpointed,)],
    ids=["plain", "ddp", "compiled", "lora", "checkpointed"],
)
def test_what_is_not_sharded_is_accepted(wraps: tuple[Callable[[Any], Any], ...], one_process: None) -> None:
    model: nn.Module = Tiny()
    for wrap in wraps:
        model = wrap(model)
    refuse_unsupported_tensors(tree_of(model), allow_meta=False)
    refuse_unsupported_tensors(tree_of(copy.deepcopy(model)), allow_meta=False)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning:torch")
@pytest.mark.filterwarnings("ignore:FSDP1 is deprecated:FutureWarning:torch")
@pytest.mark.filterwarnings("ignore:Tiny has neither a quantization attribute:UserWarning")
@pytest.mark.parametrize("shard", [fsdp1, fsdp2])
def test_suspending_what_was_sharded_since_is_refused_before_anything_changes(
    shard: Callable[[Any], Any], one_process: None
) -> None:
    model = Tiny().bfloat16()
    prepared = KbitPreparedModel(model, precision="full").prepare()
    shard(model)
    before = [(fqn, id(p), p.dtype, p.requires_grad) for fqn, p in model.named_parameters()]
    with pytest.raises(UnsupportedModelError, match="sharded after it was prepared"):
        prepared.suspend()
    assert [(fqn, id(p), p.dtype, p.requires_grad) for fqn, p in model.named_parameters()] == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")  # a FutureWarning since torch 2.14
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_module_of_torchscript_is_refused_by_name(is_inside: bool) -> None:
    scripted = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted) if is_inside else scripted
    with pytest.raises(UnsupportedModelError, match="of TorchScript") as caught:
        KbitPreparedModel(model)
    assert caught.value.fqn == ("1" if is_inside else "")
