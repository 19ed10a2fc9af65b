"""The record of the unprepared model, which restore, verify, export and the manifest all read.

It holds no parameter, and no value but samples: see ``ParameterRecord`` and
``Fingerprints``.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..edits.base import HeldOriginal
from ..edits.checkpointing import input_gradient_hooks
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
from ..tensors.devices import accelerators, function_of
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import values_of
from .fingerprints import Fingerprints
from .moments import Memory, Moment, State

# its digest, begun when recorded, is read when asked for
Buffer = tuple[torch.dtype, torch.Size, Callable[[], int]]
REPLACED, DECOMPRESSED = (
    "was replaced or resized",
    "was decompressed by its library when the model ran",
)
_FEW = 1 << 16  # elements of a buffer that is compared
_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def signature(tree: ModelTree) -> int:
    """A hash, good in this process, of what a plan depends on: modules, parameters, and what these are and where."""
    # flat: hundreds of tuples would be work for the garbage collector
    parts: list[Any] = []
    for node in tree.nodes:
        parts += node.path, id(node.module), type(node.module), len(vars(node.module))
    try:
        for tensor in tree.all_tensors:
            p = tensor.parameter
            parts += (
                tensor.name,
                id(p),
                p.dtype,
                p.shape,
                p.device,
                p.requires_grad,
                p.data_ptr(),
            )
    except RuntimeError:
        return 0  # as of no model that can be planned
    return hash(tuple(parts))


def read_moment(tree: ModelTree) -> Moment:
    """Read a model as it is now."""
    with only_reading():
        return Moment(_state(tree), _memory(tree))


def _state(tree: ModelTree) -> State:
    modules: dict[nn.Module, str] = {}
    for node in tree.base:
        modules.setdefault(node.module, node.fqn)
    use_cache = getattr(getattr(tree.model, "config", None), "use_cache", None)
    return State(
        input_gradient_hooks={
            fqn: len(keys)
            for m, fqn in modules.items()
            if (keys := input_gradient_hooks(m))
        },
        checkpointing=tuple(
            [
                fqn
                for m, fqn in modules.items()
                if vars(m).get("gradient_checkpointing") is True
            ]
        ),
        use_cache=use_cache if isinstance(use_cache, bool) else None,
        num_modules=len(modules),
        num_training=sum([module.training for module in modules]),
    )


def _memory(tree: ModelTree) -> Memory:
    parameters = [tensor.parameter for tensor in tree.tensors]
    storages = [parameter.untyped_storage() for parameter in parameters]
    devices = accelerators(parameters)
    return Memory(
        parameter_bytes=sum(
            {storage._cdata: storage.nbytes() for storage in storages}.values()
        ),
        allocated_bytes=_on_devices(devices, "memory_allocated"),
        reserved_bytes=_on_devices(devices, "memory_reserved"),
    )


def _on_devices(devices: Collection[torch.device], function: str) -> int | None:
    """The sum of what a function of each device's module counts; ``None`` where there is none to ask."""
    counts = [(function_of(device.type, function), device) for device in devices]
    found = [count(device) for count, device in counts if count is not None]
    return sum(found) if found else None


def configs_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The configs of a module that are saved with a checkpoint, each with its attribute's name."""
    found = [(name, vars(module).get(name)) for name in CONFIG_ATTRIBUTES]
    return [(name, config) for name, config in found if _is_saved(config)]


