"""The edits of flags, attributes and modes: record, freeze, hold; and what every edit and record is made of.

Records hold modules and parameters weakly: what others replace, such as a weight that a merge requantizes, is freed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from .journal import MISSING, Resume
from .quantization import DISTRIBUTIONS, RuntimeChange
from .roles import Role
from .topology import NamedTensor, canonical_fqn, named_modules, only_reading, places

T = TypeVar("T")


@dataclass(frozen=True)
class EditBase:
    """What every edit can say of itself.

    Attributes:
        action: What is done: ``"hold"``, ``"record"``, ``"freeze"``, ``"store"``, ``"upcast"``, ``"compute"`` or
            ``"checkpoint"``.
        fqns: The fully qualified names of what it is done to.
        role: The part that these play, where they all play the same.
        added_bytes: Bytes that the edit adds and that stay until it is undone.
        transient_bytes: The most bytes that are live while the edit is made, above those before it.
        reason: Why it is done so and not in the precision's leaner way, where there is one.
    """

    action: str
    fqns: tuple[str, ...]
    role: Role | None = None
    added_bytes: int = 0
    transient_bytes: int = 0
    reason: str = ""

    def describe(self) -> str:
        """Say in one line what the edit does, and to what."""
        shown = ", ".join(name or "the model" for name in self.fqns[:3])
        more = f" and {len(self.fqns) - 3} more" if len(self.fqns) > 3 else ""
        return f"{self.action} {shown}{more}"


class ModuleRecord(Generic[T]):
    """A value for each module of a model, found again through wrappers, copies and merges.

    Args:
        model: The model.
        read: What to record of a module.
    """

    def __init__(self, model: nn.Module, read: Callable[[nn.Module], T]) -> None:
        self._model = weakref.ref(model)
        self._places = places(model)
        self._values = [read(module) for _, module in self._places.live()]

    def recorded(self) -> list[tuple[nn.Module, T]]:
        """The modules recorded that are still alive, each with its value."""
        return [(module, self._values[number]) for number, module in self._places.live()]

    def get(self, module: nn.Module) -> T | None:
        """The value of a recorded module, or ``None``."""
        number = self._places.number(module)
        return None if number is None else self._values[number]

    def stand_ins(self) -> Iterator[tuple[nn.Module, T]]:
        """Modules of the live model that are not recorded and stand, by name and class, where a recorded one stood.

        These are the copies that PEFT makes for ``modules_to_save``: beside the original or in its place.
        """
        model = self._model()
        for fqn, module in named_modules(model) if model is not None else ():
            if self._places.number(module) is None:
                cls, number = self._places.by_name.get(canonical_fqn(fqn), (None, 0))
                if cls is type(module):
                    yield module, self._values[number]

    def affected(self) -> list[tuple[nn.Module, T]]:
        """Everything that an undo reaches: what was recorded, and what stands in for it."""
        return [*self.recorded(), *self.stand_ins()]


def write_attribute(fields: dict[str, Any], name: str, value: Any) -> None:
    """Set an instance attribute, or remove it where it was ``MISSING``."""
    if value is MISSING:
        fields.pop(name, None)
    else:
        fields[name] = value


class AttributesChange:
    """Instance attributes as they were: restored by value, and absent again where they were absent."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.names = names
        self.record = ModuleRecord(model, self._read)

    def _read(self, module: nn.Module) -> tuple[Any, ...]:
        fields = vars(module)
        return tuple([fields.get(name, MISSING) for name in self.names])

    def undo(self) -> None:
        """Write the recorded values, on stand-ins too."""
        self.undo_of(self.names)

    def undo_of(self, names: Collection[str]) -> None:
        """Write the recorded values of some of the attributes, on stand-ins too."""
        slots = [(slot, name) for slot, name in enumerate(self.names) if name in names]
        for module, values in self.record.affected():
            fields = vars(module)
            for slot, name in slots:
                if fields.get(name, MISSING) is not values[slot]:
                    write_attribute(fields, name, values[slot])

    def suspend(self, resumes: list[Resume]) -> None:
        """Write the recorded values; resuming writes those of now."""
        current = [(module, self._read(module)) for module, _ in self.record.affected()]

        def resume() -> None:
            for module, values in current:
                for name, value in zip(self.names, values, strict=True):
                    write_attribute(vars(module), name, value)

        resumes.append(resume)
        self.undo()


