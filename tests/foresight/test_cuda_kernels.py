"""What CUDA's kernels hold, told on a CPU: each rule against figures computed by hand from PyTorch's sources."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BitsAndBytesConfig, LlamaConfig, MistralConfig

from kbitwrap import predict_step
from kbitwrap.foresight import cuda, tracker
from kbitwrap.foresight.ledger import Ledger, Storage
from kbitwrap.foresight.tracker import Watch

BLOCK, MIB = 512, 1 << 20


def up(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def followed(
    function: Callable[..., torch.Tensor],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = True,
) -> tuple[list[int], int]:
    """Run a function of new tensors, and its backward: what it kept after forward, and the most made in backward."""
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point) for shape in shapes]
        watch = Watch(on_cuda=True)
        with watch:
            with cuda.CudaFunctions():
                made = function(*given)
            before = len(events(watch.ledger))
            kept = live(watch.ledger)
            if backward:
                grad = torch.empty_like(made)
                start = len(events(watch.ledger))
                with cuda.CudaFunctions():
                    torch.autograd.grad(made, given, grad)
        del made
    return kept, highest(watch.ledger, start) if backward else before


def events(ledger: Ledger) -> list[tuple[Storage, int]]:
    return [event for span in ledger.spans for event in span.events]


def live(ledger: Ledger) -> list[int]:
    kept: dict[Storage, int] = {}
    for storage, number in events(ledger):
        if number > 0:
            kept[storage] = storage.num_bytes
        else:
            del kept[storage]
    return sorted(kept.values(), reverse=True)


def highest(ledger: Ledger, start: int) -> int:
    """The most that is made above the level at an event."""
    level = most = 0
    for storage, number in events(ledger)[start:]:
        level += number * storage.num_bytes
        most = max(most, level)
    return most


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def test_flash_attention_keeps_its_output_and_the_sums_of_rows() -> None:
    kept, _ = followed(causal, (2, 8, 130, 64), (2, 8, 130, 64), (2, 8, 130, 64))
    out, sums = 2 * 8 * 130 * 64 * 2, 2 * 8 * 130 * 4
    assert kept == sorted([up(out), up(sums), BLOCK, BLOCK], reverse=True)


def test_flash_backward_sums_in_float32_over_128_queries_and_all_heads_of_a_group() -> None:
    _, peak = followed(causal, (2, 8, 130, 64), (2, 2, 130, 64), (2, 2, 130, 64))
    query, key = 2 * 8 * 130 * 64 * 2, 2 * 2 * 130 * 64 * 2
    sums, accumulated, expanded = 2 * 8 * 256 * 4, 2 * 8 * 256 * 64 * 4, 2 * 8 * 130 * 64 * 2
    copied = [query, query]  # the output and its gradient: here their heads come before their tokens
    assert peak == sum(map(up, [query, key, key, sums, accumulated, expanded, expanded, *copied]))


def test_heads_that_are_no_multiple_of_8_are_padded_for_flash_attention() -> None:
    kept, _ = followed(causal, (1, 2, 128, 20), (1, 2, 128, 20), (1, 2, 128, 20), backward=False)
    assert kept[0] == 2 * 128 * 24 * 2


def test_memory_efficient_attention_rounds_its_sums_to_32_queries() -> None:
    kept, peak = followed(causal, (2, 4, 100, 64), (2, 4, 100, 64), (2, 4, 100, 64), dtype=torch.float32)
    out, sums = 2 * 4 * 100 * 64 * 4, 2 * 4 * 128 * 4
    assert kept == sorted([up(out), up(sums), BLOCK, BLOCK], reverse=True)
    tiles = 2 * 4 * 2 * (64 * 64 * 4 + 16)
    rows = 2 * 4 * 100 * 4
    assert peak == sum(map(up, [out, out, out, rows, tiles]))


def test_a_mask_of_odd_length_is_converted_and_laid_out_anew() -> None:
    def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(1, 1, 33, 33, dtype=torch.bool)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    kept, _ = followed(masked, (1, 2, 33, 64), (1, 2, 33, 64), (1, 2, 33, 64), backward=False)
    assert up(33 * 40 * 2) in kept  # rows of 40 elements, for all heads together


def test_grouped_heads_in_float32_are_left_to_plain_products() -> None:
    kept, _ = followed(causal, (1, 4, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32), dtype=torch.float32)
    assert kept.count(4 * 64 * 64 * 4) == 1  # the probabilities


def test_the_kernels_that_are_switched_off_are_not_taken() -> None:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        kept, _ = followed(causal, (1, 2, 100, 64), (1, 2, 100, 64), (1, 2, 100, 64), backward=False)
    assert up(2 * 128 * 4) in kept


def test_dropout_keeps_one_byte_an_element() -> None:
    kept, _ = followed(lambda value: F.dropout(value, 0.1), (64, 64))
    assert kept == [64 * 64 * 2, 64 * 64]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 4), (torch.bfloat16, 4 + 2)])
def test_a_float32_softmax_of_float16_needs_no_copy(dtype: torch.dtype, most: int) -> None:
    def made(value: torch.Tensor) -> torch.Tensor:
        return F.softmax(value, dim=-1, dtype=torch.float32)

    with FakeTensorMode():
        value = torch.empty(64, 64, dtype=dtype)
        watch = Watch()
        with watch, cuda.CudaFunctions():
            made(value)
    is_copied = sum(storage.num_bytes for storage, number in events(watch.ledger) if number > 0) > 64 * 64 * 4
    assert is_copied == (dtype is torch.bfloat16)


def test_the_backward_of_a_softmax_makes_a_product_of_its_own() -> None:
    size = 64 * 64 * 4
    _, peak = followed(lambda value: F.softmax(value, dim=-1), (64, 64), dtype=torch.float32)
    assert peak == 2 * size


@pytest.mark.parametrize(
    "function",
    [torch.rsqrt, torch.exp, torch.sum, lambda t: t.pow(2), lambda t: F.layer_norm(t, (8,)), lambda t: t.softmax(-1)],
)
def test_autocast_computes_in_float32_what_it_does_on_cuda(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), cuda.CudaFunctions():
        assert function(torch.empty(8, 8, dtype=torch.bfloat16)).dtype is torch.float32


def test_autocast_keeps_the_copy_of_a_trained_weight_until_it_ends() -> None:
    with FakeTensorMode():
        weight, value = torch.empty(64, 64, requires_grad=True), torch.empty(8, 64, dtype=torch.bfloat16)
        watch = Watch()
        with watch, torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16), cuda.CudaFunctions(), torch.enable_grad():
                F.linear(value, weight)
                inside = live(watch.ledger)
            outside = live(watch.ledger)
    assert inside == [64 * 64 * 2]
    assert outside == []


CONFIG = LlamaConfig(
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_hidden_layers=1,
    vocab_size=1024,
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
)
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


LORA = LoraConfig(target_modules=["q_proj"])


def predicted(**options: Any) -> Any:
    options = {"quantization_config": NF4, "batch_size": 1, "seq_len": 128, "lora": LORA} | options
    return predict_step(CONFIG, **options)


class Projection(nn.Module):
    """A model of one layer, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(512, 1024, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.project(x).mean())


