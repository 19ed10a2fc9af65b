"""What a manifest records of a model, in each state and precision."""

from __future__ import annotations

import datetime
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from tqdm.auto import tqdm

import kbitwrap
from kbitwrap import (
    KbitPreparedModel,
    Manifest,
    ManifestError,
    ManifestMismatchError,
    Precision,
    StateError,
    UnsupportedModelError,
    prepare_model_for_kbit_training,
    prepared_of,
)
from kbitwrap.tensors.bits import content_digest
from support import zoo
from support.memory import peak_bytes
from support.plain import Shadowed, Tied, small_manifest, tied
from support.snapshot import Snapshot
from support.thorough import each_once, every_other, few
from support.training import adapt, step

pytestmark = [
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Falcon's linear layers stay unquantized, and so do the plain modules here: a preparation says so.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]


ODD_BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "opaque": lambda: torch.ones(3).to_mkldnn(),
    "meta": lambda: torch.ones(3, device="meta"),
    "uninitialized": nn.UninitializedBuffer,
}


def recorded(name: str, quant: str = "nf4", **options: Any) -> Manifest:
    """The manifest of a zoo model that is prepared and restored for it."""
    with KbitPreparedModel(zoo.load(name, quant), **{**zoo.fields(name), **options}) as prepared:
        return Manifest.from_json(prepared.manifest().to_json())


