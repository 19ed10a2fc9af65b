"""Faults at every step of every call: the model is as it was, or whole in the state that its wrapper tells."""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import PeftModel
from torch import nn

from kbitwrap import EditError, KbitPreparedModel, KbitWrapError, LifecycleState, Precision, RestoreError, prepared_of
from kbitwrap.preparation.preparation import changing
from support import failing, plain, training, zoo
from support.snapshot import Snapshot

FOLDER = Path(tempfile.mkdtemp(prefix="faults-", dir=zoo.checkpoints()))
STRIDE = 401  # as many rounds fail once every primitive step of what changes a quantized model
_READING = ("export", "manifest", "from_manifest", "merged_weights")
ERRORS: dict[failing.Kind, tuple[type[BaseException], ...]] = {
    failing.primitive: (torch.OutOfMemoryError, KeyboardInterrupt, RuntimeError, SystemExit),
    failing.line: (KeyboardInterrupt, MemoryError),
}
NEW, PREPARED, SUSPENDED, RESTORED = LifecycleState
# The order of attributes that were removed and set again; and what a suspended model holds its wrapper by.
ORDER, HOLD = (": attributes",), (": attributes", ": _kbitwrap_prepared")
# The state that a call starts in, the one that it leads to, and others that it may stop in.
ENDS = {
    "prepare": (RESTORED, PREPARED),
    "from_manifest": (RESTORED, RESTORED),
    "suspend": (PREPARED, SUSPENDED),
    "resume": (SUSPENDED, PREPARED),
    "restore": (PREPARED, RESTORED),
    "leave": (PREPARED, RESTORED),
    "suspended": (PREPARED, PREPARED, SUSPENDED),
}


def process() -> list[object]:
    """What every call leaves as it was in the process, whatever becomes of it."""
    return [
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        *(torch._C._is_torch_function_enabled(), torch._C._len_torch_function_stack(), torch.get_default_dtype()),
        *(torch._C._len_torch_dispatch_stack(), len(warnings.filters), zlib.crc32(torch.get_rng_state().numpy())),
        changing._is_owned(),
    ]


