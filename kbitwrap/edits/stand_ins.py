"""Float32 tensors that stand in for half weights.

Here are the edit that lets modules use them, and the forward of a head.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
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
from .base import Apply
from .journal import Journal, Slot, Undoing
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
        shell = float32_shell(self.module, self._upcast)
        weight: Any = shell.weight
        is_product = forward is nn.Linear.forward and shell.bias is None
        multiplies = isinstance(weight, UpcastTensor) and is_product and args
        # A half input stays half only where the device multiplies half into float32;
        # elsewhere the product would be rounded.
        if not (multiplies and multiplies_half(args[0], weight.half_storage)):
            args = map(to_float32, args)
            kwargs = {name: to_float32(value) for name, value in kwargs.items()}

        device = weight.device.type
        if not torch.amp.is_autocast_available(device):
            device = "cpu"

        with torch.autocast(device, enabled=False):
            return forward(shell, *args, **kwargs)

    def _upcast(self, parameter: torch.Tensor) -> Any:
        """Return a stand-in for a frozen half parameter, or a float32 copy."""
        is_trained = parameter.requires_grad and torch.is_grad_enabled()
        if parameter.dtype not in HALF_DTYPES or is_trained:
            return to_float32(parameter)

        if torch.compiler.is_compiling():
            return to_float32(parameter)

        return UpcastTensor(parameter, None, self._chunk_bytes)


class StandInMethod:
    """A function that stands in front of a module's method, as an instance attribute."""

    def __init__(self, module: nn.Module, function: Any, *first: Any) -> None:
        self.module = module
        self._function = function
        self._first = first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the module, its own arguments and those given."""
        return self._function(self.module, *self._first, *args, **kwargs)


STAND_INS = (UpcastTensor, StandInMethod)


def copy_in_float32(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module, without stand-ins: its ``__deepcopy__``.

    PEFT trains such copies, and they store half weights in float32. Parameters shared
    with other modules stay shared among the copies.
    """
    result = object.__new__(type(module))
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