def flip_a_bit(tensor: torch.Tensor) -> None:
    data = tensor.detach().view(-1).view(torch.uint8)
    data[data.numel() // 2] ^= 1


# ----------------------------------------------------------------------------------------------------
# Every architecture.
# ----------------------------------------------------------------------------------------------------


def cases() -> list[Any]:
    quants = {name: ["nf4"] for name in zoo.ARCHITECTURES}
    for name in zoo.CORE:
        quants[name] = [
            quant for quant in ("nf4", "nf4-double", "fp4", "int8") if quant in zoo.ARCHITECTURES[name].quants
        ]
    every = [(name, quant) for name, found in quants.items() for quant in found]
    return few(every, [(name, quants[name][i % len(quants[name])]) for i, name in enumerate(zoo.CORE) if i % 4 == 0])


@pytest.mark.parametrize(("name", "quant"), cases())
def test_the_same_base_passes_and_one_flipped_bit_is_named(name: str, quant: str) -> None:
    model = zoo.load(name, quant)
    names = {fqn for fqn, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    prepared = KbitPreparedModel(model, precision="full", **zoo.fields(name)).prepare()
    before = prepared.manifest()
    peft_model = adapt(name, model)
    step(name, peft_model)
    state = Snapshot(peft_model)
    manifest = prepared.manifest()
    assert state.diff(Snapshot(peft_model)) == []
    # The adapter apart, it is the same.
    rows = before.diff(manifest).different
    assert [*rows] == [""]
    assert all(key.startswith("adapters.default.") for key in rows[""])
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert set(again.tensors) == names
    again.check(peft_model)
    assert state.diff(Snapshot(peft_model)) == []
    prepared.restore()
    fresh = zoo.load(name, quant)
    state = Snapshot(fresh)
    again.check(fresh)
    assert state.diff(Snapshot(fresh)) == []

    parameters = dict(fresh.named_parameters())
    victim = random.Random(name).choice(sorted(parameters))
    flip_a_bit(parameters[victim])
    with pytest.raises(ManifestMismatchError) as caught:
        again.check(fresh)
    group = again.tensors[victim].tie_group
    same = {victim} | {fqn for fqn, t in again.tensors.items() if group is not None and t.tie_group == group}
    assert set(caught.value.different) == same
    assert list(caught.value.different[victim]) == ["digest"]
    assert victim in str(caught.value)


@pytest.mark.parametrize(("name", "precision"), each_once(zoo.CORE[1::2], list(Precision)))
def test_every_precision_records_the_same_base(name: str, precision: Precision) -> None:
    full = recorded(name, precision="full")
    other = recorded(name, precision=precision)
    assert {fqn: t.digest for fqn, t in full.tensors.items()} == {fqn: t.digest for fqn, t in other.tensors.items()}
    assert other.prepare_config().precision is precision


def test_the_figures_are_those_of_the_plan_and_the_model() -> None:
    model = zoo.load("llama")
    flags = {fqn: p.requires_grad for fqn, p in model.named_parameters()}
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with KbitPreparedModel(model, precision="full") as prepared:
        manifest = prepared.manifest()
        for fqn, parameter in model.named_parameters():
            record = manifest.tensors[fqn]
            assert record.type == "parameter"
            assert record.shape == tuple(parameter.shape)
            assert f"torch.{record.prepared_dtype}" == str(parameter.dtype)
            assert record.prepared_requires_grad is parameter.requires_grad
            assert record.requires_grad is flags[fqn]
        plan = prepared.plan
    for fqn, parameter in model.named_parameters():
        assert f"torch.{manifest.tensors[fqn].original_dtype}" == str(parameter.dtype)
        assert manifest.tensors[fqn].digest == f"{content_digest(parameter):016x}"
    assert manifest.plan.model_dump() == {
        name: getattr(plan, name) for name in ("added_bytes", "peak_bytes", "cache_bytes", "record_bytes", "by_role")
    }
    assert manifest.before.memory.parameter_bytes == num_bytes
    assert manifest.after.memory.parameter_bytes == num_bytes + plan.added_bytes
    assert manifest.model.class_name == "LlamaForCausalLM"
    assert manifest.model.name_or_path == str(zoo.checkpoint("llama"))
    assert manifest.model.dtype == "bfloat16"
    assert manifest.model.quantization.method == "bitsandbytes_4bit"
    assert manifest.model.quantization.config["bnb_4bit_quant_type"] == "nf4"
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.versions["transformers"] == transformers.__version__
    assert {"python", "peft", "bitsandbytes", "accelerate", "safetensors"} <= set(manifest.versions)
    made = datetime.datetime.fromisoformat(manifest.created)
    assert abs(made - datetime.datetime.now(datetime.timezone.utc)) < datetime.timedelta(minutes=10)


def test_hooks_flags_and_modes_before_and_after() -> None:
    model = zoo.load("llama")
    kwargs = {"use_reentrant": True}
    with KbitPreparedModel(model, gradient_checkpointing_kwargs=kwargs) as prepared:
        adapt("llama", model).train()
        manifest = prepared.manifest()
    before, after = manifest.before.state, manifest.after.state
    assert before.input_gradient_hooks == {}
    assert before.checkpointing == ()
    assert after.input_gradient_hooks == {"model.embed_tokens": 1}
    assert "model.layers.0" in after.checkpointing
    assert before.use_cache is True
    # As preparation left it, whatever training did since.
    assert before.num_training == after.num_training == 0
    assert before.num_modules == len(list(zoo.load("llama").modules()))


def test_the_dtype_is_that_of_the_load_where_some_parts_stay_float32() -> None:
    manifest = recorded("t5")
    assert manifest.model.dtype == "bfloat16"
    assert {"float32", "bfloat16"} <= {t.original_dtype for t in manifest.tensors.values()}


def test_tied_tensors_form_a_group() -> None:
    manifest = small_manifest()
    names = [fqn for fqn, record in manifest.tensors.items() if record.tie_group == 0]
    assert names == ["embed.weight", "head.weight"]
    assert {record.tie_group for fqn, record in manifest.tensors.items() if fqn not in names} == {None}
    manifest.check(tied())
    untied = tied()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    with pytest.raises(ManifestMismatchError, match="tied") as caught:
        manifest.check(untied)
    assert {fqn: list(rows) for fqn, rows in caught.value.different.items()} == {name: ["tied"] for name in names}


def test_parameters_that_share_memory_are_tied_too() -> None:
    def shared() -> Tied:
        model = tied()
        model.head.weight = nn.Parameter(model.embed.weight.detach())
        return model

    with KbitPreparedModel(shared(), precision="full") as prepared:
        manifest = prepared.manifest()
    assert manifest.before.memory == small_manifest().before.memory  # counted once
    assert manifest.tensors["head.weight"].tie_group == manifest.tensors["embed.weight"].tie_group == 0
    manifest.check(shared())


def test_buffers_in_a_manifest_are_those_from_before_training() -> None:
    model = tied()
    with KbitPreparedModel(model, precision="none", freeze=False) as prepared:
        first = prepared.manifest()
        model.train()
        model(torch.arange(16))
        assert model.bn.num_batches_tracked == 1
        second = prepared.manifest()
        second.check(model)
    assert not first.diff(second)
    second.check(tied())
    assert first.tensors["bn.running_mean"].type == "buffer"
    assert "mask" not in first.tensors


@pytest.mark.parametrize("precision", ["full", "compute", "norms", "none"])
def test_a_trained_base_is_not_recorded(precision: str) -> None:
    model = tied()
    with KbitPreparedModel(model, precision=precision, freeze=False) as prepared:
        manifest = prepared.manifest()
        with torch.no_grad():
            model.norm.weight += 0.3
        with pytest.raises(ManifestError, match="trained since the model was prepared") as caught:
            prepared.manifest()
        assert caught.value.fqn == "norm.weight"
    manifest.check(tied())
    with pytest.raises(ManifestMismatchError):
        manifest.check(model)


def test_the_original_bits_of_nans_are_recorded() -> None:
    def with_nans() -> Tied:
        model = tied()
        model.norm.weight.data.view(torch.int16)[:2] = torch.tensor([0x7F81, 0x7FC3], dtype=torch.int16)
        return model

    with KbitPreparedModel(with_nans(), precision="full") as prepared:
        prepared.manifest().check(with_nans())


def test_a_repacked_weight_is_recorded_as_it_was() -> None:
    # What bitsandbytes' 4-bit layers do in eval mode on CPUs with AVX512-BF16.
    from bitsandbytes import functional

    model = zoo.load("llama", "nf4-double")
    fresh = Manifest.from_json(KbitPreparedModel(zoo.load("llama", "nf4-double")).prepare().manifest().to_json())
    with KbitPreparedModel(model) as prepared:
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if getattr(weight, "quant_state", None) is not None:
                weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(
                    weight.data, weight.quant_state
                )
        assert all(t.digest == fresh.tensors[fqn].digest for fqn, t in prepared.manifest().tensors.items())
        fresh.check(model)


def test_inference_mode_and_default_devices_make_no_difference() -> None:
    model = zoo.load("llama", "nf4-double")
    with KbitPreparedModel(model, precision="full") as prepared:
        first = prepared.manifest()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            second = prepared.manifest()
            second.check(model)
    assert not first.diff(second)


def test_a_manifest_and_an_export_without_a_bar_start_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor", None)  # the thread that watches bars
    with KbitPreparedModel(tied(), precision="full") as prepared:
        prepared.manifest()
        prepared.export(tmp_path / "base")
    assert tqdm.monitor is None


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar_is_shown_where_it_was_asked_for(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with KbitPreparedModel(tied(), precision="full", progress=progress) as prepared:
        capsys.readouterr()
        manifest = prepared.manifest()
        manifest.check(prepared.model)
    output = capsys.readouterr()
    assert output.out == ""
    assert (output.err.count("digest") >= 2) is progress


@pytest.mark.thorough
def test_originals_are_read_one_at_a_time() -> None:
    # 64 MiB; a digest holds two pieces of 4 MiB beside a tensor.
    model = nn.ModuleList([nn.Linear(2048, 4096, bias=False).bfloat16() for _ in range(4)])
    with KbitPreparedModel(model, precision="full") as prepared:
        peak = peak_bytes(prepared.manifest)
    one = 2048 * 4096 * 2
    assert one <= peak < 2 * one


# ----------------------------------------------------------------------------------------------------
# States.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_prepared_and_suspended_record_the_same(precision: str) -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model, precision=precision) as prepared:
        adapt("llama", model)
        first = prepared.manifest()
        with prepared.suspended():
            state = Snapshot(model)
            second = prepared.manifest()
            second.check(model)
            assert state.diff(Snapshot(model)) == []
        assert not first.diff(second)
        assert not prepared.verify()


@pytest.mark.parametrize("precision", every_other(list(Precision)))
def test_a_second_name_for_a_parameter_is_no_part_of_the_base(precision: Precision) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision) as prepared:
        first = prepared.manifest()
        layers = (model.model.layers[0].mlp.up_proj, model.model.norm)
        for layer in layers:
            layer.register_parameter("qweight", layer.weight)  # as PEFT does with the codes of AQLM
        assert not prepared.manifest().diff(first)
        for _ in range(2):
            with prepared.suspended():
                assert not prepared.manifest().diff(first)
            assert not prepared.manifest().diff(first)
        assert not prepared.verify()
    for layer in layers:
        del layer.qweight
    assert before.diff(Snapshot(model), moved=True) == []


def test_other_states_have_no_manifest() -> None:
    prepared = KbitPreparedModel(tied())
    with pytest.raises(StateError, match="manifest"):
        prepared.manifest()
    with prepared:
        prepared.manifest()
    with pytest.raises(StateError, match="restored"):
        prepared.manifest()


def test_the_drop_in_shows_a_progress_bar_too() -> None:
    model = prepare_model_for_kbit_training(zoo.load("llama"))
    prepared = prepared_of(model)
    assert prepared is not None
    manifest = prepared.manifest()
    manifest.check(zoo.load("llama"))
    assert manifest.prepare_config().precision is Precision.FULL
    # Prepared once more: what was before is what was before the first time.
    prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    again = prepared.manifest()
    assert again.before == manifest.before
    assert all(again.tensors[fqn] == record for fqn, record in manifest.tensors.items())


def test_preparing_again_starts_anew() -> None:
    model = tied()
    prepared = KbitPreparedModel(model, precision="full")
    with prepared:
        first = prepared.manifest()
    with torch.no_grad():
        model.norm.weight.zero_()
    with prepared:
        assert list(first.diff(prepared.manifest()).different) == ["norm.weight"]


class Soft(peft.PromptEmbedding):
    """A module of PEFT's in the base itself."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float16))


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute")
def test_names_that_are_shared_hide_no_dtype_and_no_flag() -> None:
    with KbitPreparedModel(Shadowed(), precision="full") as prepared:
        for record in prepared.manifest().tensors.values():
            assert (record.original_dtype, record.prepared_dtype) == ("float16", "float32"), record
        prepared.model.requires_grad_(True)
        for record in prepared.manifest().tensors.values():
            assert (record.requires_grad, record.prepared_requires_grad) == (True, False), record


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute")
def test_what_the_drop_in_casts_of_an_adapter_is_recorded() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float16), Soft())
    kbitwrap.prepare_model_for_kbit_training(model)
    prepared = kbitwrap.prepared_of(model)
    assert prepared is not None
    assert model[1].scale.dtype == torch.float32
    assert {record.prepared_dtype for record in prepared.manifest().tensors.values()} == {"float32"}


def test_a_merge_hides_the_base() -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model) as prepared:
        manifest = prepared.manifest()
        peft_model = adapt("llama", model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft_model.merge_adapter()
        for call in (prepared.manifest, lambda: manifest.check(peft_model)):
            with pytest.raises(ManifestError, match="merge"):
                call()


def test_a_meta_model_has_no_content() -> None:
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(UnsupportedModelError, match="meta"):
        small_manifest().check(model)


def test_settings_that_cannot_be_recorded_are_named() -> None:
    kwargs = {"use_reentrant": False, "context_fn": lambda: None}
    model = zoo.load("llama")
    with (
        KbitPreparedModel(model, gradient_checkpointing_kwargs=kwargs) as prepared,
        pytest.raises(ManifestError, match="context_fn"),
    ):
        prepared.manifest()
    odd = nn.Sequential()
    odd.add_module("a/b", nn.LayerNorm(2).bfloat16())
    with KbitPreparedModel(odd) as prepared, pytest.raises(ManifestError, match=r"a/b\.weight") as caught:
        prepared.manifest()
    assert caught.value.fqn == "a/b.weight"


# Making one that is quantized is deprecated.
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ODD_BUFFERS)
def test_a_buffer_without_plain_bytes_is_named_and_prepares(kind: str) -> None:
    model = nn.LayerNorm(3).bfloat16()
    model.register_buffer("odd", ODD_BUFFERS[kind]())
    with (
        KbitPreparedModel(model, precision="full") as prepared,
        pytest.raises(ManifestError, match="odd: expected a dense"),
    ):
        prepared.manifest()
    model.register_buffer("odd", ODD_BUFFERS[kind](), persistent=False)
    with KbitPreparedModel(model, precision="full") as prepared:
        prepared.manifest().check(model)
