"""Which models a manifest accepts: the same base in whatever is around it, and no other."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from kbitwrap import KbitPreparedModel, Manifest, ManifestMismatchError, Precision
from support import zoo
from support.snapshot import Snapshot
from support.thorough import each_once
from support.training import adapt

pytestmark = [
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Falcon's linear layers stay unquantized, and so do the plain modules here: a preparation says so.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]


def recorded(name: str, quant: str = "nf4", **options: Any) -> Manifest:
    """The manifest of a zoo model that is prepared and restored for it."""
    with KbitPreparedModel(zoo.load(name, quant), **{**zoo.fields(name), **options}) as prepared:
        return Manifest.from_json(prepared.manifest().to_json())


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
