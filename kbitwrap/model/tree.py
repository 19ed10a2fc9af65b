"""A live model, walked once: its modules and tensors.

A tensor is identified by its owner and its name there; its *fqn* is its name without
wrappers, its *path* the live one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from .quantization import Quantization, detect
from .records import ParameterRecord, Place, Records
from .wrappers import COPIES, is_adapter_class, is_sharded_tensor, wrapped_children

CONFIG_ATTRIBUTES = ("config", "generation_config")


def only_reading() -> Any:
    """Return a context in which the fields of tensors are read without asking their classes.

    Asking takes twice the time of a whole preparation.
    """
    return torch._C.DisableTorchFunctionSubclass()


@dataclass(eq=False, slots=True)
class Node:
    """A module at one of its places.

    ``is_base`` excludes wrappers, adapters and copies.
    """

    path: str
    fqn: str
    module: nn.Module
    is_base: bool


@dataclass(eq=False, slots=True)
class NamedTensor:
    """A parameter at one of its places: ``module._parameters[name] is parameter``."""

    fqn: str
    module: nn.Module
    name: str
    parameter: nn.Parameter
    path: str


def join(prefix: str, name: str) -> str:
    """Join a prefix, which may be empty, and a name."""
    return f"{prefix}.{name}" if prefix else name


class ModelTree:
    """The modules and parameters of a live model at one moment.

    None of them may be replaced while it is used.
    """

    def __init__(self, model: nn.Module, records: Records | None = None) -> None:
        self.model = model
        self.records = Records() if records is None else records
        # by ``id`` of parameters recorded earlier that were found again
        self.known: dict[int, ParameterRecord] = {}
        # and of those found sharded: where they were, and no values
        self.sharded: dict[int, ParameterRecord] = {}

    def again(self) -> ModelTree:
        """Walk the same model again: edits replace modules and parameters."""
        return ModelTree(self.model, self.records)

    @cached_property
    def nodes(self) -> list[Node]:
        """Every place of every module, in depth-first order."""
        found = []

        # No function that calls itself: it would keep what it found, in a cycle.
        stack = [(self.model, "", "", True, False)]
        while stack:
            # the last is whether the module is a wrapper's collection of copies
            module, path, fqn, is_base, are_copies = stack.pop()
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedModelError(
                    f"{path or 'the model'} is a {type(module).__name__} of TorchScript, whose parameters cannot be "
                    "edited: load the model itself",
                    fqn=path,
                )

            wrapped = wrapped_children(module)
            is_adapter = bool(wrapped) and is_adapter_class(type(module))
            found.append(Node(path, fqn, module, is_base and not wrapped))
            for name, child in reversed(module._modules.items()):
                if child is None:
                    continue
                is_wrapped = name in wrapped
                holds_copies = is_adapter and not is_wrapped and name in COPIES
                has_no_name = is_wrapped or holds_copies or are_copies
                child_fqn = fqn if has_no_name else join(fqn, name)
                is_inside = is_base and (is_wrapped or not wrapped)
                child_path = join(path, name)
                stack.append((child, child_path, child_fqn, is_inside, holds_copies))
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
        return [node for node in self.nodes if node.is_base]

    @cached_property
    def plain_base(self) -> list[Node]:
        """The places of the base's modules that are not of PEFT's classes: some may be in the base itself."""
        return [node for node in self.base if not is_adapter_class(type(node.module))]

    @cached_property
    def configs(self) -> list[Any]:
        """The configs of its modules, each once.

        The layers of a model share its config.
        """
        found = {}
        for node in self.modules:
            for name in CONFIG_ATTRIBUTES:
                config = vars(node.module).get(name)
                if config is not None:
                    found[id(config)] = config

        return list(found.values())

    @cached_property
    def owners(self) -> set[int]:
        """The ``id`` of every module that holds parameters itself.

        Others, as activations, may be in several models.
        """
        return {id(tensor.module) for tensor in self.all_tensors}

    @cached_property
    def all_tensors(self) -> list[NamedTensor]:
        """Every place of every parameter."""
        return _tensors_of(self.nodes)

    @cached_property
    def tensors(self) -> list[NamedTensor]:
        """Each parameter once, at its first place, as in ``model.named_parameters()``."""
        first: dict[int, NamedTensor] = {}
        for tensor in self.all_tensors:
            first.setdefault(id(tensor.parameter), tensor)

        return list(first.values())

    @cached_property
    def live(self) -> dict[ParameterRecord, nn.Parameter]:
        """The parameters that were recorded earlier and found again, by record.

        It is read after all were found that there are.
        """
        found = {}
        for tensor in self.tensors:
            record = self.known.get(id(tensor.parameter))
            if record is not None:
                found[record] = tensor.parameter

        return found

    @cached_property
    def ids(self) -> set[int]:
        """The ``id`` of every parameter."""
        return {id(tensor.parameter) for tensor in self.tensors}

    def found(self, parameter: Any) -> ParameterRecord | None:
        """Return the record of a parameter that was found again, whole or sharded."""
        return self.known.get(id(parameter)) or self.sharded.get(id(parameter))

    def at_places(self, record: ParameterRecord) -> list[nn.Parameter]:
        """Return the parameters at a record's places that are in the model.

        Others may have taken modules out of it.
        """
        return [one for one in record.at_places() if id(one) in self.ids]

    @cached_property
    def _places(self) -> dict[int, list[Place]]:
        """Every owner of each parameter, once, with the parameter's name there.

        The keys are the ``id`` of the parameters.
        """
        found: dict[int, list[Place]] = {}
        for tensor in self.all_tensors:
            places = found.setdefault(id(tensor.parameter), [])
            place = (tensor.module, tensor.name)
            if place not in places:
                places.append(place)

        return found

    def places(self, tensor: NamedTensor) -> list[Place]:
        """Return every owner of a parameter, each once, with the parameter's name there."""
        return self._places.get(id(tensor.parameter)) or [(tensor.module, tensor.name)]

    def places_outside(self, parameters: Sequence[nn.Parameter]) -> list[Place]:
        """Return the places of parameters in modules of this process that are not the model's.

        A model may be a part of another, which ties a weight of its own to the part's: no
        module knows what holds it, but the garbage collector does.
        """
        own = {id(tensor.module) for tensor in self.all_tensors}
        ids = set(map(id, parameters))
        found = []
        for one in gc.get_objects():
            if not issubclass(type(one), nn.Module) or id(one) in own:
                continue
            for name, parameter in vars(one).get("_parameters", {}).items():
                if id(parameter) in ids:
                    found.append((one, name))

        return found

    def record(self, tensor: NamedTensor) -> ParameterRecord:
        """Return the record of a parameter: the one that there is, or a new one.

        A parameter that got another name since, as PEFT gives one to AQLM's codes, has the
        record that it had.
        """
        parameter = tensor.parameter
        places = self.places(tensor)
        for owner, name in [(tensor.module, tensor.name), *places]:
            found = self.records.at(owner, name)
            if found is not None and found.is_seen(parameter):
                return found

        made = ParameterRecord(tensor.fqn, places, parameter)
        self.records.add(made, places)
        return made

    @cached_property
    def base_tensors(self) -> list[NamedTensor]:
        """Every place of the base's parameters in the base."""
        return _tensors_of(self.plain_base)

    def resized(
        self, records: Iterable[ParameterRecord]
    ) -> Iterator[tuple[ParameterRecord, NamedTensor]]:
        """Yield the base's tensors that others made of recorded ones by resizing embeddings.

        They are embeddings of another size, and what has a recorded name and as many
        rows, as a new head. They may have been resized back to their size.
        """
        lost = [record for record in records if record not in self.live]
        # by ``id``, the parameters that stand where lost ones stood
        standing = {id(there): there for r in lost for there in self.at_places(r)}
        rows = {there.shape[:1] for there in standing.values()}
        named = {tensor.fqn: tensor for tensor in self.base_tensors} if lost else {}
        for record in lost:
            tensor = named.get(record.fqn)
            if tensor is None or id(tensor.parameter) in self.known:
                continue
            parameter = tensor.parameter
            is_resized = parameter.shape[:1] in rows
            if id(parameter) in standing:
                is_resized = record.was_resized(parameter)
            if is_resized and not is_sharded_tensor(parameter):
                yield record, tensor

    @cached_property
    def adapters(self) -> list[Node]:
        """The modules of PEFT's classes."""
        return [node for node in self.modules if is_adapter_class(type(node.module))]

    @cached_property
    def adapter_ids(self) -> set[int]:
        """The ``id`` of every parameter of an adapter that is not shared with the base."""
        return self.ids - {id(tensor.parameter) for tensor in self.base_tensors}

    @cached_property
    def adapted_blocks(self) -> set[str]:
        """The prefixes of the blocks that hold an adapter.

        A block is an element of an outermost ``ModuleList``.
        """
        lists = [node for node in self.base if isinstance(node.module, nn.ModuleList)]
        prefixes = sorted([f"{node.fqn}." for node in lists], key=len)
        blocks = set()
        for node in self.adapters:
            for prefix in prefixes:
                if node.fqn.startswith(prefix):
                    number = node.fqn.removeprefix(prefix).partition(".")[0]
                    blocks.add(f"{prefix}{number}.")
                    break

        return blocks

    @cached_property
    def index(self) -> ModuleIndex:
        """The index by which its modules are found again later."""
        return ModuleIndex(self)

    @cached_property
    def quantization(self) -> Quantization:
        """The quantization of the model."""
        return detect(self.model, [node.module for node in self.modules])