def state(optimizer: str, rank: int) -> int:
    """The bytes of an optimizer's state for a LoRA on the layer."""
    step = predict_step(
        Projection(),
        precision="none",
        gradient_checkpointing=False,
        inputs={"x": ((2, 512), "bfloat16")},
        lora=LoraConfig(r=rank, target_modules=["project"]),
        optimizer=optimizer,
        batch_size=2,
        seq_len=1,
    )
    return int(step.static_by_kind.get("optimizer", 0))


def test_the_states_of_optimizers_are_those_of_their_libraries() -> None:
    weights = [16 * 512, 16 * 1024]
    moments = sum(2 * up(4 * n) for n in weights)
    counters = len(weights) * BLOCK
    assert min(weights) >= 4096
    of_bytes = sum(2 * (up(n) + up(-(-n // 256) * 4)) for n in weights) + 2 * 1024  # and two tables of 256 codes
    assert state("adamw_torch", 16) == moments
    assert state("adamw_torch_fused", 16) == moments + counters
    assert state("sgd", 16) == 0
    assert state("adamw_bnb_8bit", 16) == state("adamw_8bit", 16) == state("paged_adamw_8bit", 16) == of_bytes
    assert state("paged_adamw_32bit", 16) == moments  # in managed memory only from 100,000 elements on


def test_large_paged_states_are_not_of_the_devices_allocator() -> None:
    sizes = [256 * 512, 256 * 1024]
    assert min(sizes) > 100_000
    assert state("paged_adamw_32bit", 256) == 0
    assert state("adamw_torch", 256) == 2 * 4 * sum(sizes)


def test_where_cuda_computes_as_a_cpu_the_rules_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "ALLOCATION_BYTES", 1)
    monkeypatch.setattr(tracker, "SCRATCH", {})
    config = LlamaConfig(**(CONFIG.to_dict() | {"dtype": "float32"}), attn_implementation="eager")
    steps = [
        predict_step(config, lora=LORA, batch_size=1, seq_len=32, optimizer="sgd", kernels=kernels)
        for kernels in ("cuda", "cpu")
    ]
    assert steps[0].levels["forward"] == steps[1].levels["forward"]
    assert steps[0].levels["backward"] == steps[1].levels["backward"]


def test_flash_attention_2_holds_what_torchs_flash_kernel_holds_and_needs_no_mask_for_a_window() -> None:
    given = CONFIG.to_dict() | {"sliding_window": 64, "architectures": ["MistralForCausalLM"]}
    steps = [
        predict_step(config, quantization_config=NF4, batch_size=1, seq_len=256, lora=LORA)
        for config in (
            CONFIG,
            MistralConfig(**given, attn_implementation="flash_attention_2"),
            MistralConfig(**given, attn_implementation="sdpa"),
        )
    ]
    assert steps[1].levels == steps[0].levels
    assert steps[2].forward_bytes > steps[1].forward_bytes


def test_eight_bit_layers_multiply_in_int32_and_keep_their_input() -> None:
    int8 = BitsAndBytesConfig(load_in_8bit=True)
    on_cuda = predicted(quantization_config=int8, seq_len=2048, precision="none")
    on_cpu = predicted(quantization_config=int8, seq_len=2048, precision="none", kernels="cpu")
    # up(gate) in the forward pass: an int32 product, its float16 result, and the bfloat16 one; a CPU makes the last.
    assert on_cuda.forward_bytes > on_cpu.forward_bytes
    assert any("outliers" in part.what for part in on_cuda.unknown)


def test_what_cannot_be_known_is_a_range_beside_the_figures() -> None:
    step = predicted()
    workspaces = step.unknown[0]
    assert (workspaces.least_bytes, workspaces.most_bytes) == (2 * 8_519_680, 2 * 32 * MIB)
    least, most = step.unknown_bytes
    assert step.to_dict()["unknown_bytes"] == [least, most]
    assert sum(step.by_kind.values()) == step.peak_bytes
    assert "unknown, beside the peak" in str(step)
    assert "workspaces of cuBLAS" in str(step)
    assert predicted(kernels="cpu").unknown_bytes == (0, 0)


def test_blocks_may_be_as_much_longer_than_what_they_hold_as_the_allocator_makes_them() -> None:
    wide = LlamaConfig(vocab_size=1024, hidden_size=1536, intermediate_size=4096, num_hidden_layers=4)
    step = predict_step(wide, quantization_config=NF4, batch_size=1, seq_len=700, lora=LORA)
    blocks = next(part for part in step.unknown if "blocks" in part.what)
    assert blocks.least_bytes == 0 < blocks.most_bytes
