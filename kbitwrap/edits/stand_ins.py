"""Float32 tensors in place of half weights: the edit that lets modules use them, and the forward of a head."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ..model.quantization import is_quantized_parameter
from ..model.records import TensorRef
from ..model.tree import ModelTree, NamedTensor, only_reading
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.upcast import UpcastTensor, multiplies_half
from .base import ChangeBase, EditBase, write_attribute
from .journal import MISSING, Call, WayBack
from .norms import Float32Forward, float32_shell, to_float32


class HeadForward(Float32Forward):
    """A head's own ``forward`` without autocast, its half weight upcast at use; the output stays float32."""

    def __init__(self, module: nn.Module, chunk_bytes: int | None) -> None:
        super().__init__(module)
        self._chunk_bytes = chunk_bytes

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        shell = float32_shell(self.module, self._upcast)
        weight: Any = shell.weight
        device = weight.device.type
        is_product = (
            forward is nn.Linear.forward
            and shell.bias is None
            and isinstance(weight, UpcastTensor)
        )
        if not (is_product and args and multiplies_half(args[0], weight.half_storage)):
            args, kwargs = (
                map(to_float32, args),
                {name: to_float32(value) for name, value in kwargs.items()},
            )
        with torch.autocast(
            device if torch.amp.is_autocast_available(device) else "cpu", enabled=False
        ):
            return forward(shell, *args, **kwargs)

    def _upcast(self, parameter: torch.Tensor) -> torch.Tensor:
        is_trained = parameter.requires_grad and torch.is_grad_enabled()
        if (
            parameter.dtype not in HALF_DTYPES
            or is_trained
            or torch.compiler.is_compiling()
        ):
            return to_float32(parameter)  # type: ignore[no-any-return]
        return UpcastTensor(parameter, None, self._chunk_bytes)


class Float32Copy:
    """An instance's ``__deepcopy__``: PEFT trains such copies, and they store half weights in float32."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module, without stand-ins; parameters shared with other modules stay shared among the copies."""
        module = self.module
        result: nn.Module = object.__new__(type(module))
        memo[id(module)] = result
        for parameter in module._parameters.values():
            if (
                parameter is None
                or id(parameter) in memo
                or is_quantized_parameter(parameter)
            ):
                continue
            if parameter.dtype in HALF_DTYPES:
                upcast = parameter.detach().float()
                memo[id(parameter)] = nn.Parameter(
                    upcast, requires_grad=parameter.requires_grad
                )
        for name, value in vars(module).items():
            if not isinstance(value, (UpcastTensor, Float32Copy, StandInState)):
                result.__dict__[name] = copy.deepcopy(value, memo)
        return result