def _tensors_of(nodes: Iterable[Node]) -> list[NamedTensor]:
    """Return every parameter at every place of modules."""
    found = []
    for node in nodes:
        for name, parameter in node.module._parameters.items():
            if parameter is not None:
                fqn = join(node.fqn, name)
                path = join(node.path, name)
                found.append(NamedTensor(fqn, node.module, name, parameter, path))

    return found


def shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module, so that the copy's parameters, buffers and children can be replaced.

    It is of the same class, and shares the rest.
    """
    made = object.__new__(type(module))
    fields = vars(made)
    fields.update(vars(module))
    for name in ("_parameters", "_buffers", "_modules"):
        fields[name] = dict(fields[name])  # DeepSpeed's own class cannot be copied

    fields["_non_persistent_buffers_set"] = {*fields["_non_persistent_buffers_set"]}

    return made


class ModuleIndex:
    """The modules of a tree, held weakly, by which they are found again.

    They are found through wrappers, copies and merges.

    Attributes:
        numbers: The numbers of those that are still alive, in the tree's order.
    """

    def __init__(self, tree: ModelTree) -> None:
        self.numbers: weakref.WeakKeyDictionary[nn.Module, int] = (
            weakref.WeakKeyDictionary()
        )
        self._classes = [type(node.module) for node in tree.modules]
        # Of modules that are gone too: copies of them have their marks.
        self._by_id = {}
        for number, node in enumerate(tree.modules):
            self.numbers[node.module] = self._by_id[id(node.module)] = number

        # A shared module is there under each of its names.
        self._by_fqn = {node.fqn: self.numbers[node.module] for node in tree.nodes}

    def find(self, tree: ModelTree) -> list[tuple[int, nn.Module]]:
        """Find the modules that are still alive, and their substitutes in a tree.

        A substitute was not there, as PEFT's copies were not. It comes with the number
        of the module that it stands for.
        """
        found = [(number, module) for module, number in self.numbers.items()]
        for node in tree.modules:
            if node.module in self.numbers:
                continue
            mark = tree.records.mark_of(node.module)
            number = None if mark is None else self._by_id.get(mark.of)
            if number is None:
                number = self._by_fqn.get(node.fqn)
            if number is not None and self._classes[number] is type(node.module):
                found.append((number, node.module))

        return found

    def live_and_of(self, tree: ModelTree) -> list[nn.Module]:
        """Return the modules that are still alive, and those of a tree, each once."""
        modules = [*self.numbers, *[node.module for node in tree.modules]]
        return list(dict.fromkeys(modules))
