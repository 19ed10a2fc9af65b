"""Manifests: what they record, which models they accept, and preparing from one."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
import re
import shutil
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

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
from kbitwrap.manifest.contents import _VOLATILE
from kbitwrap.tensors.bits import content_digest
from support import zoo
from support.memory import peak_bytes
from support.plain import Shadowed, Tied, small_manifest, tied
from support.snapshot import Snapshot
from support.thorough import each_once, few
from support.training import adapt, step

pytestmark = [
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Falcon's linear layers stay unquantized, and so do the plain modules here: a preparation says so.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]

PAGE = Path(__file__).parents[2] / "docs" / "manifest.md"


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
    return few(every, [(name, quants[name][i % len(quants[name])]) for i, name in enumerate(zoo.CORE)])


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


@pytest.mark.parametrize(("name", "precision"), each_once(zoo.CORE, list(Precision)))
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


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar_is_shown_where_it_was_asked_for(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with KbitPreparedModel(tied(), precision="full", progress=progress) as prepared:
        capsys.readouterr()
        manifest = prepared.manifest()
        manifest.check(prepared.model)
    output = capsys.readouterr()
    assert output.out == ""
    assert (output.err.count("digest") >= 2) is progress


def test_originals_are_read_one_at_a_time() -> None:
    model = nn.ModuleList([nn.Linear(2048, 2048, bias=False).bfloat16() for _ in range(8)])  # 64 MiB
    with KbitPreparedModel(model, precision="full") as prepared:
        peak = peak_bytes(prepared.manifest)
    one = 2048 * 2048 * 2
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
    with (
        KbitPreparedModel(model, gradient_checkpointing_kwargs={"early_stop": 10**20}) as prepared,
        pytest.raises(ManifestError, match="21 characters"),
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


class Slots:
    __slots__ = ("width",)


@pytest.mark.parametrize(
    "config",
    ["tiny", 3, [1, 2], (1, 2), Slots(), types.SimpleNamespace(a={1, "x", None})],
    ids=lambda config: type(config).__name__,
)
def test_any_object_named_config_is_hashed(config: Any) -> None:
    model = nn.LayerNorm(3).bfloat16()
    model.config = config
    with KbitPreparedModel(model, precision="full") as prepared:
        manifest = prepared.manifest()
    manifest.check(model)
    model.config = [1, 3]
    with pytest.raises(ManifestMismatchError, match="config_sha256"):
        manifest.check(model)


# ----------------------------------------------------------------------------------------------------
# Checking.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Manifest:
    return recorded("llama", precision="full")


def prompt_model(model: nn.Module) -> nn.Module:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(model, config)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "as loaded": lambda model: model,
    "lora": lambda model: adapt("llama", model),
    "lora, the base itself": lambda model: (adapt("llama", model), model)[1],
    "modules to save": lambda model: adapt("llama", model, modules_to_save=True),
    "token adapter": lambda model: adapt("llama", model, trainable_token_indices=[3, 5]),
    "prompt tuning": prompt_model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "trainable": lambda model: model.train(),
    "frozen": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_base_is_found_in_whatever_is_around_it(wrapper: str, llama: Manifest) -> None:
    model = WRAPPERS[wrapper](zoo.load("llama"))
    state = Snapshot(model)
    llama.check(model)
    assert state.diff(Snapshot(model)) == []


@pytest.mark.parametrize(
    ("wrapper", "precision"), each_once([name for name in WRAPPERS if name != "compiled"], list(Precision))
)
def test_a_prepared_model_is_compared_by_its_originals(wrapper: str, precision: Precision, llama: Manifest) -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model, precision=precision) as prepared:
        outer = WRAPPERS[wrapper](model)
        llama.check(outer)
        manifest = prepared.manifest()
        with prepared.suspended():
            llama.check(outer)
    assert {fqn: t.digest for fqn, t in manifest.tensors.items()} == {fqn: t.digest for fqn, t in llama.tensors.items()}


def test_names_are_the_bases_where_the_wrappers_say_nothing(llama: Manifest) -> None:
    # Prompt learning has the base at another name than other adapters have.
    with KbitPreparedModel(prompt_model(zoo.load("llama")), precision="full") as prepared:
        manifest = prepared.manifest()
    assert manifest.after.state.checkpointing == llama.after.state.checkpointing
    assert list(manifest.tensors) == list(llama.tensors)


def test_a_part_of_a_prepared_model_is_found(llama: Manifest) -> None:
    outer = adapt("llama", zoo.load("llama"))
    with KbitPreparedModel(outer, precision="full"):
        llama.check(outer.get_base_model())


def other_revision(name: str, folder: Path) -> Path:
    model = zoo.load(name, None, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2"])
def test_another_revision_is_another_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = recorded(name)
    folder = other_revision(name, tmp_path)
    monkeypatch.setattr(zoo, "checkpoint", lambda _: folder)
    with pytest.raises(ManifestMismatchError) as caught:
        manifest.check(zoo.load(name))
    assert "" not in caught.value.different
    assert caught.value.missing == caught.value.unexpected == ()
    weights = {fqn for fqn, record in manifest.tensors.items() if record.type == "parameter"}
    assert weights <= set(caught.value.different)


@pytest.mark.parametrize("quant", ["nf4-double", "fp4", "int8", None])
def test_another_quantization_is_another_model(quant: str | None, llama: Manifest) -> None:
    with pytest.raises(ManifestMismatchError, match="quantization") as caught:
        llama.check(zoo.load("llama", quant))
    assert any(what.startswith("model.quantization") for what in caught.value.different[""])


def test_another_compute_dtype_is_another_model(llama: Manifest) -> None:
    model = zoo.load(
        "llama",
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        ),
    )
    with pytest.raises(ManifestMismatchError) as caught:
        llama.check(model)
    key = "model.quantization.config.bnb_4bit_compute_dtype"
    assert caught.value.different == {"": {key: ("bfloat16", "float16")}}


def test_a_setting_that_no_manifest_can_hold_is_another_model(llama: Manifest) -> None:
    model = zoo.load("llama")
    model.config.quantization_config.llm_int8_threshold = float("inf")
    with pytest.raises(ManifestMismatchError, match="llm_int8_threshold"):
        llama.check(model)


def test_another_dtype_is_another_model(llama: Manifest) -> None:
    with pytest.raises(ManifestMismatchError) as caught:
        llama.check(zoo.load("llama", dtype=torch.float16))
    assert caught.value.different[""]["model.dtype"] == ("bfloat16", "float16")
    assert caught.value.different["model.norm.weight"]["original_dtype"] == ("bfloat16", "float16")


def test_another_architecture_is_another_model(llama: Manifest) -> None:
    with pytest.raises(ManifestMismatchError) as caught:
        llama.check(zoo.load("gpt2"))
    assert caught.value.different[""]["model.class"] == ("LlamaForCausalLM", "GPT2LMHeadModel")
    assert "model.norm.weight" in caught.value.missing
    assert "transformer.ln_f.weight" in caught.value.unexpected
    assert len(str(caught.value)) < 2000


def test_another_size_is_another_model(llama: Manifest) -> None:
    model = zoo.load("llama")
    model.resize_token_embeddings(zoo.VOCAB_SIZE + 8)
    with pytest.raises(ManifestMismatchError) as caught:
        llama.check(model)
    assert caught.value.different["model.embed_tokens.weight"]["shape"][1][0] == zoo.VOCAB_SIZE + 8


def test_another_setting_of_the_config_is_another_model(llama: Manifest) -> None:
    model = zoo.load("llama")
    model.config.rms_norm_eps = 0.5
    with pytest.raises(ManifestMismatchError) as caught:
        llama.check(model)
    assert list(caught.value.different[""]) == ["model.config_sha256"]


def test_another_version_of_transformers_only_warns_of_a_config() -> None:
    data = json.loads(recorded("llama").to_json())
    data["versions"]["transformers"] = "4.56.0"
    data["model"]["config_sha256"] = "0" * 64
    manifest = Manifest.from_json(json.dumps(data))
    with pytest.warns(UserWarning, match="4.56.0"):
        manifest.check(zoo.load("llama"))


def test_other_versions_are_no_mismatch() -> None:
    data = json.loads(recorded("llama").to_json())
    data["versions"] = dict.fromkeys(data["versions"], "0.0.1")
    Manifest.from_json(json.dumps(data)).check(zoo.load("llama"))


def test_a_part_and_a_container_of_a_prepared_model_are_compared_by_their_originals() -> None:
    whole = Container(zoo.load("llama"))
    part = whole.layers[0].model
    with KbitPreparedModel(whole, gradient_checkpointing=False) as prepared:
        of_whole = prepared.manifest()
    with KbitPreparedModel(part) as prepared:
        of_part = prepared.manifest()
    with KbitPreparedModel(whole.layers[0], precision="full"):
        assert part.norm.weight.dtype == torch.float32
        of_whole.check(whole)
        of_part.check(part)


class Container(nn.Module):
    """A model without a config around one that has one, as sentence embedders are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([model, nn.LayerNorm(4)])