class FlagsChange:
    """``requires_grad`` flags as they were."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.flags = [(weakref.ref(p), p.requires_grad) for p in parameters]

    def turned_on_by_undo(self) -> int:
        """How many live parameters ``undo`` would make trainable."""
        return sum(flag and (p := ref()) is not None and not p.requires_grad for ref, flag in self.flags)

    def undo(self) -> None:
        """Set the recorded flags."""
        for reference, flag in self.flags:
            parameter = reference()
            if parameter is not None and parameter.requires_grad != flag and parameter.is_leaf:
                parameter.requires_grad_(flag)

    def suspend(self, resumes: list[Resume]) -> None:
        """Set the recorded flags; resuming sets those of now."""
        resumes.append(FlagsChange(p for ref, _ in self.flags if (p := ref()) is not None).undo)
        self.undo()


@dataclass(frozen=True, kw_only=True)
class Freeze(EditBase):
    """Record every base parameter's ``requires_grad``, and set it false where asked."""

    tensors: tuple[weakref.ref[nn.Parameter], ...] = field(default=(), repr=False)
    freeze: bool = True

    def _parameters(self) -> list[nn.Parameter]:
        return [p for ref in self.tensors if (p := ref()) is not None]

    def capture(self) -> FlagsChange:
        """Record the flags."""
        with only_reading():
            return FlagsChange(self._parameters())

    def apply(self) -> None:
        """Set the flags."""
        if self.freeze:
            with only_reading():
                trainable = [parameter for parameter in self._parameters() if parameter.requires_grad]
            for parameter in trainable:
                parameter.requires_grad_(False)


# What accelerate sets on the model that it is given: a forward under autocast, the forward before that, and a mark.
_ACCELERATE_ATTRIBUTES = ("forward", "_original_forward", "_is_accelerate_prepared")


class AccelerateChange:
    """A model as it was before accelerate prepared it: without its autocast, and without its mark.

    Args:
        model: The model that is given to a ``Trainer``, or to ``Accelerator.prepare``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.values = self._read(model)

    def _read(self, model: nn.Module) -> tuple[Any, ...]:
        return tuple(vars(model).get(name, MISSING) for name in _ACCELERATE_ATTRIBUTES)

    def undo(self) -> None:
        """Put the attributes back; a ``forward`` that others replaced stays."""
        model = self.model()
        if model is None:
            return
        is_wrapped = vars(model).get("_original_forward", MISSING) is not self.values[1]
        for name, value in zip(_ACCELERATE_ATTRIBUTES, self.values, strict=True):
            if name != "forward" or is_wrapped:
                write_attribute(vars(model), name, value)

    def suspend(self, resumes: list[Resume]) -> None:
        """Put the attributes back for a while."""
        model = self.model()
        if model is None:
            return
        current = self._read(model)

        def resume() -> None:
            for name, value in zip(_ACCELERATE_ATTRIBUTES, current, strict=True):
                write_attribute(vars(model), name, value)

        resumes.append(resume)
        self.undo()


# The types of the plain attributes that a module computes with, and may replace when it runs.
_PLAIN = frozenset({torch.Tensor, type(None), bool, int, float, str, torch.dtype, torch.device})
Caches = tuple[dict[str, Any], dict[str, torch.Tensor | None]]
"""Plain attributes, and the buffers that no checkpoint holds."""


@functools.cache
def _keeps_caches(cls: Any) -> bool:
    """Whether a module's class may keep tensors for its next forward; torch's own do not.

    Those of the libraries that quantize keep what their kernels need, in no dtype of the input's.
    """
    return not cls.__module__.startswith("torch.nn.") and cls.__module__.partition(".")[0] not in DISTRIBUTIONS


class CachesChange:
    """Tensors that modules keep from one forward to the next, as they were: rotary tables, position encodings.

    A forward makes them, or casts them, in the dtype that it computes in, so that those of a prepared model are not
    those of the model before. Such a tensor is a plain attribute, or a buffer that no checkpoint holds. Where another
    one stands in its place, or one where there was none, the module gets back what it had, and the numbers beside it,
    which may say what the tensor is good for.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.record = ModuleRecord(model, self._read)

    @staticmethod
    def _read(module: nn.Module) -> Caches:
        cls: Any = type(module)
        if not _keeps_caches(cls):
            return {}, {}
        buffers, names = module._buffers, module._non_persistent_buffers_set
        return (
            {name: value for name, value in module.__dict__.items() if type(value) in _PLAIN},
            {name: value for name, value in buffers.items() if name in names} if buffers else {},
        )

    def undo(self) -> None:
        """Put them back, on stand-ins too. What others put there that is neither tensor nor number stays."""
        for module, (recorded, buffers) in self.record.affected():
            fields = module.__dict__
            changed = {
                name: value
                for name, value in recorded.items()
                if (found := fields.get(name)) is not value and name != "training" and type(found) in _PLAIN
            }
            replaced = {
                name: value
                for name, value in buffers.items()
                if name in module._buffers and module._buffers[name] is not value
            }
            if replaced or any(torch.Tensor in (type(value), type(fields.get(n))) for n, value in changed.items()):
                fields.update(changed)
                for name, value in replaced.items():
                    # Moving a model replaces its buffers, and they stay where they were moved to.
                    module._buffers[name] = _beside(value, module._buffers[name])


