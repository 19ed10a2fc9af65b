"""A converted checkpoint has the bytes that were saved before, and all else is copied."""

from __future__ import annotations

import filecmp
import functools
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import _SIZE as LIBRARY_SIZES
from safetensors.torch import load_file, save_file

from kbitwrap import (
    ConfigError,
    KbitPreparedModel,
    Manifest,
    ManifestError,
    ManifestMismatchError,
    convert_checkpoint,
    inspect_checkpoint,
)
from kbitwrap.tensors.dtypes import SAFETENSORS_DTYPES
from support import forks, zoo
from support.files import tensors_of
from support.thorough import few


class Saved:
    """One architecture, saved as it was loaded and while it was prepared."""

    def __init__(
        self, folder: Path, name: str, quant: str, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        self.dtype = str(dtype).removeprefix("torch.")
        self.original, self.prepared = folder / "original", folder / "prepared"
        model = zoo.load(name, quant, dtype)
        model.save_pretrained(self.original, **options)
        checkpointing = model.supports_gradient_checkpointing
        with KbitPreparedModel(model, precision="full", gradient_checkpointing=checkpointing) as prepared:
            self.manifest = prepared.manifest()
            model.save_pretrained(self.prepared, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    @functools.cache
    def make(name: str = "llama", quant: str = "nf4", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Saved:
        return Saved(tmp_path_factory.mktemp("saved"), name, quant, dtype, **options)

    return make


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def differing(expected: Path, found: Path) -> list[str]:
    names, others = files_of(expected), files_of(found)
    same = [name for name in names if name in others and filecmp.cmp(expected / name, found / name, shallow=False)]
    return sorted({*names, *others} - {*same})


def ways(case: Saved) -> dict[str, dict[str, Any]]:
    return {
        "manifest": {"manifest": case.manifest},
        "reference": {"like": case.original},
        "config": {"like": case.original / "config.json"},
        "dtype": {"dtype": case.dtype},
    }


WAYS = ("manifest", "reference", "config", "dtype")


# ----------------------------------------------------------------------------------------------------
# Byte for byte.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(zoo.ARCHITECTURES, zoo.CORE[::4]))
def test_every_architecture_gets_its_bytes_back(name: str, saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved(name)
    assert differing(case.original, case.prepared) == ["config.json", "model.safetensors"]
    for way, options in ways(case).items():
        report = convert_checkpoint(case.prepared, tmp_path / way, **options)
        assert differing(case.original, tmp_path / way) == []
        assert report.files == tuple(files_of(case.original))
        assert report.converted
        assert report.saved_bytes == sum(t.nbytes for t in tensors_of(case.prepared).values()) - report.num_bytes
        assert report.saved_bytes > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "quant", "dtype"),
    [
        ("llama", "int8", torch.float16),
        ("mixtral", "int8", torch.bfloat16),
        ("t5", "nf4-double", torch.float16),
        ("gpt_oss", "fp4", torch.float16),
        ("bert", "int8", torch.float16),
    ],
)
def test_other_quantizations_and_dtypes(
    name: str, quant: str, dtype: torch.dtype, way: str, saved: Callable[..., Saved], tmp_path: Path
) -> None:
    case = saved(name, quant, dtype)
    convert_checkpoint(case.prepared, tmp_path / "out", **ways(case)[way])
    assert differing(case.original, tmp_path / "out") == []


@pytest.mark.parametrize("way", WAYS)
def test_shards_stay_as_they_were(way: str, saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved("llama", max_shard_size="100KB")
    assert len(list(case.prepared.glob("*.safetensors"))) > 1
    report = convert_checkpoint(case.prepared, tmp_path / "out", **ways(case)[way])
    assert files_of(tmp_path / "out") == files_of(case.prepared)
    expected, found = tensors_of(case.original), tensors_of(tmp_path / "out")
    assert {name: (t.dtype, t.shape) for name, t in expected.items()} == {
        name: (t.dtype, t.shape) for name, t in found.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.num_bytes == sum(t.nbytes for t in found.values())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map={"": "cpu"})


def test_shards_have_the_size_that_is_asked_for(saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved()
    convert_checkpoint(case.prepared, tmp_path / "many", case.manifest, max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    convert_checkpoint(tmp_path / "many", tmp_path / "one", case.manifest, max_shard_size="5GB")
    assert differing(case.original, tmp_path / "one") == []
    with pytest.raises(ConfigError, match="max_shard_size: expected bytes or a string such as '5GB', found '5 apples'"):
        convert_checkpoint(case.prepared, tmp_path / "none", case.manifest, max_shard_size="5 apples")


def test_an_unprepared_checkpoint_is_copied(saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved()
    report = convert_checkpoint(case.original, tmp_path / "out", case.manifest)
    assert (report.converted, report.saved_bytes) == ((), 0)
    assert differing(case.original, tmp_path / "out") == []


def test_everything_else_is_copied(saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved()
    source = tmp_path / "model"
    shutil.copytree(case.prepared, source)
    for name in ("tokenizer.json", "adapter_model.safetensors", "1_Pooling/config.json", "optimizer.pt"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"1")
    for name in (".git/config", "checkpoint-500/model.safetensors", ".cache/x"):
        (source / name).parent.mkdir()
        (source / name).write_bytes(b"1")
    (source / "README.md").symlink_to("tokenizer.json")
    report = convert_checkpoint(source, tmp_path / "out", case.manifest)
    assert differing(case.original, tmp_path / "out") == [
        "1_Pooling/config.json",
        "README.md",
        "adapter_model.safetensors",
        "optimizer.pt",
        "tokenizer.json",
    ]
    assert report.files == tuple(files_of(tmp_path / "out"))
    assert not (tmp_path / "out" / "README.md").is_symlink()


def test_a_single_file_is_converted_alone(saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved()
    report = convert_checkpoint(case.prepared / "model.safetensors", tmp_path / "out", case.manifest)
    assert report.files == ("model.safetensors",)
    assert differing(case.original, tmp_path / "out") == ["config.json", "generation_config.json"]


# ----------------------------------------------------------------------------------------------------
# Older files.
# ----------------------------------------------------------------------------------------------------


def pickled(folder: Path, model_class: str, target: Path) -> None:
    """A checkpoint as it was saved before safetensors: tied weights under all of their names, in one memory."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            with torch.device("meta"):
                config = transformers.AutoConfig.from_pretrained(folder)
                model = getattr(transformers, model_class)(config)
            names: dict[int, list[str]] = {}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
            for group in names.values():
                there = [name for name in group if name in tensors]
                tensors |= {name: tensors[there[0]] for name in group if there}
            torch.save(tensors, target / f"pytorch_{path.stem}.bin")
        elif path.name.endswith(".index.json"):
            index = path.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
            (target / "pytorch_model.bin.index.json").write_text(index)
        else:
            shutil.copy(path, target)


TO_PICKLE = [
    ("llama", "nf4", {}),
    ("llama", "int8", {"max_shard_size": "100KB"}),
    ("gpt2", "nf4-double", {}),
    ("t5", "nf4", {}),
    ("bert", "int8", {}),
    ("gemma2", "nf4", {}),
]


@pytest.mark.parametrize(
    ("case", "way"), few(itertools.product(TO_PICKLE, WAYS), [*zip(TO_PICKLE[:3], WAYS[:3], strict=True)])
)
def test_pickled_checkpoints_become_the_same_safetensors_files(
    case: tuple[str, str, dict[str, Any]], way: str, saved: Callable[..., Saved], tmp_path: Path
) -> None:
    name, quant, options = case
    run = saved(name, quant, **options)
    pickled(run.prepared, zoo.ARCHITECTURES[name].model_class, tmp_path / "old")
    assert inspect_checkpoint(tmp_path / "old").leftovers == inspect_checkpoint(run.prepared).leftovers
    report = convert_checkpoint(tmp_path / "old", tmp_path / "out", **ways(run)[way])
    expected = convert_checkpoint(run.prepared, tmp_path / "expected", **ways(run)[way])
    assert differing(tmp_path / "expected", tmp_path / "out") == []
    assert {*report.converted} == {*expected.converted}
    assert (report.num_bytes, report.saved_bytes) == (expected.num_bytes, expected.saved_bytes)


def test_a_single_pickled_file_becomes_a_safetensors_file(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(12).view(3, 4)[1:].float(), "empty": torch.ones(0, 2)}, tmp_path / "weights.bin")
    report = convert_checkpoint(tmp_path / "weights.bin", tmp_path / "out", dtype="bfloat16")
    assert report.files == ("weights.safetensors",)
    found = load_file(tmp_path / "out" / "weights.safetensors")
    assert torch.equal(found["a"], torch.arange(4, 12).view(2, 4).bfloat16())
    assert (found["empty"].shape, found["empty"].dtype) == ((0, 2), torch.bfloat16)


# ----------------------------------------------------------------------------------------------------
# Names that PEFT gave.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_state_dict_with_adapters_keeps_them_and_its_names(
    way: str, saved: Callable[..., Saved], tmp_path: Path
) -> None:
    case = saved()
    model = zoo.load("llama", "nf4")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    state = peft.get_peft_model(prepared.model, config).state_dict()
    (tmp_path / "model").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model" / "model.safetensors")
    shutil.copyfile(case.prepared / "config.json", tmp_path / "model" / "config.json")
    report = convert_checkpoint(tmp_path / "model", tmp_path / "out", **ways(case)[way])
    expected, found = tensors_of(case.original), tensors_of(tmp_path / "out")
    assert sorted(found) == sorted(state)
    adapters = [name for name in found if "lora_" in name or "modules_to_save" in name]
    assert len(adapters) == 7
    for name in adapters:
        assert found[name].dtype == state[name].dtype
        assert torch.equal(found[name], state[name])
    names = {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", ""): name
        for name in found
        if name not in adapters
    }
    assert names.keys() == expected.keys()
    for plain, name in names.items():
        assert found[name].dtype == expected[plain].dtype
        assert torch.equal(found[name], expected[plain])
    assert len(report.converted) == 7


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # whose models stand at `model` and at `transformer`
def test_the_names_of_prompt_learning_are_those_of_its_base(
    name: str, saved: Callable[..., Saved], tmp_path: Path
) -> None:
    case = saved(name)
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prepared = KbitPreparedModel(zoo.load(name), precision="full").prepare()
    state = peft.get_peft_model(prepared.model, settings).base_model.state_dict(prefix="base_model.")
    source = checkpoint(tmp_path / "model", {fqn: tensor.clone() for fqn, tensor in state.items()})
    report = convert_checkpoint(source, tmp_path / "out", case.manifest)
    expected, found = tensors_of(case.original), tensors_of(tmp_path / "out")
    assert set(report.converted) == {fqn for fqn, tensor in state.items() if tensor.dtype != found[fqn].dtype}
    assert {fqn.removeprefix("base_model.") for fqn in found} >= set(expected)
    for fqn, tensor in expected.items():
        assert found[f"base_model.{fqn}"].dtype == tensor.dtype
        assert torch.equal(found[f"base_model.{fqn}"], tensor)


# ----------------------------------------------------------------------------------------------------
# What is cast, and what is not.
# ----------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_the_reference_has_in_float32_stays(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2), "b.weight": torch.ones(2), "c": torch.ones(2, dtype=torch.int64)}
    source = checkpoint(tmp_path / "in", tensors, dtype="float32")
    reference = checkpoint(tmp_path / "ref", {**tensors, "a.weight": torch.ones(2).half()}, torch_dtype="float16")
    report = convert_checkpoint(source, tmp_path / "out", like=reference)
    assert report.converted == ("a.weight",)
    assert tensors_of(tmp_path / "out")["b.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "float16"}


def test_a_reference_of_other_shapes_is_refused_by_name(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", {"a.weight": torch.ones(2, 4), "b.weight": torch.ones(2)}, dtype="float32")
    packed = {"a.weight": torch.ones(4, 1).half(), "a.weight.absmax": torch.ones(1), "b.weight": torch.ones(2).half()}
    convert_checkpoint(source, tmp_path / "packed", like=checkpoint(tmp_path / "quantized", packed))
    for dtype in (torch.float16, torch.float32):
        other = {"a.weight": torch.ones(2, 8, dtype=dtype), "b.weight": torch.ones(2).half()}
        reference = checkpoint(tmp_path / str(dtype), other)
        with pytest.raises(ConfigError, match=r"other shapes: a\.weight: .*\(2, 8\).*\(2, 4\).*nothing was written"):
            convert_checkpoint(source, tmp_path / "out", like=reference)
    assert not (tmp_path / "out").exists()


def test_a_reference_that_names_no_dtype_changes_nothing(tmp_path: Path) -> None:
    zoo.load("llama", quant=None, dtype=torch.float32).save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if "dtype" not in key}
    path.write_text(json.dumps(config))
    assert convert_checkpoint(tmp_path / "in", tmp_path / "out", like=path).converted == ()


def test_shapes_are_kept_for_empty_tensors_too(tmp_path: Path) -> None:
    shapes = [(0, 4), (2, 0), (0,), (), (3, 2)]
    source = checkpoint(tmp_path / "in", {str(shape): torch.ones(shape) for shape in shapes})
    convert_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    assert {name: str(tuple(t.shape)) for name, t in tensors_of(tmp_path / "out").items()} == {
        str(shape): str(shape) for shape in shapes
    }


def test_scales_of_a_library_that_is_not_installed_stay(tmp_path: Path) -> None:
    zoo.load("llama", quant=None, dtype=torch.bfloat16).save_pretrained(tmp_path)
    path, tensors = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    weight = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.layers.0.mlp.up_proj.weight_packed"] = weight.to(torch.int8)
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.rand(len(weight), 1)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not inspect_checkpoint(tmp_path)


def test_the_own_config_is_enough_where_it_names_a_half_dtype(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", {"a.weight": torch.ones(2)}, torch_dtype="float16", model_type="of_nobody")
    assert convert_checkpoint(source, tmp_path / "out").converted == ("a.weight",)
    assert tensors_of(tmp_path / "out")["a.weight"].dtype == torch.float16
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_values_are_rounded_once_and_special_ones_stay(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2**-8, 1 + 2**-8 + 2**-20, -0.0, float("inf"), float("nan"), 3e38, 1e-40])
    source = checkpoint(tmp_path / "in", {"a": values})
    convert_checkpoint(source, tmp_path / "out", dtype=torch.bfloat16)
    found = tensors_of(tmp_path / "out")["a"]
    assert torch.equal(found.view(torch.int16), values.to(torch.bfloat16).view(torch.int16))
    assert found[:2].tolist() == [1.0, 1.0078125]  # ties to even, and what is above a tie up


@pytest.mark.parametrize("dtype", sorted({*SAFETENSORS_DTYPES.values()} & {*LIBRARY_SIZES} - {torch.float32}, key=str))
def test_only_float32_is_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.ones(2, 4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    source = checkpoint(tmp_path / "in", {"a": values})
    assert convert_checkpoint(source, tmp_path / "out", dtype="bfloat16").converted == ()
    found = tensors_of(tmp_path / "out")["a"]
    assert (found.dtype, found.shape) == (dtype, values.shape)
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))


# ----------------------------------------------------------------------------------------------------
# What does not match, and what is no checkpoint.
# ----------------------------------------------------------------------------------------------------


def changed(case: Saved, folder: Path, **tensors: torch.Tensor | None) -> Path:
    shutil.copytree(case.prepared, folder)
    state = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: t for name, t in state.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("model.norm.weight", torch.ones(3), "shape"),
        ("lm_head.weight", torch.ones(512, 64, dtype=torch.float16), "dtype"),
        ("model.layers.0.self_attn.q_proj.weight", torch.ones(64, 64), "shape"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_than_recorded_is_refused(
    name: str, tensor: torch.Tensor, what: str, saved: Callable[..., Saved], tmp_path: Path
) -> None:
    case = saved()
    if what == "dtype":
        tensor = load_file(case.original / "model.safetensors")[name].half()
    source = changed(case, tmp_path / "in", **{name: tensor})
    with pytest.raises(ManifestMismatchError, match=f"{name}: {what}: expected .*nothing was written") as error:
        convert_checkpoint(source, tmp_path / "out", case.manifest)
    assert list(error.value.different) == [name]
    assert list(error.value.different[name]) == [what]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.layers.7.mlp.up_proj.weight", "surprise", "model.norm.bias", "model.SCB"])
def test_a_tensor_that_the_manifest_does_not_name_is_refused(
    name: str, saved: Callable[..., Saved], tmp_path: Path
) -> None:
    case = saved()
    source = changed(case, tmp_path / "in", **{name: torch.ones(2)})
    with pytest.raises(ManifestMismatchError, match=f"{name}: the manifest has no such tensor") as error:
        convert_checkpoint(source, tmp_path / "out", case.manifest)
    assert error.value.unexpected == (name,)
    assert not (tmp_path / "out").exists()


def test_another_models_manifest_is_refused(saved: Callable[..., Saved], tmp_path: Path) -> None:
    with pytest.raises(ManifestMismatchError, match=r"and \d+ more"):
        convert_checkpoint(saved().prepared, tmp_path / "out", saved("gpt2").manifest)


def test_a_manifest_may_be_a_path(saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved()
    case.manifest.save(tmp_path / "kbitwrap.json")
    assert isinstance(Manifest.load(tmp_path / "kbitwrap.json"), Manifest)
    convert_checkpoint(case.prepared, tmp_path / "out", tmp_path / "kbitwrap.json")
    assert differing(case.original, tmp_path / "out") == []
    with pytest.raises(ManifestError, match=r"config\.json"):
        convert_checkpoint(case.prepared, tmp_path / "none", case.prepared / "config.json")


def test_there_is_one_source_of_dtypes_and_it_names_half_ones(saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved()
    with pytest.raises(ConfigError, match="expected at most one source of dtypes"):
        convert_checkpoint(case.prepared, tmp_path / "out", case.manifest, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"original dtype is not known: expected float16 or bfloat16, found .*32"):
        convert_checkpoint(case.prepared, tmp_path / "out")
    for dtype in ("float31", torch.float32, 5):
        with pytest.raises(ConfigError, match="expected"):
            convert_checkpoint(case.prepared, tmp_path / "out", dtype=dtype)


# ----------------------------------------------------------------------------------------------------
# Memory.
# ----------------------------------------------------------------------------------------------------

MEMORY = """
import ctypes, sys
from pathlib import Path
from kbitwrap import convert_checkpoint
from support.memory import resident_peak

# What is freed goes back to the system: which pieces the C library keeps is not measured.
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
folder = Path(sys.argv[1])
convert_checkpoint(folder / "small", folder / "warm", dtype="bfloat16")
print(resident_peak(lambda: convert_checkpoint(folder / "in", folder / "out", dtype="bfloat16")))
"""


@pytest.mark.thorough
def test_memory_is_that_of_a_few_pieces(tmp_path: Path) -> None:
    size = 8 << 20
    checkpoint(tmp_path / "small", {"a": torch.ones(4)})
    checkpoint(tmp_path / "in", {str(i): torch.ones(size) for i in range(8)})
    found = forks.run_program(MEMORY, str(tmp_path))
    # Pieces of a tensor of 32 MiB: one is written while the next is read.
    assert int(found.stdout) < 4 * size / 2


@pytest.mark.parametrize("way", WAYS)
def test_a_default_device_is_not_where_files_are_read(way: str, saved: Callable[..., Saved], tmp_path: Path) -> None:
    case = saved("llama")
    with torch.device("meta"):
        convert_checkpoint(case.prepared, tmp_path / "out", **ways(case)[way])
    assert differing(case.original, tmp_path / "out") == []
