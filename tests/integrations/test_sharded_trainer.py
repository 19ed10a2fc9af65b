"""Trainer in two processes whose model accelerate shards: a run that was interrupted goes on bit for bit."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, fsdp_utils
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from kbitwrap import KbitPreparedModel, Manifest, UnsupportedModelError
from kbitwrap.integrations import KbitTrainerCallback
from kbitwrap.integrations.trl import _merged_weights
from support import forks, zoo
from support.engines import FSDP2_STORAGE, SHARDS_INTEGERS, copy_adapters, flags, fsdp2
from support.files import SHARD, read, saved
from support.snapshot import tensor_digest
from support.trainers import EVERY_STEP, NAME, NUM_STEPS, RecordingTrainer, adapt, trainer_for
from support.training import is_checkpointing

_init = AcceleratorState.__init__


def with_fsdp(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """What accelerate's state is where there are devices: on a CPU it takes DDP whatever was asked for."""
    _init(self, *args, **kwargs)
    if kwargs.get("fsdp_plugin") is None:
        return
    self.fsdp_plugin = kwargs["fsdp_plugin"]
    self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    self.device = torch.device("cpu")


@contextlib.contextmanager
def accelerate_with_fsdp() -> Iterator[None]:
    """A new state of accelerate, and the variables by which ``accelerate launch`` asks for FSDP."""
    with mock.patch.dict(os.environ), mock.patch.object(AcceleratorState, "__init__", with_fsdp):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def load(storage: torch.dtype) -> transformers.PreTrainedModel:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage,
    )
    return zoo.load("llama", quantization_config=config)


def trainer_of(
    prepared: KbitPreparedModel | SimpleNamespace,
    folder: Path,
    state_dict_type: str,
    version: int = 2,
    adapter_name: str = "default",
    callback: KbitTrainerCallback | None = None,
    **kwargs: Any,
) -> RecordingTrainer:
    fsdp_config = {
        "version": version,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": version == 2,
        "sync_module_states": False,  # FSDP1 sends rank 0's from a device
        "state_dict_type": state_dict_type,
    }
    peft_model = adapt(prepared.model)
    if adapter_name != "default":
        peft_model.add_adapter(adapter_name, peft_model.peft_config["default"])
        peft_model.set_adapter(adapter_name)
        peft_model.delete_adapter("default")
    if callback is None:
        callback = KbitTrainerCallback(prepared)
    options = {"fsdp": True, "fsdp_config": fsdp_config, "ddp_backend": "gloo", "per_device_train_batch_size": 1}
    return trainer_for(peft_model, folder, callbacks=[callback], **EVERY_STEP | options | kwargs)


def shards(trainer: RecordingTrainer) -> dict[str, Any]:
    """What this rank holds of what was trained."""
    trained = {fqn: p for fqn, p in trainer.model.named_parameters() if p.requires_grad}
    assert all(isinstance(p, DTensor) for p in trained.values())
    return {fqn: tensor_digest(p.to_local()) for fqn, p in trained.items()}


def stop_if(is_last: bool) -> None:
    if is_last:
        raise KeyboardInterrupt


