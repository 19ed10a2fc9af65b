"""Hostile files: each trial damages one file of a small folder, and gives it to what reads such folders.

Damaged are manifests, headers and indexes of safetensors, pickles, configs, adapters and a run's output: bytes, JSON
values, names that are paths, and what lies in a file's place (links, pipes, folders). A trial holds where the call
returned, or raised one of kbitwrap's errors, within seconds, and took no memory to speak of; where no code in the
folder ran, and nothing was written but the destination, which is whole or as it was and holds nothing from elsewhere.
At the destination lies what may be replaced, a file of others, or the source itself: then nothing is written at all.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
import transformers
from safetensors.torch import save_file

import kbitwrap
from kbitwrap import KbitWrapError, Manifest, Plan
from kbitwrap.checkpoints.inspection import inspect_checkpoint
from kbitwrap.cli import main
from support import plain

ROUND = 2_000
SECRET = b"what lies elsewhere is nobody's business"
SECONDS = 20  # for one call, on a machine that others use too
GROWTH = 96 << 20  # bytes of memory above those before a call: what libraries take for themselves
ADDRESS_SPACE = 4 << 30  # bytes above those before a round, so that what asks for more fails rather than swaps
RAN = "it-ran"
CODE = "from pathlib import Path\nPath({!r}).touch()\nfrom transformers import LlamaConfig as Mine\n"
CONFIG = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


class Hang(BaseException):
    """A call took longer than it may."""


class Runs:
    """An object whose pickle runs code when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


# ----------------------------------------------------------------------------------------------------
# The folders, before they are damaged.
# ----------------------------------------------------------------------------------------------------


def _save_all(folder: Path) -> None:
    """Make a folder for each subject, whose files are sound."""
    torch.manual_seed(0)
    (folder / "manifest").mkdir()
    plain.small_manifest().save(folder / "manifest" / "kbitwrap.json")
    tensors = {
        "embed.weight": torch.ones(4, 2),
        "norm.weight": torch.ones(2),
        "head.weight": torch.ones(4, 2).bfloat16(),
    }
    for name in ("weights", "shards", "pickle"):
        (folder / name).mkdir()
    save_file(tensors, folder / "weights" / "model.safetensors", {"format": "pt"})
    torch.save(tensors, folder / "pickle" / "pytorch_model.bin")
    files = {key: f"model-{n + 1:05}-of-00003.safetensors" for n, key in enumerate(tensors)}
    for key, file in files.items():
        save_file({key: tensors[key]}, folder / "shards" / file, {"format": "pt"})
    index = {"metadata": {"total_size": 56}, "weight_map": files}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    config = transformers.LlamaConfig(**CONFIG, dtype="bfloat16")
    base = transformers.LlamaForCausalLM(config).bfloat16()
    base.save_pretrained(folder / "model")
    quantized = {
        "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    for name, settings in quantized.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": settings}))
    for at in ("adapter", "run"):
        with kbitwrap.KbitPreparedModel(base, precision="full") as prepared:
            record = prepared.manifest()
            adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
            adapted.save_pretrained(folder / at)
            base = adapted.unload()
        record.save(folder / at / "kbitwrap.json")
    parameters = [torch.nn.Parameter(torch.zeros(2, 8))]
    parameters[0].grad = torch.ones(2, 8)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "run" / "optimizer.pt")
    (folder / "run" / "trainer_state.json").write_text(json.dumps({"global_step": 1, "max_steps": 2}))


# ----------------------------------------------------------------------------------------------------
# Damage. Each function takes what draws, and returns what was made of the bytes, and what was done.
# ----------------------------------------------------------------------------------------------------

DEEP, DOUBLED = "\ue000", "\ue001"  # stand for what ``json.dumps`` cannot write
VALUES = (
    *(0, 1, -1, 2, 255, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 64, 10**7, 10**9, 10**12, 10**30, 10**400, -(10**12)),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"), True, False, None),
    *("", " ", ".", "..", "../../secret", "/etc/passwd", "a/b", "a\\b", "a\0b", "\ud800", "\x1b[2J", "x" * 5000, DEEP),
    *(
        "F32",
        "BF16",
        "F4",
        "I64",
        "float32",
        "torch.bfloat16",
        "mine.Mine",
        "10000000",
        "nan",
        "LORA",
        "PISSA",
        "llama",
    ),
    *([], [[]], [0], [-1], [10**12], [10**12, 10**12], [1 << 62] * 4, ["x"], [None], [0] * 10_000),
    *({}, {"": 0}, {"a": {"b": []}}, {DOUBLED: 0}, {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}),
)
NAMES = ("__metadata__", "auto_map", "num_labels", "rank_pattern", "quantization_config", "text_config", "../a", "a/b")
Damage = tuple[bytes, str]