def test_a_container_is_known_by_the_configs_inside() -> None:
    with KbitPreparedModel(Container(zoo.load("llama", "nf4")), gradient_checkpointing=False) as prepared:
        manifest = prepared.manifest()
    assert manifest.model.quantization.config["layers.0"]["bnb_4bit_quant_type"] == "nf4"
    other = Container(zoo.load("llama", "nf4"))
    manifest.check(other)
    other.layers[0].config.use_cache = False
    manifest.check(other)
    other.layers[0].config.rms_norm_eps = 0.5
    other.layers[0].config.quantization_config.bnb_4bit_compute_dtype = torch.float16
    with pytest.raises(ManifestMismatchError) as caught:
        manifest.check(other)
    found = ["model.config_sha256", "model.quantization.config.layers.0.bnb_4bit_compute_dtype"]
    assert list(caught.value.different[""]) == found


def test_a_set_in_a_config_has_one_order() -> None:
    names = [str(number) for number in range(100, 150)]
    model = zoo.load("llama")
    hashes = set()
    for value in (names, set(names)):
        model.config.names = value
        with KbitPreparedModel(model) as prepared:
            hashes.add(prepared.manifest().model.config_sha256)
    assert len(hashes) == 1


def test_what_use_changes_in_a_config_is_no_mismatch(llama: Manifest, tmp_path: Path) -> None:
    model = zoo.load("llama")
    model.config.use_cache = False
    model.config.pad_token_id = 7
    model.config.problem_type = "regression"
    model.config.dtype = torch.float32
    model.config._name_or_path = "elsewhere"
    model.config.architectures = ["LlamaForCausalLM"]
    llama.check(model)
    model.save_pretrained(tmp_path)
    llama.check(model)


