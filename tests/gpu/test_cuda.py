"""On a CUDA device: what the CPU cannot show. Skipped where there is none."""

from __future__ import annotations

import gc
import warnings

import peft
import pytest
import torch
from torch import nn

import kbitwrap
import zoo
from kbitwrap import KbitPreparedModel, Precision
from snapshot import Snapshot
from training import adapt, step

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:restore.. made:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]

MIB = 2**20
SEGMENT = 20 * MIB  # the caching allocator rounds large blocks up to segments of this size


def load(name: str, quant: str | None = "nf4") -> nn.Module:
    model = zoo.load(name, quant, device_map={"": 0}) if quant else zoo.load(name, None).cuda()
    gc.collect()
    torch.cuda.empty_cache()
    return model


def embeddings() -> nn.Module:
    """What of Mistral-7B a preparation doubles: two tables of 256 MiB, and norms."""
    torch.manual_seed(0)
    norms = nn.ModuleList(nn.LayerNorm(4096, bias=False) for _ in range(65))
    model = nn.ModuleDict(
        {"embed": nn.Embedding(32768, 4096), "norms": norms, "head": nn.Linear(4096, 32768, bias=False)}
    )
    return model.to(device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("precision", list(Precision), ids=str)
@pytest.mark.parametrize("name", ["llama", "opt", "gemma2"])
def test_restore_is_exact_on_the_device(name: str, precision: Precision) -> None:
    model = load(name)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt(name, model)
    prepared.adopt(peft_model)
    step(name, peft_model)
    with prepared.suspended():
        pass
    prepared.restore()
    peft_model.unload()
    assert before.diff(Snapshot(model), moved=precision.upcasts_all) == []


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_compute_gives_the_numbers_of_full(name: str, autocast: bool) -> None:
    results = []
    for precision in ("full", "compute"):
        model = load(name)
        KbitPreparedModel(model, precision=precision).prepare()
        peft_model = adapt(name, model)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            results.append(step(name, peft_model))
    (their_loss, theirs), (our_loss, ours) = results
    assert torch.equal(their_loss, our_loss)
    assert all(torch.equal(theirs[fqn], ours[fqn]) for fqn in theirs)


@pytest.mark.parametrize("precision", list(Precision), ids=str)
def test_allocated_bytes_are_those_planned(precision: Precision) -> None:
    model = embeddings()
    gc.collect()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    plan = prepared.plan
    assert torch.cuda.memory_allocated() - before == plan.added_bytes
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= plan.peak_bytes <= 1.01 * peak + MIB
    assert torch.cuda.memory_reserved() - reserved <= plan.added_bytes + SEGMENT
    prepared.restore()
    assert torch.cuda.memory_allocated() == before


def test_beside_pefts_way() -> None:
    """huggingface/peft#3265 on the same shapes: what stays, and what stays reserved."""
    grown = {}
    for name, prepare in (("peft", peft.prepare_model_for_kbit_training), ("compute", None)):
        model = embeddings()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        if prepare is not None:
            prepare(model, use_gradient_checkpointing=False)
        else:
            KbitPreparedModel(model, precision=name).prepare()
        grown[name] = torch.cuda.memory_allocated() - before
        del model
    assert grown["peft"] == 512 * MIB + MIB // 2
    assert grown["compute"] <= 0.6 * MIB


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_with_half_input_and_half_weight_computes_in_float32(make: type[nn.Module]) -> None:
    # CUDA's layer_norm refuses half input with a float32 weight, so storing one there is no way out.
    model = nn.Sequential(make(64)).to(device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = make(64).cuda()(x.float()).bfloat16()
    with KbitPreparedModel(model, precision="norms"):
        assert torch.equal(model(x), expected)


def test_flash_attention_runs_under_norms() -> None:
    model = load("llama")
    with KbitPreparedModel(model, precision="norms"):
        peft_model = adapt("llama", model)
        seen = []
        hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            ids = torch.arange(16, device="cuda")[None]
            peft_model(input_ids=ids, labels=ids).loss.backward()
        hook.remove()
    assert seen[0] == torch.bfloat16


def test_suspending_keeps_the_devices_random_state() -> None:
    model = load("llama")
    prepared = kbitwrap.KbitPreparedModel(model).prepare()
    state = torch.cuda.get_rng_state()
    with prepared.suspended():
        torch.rand(100, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
