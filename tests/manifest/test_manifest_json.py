"""Manifests as files and as JSON: what is written comes back, and what is invalid is refused."""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kbitwrap import ExportError, Manifest, ManifestError, ManifestVersionError, PrepareConfig
from support import forks
from support.plain import small_manifest

# The plain model of these tests is not quantized, and preparing it says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")

HERE = Path(__file__).parent


# ----------------------------------------------------------------------------------------------------
# Files.
# ----------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    manifest = small_manifest()
    path = tmp_path / "run" / "kbitwrap.json"
    manifest.save(path)
    manifest.save(str(path))
    assert os.listdir(path.parent) == [path.name]
    assert Manifest.load(path) == Manifest.load(str(path)) == manifest
    assert path.read_text() == manifest.to_json()


def test_the_json_is_readable_by_a_person() -> None:
    lines = small_manifest().to_json().splitlines()
    assert lines[:3] == ["{", '  "format": "kbitwrap-manifest",', '  "version": 1,']
    assert sum('"embed.weight": [' in line for line in lines) == 1
    assert max(map(len, lines)) < 300


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    with pytest.raises(ExportError):
        small_manifest().save(file / "kbitwrap.json")
    assert os.listdir(tmp_path) == ["file"]
    assert file.read_text() == "here"


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "nul\0.json"):
        with pytest.raises(ManifestError, match="cannot read") as caught:
            Manifest.load(path)
        assert isinstance(caught.value.__cause__, (OSError, ValueError))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ManifestError, match=r"at most 128.0 MiB"):
        Manifest.load(path)
    monkeypatch.setattr("kbitwrap.manifest.manifest.MAX_BYTES", 100)
    with pytest.raises(ManifestError, match="at most 100 B"):
        Manifest.from_json(small_manifest().to_json())


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.json"
    path.write_bytes(small_manifest().to_json().replace("Tied", "T\u00e9").encode("latin-1"))
    with pytest.raises(ManifestError, match="UTF-8"):
        Manifest.load(path)


@pytest.mark.thorough
def test_a_hundred_thousand_tensors_fit() -> None:
    data = json.loads(small_manifest().to_json())
    part = "down_proj.weight.quant_state.bitsandbytes__nf4"
    data["tensors"] = {
        f"model.layers.{i // 2000}.mlp.experts.{i % 2000}.{part}": [0, f"{i * 0x9E3779B97F4A7C15 % (1 << 64):016x}"]
        for i in range(100_000)
    }
    data["ties"] = []
    manifest = Manifest.from_json(json.dumps(data))
    text = manifest.to_json()
    assert len(text.encode()) < 20_000_000
    start = time.perf_counter()
    again = Manifest.from_json(text)
    seconds = time.perf_counter() - start
    print(f"{len(text)} bytes, loaded in {seconds:.2f} s")  # pytest -s shows it
    assert len(again.tensors) == 100_000
    assert not again.diff(manifest)


def test_the_published_schema_is_the_one_that_is_used() -> None:
    published = json.loads((HERE.parents[1] / "docs" / "manifest.schema.json").read_text())
    assert published == Manifest.model_json_schema(), (
        "docs/manifest.schema.json is to hold json.dumps(Manifest.model_json_schema(), indent=2), with the pydantic of "
        ".ci/constraints.txt"
    )


# ----------------------------------------------------------------------------------------------------
# Versions.
# ----------------------------------------------------------------------------------------------------


def test_a_file_of_version_1_is_read_and_written_as_it_was() -> None:
    path = HERE / "manifest-version-1.json"  # of kbitwrap 0.1.0, before there was another version
    manifest = Manifest.load(path)
    assert json.loads(manifest.to_json()) == json.loads(path.read_text())
    assert manifest.prepare_config() == PrepareConfig(gradient_checkpointing_kwargs={"use_reentrant": True})


def test_a_new_field_makes_it_version_2_only_where_it_is_used() -> None:
    manifest, audited = small_manifest(audit=False), small_manifest(audit=True)
    assert manifest.version == 1
    assert '"audit"' not in manifest.to_json()
    assert audited.version == json.loads(audited.to_json())["version"] == 2
    assert audited.prepare_config().audit
    assert Manifest.from_json(audited.to_json()) == audited
    assert manifest.diff(audited).different == {"": {"config.audit": (False, True)}}


def test_processes_and_devices_are_recorded_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = small_manifest()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "4")  # as torchrun sets it
    recorded = small_manifest()
    assert (recorded.version, recorded.world_size, recorded.visible_devices) == (2, 4, 2)
    assert Manifest.from_json(recorded.to_json()) == recorded
    assert '"world_size"' not in manifest.to_json()
    assert not manifest.diff(recorded)
    assert manifest.essence() == recorded.essence()


