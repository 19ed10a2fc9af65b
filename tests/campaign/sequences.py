"""Calls in any order: each trial is one sequence of them, on a model and on its twin, which is never prepared.

What a user does is done to both; what kbitwrap does, to the model alone. Wherever the model is to be as it was (new,
suspended, restored), it has to be what its twin is, in everything that a snapshot holds; trained values are taken over
to the twin, rounded once. Each Parameter stays the same object, a suspension that ends leaves what it found, and a call
that is refused raises one of kbitwrap's errors and changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import prune

import kbitwrap
from kbitwrap import KbitPreparedModel, KbitWrapError, Manifest, UnsupportedModelError
from kbitwrap.model.records import key_of
from kbitwrap.model.wrappers import canonical_fqn
from kbitwrap.tensors.upcast import UpcastTensor
from support import trees, zoo
from support.snapshot import Snapshot, tensor_digest

ROUND, LENGTH = 200, 12
PRECISIONS = ("full", "compute", "norms", "adapted", "none")
IDS = torch.tensor([[0, 1, 5, 2]])
HALF = (torch.bfloat16, torch.float16)
# What a forward raises that cannot run; bitsandbytes asserts that a layer has whole blocks.
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, UnsupportedModelError)
DECODER = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
# 4-bit blocks have 64 values.
QUANTIZED = DECODER | {"hidden_size": 16, "intermediate_size": 16}


def user_hook(module: nn.Module, args: Any, output: Any = None) -> None:
    """A user's hook; changes nothing."""


def make_inputs_require_grad(module: nn.Module, args: Any, output: Any = None) -> None:
    """A user's hook of the name of PEFT's; changes nothing."""


@functools.cache
def _pristine(quant: str | None) -> zoo.Original:
    """A decoder that nothing runs or changes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(QUANTIZED if quant else DECODER), tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    if quant is None:
        return zoo.Original(model.eval())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = zoo._quantization_config(zoo.ARCHITECTURES["llama"], quant, torch.bfloat16)
        options: Any = {"quantization_config": settings, "dtype": "bfloat16"}
        return zoo.Original(transformers.LlamaForCausalLM.from_pretrained(folder, **options))


class Before:
    """The parameters and hooks of a model when it is prepared, which a restore puts back or names."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.parameters = {
            id(p): (p, canonical_fqn(name), _state_of(name, p), p.requires_grad) for name, p in named.items()
        }
        # by `id`: the fqn of a trained copy is that of the module that it is a copy of
        self.of_adapters = {id(p) for name, p in named.items() if is_adapter(name)}
        self.hooks = _hooks_of(model)
        self._dtypes = {canonical_fqn(name): p.dtype for name, p in named.items() if not is_adapter(name)}

    def base_dtype(self, fqn: str) -> torch.dtype | None:
        """The dtype that a parameter of the base had."""
        return self._dtypes.get(fqn)

    def unnamed(self, model: nn.Module, report: kbitwrap.RestoreReport) -> Iterator[str]:
        """What is other than it was, and in no list of the report."""
        named = {name for names in report.to_dict().values() for name in names}
        now = {id(p): name for name, p in model.named_parameters()}
        for key, (parameter, fqn, state, flag) in self.parameters.items():
            if key not in now:
                if fqn not in named and key not in self.of_adapters:
                    yield f"{fqn} is gone, which the report does not name"
            elif {fqn, now[key]}.isdisjoint(named):
                if _state_of(now[key], parameter) != state:
                    yield f"{fqn} has another dtype, shape or value, which the report does not name"
                if parameter.requires_grad != flag:
                    yield f"{fqn} has another flag, which the report does not name"
        hooks = _hooks_of(model)
        for key in hooks.keys() ^ self.hooks.keys():
            name = hooks.get(key) or f"{self.hooks[key]} was removed"
            if not any(line.endswith(name) for line in report.foreign):
                yield f"the hook {name} is not named by the report"


def is_adapter(name: str) -> bool:
    return "lora_" in name or "modules_to_save" in name


def _state_of(name: str, parameter: nn.Parameter) -> tuple[Any, ...]:
    """What has to be equal: of an adapter, whose values are trained, its dtype."""
    dtype, shape, *_, content = tensor_digest(parameter)
    return (dtype,) if is_adapter(name) else (dtype, shape, content)


def _hooks_of(model: nn.Module) -> dict[int, str]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    found = [one for module in model.modules() for kind in kinds for one in vars(module)[kind].items()]
    return {key: getattr(hook, "__name__", type(hook).__name__) for key, hook in found}


