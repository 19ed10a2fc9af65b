"""The edit that makes modules compute in float32 from half weights: norms, and with another forward the head."""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..model.quantization import is_quantized_parameter
from ..model.tree import ModelTree, shallow_copy
from ..model.wrappers import class_before_sharding
from ..tensors.devices import accelerators, random_state
from ..tensors.dtypes import HALF_DTYPES
from .base import ChangeBase, EditBase, write_attribute
from .journal import MISSING, Call, WayBack


def forward_slot(module: nn.Module) -> str:
    """The instance attribute of a module's innermost ``forward``: accelerate moves it to ``_old_forward``."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def can_rebind_forward(module: nn.Module) -> bool:
    """Whether a module has its class's ``forward``, or one bound to it, and no buffers, which may keep statistics."""
    if (module._buffers or module._modules) and any(True for _ in module.buffers()):
        return False
    forward = vars(module).get(forward_slot(module), MISSING)
    return forward is MISSING or (
        isinstance(forward, types.MethodType) and forward.__self__ is module
    )


def computes_in_float32(module: nn.Module) -> bool:
    """Whether a module's forward is replaced by a ``Float32Forward``."""
    return isinstance(vars(module).get(forward_slot(module)), Float32Forward)


class Float32Forward:
    """A module's own ``forward``, run on float32 casts of its half inputs and parameters; the output's dtype is kept.

    It runs on a shell that shares the module's attributes: the module is not touched,
    so threads, exceptions, recomputation and ``torch.compile`` are safe, and gradients
    reach a trained parameter through the cast.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Any = vars(module).get(forward_slot(module), MISSING)
        self.is_active = True
        self._output_dtypes: dict[Any, list[torch.dtype | None]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; in float32 while active."""
        forward = (
            type(self.module).forward if self.inner is MISSING else self.inner.__func__
        )
        if not self.is_active:
            return forward(self.module, *args, **kwargs)
        return self._run(forward, args, kwargs)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module's own forward in float32, and give the output the dtype of the unprepared module's."""
        shell = float32_shell(self.module, to_float32)
        output = forward(
            shell,
            *map(to_float32, args),
            **{n: to_float32(v) for n, v in kwargs.items()},
        )
        dtypes = self._unprepared_dtypes(forward, args, kwargs)
        if isinstance(output, torch.Tensor):
            return output if dtypes[0] is None else output.to(dtypes[0])
        parts = [
            part.to(dtype)
            if isinstance(part, torch.Tensor) and dtype is not None
            else part
            for part, dtype in zip(output, dtypes, strict=True)
        ]
        return (
            type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
        )

    def _unprepared_dtypes(
        self, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> list[torch.dtype | None]:
        """The dtypes that the unprepared module returns, measured once for each kind of input."""
        if torch.compiler.is_compiling():
            # A call that a kernel refuses must not be traced.
            first = args[0] if args else next(iter(kwargs.values()))
            is_refused = (
                isinstance(self.module, (nn.LayerNorm, nn.GroupNorm))
                and first.dtype not in HALF_DTYPES
            )
            return (
                [first.dtype]
                if is_refused
                else _output_dtypes(self.module, forward, args, kwargs)
            )
        named = {
            **dict(enumerate(args)),
            **kwargs,
            **{f".{n}": p for n, p in self.module._parameters.items()},
        }
        key = tuple((name, _kind(value)) for name, value in named.items())
        if key not in self._output_dtypes:
            # This run's warnings and random draws must not show: its result is not
            # used.
            put_back = random_state(
                accelerators(v for v in named.values() if isinstance(v, torch.Tensor))
            )
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._output_dtypes[key] = _output_dtypes(
                        self.module, forward, args, kwargs
                    )
            finally:
                put_back()
        return self._output_dtypes[key]


def to_float32(value: Any) -> Any:
    """Cast a half tensor; anything else is returned as it is."""
    return (
        value.float()
        if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES
        else value
    )


def float32_shell(module: nn.Module, upcast: Callable[[Any], Any]) -> nn.Module:
    """An object of the module's class that shares its attributes, with half parameters upcast, its children's too."""
    shell = shallow_copy(module)
    fields = shell.__dict__
    fields["_parameters"] = {
        name: p if p is None or is_quantized_parameter(p) else upcast(p)
        for name, p in module._parameters.items()
    }
    # FSDP1 has views of a weight in place of the parameter.
    fields.update(
        {
            name: upcast(value)
            for name, value in fields.items()
            if isinstance(value, torch.Tensor)
        }
    )
    if module._modules:
        fields["_modules"] = {
            n: child and float32_shell(child, upcast)
            for n, child in module._modules.items()
        }
    return shell


def _kind(value: Any) -> Any:
    """The part of an argument that decides the dtype of the output."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (bool, int, str)) else type(value)
    device = value.device.type
    is_autocast = torch.is_autocast_enabled(device)
    return value.dtype, device, is_autocast and torch.get_autocast_dtype(device)