def test_version_1_tells_cuda_from_a_cpu_and_a_field_names_any_other_accelerator() -> None:
    data = json.loads(small_manifest().to_json())
    assert Manifest.from_json(json.dumps(data)).device_type == "cpu"
    data["before"]["memory"].update(allocated_bytes=1, reserved_bytes=1)
    assert Manifest.from_json(json.dumps(data)).device_type == "cuda"
    manifest = Manifest.from_json(json.dumps({**data, "version": 2, "accelerator": "xpu"}))
    assert manifest.device_type == "xpu"
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize("config", [{}, {"audit": False}])
def test_a_file_of_version_2_without_a_new_field_is_one_of_version_1(config: dict[str, Any]) -> None:
    manifest = small_manifest()
    data = json.loads(manifest.to_json())
    data["version"] = 2
    data["config"] |= config
    read = Manifest.from_json(json.dumps(data))
    assert read == manifest
    assert read.to_json() == manifest.to_json()


@pytest.mark.parametrize("audit", [None, 0, 1, "yes", []])
def test_a_new_field_is_validated(audit: Any) -> None:
    data = json.loads(small_manifest(audit=True).to_json())
    data["config"]["audit"] = audit
    assert "config.audit" in str(refuse(json.dumps(data)))


# ----------------------------------------------------------------------------------------------------
# Bad manifests.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text() -> str:
    return small_manifest().to_json()


def refuse(text: str) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_json(text)
    assert len(str(caught.value)) < 2000
    str(caught.value).encode()  # no lone surrogates, which no terminal and no log can take
    return caught.value


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize("version", [0, 3, 99, "1", 1.0, True, None, [], {}, -1])
def test_an_unsupported_version_is_reported_first(text: str, version: Any) -> None:
    # Before anything else of it is looked at: a later version may hold what this one does not know.
    error = refuse(json.dumps({"format": "kbitwrap-manifest", "version": version, "news": 1}))
    assert isinstance(error, ManifestVersionError)
    assert error.found == version
    assert error.supported == (1, 2)


@pytest.mark.parametrize("bad", ["", "null", "[]", "1", '"x"', "{}", '{"format": "other"}', "\ufeff{}", "{", "\0"])
def test_other_json_is_no_manifest(bad: str) -> None:
    assert not isinstance(refuse(bad), ManifestVersionError)


def test_a_truncated_manifest_is_refused_at_every_length(text: str) -> None:
    for length in range(len(text.rstrip())):
        with pytest.raises(ManifestError):
            Manifest.from_json(text[:length])


def test_every_field_is_needed_and_no_other_is_known(text: str) -> None:
    data = json.loads(text)
    free = [("versions",), ("tensors",), ("plan", "by_role"), ("model", "quantization", "config")]
    free.append(("config", "gradient_checkpointing_kwargs"))
    keys = [path for path in paths(data) if isinstance(path[-1], str) and path[:-1] not in free]
    assert len(keys) > 50
    for *parents, key in keys:
        changed = copy.deepcopy(data)
        place = changed
        for parent in parents:
            place = place[parent]
        value = place.pop(key)
        refuse(json.dumps(changed))
        place |= {key: value, f"{key}x": value}
        refuse(json.dumps(changed))


def test_every_duplicate_key_is_refused(text: str) -> None:
    for line in text.splitlines():
        if '": ' in line and not line.endswith(("{", "[")):
            refuse(text.replace(line, f"{line.rstrip(',')},\n{line}", 1))


WRONG = (None, True, -1, 1.5, 1 << 63, 1 << 80, "x", "", "../../etc/passwd", "a\0b", "\ud800", [], {}, [[]], {"x": 1})


@pytest.mark.thorough
def test_wrong_values_anywhere_are_refused_or_harmless(text: str) -> None:
    data = json.loads(text)
    refused = accepted = 0
    for path in paths(data):
        for value in WRONG:
            changed = json.dumps(replaced(data, path, value))
            try:
                manifest = Manifest.from_json(changed)
            except ManifestError:
                refused += 1
            else:
                accepted += 1
                assert Manifest.from_json(manifest.to_json()) == manifest
    assert refused > 10 * accepted > 0