def _is_saved(config: Any) -> bool:
    # Of the class first: asking a config of transformers takes many times as long.
    return hasattr(type(config), "save_pretrained") or hasattr(
        config, "save_pretrained"
    )


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
        with only_reading():
            self._modules = {
                node.fqn: weakref.ref(node.module) for node in tree.plain_base
            }
            self.base = dict(
                zip(
                    [tensor.fqn for tensor in tree.base_tensors],
                    tree.base_records,
                    strict=True,
                )
            )
            once = dict(
                zip(
                    tree.base_records,
                    [tensor.parameter for tensor in tree.base_tensors],
                    strict=True,
                )
            )
            self._records = list(once)
            self._fingerprints = Fingerprints(once.items(), audit)
            # Those of adapters that were there before, too.
            adapters = (
                [t for t in tree.tensors if id(t.parameter) in tree.adapter_ids]
                if tree.adapter_ids
                else []
            )
            self.flags = {
                record: parameter.requires_grad for record, parameter in once.items()
            }
            self.flags.update(
                {tree.record(t): t.parameter.requires_grad for t in adapters}
            )
        # by ``id``; the memo of ``deepcopy`` holds the configs
        self._configs: dict[int, Any] = {}
        self._buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, Buffer]] = (
            weakref.WeakKeyDictionary()
        )
        self._hooks = _hooks_of(tree)
        for m in [node.module for node in tree.modules]:
            saved = [
                (n, b)
                for n, b in m._buffers.items()
                if b is not None and n not in m._non_persistent_buffers_set
            ]
            # Training writes them, and they are small.
            self._buffers[m] = {
                n: (b.dtype, b.shape, begin_digest(b)) for n, b in saved if is_dense(b)
            }
        for config in tree.configs:
            if _is_saved(config):
                copy.deepcopy(config, self._configs)
        first: dict[Any, ParameterRecord] = {}
        others = [
            record
            for record in once
            if first.setdefault(record.memory, record) is not record
        ]
        self.sharing_memory = {
            one for record in others for one in (record, first[record.memory])
        }

    @functools.cached_property
    def _inside(self) -> dict[str, dict[str, ParameterRecord]]:
        """The records of the base by their names in the modules that hold them, by these modules' fqns."""
        found: dict[str, dict[str, ParameterRecord]] = {}
        for fqn, record in self.base.items():
            owner, _, name = fqn.rpartition(".")
            found.setdefault(owner, {})[name] = record
        return found

    @property
    def sample_bytes(self) -> int:
        """The bytes of the samples that are held."""
        return self._fingerprints.num_bytes

    def config(self, config: Any) -> Any:
        """A config as it was recorded; one that is new, as it is."""
        return self._configs.get(id(config), config)

    def buffer(
        self, module: nn.Module, name: str
    ) -> tuple[torch.dtype, torch.Size, int] | None:
        """The recorded dtype, shape and digest of a persistent buffer; ``None`` where it was not there."""
        found = self._buffers.get(module, {}).get(name)
        return None if found is None else (*found[:2], found[2]())

    def changed_buffers(self, tree: ModelTree) -> list[str]:
        """The names of small buffers of the checkpoint, as running statistics, that hold other values than before."""
        found = []
        for node in tree.base:
            for name, (_, _, digest) in self._buffers.get(node.module, {}).items():
                buffer = node.module._buffers.get(name)
                is_compared = (
                    buffer is not None and buffer.numel() <= _FEW and is_dense(buffer)
                )
                if buffer is None or (
                    is_compared and content_digest(buffer) != digest()
                ):
                    found.append(join(node.fqn, name))
        return found

    def turned_on(self, tree: ModelTree) -> list[TensorRef]:
        """The places of base parameters that a restore makes trainable under a live adapter."""
        if not tree.adapter_ids:
            return []
        found = []
        for record in self._records:
            parameter = record.there()
            if (
                self.flags[record]
                and parameter is not None
                and not parameter.requires_grad
            ):
                found.append(record.refs[0])
        return found

    def is_alias(self, module: nn.Module, name: str) -> bool:
        """Whether a new name has a parameter that the module had under another: PEFT names AQLM's codes ``qweight``."""
        parameter, at = module._parameters[name], self.records.at
        had = parameter is not None and at(module, name) is None
        return had and any(
            p is parameter and at(module, other) is not None
            for other, p in module._parameters.items()
        )

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
        new = [
            tensor for tensor in tree.tensors if id(tensor.parameter) not in tree.known
        ]
        by_memory = {key_of(tensor.parameter): tensor for tensor in new}
        still_lost = []
        for record in lost:
            tensor = next(
                (by_memory[key] for key in record.memory if key and key in by_memory),
                None,
            )
            if tensor is None or tensor.parameter.shape != record.shape:
                still_lost.append(record)
                continue
            record.moved(tree.places(tensor))
            tree.known[id(tensor.parameter)] = record
        return still_lost

    def _find_by_value(self, tree: ModelTree, lost: list[ParameterRecord]) -> None:
        """Find parameters that got other memory: what is at their place, or has their name, holds their values."""
        new = [
            tensor
            for tensor in tree.base_tensors
            if id(tensor.parameter) not in tree.known
        ]
        # neither marked as copies of the base's modules, nor there in a suspension before
        unknown = [
            tensor
            for tensor in new
            if self.records.mark_of(tensor.module) is None
            and self.records.at(tensor.module, tensor.name) is None
        ]
        named = {tensor.fqn: tensor for tensor in unknown}
        elsewhere: dict[ParameterRecord, NamedTensor] = {}
        candidates = []
        for record in lost:
            there: torch.Tensor | None = next(iter(tree.at_places(record)), None)
            tensor = named.get(record.fqn)
            if (
                there is None
                and tensor is not None
                and tensor.parameter.requires_grad <= self.flags[record]
            ):
                elsewhere[record] = tensor
                there = tensor.parameter
            if (
                there is not None
                and there.shape == record.shape
                and self._fingerprints.has(record)
            ):
                candidates.append((record, there))
        changed = self._fingerprints.changed(candidates) if candidates else set()
        for record, there in candidates:
            # A layer that rewrites a parameter moves it before training changes it.
            if record in changed and not any(
                (m := ref.owner()) and is_rewritten(m, ref.name) for ref in record.refs
            ):
                continue
            if record in elsewhere:
                record.moved(tree.places(elsewhere[record]))
            record.saw(there)
            tree.known[id(there)] = record

    def differs(self, record: ParameterRecord, value: torch.Tensor) -> bool:
        """Whether a value is not the recorded one, as far as was recorded."""
        return bool(
            self._fingerprints.changed([(record, value)], lambda _, found: found)
        )

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
        live = {node.fqn: node.module for node in tree.plain_base}
        holders = {id(one.record): one for one in held}
        compared: dict[ParameterRecord, torch.Tensor] = {}
        for fqn, reference in self._modules.items():
            module, inside = live.pop(fqn, None), self._inside.get(fqn, {})
            if module is not None and not (inside or module._parameters):
                continue
            if module is None:
                if any(name.startswith(f"{fqn}.") for name in self.base):
                    found.replaced[fqn] = "is gone"
                continue
            if inside and module is not reference():
                found.replaced[fqn] = "was replaced"
                continue
            for name, current in module._parameters.items():
                record = inside.get(name)
                if current is None and record is None:
                    continue
                if (
                    current is None
                    or record is None
                    or not _is_recorded(record, module, current, tree)
                ):
                    if not self.is_alias(module, name):
                        found.replaced[join(fqn, name)] = (
                            DECOMPRESSED if was_decompressed(module) else REPLACED
                        )
                elif id(current) in tree.known:
                    compared[record] = current
                else:
                    found.not_compared.append(record.fqn)
            if not inside.keys() <= module._parameters.keys():
                what = DECOMPRESSED if was_decompressed(module) else REPLACED
                found.replaced.update(
                    {join(fqn, n): what for n in inside if n not in module._parameters}
                )
        for fqn, module in live.items():
            if any(parameter is not None for parameter in module._parameters.values()):
                found.replaced[fqn] = "was added"
        unquantized = [(r, p) for r, p in compared.items() if r.quantized_class is None]
        kept = {}
        for record, value in unquantized:
            holder = holders.get(id(record))
            if (
                isinstance(holder, StorageChange)
                and holder.kept is not None
                and holder.converts(value)
            ):
                kept[record] = holder

        def original_of(
            record: ParameterRecord, parameter: torch.Tensor
        ) -> torch.Tensor:
            holder = holders.get(id(record))
            return values_of(parameter if holder is None else holder.read(parameter))

        whole = {
            r: holder.against_kept(compared[r].data)[0] for r, holder in kept.items()
        }
        changed = self._fingerprints.changed(
            [(r, p) for r, p in unquantized if r not in kept], original_of, whole
        )
        for record, parameter in compared.items():
            if record in changed:
                is_trained = (
                    parameter.requires_grad
                    if trainable is None
                    else record in trainable
                )
                (found.trained if is_trained else found.drifted).append(record.fqn)
        return found

    def gone(self, changes: Changes) -> list[str]:
        """The names of the parameters of the base that are not there any more."""
        inside = [
            join(fqn, name)
            for fqn in changes.replaced
            for name in self._inside.get(fqn, {})
        ]
        return [fqn for fqn in (*changes.replaced, *inside) if fqn in self.base]

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
            original = (
                own or resized.get(id(parameter)) or self._cast_original(tree, tensor)
            )
            dtype = (
                self.records.dtype_before(tensor.module, tensor.name)
                if original is None
                else original.dtype
            )
            if (
                dtype is None
                or dtype == parameter.dtype
                or (own is None and dtype not in HALF_DTYPES)
            ):
                continue
            if original is not None and original.quantized_class is not None:
                continue
            if not (parameter.is_floating_point() and dtype.is_floating_point):
                continue
            record = own or tree.record(tensor)
            is_base = own is not None or not (
                parameter.requires_grad or id(parameter) in tree.adapter_ids
            )
            named = original or self.base.get(tensor.fqn)
            is_resized = named is not None and parameter.shape != named.shape
            found.append(
                CopyChange(
                    record, parameter, dtype, is_base=is_base, is_resized=is_resized
                )
            )
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

    def half_copies(self, tree: ModelTree) -> list[NamedTensor]:
        """The parameters that stand, by name, for a half one of the base, and are stored in half as that was."""
        found = []
        for tensor in tree.tensors:
            original, parameter = self.base.get(tensor.fqn), tensor.parameter
            is_half = (
                parameter.dtype in HALF_DTYPES
                and original is not None
                and original.dtype in HALF_DTYPES
            )
            if (
                is_half
                and id(parameter) not in tree.known
                and not is_quantized_parameter(parameter)
            ):
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
        foreign += [line for key, line in hooks.items() if key not in self._hooks]
        foreign += [
            f"{line} was removed"
            for key, line in self._hooks.items()
            if key not in hooks
        ]
        return replaced, foreign

    def _is_other(self, record: ParameterRecord, parameter: torch.Tensor) -> bool:
        """Whether a parameter has another flag, dtype or shape than it had; a shard's shape says nothing."""
        if is_sharded_tensor(parameter):
            return False
        is_reshaped = record.quantized_class is None and parameter.shape != record.shape
        is_cast = parameter.dtype != record.dtype
        return is_cast or is_reshaped or parameter.requires_grad != self.flags[record]


def _hooks_of(tree: ModelTree) -> dict[int, str]:
    """A model's hooks by their ids, each as a line of a report."""
    found = {}
    for node in tree.modules:
        for name in _HOOK_DICTS:
            kind = name.strip("_").replace("_", " ").removesuffix("s")
            for key, hook in vars(node.module)[name].items():
                found[key] = (
                    f"{node.path}: {kind} {getattr(hook, '__name__', type(hook).__name__)}"
                )
    return found


def _is_recorded(
    record: ParameterRecord, module: nn.Module, parameter: torch.Tensor, tree: ModelTree
) -> bool:
    """Whether a live parameter of a module is the one recorded, or, as far as can be told, that one sharded."""
    # Not by shape: a 4-bit layer that repacks its weight for the CPU gives it another
    # of as many elements.
    if parameter.numel() != record.shape.numel() and not is_flattened(parameter):
        return False
    if tree.known.get(id(parameter)) is record:
        return True
    if tree.sharded.get(id(parameter)) is not record:
        return False
    return record.quant_state is None or record.quant_state() is quant_state_of(
        module, parameter
    )