def go_on(rank: int, join: forks.Join, state_dict_type: str, storage: torch.dtype, folder: Path) -> None:
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    models = [load(storage) for _ in range(3)]
    expected = saved(models[0], folder / f"saved-{rank}")
    with join():
        runs = [KbitPreparedModel(model, precision="norms").prepare() for model in models]
        with accelerate_with_fsdp():
            whole = trainer_of(runs[0], folder / "whole", state_dict_type)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                whole.train()
            is_said = any("Excluding from FSDP2 sharding" in str(warning.message) for warning in caught)
            assert is_said == (rank == 0 and not storage.is_floating_point)
            assert whole.accelerator.distributed_type == DistributedType.FSDP
            # accelerate leaves integers whole
            weight = models[0].model.layers[0].self_attn.q_proj.base_layer.weight
            assert isinstance(weight, DTensor) == storage.is_floating_point
            first = shards(whole)
        with accelerate_with_fsdp():
            steps = iter([False, True])
            stopped = trainer_of(
                runs[1], folder / "stopped", state_dict_type, at_step_end=lambda _: stop_if(next(steps))
            )
            with pytest.raises(KeyboardInterrupt):
                stopped.train()
            assert stopped.losses == whole.losses[:2]
            del stopped
        with accelerate_with_fsdp():
            resumed = trainer_of(runs[2], folder / "resumed", state_dict_type)
            resumed.train(resume_from_checkpoint=str(folder / "stopped" / "checkpoint-1"))
            assert resumed.losses == whole.losses[1:]
            assert shards(resumed) == first
            manifest = Manifest.load(folder / "stopped" / "checkpoint-1" / NAME)
            assert manifest.essence() == runs[2].manifest().essence()
            runs[2].export(folder / "base", max_shard_size=SHARD)
            assert read(folder / "base") == expected
            assert runs[2].restore().replaced == ()


@pytest.mark.thorough  # two processes train for seconds
@pytest.mark.parametrize(
    ("state_dict_type", "storage"),
    [("SHARDED_STATE_DICT", torch.bfloat16), ("SHARDED_STATE_DICT", torch.uint8), ("FULL_STATE_DICT", torch.bfloat16)],
    ids=str,
)
def test_a_sharded_run_that_was_interrupted_goes_on_bit_for_bit(
    state_dict_type: str, storage: torch.dtype, tmp_path: Path
) -> None:
    forks.run_ranks(go_on, state_dict_type, storage, tmp_path)


def record_unprepared(rank: int, join: forks.Join, folder: Path) -> None:
    models = [load(torch.bfloat16) for _ in range(3)]
    alone = adapt(models[2])
    with join():
        with accelerate_with_fsdp():
            callback = KbitTrainerCallback(merge_to=folder / "merged")
            given = SimpleNamespace(model=models[0])
            trainer = trainer_of(given, folder / "run", "FULL_STATE_DICT", callback=callback)
            trainer.train()
            assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
            copy_adapters(trainer.model, alone)
            manifest = Manifest.load(folder / "run" / "checkpoint-1")
            assert (manifest.unknown, manifest.logits) == (("not prepared",), None)
            manifest.check(load(torch.bfloat16))
            merged = KbitPreparedModel(models[2], precision="none").export(
                folder / f"alone-{rank}", merge_adapters=True, model=alone
            )
            for name in merged.files:
                assert (folder / "merged" / name).read_bytes() == (merged.path / name).read_bytes()
        with accelerate_with_fsdp():
            given = SimpleNamespace(model=models[1])
            late = trainer_of(given, folder / "late", "FULL_STATE_DICT", callback=KbitTrainerCallback())
            late.remove_callback(KbitTrainerCallback)
            late.add_callback(KbitTrainerCallback())
            with pytest.raises(UnsupportedModelError, match="give a callback to the trainer when that is made"):
                late.train()
            assert late.losses == []


def test_a_sharded_run_that_nothing_prepared_is_recorded_and_merged(tmp_path: Path) -> None:
    forks.run_ranks(record_unprepared, tmp_path)


def refuse(rank: int, join: forks.Join, folder: Path) -> None:
    prepared = KbitPreparedModel(load(torch.uint8), precision="norms").prepare()
    with join(), accelerate_with_fsdp():
        trainer = trainer_of(prepared, folder, "SHARDED_STATE_DICT")
        # as accelerate did before it excluded integers
        before = mock.patch.object(fsdp_utils, "is_torch_version", return_value=False)
        refused = pytest.raises(
            UnsupportedModelError, match=r"q_proj.*uint8.*loss of 0 and NaN.*bnb_4bit_quant_storage"
        )
        if not SHARDS_INTEGERS:  # torch itself does
            refused = pytest.raises(RuntimeError, match="only Tensors of floating point dtype can require gradients")
        with before, refused:
            trainer.train()
        assert trainer.losses == []


