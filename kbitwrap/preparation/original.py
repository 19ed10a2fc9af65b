"""The record of the unprepared model, which restore, verify, export and the manifest all read.

It holds no parameter, and no value but samples: see ``ParameterRecord`` and
``Fingerprints``.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..edits.base import HeldOriginal
from ..edits.storage import CopyChange, StorageChange
from ..model.quantization import (
    is_quantized_parameter,
    is_rewritten,
    quant_state_of,
    was_decompressed,
)
from ..model.records import ParameterRecord, TensorRef, key_of
from ..model.tree import CONFIG_ATTRIBUTES, ModelTree, NamedTensor, join, only_reading
from ..model.wrappers import is_flattened, is_sharded_tensor
from ..tensors.bits import begin_digest, content_digest, is_dense
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import values_of
from .fingerprints import Fingerprints
from .moments import read_moment

DECOMPRESSED = "was decompressed by its library when the model ran"
_FEW = 1 << 16  # elements of a buffer that is compared
_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def signature(tree: ModelTree) -> tuple[list[Any], list[Any]]:
    """What a plan depends on: the modules, and the parameters, what these are and where. It holds none of them."""
    modules = [
        (n.path, id(n.module), type(n.module), len(vars(n.module))) for n in tree.nodes
    ]
    parameters = []
    for tensor in tree.all_tensors:
        p = tensor.parameter
        place = tensor.path, id(p), p.data_ptr(), p.device
        parameters.append((*place, p.dtype, p.shape, p.requires_grad))
    return modules, parameters


def configs_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The configs of a module that are saved with a checkpoint, each with its attribute's name."""
    found = [(name, vars(module).get(name)) for name in CONFIG_ATTRIBUTES]
    return [one for one in found if hasattr(one[1], "save_pretrained")]


@dataclass(frozen=True)
class Buffer:
    """A persistent buffer as it was; its digest, begun when it was recorded, is read when it is asked for."""

    dtype: torch.dtype
    shape: torch.Size
    digest: Callable[[], int]


@dataclass
class Changes:
    """The names of the base's parameters that are not as they were recorded."""

    # their value changed, and they may be trained
    trained: list[str] = field(default_factory=list)
    # their value changed although they were frozen
    drifted: list[str] = field(default_factory=list)
    # what happened: another, of another shape, or none is there
    replaced: dict[str, str] = field(default_factory=dict)
    # sharded since: their values are on all ranks together
    not_compared: list[str] = field(default_factory=list)


