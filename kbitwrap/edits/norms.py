"""The edit that makes modules compute in float32 from half weights.

The modules are norms and, with another forward, the head.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..model.quantization import is_quantized_parameter
from ..model.tree import ModelTree
from ..tensors.devices import accelerators, random_state
from ..tensors.dtypes import HALF_DTYPES
from .base import Apply, write_attribute
from .journal import MISSING, Journal, Slot, Undoing

Forward = Callable[..., Any]
# of a forward's results; ``None`` for what is no tensor
Dtypes = list[torch.dtype | None]


def forward_attribute(module: nn.Module) -> str:
    """Return the instance attribute of a module's innermost ``forward``.

    accelerate moves it to ``_old_forward``.
    """
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def can_rebind_forward(module: nn.Module) -> bool:
    """Whether a module's ``forward`` can be replaced.

    It is its class's, or one bound to the module, and there are no buffers, which may
    keep statistics.
    """
    if next(module.buffers(), None) is not None:
        return False

    forward = vars(module).get(forward_attribute(module), MISSING)
    return forward is MISSING or (
        isinstance(forward, types.MethodType) and forward.__self__ is module
    )


def computes_in_float32(module: nn.Module) -> bool:
    """Whether a module's forward is replaced by a ``Float32Forward``."""
    return isinstance(vars(module).get(forward_attribute(module)), Float32Forward)