def _beside(tensor: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or other is None else tensor.to(other.device)


_RUNTIME_CONFIGS = ("config", "generation_config")


class RecordChange:
    """What training leaves behind beside the preparation: train mode, caches, ``use_cache``, what layers rewrite.

    What accelerate sets on the model too, where the model itself is trained rather than a ``PeftModel`` around it.
    """

    def __init__(self, model: nn.Module, runtime_layers: Iterable[nn.Module]) -> None:
        self._model = weakref.ref(model)
        self.accelerate = AccelerateChange(model)
        self.training = ModuleRecord(model, lambda module: module.training)
        self.layers = [RuntimeChange(layer) for layer in runtime_layers]
        self.caches = CachesChange(model)
        # The layers of a model share its config.
        configs = {
            id(config): config
            for _, module in named_modules(model)
            for name in _RUNTIME_CONFIGS
            if (config := module.__dict__.get(name)) is not None
        }
        self.use_cache = [
            (config, vars(config).get("use_cache", MISSING))
            for config in configs.values()
            if hasattr(config, "__dict__")
        ]

    def undo(self) -> None:
        """Put all of it back. Adapters keep their train mode; copies of base modules get the original's."""
        self.accelerate.undo()
        for module, training in self.training.affected():
            module.training = training
        for layer in self.layers:
            layer.undo()
        self.caches.undo()
        for config, value in self.use_cache:
            write_attribute(vars(config), "use_cache", value)

    def suspend(self, resumes: list[Resume]) -> None:
        """Put all of it back for a while; adapters meanwhile follow the train mode of the module they sit in."""
        model = self._model()
        if model is None:
            return
        training = [(module, module.training) for _, module in named_modules(model)]
        use_cache = [(config, vars(config).get("use_cache", MISSING)) for config, _ in self.use_cache]
        layers = [layer.now() for layer in self.layers]
        caches = CachesChange(model)

        def resume() -> None:
            for module, mode in training:
                module.training = mode
            for config, value in use_cache:
                write_attribute(vars(config), "use_cache", value)
            for layer in layers:
                layer.undo()
            caches.undo()

        resumes.append(resume)
        self.accelerate.suspend(resumes)
        self.undo()
        modes: dict[str, bool] = {}
        for fqn, module in named_modules(model):
            recorded = self.training.get(module)
            modes[fqn] = modes[fqn.rpartition(".")[0]] if recorded is None else recorded
            module.training = modes[fqn]


@dataclass(frozen=True, kw_only=True)
class Record(EditBase):
    """Record what training rewrites on its own; changes nothing."""

    model: weakref.ref[nn.Module] = field(repr=False)
    layers: tuple[weakref.ref[nn.Module], ...] = field(default=(), repr=False)

    def capture(self) -> RecordChange:
        """Record."""
        model = self.model()
        assert model is not None
        return RecordChange(model, [layer for ref in self.layers if (layer := ref()) is not None])

    def apply(self) -> None:
        """Change nothing."""


class Anchor:
    """Keeps a wrapper alive for as long as the model that it prepared, and stays behind when the model is copied."""

    def __init__(self, wrapper: object = None) -> None:
        self.wrapper = wrapper

    def __deepcopy__(self, memo: dict[int, Any]) -> Anchor:
        return Anchor()

    def __reduce__(self) -> tuple[type[Anchor], tuple[()]]:
        return Anchor, ()


ANCHOR_ATTRIBUTE = "_kbitwrap_prepared"


@dataclass(frozen=True, kw_only=True)
class Hold(EditBase):
    """Tie the wrapper's life to the model's, by an attribute on the model."""

    model: weakref.ref[nn.Module] = field(repr=False)
    anchor: Anchor = field(default_factory=Anchor, repr=False)

    def capture(self) -> HoldChange:
        """Record whose the attribute is."""
        return HoldChange(self.model)

    def apply(self) -> None:
        """Set the attribute."""
        model = self.model()
        assert model is not None
        vars(model)[ANCHOR_ATTRIBUTE] = self.anchor


class HoldChange:
    """The attribute that was not there."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self.model = model

    def undo(self) -> None:
        """Remove it."""
        model = self.model()
        if model is not None:
            vars(model).pop(ANCHOR_ATTRIBUTE, None)

    def suspend(self, resumes: list[Resume]) -> None:
        """Remove it for a while; whoever suspends holds the wrapper meanwhile."""
        model = self.model()
        if model is None:
            return
        fields = vars(model)
        anchor = fields.get(ANCHOR_ATTRIBUTE, MISSING)
        resumes.append(lambda: write_attribute(fields, ANCHOR_ATTRIBUTE, anchor))
        self.undo()


def references(tensors: Iterable[NamedTensor]) -> tuple[weakref.ref[nn.Parameter], ...]:
    """Weak references to parameters."""
    return tuple(weakref.ref(t.parameter) for t in tensors)