def _damage_bytes(rng: random.Random, data: bytes) -> Damage:
    kind = rng.choice(("flip", "cut", "drop", "insert", "repeat", "zero", "number", "empty"))
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 2, 8, 64)))
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 16))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed), "bits flipped"
    made = {
        "cut": data[:start],
        "drop": data[:start] + data[end:],
        "insert": data[:start] + rng.randbytes(rng.choice((1, 8, 300))) + data[start:],
        "repeat": data[:end] + data[start:],
        "zero": data[:start] + bytes(end - start) + data[end:],
        "number": rng.choice((0, 1, len(data), 1 << 20, 1 << 40, (1 << 64) - 1)).to_bytes(8, "little") + data[8:],
        "empty": b"",
    }
    return made[kind], f"{kind} at {start}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def _damage_json(rng: random.Random, text: bytes) -> Damage:
    found = json.loads(text)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = [*_places(found)]
        if not places:
            break
        holder, key = rng.choice(places)
        kind = rng.choice(("value", "value", "value", "scale", "remove", "rename", "add", "whole"))
        value = copy.deepcopy(rng.choice(VALUES))
        if kind == "whole":
            found = value if isinstance(value, (dict, list)) else [value]
        elif kind == "scale" and type(holder[key]) is int and abs(holder[key]) < 1 << 64:
            holder[key] = value = rng.choice((holder[key] * 10**6, -holder[key], holder[key] + 1, holder[key] / 2))
        elif kind == "remove":
            del holder[key]
        elif kind in ("rename", "add") and isinstance(holder, dict):
            name = rng.choice([*holder, *NAMES, *(v for v in VALUES if isinstance(v, str))])
            value = holder.pop(key) if kind == "rename" else value
            holder[name] = value
            key = f"{key} -> {name}" if kind == "rename" else name
        else:
            holder[key] = value
        done.append(f"{kind} {str(key)[:40]!r}: {repr(value)[:40]}")
    dumped = json.dumps(found)
    depth = rng.choice((10, 1_000, 100_000))
    dumped = dumped.replace(json.dumps(DEEP), "[" * depth + "]" * depth)
    dumped = dumped.replace(json.dumps(DOUBLED), '"a": 1, "a"')
    return dumped.encode(), ", ".join(done)


def _damage_header(rng: random.Random, data: bytes) -> Damage:
    length = int.from_bytes(data[:8], "little")
    header, done = _damage_json(rng, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :], f"header: {done}"


def _damage(rng: random.Random, name: str, data: bytes, ran: Path) -> Damage:
    suffix = Path(name).suffix
    if suffix == ".json" and rng.random() < 0.7:
        return _damage_json(rng, data)
    if suffix == ".safetensors" and rng.random() < 0.6:
        return _damage_header(rng, data)
    if suffix in (".bin", ".pt") and rng.random() < 0.1:
        return pickle.dumps({"a": Runs(str(ran))}), "a pickle that runs code"
    return _damage_bytes(rng, data)


PLACED = ("link", "loop", "dangling", "zeros", "pipe", "folder", "nothing", "beside", "linked folder", "pipe beside")


def _place(rng: random.Random, kind: str, path: Path, room: Path) -> None:
    """Put something else than a file in a file's place, or something hostile beside it."""
    if "beside" in kind or kind == "linked folder":
        beside = ("notes.txt", "model-2.safetensors", "adapter_model.bin", "sub", "config.json")
        path = path.parent / rng.choice([name for name in beside if not (path.parent / name).exists()])
    path.unlink(missing_ok=True)
    if kind in ("link", "beside"):
        path.symlink_to(room / "secret")
    elif kind == "linked folder":
        path.symlink_to(rng.choice((room / "elsewhere", path.parent, Path("/proc/self"))))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(room / "absent")
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind.startswith("pipe"):
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()


# ----------------------------------------------------------------------------------------------------
# What reads them.
# ----------------------------------------------------------------------------------------------------


def _load(folder: Path, dst: Path) -> None:
    manifest = Manifest.load(folder / "kbitwrap.json")
    manifest.prepare_config()
    manifest.essence()
    Manifest.from_json(manifest.to_json())


def _inspect(folder: Path, dst: Path) -> None:
    str(inspect_checkpoint(folder))


def _convert(folder: Path, dst: Path) -> None:
    kbitwrap.convert_checkpoint(folder, dst, dtype="bfloat16", overwrite=True)


