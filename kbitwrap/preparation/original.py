"""The record of the unprepared model.

Restore, ``verify``, export and the manifest all read it.

It holds no parameter, and no value but samples: see ``ParameterRecord`` and
``Fingerprints``.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model.records import ParameterRecord, TensorRef
from ..model.tree import CONFIG_ATTRIBUTES, ModelTree, join, only_reading
from ..tensors.bits import begin_digest, content_digest, is_dense
from .fingerprints import Fingerprints
from .moments import read_moment

_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def configs_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The configs of a module that a checkpoint holds.

    Each comes with the name of its attribute.
    """
    found = []
    for name in CONFIG_ATTRIBUTES:
        config = vars(module).get(name)
        if hasattr(config, "save_pretrained"):
            found.append((name, config))
    return found


@dataclass(frozen=True)
class Buffer:
    """A persistent buffer as it was.

    Its digest, begun when it was recorded, is read when it is asked for.
    """

    dtype: torch.dtype
    shape: torch.Size
    digest: Callable[[], int]


class Original:
    """The base of a model before it was prepared.

    It is made when a preparation begins, before the first edit, in one pass over the
    model. What lies on an accelerator is not waited for.

    Args:
        tree: The walk of the model. Its records become those of the preparation.
        audit: Whether every unquantized parameter is to be digested as a whole.

    Attributes:
        model: The model, held weakly.
        before: Its hooks, flags, modes and memory, as the manifest records them.
        base: The records of the base's parameters, by fqn.
        parameters: The same records, each once.
        flags: ``requires_grad`` of these and of adapters that were there before.
        modules: The base's modules by fqn, held weakly.
        fingerprints: Samples of the values; with ``audit`` every unquantized parameter
            is digested as a whole too.
        sharing_memory: The records of parameters that lie over the memory of others.
        buffers: The buffers that a checkpoint holds, by fqn.
        hooks: The hooks of all modules, by their ids, each as a line of a report.
    """

    def __init__(self, tree: ModelTree, *, audit: bool = False) -> None:
        self.model = weakref.ref(tree.model)
        self.records = tree.records
        self.before = read_moment(tree)
        self.base: dict[str, ParameterRecord] = {}
        self.flags: dict[ParameterRecord, bool] = {}
        parameters: dict[ParameterRecord, nn.Parameter] = {}
        with only_reading():
            records = {}
            for tensor in tree.tensors:
                record = records[id(tensor.parameter)] = tree.record(tensor)
                self.flags[record] = tensor.parameter.requires_grad
            # A record may have two names, and a name two records.
            for tensor in tree.base_tensors:
                record = records[id(tensor.parameter)]
                self.base[tensor.fqn] = record
                parameters[record] = tensor.parameter
            self.fingerprints = Fingerprints(parameters.items(), audit)
        self.parameters = list(parameters)
        self.modules = {node.fqn: weakref.ref(node.module) for node in tree.plain_base}
        memories = Counter([record.memory for record in self.parameters])
        self.sharing_memory = {
            record for record in self.parameters if memories[record.memory] > 1
        }
        self.buffers = _buffers_of(tree)
        self.hooks = hooks_of(tree)
        # The memo of ``deepcopy``: the copies by ``id``, and the configs, held.
        self._configs: dict[int, Any] = {}
        for config in tree.configs:
            if hasattr(config, "save_pretrained"):
                copy.deepcopy(config, self._configs)

    def config(self, config: Any) -> Any:
        """A config as it was recorded; one that is new, as it is."""
        return self._configs.get(id(config), config)

    def turned_on(self, tree: ModelTree) -> list[TensorRef]:
        """The places of base parameters that a restore makes trainable.

        None where no adapter is live: then the base is all that can be trained.
        """
        found = []
        for record in self.parameters if tree.adapter_ids else ():
            parameter = record.there()
            if parameter is None or parameter.requires_grad:
                continue
            if self.flags[record]:
                found.append(record.refs[0])
        return found

    def is_alias(self, module: nn.Module, name: str) -> bool:
        """Whether a new name has a parameter that the module had under another.

        PEFT names AQLM's codes ``qweight``, for one.
        """
        parameter = module._parameters[name]
        if parameter is None or self.records.at(module, name) is not None:
            return False
        names = [n for n, p in module._parameters.items() if p is parameter]
        return any(self.records.at(module, other) is not None for other in names)

    def differs(self, record: ParameterRecord, value: torch.Tensor) -> bool:
        """Whether a value is not the recorded one, as far as was recorded."""
        if self.fingerprints.changed([(record, value)]):
            return True
        digest = self.fingerprints.digests.get(record)
        return digest is not None and content_digest(value) != digest()


def _buffers_of(tree: ModelTree) -> dict[str, Buffer]:
    """The base's buffers that a checkpoint holds, by fqn.

    Training writes them, as running statistics; they are small.
    """
    found = {}
    for node in tree.base:
        for name, buffer in node.module._buffers.items():
            if buffer is None or name in node.module._non_persistent_buffers_set:
                continue
            if is_dense(buffer):
                recorded = Buffer(buffer.dtype, buffer.shape, begin_digest(buffer))
                found[join(node.fqn, name)] = recorded
    return found


def hooks_of(tree: ModelTree) -> dict[int, str]:
    """A model's hooks by their ids, each as a line of a report."""
    found = {}
    for node in tree.modules:
        fields = vars(node.module)
        for attribute in filter(fields.get, _HOOK_DICTS):
            for key, hook in fields[attribute].items():
                kind = attribute.strip("_").replace("_", " ").removesuffix("s")
                name = getattr(hook, "__name__", type(hook).__name__)
                found[key] = f"{node.path}: {kind} {name}"
    return found
