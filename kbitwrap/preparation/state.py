"""The record of a model at one moment.

It is taken before a preparation and after it: `verify`, the restore report, export and
the manifest are differences of such records and the live model. It holds no module and
no parameter, and no value but samples.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..edits.checkpointing import CHECKPOINTING_ATTRIBUTES, input_gradient_hooks
from ..edits.journal import MISSING
from ..edits.norms import Float32Forward, forward_attribute
from ..model.records import ParameterRecord, TensorRef
from ..model.tree import ModelTree, join, only_reading
from ..tensors.bits import begin_digest, content_digest, is_dense
from ..tensors.devices import accelerators, function_of
from ..tensors.upcast import UpcastTensor
from .fingerprints import is_changed, take_samples

Values = dict[str, Any]
"""The values of a parameter or a module that are compared, by the names of differences."""
HOOKS = "input_gradient_hooks"
_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class ModelState:
    """A model at one moment, and what was found of it.

    Attributes:
        model: The model, held weakly.
        records: The records of its parameters, by their places.
        parameters: What an edit changes of each parameter, but for its value.
        owners: The base's modules by fqn, held weakly.
        modules: The attributes of these that a preparation sets.
        hooks: The hooks of all modules, by their ids, each as a line of a report.
        moment: Hooks, flags, modes and memory, as the manifest records them.
    """

    def __init__(self, tree: ModelTree) -> None:
        self.model = weakref.ref(tree.model)
        self.records = tree.records
        self.hooks = hooks_of(tree)
        with only_reading():
            self.parameters = {}
            for tensor in tree.tensors:
                values = values_of_parameter(tensor.parameter)
                self.parameters[tree.record(tensor)] = values
            self.owners = {n.fqn: weakref.ref(n.module) for n in tree.plain_base}
            self.modules = {n.fqn: values_of_module(n.module) for n in tree.plain_base}
            self.moment = _moment(tree)

    def reread(self, tree: ModelTree, fqns: Collection[str]) -> ModelState:
        """Return this state, with modules read again that were edited since."""
        edited = {node.module for node in tree.base if node.fqn in fqns}
        state = copy.copy(self)
        state.modules = dict(self.modules)
        for node in tree.plain_base:
            if node.module in edited:
                state.modules[node.fqn] = values_of_module(node.module)
        return state


class Buffer(NamedTuple):
    """A persistent buffer as it was."""

    dtype: torch.dtype
    shape: torch.Size
    digest: Callable[[], int]  # begun when the buffer was recorded


class Original(ModelState):
    """The state of a model before it was prepared, with what tells its values.

    It is made before the first edit, without waiting for an accelerator.

    Args:
        tree: The walk of the model. Its records become those of the preparation.
        audit: Whether every unquantized parameter is to be digested as a whole.

    Attributes:
        base: The records of the base's parameters, by fqn.
        samples: Samples of their values, in the recorded dtypes.
        digests: The digests of whole parameters; each is read when it is called.
        sharing_memory: The records of parameters that lie over the memory of others.
        buffers: The base's buffers that a checkpoint holds, by fqn. Training writes
            them, as running statistics; they are small.
    """

    def __init__(self, tree: ModelTree, *, audit: bool = False) -> None:
        super().__init__(tree)
        self.base: dict[str, ParameterRecord] = {}
        self.digests = {}
        parameters = {}
        with only_reading():
            # A record may have two names, and a name two records.
            for tensor in tree.base_tensors:
                record = self.base[tensor.fqn] = tree.record(tensor)
                parameters[record] = tensor.parameter
            self.samples = take_samples(parameters.items())
            for record, parameter in parameters.items() if audit else ():
                if record.quantized_class is None and is_dense(parameter):
                    self.digests[record] = begin_digest(parameter)

        memories = Counter([record.memory for record in parameters])
        self.sharing_memory = {one for one in parameters if memories[one.memory] > 1}
        self.buffers = {}
        for fqn, buffer in saved_buffers(tree).items():
            if is_dense(buffer):
                digest = begin_digest(buffer)
                self.buffers[fqn] = Buffer(buffer.dtype, buffer.shape, digest)
        # The memo of ``deepcopy``: the copies by ``id``, and the configs, held.
        self._configs: dict[int, Any] = {}
        for config in tree.configs:
            if hasattr(config, "save_pretrained"):
                copy.deepcopy(config, self._configs)

    def config(self, config: Any) -> Any:
        """Return a config as it was recorded; one that is new, as it is."""
        return self._configs.get(id(config), config)

    def flag(self, record: ParameterRecord) -> bool:
        """Whether a parameter required grad."""
        return bool(self.parameters[record]["requires_grad"])

    def turned_on(self, tree: ModelTree) -> Iterator[TensorRef]:
        """Yield the places of base parameters that a restore makes trainable.

        There are none where no adapter is live: then only the base can be trained.
        """
        for record in dict.fromkeys(self.base.values()) if tree.adapter_ids else ():
            parameter = record.there()
            is_frozen = parameter is not None and not parameter.requires_grad
            if is_frozen and self.flag(record):
                yield record.refs[0]

    def is_alias(self, module: nn.Module, name: str) -> bool:
        """Whether a new name has a parameter that the module had under another.

        PEFT names AQLM's codes ``qweight``, for one.
        """
        if self.records.at(module, name) is not None:
            return False
        for other, parameter in module._parameters.items():
            is_same = parameter is not None and parameter is module._parameters[name]
            if is_same and self.records.at(module, other) is not None:
                return True
        return False

    def differs(self, record: ParameterRecord, value: Tensor) -> bool:
        """Whether a value is not the recorded one, as far as was recorded."""
        if is_changed(self.samples, record, value):
            return True
        digest = self.digests.get(record)
        return digest is not None and content_digest(value) != digest()


def saved_buffers(tree: ModelTree) -> dict[str, Tensor]:
    """Return the base's buffers that a checkpoint holds, by fqn."""
    found = {}
    for node in tree.base:
        for name, buffer in node.module._buffers.items():
            is_saved = name not in node.module._non_persistent_buffers_set
            if is_saved and buffer is not None:
                found[join(node.fqn, name)] = buffer
    return found


