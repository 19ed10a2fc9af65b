"""A step on several devices: to the byte that of two processes under DDP, and in a range under FSDP2."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kbitwrap import (
    ConfigError,
    KbitPreparedModel,
    StepMemory,
    StepPredictor,
    StepTracker,
    predict_step,
)
from kbitwrap.foresight.tracker import held_tensors, optimizer_tensors
from kbitwrap.model.tree import ModelTree
from kbitwrap.tensors.bits import parts_of
from support import forks, zoo
from support.engines import load_for_fsdp2

LORA = zoo.lora_config("llama")
MOST_SECONDS = 10.0  # that a thread may need to be run again
NUM_STEPS = 3  # DDP lays its buckets out anew for the second one


def predicted(precision: str = "norms", **options: Any) -> StepMemory:
    model = load_for_fsdp2("llama") if options.get("engine") == "fsdp2" else zoo.load("llama")
    options = {"num_devices": forks.WORLD_SIZE, "kernels": "cpu", **options}
    return predict_step(model, inputs=zoo.inputs("llama", model), precision=precision, lora=LORA, **options)


def adapted(load: Callable[[str], Any] = zoo.load) -> tuple[Any, zoo.Batch]:
    model = load("llama")
    batch = zoo.inputs("llama", model)
    prepared = KbitPreparedModel(model).prepare()
    with_adapters: Any = get_peft_model(model, LORA)
    prepared.adopt(with_adapters)
    return with_adapters.train(), batch


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], foreach=False)


def train_under_ddp(rank: int, join: forks.Join, folder: Path) -> None:
    model, batch = adapted()
    with join():
        parallel = DistributedDataParallel(model)
        buckets: dict[int, torch.Tensor] = {}

        def reduce(_, bucket):  # type: ignore[no-untyped-def]
            buckets[bucket.index()] = bucket.buffer()
            return allreduce_hook(None, bucket)

        parallel.register_comm_hook(None, reduce)
        optimizer = optimizer_of(model)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            held = [*batch.values(), *buckets.values()]
            buckets.clear()
            with StepTracker(parallel, optimizer, held) as tracker:
                parallel(**batch).loss.backward()
                optimizer.step()
        told = {
            "static": tracker.static_bytes,
            "phases": tracker.phases,
            "buckets": parallel._get_ddp_logging_data()["rebuilt_bucket_sizes"],
        }
    (folder / f"{rank}.json").write_text(json.dumps(told))


@pytest.mark.thorough
def test_under_ddp_a_step_equals_that_of_two_processes_to_the_byte(tmp_path: Path) -> None:
    zoo.checkpoint("llama")
    forks.run_ranks(train_under_ddp, tmp_path)
    told = json.loads((tmp_path / "0.json").read_text())
    step = predicted(engine="ddp")
    assert (step.static_bytes, step.phases) == (told["static"], told["phases"])
    assert step.static_by_kind["gradients"] == sum(map(int, told["buckets"].split(", ")))


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that live after each operation: FSDP2 empties and fills them without one."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.most: dict[str, int] = {}
        self.phase = "forward"
        for tensor in tensors:
            self._hold(tensor)
        self.static = self._total()

    def _hold(self, tensor: torch.Tensor) -> None:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)

    def _total(self) -> int:
        living = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        return sum(storage.nbytes() for storage in living)

    def wait_for_threads(self, held: list[torch.Tensor]) -> None:
        """Wait until nothing else lives: gloo's threads let go of what they sent after they say that it was sent."""
        least = LiveBytes(held).static
        end = time.monotonic() + MOST_SECONDS
        while self._total() > least and time.monotonic() < end:
            time.sleep(0.001)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._hold(value)
        if self.phase == "forward" and torch._C._current_graph_task_id() != -1:
            self.phase = "backward"
        self.most[self.phase] = max(self.most.get(self.phase, 0), self._total())
        return output


def train_under_fsdp2(rank: int, join: forks.Join, folder: Path) -> None:
    model, batch = adapted(load_for_fsdp2)
    # the statistics are found by their weights, which shards replace
    held = [tensor for tensor, kind, _ in held_tensors(ModelTree(model)) if kind == "quantization_statistics"]
    with join():
        for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
            fully_shard(block)
        fully_shard(model)
        optimizer = optimizer_of(model)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            of_model = [tensor for tensor, _, _ in held_tensors(ModelTree(model))]
            known = [*held, *of_model, *optimizer_tensors(optimizer), *batch.values()]
            live = LiveBytes(known)
            with live:
                model(**batch).loss.backward()
                gradients = [one.grad for one in model.parameters() if one.grad is not None]
                live.wait_for_threads([*known, *gradients])
                live.phase = "optimizer"
                optimizer.step()
    counters = [state["step"] for state in optimizer.state.values()]
    whole = LiveBytes([*counters, *(one for one in of_model if not isinstance(one, nn.Parameter))]).static
    told = {"static": live.static, "phases": live.most, "whole": whole}
    (folder / f"{rank}.json").write_text(json.dumps(told))


@pytest.mark.thorough
def test_under_fsdp2_a_step_of_two_processes_is_in_the_range_that_is_told(tmp_path: Path) -> None:
    zoo.checkpoint("llama")
    forks.run_ranks(train_under_fsdp2, tmp_path)
    told = json.loads((tmp_path / "0.json").read_text())
    step = predicted(engine="fsdp2")
    # buffers, and the optimizer's counters, are not sharded
    assert 0 <= told["static"] - step.static_bytes <= told["whole"]
    least, most = step.unknown_bytes
    for phase, size in told["phases"].items():
        assert step.phases[phase] + least <= size <= step.phases[phase] + most, phase
    assert step.phases["optimizer"] == pytest.approx(told["phases"]["optimizer"], rel=0.03)


def test_what_no_engine_does_is_refused_in_one_line() -> None:
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    for expected, options in {
        "engine: expected 'ddp' or 'fsdp2', found 'mpi'": {"engine": "mpi", "num_devices": 2},
        "engine: 'zero3' is not predicted: DeepSpeed": {"engine": "zero3", "num_devices": 2},
        "engine: 'fsdp1' is not predicted: its flat parameters": {"engine": "fsdp1", "num_devices": 2},
        "num_devices: expected 1 without an engine and more with one, found 2 with None": {"num_devices": 2},
        "num_devices: expected a positive number, found 0": {"num_devices": 0},
    }.items():
        with pytest.raises(ConfigError, match=f"^{expected}"):
            predict_step(config, batch_size=1, seq_len=8, **options)


@pytest.mark.thorough
def test_what_fsdp2_stores_in_float32_is_predicted_as_stored() -> None:
    assert predicted("compute", engine="fsdp2").phases == predicted("full", engine="fsdp2").phases


def test_a_sharded_step_fits_with_the_least_that_is_unknown_beside_its_peak() -> None:
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=128
    )
    predict = StepPredictor(config, engine="fsdp2", num_devices=2, precision="none", dtype="bfloat16")
    step = predict(1, 64)
    assert step.reserved_bytes is None
    least = step.peak_bytes + sum(max(part.least_bytes, 0) for part in step.unknown)
    assert least - step.peak_bytes > 16 << 20  # the workspaces
    assert predict.fits(least, 1, 64)
    assert not predict.fits(least - 1, 1, 64)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_search_is_for_the_step_on_each_device(engine: str) -> None:
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=128
    )
    predict = StepPredictor(config, engine=engine, num_devices=4, kernels="cpu", precision="none", dtype="bfloat16")
    budget = predict(1, 100).peak_bytes
    assert predict.longest_sequence(budget) == 100
    assert predict(1, 101).peak_bytes > budget
