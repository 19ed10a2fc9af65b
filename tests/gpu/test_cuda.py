"""On a CUDA device: what the CPU cannot show. Skipped where there is none."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path

import bitsandbytes
import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kbitwrap
from kbitwrap import KbitPreparedModel, Precision, StepTracker
from kbitwrap.edits.stand_ins import HeadForward
from kbitwrap.tensors.upcast import multiplies_half
from support import zoo
from support.cuda_rules import CudaRules
from support.files import tensors_of
from support.snapshot import Snapshot, tensor_digest
from support.training import adapt, step

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]

MIB = 2**20
ALLOCATION = 512  # bytes that CUDA's allocator rounds up to
SEGMENT = 20 * MIB  # the caching allocator serves blocks of 1 to 10 MiB from segments of this size
TABLES = 512 * MIB  # two of 32768 by 4096 in half
NORMS = 65 * 4096 * 2
SAMPLES = (2 + 65) * 4096 * 2  # of each parameter, as much as a norm holds


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


@pytest.mark.parametrize("modules_to_save", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "opt", "gemma2", "mixtral"])
def test_compute_gives_the_numbers_of_full(name: str, autocast: bool, reentrant: bool, modules_to_save: bool) -> None:
    results = []
    for precision in ("full", "compute"):
        model = load(name)
        checkpointing = {"use_reentrant": reentrant}
        KbitPreparedModel(model, precision=precision, gradient_checkpointing_kwargs=checkpointing).prepare()
        peft_model = adapt(name, model, modules_to_save=modules_to_save)
        # The backward pass of the other kernels adds up in an order that differs from run to run.
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), sdpa_kernel(SDPBackend.MATH):
            results.append(step(name, peft_model))
    (their_loss, theirs), (our_loss, ours) = results
    assert theirs
    assert theirs.keys() == ours.keys()
    assert torch.equal(their_loss, our_loss)
    assert [fqn for fqn in theirs if not torch.equal(theirs[fqn], ours[fqn])] == []


@pytest.mark.parametrize("precision", list(Precision), ids=str)
def test_allocated_bytes_are_those_planned(precision: Precision) -> None:
    model = embeddings()
    gc.collect()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    plan = prepared.plan
    assert plan.sample_bytes == SAMPLES
    assert torch.cuda.memory_allocated() - before == plan.added_bytes + SAMPLES
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= plan.peak_bytes + SAMPLES + MIB // 16 <= 1.01 * peak + MIB
    assert torch.cuda.memory_reserved() - reserved <= plan.added_bytes + SAMPLES + SEGMENT
    prepared.restore()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("size", [4096, 300_000, 700_000, 3_000_000])
@pytest.mark.parametrize("precision", list(Precision), ids=str)
def test_the_peak_of_a_small_model_has_its_digests(precision: Precision, size: int, audit: bool) -> None:
    model = nn.ModuleList(nn.LayerNorm(size) for _ in range(2)).to(device="cuda", dtype=torch.bfloat16)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prepared = KbitPreparedModel(model, precision=precision, audit=audit).prepare()
    peak = torch.cuda.max_memory_allocated() - before
    # Samples are there twice while they are put together, and small results are rounded up.
    assert peak <= prepared.plan.peak_bytes + 2 * prepared.plan.sample_bytes + 16 * ALLOCATION
    prepared.restore()


def grown(prepare: Callable[[nn.Module], object]) -> dict[str, int]:
    """What the allocator holds after preparing, and held at the peak, above the start."""
    model = embeddings()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    prepared = prepare(model)
    result = {
        "allocated": torch.cuda.memory_allocated() - allocated,
        "reserved": torch.cuda.memory_reserved() - reserved,
        "allocated peak": torch.cuda.max_memory_allocated() - allocated,
        "reserved peak": torch.cuda.max_memory_reserved() - reserved,
    }
    del prepared
    return result


def with_peft(model: nn.Module) -> nn.Module:
    # Since this option exists, the cache is cleared by default; before, it never was.
    takes_it = "auto_clear_cache" in inspect.signature(peft.prepare_model_for_kbit_training).parameters
    cache = {"auto_clear_cache": False} if takes_it else {}
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False, **cache)


@pytest.mark.real_gpu  # its caching allocator
def test_pefts_way_reserves_the_freed_blocks() -> None:
    """huggingface/peft#3265 on the same shapes: 512 MiB stay, and as much is freed and stays reserved."""
    held = grown(with_peft)
    assert held["allocated"] == TABLES + NORMS
    assert held["reserved"] >= 2 * TABLES
    torch.cuda.empty_cache()