class World:
    """A model, its twin, and what is known of the two."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.kind = rng.choices(("tree", "llama", "nf4", "int8"), (78, 17, 3, 2))[0]
        if self.kind == "tree":
            self.model, self.twin = trees.random_tree(seed), trees.random_tree(seed)
        else:
            made = _pristine(None if self.kind == "llama" else self.kind)
            self.model, self.twin = made.copy(), made.copy()
        self.tops = self.model, self.twin  # with what PEFT wrapped around them
        self.state = "new"
        self.wrapper: KbitPreparedModel | None = None
        self.moves = False  # whether a precision was asked for that casts, and so gives other memory
        self.handles: list[tuple[Any, Any]] = []
        self.trained: dict[int, nn.Parameter] = {}  # of the base: their memory may be another
        self.flags: dict[int, tuple[nn.Parameter, bool]] = {}  # of the base when it was prepared, which go back
        self.before: Before | None = None  # the model when it was prepared
        self.cast: dict[int, nn.Parameter] = {}  # by others while prepared: their layout and sharing may be others
        self.held: dict[int, nn.Parameter] = {}  # of adapters: in the dtype asked for, until a restore
        self.is_trained = False
        self.is_twice = False  # whether it was prepared on top of a preparation, which may have kept the originals
        self.is_over = False  # whether the twin went on where the model could not
        self.is_used = False  # whether a user set flags, or ran the model, since it was suspended
        self.suspended: Snapshot | None = None  # the model when it was suspended, while nothing was done to it
        self.log: list[str] = []
        self.found: list[str] = []
        self.note_sharing()
        self._note_objects()

    def note_sharing(self) -> None:
        """Note the names of different parameters that lie in one memory, before any is trained."""
        groups: dict[int, list[str]] = {}
        for name, p in self.twin.named_parameters() if self.kind == "tree" else ():
            groups.setdefault(p.untyped_storage()._cdata, []).append(name)
        self.sharing = [names for names in groups.values() if len(names) > 1]

    def say(self, line: str) -> None:
        """Note a violation."""
        self.found.append(f"{self.kind}: {', '.join(self.log)}: {line}".replace("\n", " ")[:600])

    def _note_objects(self) -> None:
        for module in self.model.modules():  # a weight upcast at use that is made trainable refuses to be read
            for value in vars(module).values():
                if isinstance(value, UpcastTensor) and value.parameter.requires_grad:
                    value.parameter.requires_grad_(False)
        self.objects = dict(self.tops[0].named_parameters(remove_duplicate=False))

    # What the user does.

    def both(self, act: Callable[[Any], Any]) -> bool:
        """Do to both what a user does; whether it could be done. It is the library's business where both refuse it."""
        outcomes = []
        for top in self.tops:
            torch.manual_seed(len(self.log))
            try:
                act(top)
                outcomes.append(None)
            except Exception as error:
                outcomes.append(error)
        ours, theirs = outcomes
        if ours is not None and type(ours) is not type(theirs) and not isinstance(ours, KbitWrapError):
            self.say(f"raised {ours!r}, and unprepared {theirs!r}")
        # A weight upcast at use refuses to be trained in the middle of a call of others, which leaves theirs half done.
        self.is_over |= isinstance(ours, KbitWrapError) and theirs is None
        self.suspended, self.is_used = None, self.is_used or (self.state == "suspended" and self.kind != "tree")
        self._note_objects()
        return ours is None and theirs is None

    def take_over(self, is_taken: Callable[[str, Any], bool]) -> None:
        """Give the twin the model's values of some parameters, rounded once, and its buffers' values."""
        twins = dict(self.tops[1].named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, parameter in self.tops[0].named_parameters(remove_duplicate=False):
                if name not in twins or not is_taken(name, parameter) or twins[name].shape != parameter.shape:
                    continue
                # What an adapter had before it was rounded stays the twin's: it goes back to that.
                if id(parameter) in self.held and _rounded(twins[name]) == _rounded(parameter):
                    continue
                twins[name].data.copy_(parameter.data)
            saved = self.tops[1].state_dict()
            buffers = {name: buffer for name, buffer in self.tops[1].named_buffers() if name in saved}
            for name, buffer in self.tops[0].named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffers[name].copy_(buffer)

    # What kbitwrap does.

    def ours(self, call: Callable[[], Any], *, fails: bool = False) -> Any:
        """Call kbitwrap; a refusal is one of its errors and changes nothing, and there is one where it ``fails``."""
        before = Snapshot(self.tops[0])
        try:
            result = call()
        except KbitWrapError as error:
            if not fails and not isinstance(error, UnsupportedModelError):
                self.say(f"refused: {error!r}")
            for line in before.diff(Snapshot(self.tops[0]), moved=self.moves)[:2]:
                self.say(f"{type(error).__name__} changed {line}")
            return error
        except Exception as error:
            self.say(f"raised {error!r}")
            return error
        if fails:
            self.say("was not refused")
        return result

    def reads(self, call: Callable[[], Any], *errors: type[Exception]) -> Any:
        """Call what changes nothing."""
        before = Snapshot(self.tops[0])
        try:
            result = call()
        except errors as error:
            result = error
        except Exception as error:
            self.say(f"raised {error!r}")
            result = error
        for line in before.diff(Snapshot(self.tops[0]))[:2]:
            self.say(f"changed {line}")
        return result

    def check(self) -> None:
        """Compare the model with its twin, where it is to be as it was."""
        if self.is_over:
            return
        named = dict(self.tops[0].named_parameters(remove_duplicate=False))
        for name, parameter in named.items():
            if self.objects.get(name) is not parameter:
                self.say(f"{name} is another object")
        if self.state == "prepared" or (self.state == "suspended" and self.is_used):
            return
        model, twin = (Snapshot(top, twin=True) for top in self.tops)
        for name in list(model.items):
            if "_kbitwrap" in name and self.state == "suspended":
                del model.items[name]
            elif name.endswith(": attributes"):
                model.items[name] = [one for one in model.items[name] if "_kbitwrap" not in one]
        ignored = set()
        keys = {name: name if "." in name else f".{name}" for name in named}
        for name in [name for name, p in named.items() if id(p) in self.flags]:
            model.items[f"{keys[name]}: requires_grad"] = twin.items.get(f"{keys[name]}: requires_grad")
        if self.tops[0] is not self.model:
            ignored |= {": training"}  # of what PEFT put into the base
        self._check_flags(named)
        twins = dict(self.tops[1].named_parameters(remove_duplicate=False))
        for name in [name for name, p in named.items() if id(p) in self.held and name in twins]:
            model.items[f"{keys[name]}: bytes"] = _rounded(named[name])
            twin.items[f"{keys[name]}: bytes"] = _rounded(twins[name])
        trained = [name for name, p in named.items() if id(p) in self.trained or id(p) in self.cast]
        ignored |= {"shared memory"} if self.is_trained or self.cast else set()
        for name in trained:
            for items in (model.items, twin.items):
                dtype, shape, _, content = items[f"{keys[name]}: bytes"]
                items[f"{keys[name]}: bytes"] = dtype, shape, content
        for line in twin.diff(model, ignore=tuple(ignored))[:3]:
            self.say(f"{self.state}: {line}")

    def _check_flags(self, named: dict[str, nn.Parameter]) -> None:
        """See that flags are those from before, and give them to the twin where the model is done with them."""
        twins = dict(self.tops[1].named_parameters(remove_duplicate=False))
        for name, parameter in named.items():
            if id(parameter) in self.flags:
                if parameter.requires_grad != self.flags[id(parameter)][1]:
                    self.say(f"{self.state}: {name}: requires_grad is {parameter.requires_grad}")
                if self.state == "restored" and name in twins:
                    twins[name].requires_grad_(parameter.requires_grad)
        if self.state == "restored":
            self.flags = {}


def _rounded(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What is compared of an adapter whose dtype is another than its twin's."""
    _, shape, *_, content = tensor_digest(parameter.detach().bfloat16())
    return "rounded", shape, "", content


Op = Callable[[World, random.Random], None]
OPS: dict[str, tuple[Op, int]] = {}


def operation(weight: int) -> Callable[[Op], Op]:
    """Register an operation; it does nothing where it does not apply."""

    def register(op: Op) -> Op:
        OPS[op.__name__] = op, weight
        return op

    return register


# ----------------------------------------------------------------------------------------------------
# What kbitwrap does.
# ----------------------------------------------------------------------------------------------------


def _flags(world: World, *, adapters: bool) -> dict[int, tuple[nn.Parameter, bool]]:
    """The flags of the base, and of adapters, which the drop-in freezes; with the parameters, which are held so."""
    if world.state in ("new", "restored"):
        world.before = Before(world.model)
        world.cast = {}
    named = world.tops[0].named_parameters()
    found = {id(p): (p, p.requires_grad) for n, p in named if adapters or not ("lora_" in n or "modules_to_save" in n)}
    return {**found, **world.flags}


def _begin(world: World, precision: str, flags: dict[int, tuple[nn.Parameter, bool]]) -> None:
    world.flags = flags
    world.state, world.moves = "prepared", precision in ("full", "compute")
    world.suspended, world.is_twice = None, False


def _lora_dtypes(world: World) -> dict[int, torch.dtype]:
    return {id(p): p.dtype for name, p in world.tops[0].named_parameters() if "lora_" in name}


def _hold(world: World, before: dict[int, torch.dtype]) -> None:
    """Note the adapters that a call cast."""
    for name, p in world.tops[0].named_parameters():
        if "lora_" in name and before.get(id(p), p.dtype) != p.dtype:
            world.held[id(p)] = p


def _end(world: World, report: Any) -> None:
    was_prepared, world.state = world.state == "prepared", "restored"
    if not isinstance(report, kbitwrap.RestoreReport):
        world.say(f"expected a report, found {report!r}")
        return
    if not was_prepared:  # it returned the same report again
        return
    for line in world.before.unnamed(world.model, report):
        world.say(line)
    _take_what_is_named(world, report)
    _take_what_was_kept(world, report)


def _take_what_was_kept(world: World, report: kbitwrap.RestoreReport) -> None:
    """Give the twin the adapters that stayed in the dtype of their training, which the report names."""
    twins = dict(world.tops[1].named_parameters())
    for name, parameter in world.tops[0].named_parameters():
        if id(parameter) in world.held and name in twins and canonical_fqn(name) in report.kept_dtype:
            twins[name].data = parameter.data.clone()
    world.held = {}


def _take_what_is_named(world: World, report: kbitwrap.RestoreReport) -> None:
    """Give the twin what others changed and the report names: dtype and value of casts, the flag of what is new."""
    twins = dict(world.twin.named_parameters())
    for name, parameter in world.model.named_parameters():
        is_named = not {name, canonical_fqn(name)}.isdisjoint((*report.replaced, *report.trained))
        if not is_named or name not in twins:
            continue
        if id(parameter) in world.cast:
            twins[name].data = parameter.data.clone()
        # A flag from before is that of the base's parameter, and not of what took its place.
        if id(parameter) not in world.before.parameters or id(parameter) in world.before.of_adapters:
            world.flags.pop(id(parameter), None)
            twins[name].requires_grad_(parameter.requires_grad)


@operation(10)
def prepare(world: World, rng: random.Random) -> None:
    precision = rng.choice(PRECISIONS)
    adapter_dtype = rng.choice((None, None, "float32", "bfloat16"))
    settings = {
        "adapter_dtype": adapter_dtype,
        "freeze": rng.random() < 0.8,
        "keep_originals": rng.random() < 0.3,
        "audit": rng.random() < 0.2,
    }
    if world.state in ("prepared", "suspended"):
        world.ours(lambda: KbitPreparedModel(world.model, precision=precision), fails=True)
        world.ours(world.wrapper.prepare, fails=True)
        return
    again = world.wrapper is not None and rng.random() < 0.3
    world.moves = True
    wrapper = (
        world.wrapper if again else world.ours(lambda: KbitPreparedModel(world.model, precision=precision, **settings))
    )
    if not isinstance(wrapper, KbitPreparedModel):
        return
    flags, dtypes = _flags(world, adapters=False), _lora_dtypes(world)
    if world.ours(wrapper.prepare) is wrapper:
        _hold(world, dtypes)
        world.wrapper = wrapper
        _begin(world, str(wrapper.config.precision.value), flags)


@operation(4)
def drop_in(world: World, rng: random.Random) -> None:
    precision = rng.choice(PRECISIONS[:3])
    call = functools.partial(kbitwrap.prepare_model_for_kbit_training, world.model, precision=precision)
    if rng.random() < 0.05:
        call = functools.partial(_patched, world.model, precision)
    if world.state == "suspended":
        world.ours(call, fails=True)
        return
    flags = _flags(world, adapters=True)
    before, world.moves = world.moves, True
    if world.ours(call) is world.model:
        world.moves = before or precision in ("full", "compute")
        was_prepared = world.state == "prepared"
        world.wrapper, world.flags = kbitwrap.prepared_of(world.model), flags
        world.is_twice = was_prepared
        if not was_prepared:
            _begin(world, precision, flags)


def _patched(model: nn.Module, precision: str) -> nn.Module:
    with kbitwrap.patched(precision):
        return peft.prepare_model_for_kbit_training(model)


@operation(6)
def restore(world: World, rng: random.Random) -> None:
    if world.wrapper is None or world.state == "suspended":
        call = (lambda: kbitwrap.restore(world.model)) if world.wrapper is None else world.wrapper.restore
        world.ours(call, fails=True)
        return
    trained = rng.choice(("keep", "keep", "keep", "error", "discard"))
    if trained == "discard" and not world.wrapper.plan.config.keep_originals:
        if world.state == "prepared" and not world.is_twice:
            world.ours(lambda: world.wrapper.restore("discard"), fails=True)
        return
    if trained == "discard" and world.trained and world.state == "prepared":
        trained = "keep"
    if trained == "error":
        with contextlib.suppress(kbitwrap.RestoreError):
            _end(world, world.wrapper.restore("error"))
            return
        trained = "keep"
    is_by_model = rng.random() < 0.3 and world.state == "prepared"
    _end(world, world.ours(lambda: kbitwrap.restore(world.model) if is_by_model else world.wrapper.restore(trained)))


@operation(5)
def suspend(world: World, rng: random.Random) -> None:
    if world.wrapper is None:
        return
    if world.state != "prepared":
        world.ours(world.wrapper.suspend, fails=True)
        return
    before = Snapshot(world.tops[0])
    if world.ours(world.wrapper.suspend) is None:
        world.state, world.suspended, world.is_used = "suspended", before, False


@operation(8)
def resume(world: World, rng: random.Random) -> None:
    if world.wrapper is None:
        return
    was_suspended = world.ours(world.wrapper.resume)
    if was_suspended is not (world.state == "suspended"):
        world.say(f"resume returned {was_suspended} in {world.state}")
    if world.state == "suspended":
        world.state = "prepared"
        _compare_with_before(world)


def _compare_with_before(world: World) -> None:
    if world.suspended is not None:
        now = Snapshot(world.tops[0])
        for name in [name for name in now.items if name.endswith(": attributes")]:  # what stands in comes back last
            for items in (now.items, world.suspended.items):
                items[name] = sorted(items.get(name, ()))
        for line in world.suspended.diff(now, moved=world.moves)[:3]:
            world.say(f"resumed: {line}")
    world.suspended = None


@operation(4)
def suspended(world: World, rng: random.Random) -> None:
    if world.wrapper is None or world.state != "prepared":
        return
    world.suspended = Snapshot(world.tops[0])
    error = ValueError("in the body") if rng.random() < 0.5 else None
    try:
        with world.wrapper.suspended():
            world.state, world.is_used = "suspended", False
            world.check()
            if rng.random() < 0.3:
                world.suspended = None
                with torch.no_grad(), contextlib.suppress(*REFUSALS):
                    _forward(world.tops[0])
                world.take_over(lambda name, p: False)
            if error:
                raise error
    except ValueError as raised:
        if raised is not error:
            world.say(f"raised {raised!r}")
    except Exception as raised:
        world.say(f"raised {raised!r}")
    world.state = "prepared"
    _compare_with_before(world)


@operation(3)
def with_block(world: World, rng: random.Random) -> None:
    """A with-block whose body raises, or leaves the model suspended."""
    if world.state in ("prepared", "suspended"):
        return
    precision = rng.choice(PRECISIONS)
    error = ValueError("in the body") if rng.random() < 0.5 else None
    world.moves = True
    wrapper = world.ours(lambda: KbitPreparedModel(world.model, precision=precision))
    if not isinstance(wrapper, KbitPreparedModel):
        return
    try:
        with wrapper:
            if rng.random() < 0.5:
                wrapper.suspend()
            if error:
                raise error
    except ValueError as raised:
        if raised is not error:
            world.say(f"raised {raised!r}")
    except Exception as raised:
        world.say(f"raised {raised!r}")
    world.wrapper, world.state = wrapper, "restored"


@operation(2)
def verify(world: World, rng: random.Random) -> None:
    if world.wrapper is not None and world.state == "prepared":
        world.reads(world.wrapper.verify)


@operation(2)
def manifest(world: World, rng: random.Random) -> None:
    if world.wrapper is None:
        return
    if world.state == "restored":
        world.ours(world.wrapper.manifest, fails=True)
        return
    made = world.reads(world.wrapper.manifest, kbitwrap.ManifestError)
    if isinstance(made, Manifest):
        read = Manifest.from_json(made.to_json())
        world.reads(lambda: read.check(world.model), kbitwrap.UnsupportedModelError)


@operation(2)
def export(world: World, rng: random.Random) -> None:
    if world.wrapper is None or world.state not in ("prepared", "suspended"):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        report = world.reads(lambda: world.wrapper.export(path), kbitwrap.ExportError, UnsupportedModelError)
        if isinstance(report, Exception) or world.tops[0] is not world.model or world.kind in ("nf4", "int8"):
            return
        expected = world.twin.state_dict()
        for name, value in load_file(path / "model.safetensors").items():
            if name not in expected or expected[name].dtype != value.dtype or not _same_bits(expected[name], value):
                world.say(f"exported {name} as another")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@operation(1)
def adopt(world: World, rng: random.Random) -> None:
    if world.wrapper is not None:
        is_refused = world.state != "prepared" or world.tops[0] is world.model
        dtypes = _lora_dtypes(world)
        world.ours(lambda: world.wrapper.adopt(world.tops[0]), fails=is_refused)
        _hold(world, dtypes)


# ----------------------------------------------------------------------------------------------------
# What a user does.
# ----------------------------------------------------------------------------------------------------


def _forward(top: Any) -> torch.Tensor:
    output = top(IDS)
    return output if isinstance(output, torch.Tensor) else output.logits


@operation(8)
def train(world: World, rng: random.Random) -> None:
    """A step of everything that is trainable; where it cannot run, as PEFT's way may not, nothing is trained."""
    top = world.tops[0]
    if world.state == "suspended":
        world.is_used, world.suspended = True, None
        with torch.no_grad(), contextlib.suppress(*REFUSALS):
            _forward(top)
        world.take_over(lambda name, p: False)
        return
    trainable = [p for p in top.parameters() if p.requires_grad]
    world.suspended = None
    try:
        if world.state != "prepared":  # what a forward leaves is left on both
            with contextlib.suppress(*REFUSALS):
                _forward(world.tops[1])
        loss = _forward(top).float().pow(2).mean()
        if not loss.requires_grad:
            return
        loss.backward()
    except REFUSALS:
        return
    finally:
        world.take_over(lambda name, p: False)
        grads = [p.grad for p in trainable]
        for p in trainable:
            p.grad = None
    with torch.no_grad():
        stepped = [(p, g) for p, g in zip(trainable, grads, strict=True) if g is not None and g.isfinite().all()]
        for p, g in stepped:
            p -= 0.1 * g.clamp(-1, 1)  # no NaN, whose bits a cast may change
    ids = {id(p): p for p, _ in stepped}
    # What lies in the memory of a trained parameter is trained too, or lies elsewhere from then on.
    named = dict(top.named_parameters(remove_duplicate=False))
    for group in world.sharing:
        if any(id(named[name]) in ids for name in group):
            ids.update({id(named[name]): named[name] for name in group})
            for name in group:
                parameter = world.twin.get_parameter(name)
                parameter.data = parameter.data.clone()
    world.trained.update(ids)
    world.is_trained |= bool(ids)
    world.take_over(lambda name, p: id(p) in ids)


@operation(4)
def flag(world: World, rng: random.Random) -> None:
    names = [n for n, p in world.tops[0].named_parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
    if not names:
        return
    name, value = rng.choice(names), rng.random() < 0.5
    found = world.tops[0].get_parameter(name)
    if id(found) in world.flags:
        owner, _, last = name.rpartition(".")
        if last in vars(world.tops[0].get_submodule(owner)):  # a weight upcast at use refuses it, and is not to be read
            return
        with contextlib.suppress(kbitwrap.StateError):  # of a weight upcast at use
            found.requires_grad_(value)
        world.suspended, world.is_used = None, True
    else:
        world.both(lambda top: top.get_parameter(name).requires_grad_(value))


@operation(4)
def hook(world: World, rng: random.Random) -> None:
    name = rng.choice([name for name, _ in world.tops[0].named_modules()])
    kind = rng.choice(("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"))
    handles = []
    function = rng.choice((user_hook, make_inputs_require_grad))
    world.both(lambda top: handles.append(getattr(top.get_submodule(name), kind)(function)))
    world.handles += [tuple(handles)] if len(handles) == 2 else []


@operation(2)
def unhook(world: World, rng: random.Random) -> None:
    if world.handles:
        for handle in world.handles.pop(rng.randrange(len(world.handles))):
            handle.remove()
        world.suspended = None


@operation(2)
def attribute(world: World, rng: random.Random) -> None:
    name = rng.choice([name for name, _ in world.tops[0].named_modules()])
    key, value = f"user_{len(world.log)}", rng.choice((1, "a", None, [1], {"b": 2}))
    world.both(lambda top: setattr(top.get_submodule(name), key, copy.copy(value)))


@operation(3)
def mode(world: World, rng: random.Random) -> None:
    is_training = rng.random() < 0.5
    if world.state in ("prepared", "suspended"):  # it goes back with the rest
        world.model.train(is_training)
        world.suspended, world.is_used = None, True
    else:
        world.both(lambda top: top.train(is_training))


@operation(1)
def cast(world: World, rng: random.Random) -> None:
    if world.state in ("new", "restored") and world.kind in ("tree", "llama"):
        dtype = rng.choice(("half", "bfloat16", "float"))
        world.both(lambda top: getattr(top, dtype)())


@operation(2)
def copies(world: World, rng: random.Random) -> None:
    call = rng.choice((copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy.copy))
    if world.kind != "tree" and world.state == "prepared":  # transformers' hooks cannot be pickled
        call = copy.deepcopy
    before = Snapshot(world.tops[0])
    suspended = world.suspended
    made: list[Any] = []
    world.both(lambda top: made.append(call(top)))
    world.suspended = suspended
    for line in before.diff(Snapshot(world.tops[0]))[:2]:
        world.say(f"copying changed {line}")
    if made and call is copy.deepcopy and kbitwrap.prepared_of(made[0]) is not None:
        world.say("a copy is held by the wrapper")


@operation(2)
def state_dict(world: World, rng: random.Random) -> None:
    names = [[*top.state_dict()] for top in world.tops]
    if names[0] != names[1]:
        world.say(f"state_dict differs in {sorted({*names[0]} ^ {*names[1]})[:3]}")
    saved = world.tops[1].state_dict()
    if world.kind == "int8":  # whose layers, once they ran, load no state
        return
    is_own = rng.random() < 0.5 or world.kind == "nf4"
    if not is_own and world.state != "prepared":
        return
    world.both(lambda top: top.load_state_dict(top.state_dict() if is_own else saved))


@operation(1)
def assign(world: World, rng: random.Random) -> None:
    if world.kind in ("tree", "llama") and world.state in ("new", "restored") and not world.is_trained:
        world.both(lambda top: top.load_state_dict(top.state_dict(), assign=True))
        world.note_sharing()  # of a tie are made two parameters over one memory


@operation(3)
def load_while_suspended(world: World, rng: random.Random) -> None:
    """Load other weights into a suspended model: they are the user's, and stay when it is resumed and restored."""
    if world.state != "suspended" or world.kind in ("nf4", "int8"):
        return
    twins = dict(world.tops[1].named_parameters())
    named = {name: p for name, p in world.tops[0].named_parameters() if name in twins}
    loaded = [name for name, p in named.items() if type(p) is nn.Parameter and p.dtype in (*HALF, torch.float32)]
    loaded = [name for name in loaded if rng.random() < 0.3 and not named[name].isnan().any()]
    # Two parameters over one memory are two memories in the twin, which a value for one of them does not reach.
    memory = [key_of(p) for p in named.values()]
    loaded = [name for name in loaded if memory.count(key_of(named[name])) == 1]
    saved = {name: twins[name].detach() + 0.25 for name in loaded}
    world.both(lambda top: top.load_state_dict(saved, strict=False))
    world.trained.update({id(named[name]): named[name] for name in loaded})
    world.is_trained |= bool(loaded)


# What others do while a model is prepared is taken back, or named.


def _can_be_cast(world: World, module: nn.Module) -> bool:
    """Whether a part can be cast, and what is compared afterwards is told by its own values."""
    if world.kind != "tree":
        return module is not world.model
    is_seen = world.sharing or any(isinstance(child, trees.Views) for child in world.model.modules())
    is_plain = all(type(p) is nn.Parameter and not p.isnan().any() for p in module.parameters())
    return is_plain and not is_seen and not any(b.is_floating_point() for b in module.buffers())


def _adapter_dtypes(world: World) -> dict[int, torch.dtype]:
    return {id(p): p.dtype for name, p in world.tops[0].named_parameters() if is_adapter(name)}


def _note_cast(world: World, module: nn.Module, before: dict[int, torch.dtype]) -> None:
    """Note what was cast, and do to adapters of the twin what was done to the model's, which nobody takes back.

    `before` has the dtypes that adapters had in the model before.
    """
    world.cast.update({id(p): p for p in module.parameters()})
    world.suspended, world.is_used, world.moves = None, True, True
    twins = dict(world.tops[1].named_parameters())
    for name, p in world.tops[0].named_parameters():
        if not is_adapter(name) or name not in twins:
            continue
        twin = twins[name]
        if id(p) not in world.flags:  # the drop-in freezes adapters too, and takes it back
            twin.requires_grad_(p.requires_grad)
        if id(p) in world.held:  # goes back, or is named
            continue
        # What the drop-in cast goes back. A copy of a base module that was made meanwhile gets the base's dtype again.
        is_ours = id(p) in world.flags and before.get(id(p)) != twin.dtype
        is_lora = "lora_" in name and not is_ours
        is_old_copy = not is_ours and id(p) in world.before.parameters
        if is_lora or is_old_copy:
            twin.data = twin.data.to(p.dtype)


@operation(3)
def float_part(world: World, rng: random.Random) -> None:
    """Cast a part of a prepared model."""
    parts = [(name, module) for name, module in world.model.named_modules() if _can_be_cast(world, module)]
    if world.state != "prepared" or not parts:
        return
    _, module = rng.choice(parts)
    before = _adapter_dtypes(world)
    getattr(module, rng.choice(("float", "double")))()
    _note_cast(world, module, before)


@operation(3)
def pefts_function(world: World, rng: random.Random) -> None:
    """PEFT's own function, as a library calls it that prepares a model."""
    if world.state != "prepared" or (world.kind == "tree" and not _can_be_cast(world, world.model)):
        return
    kwargs = rng.choice((None, {"use_reentrant": False}))
    before = _adapter_dtypes(world)
    peft.prepare_model_for_kbit_training(world.model, gradient_checkpointing_kwargs=kwargs)
    _note_cast(world, world.model, before)


@operation(1)
def move(world: World, rng: random.Random) -> None:
    """Put a parameter in another place, by pruning or by replicating layers, and restore: the end of a trial."""
    if world.state != "prepared" or world.tops[0] is not world.model:
        return
    layers = [m for m in world.model.modules() if type(m) is nn.Linear and {"weight"} & m._parameters.keys()]
    layers = [layer for layer in layers if "weight" not in vars(layer)]
    if rng.random() < 0.5 and layers:
        prune.identity(rng.choice(layers), "weight")
    elif world.kind != "tree":
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[(0, 1), (0, 1)])
        peft.get_peft_model(world.model, config)
    else:
        return
    _end(world, world.ours(world.wrapper.restore))
    world.is_over = True


# Of models of transformers.


@operation(2)
def save_pretrained(world: World, rng: random.Random) -> None:
    """Save the base, into whose config transformers writes the dtype; while prepared, that goes back."""
    if world.kind == "tree" or world.state == "suspended" or world.tops[0] is not world.model:
        return
    dtype, suspended = world.twin.config.dtype, world.suspended
    with tempfile.TemporaryDirectory() as folder:
        world.both(lambda top: top.save_pretrained(folder))
    if world.state == "prepared":
        world.twin.config.dtype, world.suspended = dtype, suspended


@operation(3)
def checkpointing(world: World, rng: random.Random) -> None:
    if world.kind == "tree":
        return
    name = rng.choice(("gradient_checkpointing_enable", "gradient_checkpointing_disable"))
    if world.state in ("new", "restored"):
        world.both(lambda top: getattr(world.model if top is world.tops[0] else world.twin, name)())
    elif world.state == "prepared":
        getattr(world.model, name)()
        world.suspended = None


@operation(3)
def resize(world: World, rng: random.Random) -> None:
    """Resize the embeddings: their weight gets other memory, and another head stands in the place of the head."""
    if world.kind == "tree" or world.state == "suspended" or world.tops[0] is not world.model:
        return
    size, before = rng.choice((8, 12, 24)), dict(world.model.named_parameters())
    is_resized = world.both(lambda top: top.resize_token_embeddings(size, mean_resizing=False))
    world.both(lambda top: top.lm_head.train(top.training))  # the new one is in train mode
    if not is_resized or world.state != "prepared":
        return
    after, twins = dict(world.model.named_parameters()), dict(world.twin.named_parameters())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        resized = after[name]
        # No head stays in float32 in a half model, though it was made of a copy that others cast.
        if world.before.base_dtype(name) in HALF:
            twins[name].data = twins[name].data.to(world.before.base_dtype(name))
        _, flag = world.flags.pop(id(before[name]), (None, False))
        if flag:
            world.flags[id(resized)] = resized, True
        else:  # what was frozen before, or is a copy that others trained, is left as it is
            twins[name].requires_grad_(resized.requires_grad)
        world.trained[id(resized)] = resized
    world.is_trained = True
    world.take_over(lambda name, p: id(p) in world.trained)


@operation(6)
def add_adapter(world: World, rng: random.Random) -> None:
    if world.kind == "tree" or world.state == "suspended":
        return
    if world.state == "prepared" and world.twin.is_gradient_checkpointing:  # PEFT hooks a model that checkpoints
        return
    saved = rng.choice((None, None, ["lm_head"]))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=saved)
    name = f"a{len(world.log)}"
    if world.tops[0] is world.model:
        tops: list[Any] = []
        made = world.both(lambda top: tops.append(peft.get_peft_model(top, copy.deepcopy(config), adapter_name=name)))
        if made:
            world.tops = tops[0], tops[1]
    else:
        world.both(lambda top: top.add_adapter(name, copy.deepcopy(config)))
    named = dict(world.tops[1].named_parameters())
    for path, p in world.tops[0].named_parameters():
        if "lora_" in path and name in path and path in named:  # on a layer that the user cast to float64
            named[path].data = named[path].data.to(p.dtype)
    _after_peft(world)
    if world.state == "prepared":  # PEFT copied what is frozen, and makes only copies of active adapters trainable
        for path, p in world.tops[0].named_parameters():
            if path.endswith((f".modules_to_save.{name}.weight", f".modules_to_save.{name}.bias")) and path in named:
                named[path].requires_grad_(p.requires_grad)
    if rng.random() < 0.5 and world.state == "prepared" and world.wrapper is not None:
        dtypes = _lora_dtypes(world)
        world.ours(lambda: world.wrapper.adopt(world.tops[0]))
        _hold(world, dtypes)


def _after_peft(world: World) -> None:
    """Take over what PEFT drew or computed: adapters, copies, and the weights of the layers that have adapters."""
    marks = ("lora_", "modules_to_save", "q_proj", "down_proj")
    world.take_over(lambda name, p: any(mark in name for mark in marks) and p.is_floating_point())
    world._note_objects()
    world.suspended = None


def _peft_call(call: Callable[[Any, list[str]], Any]) -> Op:
    """An operation on the adapters that there are."""

    def op(world: World, rng: random.Random) -> None:
        if world.tops[0] is world.model or world.state == "suspended":
            return
        names = list(world.tops[0].peft_config)
        rng.shuffle(names)
        world.both(lambda top: call(top, names))
        _after_peft(world)

    return op


def _named(name: str, op: Op) -> Op:
    op.__name__ = name
    return op


for _name, _weight, _call in (
    ("switch_adapter", 2, lambda top, names: top.set_adapter(names[0])),
    ("delete_adapter", 1, lambda top, names: top.delete_adapter(names[0]) if len(names) > 1 else None),
):
    operation(_weight)(_named(_name, _peft_call(_call)))


@operation(3)
def merge_adapter(world: World, rng: random.Random) -> None:
    """Merge, or take a merge back; not into quantized layers, whose merge is another's rounding."""
    if world.tops[0] is not world.model and world.kind == "llama":
        call = rng.choice(("merge_adapter", "unmerge_adapter"))
        world.both(lambda top: getattr(top, call)())
        _after_peft(world)


@operation(2)
def unmerge_while_suspended(world: World, rng: random.Random) -> None:
    """Merge into the prepared model, and take it back out of the suspended one."""
    if world.tops[0] is world.model or world.kind != "llama" or world.state != "prepared":
        return
    world.both(lambda top: top.merge_adapter())
    _after_peft(world)
    OPS["suspend"][0](world, rng)
    world.both(lambda top: top.unmerge_adapter())
    _after_peft(world)
    world.is_used = True
    OPS["resume"][0](world, rng)


@operation(2)
def unload(world: World, rng: random.Random) -> None:
    if world.tops[0] is world.model:
        return
    call = rng.choice(("unload", "merge_and_unload")) if world.kind == "llama" else "unload"
    world.both(lambda top: getattr(top, call)())
    world.tops = world.model, world.twin
    _after_peft(world)


# ----------------------------------------------------------------------------------------------------
# The trials.
# ----------------------------------------------------------------------------------------------------


def act(world: World, name: str, seed: int) -> None:
    """One call, and what has to hold after it."""
    if world.is_over:
        return
    world.log.append(f"{name}@{world.state}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        OPS[name][0](world, random.Random(seed))
        world.check()


def finish(world: World) -> None:
    """Restore what is prepared."""
    world.log.append("finish")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if world.state == "suspended":
            world.wrapper.resume()
            world.state = "prepared"
        if world.state in ("prepared", "suspended"):
            _end(world, world.ours(world.wrapper.restore))
        world.check()


def sequence(seed: int) -> list[str]:
    """One sequence of a seed, to its first violation."""
    rng = random.Random(seed)
    world = World(seed)
    names, weights = [*OPS], [weight for _, weight in OPS.values()]
    for name in rng.choices(names, weights, k=rng.randint(2, LENGTH)):
        act(world, name, rng.getrandbits(32))
        if world.found:
            break
    else:
        finish(world)
    return [f"sequence {seed}: {line}" for line in world.found]


def trials(seed: int, count: int = ROUND) -> Iterator[list[str]]:
    with torch.random.fork_rng(devices=[]):
        for number in range(count):
            yield sequence(seed * 1_000_003 + number)