class Float32Forward:
    """A module's own ``forward``, run on float32 casts.

    Half inputs and parameters are cast; the output gets the dtype that the unprepared
    module returns.

    It runs on a shell that shares the module's attributes: the module is not touched,
    so threads, exceptions, recomputation and ``torch.compile`` are safe, and gradients
    reach a trained parameter through the cast.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # the instance's own forward, a bound method; MISSING where it has none
        self.inner: Any = vars(module).get(forward_attribute(module), MISSING)
        # others may hold this after it was removed: then it runs the module's own
        self.is_active = True
        # made before the module is compiled, since torch compiles the making of no class
        for one in module.modules():
            _shell_class(type(one))
        # by the kind of input
        self._output_dtypes: dict[Any, Dtypes] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; in float32 while active."""
        is_of_class = self.inner is MISSING
        forward = type(self.module).forward if is_of_class else self.inner.__func__
        if not self.is_active:
            return forward(self.module, *args, **kwargs)
        return self._run(forward, args, kwargs)

    def install(self) -> None:
        """Replace the module's forward."""
        self.is_active = True
        vars(self.module)[forward_attribute(self.module)] = self

    def remove(self) -> None:
        """Put the module's own forward back; whoever still holds this object gets that too."""
        self.is_active = False
        fields = vars(self.module)
        if fields.get("forward") is self:
            write_attribute(fields, "forward", self.inner)

        if fields.get("_old_forward") is self:
            # accelerate calls what is here: it cannot be absent, as ``forward`` can.
            own = type(self.module).forward.__get__(self.module)
            fields["_old_forward"] = own if self.inner is MISSING else self.inner

    def _run(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run the module's own forward in float32.

        The output gets the dtype of the unprepared module's.
        """
        shell = float32_shell(self.module, to_float32)
        upcast_args, upcast_kwargs = tree_map(to_float32, (args, kwargs))
        leaves, spec = tree_flatten(forward(shell, *upcast_args, **upcast_kwargs))
        for index, dtype in enumerate(self._unprepared_dtypes(forward, args, kwargs)):
            if dtype is not None:
                leaves[index] = leaves[index].to(dtype)

        return tree_unflatten(leaves, spec)

    def _unprepared_dtypes(self, forward: Forward, args: Any, kwargs: Any) -> Dtypes:
        """Return the dtypes that the unprepared module returns.

        They are measured once for each kind of input, by running it. Where it is compiled
        it runs in the trace, and the compiler drops that run, of which only dtypes are used.
        """
        inputs = [*args, *kwargs.values()]
        if torch.compiler.is_compiling():
            # The kernel refuses float32 input with half weights, and the refusal must not be
            # traced: the output gets the input's dtype, as in `_measured_dtypes`.
            refuses = isinstance(self.module, (nn.LayerNorm, nn.GroupNorm))
            if refuses and inputs[0].dtype not in HALF_DTYPES:
                return [inputs[0].dtype]
            return self._measured_dtypes(forward, args, kwargs)

        values = [*inputs, *self.module._parameters.values()]
        key = (*kwargs, *map(_kind, values))
        if key not in self._output_dtypes:
            tensors = [value for value in values if isinstance(value, Tensor)]
            put_back = random_state(accelerators(tensors))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    measured = self._measured_dtypes(forward, args, kwargs)
            finally:
                put_back()
            self._output_dtypes[key] = measured

        return self._output_dtypes[key]

    def _measured_dtypes(self, forward: Forward, args: Any, kwargs: Any) -> Dtypes:
        """Return the dtypes of what the unprepared module returns now."""
        with torch.no_grad():
            try:
                output = forward(self.module, *args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                # The kernel refuses this mix of dtypes (layer_norm with float32 input
                # and half weight): the output is to have the input's dtype.
                output = [*args, *kwargs.values()][0]
        return [getattr(leaf, "dtype", None) for leaf in tree_leaves(output)]


def to_float32(value: Any) -> Any:
    """Cast a half tensor; anything else is returned as it is."""
    if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
        return value.float()
    return value


def float32_shell(module: nn.Module, upcast: Callable[[Any], Any]) -> nn.Module:
    """Return an object like the module, with half parameters upcast.

    Its children's are upcast too. All other attributes are read from the module: torch
    compiles no copy of them before 2.13.

    Args:
        module: A module.
        upcast: Upcasts a tensor.
    """
    shell: nn.Module = object.__new__(_shell_class(type(module)))
    parameters = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and not is_quantized_parameter(parameter):
            parameter = upcast(parameter)
        parameters[name] = parameter
    children = {}
    for name, child in module._modules.items():
        if child is not None:
            child = float32_shell(child, upcast)
        children[name] = child
    object.__setattr__(shell, "_parameters", parameters)
    object.__setattr__(shell, "_buffers", dict(module._buffers))
    object.__setattr__(shell, "_modules", children)
    object.__setattr__(shell, "_kbitwrap_module", module)
    object.__setattr__(shell, "_kbitwrap_upcast", upcast)
    return shell


_shell_classes: dict[type, type] = {}


def _shell_class(cls: Any) -> type:
    """Return a subclass whose objects read from a module what they do not hold."""
    if cls in _shell_classes:
        return _shell_classes[cls]

    def getattr_of_shell(shell: Any, name: str) -> Any:
        for held in (shell._parameters, shell._buffers, shell._modules):
            if name in held:
                return held[name]
        value = getattr(shell._kbitwrap_module, name)
        # FSDP1 has views of a weight in place of the parameter.
        if isinstance(value, Tensor):
            return shell._kbitwrap_upcast(value)
        return value

    made = type(cls.__name__, (cls,), {"__getattr__": getattr_of_shell})
    _shell_classes[cls] = made
    return made


def _kind(value: Any) -> Any:
    """Return the part of an argument that decides the dtype of the output."""
    if isinstance(value, Tensor):
        device = value.device.type
        is_autocast = torch.is_autocast_enabled(device)
        return value.dtype, device, is_autocast and torch.get_autocast_dtype(device)
    return value if isinstance(value, (bool, int, str)) else type(value)


class Forwards(Slot):
    """The forwards of modules, and of copies of these, that `Float32Forward` replaces."""

    def __init__(self) -> None:
        self._installed: list[weakref.ref[Float32Forward]] = []

    def install(self, forward: Float32Forward) -> None:
        """Replace a module's forward."""
        self._installed.append(weakref.ref(forward))
        forward.install()

    def read(self, tree: ModelTree) -> list[tuple[Float32Forward, bool]]:
        """Return every `Float32Forward` in the live model, and whether it runs there.

        The forwards of modules that have left the model are among them.
        """
        found = [ref() for ref in self._installed]
        for node in tree.modules:
            for name in ("forward", "_old_forward"):
                value = vars(node.module).get(name)
                if isinstance(value, Float32Forward) and value.module is node.module:
                    found.append(value)

        live = []
        for one in dict.fromkeys(found):
            if one is not None:
                inner = vars(one.module).get(forward_attribute(one.module))
                live.append((one, inner is one))
        return live

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Put the modules' own forwards back.

        One that another library wrapped meanwhile becomes inactive.
        """
        for forward, _ in self.read(tree):
            forward.remove()

    def resume(self, tree: ModelTree, value: list[tuple[Float32Forward, bool]]) -> None:
        """Install the same objects again."""
        for forward, is_installed in value:
            forward.is_active = True
            if is_installed:
                forward.install()


def compute_in_float32(
    modules: Sequence[weakref.ref[nn.Module]],
    forward: Callable[[nn.Module], Float32Forward],
) -> Apply:
    """Make modules compute in float32 from their half parameters.

    Args:
        modules: The modules.
        forward: Makes the forward that replaces a module's own.
    """

    def apply(journal: Journal, tree: ModelTree) -> None:
        forwards = Forwards()
        journal.save(forwards)
        for module in [reference() for reference in modules]:
            if module is not None:
                forwards.install(forward(module))

    return apply