TENSOR = ("tensors", "norm.weight")
MUST_REFUSE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "shape of another type": (("kinds", 0, "shape"), "16"),
    "negative size": (("kinds", 1, "shape", 0), -1),
    "absurd size": (("kinds", 1, "shape", 0), 1 << 63),
    "absurd rank": (("kinds", 0, "shape"), [1] * 65),
    "flag as a size": (("kinds", 1, "shape", 0), True),
    "unknown dtype": (("kinds", 0, "original_dtype"), "load"),
    "dtype with a module": (("kinds", 0, "prepared_dtype"), "torch.float32"),
    "unknown type": (("kinds", 0, "type"), "code"),
    "number as a flag": (("kinds", 0, "requires_grad"), 1),
    "kind out of range": ((*TENSOR, 0), 99),
    "negative kind": ((*TENSOR, 0), -1),
    "digest of another length": ((*TENSOR, 1), "0" * 15),
    "digest in capitals": ((*TENSOR, 1), "A" * 16),
    "digest as a number": ((*TENSOR, 1), 5),
    "three fields in a row": (TENSOR, [0, "0" * 16, 1]),
    "tie to what is not there": (("ties", 0, 0), "nowhere.weight"),
    "tie of different tensors": (("ties", 0, 0), "norm.weight"),
    "tie of one": (("ties", 0), ["embed.weight"]),
    "tied twice": (("ties",), [["embed.weight", "head.weight"], ["embed.weight", "head.weight"]]),
    "unknown precision": (("config", "precision"), "double"),
    "budget in words": (("config", "memory_budget"), "much"),
    "negative budget": (("config", "memory_budget"), -1),
    "chunk of nothing": (("config", "head_chunk_bytes"), 0),
    "head in version 1": (("config", "head"), "float32"),
    "audit in version 1": (("config", "audit"), True),
    "default audit in version 1": (("config", "audit"), False),
    "world size in version 1": (("world_size",), 2),
    "accelerator in version 1": (("accelerator",), "xpu"),
    "no regular expression": (("config", "norm_modules"), ["("]),
    "a repetition too large": (("config", "norm_modules"), ["a{99999999999999}"]),
    "an expression too deep": (("config", "norm_modules"), ["(" * 4000 + ")" * 4000]),
    "an expression too long": (("config", "norm_modules"), ["a" * 5000]),
    "absurdly many expressions": (("config", "norm_modules"), ["a"] * 300),
    "date of another kind": (("created",), "yesterday"),
    "hash of another kind": (("model", "config_sha256"), "0" * 63),
    "line break in a class": (("model", "class"), "A\nB"),
    "negative bytes": (("plan", "peak_bytes"), -1),
    "hook on a path": (("after", "state", "input_gradient_hooks"), {"../a": 1}),
    "lone surrogate in a setting": (("config", "gradient_checkpointing_kwargs"), {"a": "\ud800"}),
    "lone surrogate in a key": (("config", "gradient_checkpointing_kwargs"), {"a": {"\ud800": 1}}),
}


@pytest.mark.parametrize("case", MUST_REFUSE)
def test_an_invalid_value_is_refused(case: str, text: str) -> None:
    path, value = MUST_REFUSE[case]
    refuse(json.dumps(replaced(json.loads(text), path, value)))


def test_the_first_kind_that_is_not_there_is_refused(text: str) -> None:
    data = json.loads(text)
    refuse(json.dumps(replaced(data, (*TENSOR, 0), len(data["kinds"]))))


BAD_NAMES = ("", ".", "..", "../a", "/etc/passwd", "a/b", "a\\b", "C:\\a", "a..b", ".a", "a.", "a\0", "a\nb", "\x1b[2J")
BAD_NAMES += ("\ud800", "\u202ea", "a\u2028b\u0085", "x" * 1025)


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_that_could_be_paths_are_refused(name: str, text: str) -> None:
    data = json.loads(text)
    data["tensors"][name] = data["tensors"]["norm.weight"]
    assert refuse(json.dumps(data)).fqn == name.encode(errors="surrogatepass").decode(errors="replace")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 100_000, "01"])
def test_invalid_json_numbers_are_refused(number: str, text: str) -> None:
    assert '"use_reentrant": false' in text
    start = time.perf_counter()
    refuse(text.replace('"use_reentrant": false', f'"x": {number}'))
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [300, 5_000, 1_000_000])
def test_deep_nesting_is_refused_quickly(opening: str, depth: int, text: str) -> None:
    closing = "".join({"[": "]", "{": "}"}[c] for c in reversed(opening) if c in "[{")
    start = time.perf_counter()
    for bad in (
        opening * depth,
        text.replace('"use_reentrant": false', f'"x": {opening * depth}1{closing * depth}'),
        text.replace('"tensors": {', f'"tensors": {opening * depth}1{closing * depth}, "rest": {{'),
    ):
        refuse(bad)
    assert time.perf_counter() - start < 20