class StandInState:
    """An instance's ``__getstate__``: a pickle of a module keeps its stand-ins and their half weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> dict[str, Any]:
        """The module's attributes, with each stand-in marked as the module's own."""
        state = getattr(type(self.module), "__getstate__", vars)(self.module)
        return {
            k: value.as_state() if isinstance(value, UpcastTensor) else value
            for k, value in state.items()
        }


class Float32First:
    """An instance's ``parameters`` with a stand-in for the first: a model takes the dtype of its first for its own."""

    def __init__(self, module: nn.Module, owner: nn.Module, name: str) -> None:
        self.module = module
        self.owner = owner
        self.name = name

    def __call__(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield each of the module's parameters once, in their order."""
        weight = self.owner._parameters.get(self.name) if recurse else None
        for parameter in type(self.module).parameters(self.module, recurse):
            yield (
                vars(self.owner).get(self.name, weight)
                if parameter is weight
                else parameter
            )


def can_stand_in(module: nn.Module, name: str) -> bool:
    """Whether an instance attribute can stand in for a parameter, which must not be renormalized in place."""
    is_renormalized = isinstance(module, nn.Embedding) and module.max_norm is not None
    is_taken = {name, "__deepcopy__", "__getstate__"} & vars(module).keys() or hasattr(
        type(module), name
    )
    return not (is_taken or is_renormalized)


class UpcastChange(ChangeBase):
    """Instance attributes that stand in for parameters, and follow weights that are tied, parametrized or loaded."""

    def __init__(self, tree: ModelTree, chunk_bytes: int | None) -> None:
        self._records, self._chunk_bytes = tree.records, chunk_bytes
        self._names: weakref.WeakKeyDictionary[nn.Module, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._model = weakref.ref(tree.model)
        self._readers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hook: RemovableHandle | None = None

    def install(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Put a stand-in in front of a module's parameter."""
        self._names.setdefault(module, set()).add(name)
        vars(module)[name] = UpcastTensor(
            parameter, (module, name), self._chunk_bytes, held=parameter
        )
        vars(module)["__deepcopy__"] = Float32Copy(module)
        vars(module)["__getstate__"] = StandInState(module)
        self._records.mark(module).dtypes[name] = parameter.dtype

    def put_float32_first(self) -> None:
        """Put the stand-in first in each module with children that would begin with one of the weights."""
        model = self._model()
        assert model is not None
        tree = ModelTree(model)
        first: dict[str, NamedTensor] = {}
        with only_reading():
            for tensor in tree.all_tensors:
                owner = tensor.path.rpartition(".")[0]
                while owner not in first and tensor.parameter.is_floating_point():
                    first[owner] = tensor
                    owner = owner.rpartition(".")[0]
        for node in tree.modules:
            module, begins = node.module, first.get(node.path)
            if begins is None or begins.name not in self._names.get(begins.module, ()):
                continue
            if module._modules and "parameters" not in vars(module):
                vars(module)["parameters"] = Float32First(
                    module, begins.module, begins.name
                )
                self._readers.add(module)

    def follow(self) -> None:
        """Begin to follow weights that are registered again."""
        if self._hook is None:
            change = weakref.ref(self)

            def registered(
                module: nn.Module, name: str, parameter: nn.Parameter
            ) -> nn.Parameter | None:
                live = change()
                return (
                    None if live is None else live._registered(module, name, parameter)
                )

            # torch annotates the hook as one that returns nothing, and registers what
            # it returns.
            self._hook = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
            weakref.finalize(self, self._hook.remove)

    def _registered(
        self, module: nn.Module, name: str, parameter: nn.Parameter
    ) -> nn.Parameter | None:
        """The parameter to register instead, if any: for a stand-in its half weight; the new place gets a stand-in."""
        if isinstance(module, ParametrizationList):
            # The owner gives the weight away, and gets a property in its place.
            for owner, own_name in self._attributes():
                if vars(owner).get(own_name) is parameter:
                    del vars(owner)[own_name]
        if isinstance(parameter, UpcastTensor):
            place = parameter.owner
            if place is None or place[1] not in self._names.get(place[0], ()):
                return None
            if not parameter.is_whole:
                return nn.Parameter(
                    parameter.clone(), requires_grad=parameter.requires_grad
                )
            half = parameter.parameter
        else:
            if parameter.dtype not in HALF_DTYPES or parameter.requires_grad:
                return None
            if name not in self._names.get(module, ()) and not self._is_taken(
                parameter, module
            ):
                return None
            half = parameter
        self.install(module, name, half)
        return half

    def _is_taken(self, parameter: nn.Parameter, module: nn.Module) -> bool:
        """Whether another module than this has a stand-in for a parameter: PEFT registers a layer's in its copies."""
        if any(own is parameter for own in module._parameters.values()):
            return False  # a second name is no weight that the module uses
        for owner, names in self._names.items():
            if any(
                getattr(vars(owner).get(name), "held", None) is parameter
                for name in names
            ):
                return True
        return False

    def _attributes(self, tree: ModelTree | None = None) -> list[tuple[nn.Module, str]]:
        """The places of stand-ins: on the weights' owners and, given a tree, on modules that put float32 first."""
        owners = [
            (module, name)
            for module, names in self._names.items()
            for name in (*sorted(names), "__deepcopy__", "__getstate__")
        ]
        if tree is None:
            return owners
        # In the live model, PEFT's copies too.
        modules = dict.fromkeys(
            [*self._readers, *(node.module for node in tree.modules)]
        )
        return owners + [
            (m, "parameters")
            for m in modules
            if isinstance(vars(m).get("parameters"), Float32First)
        ]

    def undo(self, tree: ModelTree) -> None:
        """Remove the stand-ins, so that the parameters are seen again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for module, name in self._attributes(tree):
            value = vars(module).get(name)
            if isinstance(value, UpcastTensor):
                value._is_param, value.held = False, None
            if isinstance(
                value, (UpcastTensor, Float32Copy, StandInState, Float32First)
            ):
                del vars(module)[name]

    def now(self, tree: ModelTree) -> WayBack:
        """Record the current stand-ins."""
        current = [
            (module, name, vars(module).get(name, MISSING))
            for module, name in self._attributes(tree)
        ]

        def resume() -> None:
            for module, name, value in current:
                if isinstance(value, UpcastTensor):
                    held = module._parameters.get(name)
                    if held is None:
                        continue  # others moved it meanwhile
                    value._is_param, value.held = True, held
                write_attribute(vars(module), name, value)
            self.follow()

        return Call(resume)


@dataclass(frozen=True, kw_only=True)
class UpcastAtUse(EditBase):
    """Make modules see and use half weights as float32, through a stand-in that upcasts at each use."""

    weights: tuple[TensorRef, ...] = field(repr=False)
    chunk_bytes: int | None = None

    def capture(self, tree: ModelTree) -> UpcastChange:
        """Begin a record of the stand-ins: a planned edit finds none."""
        return UpcastChange(tree, self.chunk_bytes)

    def apply(self, change: UpcastChange) -> None:
        """Install the stand-ins, and follow the weights."""
        for ref in self.weights:
            module, parameter = ref.owner(), ref()
            if module is not None and parameter is not None:
                change.install(module, ref.name, parameter)
        change.put_float32_first()
        change.follow()