def _doctor(folder: Path, dst: Path) -> None:
    str(kbitwrap.doctor(folder))


def _doctor_with_its_base(folder: Path, dst: Path) -> None:
    str(kbitwrap.doctor(folder, base=folder.parent / "model"))


def _plan(folder: Path, dst: Path) -> None:
    str(Plan.for_pretrained(folder, dtype="bfloat16"))


def _merge_adapter(folder: Path, dst: Path) -> None:
    _merge(folder.parent / "model", folder, dst)


def _merge_base(folder: Path, dst: Path) -> None:
    _merge(folder, folder.parent / "adapter", dst)


def _merge(base: Path, adapter: Path, dst: Path) -> None:
    kbitwrap.merge_checkpoint(base, adapter, dst, quantization_config=False, device="cpu", overwrite=True)


def _command(*arguments: str) -> Callable[[Path, Path], bool]:
    """A command of the command line; what goes wrong is one line on standard error, and nothing else."""

    def call(folder: Path, dst: Path) -> bool:
        err = io.StringIO()
        given = [argument.format(folder=folder, dst=dst, parent=folder.parent) for argument in arguments]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            status = main(given)
        said = err.getvalue()
        if status not in (0, 1, 2) or said.count("\n") > 1 or (status == 2 and not said):
            raise AssertionError(f"exit status {status}, {said[:300]!r}")
        return status == 0

    return call


class Kind(NamedTuple):
    """Trials of one subject, by one reader; ``weight`` of all trials are of this kind."""

    weight: int
    subject: str
    reader: Callable[[Path, Path], bool | None]
    files: tuple[str, ...] = ()  # that are damaged; all where none is named


KINDS = {
    "load a manifest": Kind(1000, "manifest", _load),
    "inspect weights": Kind(350, "weights", _inspect),
    "inspect shards": Kind(200, "shards", _inspect),
    "inspect pickles": Kind(60, "pickle", _inspect),
    "convert weights": Kind(60, "weights", _convert),
    "convert shards": Kind(60, "shards", _convert),
    "convert pickles": Kind(20, "pickle", _convert),
    "doctor an adapter": Kind(60, "adapter", _doctor),
    "doctor a run": Kind(60, "run", _doctor, ("optimizer.pt", "kbitwrap.json")),
    "doctor a trainer's files": Kind(30, "run", _doctor, ("trainer_state.json",)),
    "doctor shards": Kind(20, "shards", _doctor),
    "inspect a model": Kind(60, "model", _inspect),
    "convert a model": Kind(10, "model", _convert),
    "doctor a model": Kind(30, "model", _doctor),
    "plan": Kind(60, "model", _plan, ("config.json",)),
    "plan an nf4 model": Kind(30, "nf4", _plan, ("config.json",)),
    "plan an mxfp4 model": Kind(30, "mxfp4", _plan, ("config.json",)),
    "doctor an adapter with its base": Kind(20, "adapter", _doctor_with_its_base),
    "merge an adapter": Kind(20, "adapter", _merge_adapter),
    "merge into a base": Kind(20, "model", _merge_base),
    "kbitwrap doctor shards": Kind(4, "shards", _command("doctor", "{folder}", "--json")),
    "kbitwrap convert": Kind(4, "shards", _command("convert", "--from", "{folder}", "--out", "{dst}", "--overwrite")),
    "kbitwrap doctor": Kind(4, "run", _command("doctor", "{folder}")),
    "kbitwrap plan": Kind(3, "model", _command("plan", "{folder}", "--quant", "none"), ("config.json",)),
    "kbitwrap plan --step": Kind(
        3, "model", _command("plan", "{folder}", "--step", "--seq", "8", "--precision", "norms"), ("config.json",)
    ),
    "kbitwrap merge": Kind(
        2,
        "adapter",
        _command("merge", "{parent}/model", "{folder}", "--out", "{dst}", "--quant", "none", "--overwrite"),
    ),
}


# ----------------------------------------------------------------------------------------------------
# The trials.
# ----------------------------------------------------------------------------------------------------

CHECKPOINT = ("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json")
REPLACED = ("nothing", "an empty folder", "a checkpoint")
KEPT = (
    "a file of others",
    "an adapter",
    "the source",
    "a link to it",
    "a folder in it",
    "a way around",
    "what holds it",
)


