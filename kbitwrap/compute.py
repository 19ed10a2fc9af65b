"""The edits that make modules compute in float32 from what they store in half."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

from .edits import EditBase, write_attribute
from .journal import MISSING, Resume, undo_for_a_while
from .precision import Float32Forward, forward_slot
from .topology import named_modules
from .upcast import Float32Copy, UpcastTensor


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

    def suspend(self) -> Resume:
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

        return undo_for_a_while(self, resume)


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
    """Instance attributes that stand in for the parameters of their names."""

    def __init__(self, modules: list[tuple[nn.Module, str]]) -> None:
        self._modules = [(weakref.ref(module), name) for module, name in modules]

    def _live(self) -> list[tuple[nn.Module, str]]:
        return [(module, name) for ref, name in self._modules if (module := ref()) is not None]

    def undo(self) -> None:
        """Remove the stand-ins: the parameters are seen again."""
        for module, name in self._live():
            for attribute, kind in ((name, UpcastTensor), ("__deepcopy__", Float32Copy)):
                if isinstance(vars(module).get(attribute), kind):
                    del vars(module)[attribute]

    def suspend(self) -> Resume:
        """Remove the stand-ins for a while; those that are there are put back."""
        attributes = [(module, name) for module, own in self._live() for name in (own, "__deepcopy__")]
        current = [(module, name, vars(module).get(name, MISSING)) for module, name in attributes]

        def resume() -> None:
            for module, name, value in current:
                write_attribute(vars(module), name, value)

        return undo_for_a_while(self, resume)


@dataclass(frozen=True, kw_only=True)
class UpcastAtUse(EditBase):
    """Make half weights be seen, and used, as float32, through a stand-in that upcasts at each use.

    Attributes:
        weights: The modules, weakly, each with the name of the parameter in it.
        chunk_bytes: The largest float32 piece alive at once in a matrix product; ``None``: one piece.
    """

    weights: tuple[tuple[weakref.ref[nn.Module], str], ...] = field(repr=False)
    chunk_bytes: int | None = None

    def _live(self) -> list[tuple[nn.Module, str]]:
        return [(module, name) for ref, name in self.weights if (module := ref()) is not None]

    def capture(self) -> UpcastChange:
        """Record where stand-ins will be; none is there, or it would not have been planned."""
        return UpcastChange(self._live())

    def apply(self) -> None:
        """Put the stand-ins there."""
        for module, name in self._live():
            parameter = module._parameters[name]
            assert isinstance(parameter, torch.Tensor)
            vars(module)[name] = UpcastTensor(parameter, (module, name), self.chunk_bytes)
            vars(module)["__deepcopy__"] = Float32Copy(module)
