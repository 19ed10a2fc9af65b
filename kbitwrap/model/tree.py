"""A live model, walked once: its modules and tensors.

A tensor is identified by its owner and its name there; its *fqn* is its name without wrappers, its *path* the live one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import UnsupportedModelError
from .quantization import Quantization, detect
from .records import ParameterRecord, Records
from .wrappers import COPIES, is_adapter_class, wrapped_children

CONFIG_ATTRIBUTES = ("config", "generation_config")


def only_reading() -> Any:
    """A context in which the fields of tensors are read without asking their classes, which is slower."""
    return torch._C.DisableTorchFunctionSubclass()


class Node(NamedTuple):
    """A module at one of its places; ``is_base`` excludes wrappers, adapters and copies."""

    path: str
    fqn: str
    module: nn.Module
    is_base: bool


class NamedTensor(NamedTuple):
    """A parameter at one of its places: ``module._parameters[name] is parameter``."""

    fqn: str
    module: nn.Module
    name: str
    parameter: nn.Parameter
    path: str


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules of a model, each once, as ``model.named_modules()`` does, in a tenth of its time."""
    return [(node.path, node.module) for node in ModelTree(model).modules]


def join(prefix: str, name: str) -> str:
    """Join a prefix, which may be empty, and a name."""
    return f"{prefix}.{name}" if prefix else name