def test_what_was_quantized_before_it_was_saved_is_the_same(llama: Manifest, tmp_path: Path) -> None:
    zoo.load("llama").save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16)
    llama.check(model)


def test_an_empty_difference_is_false(llama: Manifest) -> None:
    diff = llama.diff(Manifest.from_json(llama.to_json()))
    assert not diff
    assert str(diff) == "no difference"
    assert diff.to_dict() == {"missing": [], "unexpected": [], "different": {}}


def test_diff_ignores_when_and_how_much_memory() -> None:
    first = small_manifest()
    data = json.loads(first.to_json())
    data["created"] = "2001-01-01T00:00:00+00:00"
    data["before"]["memory"]["parameter_bytes"] += 1
    data["after"]["memory"]["allocated_bytes"] = 5
    assert not first.diff(Manifest.from_json(json.dumps(data)))


def test_diff_says_what_differs() -> None:
    first = small_manifest()
    second = small_manifest(precision="none", freeze=False)
    found = first.diff(second)
    assert found.different[""]["config.precision"] == ("full", "none")
    assert found.different["norm.weight"] == {
        "prepared_dtype": ("float32", "bfloat16"),
        "prepared_requires_grad": (False, True),
    }
    assert "config.precision: expected 'full', found 'none'" in str(found)
    assert str(found).endswith("and 8 more")  # printed, it is bounded
    assert json.loads(json.dumps(found.to_dict()))["different"][""]["config.precision"] == ["full", "none"]
    data = json.loads(first.to_json())
    del data["tensors"]["norm.weight"]
    less = Manifest.from_json(json.dumps(data))
    assert first.diff(less).missing == less.diff(first).unexpected == ("norm.weight",)
    assert first.diff(less)
    assert less.diff(first)
    with pytest.raises(ManifestMismatchError, match=r"norm\.weight: unexpected") as caught:
        less.check(tied())
    assert (caught.value.missing, caught.value.unexpected) == ((), ("norm.weight",))