def send(rank: int, join: forks.Join) -> None:
    prepared = KbitPreparedModel(load(FSDP2_STORAGE), precision="norms").prepare()
    with join():
        peft_model = fsdp2(adapt(prepared.model))
        server = SimpleNamespace(model=peft_model, mode="server")
        assert bool(dict(_merged_weights(server))) == (rank == 0)
        colocated = SimpleNamespace(model=peft_model, mode="colocate")
        with pytest.raises(UnsupportedModelError, match=r'is sharded.*vllm_mode="server"'):
            next(_merged_weights(colocated))


@pytest.mark.thorough
def test_merged_weights_of_a_sharded_model_are_sent_to_a_server_alone() -> None:
    forks.run_ranks(send)


@pytest.mark.thorough
def test_4_bit_weights_that_accelerate_sharded_as_integers_are_refused_before_a_step(tmp_path: Path) -> None:
    forks.run_ranks(refuse, tmp_path)


def merge_under_fsdp1(rank: int, join: forks.Join, folder: Path) -> None:
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    models = [load(torch.bfloat16) for _ in range(5)]
    # FSDP1 says of every adapter that the checkpoint lacks it, which is what is tested.
    logging.getLogger("torch.distributed.fsdp").setLevel(logging.ERROR)
    expected = saved(models[0], folder / f"saved-{rank}")
    before = flags(models[3])
    # the dtype of the base: FSDP1 lays out flat what has one
    prepare = functools.partial(KbitPreparedModel, precision="norms", adapter_dtype="bfloat16")
    refused, saving, resuming, trained, plain = [prepare(model).prepare() for model in models]
    unsharded = adapt(plain.model)
    plain.adopt(unsharded)
    with join():
        saves_none = pytest.raises(UnsupportedModelError, match=r'PEFT finds no adapter.*"version": 2')
        with accelerate_with_fsdp():
            trainer = trainer_of(refused, folder / "refused", "SHARDED_STATE_DICT", version=1, adapter_name="other")
            with saves_none:
                trainer.train()
            assert trainer.losses == []
        with accelerate_with_fsdp():
            trainer = trainer_of(saving, folder / "empty", "SHARDED_STATE_DICT", version=1, max_steps=1)
            trainer.remove_callback(KbitTrainerCallback)
            trainer.train()
            checkpoint = folder / "empty" / "checkpoint-1"
            weights = FileSystemReader(checkpoint / "pytorch_model_fsdp_0").read_metadata()
            assert weights.state_dict_metadata == {}
        with accelerate_with_fsdp():
            trainer = trainer_of(resuming, folder / "resumed", "SHARDED_STATE_DICT", version=1, save_strategy="no")
            with saves_none:
                trainer.train(resume_from_checkpoint=str(checkpoint))
            assert trainer.losses == []
        with accelerate_with_fsdp():
            trainer = trainer_of(trained, folder / "run", "SHARDED_STATE_DICT", version=1, save_strategy="no")
            trainer.train()
            live = trainer.model_wrapped
            assert isinstance(live, FullyShardedDataParallel)
            assert len(set(trainer.losses)) == NUM_STEPS
            copy_adapters(live, unsharded)
            trained.export(folder / "merged", merge_adapters=True, max_shard_size=SHARD)
            plain.export(folder / f"plain-{rank}", merge_adapters=True, max_shard_size=SHARD)
            assert read(folder / "merged") == read(folder / f"plain-{rank}")
            trained.export(folder / "base", max_shard_size=SHARD)
            assert read(folder / "base") == expected
            assert not trained.verify()
            report = trained.restore()
            assert (report.trained, report.replaced) == ((), ())
            assert all("lora_" in fqn for fqn in report.kept_dtype)
            after = flags(trained.model)
            assert all(after[place] == flag for place, flag in before.items() if place in after)
            assert not is_checkpointing(trained.model)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, 4])
def test_under_fsdp1_a_run_is_merged_exactly_and_checkpoints_without_adapters_are_refused(
    world_size: int, tmp_path: Path
) -> None:
    forks.run_ranks(merge_under_fsdp1, tmp_path, world_size=world_size)