class ModelTree:
    """The modules and parameters of a live model at one moment: none of them may be replaced while it is used."""

    def __init__(self, model: nn.Module, records: Records | None = None) -> None:
        self.model = model
        self.records = Records() if records is None else records
        self._has_wrappers = False
        self._children: dict[nn.Module, dict[str, nn.Module | None]] = {}  # of those that have any, as they were walked
        self._classes: set[type] = set()  # of its modules
        self._recorded: dict[int, ParameterRecord] = {}  # by ``id`` of parameters that the model holds
        self.known: dict[int, ParameterRecord] = {}  # those of parameters recorded earlier that were found again
        self.sharded: dict[int, ParameterRecord] = {}  # and of those found sharded: where they were, and no values
        self.substitutes: dict[ModuleIndex, list[tuple[int, nn.Module]]] = {}  # found once for each index

    def again(self) -> ModelTree:
        """The same model, walked again unless it has the same modules and parameters under the same names."""
        return self if self._is_current() else ModelTree(self.model, self.records)

    def _is_current(self) -> bool:
        if {node.module: node.module._modules for node in self.having("_modules")} != self._children:
            return False
        named = [(n, id(p)) for _, _, module, _ in self.nodes for n, p in module._parameters.items() if p is not None]
        return named == [(name, id(parameter)) for _, _, name, parameter, _ in self.all_tensors]

    @cached_property
    def nodes(self) -> list[Node]:
        """Every place of every module, in depth-first order."""
        found, make = list[Node](), tuple.__new__  # twice as fast as the class itself
        stack = [("", "", self.model, True, False)]
        while stack:
            path, fqn, module, is_base, holds_copies = stack.pop()
            if type(module) not in self._classes:
                self._classes.add(type(module))
                if isinstance(module, torch.jit.ScriptModule):
                    what = f"{path or 'the model'} is a {type(module).__name__} of TorchScript, whose parameters"
                    raise UnsupportedModelError(f"{what} cannot be edited: load the model itself", fqn=path)
            children = module._modules
            if not children:  # the most part
                found.append(make(Node, (path, fqn, module, is_base)))
                continue
            self._children[module] = children.copy()
            wrapped = wrapped_children(module)
            found.append(Node(path, fqn, module, is_base and not wrapped))
            paths, fqns = path and f"{path}.", fqn and f"{fqn}."
            if not wrapped and not holds_copies:
                for name, child in reversed(children.items()):
                    if child is not None:
                        place = paths + name
                        stack.append((place, place if paths == fqns else fqns + name, child, is_base, False))
                continue
            self._has_wrappers |= bool(wrapped)
            is_adapter = bool(wrapped) and is_adapter_class(type(module))
            for name, child in reversed(children.items()):
                is_wrapped = name in wrapped
                copies = is_adapter and not is_wrapped and name in COPIES
                inner = fqn if is_wrapped or holds_copies or copies else fqns + name
                if child is not None:
                    stack.append((paths + name, inner, child, is_base and (is_wrapped or not wrapped), copies))
        return found

    @cached_property
    def modules(self) -> list[Node]:
        """Each module once, at its first place."""
        first: dict[int, Node] = {}
        for node in self.nodes:
            first.setdefault(id(node.module), node)
        return list(first.values())

    @cached_property
    def base(self) -> list[Node]:
        """The places of the base's modules, without wrappers, adapters and copies."""
        nodes = self.nodes
        return [node for node in nodes if node.is_base] if self._has_wrappers else nodes

    @cached_property
    def plain_base(self) -> list[Node]:
        """Those whose class is not PEFT's: such a module may be in the base itself."""
        adapters = {id(node.module) for node in self.adapters}
        return [node for node in self.base if id(node.module) not in adapters] if adapters else self.base

    @cached_property
    def fields(self) -> list[dict[str, Any]]:
        """The instance attributes of each of its modules: the dictionaries themselves."""
        return [node.module.__dict__ for node in self.modules]

    def having(self, *names: str) -> list[Node]:
        """The modules of which any of these collections, which every module has, is not empty."""
        first, *others = [map(itemgetter(name), self.fields) for name in names]
        return list(compress(self.modules, map(any, zip(first, *others, strict=True)) if others else first))

    @cached_property
    def configs(self) -> list[Any]:
        """The configs of its modules, each once: the layers of a model share its config."""
        found = [of_module[name] for of_module in self.fields for name in CONFIG_ATTRIBUTES if name in of_module]
        return [config for config in {id(config): config for config in found}.values() if config is not None]

    @cached_property
    def owners(self) -> set[int]:
        """The ``id`` of every module that holds parameters itself: others, as activations, may be in several models."""
        return {id(module) for _, module, _, _, _ in self.all_tensors}

    @cached_property
    def all_tensors(self) -> list[NamedTensor]:
        """Every place of every parameter."""
        found, make = list[NamedTensor](), tuple.__new__
        for path, fqn, module, _ in self.nodes:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    full = f"{fqn}.{name}" if fqn else name
                    place = full if path == fqn else join(path, name)
                    found.append(make(NamedTensor, (full, module, name, parameter, place)))
        return found

    @cached_property
    def tensors(self) -> list[NamedTensor]:
        """Each parameter once, at its first place, in the order of ``model.named_parameters()``."""
        first: dict[int, NamedTensor] = {}
        for tensor in self.all_tensors:
            first.setdefault(id(tensor.parameter), tensor)
        return list(first.values())

    @property
    def live(self) -> dict[ParameterRecord, nn.Parameter]:
        """The parameters that were recorded earlier and found again, by their records."""
        found = [(self.known.get(id(tensor.parameter)), tensor.parameter) for tensor in self.tensors]
        return {record: parameter for record, parameter in found if record is not None}

    @cached_property
    def _shared(self) -> dict[int, list[tuple[nn.Module, str]]]:
        """The places of parameters, by ``id``, where any of them has more than one."""
        found: dict[int, list[tuple[nn.Module, str]]] = {}
        for _, module, name, parameter, _ in self.all_tensors if len(self.all_tensors) > len(self.tensors) else ():
            places = found.setdefault(id(parameter), [])
            if not any(owner is module and name == known for owner, known in places):
                places.append((module, name))
        return found

    def places(self, tensor: NamedTensor) -> list[tuple[nn.Module, str]]:
        """Every owner of a parameter, each once, with the parameter's name there."""
        return self._shared.get(id(tensor.parameter)) or [(tensor.module, tensor.name)]

    def record(self, tensor: NamedTensor) -> ParameterRecord:
        """The record of a parameter: the one that there is, or a new one."""
        found = self._recorded.get(id(tensor.parameter))
        if found is None:
            found = self.records.at(tensor.module, tensor.name)
            if found is None or not found.is_seen(tensor.parameter):
                places = self.places(tensor)
                found = ParameterRecord(tensor.fqn, places, tensor.parameter)
                self.records.add(found, places)
            self._recorded[id(tensor.parameter)] = found
        return found

    @cached_property
    def base_tensors(self) -> list[NamedTensor]:
        """Every place of the base's parameters in the base."""
        if self.plain_base is self.nodes:
            return self.all_tensors
        inside = {node.path for node in self.plain_base}
        return [tensor for tensor in self.all_tensors if tensor.path[: -len(tensor.name) - 1] in inside]

    @cached_property
    def base_records(self) -> list[ParameterRecord]:
        """The records of ``base_tensors``, in their order."""
        return [self.record(tensor) for tensor in self.base_tensors]

    def resized(self, records: Iterable[ParameterRecord]) -> list[tuple[ParameterRecord, NamedTensor]]:
        """The base's tensors that have a recorded one's name and another number of rows, as resized embeddings have."""
        named = {tensor.fqn: tensor for tensor in self.base_tensors}
        return [(r, t) for r in records if (t := named.get(r.fqn)) is not None and r.was_resized(t.parameter)]

    @cached_property
    def adapters(self) -> list[Node]:
        """PEFT's own modules."""
        return self.of_class(is_adapter_class)

    def of_class(self, is_one: Callable[[Any], bool]) -> list[Node]:
        """The modules whose class a test holds for; it is asked once for each class."""
        modules = self.modules
        found = {cls for cls in self._classes if is_one(cls)}
        return [node for node in modules if type(node.module) in found] if found else []

    @cached_property
    def adapter_ids(self) -> set[int]:
        """The ``id`` of every parameter that belongs to an adapter and is not shared with the base."""
        if not self.adapters:
            return set()
        base = {id(tensor.parameter) for tensor in self.base_tensors}
        return {id(tensor.parameter) for tensor in self.tensors} - base

    @cached_property
    def adapted_blocks(self) -> set[str]:
        """The prefixes of the blocks that hold an adapter. A block is an element of an outermost ``ModuleList``."""
        lists = [node.fqn for node in self.base if isinstance(node.module, nn.ModuleList)]
        blocks = set()
        for node in self.adapters:
            inside = [name for name in lists if node.fqn.startswith(f"{name}.")]
            if inside:
                outermost = min(inside, key=len)
                blocks.add(f"{outermost}.{node.fqn[len(outermost) + 1 :].partition('.')[0]}.")
        return blocks

    @cached_property
    def index(self) -> ModuleIndex:
        """The index by which its modules are found again later."""
        return ModuleIndex(self)

    @cached_property
    def quantization(self) -> Quantization:
        """How the model is quantized."""
        return detect(self.model, [node.module for node in self.modules])


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class whose parameters, buffers and children can be replaced; the rest is shared."""
    made: nn.Module = object.__new__(type(module))
    fields = made.__dict__
    fields.update(module.__dict__)
    fields.update({name: dict(fields[name]) for name in ("_parameters", "_buffers", "_modules")})
    fields["_non_persistent_buffers_set"] = set(fields["_non_persistent_buffers_set"])
    return made


class ModuleIndex:
    """The modules of a tree, numbered and held weakly, to be found again through wrappers, copies and merges."""

    def __init__(self, tree: ModelTree) -> None:
        modules = [node.module for node in tree.modules]
        self._references = [weakref.ref(module) for module in modules]
        self._classes = [type(module) for module in modules]
        self._numbers = {id(module): number for number, module in enumerate(modules)}
        # A shared module is there under each of its names.
        self._by_fqn = {fqn: self._numbers[id(module)] for _, fqn, module, _ in tree.nodes}

    def number(self, module: nn.Module) -> int | None:
        """The number of a module, in the tree's order; ``None`` if it was not there."""
        number = self._numbers.get(id(module))
        return number if number is not None and self._references[number]() is module else None

    def substitutes(self, tree: ModelTree) -> list[tuple[int, nn.Module]]:
        """The modules that were not there, as PEFT's copies, with the numbers of those of their names and classes."""
        if self not in tree.substitutes:
            known = {id(module) for _, module in self.live()}
            new = [(self._by_fqn.get(node.fqn), node.module) for node in tree.modules if id(node.module) not in known]
            found = [(n, module) for n, module in new if n is not None and self._classes[n] is type(module)]
            tree.substitutes[self] = found
        return tree.substitutes[self]

    def live(self) -> list[tuple[int, nn.Module]]:
        """The modules that are still alive, each with its number."""
        return [(n, m) for n, reference in enumerate(self._references) if (m := reference()) is not None]

    def live_and_of(self, tree: ModelTree) -> list[nn.Module]:
        """The modules that are still alive, and those of a tree, each once."""
        return list(dict.fromkeys([*(m for _, m in self.live()), *(node.module for node in tree.modules)]))


def storage_key(tensor: torch.Tensor) -> int:
    """A key that two tensors share exactly when they share memory, on the meta device too."""
    key: int = tensor.untyped_storage()._cdata
    return key