def test_the_number_of_a_group_of_ties_is_no_difference() -> None:
    with KbitPreparedModel(nn.ModuleList([tied(), tied()])) as prepared:
        first = prepared.manifest()
    data = json.loads(first.to_json())
    assert [names[0] for names in data["ties"]] == ["0.embed.weight", "1.embed.weight"]
    del data["ties"][0]
    assert first.diff(Manifest.from_json(json.dumps(data))).different.keys() == {"0.embed.weight", "0.head.weight"}


def test_an_essence_is_what_was_recorded_with_checkpoints_before_there_was_the_method() -> None:
    assert Manifest.load(Path(__file__).with_name("manifest-version-1.json")).essence() == {
        "config": {
            "precision": "norms",
            "freeze": True,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "input_require_grads": None,
            "head_chunk_bytes": None,
            "norm_modules": [],
        },
        "model": {
            "class": "Tied",
            "config_sha256": None,
            "dtype": "bfloat16",
            "quantization": {"method": None, "config": {}},
        },
        "tensors": "500c7ff4eed7512d4535b09b513ac1811d1315726db909a1b7ae53eef39c6c36",
        "transformers": "5.23.0",
    }


def test_an_essence_compares_what_training_depends_on() -> None:
    first = small_manifest()
    essence = json.loads(json.dumps(first.essence()))
    same = small_manifest(memory_budget="1GiB", audit=True, keep_originals=True, empty_cache=False)
    assert not same.diff_essence(essence)
    assert not same.diff_essence(essence, first)
    second = small_manifest(precision="none")
    rows = second.diff_essence(essence).different
    assert list(rows) == [""]
    assert rows[""]["config.precision"] == ("full", "none")
    assert rows[""]["tensors"] == (essence["tensors"], second.essence()["tensors"])
    named = second.diff_essence(essence, first).different
    assert named[""] == rows[""]
    assert named["norm.weight"] == {"prepared_dtype": ("float32", "bfloat16")}


def test_the_content_of_what_is_trained_is_no_part_of_an_essence() -> None:
    first = small_manifest(freeze=False)
    data = json.loads(first.to_json())
    data["tensors"]["norm.weight"][1] = "0" * 16
    trained = Manifest.from_json(json.dumps(data))
    assert not trained.diff_essence(first.essence(), first)
    data["tensors"]["bn.running_mean"][1] = "0" * 16
    other = Manifest.from_json(json.dumps(data)).diff_essence(first.essence(), first)
    assert {fqn: list(rows) for fqn, rows in other.different.items()} == {
        "": ["tensors"],
        "bn.running_mean": ["digest"],
    }


# ----------------------------------------------------------------------------------------------------
# From a manifest.
# ----------------------------------------------------------------------------------------------------