def _output_dtypes(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> list[torch.dtype | None]:
    with torch.no_grad():
        try:
            output = forward(module, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # The kernel refuses this mix of dtypes (layer_norm with float32 input and
            # half weight): no dtype to match.
            output = args[0] if args else next(iter(kwargs.values()))
    parts = [output] if isinstance(output, torch.Tensor) else list(output)
    return [part.dtype if isinstance(part, torch.Tensor) else None for part in parts]


_SLOTS = ("forward", "_old_forward")


class ComputeChange(ChangeBase):
    """Forwards replaced by ``Float32Forward``, on the given modules and on copies of them."""

    def __init__(self) -> None:
        self._installed: list[weakref.ref[Float32Forward]] = []
        self._classes: set[type] = set()  # of their modules, and of copies of these

    def install(self, forward: Float32Forward) -> None:
        """Replace a module's forward."""
        self._installed.append(weakref.ref(forward))
        self._classes.add(class_before_sharding(forward.module))
        vars(forward.module)[forward_slot(forward.module)] = forward

    def _live(self, tree: ModelTree) -> list[Float32Forward]:
        """Every ``Float32Forward`` in the live model, and on modules that have left it."""
        found = {id(f): f for ref in self._installed if (f := ref()) is not None}
        for module in [node.module for node in tree.modules]:
            if class_before_sharding(module) in self._classes:
                ours = [
                    value
                    for value in vars(module).values()
                    if isinstance(value, Float32Forward)
                ]
                found.update(
                    {
                        id(forward): forward
                        for forward in ours
                        if forward.module is module
                    }
                )
        return list(found.values())

    def undo(self, tree: ModelTree) -> None:
        """Put the modules' own forwards back; one that another library wrapped meanwhile becomes inactive."""
        for forward in self._live(tree):
            forward.is_active = False
            for slot in _SLOTS:
                if vars(forward.module).get(slot) is not forward:
                    continue
                inner = forward.inner
                if slot == "_old_forward" and inner is MISSING:
                    # accelerate hooked the module while it was prepared: its record
                    # becomes the class's own.
                    inner = type(forward.module).forward.__get__(forward.module)
                write_attribute(vars(forward.module), slot, inner)

    def now(self, tree: ModelTree) -> WayBack:
        """Record which forwards are there, to install the same objects again."""
        live = self._live(tree)
        installed = [f for f in live if vars(f.module).get(forward_slot(f.module)) is f]

        def resume() -> None:
            for forward in live:
                forward.is_active = True
            for forward in installed:
                vars(forward.module)[forward_slot(forward.module)] = forward

        return Call(resume)


@dataclass(frozen=True, kw_only=True)
class ComputeInFloat32(EditBase):
    """Make modules compute in float32 from their half parameters."""

    modules: tuple[weakref.ref[nn.Module], ...] = field(default=(), repr=False)
    # makes what replaces a module's own
    forward: Callable[[nn.Module], Float32Forward] = field(repr=False)

    def capture(self, tree: ModelTree) -> ComputeChange:
        """Begin a record of the forwards replaced."""
        return ComputeChange()

    def apply(self, change: ComputeChange) -> None:
        """Replace the forwards."""
        for reference in self.modules:
            if (module := reference()) is not None:
                change.install(self.forward(module))
