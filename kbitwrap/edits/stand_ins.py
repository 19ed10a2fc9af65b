"""Float32 tensors that stand in for half weights.

Here are the edit that lets modules use them, and the forward of a head.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ..model.quantization import is_quantized_parameter
from ..model.records import Records, TensorRef
from ..model.tree import ModelTree
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.upcast import UpcastTensor, multiplies_half
from .base import EditBase
from .journal import Call, WayBack
from .norms import Float32Forward, float32_shell, to_float32


class HeadForward(Float32Forward):
    """A head's own ``forward``, its half weight upcast at use.

    It runs without autocast, and the output stays float32.
    """

    def __init__(self, module: nn.Module, chunk_bytes: int | None) -> None:
        super().__init__(module)
        self._chunk_bytes = chunk_bytes

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the head's own forward in float32, without autocast."""
        shell = float32_shell(self.module, self._upcast, self.shell_classes)
        weight: Any = shell.weight
        is_product = forward is nn.Linear.forward and shell.bias is None
        multiplies = isinstance(weight, UpcastTensor) and is_product and args
        # Else a half input would be multiplied in half.
        if not (multiplies and multiplies_half(args[0], weight.half_storage)):
            args = map(to_float32, args)
            kwargs = {name: to_float32(value) for name, value in kwargs.items()}

        device = weight.device.type
        if not torch.amp.is_autocast_available(device):
            device = "cpu"

        with torch.autocast(device, enabled=False):
            return forward(shell, *args, **kwargs)

    def _upcast(self, parameter: torch.Tensor) -> Any:
        """A stand-in for a frozen half parameter, or a float32 copy."""
        is_trained = parameter.requires_grad and torch.is_grad_enabled()
        if parameter.dtype not in HALF_DTYPES or is_trained:
            return to_float32(parameter)

        if torch.compiler.is_compiling():
            return to_float32(parameter)

        return UpcastTensor(parameter, None, self._chunk_bytes)


class StandInMethod:
    """A callable that stands in front of a module's method, as an instance attribute."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


STAND_INS = (UpcastTensor, StandInMethod)


class Float32Copy(StandInMethod):
    """An instance's ``__deepcopy__``.

    PEFT trains such copies, and they store half weights in float32.
    """

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module, without stand-ins.

        Parameters shared with other modules stay shared among the copies.
        """
        module = self.module
        result: nn.Module = object.__new__(type(module))
        memo[id(module)] = result
        for parameter in module._parameters.values():
            if parameter is None or parameter.dtype not in HALF_DTYPES:
                continue
            if id(parameter) not in memo and not is_quantized_parameter(parameter):
                memo[id(parameter)] = nn.Parameter(
                    parameter.detach().float(), requires_grad=parameter.requires_grad
                )

        for name, value in vars(module).items():
            if not isinstance(value, STAND_INS):
                result.__dict__[name] = copy.deepcopy(value, memo)

        _hold_parameters_in(dict, result)
        return result


class StandInState(StandInMethod):
    """An instance's ``__getstate__``.

    A pickle of a module keeps its stand-ins and their half weights.
    """

    def __call__(self) -> dict[str, Any]:
        """The module's attributes, with each stand-in marked as the module's own."""
        state = getattr(type(self.module), "__getstate__", vars)(self.module)
        stand_ins = {
            name: value
            for name, value in state.items()
            if isinstance(value, UpcastTensor)
        }
        marked = {name: value.as_state() for name, value in stand_ins.items()}
        return {**state, **marked}


class FollowedApply(StandInMethod):
    """An instance's ``_apply``, by which torch moves a module to another device."""

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """Apply a function to all tensors, and let the stand-ins name their device."""
        type(self.module)._apply(self.module, fn, recurse)
        for value in list(vars(self.module).values()):
            if isinstance(value, UpcastTensor):
                value.follow_device()

        return self.module


# Those that stand in wherever a weight is stood in for.
_METHODS: dict[str, type[StandInMethod]] = {
    "__deepcopy__": Float32Copy,
    "__getstate__": StandInState,
    "_apply": FollowedApply,
}