def test_full_reserves_what_stays() -> None:
    held = grown(lambda model: KbitPreparedModel(model, precision="full").prepare())
    assert held["allocated"] == TABLES + NORMS + SAMPLES
    assert held["reserved"] <= TABLES + NORMS + SAMPLES + SEGMENT
    # What stays, and the original of one table beside its float32 copy.
    assert held["allocated peak"] <= 1.01 * (TABLES + NORMS + TABLES / 2)
    assert held["reserved peak"] <= 1.01 * (TABLES + NORMS + TABLES / 2) + SEGMENT


@pytest.mark.parametrize("precision", ["compute", "norms", "adapted", "none"])
def test_the_others_reserve_next_to_nothing(precision: str) -> None:
    held = grown(lambda model: KbitPreparedModel(model, precision=precision).prepare())
    assert held["allocated"] == SAMPLES + (NORMS if precision == "compute" else 0)
    assert held["allocated peak"] <= 2 * MIB
    assert held["reserved peak"] <= SEGMENT


def test_layer_norm_refuses_half_input_with_a_float32_weight() -> None:
    # Why storing a norm in float32 is no way to compute only it in float32. The CPU's kernel accepts this.
    norm = nn.LayerNorm(64).cuda()
    with pytest.raises(RuntimeError, match="expected scalar type"):
        norm(torch.randn(8, 64, device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_of_half_computes_in_float32(make: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(64)).to(device="cuda", dtype=dtype)
    nn.init.normal_(model[0].weight, 1.0, 0.5)
    x = torch.randn(8, 64, device="cuda", dtype=dtype)
    in_float32 = make(64).cuda()
    in_float32.load_state_dict(model[0].state_dict())
    expected = in_float32(x.float()).to(dtype)
    with KbitPreparedModel(model, precision="norms"):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("precision", list(Precision), ids=str)
def test_a_model_of_layer_norms_trains(precision: Precision) -> None:
    # Whatever the residual stream's dtype is, no layer norm may get an input that CUDA's kernel refuses.
    model = load("opt")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt("opt", model)
    prepared.adopt(peft_model)
    loss, gradients = step("opt", peft_model)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())


def run_with_flash_attention(precision: str) -> list[torch.dtype]:
    """A training step that may use no other kernel of attention; the dtypes of its queries."""
    model = load("llama")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt("llama", model)
    prepared.adopt(peft_model)
    seen: list[torch.dtype] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
    ids = torch.arange(16, device="cuda")[None]
    # torch warns of each kernel that it may not use, and why.
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        warnings.simplefilter("ignore")
        peft_model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return seen


needs_flash_attention = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="FlashAttention needs sm80"
)


@pytest.mark.real_gpu
@needs_flash_attention
@pytest.mark.parametrize("precision", ["norms", "adapted", "none"])
def test_flash_attention_runs(precision: str) -> None:
    assert set(run_with_flash_attention(precision)) == {torch.bfloat16}


@pytest.mark.real_gpu
@needs_flash_attention
@pytest.mark.parametrize("precision", ["full", "compute"])
def test_flash_attention_refuses_a_float32_residual_stream(precision: str) -> None:
    with pytest.raises(RuntimeError, match="No available kernel"):
        run_with_flash_attention(precision)


