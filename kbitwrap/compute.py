"""The edits that make modules compute in float32 from what they store in half."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from .edits import EditBase, write_attribute
from .journal import MISSING, Resume
from .precision import Float32Forward, forward_slot
from .quantization import HALF_DTYPES
from .topology import named_modules, named_tensors, only_reading
from .upcast import Float32Copy, Float32First, StandInState, UpcastTensor, install_stand_in


class ComputeChange:
    """Forwards replaced by ``Float32Forward``, on the modules given and on the copies made of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._installed: list[weakref.ref[Float32Forward]] = []

    def install(self, module: nn.Module) -> None:
        """Replace a module's forward."""
        forward = Float32Forward(module)
        self._installed.append(weakref.ref(forward))
        vars(module)[forward_slot(module)] = forward

    def _live(self) -> list[Float32Forward]:
        """Every forward of this kind: in the live model, and on modules that have left it."""
        model = self._model()
        found = {id(f): f for ref in self._installed if (f := ref()) is not None}
        for _, module in named_modules(model) if model is not None else ():
            for value in vars(module).values():
                if isinstance(value, Float32Forward) and value.module is module:
                    found[id(value)] = value
        return list(found.values())

    def undo(self) -> None:
        """Put the modules' own forwards back. One that another library wrapped meanwhile is made inert."""
        for forward in self._live():
            forward.is_active = False
            for slot in ("forward", "_old_forward"):
                if vars(forward.module).get(slot) is forward:
                    _put_back_forward(forward, slot)

    def suspend(self, resumes: list[Resume]) -> None:
        """Put the modules' own forwards back; resuming installs the same objects again."""
        places = [
            (forward, slot)
            for forward in self._live()
            for slot in ("forward", "_old_forward")
            if vars(forward.module).get(slot) is forward
        ]
        live = self._live()

        def resume() -> None:
            for forward in live:
                forward.is_active = True
            for forward, slot in places:
                vars(forward.module)[slot] = forward

        resumes.append(resume)
        self.undo()


def _put_back_forward(forward: Float32Forward, slot: str) -> None:
    fields = vars(forward.module)
    if slot == "_old_forward" and forward.inner is MISSING:
        # accelerate hooked the module while it was prepared: its record of the forward becomes the class's own.
        fields[slot] = type(forward.module).forward.__get__(forward.module)
    else:
        write_attribute(fields, slot, forward.inner)


@dataclass(frozen=True, kw_only=True)
class ComputeInFloat32(EditBase):
    """Make modules compute in float32 from their half parameters."""

    model: weakref.ref[nn.Module] = field(repr=False)
    modules: tuple[weakref.ref[nn.Module], ...] = field(default=(), repr=False)
    _change: list[ComputeChange] = field(default_factory=list, repr=False, compare=False)

    def capture(self) -> ComputeChange:
        """Start a record of the forwards replaced."""
        model = self.model()
        assert model is not None
        self._change[:] = [ComputeChange(model)]
        return self._change[0]

    def apply(self) -> None:
        """Replace the forwards."""
        for reference in self.modules:
            module = reference()
            if module is not None:
                self._change[0].install(module)


