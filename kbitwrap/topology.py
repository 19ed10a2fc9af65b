"""What is wrapped around a model, and what a tensor is called underneath.

A tensor is identified by the module that owns it and by its canonical name: the fully qualified name (fqn) it had
before PEFT, DDP, FSDP, ``torch.compile`` or an activation-checkpoint wrapper put their own parts into the name.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from .errors import UnsupportedModelError

_LEADING = re.compile(
    r"^(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)(?:\.|$)"
)
_INNER = re.compile(
    r"\.(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|original_module|token_adapter"
    r"|(?:modules_to_save|ln_tuning_layers)\.[^.]+)(?=\.|$)"
)


P = ParamSpec("P")
T = TypeVar("T")
_walks: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar("kbitwrap_walks", default=None)


@contextlib.contextmanager
def walking_once() -> Iterator[None]:
    """Inside, a model's modules and parameters stay the ones they are, so each kind of walk over it is done once.

    Attributes, flags and what parameters store may change.
    """
    walks = _walks.get()
    token = _walks.set({} if walks is None else walks)
    try:
        yield
    finally:
        _walks.reset(token)


@contextlib.contextmanager
def only_reading() -> Iterator[None]:
    """``walking_once``, and the fields of tensors are read without asking their classes, which takes longer."""
    with walking_once(), torch._C.DisableTorchFunctionSubclass():
        yield


@contextlib.contextmanager
def seeing_changes(model: nn.Module) -> Iterator[None]:
    """Inside, somebody else's code has the model: if it replaces a module or a parameter, every walk is done anew.

    Args:
        model: The model.
    """
    modules = [module for _, module in named_modules(model)]
    before = _contents(modules)  # the objects, whose ids are then nobody else's
    try:
        yield
    finally:
        walks = _walks.get()
        if walks is not None and list(map(_identity, _contents(modules))) != list(map(_identity, before)):
            walks.clear()


def _contents(modules: list[nn.Module]) -> list[tuple[str, Any]]:
    """Each of some modules, and after it what it holds, with the names of that."""
    found: list[tuple[str, Any]] = []
    for module in modules:
        found.append(("", module))
        found += module._modules.items()
        found += module._parameters.items()
    return found


def _identity(item: tuple[str, Any]) -> tuple[str, int]:
    return item[0], id(item[1])


def kept_while_walking(function: Callable[P, T]) -> Callable[P, T]:
    """A function of a model whose result ``walking_once`` keeps; nobody may change it."""

    @functools.wraps(function)
    def kept(*args: P.args, **kwargs: P.kwargs) -> T:
        walks = _walks.get()
        if walks is None:
            return function(*args, **kwargs)
        model, *options = args
        key = (function, id(model), *options, *kwargs.items())
        if key not in walks:
            walks[key] = model, function(*args, **kwargs)  # the model too, for its id to stay its own
        found: T = walks[key][1]
        return found

    return kept


class NamedTensor(NamedTuple):
    """A parameter where it lives: ``module._parameters[name] is parameter``."""

    fqn: str
    module: nn.Module
    name: str
    parameter: nn.Parameter


@functools.lru_cache(maxsize=1 << 16)
def canonical_fqn(fqn: str) -> str:
    """Strip from a fully qualified name what wrappers put into it.

    A ``modules_to_save`` copy gets the name of the module that it is a copy of. The parts are those of PEFT, DDP,
    FSDP, ``torch.compile`` and ``checkpoint_wrapper``. A prompt-learning ``PeftModel`` has the model itself at
    ``base_model``, which no name can tell from an adapter's ``base_model.model``; its names are not canonical.

    Args:
        fqn: The name of a module or a tensor.

    Returns:
        The name in the unwrapped model.

    Example:
        >>> canonical_fqn("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
        'model.layers.0.self_attn.q_proj.weight'
        >>> canonical_fqn("base_model.model.lm_head.modules_to_save.default.weight")
        'lm_head.weight'
    """
    while match := _LEADING.match(fqn):
        fqn = fqn[match.end() :]
    return _INNER.sub("", "." + fqn)[1:]


@kept_while_walking
def named_modules(model: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """List the modules of a model, as ``model.named_modules()`` does, in a tenth of its time.

    Args:
        model: The model.
        remove_duplicate: List each module once, under the first name it has.

    Returns:
        ``(fqn, module)`` in depth-first order.
    """
    if remove_duplicate:
        every = named_modules(model, remove_duplicate=False)
        first: dict[int, tuple[str, nn.Module]] = {}
        for place in every:
            first.setdefault(id(place[1]), place)
        return list(first.values())
    found: list[tuple[str, nn.Module]] = []
    stack = [("", model)]
    while stack:
        fqn, module = stack.pop()
        found.append((fqn, module))
        if module._modules:
            prefix = f"{fqn}." if fqn else ""
            stack += [(prefix + name, m) for name, m in reversed(module._modules.items()) if m is not None]
    return found


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class whose parameters, buffers and children can be replaced; all else is shared."""
    made: nn.Module = object.__new__(type(module))
    fields = made.__dict__
    fields.update(module.__dict__)
    fields.update({name: dict(fields[name]) for name in ("_parameters", "_buffers", "_modules")})
    return made


def owners(model: nn.Module) -> set[int]:
    """Find the modules that hold parameters themselves, by which models are told apart.

    One that holds none may be part of many models at once, such as an activation function kept by a library.

    Args:
        model: The model.

    Returns:
        The ``id`` of each.
    """
    return {id(module) for _, module in named_modules(model) if module._parameters}


class Places:
    """Where each module of a model is, for finding it again through wrappers, copies and merges.

    Args:
        model: The model.

    Attributes:
        by_name: Class and number of the module at each canonical name, a shared module under each of its names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._references: list[weakref.ref[nn.Module]] = []
        self._numbers: dict[int, int] = {}
        self.by_name: dict[str, tuple[type, int]] = {}
        for fqn, module in named_modules(model, remove_duplicate=False):
            number = self._numbers.setdefault(id(module), len(self._references))
            if number == len(self._references):
                self._references.append(weakref.ref(module))
            self.by_name[canonical_fqn(fqn)] = type(module), number

    def number(self, module: nn.Module) -> int | None:
        """The number of a module, in the order of ``named_modules``; ``None`` of one that was not there."""
        number = self._numbers.get(id(module))
        return number if number is not None and self._references[number]() is module else None

    def live(self) -> list[tuple[int, nn.Module]]:
        """The modules that are still alive, each with its number."""
        return [(n, m) for n, reference in enumerate(self._references) if (m := reference()) is not None]


@kept_while_walking
def places(model: nn.Module) -> Places:
    """Find where the modules of a model are now.

    Args:
        model: The model.

    Returns:
        Their places.
    """
    return Places(model)


@kept_while_walking
def named_tensors(model: nn.Module, *, remove_duplicate: bool = True) -> list[NamedTensor]:
    """List the parameters of a model, with their owners.

    Args:
        model: The model.
        remove_duplicate: List each parameter object once, under the first name it has.

    Returns:
        The parameters, in the order of ``model.named_parameters()``.
    """
    if remove_duplicate:
        every = named_tensors(model, remove_duplicate=False)
        first: dict[int, NamedTensor] = {}
        for tensor in every:
            first.setdefault(id(tensor.parameter), tensor)
        return list(first.values())
    return [
        NamedTensor(f"{prefix}.{name}" if prefix else name, module, name, parameter)
        for prefix, module in named_modules(model, remove_duplicate=False)
        if module._parameters
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _loaded(module_name: str, attribute: str) -> type | tuple[()]:
    """A class of a library that is loaded already, or ``()``: nothing can be an instance of a class not loaded."""
    found: type | tuple[()] = getattr(sys.modules.get(module_name), attribute, ())
    return found


@functools.cache
def _is_adapter_class(cls: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "peft" for base in cls.__mro__)


def is_adapter_module(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's own classes, whose own parameters belong to an adapter."""
    cls: Any = type(module)
    return _is_adapter_class(cls)


@kept_while_walking
def adapter_classes(model: nn.Module) -> set[type]:
    """Find the classes of PEFT's own that a model has modules of; few models have more than a dozen classes.

    Args:
        model: The model.

    Returns:
        The classes; empty where there is no adapter.
    """
    classes: set[Any] = {type(module) for _, module in named_modules(model)}
    return set(filter(_is_adapter_class, classes))


# Below one of PEFT's modules that has such children, the base goes on in these and nowhere else.
_BASE_CHILDREN = ({"base_layer"}, {"original_module", "token_adapter"}, {"base_model"})


@kept_while_walking
def base_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules of the base, through whatever PEFT put around and between them.

    Args:
        model: The model, wrapped by PEFT or holding PEFT's layers.

    Returns:
        ``(fqn, module)``, each module once and PEFT's own on the way included, in the order of ``named_modules``.
    """
    modules, adapters = named_modules(model), adapter_classes(model)
    beside = set()
    for _, module in modules if adapters else ():
        if type(module) in adapters:
            children = module._modules.keys()
            base = next((names for names in _BASE_CHILDREN if names & children), children)
            beside |= {(id(module), name) for name in children if name not in base}
    if not beside:
        return modules
    found, seen, stack = [], set(), [("", model)]
    while stack:
        fqn, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append((fqn, module))
            prefix = f"{fqn}." if fqn else ""
            for name, child in reversed(module._modules.items()):
                if child is not None and (id(module), name) not in beside:
                    stack.append((prefix + name, child))
    return found


@kept_while_walking
def adapter_parameter_ids(model: nn.Module) -> set[int]:
    """The ``id`` of every parameter that belongs to an adapter and not also to the base.

    Args:
        model: The model, wrapped by PEFT or holding PEFT's layers.

    Returns:
        The ids; empty where there is no adapter. A parameter shared by an adapter and the base is the base's.
    """
    adapters = adapter_classes(model)
    if not adapters:
        return set()
    base = {
        id(parameter)
        for _, module in base_modules(model)
        if type(module) not in adapters
        for parameter in module._parameters.values()
    }
    return {id(tensor.parameter) for tensor in named_tensors(model)} - base


def refuse_unsupported_tensors(model: nn.Module, *, allow_meta: bool, allow_dtensor: bool = False) -> None:
    """Raise for a model whose parameters cannot be edited one by one.

    Args:
        model: The model.
        allow_meta: Whether parameters on the meta device are fine (they are for planning).
        allow_dtensor: Whether parameters sharded as DTensors are fine (they are for an export by all ranks).

    Raises:
        UnsupportedModelError: It is no module, has no parameters, is sharded (DTensor, FSDP1, FSDP2, ZeRO-3) or has a
            parameter on the meta device. ``fqn`` names the first one found.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            "expected a torch.nn.Module, such as AutoModelForCausalLM.from_pretrained(...), "
            f"found {type(model).__name__}"
        )
    tensors = named_tensors(model)
    if not tensors:
        raise UnsupportedModelError(f"{type(model).__name__} has no parameters: there is nothing to prepare")
    d_tensor = _loaded("torch.distributed.tensor", "DTensor")
    for fqn, _, _, parameter in tensors:
        sharding, marks = None, vars(parameter)
        if isinstance(parameter, d_tensor) and not allow_dtensor:
            sharding = "a DTensor (FSDP2 or tensor parallelism)"
        elif marks.get("_is_flat_param", False):
            sharding = "an FSDP1 flat parameter"
        elif "ds_id" in marks:
            sharding = "a ZeRO-3 partition"
        if sharding:
            raise UnsupportedModelError(
                f"{fqn} is {sharding}: no dtype of a sharded parameter can be changed safely; "
                "prepare the model before it is sharded",
                fqn=fqn,
            )
    fsdp1 = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    for fqn, module in named_modules(model) if fsdp1 else ():
        if isinstance(module, fsdp1):
            raise UnsupportedModelError(
                f"{fqn or 'the model'} is wrapped by FSDP1: no dtype of a sharded parameter can be changed safely; "
                "prepare the model before it is sharded",
                fqn=fqn,
            )
    if allow_meta:
        return
    for fqn, module, _, parameter in tensors:
        if parameter.is_meta:
            offloaded = getattr(module, "_hf_hook", None) is not None
            remedy = (
                "its values are offloaded by accelerate; load the model without offloading (device_map={'': device})"
                if offloaded
                else "load its weights first; build_plan works on the meta device"
            )
            raise UnsupportedModelError(f"{fqn} is on the meta device: {remedy}", fqn=fqn)


def signature(model: nn.Module) -> int:
    """A hash of what a plan depends on: modules, their attributes, parameters, their dtypes, devices and flags.

    Args:
        model: The model.

    Returns:
        The hash; it is of this process and of these very objects.
    """
    parts: list[Any] = [(fqn, id(m), type(m), len(vars(m))) for fqn, m in named_modules(model, remove_duplicate=False)]
    parts += [
        (name, id(p), p.dtype, p.shape, p.device, p.requires_grad, 0 if p.is_meta else p.data_ptr())
        for _, _, name, p in named_tensors(model, remove_duplicate=False)
    ]
    return hash(tuple(parts))


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors share exactly when they share memory.

    Args:
        tensor: A strided tensor.

    Returns:
        The identity of its storage, on the meta device too, where storages have no address.
    """
    return int(tensor.untyped_storage()._cdata)