@pytest.mark.thorough
def test_many_errors_are_summarized_quickly(text: str) -> None:
    data = json.loads(text)
    data["tensors"] = {f"../{i}": [-1, "x" * 100] for i in range(50_000)}
    data["ties"] = [[f"a{i}", f"b{i}"] for i in range(50_000)]
    start = time.perf_counter()
    assert "more" in str(refuse(json.dumps(data)))
    assert time.perf_counter() - start < 20


@pytest.mark.thorough
def test_ten_thousand_mutations_are_refused_or_harmless(text: str) -> None:
    # Mutations of the bytes: single bits, bytes, pieces taken out, doubled, swapped, and pieces of other places.
    generator = random.Random(0)
    data = text.encode()
    refused = accepted = 0
    for _ in range(10_000):
        mutated = bytearray(data)
        for _ in range(generator.choice((1, 1, 1, 2, 5))):
            i, j = sorted(generator.randrange(len(mutated)) for _ in range(2))
            j = min(j, i + generator.choice((1, 2, 10, 100)))
            match generator.randrange(7):
                case 0:
                    mutated[i] ^= 1 << generator.randrange(8)
                case 1:
                    mutated[i] = generator.randrange(256)
                case 2:
                    del mutated[i:j]
                case 3:
                    mutated[i:i] = mutated[i:j]
                case 4:
                    k = generator.randrange(len(mutated))
                    mutated[i:j] = mutated[k : k + (j - i)]
                case 5:
                    mutated[i:i] = generator.choice(
                        (b"[", b"{", b'"', b"\\", b"\\ud800", b"-", b"9" * 30, b"e999", b",")
                    )
                case 6:
                    del mutated[i:]
                    mutated += b"}"
        try:
            manifest = Manifest.from_json(mutated.decode(errors="surrogateescape"))
        except ManifestError:
            refused += 1
        else:
            accepted += 1
            # Another version, digest or count, say: what is accepted is a manifest all the same.
            assert Manifest.from_json(manifest.to_json()) == manifest
    assert refused > 7_000
    assert accepted > 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.thorough
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_anywhere_is_refused_or_harmless(data: Any, text: str) -> None:
    manifest = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(paths(manifest), key=str)))
        manifest = replaced(manifest, path, data.draw(JSON))
    try:
        read = Manifest.from_json(json.dumps(manifest))
    except ManifestError:
        return
    assert Manifest.from_json(read.to_json()) == read


@pytest.mark.thorough
@given(JSON)
@settings(max_examples=100, deadline=None)
def test_any_json_is_no_manifest(value: Any) -> None:
    refuse(json.dumps(value))


def test_nothing_happens_because_a_manifest_names_it(tmp_path: Path, text: str) -> None:
    marker = tmp_path / "executed"
    evil = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    data = json.loads(text)
    data["versions"] = {"antigravity": "1", "this": evil}
    data["model"] |= {"class": "antigravity.this", "name_or_path": "/etc/hostname"}
    data["model"]["quantization"] = {"method": "antigravity", "config": {"py/object": "os.system", "a": evil}}
    data["config"]["norm_modules"] = ["antigravity.this", "os.system"]
    data["config"]["gradient_checkpointing_kwargs"] = {"__reduce__": ["os.system", evil], "context_fn": "antigravity"}
    data["tensors"]["os.system"] = data["tensors"]["norm.weight"]
    path = tmp_path / "evil.json"
    path.write_text(json.dumps(data))
    program = f"""
import sys, warnings
import torch
from kbitwrap import Manifest, ManifestMismatchError
model = torch.nn.LayerNorm(2)
def use(path):
    manifest = Manifest.load(path)
    manifest.prepare_config(), str(manifest), repr(manifest), manifest.to_json(), manifest.diff(manifest)
    manifest.diff_essence(manifest.essence())
    list(manifest.tensors.values())
    try:
        manifest.check(model)
    except ManifestMismatchError as error:
        str(error)
    else:
        raise SystemExit("no mismatch")
use({str(tmp_path / "fine.json")!r})  # what Python itself loads at first use
events = []
recording = False
def hook(event, arguments):
    if recording:
        events.append((event, str(arguments)))
sys.addaudithook(hook)
recording = True
use({str(path)!r})
recording = False
# What looks at objects of this process, and at nothing else.
allowed = ("object.__getattr__", "object.__setattr__", "object.__delattr__", "sys._getframe", "builtins.id")
found = [(event, arguments) for event, arguments in events if event not in allowed]
opened = [arguments for event, arguments in found if event == "open"]
assert len(opened) == 1 and {path.name!r} in opened[0], opened
rest = [pair for pair in found if pair[0] != "open"]
assert not rest, rest
"""
    small_manifest().save(tmp_path / "fine.json")
    forks.run_program(program)
    assert not marker.exists()