def hooks_of(tree: ModelTree) -> dict[int, str]:
    """Return a model's hooks by their ids, each as a line of a report."""
    found = {}
    for node in tree.modules:
        fields = vars(node.module)
        for attribute in filter(fields.get, _HOOK_DICTS):
            for key, hook in fields[attribute].items():
                kind = attribute.strip("_").replace("_", " ").removesuffix("s")
                name = getattr(hook, "__name__", type(hook).__name__)
                found[key] = f"{node.path}: {kind} {name}"
    return found


def values_of_parameter(parameter: nn.Parameter) -> Values:
    """Return what an edit changes of a parameter, but for its value."""
    return {
        "dtype": parameter.dtype,
        "shape": tuple(parameter.shape),
        "requires_grad": parameter.requires_grad,
    }


def values_of_module(module: nn.Module) -> Values:
    """Return the attributes that a preparation sets on a module."""
    fields = vars(module)
    forward = fields.get(forward_attribute(module))
    held = [(name, fields[name]) for name in module._parameters if name in fields]
    values = {
        "forward": forward if isinstance(forward, Float32Forward) else None,
        "upcast": {name for name, value in held if isinstance(value, UpcastTensor)},
        HOOKS: bool(input_gradient_hooks(module)),
    }
    for name in CHECKPOINTING_ATTRIBUTES:
        value = fields.get(name, MISSING)
        # Two partials of the same call are not equal; their parts are.
        if isinstance(value, functools.partial):
            value = value.func.__qualname__, value.args, dict(value.keywords)
        values[name] = value
    return values


def _moment(tree: ModelTree) -> dict[str, dict[str, Any]]:
    """Return hooks, flags, modes and memory, with the fields that the manifest documents.

    Memory is the parameters' storages, each counted once, and what allocators count
    over all accelerators that hold parameters; ``None`` where none counts.
    """
    base = [node for node in tree.modules if node.is_base]
    hooks = {}
    checkpointing = []
    for node in base:
        num_hooks = len(input_gradient_hooks(node.module))
        if num_hooks:
            hooks[node.fqn] = num_hooks
        if vars(node.module).get("gradient_checkpointing") is True:
            checkpointing.append(node.fqn)
    use_cache = getattr(getattr(tree.model, "config", None), "use_cache", None)
    state = {
        "input_gradient_hooks": hooks,
        "checkpointing": checkpointing,
        "use_cache": use_cache if isinstance(use_cache, bool) else None,
        "num_modules": len(base),
        "num_training": sum(node.module.training for node in base),
    }

    parameters = [tensor.parameter for tensor in tree.tensors]
    storages = [parameter.untyped_storage() for parameter in parameters]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    memory: dict[str, int | None] = {"parameter_bytes": sum(sizes.values())}
    for field, function in (
        ("allocated_bytes", "memory_allocated"),
        ("reserved_bytes", "memory_reserved"),
    ):
        counts = []
        for device in accelerators(parameters):
            count = function_of(device.type, function)
            if count is not None:
                counts.append(count(device))
        memory[field] = sum(counts) if counts else None
    return {"state": state, "memory": memory}