@pytest.mark.parametrize(("name", "quant"), [("llama", "nf4"), ("gpt2", "int8"), ("mixtral", "nf4"), ("gemma2", "nf4")])
def test_merged_weights_are_handed_out_on_the_device_as_an_export_writes_them(
    name: str, quant: str, tmp_path: Path
) -> None:
    model = load(name, quant)
    with KbitPreparedModel(model) as prepared:
        adapt(name, model)
        prepared.export(tmp_path / "merged", merge_adapters=True)
        expected = tensors_of(tmp_path / "merged")
        found = dict(prepared.merged_weights())
        assert {tensor.device for tensor in found.values()} == {torch.device("cuda", 0)}
        assert {fqn: tensor_digest(tensor.cpu()) for fqn, tensor in found.items()} == {
            fqn: tensor_digest(tensor) for fqn, tensor in expected.items()
        }


def test_merging_on_the_device_takes_two_tensors_at_most_beside_the_last() -> None:
    width = 4096
    layer = bitsandbytes.nn.Linear4bit(width, width, bias=False, quant_type="nf4").to(torch.bfloat16).cuda()
    model = nn.Sequential(layer, nn.RMSNorm(width).to(device="cuda", dtype=torch.bfloat16))
    model.is_loaded_in_4bit = True
    prepared = KbitPreparedModel(model, gradient_checkpointing=False).prepare()
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    for measured in (False, True):  # the first pass makes the library's work space
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        for _ in prepared.merged_weights():
            pass
        del _  # the last tensor
        if measured:
            assert torch.cuda.max_memory_allocated() - start <= 2 * 2 * width * width
    assert torch.cuda.memory_allocated() == start


def test_suspending_keeps_the_devices_random_state() -> None:
    model = load("llama")
    prepared = kbitwrap.KbitPreparedModel(model).prepare()
    state = torch.cuda.get_rng_state()
    with prepared.suspended():
        torch.rand(100, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_tracker_names_the_samples_that_stay_on_the_device() -> None:
    model = load("llama")
    gc.collect()
    before = torch.cuda.memory_allocated()
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    with StepTracker(model) as tracker:
        pass
    kept = torch.cuda.memory_allocated() - before
    assert prepared.plan.sample_bytes == tracker.sample_bytes
    assert 0 <= kept - tracker.sample_bytes < 4 * ALLOCATION  # one piece of memory for each dtype


@pytest.mark.parametrize("weight", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("given", [torch.float16, torch.float32], ids=str)
def test_cuda_rules_on_a_cpu_are_those_of_the_device(given: torch.dtype, weight: torch.dtype) -> None:
    def refuses(device: str) -> list[bool]:
        tensor, scale = torch.ones(2, 4, device=device, dtype=given), torch.ones(4, device=device, dtype=weight)
        calls = (lambda: F.layer_norm(tensor, (4,), scale, scale), lambda: F.group_norm(tensor, 2, scale, scale))
        found = []
        for call in calls:
            try:
                call()
                found.append(False)
            except RuntimeError:
                found.append(True)
        return found

    with CudaRules():
        on_cpu = refuses("cpu")
    assert on_cpu == refuses("cuda")


def half_head(dtype: torch.dtype) -> tuple[nn.Linear, torch.Tensor]:
    """A head as wide as Mistral's, and hidden states."""
    torch.manual_seed(0)
    head = nn.Linear(4096, 32000, bias=False, device="cuda", dtype=dtype).requires_grad_(False)
    return head, torch.randn(512, 4096, device="cuda", dtype=dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_head_gives_float32_logits_without_a_float32_weight(dtype: torch.dtype) -> None:
    head, hidden = half_head(dtype)
    HeadForward(head, None)(hidden)  # the matrix library takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        logits = HeadForward(head, None)(hidden)
    assert multiplies_half(hidden, head.weight)
    assert torch.cuda.max_memory_allocated() - before == logits.nbytes
    assert logits.dtype == torch.float32
    gradient = torch.randn_like(logits)
    logits.backward(gradient)
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    torch.testing.assert_close(hidden.grad, (gradient.double() @ head.weight.double()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_logits_of_a_half_head_err_no_more_than_those_of_one_stored_in_float32(dtype: torch.dtype) -> None:
    head, hidden = half_head(dtype)
    exact = F.linear(hidden.double(), head.weight.double())
    stored = F.linear(hidden.float(), head.weight.float())
    error, of_stored = ((found.double() - exact).abs().max() for found in (HeadForward(head, None)(hidden), stored))
    assert error <= of_stored