class UpcastChange:
    """Instance attributes that stand in for the parameters of their names, wherever these are registered again.

    A weight that is tied (``head.weight = embeddings.weight``), parametrized, or given other data in the same dtype
    (``load_state_dict(assign=True)``) is registered anew, and torch's hook on that is how its stand-in follows it.
    """

    def __init__(self, chunk_bytes: int | None) -> None:
        self._chunk_bytes = chunk_bytes
        self._names: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._readers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hook: RemovableHandle | None = None

    def install(self, module: nn.Module, name: str) -> None:
        """Put a stand-in there."""
        parameter = module._parameters[name]
        assert parameter is not None
        self._install(module, name, parameter)

    def _install(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self._names.setdefault(module, set()).add(name)
        install_stand_in(module, name, parameter, self._chunk_bytes)

    def put_float32_first(self, model: nn.Module) -> None:
        """Let the modules whose first floating-point parameter is one of the weights see a float32 one before it.

        That is the first frozen one on the same device; where there is none, the module sees half.
        """
        self._model = weakref.ref(model)
        weights = {id(module._parameters[name]) for module, names in self._names.items() for name in names}
        with only_reading():
            tensors = [t for t in named_tensors(model, remove_duplicate=False) if t.parameter.is_floating_point()]
            first: dict[str, nn.Parameter] = {}
            for tensor in tensors:
                owner = tensor.fqn.rpartition(".")[0]
                while owner not in first:
                    first[owner] = tensor.parameter
                    owner = owner.rpartition(".")[0]
            modules = [(fqn, m, first[fqn]) for fqn, m in named_modules(model) if id(first.get(fqn)) in weights]
            stored = [t for t in tensors if t.parameter.dtype == torch.float32 and not t.parameter.requires_grad]
        for fqn, module, half in modules:
            inside = (t for t in stored if not fqn or t.fqn.startswith(f"{fqn}."))
            precedes = next((t for t in inside if t.parameter.device == half.device), None)
            if precedes is not None and "parameters" not in vars(module):
                vars(module)["parameters"] = Float32First(module, precedes.module, precedes.name)
                self._readers.add(module)

    def follow(self) -> None:
        """Begin to follow the weights."""
        if self._hook is None:
            change = weakref.ref(self)

            def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
                live = change()
                return None if live is None else live._registered(module, name, parameter)

            # torch annotates the hook as one that returns nothing, and registers what it returns.
            self._hook = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
            weakref.finalize(self, self._hook.remove)

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """What to register instead of a parameter: for a stand-in, what it stands for; its place gets one, too."""
        if isinstance(module, ParametrizationList):
            # The owner gives the weight away: in its place there is to be a property.
            for owner, own_name in self._attributes():
                if vars(owner).get(own_name) is parameter:
                    del vars(owner)[own_name]
        if isinstance(parameter, UpcastTensor):
            if parameter.is_view:
                return nn.Parameter(parameter.clone(), requires_grad=False)
            place = parameter.owner
            if place is None or place[1] not in self._names.get(place[0], ()):
                return None
            half = parameter.parameter
        else:
            is_ours = name in self._names.get(module, ())
            if not is_ours or parameter.dtype not in HALF_DTYPES or parameter.requires_grad:
                return None
            half = parameter
        self._install(module, name, half)
        return half

    def _live_readers(self) -> list[nn.Module]:
        """The modules that see a float32 parameter first, and PEFT's copies of them in the live model."""
        model = self._model()
        modules = [*self._readers, *(m for _, m in (named_modules(model) if model is not None else ()))]
        return [m for m in dict.fromkeys(modules) if isinstance(vars(m).get("parameters"), Float32First)]

    def _attributes(self) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module, names in self._names.items()
            for name in (*sorted(names), "__deepcopy__", "__getstate__")
        ] + [(module, "parameters") for module in self._live_readers()]

    def undo(self) -> None:
        """Remove the stand-ins: the parameters are seen again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for module, name in self._attributes():
            value = vars(module).get(name)
            if isinstance(value, UpcastTensor):
                value._is_param = False
            if isinstance(value, (UpcastTensor, Float32Copy, StandInState, Float32First)):
                del vars(module)[name]

    def suspend(self, resumes: list[Resume]) -> None:
        """Remove the stand-ins for a while; those that are there are put back."""
        current = [(module, name, vars(module).get(name, MISSING)) for module, name in self._attributes()]

        def resume() -> None:
            for module, name, value in current:
                write_attribute(vars(module), name, value)
                if isinstance(value, UpcastTensor):
                    value._is_param = True
            self.follow()

        resumes.append(resume)
        self.undo()


@dataclass(frozen=True, kw_only=True)
class UpcastAtUse(EditBase):
    """Make half weights be seen, and used, as float32, through a stand-in that upcasts at each use.

    Attributes:
        model: The model, weakly.
        weights: The modules, weakly, each with the name of the parameter in it.
        chunk_bytes: The largest float32 piece alive at once in a matrix product; ``None``: one piece.
    """

    model: weakref.ref[nn.Module] = field(repr=False)
    weights: tuple[tuple[weakref.ref[nn.Module], str], ...] = field(repr=False)
    chunk_bytes: int | None = None
    _change: list[UpcastChange] = field(default_factory=list, repr=False, compare=False)

    def capture(self) -> UpcastChange:
        """Begin a record of the stand-ins; none is there, or it would not have been planned."""
        self._change[:] = [UpcastChange(self.chunk_bytes)]
        return self._change[0]

    def apply(self) -> None:
        """Put the stand-ins there."""
        change = self._change[0]
        for reference, name in self.weights:
            module = reference()
            if module is not None:
                change.install(module, name)
        model = self.model()
        assert model is not None
        change.put_float32_first(model)
        change.follow()
