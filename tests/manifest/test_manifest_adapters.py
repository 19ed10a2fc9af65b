"""Manifests say which adapters stood on the base, and compare them where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
from torch import nn

from kbitwrap import KbitPreparedModel, Manifest, ManifestError, ManifestMismatchError
from support import zoo
from support.plain import small_manifest
from support.snapshot import Snapshot
from support.training import adapt, step


def recorded(model: nn.Module, *configs: peft.PeftConfig, **options: Any) -> Manifest:
    """The manifest of a base with these adapters, called ``"default"``, ``"1"``, ``"2"`` ..."""
    with KbitPreparedModel(model) as prepared:
        peft_model = peft.get_peft_model(model, configs[0], **options)
        for number, config in enumerate(configs[1:], 1):
            peft_model.add_adapter(str(number), config)
        return prepared.manifest()


def differences(manifest: Manifest, model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """How a model differs, which is only in its adapters."""
    manifest.check(model)
    with pytest.raises(ManifestMismatchError) as caught:
        manifest.check(model, adapters=True)
    assert (caught.value.missing, caught.value.unexpected, [*caught.value.different]) == ((), (), [""])
    return caught.value.different[""]


def test_the_record_says_which_adapters_there_are_what_they_are_and_their_dtypes() -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model) as prepared:
        bare = prepared.manifest()
        peft_model = adapt("llama", model)
        peft_model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        for fqn, parameter in peft_model.named_parameters():
            if "other" in fqn:
                parameter.data = parameter.data.bfloat16()
        state = Snapshot(peft_model)
        manifest = prepared.manifest()
        assert state.diff(Snapshot(peft_model)) == []
    assert (bare.version, bare.adapters) == (1, {})
    assert '"adapters"' not in bare.to_json()
    assert manifest.version == 2
    found = {name: adapter.dtypes for name, adapter in manifest.adapters.items()}
    assert found == {"default": ("float32",), "other": ("bfloat16",)}
    assert len({adapter.config_sha256 for adapter in manifest.adapters.values()}) == 2
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.to_json() == manifest.to_json()
    rows = bare.diff(manifest).different
    assert [*rows] == [""]
    assert {key.split(".")[0] for key in rows[""]} == {"adapters"}
    assert bare.essence() == manifest.essence()


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_a_check_of_adapters_passes_prepared_suspended_restored_and_trained(precision: str) -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model, precision=precision) as prepared:
        peft_model = adapt("llama", model, modules_to_save=True)
        manifest = prepared.manifest()
        step("llama", peft_model)
        manifest.check(peft_model, adapters=True)
        with prepared.suspended():
            manifest.check(peft_model, adapters=True)
            assert prepared.manifest().adapters == manifest.adapters
    manifest.check(peft_model, adapters=True)
    assert [*manifest.adapters] == ["default"]


def test_an_adapter_that_was_unloaded_or_deleted_is_not_there() -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model) as prepared:
        peft_model = adapt("llama", model)
        manifest = prepared.manifest()
        peft_model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        peft_model.delete_adapter("other")
        assert prepared.manifest().adapters == manifest.adapters
        peft_model.unload()
        assert prepared.manifest().adapters == {}
    found = differences(manifest, model)
    assert {key: second for key, (_, second) in found.items()} == {
        f"adapters.default.{name}": None for name in ("config_sha256", "dtypes")
    }


CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=2, task_type="CAUSAL_LM", rank_pattern={"v_proj": 3, "q_proj": 1}),
    "dora on every linear layer": lambda: peft.LoraConfig(r=2, use_dora=True, target_modules="all-linear"),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 5]),
    "classes": lambda: peft.LoraConfig(r=2, task_type="SEQ_CLS"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_that_is_saved_and_loaded_again_is_the_same(kind: str, tmp_path: Path) -> None:
    name = "bert" if kind == "classes" else "llama"
    model, base = zoo.load(name), zoo.load(name)
    with KbitPreparedModel(model) as prepared:
        peft_model = peft.get_peft_model(model, CONFIGS[kind]())
        manifest = prepared.manifest()
    peft_model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    manifest.check(loaded, adapters=True)
    manifest.check(loaded)


def test_another_config_dtype_or_name_and_no_adapter_differ() -> None:
    config = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    manifest = recorded(zoo.load("llama"), peft.LoraConfig(**config))
    digest = manifest.adapters["default"].config_sha256

    other = peft.get_peft_model(zoo.load("llama"), peft.LoraConfig(**config, lora_alpha=3))
    assert [*differences(manifest, other)] == ["adapters.default.config_sha256"]
    assert differences(manifest, other)["adapters.default.config_sha256"][0] == digest

    half = peft.get_peft_model(zoo.load("llama"), peft.LoraConfig(**config))
    half.base_model.model.model.layers[0].self_attn.q_proj.lora_A.bfloat16()
    assert differences(manifest, half) == {"adapters.default.dtypes": (("float32",), ("bfloat16", "float32"))}

    named = peft.get_peft_model(zoo.load("llama"), peft.LoraConfig(**config), adapter_name="named")
    assert {key.rpartition(".")[0] for key in differences(manifest, named)} == {"adapters.default", "adapters.named"}

    assert {key.rpartition(".")[0] for key in differences(manifest, zoo.load("llama"))} == {"adapters.default"}


def test_an_adapter_is_named_as_it_is_where_the_base_has_such_a_name() -> None:
    model = zoo.load("llama")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="model")
    with KbitPreparedModel(model) as prepared:
        adapters = prepared.manifest().adapters
    assert {name: adapter.dtypes for name, adapter in adapters.items()} == {"model": ("float32",)}


def test_an_attribute_of_that_name_is_no_adapter() -> None:
    model = zoo.load("llama")
    model.peft_config = {"default": {"r": 8}}
    with KbitPreparedModel(model) as prepared:
        assert prepared.manifest().adapters == {}


def test_an_adapter_of_a_part_is_named_with_the_part() -> None:
    model = nn.ModuleDict({"part": zoo.load("llama"), "rest": nn.Linear(2, 2)})
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model["part"])
    with KbitPreparedModel(model, gradient_checkpointing=False) as prepared:
        manifest = prepared.manifest()
    assert [*manifest.adapters] == ["part.default"]
    manifest.check(model, adapters=True)


def test_a_config_has_one_digest_whatever_the_order_of_its_names() -> None:
    names = ["q_proj", "v_proj", "k_proj"]
    digests = set()
    for targets in (names, names[::-1], set(names)):
        config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["lm_head", "lm_head"])
        (adapter,) = recorded(zoo.load("llama"), config).adapters.values()
        digests.add(adapter.config_sha256)
    assert len(digests) == 1


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (None, []),
        ("dtypes", ["float"]),
        ("dtypes", "float32"),
        ("config_sha256", "0" * 63),
        ("method", "a\nb"),
        ("x", 1),
    ],
)
def test_an_invalid_record_of_an_adapter_is_refused(version: int, field: str | None, value: Any) -> None:
    data = json.loads(small_manifest().to_json())
    record = {"config_sha256": "0" * 64, "dtypes": ["float32"]}
    data |= {"version": version, "adapters": {"default": record}}
    if version == 2:
        assert Manifest.from_json(json.dumps(data)).adapters["default"].dtypes == ("float32",)
        data["adapters"] = value if field is None else {"default": record | {field: value}}
    with pytest.raises(ManifestError, match="adapters"):
        Manifest.from_json(json.dumps(data))
