"""Two manifests are compared, and a model is prepared as one says."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import kbitwrap
from kbitwrap import KbitPreparedModel, Manifest, ManifestError, ManifestMismatchError
from kbitwrap.manifest.configs import _VOLATILE
from support import zoo
from support.plain import small_manifest, tied
from support.snapshot import Snapshot
from support.training import adapt

pytestmark = [
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Falcon's linear layers stay unquantized, and so do the plain modules here: a preparation says so.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]


PAGE = Path(__file__).parents[2] / "docs" / "manifest.md"


def recorded(name: str, quant: str = "nf4", **options: Any) -> Manifest:
    """The manifest of a zoo model that is prepared and restored for it."""
    with KbitPreparedModel(zoo.load(name, quant), **{**zoo.fields(name), **options}) as prepared:
        return Manifest.from_json(prepared.manifest().to_json())


# ----------------------------------------------------------------------------------------------------
# Checking.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Manifest:
    return recorded("llama", precision="full")


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
    second = small_manifest(precision="none")
    rows = second.diff_essence(essence).different
    assert list(rows) == [""]
    assert rows[""]["config.precision"] == ("full", "none")
    assert rows[""]["tensors"] == (essence["tensors"], second.essence()["tensors"])


def test_the_content_of_what_is_trained_is_no_part_of_an_essence() -> None:
    first = small_manifest(freeze=False)
    data = json.loads(first.to_json())
    data["tensors"]["norm.weight"][1] = "0" * 16
    trained = Manifest.from_json(json.dumps(data))
    assert not trained.diff_essence(first.essence())
    data["tensors"]["bn.running_mean"][1] = "0" * 16
    other = Manifest.from_json(json.dumps(data)).diff_essence(first.essence())
    assert {fqn: list(rows) for fqn, rows in other.different.items()} == {"": ["tensors"]}


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
    with pytest.raises(ManifestError, match=r"cannot read .*kbitwrap\.json"):
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
    page = (PAGE.parent / "reference.md").read_text(encoding="utf-8")
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