class Float32First(StandInMethod):
    """An instance's ``parameters`` with a stand-in for the first.

    A model takes the dtype of its first parameter for its own.
    """

    def __init__(self, module: nn.Module, owner: nn.Module, name: str) -> None:
        super().__init__(module)
        self.owner = owner
        self.name = name

    def __call__(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield each of the module's parameters once, in their order."""
        weight = self.owner._parameters.get(self.name) if recurse else None
        for parameter in type(self.module).parameters(self.module, recurse):
            if parameter is weight:
                parameter = vars(self.owner).get(self.name, weight)
            yield parameter


def can_stand_in(module: nn.Module, name: str) -> bool:
    """Whether an instance attribute can stand in for a parameter.

    The parameter must not be renormalized in place.
    """
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return False

    is_taken = vars(module).keys() & {name, *_METHODS}
    return not is_taken and not hasattr(type(module), name)


def _hold_parameters_in(kind: type[dict[str, Any]], module: nn.Module) -> None:
    """Let a module hold its parameters in a ``dict``, or in an ``OrderedDict``.

    ``torch.compile`` runs what it compiled for one module with another where its guards
    find no difference. They look at the kind of dict, and not at a stand-in.
    """
    held = module._parameters
    if type(held) in (dict, OrderedDict) and type(held) is not kind:
        vars(module)["_parameters"] = kind(held)


@dataclass
class _Installed:
    """An instance attribute that stands in for a parameter or a method."""

    module: nn.Module
    name: str
    value: Any

    def remove(self) -> None:
        """Remove it, so that what it stands in for is seen again."""
        if isinstance(self.value, UpcastTensor):
            self.value._is_param = False
            self.value.held = None
            _hold_parameters_in(dict, self.module)
        del vars(self.module)[self.name]

    def put_back(self) -> None:
        """Install it again, unless others moved its parameter meanwhile."""
        if isinstance(self.value, UpcastTensor):
            held = self.module._parameters.get(self.name)
            if held is None:
                return
            self.value._is_param = True
            self.value.held = held
            _hold_parameters_in(OrderedDict, self.module)
        vars(self.module)[self.name] = self.value


# The changes that follow weights that are registered again, and torch's hook for them.
_followers: tuple[weakref.ref[UpcastChange], ...] = ()
_hook: RemovableHandle | None = None


def _follow(change: UpcastChange, is_followed: bool) -> None:
    """Begin or end to follow the weights of a change.

    Only here does torch's hook come and go: when a garbage collection frees a change,
    torch may be stepping through its hooks.
    """
    global _followers, _hook
    others = [one for one in _followers if one() not in (None, change)]
    _followers = (*others, weakref.ref(change)) if is_followed else tuple(others)
    if _followers and _hook is None:
        _hook = register_module_parameter_registration_hook(_registered)
    elif not _followers and _hook is not None:
        _hook.remove()
        _hook = None


def _registered(module: nn.Module, name: str, parameter: Any) -> Any:
    """The parameter to register instead, as each change that follows has it."""
    for follower in _followers:
        change = follower()
        if change is not None:
            instead = change.registered(module, name, parameter)
            parameter = parameter if instead is None else instead
    return parameter


class UpcastChange:
    """Instance attributes that stand in for parameters.

    They follow weights that are tied, parametrized or loaded.

    Args:
        records: The records of the preparation, which mark modules.
        chunk_bytes: The most float32 of a weight in a matrix product, in bytes;
            ``None`` for all of it.
    """

    def __init__(self, records: Records, chunk_bytes: int | None) -> None:
        self._records = records
        self._chunk_bytes = chunk_bytes
        # of each module, the names of the weights; none of one that has them first
        self._names: weakref.WeakKeyDictionary[nn.Module, set[str]] = (
            weakref.WeakKeyDictionary()
        )

    def install(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Put a stand-in in front of a module's parameter."""
        self._names.setdefault(module, set()).add(name)
        vars(module)[name] = UpcastTensor(
            parameter, (module, name), self._chunk_bytes, held=parameter
        )
        _hold_parameters_in(OrderedDict, module)
        for method, stand_in in _METHODS.items():
            vars(module)[method] = stand_in(module)
        mark = self._records.mark_of(module)
        if mark is not None:  # of what the model is a part of, nothing is to be left
            mark.dtypes[name] = parameter.dtype

    def _weights(self) -> Iterator[_Installed]:
        """The stand-ins of weights."""
        for module, names in self._names.items():
            for name in names:
                value = vars(module).get(name)
                if isinstance(value, UpcastTensor):
                    yield _Installed(module, name, value)

    def put_float32_first(self, model: nn.Module) -> None:
        """Put a stand-in first among a module's ``parameters()``.

        It is done in each module with children that would begin with one of the
        weights.
        """
        weights: dict[int, _Installed] = {}
        for weight in self._weights():
            weights.setdefault(id(weight.value.held), weight)

        for module in model.modules():
            if not module._modules or "parameters" in vars(module):
                continue
            floating = filter(torch.is_floating_point, module.parameters())
            first = weights.get(id(next(floating, None)))
            if first is None:
                continue
            stand_in = Float32First(module, first.module, first.name)
            vars(module)["parameters"] = stand_in
            self._names.setdefault(module, set())

    def registered(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """The parameter to register instead, or ``None`` to register this one.

        For a stand-in it is the half weight, and the new place gets a stand-in.
        """
        if isinstance(module, ParametrizationList):
            self._give_away(parameter)

        if not isinstance(parameter, UpcastTensor):
            if not self._is_weight(module, name, parameter):
                return None
            half = parameter
        else:
            if not self._is_ours(parameter):
                return None
            if not parameter.is_whole:
                # A part of a weight, or a view to be trained, is float32 by itself.
                return nn.Parameter(parameter.clone(), parameter.requires_grad)
            half = parameter.parameter

        self.install(module, name, half)
        return half

    def _give_away(self, parameter: Any) -> None:
        """Remove a stand-in whose owner gets a property in its place.

        It may be another kind of tensor by now: torch swaps what it parametrizes.
        """
        for module, names in self._names.items():
            for name in names:
                if vars(module).get(name) is parameter:
                    del vars(module)[name]

    def _is_ours(self, stand_in: UpcastTensor) -> bool:
        """Whether a stand-in is of one of the weights."""
        if stand_in.owner is None:
            return False

        module, name = stand_in.owner
        return name in self._names.get(module, ())

    def _is_weight(self, module: nn.Module, name: str, parameter: Any) -> bool:
        """Whether a parameter is registered where one of the weights is or is shared.

        PEFT registers a layer's parameters in its copies of the layer.
        """
        if parameter.dtype not in HALF_DTYPES or parameter.requires_grad:
            return False

        if name in self._names.get(module, ()):
            return True

        if any(own is parameter for own in module._parameters.values()):
            return False  # a second name is no weight that the module uses

        return any(weight.value.held is parameter for weight in self._weights())

    def _installed(self, tree: ModelTree) -> list[_Installed]:
        """All that was installed and is there, on PEFT's copies too."""
        modules = [*self._names, *[node.module for node in tree.modules]]
        found = []
        for module in dict.fromkeys(modules):
            for name, value in vars(module).items():
                if isinstance(value, STAND_INS):
                    found.append(_Installed(module, name, value))

        return found

    def undo(self, tree: ModelTree) -> None:
        """Remove the stand-ins, so that the parameters are seen again."""
        _follow(self, False)
        for one in self._installed(tree):
            one.remove()

    def now(self, tree: ModelTree) -> WayBack:
        """Record the current stand-ins."""
        current = self._installed(tree)

        def resume() -> None:
            for one in current:
                one.put_back()
            _follow(self, True)

        return Call(resume)


@dataclass(frozen=True, kw_only=True)
class UpcastAtUse(EditBase):
    """Make modules see and use half weights as float32.

    A stand-in in front of each weight upcasts it at each use.

    Attributes:
        weights: The places of the weights, all those of a tied one.
        chunk_bytes: The most float32 of a weight in a matrix product, in bytes.
    """

    weights: tuple[TensorRef, ...] = field(repr=False)
    chunk_bytes: int | None = None

    def capture(self, tree: ModelTree) -> list[UpcastChange]:
        """Begin a record of the stand-ins: a planned edit finds none."""
        return [UpcastChange(tree.records, self.chunk_bytes)]

    def apply(self, changes: list[UpcastChange], tree: ModelTree) -> None:
        """Install the stand-ins, and follow the weights."""
        change = changes[0]
        for ref in self.weights:
            module = ref.owner()
            parameter = ref()
            if module is not None and parameter is not None:
                change.install(module, ref.name, parameter)

        change.put_float32_first(tree.model)
        _follow(change, True)