class Original:
    """The base of a model before it was prepared; with ``audit`` every unquantized parameter is digested as a whole."""

    def __init__(self, tree: ModelTree, *, audit: bool = False) -> None:
        self.model = weakref.ref(tree.model)
        self.records = tree.records
        self.before = read_moment(tree)
        # Of one name, or at two places, there may be two.
        self.base: dict[str, ParameterRecord] = {}
        parameters: dict[ParameterRecord, nn.Parameter] = {}
        with only_reading():
            for tensor, record in zip(
                tree.base_tensors, tree.base_records, strict=True
            ):
                self.base[tensor.fqn] = record
                parameters[record] = tensor.parameter
            self._owners = {t.fqn: weakref.ref(t.module) for t in tree.base_tensors}
            # Those of adapters that were there before, too.
            self.flags = {
                tree.record(tensor): tensor.parameter.requires_grad
                for tensor in tree.tensors
            }
            self._fingerprints = Fingerprints(parameters.items(), audit)
        self._records = list(parameters)
        counts = Counter([record.memory for record in self._records])
        self.sharing_memory = {r for r in self._records if counts[r.memory] > 1}
        self.buffers = _buffers_of(tree)  # that a checkpoint holds, by fqn
        self._hooks = _hooks_of(tree)
        # The memo of ``deepcopy``: the copies by ``id``, and the configs, held.
        self._configs: dict[int, Any] = {}
        for config in tree.configs:
            if hasattr(config, "save_pretrained"):
                copy.deepcopy(config, self._configs)

    @property
    def sample_bytes(self) -> int:
        """The bytes of the samples that are held."""
        return sum(one.nbytes for one in self._fingerprints.samples.values())

    def config(self, config: Any) -> Any:
        """A config as it was recorded; one that is new, as it is."""
        return self._configs.get(id(config), config)

    def changed_buffers(self, tree: ModelTree) -> list[str]:
        """The names of small buffers of the checkpoint, as running statistics, that hold other values than before."""
        live = {
            join(node.fqn, name): buffer
            for node in tree.base
            for name, buffer in node.module._buffers.items()
        }
        found = []
        for fqn, recorded in self.buffers.items():
            buffer = live.get(fqn)
            if buffer is None:
                found.append(fqn)
            elif buffer.numel() > _FEW or not is_dense(buffer):
                continue
            elif content_digest(buffer) != recorded.digest():
                found.append(fqn)
        return found

    def turned_on(self, tree: ModelTree) -> list[TensorRef]:
        """The places of base parameters that a restore makes trainable under a live adapter."""
        found = []
        for record in self._records if tree.adapter_ids else ():
            parameter = record.there()
            is_frozen = parameter is not None and not parameter.requires_grad
            if is_frozen and self.flags[record]:
                found.append(record.refs[0])
        return found

    def is_alias(self, module: nn.Module, name: str) -> bool:
        """Whether a new name has a parameter that the module had under another: PEFT names AQLM's codes ``qweight``."""
        parameter = module._parameters[name]
        if parameter is None or self.records.at(module, name) is not None:
            return False
        names = [n for n, p in module._parameters.items() if p is parameter]
        return any(self.records.at(module, other) is not None for other in names)

    def follow(self, tree: ModelTree) -> None:
        """Find every parameter again, wherever others put it."""
        with only_reading():
            for record in self.flags:
                found = record.at_places()
                shard = next(filter(is_sharded_tensor, found), None)
                seen = next(filter(record.is_seen, found), None)
                if shard is not None:
                    tree.sharded[id(shard)] = record
                elif seen is not None:
                    tree.known[id(seen)] = record
            live = {*tree.live, *tree.sharded.values()}
            lost = [record for record in self.flags if record not in live]
            if lost:
                self._find_by_value(tree, self._find_by_memory(tree, lost))

    def _find_by_memory(
        self, tree: ModelTree, lost: list[ParameterRecord]
    ) -> list[ParameterRecord]:
        """Find parameters at places that they did not have, and return the records of the others."""
        by_memory = {
            key_of(tensor.parameter): tensor
            for tensor in tree.tensors
            if id(tensor.parameter) not in tree.known
        }
        still_lost = []
        for record in lost:
            tensors = [by_memory[key] for key in record.memory if key in by_memory]
            if tensors and tensors[0].parameter.shape == record.shape:
                record.moved(tree.places(tensors[0]))
                tree.known[id(tensors[0].parameter)] = record
            else:
                still_lost.append(record)
        return still_lost

    def _find_by_value(self, tree: ModelTree, lost: list[ParameterRecord]) -> None:
        """Find parameters that got other memory: what is at their place, or has their name, holds their values."""
        named = {}
        for tensor in tree.base_tensors:
            # Neither marked as a copy of the base's, nor there in a suspension before.
            is_copy = self.records.mark_of(tensor.module) is not None
            was_there = self.records.at(tensor.module, tensor.name) is not None
            if not (id(tensor.parameter) in tree.known or is_copy or was_there):
                named[tensor.fqn] = tensor
        elsewhere: dict[ParameterRecord, NamedTensor] = {}
        candidates: list[tuple[ParameterRecord, nn.Parameter]] = []
        for record in lost:
            there = next(iter(tree.at_places(record)), None)
            other = named.get(record.fqn)
            if there is None and other is not None:
                is_trained_since = other.parameter.requires_grad > self.flags[record]
                if not is_trained_since:
                    elsewhere[record] = other
                    there = other.parameter
            if there is None or there.shape != record.shape:
                continue
            if record in self._fingerprints.samples:
                candidates.append((record, there))
        changed = self._fingerprints.changed(candidates)
        for record, there in candidates:
            # A layer that rewrites a parameter moves it before training changes it.
            if record in changed and not _is_rewritten(record):
                continue
            if record in elsewhere:
                record.moved(tree.places(elsewhere[record]))
            record.saw(there)
            tree.known[id(there)] = record

    def differs(self, record: ParameterRecord, value: torch.Tensor) -> bool:
        """Whether a value is not the recorded one, as far as was recorded."""
        if self._fingerprints.changed([(record, value)]):
            return True
        digest = self._fingerprints.digests.get(record)
        return digest is not None and content_digest(value) != digest()

    def changes(
        self,
        tree: ModelTree,
        held: Sequence[HeldOriginal] = (),
        trainable: Collection[Any] | None = None,
    ) -> Changes:
        """Find what became of the base, whose originals are ``held``, in one read of each device, after ``follow``.

        ``trainable`` are the records of what may be trained; ``None``: what may be now.
        """
        found = Changes()
        there = self._compare_places(tree, found)
        values = {r: p for r, p in there.items() if r.quantized_class is None}
        changed = self._changed_values(values, held)
        for record, parameter in values.items():
            if record not in changed:
                continue
            is_trainable = parameter.requires_grad
            if trainable is not None:
                is_trainable = record in trainable
            (found.trained if is_trainable else found.drifted).append(record.fqn)
        return found

    def _compare_places(
        self, tree: ModelTree, found: Changes
    ) -> dict[ParameterRecord, nn.Parameter]:
        """Note what is at the places of the base instead of what was, and return what is there and can be compared."""
        there: dict[ParameterRecord, nn.Parameter] = {}
        live = {tensor.fqn: tensor for tensor in tree.base_tensors}
        for fqn, record in self.base.items():
            tensor = live.pop(fqn, None)
            if tensor is None:
                found.replaced[fqn] = _what_happened(record.refs[0].owner(), "is gone")
            elif not self._is_recorded(record, tensor, tree):
                what = _what_happened(tensor.module, "was replaced or resized")
                found.replaced[fqn] = what
            elif id(tensor.parameter) in tree.known:
                there[record] = tensor.parameter
            else:
                found.not_compared.append(record.fqn)
        for fqn, tensor in live.items():
            if not self.is_alias(tensor.module, tensor.name):
                found.replaced[fqn] = _what_happened(tensor.module, "was added")
        return there

    def _is_recorded(
        self, record: ParameterRecord, tensor: NamedTensor, tree: ModelTree
    ) -> bool:
        """Whether a parameter and its module are those recorded, or, as far as can be told, these sharded."""
        parameter = tensor.parameter
        if self._owners[tensor.fqn]() is not tensor.module:
            return False
        # Not by shape: a 4-bit layer that repacks its weight for the CPU gives it
        # another of as many elements.
        is_whole = not is_flattened(parameter)
        if is_whole and parameter.numel() != record.shape.numel():
            return False
        if tree.known.get(id(parameter)) is record:
            return True
        if tree.sharded.get(id(parameter)) is not record:
            return False
        if record.quant_state is None:
            return True
        return record.quant_state() is quant_state_of(tensor.module, parameter)

    def _changed_values(
        self,
        parameters: dict[ParameterRecord, nn.Parameter],
        held: Sequence[HeldOriginal],
    ) -> set[ParameterRecord]:
        """The parameters whose originals are other values than before: by what is kept of them, or else by samples."""
        holders = {one.record: one for one in held}
        answers: dict[ParameterRecord, torch.Tensor] = {}
        for record, parameter in parameters.items():
            holder = holders.get(record)
            if not isinstance(holder, StorageChange) or holder.kept is None:
                continue
            if holder.converts(parameter):
                answers[record] = holder.against_kept(parameter.data)[0]
        sampled = [(r, p) for r, p in parameters.items() if r not in answers]
        changed = self._fingerprints.changed(sampled, answers)
        for record, digest in self._fingerprints.digests.items():
            if record in answers or record not in parameters:
                continue
            holder, original = holders.get(record), values_of(parameters[record])
            if holder is not None:
                original = values_of(holder.read(parameters[record]))
            if content_digest(original) != digest():
                changed.add(record)
        return changed

    def copies(
        self, tree: ModelTree, cast: Iterable[ParameterRecord]
    ) -> list[CopyChange]:
        """Find parameters that others cast, and copies of parameters that they or we ``cast``."""
        base, ours = set(self._records), set(cast)
        resized = {
            id(tensor.parameter): record for record, tensor in tree.resized(base)
        }
        found = []
        for tensor in tree.tensors:
            parameter = tensor.parameter
            own = tree.known.get(id(parameter))
            if own is not None and own not in base:
                continue
            # Where a shared parameter is at new places only, undoing other changes may
            # free the one it is known by.
            if own in ours and self.records.at(tensor.module, tensor.name) is own:
                continue
            original = own or resized.get(id(parameter))
            original = original or self._cast_original(tree, tensor)
            dtype = self._dtype_before(tensor, original)
            if dtype is None or dtype == parameter.dtype:
                continue
            if own is None and dtype not in HALF_DTYPES:
                continue
            if not (parameter.is_floating_point() and dtype.is_floating_point):
                continue
            is_adapters = parameter.requires_grad or id(parameter) in tree.adapter_ids
            named = original or self.base.get(tensor.fqn)
            change = CopyChange(
                own or tree.record(tensor),
                parameter,
                dtype,
                is_base=own is not None or not is_adapters,
                is_resized=named is not None and parameter.shape != named.shape,
            )
            found.append(change)
        return found

    def _cast_original(
        self, tree: ModelTree, tensor: NamedTensor
    ) -> ParameterRecord | None:
        """The record whose dtype a copy is to have: what others did to it they did to the one that it has the name of.

        That one has the dtype of an adapter's copy, or the copy has taken its place.
        What a user put there is the user's, whatever its dtype.
        """
        named = self.base.get(tensor.fqn)
        is_adapter = id(tensor.parameter) in tree.adapter_ids
        if named in tree.live:
            is_cast_alike = tree.live[named].dtype == tensor.parameter.dtype
            return named if is_adapter and is_cast_alike else None
        is_copy = self.records.mark_of(tensor.module) is not None
        is_gone = named not in tree.sharded.values()
        return named if is_copy and is_gone and not is_adapter else None

    def _dtype_before(
        self, tensor: NamedTensor, original: ParameterRecord | None
    ) -> torch.dtype | None:
        """The dtype of what a parameter is, or is a copy of; ``None`` where that was not cast."""
        if original is None:
            return self.records.dtype_before(tensor.module, tensor.name)
        return original.dtype if original.quantized_class is None else None

    def half_copies(self, tree: ModelTree) -> list[NamedTensor]:
        """The parameters that stand, by name, for a half one of the base, and are stored in half as that was."""
        found = []
        for tensor in tree.tensors:
            original, parameter = self.base.get(tensor.fqn), tensor.parameter
            if original is None or original.dtype not in HALF_DTYPES:
                continue
            if id(parameter) in tree.known or parameter.dtype not in HALF_DTYPES:
                continue
            if not is_quantized_parameter(parameter):
                found.append(tensor)
        return found

    def added(self, tree: ModelTree) -> tuple[list[str], list[str]]:
        """The fqns of parameters that are not as they were, and the paths of parameters and hooks of others."""
        replaced, foreign = [], []
        for tensor in tree.tensors:
            parameter, is_base = tensor.parameter, tensor.fqn in self.base
            record = tree.known.get(id(parameter)) or tree.sharded.get(id(parameter))
            if record is not None and not self._is_other(record, parameter):
                continue
            if is_base:
                replaced.append(tensor.fqn)
            is_beside = record is None and tensor.fqn != tensor.path
            if not is_base or is_beside:
                foreign.append(tensor.path)
        hooks = _hooks_of(tree)
        foreign += [hooks[key] for key in hooks if key not in self._hooks]
        removed = [self._hooks[key] for key in self._hooks if key not in hooks]
        foreign += [f"{line} was removed" for line in removed]
        return replaced, foreign

    def _is_other(self, record: ParameterRecord, parameter: torch.Tensor) -> bool:
        """Whether a parameter has another flag, dtype or shape than it had; a shard's shape says nothing."""
        if is_sharded_tensor(parameter):
            return False
        if parameter.dtype != record.dtype:
            return True
        if record.quantized_class is None and parameter.shape != record.shape:
            return True
        return parameter.requires_grad != self.flags[record]