def _destination(rng: random.Random, folder: Path, room: Path) -> tuple[str, Path]:
    """What lies at the destination, and where that is."""
    place, out = rng.choice((*REPLACED, *KEPT)), room / "out"
    if place in ("an empty folder", "a checkpoint", "a file of others", "an adapter"):
        out.mkdir()
    names = {"a checkpoint": CHECKPOINT, "a file of others": (*CHECKPOINT, "notes.txt")}
    names["an adapter"] = ("adapter_config.json", "adapter_model.safetensors")
    for name in names.get(place, ()):
        (out / name).write_text("of the user")
    if place == "a link to it":
        out.symlink_to(folder)
    elsewhere = {"the source": folder, "a folder in it": folder / "new" / "out", "what holds it": room}
    elsewhere["a way around"] = folder / ".." / folder.name
    return place, elsewhere.get(place, out)


def trials(seed: int, count: int = ROUND) -> Iterator[list[str]]:
    rng = random.Random(seed)
    names, weights = [*KINDS], [kind.weight for kind in KINDS.values()]
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, _limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        room = Path(folder)
        _save_all(room)
        (room / "secret").write_bytes(SECRET)
        (room / "elsewhere").mkdir()
        (room / "elsewhere" / "secret").write_bytes(SECRET)
        for kind in KINDS.values():
            (room / kind.subject / "mine.py").write_text(CODE.format(str(room / RAN)))
        expected = _listed(room)
        for number in range(count):
            yield _trial(rng, number, rng.choices(names, weights)[0], room, expected)


def _trial(rng: random.Random, number: int, name: str, room: Path, expected: dict[str, Any]) -> list[str]:
    kind = KINDS[name]
    folder = room / kind.subject
    file = rng.choice(kind.files or sorted(path for path in os.listdir(folder) if path not in ("README.md", "mine.py")))
    path = folder / file
    sound = path.read_bytes()
    if rng.random() < 0.05:
        done = rng.choice(PLACED)
        _place(rng, done, path, room)
    else:
        data, done = _damage(rng, file, sound, room / RAN)
        path.write_bytes(data)
    place, dst = ("nothing", room / "out") if kind.weight > 100 else _destination(rng, folder, room)
    damaged = {} if kind.weight > 100 else _listed(room)
    is_done, found = _call(kind.reader, folder, dst)
    found += _written(room, damaged, is_done and place in REPLACED) if damaged else []
    for extra in [one for one in os.scandir(folder) if one.name not in expected[kind.subject]]:
        _remove(Path(extra.path))
    _remove(path)
    path.write_bytes(sound)
    _remove(room / "out")
    if os.listdir(room) != [*expected]:
        found += [f"left in the working folder: {sorted({*os.listdir(room)} - {*expected})}"]
        for left in {*os.listdir(room)} - {*expected}:
            _remove(room / left)
    return [f"trial {number}: {name}: {file}: {done}: to {place}: {line}" for line in found]


def _call(reader: Callable[[Path, Path], bool | None], folder: Path, dst: Path) -> tuple[bool, list[str]]:
    """Call a reader; whether it did what it is for, and what it did that it must not."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak()
    is_done, found = False, []
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        is_done = reader(folder, dst) is not False
    except KbitWrapError:
        pass
    except Hang:
        found.append(f"still at it after {SECONDS} s")
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = _peak() - before
    return is_done, found + ([f"took {grown >> 20} MiB"] if grown > GROWTH else [])


def _peak() -> int:
    """The most bytes that were resident since the peak began anew."""
    with open("/proc/self/status", "rb") as status:
        return int(next(line for line in status if line.startswith(b"VmHWM")).split()[1]) << 10


def _listed(folder: Path) -> dict[str, Any]:
    """What is in a folder: of a folder in it the same, of anything else its size and when it was written."""
    found = {}
    for entry in os.scandir(folder):
        at = entry.stat(follow_symlinks=False)
        is_folder = entry.is_dir(follow_symlinks=False)
        found[entry.name] = _listed(Path(entry.path)) if is_folder else (at.st_size, at.st_mtime_ns)
    return found


def _written(room: Path, before: dict[str, Any], may_replace: bool) -> list[str]:
    """Say what was written beside the destination, or to one that must stay, and what in it is from elsewhere."""
    after, dst = _listed(room), room / "out"
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    found = [f"changed {name}" for name in changed if name != "out" or not may_replace]
    for path in dst.rglob("*") if dst.is_dir() and "out" in changed and may_replace else ():
        if path.name in CHECKPOINT and b"of the user" in path.read_bytes():
            found.append(f"left the old {path.name}")
        if path.is_symlink() or (path.is_file() and SECRET in path.read_bytes()):
            found.append(f"took {path.name} from elsewhere")
    return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise `Hang` where the timer ends, and refuse address space beyond a few gibibytes."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)
