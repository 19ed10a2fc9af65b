"""Models that save themselves in a way of their own, or cannot."""

from __future__ import annotations

import functools
import json
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from kbitwrap import ExportError, KbitPreparedModel, merge_checkpoint
from support import zoo
from support.files import SHARD, read, saved, tensors_of
from support.snapshot import Snapshot
from support.training import adapt

pytestmark = [
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Falcon's linear layers stay unquantized, so a preparation says that the model is not checkpointed.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]


# ----------------------------------------------------------------------------------------------------
# Other ways to be saved.
# ----------------------------------------------------------------------------------------------------


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """One of the classes that save in a way of their own."""

    def save_pretrained(self, save_directory: str | Path, **kwargs: object) -> None:
        super().save_pretrained(save_directory, **kwargs)
        Path(save_directory, "extra.txt").write_text("extra")


def wrap_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    own = transformers.PreTrainedModel.save_pretrained

    @functools.wraps(own)
    def wrapper(*args: object, **kwargs: object) -> None:
        own(*args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", wrapper)


def test_a_class_that_overrides_save_pretrained_is_materialized_with_a_warning(tmp_path: Path) -> None:
    model = zoo.load("llama")
    model.__class__ = LlamaForCausalLM
    expected = saved(model, tmp_path / "before")
    assert "extra.txt" in expected
    prepared = KbitPreparedModel(model, precision="full").prepare()
    before = Snapshot(model)
    with pytest.warns(UserWarning, match="LlamaForCausalLM has its own save_pretrained, so .* at once"):
        prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert before.diff(Snapshot(model)) == []
    assert read(tmp_path / "export") == expected


def test_a_wrapped_save_pretrained_is_called_with_computed_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("gemma2")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamed = prepared.export(tmp_path / "streamed", max_shard_size=SHARD)
    wrap_saving(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be computed and written one at a time") as caught:
        report = prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert [warning.filename for warning in caught] == [__file__]
    assert read(tmp_path / "export") == expected
    with pytest.warns(UserWarning, match="written one at a time") as caught:
        merge_checkpoint(tmp_path / "before", None, tmp_path / "merged")
    assert [warning.filename for warning in caught] == [__file__]
    tensors = tensors_of(tmp_path / "export").values()
    assert (report.num_tensors, report.num_bytes) == (streamed.num_tensors, streamed.num_bytes)
    assert (report.num_tensors, report.num_bytes) == (len(tensors), sum(tensor.nbytes for tensor in tensors))


def test_there_is_no_warning_where_no_tensor_has_to_be_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("gemma2")
    expected = saved(model, tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    wrap_saving(monkeypatch)
    prepared.export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
@pytest.mark.parametrize("shard", ["5GB", 100])
def test_a_plain_torch_model_is_exported(shard: int | str, tmp_path: Path) -> None:
    model = Plain().bfloat16()
    expected = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    prepared = KbitPreparedModel(model, precision="full").prepare()
    before = Snapshot(model)
    report = prepared.export(tmp_path / "export", max_shard_size=shard)
    assert before.diff(Snapshot(model)) == []
    found = tensors_of(tmp_path / "export")
    assert found.keys() == expected.keys()
    assert all(found[fqn].dtype == expected[fqn].dtype and torch.equal(found[fqn], expected[fqn]) for fqn in found)
    assert report.num_tensors == len(expected)
    assert report.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    if shard == "5GB":
        assert report.files == ("model.safetensors",)
    else:
        index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert set(index["weight_map"].values()) == {file for file in report.files if file.endswith(".safetensors")}


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
def test_names_that_wrappers_use_too(tmp_path: Path) -> None:
    names = ("module", "_orig_mod", "base_model", "model")
    inner = nn.ModuleDict({name: nn.LayerNorm(2 + i) for i, name in enumerate(names)})
    model = nn.Sequential(OrderedDict(module=inner, other=nn.LayerNorm(7))).bfloat16()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with KbitPreparedModel(model, precision="full") as prepared:
        assert set(prepared.manifest().tensors) == set(expected)
        prepared.export(tmp_path / "export")
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: t.tolist() for name, t in tensors.items()} == {name: t.tolist() for name, t in expected.items()}


class Container(nn.Module):
    """A model around one of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder = model
        self.projection = nn.Linear(8, 8).bfloat16()


class SavedContainer(Container):
    """One that writes itself, as sentence embedders do: the model in a folder, its own weights in another."""

    def save_pretrained(self, folder: Path) -> None:
        self.encoder.save_pretrained(folder / "encoder")
        (folder / "projection").mkdir(parents=True)
        save_file(self.projection.state_dict(), folder / "projection" / "weights.safetensors")


@pytest.mark.parametrize("merge_adapters", [False, True])
def test_a_container_that_cannot_save_itself_is_refused_and_the_part_that_can_is_named(
    merge_adapters: bool, tmp_path: Path
) -> None:
    model = Container(zoo.load("llama"))
    prepared = KbitPreparedModel(model, gradient_checkpointing=False).prepare()
    adapted = adapt("llama", model.encoder)
    with pytest.raises(ExportError, match="prepare and export encoder by itself") as caught:
        prepared.export(tmp_path / "export", merge_adapters=merge_adapters)
    assert caught.value.fqn == "encoder"
    assert list(tmp_path.iterdir()) == []
    prepared.restore()
    adapted.unload()
    expected = saved(model.encoder, tmp_path / "before")
    KbitPreparedModel(model.encoder, precision="full").prepare().export(tmp_path / "export", max_shard_size=SHARD)
    assert read(tmp_path / "export") == expected


def test_a_container_that_saves_itself_is_exported_by_its_own_function(tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {
            f"{part}/{name}": data for part in ("encoder", "projection") for name, data in read(folder / part).items()
        }

    model = SavedContainer(zoo.load("llama"))
    model.save_pretrained(tmp_path / "before")
    prepared = KbitPreparedModel(model, precision="full", gradient_checkpointing=False).prepare()
    adapt("llama", model.encoder)
    before = Snapshot(model)
    with pytest.warns(UserWarning, match="SavedContainer has its own save_pretrained.* are held in memory at once"):
        report = prepared.export(tmp_path / "export")
    assert files(tmp_path / "export") == files(tmp_path / "before")
    assert report.files == tuple(sorted(files(tmp_path / "export")))
    assert report.num_tensors == sum(len(tensors_of(tmp_path / "export" / part)) for part in ("encoder", "projection"))
    assert {"projection.weight", "encoder.lm_head.weight"} <= {*report.converted}
    assert before.diff(Snapshot(model)) == []


def test_an_extra_state_that_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    class Stateful(Plain):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    prepared = KbitPreparedModel(Stateful().bfloat16()).prepare()
    with pytest.raises(ExportError, match=r"_extra_state: expected a tensor.*found dict") as caught:
        prepared.export(tmp_path / "export")
    assert caught.value.fqn == "_extra_state"
    assert list(tmp_path.iterdir()) == []