def test_every_setting_comes_back(tmp_path: Path) -> None:
    class OddNorm(nn.LayerNorm):
        pass

    chosen: dict[str, Any] = {
        "precision": "compute",
        "freeze": False,
        "gradient_checkpointing": False,
        "gradient_checkpointing_kwargs": {"use_reentrant": True, "determinism_check": "none"},
        "input_require_grads": False,
        "head_chunk_bytes": 4096,
        "norm_modules": (OddNorm, "Scale.*"),
        "memory_budget": "3GiB",
        "audit": True,
        "keep_originals": True,
        "empty_cache": False,
    }
    prepared = KbitPreparedModel(tied(), **chosen).prepare()
    prepared.manifest().save(tmp_path / "m.json")
    again = KbitPreparedModel.from_manifest(tied(), tmp_path / "m.json").config
    expected = dataclasses.replace(prepared.config, norm_modules=("OddNorm", "Scale.*"))
    assert again == expected
    shutil.copy(tmp_path / "m.json", tmp_path / "kbitwrap.json")
    assert KbitPreparedModel.from_manifest(tied(), tmp_path).config == expected


def test_a_folder_without_a_manifest_is_named_with_the_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"the folder holds no kbitwrap\.json"):
        Manifest.load(tmp_path)


def test_from_a_manifest_the_model_is_untouched_and_new(llama: Manifest) -> None:
    model = zoo.load("llama")
    state = Snapshot(model)
    prepared = KbitPreparedModel.from_manifest(model, llama)
    assert prepared.state == "new"
    assert state.diff(Snapshot(model)) == []
    with prepared:
        assert not prepared.manifest().diff(llama)


def test_another_model_is_refused_before_anything_changes(llama: Manifest) -> None:
    model = zoo.load("llama", "nf4-double")
    state = Snapshot(model)
    with pytest.raises(ManifestMismatchError):
        KbitPreparedModel.from_manifest(model, llama)
    assert state.diff(Snapshot(model)) == []


@pytest.mark.parametrize("given", ["base", "peft model"])
def test_adapted_gives_the_recorded_norms(given: str) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="adapted").prepare()
    prepared.adopt(adapt("llama", model, layers_to_transform=[1]))
    computing = float32_modules(model)
    assert computing
    fresh = zoo.load("llama")
    peft_model = adapt("llama", fresh, layers_to_transform=[1])
    with KbitPreparedModel.from_manifest(fresh if given == "base" else peft_model, prepared.manifest()):
        assert float32_modules(fresh) == computing


def float32_modules(model: nn.Module) -> set[str]:
    from kbitwrap.edits.norms import Float32Forward

    return {fqn for fqn, module in model.named_modules() if isinstance(vars(module).get("forward"), Float32Forward)}


# ----------------------------------------------------------------------------------------------------
# The page.
# ----------------------------------------------------------------------------------------------------


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"model": zoo.load("llama"), "base": zoo.load("llama")}
    exec(code, names)
    assert names["prepared"].state == "restored"
    assert names["prepared"].model is names["base"]


def test_the_page_shows_the_fields_that_there_are(llama: Manifest) -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    there = json.loads(llama.to_json())

    def compare(shown: Any, there: Any) -> None:
        assert type(shown) is type(there)
        if isinstance(shown, dict):
            assert set(shown) <= set(there)
            for key in shown:
                compare(shown[key], there[key])

    assert list(json.loads(shown)) == list(there)
    compare(json.loads(shown), there)


def test_the_page_lists_what_the_hash_leaves_out() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in _VOLATILE if f"`{name}`" not in page] == []


def test_two_preparations_with_other_precisions_are_not_one() -> None:
    model = zoo.load("llama")
    for _ in range(2):  # the same again changes nothing
        kbitwrap.prepare_model_for_kbit_training(model)
    prepared = kbitwrap.prepared_of(model)
    assert prepared is not None
    assert prepared.manifest().config.precision == "full"
    kbitwrap.prepare_model_for_kbit_training(model, precision="norms")
    with pytest.raises(ManifestError, match="another precision"):
        prepared.manifest()
    prepared.restore()
    assert prepared.prepare().manifest().config.precision == "full"