class Subject:
    """A model and its wrapper, used again after every fault; with ``adapt``, adapters are put on after preparing."""

    adapted: PeftModel | None = None
    where = ""  # the place of the last fault
    has_failed = False  # whether it made a restore fail

    def __init__(self, model: nn.Module, adapt: Callable[[nn.Module], PeftModel] | None = None, **fields: Any) -> None:
        self.model = model
        self.adapt = adapt
        self.prepared = KbitPreparedModel(model, **fields)
        self.go(PREPARED)
        self.export()
        self.exported = files()
        self.manifest = None if adapt else self.prepared.manifest()
        self.go(SUSPENDED)
        self.go(RESTORED)
        self.original, self.process = Snapshot(model), process()
        self.hooks = {*nn.modules.module._global_parameter_registration_hooks}  # of models that others dropped
        self.parameters = dict(model.named_parameters(remove_duplicate=False))

    def go(self, state: LifecycleState) -> None:
        """Reach a state by calls that do not fail."""
        prepared = self.prepared
        prepared.resume()
        if state is RESTORED and prepared.state is PREPARED:
            prepared.restore()
            self.take_off()
        if state in (PREPARED, SUSPENDED) and prepared.state is not PREPARED:
            self.take_off()
            prepared.prepare()
            self.put_on()
        if state is SUSPENDED:
            prepared.suspend()

    def put_on(self) -> None:
        """Put adapters on, and train the copies that they make of modules."""
        if self.adapt is not None:
            self.adapted = self.adapt(self.model)
            for name, parameter in self.model.named_parameters():
                if "modules_to_save" in name:
                    parameter.data.mul_(1 + 2**-14)  # half numbers have no such factor

    def take_off(self) -> None:
        """Take the adapters off, by hand: PEFT would put its copies in the places of the modules."""
        for module in list(self.model.modules()) if self.adapted is not None else ():
            for name, child in module._modules.items():
                inner = getattr(child, "original_module", None) or getattr(child, "base_layer", child)
                module._modules[name] = inner
        vars(self.model).pop("peft_config", None)
        self.adapted = None

    def export(self) -> None:
        """Export the base, or merged."""
        self.prepared.export(FOLDER / "out" / "checkpoint", model=self.adapted, merge_adapters=self.adapt is not None)

    def leave(self) -> None:
        """Leave a with-block of the wrapper."""
        with self.prepared:
            pass

    def stay(self) -> None:
        """Suspend the model for a while."""
        with self.prepared.suspended():
            pass

    def calls(self) -> dict[str, Callable[[], object]]:
        """The calls to fail."""
        prepared = self.prepared
        calls: dict[str, Callable[[], object]] = {
            "suspend": prepared.suspend,
            "resume": prepared.resume,
            "restore": prepared.restore,
            "export": self.export,
        }
        if self.adapt is not None:
            return calls | {
                "adopt": lambda: prepared.adopt(self.adapted),
                "merged_weights": lambda: deque(prepared.merged_weights(), 0),
            }
        return calls | {
            "prepare": prepared.prepare,
            "leave": self.leave,
            "suspended": self.stay,
            "manifest": lambda: prepared.manifest().save(FOLDER / "out"),
            "from_manifest": lambda: KbitPreparedModel.from_manifest(self.model, self.manifest),
        }

    def count(self, call: str, kind: failing.Kind) -> int:
        """The number of steps of a call."""
        self.go(ENDS.get(call, (PREPARED,))[0])
        with failing.failing_at(None, kind=kind) as steps:
            self.calls()[call]()
        files()
        return steps.count

    def fail(self, call: str, number: int, error: BaseException, kind: failing.Kind) -> Iterator[str]:
        """Fail a step of a call, go on from there to the end, and yield what is not as it has to be."""
        prepared, do, (start, end, *more) = self.prepared, self.calls()[call], ENDS.get(call, (PREPARED, PREPARED))
        self.go(PREPARED if start is SUSPENDED else start)
        before = during = self.original if start is RESTORED else Snapshot(self.model)
        if start is SUSPENDED:
            prepared.suspend()
            before = Snapshot(self.model)
        caught: BaseException | None = None
        with failing.failing_at(number, error, kind) as steps:
            try:
                do()
            except BaseException as raised:
                caught = raised
        self.where, found, state = steps.last, files(), prepared.state
        if not self.where:
            return
        is_interrupt = not isinstance(error, Exception)
        if caught is not error if is_interrupt else caught is not None and error not in causes(caught):
            yield f"raised {caught!r}"
        if state not in (start, end, *more) or (caught is None and state is not end):
            yield f"raised {caught!r}, and the wrapper is {state}"
        if prepared_of(self.model) is not (prepared if state in (PREPARED, SUSPENDED) else None):
            yield f"prepared_of() is {prepared_of(self.model)} while {state}"
        self.has_failed = isinstance(caught, RestoreError)
        if isinstance(caught, RestoreError):
            yield from self.unnamed(caught)
        elif state is RESTORED and self.adapt is None:
            yield from self.original.diff(Snapshot(self.model), moved=True)
        elif state is start and call == "adopt" and not isinstance(caught, EditError):
            if before.diff(Snapshot(self.model), ignore=ORDER) and prepared.verify():  # neither as it was nor whole
                yield f"adopted in part: {prepared.verify()}"
        elif state is start and (call != "resume" or is_interrupt):
            yield from before.diff(Snapshot(self.model), moved=True, ignore=ORDER)
        elif state is SUSPENDED and call == "suspend" and self.adapt is None:
            # Adapters stay in the dtype of their training.
            found_in = self.original.diff(Snapshot(self.model), moved=True, ignore=HOLD)
            yield from (line for line in found_in if "lora_" not in line)
        is_whole = found == self.exported if call == "export" else call == "manifest" and [*found] == ["out"]
        if caught is not None and found and (isinstance(caught, KbitWrapError) or not is_whole):
            yield f"left {[*found]}"
        if state is RESTORED and not self.hooks.issuperset(nn.modules.module._global_parameter_registration_hooks):
            yield "a hook of torch's is left"
        if process() != self.process:
            yield f"the process is {process()}, and was {self.process}"
        yield from self.end(call, during)

    def end(self, call: str, during: Snapshot) -> Iterator[str]:
        """Go on to the end by calls that do not fail, and yield what is not as it has to be."""
        prepared = self.prepared
        if call in ("suspend", "resume", "suspended"):
            self.go(PREPARED)
            yield from during.diff(Snapshot(self.model), moved=True, ignore=ORDER)
        if call == "adopt":
            prepared.adopt(self.adapted)
        if call in ("prepare", "adopt") and prepared.state is PREPARED and (difference := prepared.verify()):
            yield f"verify() finds {difference}"
        if call in (*ENDS, "adopt") and (self.adapt is None or call in ("restore", "adopt")):
            report = prepared.restore()
            self.take_off()
            yield from self.original.diff(Snapshot(self.model), moved=True)
            # After a failure the record of what forwards leave has put back what the change that failed had not.
            put_back = () if self.has_failed else report.put_back
            if self.adapt is None and (report.replaced or put_back or report.trained or report.foreign):
                yield f"reported {report}"

    def unnamed(self, error: RestoreError) -> Iterator[str]:
        """What a restore that failed has left, and not named: parameters are named, other changes by their classes."""
        parameters = {id(p) for name, p in self.parameters.items() if name in error.failures}
        names = [name for name, p in self.parameters.items() if id(p) in parameters]
        others = error.failures.keys() - names
        if "StandIns" in others or self.adapt is not None:  # stand-ins of what is trainable cannot be read
            return
        for line in self.original.diff(Snapshot(self.model), moved=True, ignore=(*HOLD, "shared memory")):
            is_named = any(line.lstrip(".").startswith(f"{name}:") for name in names)
            is_named |= "Adapters" in others and "lora_" in line  # which go back together
            if not is_named and (not others or ": bytes: " in line):
                yield f"not restored, and not named in {[*error.failures]}: {line}"


