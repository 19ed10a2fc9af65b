"""``adapter_dtype``: the dtype that adapters are trained in, from the moment that a preparation hears of them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kbitwrap import EditError, KbitPreparedModel, Manifest, build_plan, predict_step, prepare_model_for_kbit_training
from kbitwrap.edits.adapters import cast_adapters
from kbitwrap.edits.storage import ParameterStorage
from support import zoo
from support.snapshot import Snapshot
from support.thorough import each_once, every_other
from support.training import adapt, step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OTHER = {"float32": torch.bfloat16, "bfloat16": torch.float32}


def lora_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def adapted(dtype: torch.dtype, **kwargs: Any) -> peft.PeftModel:
    """A LoRA of a dtype on a llama in nf4, with other values than its first."""
    model = adapt("llama", zoo.load("llama"), **kwargs)
    for parameter in lora_of(model).values():
        parameter.data = (torch.randn_like(parameter, dtype=torch.float32) / 8).to(dtype)
    return model


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in lora_of(model).values()}


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in lora_of(model).values():
            parameter += 1 / 1024  # below bfloat16's resolution for many of them


# ----------------------------------------------------------------------------------------------------
# There, and back.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", every_other([torch.float32, torch.bfloat16, torch.float16, torch.float64]), ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_adapters_that_are_not_trained_come_back_in_every_bit(name: Any, first: torch.dtype) -> None:
    model = adapted(first)
    before, objects = Snapshot(model), lora_of(model)
    values = {path: p.detach().clone() for path, p in objects.items()}
    with KbitPreparedModel(model, adapter_dtype=name) as prepared:
        assert dtypes_of(model) == {DTYPES[name]}
        for path, parameter in lora_of(model).items():
            assert parameter is objects[path]
            assert torch.equal(parameter, values[path].to(DTYPES[name]))
        with prepared.suspended():
            assert dtypes_of(model) == {DTYPES[name]}
    report = prepared.restore()
    assert (report.kept_dtype, report.foreign, report.trained) == ((), (), ())
    assert before.diff(Snapshot(model), moved=True) == []


@pytest.mark.parametrize("trained", ["keep", "error", "discard"])
@pytest.mark.parametrize("name", DTYPES)
def test_trained_adapters_stay_in_the_dtype_of_their_training_and_the_report_names_them(
    name: Any, trained: Any
) -> None:
    model = adapted(OTHER[name])
    prepared = KbitPreparedModel(model, precision="full", adapter_dtype=name, keep_originals=True).prepare()
    lora = lora_of(model)
    with torch.no_grad():
        next(iter(lora.values())).add_(1)  # of one of them
    during = {path: p.detach().clone() for path, p in lora.items()}
    report = prepared.restore(trained)
    assert len(report.kept_dtype) == len(lora)
    assert "model.layers.0.self_attn.q_proj.lora_A.default.weight" in report.kept_dtype
    assert (report.foreign, report.replaced) == ((), ())
    assert "kept dtype" in str(report)
    for path, parameter in lora_of(model).items():
        assert parameter.dtype == DTYPES[name]
        assert torch.equal(parameter, during[path])


@pytest.mark.parametrize("name", DTYPES)
def test_adapters_that_have_the_dtype_already_are_not_touched(name: Any) -> None:
    model = adapted(DTYPES[name])
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, adapter_dtype=name).prepare()
    assert [edit for edit in prepared.plan.edits if edit.action == "cast"] == []
    train(model)
    assert prepared.restore().kept_dtype == ()
    changed = before.diff(Snapshot(model))
    assert all("lora_" in line for line in changed)
    assert dtypes_of(model) == {DTYPES[name]}


@pytest.mark.parametrize("is_trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize("name", DTYPES)
def test_casts_by_others_do_not_count_as_training(name: Any, is_trained: bool) -> None:
    model = adapted(OTHER[name])
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, adapter_dtype=name).prepare()
    first, second, *_ = lora_of(model).values()
    first.data = first.data.double()
    if is_trained:
        with torch.no_grad():
            second.add_(1)
    report = prepared.restore()
    if is_trained:
        assert dtypes_of(model) == {DTYPES[name]}
        assert len(report.kept_dtype) == len(lora_of(model))
    else:
        assert report.kept_dtype == ()
        assert before.diff(Snapshot(model), moved=True) == []


def test_values_that_are_loaded_count_as_training() -> None:
    model = adapted(torch.bfloat16)
    saved = {name: value + 1 for name, value in peft.get_peft_model_state_dict(model).items()}
    with KbitPreparedModel(model, adapter_dtype="float32") as prepared:
        peft.set_peft_model_state_dict(model, saved)
    assert prepared.restore().kept_dtype
    assert dtypes_of(model) == {torch.float32}


def test_an_adapter_that_was_deleted_is_no_adapter_any_more() -> None:
    model = adapted(torch.bfloat16)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with KbitPreparedModel(model, adapter_dtype="float32") as prepared:
        train(model)
        with pytest.warns(UserWarning, match="Setting active adapter to other"):
            model.delete_adapter("default")
    assert prepared.restore().kept_dtype == ()


# ----------------------------------------------------------------------------------------------------
# Which adapters.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_adopted_adapters_are_cast_and_the_plan_grows(name: Any) -> None:
    base = zoo.load("llama")
    before = Snapshot(base)
    prepared = KbitPreparedModel(base, adapter_dtype=name).prepare()
    model = adapt("llama", base)
    for parameter in lora_of(model).values():
        parameter.data = parameter.data.to(OTHER[name])
    optimizer = torch.optim.AdamW(lora_of(model).values())
    objects = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    prepared.adopt(model)
    assert dtypes_of(model) == {DTYPES[name]}
    assert {id(parameter) for parameter in lora_of(model).values()} == objects
    num_bytes = sum(parameter.nbytes for parameter in lora_of(model).values())
    # Half values are in the float32 ones; what is rounded is held beside.
    added = num_bytes // 2 if name == "float32" else num_bytes
    assert prepared.plan.added_bytes == added
    assert prepared.plan.by_role["adapter"]["added_bytes"] == added
    assert prepared.plan.edits[-1].action == "cast"
    prepared.adopt(model)  # again, which changes nothing
    assert prepared.plan.added_bytes == added
    train(model)
    report = prepared.restore()
    assert len(report.kept_dtype) == len(lora_of(model))
    model.unload()
    assert before.diff(Snapshot(base), moved=True) == []


def test_a_plan_counts_what_a_cast_takes() -> None:
    model = adapted(torch.bfloat16)
    num_bytes = sum(parameter.nbytes for parameter in lora_of(model).values())
    plain = build_plan(model, precision="none")
    plan = build_plan(model, precision="none", adapter_dtype="float32")
    assert plan.added_bytes - plain.added_bytes == num_bytes
    assert plan.record_bytes == plain.record_bytes
    *_, last = lora_of(model).values()
    assert plan.peak_bytes - plain.peak_bytes == num_bytes + last.nbytes
    assert plan.by_role["adapter"]["bytes"] == num_bytes
    assert plan.by_role["adapter"]["added_bytes"] == num_bytes
    with torch.device("meta"):
        on_meta = cast_adapters([], torch.float32)
    assert on_meta.added_bytes == 0


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_trained_copies_follow_the_precision_and_not_this(precision: str) -> None:
    base = zoo.load("llama")
    with KbitPreparedModel(base, precision=precision, adapter_dtype="bfloat16") as prepared:
        model = adapt("llama", base, modules_to_save=True)
        copies = {name: p.dtype for name, p in model.named_parameters() if "modules_to_save" in name}
        assert copies
        prepared.adopt(model)
        for name, dtype in copies.items():
            assert model.get_parameter(name).dtype == dtype
        assert dtypes_of(model) == {torch.bfloat16}


def test_adapters_of_prompt_learning_are_cast_too() -> None:
    base = zoo.load("llama")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with KbitPreparedModel(base, adapter_dtype="bfloat16") as prepared:
        model = peft.get_peft_model(base, config)
        prompt = model.prompt_encoder.default.embedding.weight
        prompt.data = prompt.data.float()
        prepared.adopt(model)
        assert prompt.dtype == torch.bfloat16
    assert prompt.dtype == torch.float32  # it was not trained


METHODS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"]),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
    "adalora": lambda: peft.AdaLoraConfig(init_r=2, target_r=1, target_modules=["q_proj"], total_step=9),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "oft": lambda: peft.OFTConfig(r=2, oft_block_size=0, target_modules=["q_proj"]),
}


@pytest.mark.parametrize(("method", "name", "autocast"), each_once([*METHODS], [*DTYPES], [False, True]))
def test_what_trains_in_the_dtype_trains_when_it_is_cast_to_it(method: str, name: Any, autocast: bool) -> None:
    """Also suspended; where PEFT's method itself needs autocast, the adoption warns of it."""
    base = zoo.load("llama")
    with contextlib.ExitStack() as stack:
        prepared = stack.enter_context(KbitPreparedModel(base, adapter_dtype=name))
        model = peft.get_peft_model(base, METHODS[method]())
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
        if method == "ia3" and not autocast:
            with pytest.warns(UserWarning, match="returns float32 where the model computes"):
                prepared.adopt(model)
            return
        prepared.adopt(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert {parameter.dtype for parameter in trained} == {DTYPES[name]}
        if method == "vera" and name == "bfloat16" and not autocast:
            with pytest.raises(RuntimeError, match="same dtype"):  # its frozen matrices are float32 buffers of PEFT's
                step("llama", model)
            return
        loss, gradients = step("llama", model)
        assert loss.isfinite()
        assert {gradient.dtype for gradient in gradients.values()} == {DTYPES[name]}
        with prepared.suspended(), torch.no_grad():
            assert zoo.loss("llama", model, zoo.inputs("llama", model)).isfinite()


# ----------------------------------------------------------------------------------------------------
# Suspensions, errors, records.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_a_suspension_computes_with_what_is_trained(precision: str) -> None:
    model = adapted(torch.bfloat16)
    alone = copy.deepcopy(model)
    with KbitPreparedModel(model, precision=precision, adapter_dtype="float32") as prepared:
        train(model)
        for path, parameter in lora_of(model).items():
            alone.get_parameter(path).data = parameter.data.clone()
        batch = zoo.inputs("llama", model)
        with prepared.suspended(), torch.no_grad():
            suspended = model(**batch).logits
        with torch.no_grad():
            assert torch.equal(suspended, alone.eval()(**batch).logits)
        assert dtypes_of(model) == {torch.float32}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_what_ddp_holds_keeps_its_dtype_in_a_suspension() -> None:
    """A change of dtype would take parameters out of it for good."""
    with KbitPreparedModel(zoo.load("llama"), adapter_dtype="bfloat16") as prepared:
        model = adapt("llama", prepared.model)
        prepared.adopt(model)
        wrapped = DistributedDataParallel(model)
        accumulators = {id(p): p.view_as(p).grad_fn.next_functions[0][0] for p in lora_of(model).values()}
        with prepared.suspended():
            assert dtypes_of(model) == {torch.bfloat16}
        for parameter in lora_of(model).values():
            assert parameter.view_as(parameter).grad_fn.next_functions[0][0] is accumulators[id(parameter)]
        step("llama", wrapped)


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")
@pytest.mark.usefixtures("one_rank")
def test_adapters_that_fsdp_sharded_stay_as_they_are() -> None:
    base = zoo.load("llama", None)
    prepared = KbitPreparedModel(base, adapter_dtype="bfloat16").prepare()
    model = adapt("llama", base)
    prepared.adopt(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    prepared.adopt(model)
    with prepared.suspended():
        assert dtypes_of(model) == {torch.bfloat16}
    assert prepared.manifest().prepare_config().adapter_dtype == "bfloat16"
    report = prepared.restore()
    assert len(report.kept_dtype) == len(lora_of(model))
    assert dtypes_of(model) == {torch.bfloat16}


def test_an_edit_that_fails_leaves_the_adapters_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(torch.float32)
    before = Snapshot(model)

    def give(storage: ParameterStorage, parameter: Any, data: Any) -> None:
        given.append(storage)
        if len(given) == 2:
            raise RuntimeError("no memory")
        whole(storage, parameter, data)

    given: list[Any] = []
    whole = ParameterStorage.give
    with monkeypatch.context() as patch:
        patch.setattr(ParameterStorage, "give", give)
        with pytest.raises(EditError, match=r"could not cast .*no memory; the model is as it was"):
            KbitPreparedModel(model, adapter_dtype="bfloat16").prepare()
    assert before.diff(Snapshot(model), moved=True) == []


def test_the_manifest_records_it_in_version_2_and_makes_the_preparation_again() -> None:
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        without = prepared.manifest()
    with KbitPreparedModel(adapted(torch.bfloat16), adapter_dtype="float32") as prepared:
        manifest = prepared.manifest()
    assert (without.version, manifest.version) == (1, 2)
    assert "adapter_dtype" not in without.to_json()
    assert without.prepare_config().adapter_dtype is None
    assert manifest.adapters["default"].dtypes == ("float32",)
    again = Manifest.from_json(manifest.to_json())
    model = adapted(torch.bfloat16)
    with KbitPreparedModel.from_manifest(model, again) as prepared:
        assert prepared.config.adapter_dtype == "float32"
        assert dtypes_of(model) == {torch.float32}


def test_the_drop_in_takes_none_and_undoes_what_it_casts_itself() -> None:
    with pytest.raises(TypeError, match="adapter_dtype"):
        prepare_model_for_kbit_training(zoo.load("llama"), adapter_dtype="float32")  # type: ignore[call-arg]
    model = adapted(torch.float32)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, adapter_dtype="bfloat16").prepare()
    prepare_model_for_kbit_training(model)  # which casts adapters to float32, as PEFT's function does
    assert dtypes_of(model) == {torch.float32}
    assert prepared.restore().kept_dtype == ()
    assert before.diff(Snapshot(model), moved=True) == []


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["adamw_torch", None])
def test_a_predicted_step_has_adapters_of_the_dtype(optimizer: str | None) -> None:
    config = zoo.load("llama", None).config
    settings: dict[str, Any] = {"precision": "none", "batch_size": 2, "seq_len": 16, "optimizer": optimizer}
    found = {name: predict_step(config, adapter_dtype=name, **settings) for name in (None, *DTYPES)}
    adapters = {name: step.static_by_kind["adapters"] for name, step in found.items()}
    assert adapters["float32"] == 2 * adapters["bfloat16"] == adapters[None]
    assert found["bfloat16"].peak_bytes < found["float32"].peak_bytes