def _buffers_of(tree: ModelTree) -> dict[str, Buffer]:
    """The base's buffers that a checkpoint holds and training writes, by fqn; they are small."""
    found = {}
    for node in tree.base:
        for name, buffer in node.module._buffers.items():
            if buffer is None or name in node.module._non_persistent_buffers_set:
                continue
            if is_dense(buffer):
                recorded = Buffer(buffer.dtype, buffer.shape, begin_digest(buffer))
                found[join(node.fqn, name)] = recorded
    return found


def _hooks_of(tree: ModelTree) -> dict[int, str]:
    """A model's hooks by their ids, each as a line of a report."""
    found = {}
    for node in tree.modules:
        for attribute in _HOOK_DICTS:
            for key, hook in vars(node.module)[attribute].items():
                kind = attribute.strip("_").replace("_", " ").removesuffix("s")
                name = getattr(hook, "__name__", type(hook).__name__)
                found[key] = f"{node.path}: {kind} {name}"
    return found


def _is_rewritten(record: ParameterRecord) -> bool:
    """Whether a layer that the parameter is in rewrites it when it runs."""
    owners = [(ref.owner(), ref.name) for ref in record.refs]
    return any(owner and is_rewritten(owner, name) for owner, name in owners)


def _what_happened(module: nn.Module | None, otherwise: str) -> str:
    """What became of a module's parameter."""
    is_decompressed = module is not None and was_decompressed(module)
    return DECOMPRESSED if is_decompressed else otherwise