def causes(error: BaseException | None) -> list[BaseException]:
    """An error and what it was raised from."""
    found = []
    while error is not None:
        found += error, *getattr(error, "failures", {}).values()
        error = error.__cause__ or error.__context__
    return found


def files() -> dict[str, bytes]:
    """What is in the folder that calls write to, which is emptied."""
    paths = [path for path in FOLDER.rglob("*") if path.is_file()]
    found = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}
    found |= {path.name: b"" for path in FOLDER.iterdir() if path.name.startswith(".")}
    shutil.rmtree(FOLDER)
    FOLDER.mkdir()
    return found


def subjects(name: str | None, precision: str) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """The subjects made of one architecture, or of plain models, under one precision: by what they are called."""
    if name is None:
        for make in (plain.tied, plain_model):
            yield f"{make.__name__}, {precision}", lambda make=make: Subject(make(), precision=precision)
        return
    index = list(zoo.ARCHITECTURES).index(name) + list(Precision).index(Precision(precision))
    quant, dtype = zoo._QUANTS[index % 4], zoo._HALVES[index // 4 % 2]
    fields = zoo.fields(name, precision=precision)
    if index % 3 == 0:
        fields["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
    label = f"{name}, {quant}, {dtype}, {precision}"
    yield label, lambda: Subject(zoo.load(name, quant, dtype), **fields)
    adapt = functools.partial(training.adapt, name, modules_to_save=True)
    yield f"{label}, adapted", lambda: Subject(zoo.load(name, quant, dtype), adapt, **fields)
    if precision == Precision.NORMS:
        fields["adapter_dtype"] = "bfloat16"
        yield f"{label}, rounded", lambda: Subject(training.adapt(name, zoo.load(name, quant, dtype)), **fields)
        yield f"{label}, adapted, rounded", lambda: Subject(zoo.load(name, quant, dtype), adapt, **fields)


def plain_model() -> nn.Module:
    """A plain model with two parameters over the same memory, one frozen, and a NaN."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    model[2].weight = nn.Parameter(model[0].weight.data)
    model[3].weight.requires_grad_(False)
    model[1].bias.data[0] = float("nan")
    return model


_counts: dict[tuple[str, str, failing.Kind], int] = {}
ARCHITECTURES = (*zoo.CORE, None)


def trials(
    seed: int,
    names: Sequence[str | None] = ARCHITECTURES,  # `None`: plain models
    precisions: Sequence[str] = tuple(Precision),
    stride: int = STRIDE,
) -> Iterator[list[str]]:
    """Fail each ``stride``-th step of every call, the next round the next one, until all were failed by each error.

    Of a quantized model fewer are failed of lines, of which there are tens of thousands, and of calls that only read.
    """
    with warnings.catch_warnings(), mock.patch("tempfile.tempdir", str(FOLDER)):
        warnings.simplefilter("ignore")
        for name, precision in itertools.product(names, precisions):
            for label, make in subjects(name, precision):
                subject = make()
                for call, kind in itertools.product(subject.calls(), ERRORS):
                    if (label, call, kind) not in _counts:
                        _counts[label, call, kind] = subject.count(call, kind)
                    count, errors = _counts[label, call, kind], ERRORS[kind]
                    if name is None:
                        step = max(stride // 4, 1)
                    else:
                        step = stride * (97 if kind is failing.line else 11 if call in _READING else 1)
                        step *= 5 if subject.adapt else 1
                    first = (seed + zlib.crc32(f"{label}{call}".encode())) % step
                    for number in range(first, count, step):
                        error = errors[(number + seed // step) % len(errors)]("injected")
                        found = [*subject.fail(call, number, error, kind)]
                        what = f"{label}: {call}(), {type(error).__name__} at {kind.__name__} {number}, {subject.where}"
                        if subject.where:  # else it took fewer steps than when they were counted
                            yield [f"{what}: {line}" for line in found]
                        if found:
                            subject = make()
                subject.go(RESTORED)