def mark_in_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with each stand-in marked as the module's own: its ``__getstate__``.

    A pickle of the module keeps its stand-ins and their half weights.
    """
    state: dict[str, Any] = getattr(type(module), "__getstate__", vars)(module)
    marked = {}
    for name, value in state.items():
        if isinstance(value, UpcastTensor):
            marked[name] = value.as_state()
    return {**state, **marked}


def apply_and_follow(
    module: nn.Module, fn: Callable[..., Any], recurse: bool = True
) -> nn.Module:
    """Apply a function to all tensors, and let the stand-ins name their device: a module's ``_apply``.

    By it torch moves the module to another device.
    """
    type(module)._apply(module, fn, recurse)
    for value in list(vars(module).values()):
        if isinstance(value, UpcastTensor):
            value.follow_device()

    return module


# Those that stand in wherever a weight is stood in for.
_METHODS: dict[str, Callable[..., Any]] = {
    "__deepcopy__": copy_in_float32,
    "__getstate__": mark_in_state,
    "_apply": apply_and_follow,
}


def float32_first(
    module: nn.Module, owner: nn.Module, name: str, recurse: bool = True
) -> Iterator[nn.Parameter]:
    """Yield each of a module's parameters once, with a stand-in for the first: its ``parameters``.

    A model takes the dtype of its first parameter for its own.
    """
    weight = owner._parameters.get(name) if recurse else None
    for parameter in type(module).parameters(module, recurse):
        if parameter is weight:
            parameter = vars(owner).get(name, weight)
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


# The slots that follow weights that are registered again, and torch's hook for them.
_followers: tuple[weakref.ref[StandIns], ...] = ()
_hook: RemovableHandle | None = None


def _follow(slot: StandIns, is_followed: bool) -> None:
    """Begin or end to follow the weights of a slot.

    Only here does torch's hook come and go: when a garbage collection frees a slot,
    torch may be stepping through its hooks.
    """
    global _followers, _hook
    others = [one for one in _followers if one() not in (None, slot)]
    _followers = (*others, weakref.ref(slot)) if is_followed else tuple(others)
    if _followers and _hook is None:
        _hook = register_module_parameter_registration_hook(_registered)
    elif not _followers and _hook is not None:
        _hook.remove()
        _hook = None


def _registered(module: nn.Module, name: str, parameter: Any) -> Any:
    """Return the parameter to register instead, as each slot that follows has it."""
    for follower in _followers:
        slot = follower()
        if slot is not None:
            parameter = slot.registered(module, name, parameter)
    return parameter


class StandIns(Slot):
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
        for method, function in _METHODS.items():
            vars(module)[method] = StandInMethod(module, function)
        mark = self._records.mark_of(module)
        if mark is not None:  # of what the model is a part of, nothing is to be left
            mark.dtypes[name] = parameter.dtype

    def _weights(self) -> Iterator[UpcastTensor]:
        """Yield the stand-ins of weights."""
        for module, names in self._names.items():
            for name in names:
                value = vars(module).get(name)
                if isinstance(value, UpcastTensor):
                    yield value

    def put_float32_first(self, model: nn.Module) -> None:
        """Put a stand-in first among a module's ``parameters()``.

        It is done in each module with children that would begin with one of the
        weights.
        """
        weights: dict[int, UpcastTensor] = {}
        for weight in self._weights():
            weights.setdefault(id(weight.held), weight)

        for module in model.modules():
            if not module._modules or "parameters" in vars(module):
                continue
            floating = filter(torch.is_floating_point, module.parameters())
            first = weights.get(id(next(floating, None)))
            if first is not None and first.owner is not None:
                own = StandInMethod(module, float32_first, *first.owner)
                vars(module)["parameters"] = own
                self._names.setdefault(module, set())

    def registered(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """Return the parameter to register: for a stand-in it is the half weight.

        The new place gets a stand-in.
        """
        if isinstance(module, ParametrizationList):
            # The owner gets a property in place of the stand-in, which may be another
            # kind of tensor by now: torch swaps what it parametrizes.
            for owner, names in self._names.items():
                for own in names:
                    if vars(owner).get(own) is parameter:
                        del vars(owner)[own]

        half = parameter
        if isinstance(parameter, UpcastTensor):
            owner, own = parameter.owner or (module, "")
            if own not in self._names.get(owner, ()):
                return parameter  # of another model's weight
            if not parameter.is_whole:
                # A part of a weight, or a view to be trained, is float32 by itself.
                return nn.Parameter(parameter.clone(), parameter.requires_grad)
            half = parameter.parameter
        elif not self._is_weight(module, name, parameter):
            return parameter

        self.install(module, name, half)
        return half

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

        return any(weight.held is parameter for weight in self._weights())

    def read(self, tree: ModelTree) -> list[tuple[nn.Module, str, Any]]:
        """Return all that stands in by module and name, on PEFT's copies too."""
        modules = [*self._names, *[node.module for node in tree.modules]]
        found = []
        for module in dict.fromkeys(modules):
            for name, value in vars(module).items():
                if isinstance(value, STAND_INS):
                    found.append((module, name, value))

        return found

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Remove the stand-ins, so that the parameters are seen again."""
        _follow(self, False)
        for module, name, value in self.read(tree):
            if isinstance(value, UpcastTensor):
                value._is_param = False
                value.held = None
                _hold_parameters_in(dict, module)
            del vars(module)[name]

    def resume(self, tree: ModelTree, value: list[tuple[nn.Module, str, Any]]) -> None:
        """Install the stand-ins again, but where others moved the parameter."""
        for module, name, one in value:
            if isinstance(one, UpcastTensor):
                held = module._parameters.get(name)
                if held is None:
                    continue
                one._is_param = True
                one.held = held
                _hold_parameters_in(OrderedDict, module)
            vars(module)[name] = one
        _follow(self, True)


def upcast_at_use(refs: Sequence[TensorRef], chunk_bytes: int | None) -> Apply:
    """Make modules see and use half weights as float32, by stand-ins that follow them.

    Args:
        refs: The places of the weights, all those of a tied one.
        chunk_bytes: The most float32 of a weight in a matrix product, in bytes.
    """

    def apply(journal: Journal, tree: ModelTree) -> None:
        slot = StandIns(tree.records, chunk_bytes)
        journal.save(slot)
        for ref in refs:
            module, parameter = ref.owner(), ref()
            if module is not None and parameter is not None:
                slot.install(module, ref.name, parameter)

        slot.put_float32_first(tree.model)
        _follow(slot, True)

    return apply
