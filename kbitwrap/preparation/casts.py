"""The parameters that a preparation casts to float32: stored so, or cast as they are used.

Read-only; works on the meta device.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..config import Precision, PrepareConfig
from ..edits.adapters import cast_adapters
from ..edits.base import Edit
from ..edits.flags import prepared_tensors
from ..edits.stand_ins import can_stand_in, upcast_at_use
from ..edits.storage import store
from ..errors import ConfigError, UnsupportedModelError
from ..model.quantization import (
    Quantization,
    is_quantized_layer,
    is_quantized_parameter,
    is_rewritten,
)
from ..model.records import Place, TensorRef, key_of
from ..model.roles import Role, heads, is_norm, parameter_roles
from ..model.tree import ModelTree, NamedTensor, Node
from ..model.wrappers import is_sharded_tensor
from ..tensors.bits import digest_bytes, is_composed
from ..tensors.dtypes import HALF_DTYPES, parse_dtype

ENGINES = ("ddp", "fsdp1", "fsdp2", "zero2", "zero3")
"""The engines that train with several processes, as their names are given."""
TAKE_STAND_INS = ("fsdp1", "fsdp2")
"""The engines under which no weight can be upcast as it is used."""
_Tensors = list[NamedTensor]


def refuse_unknown_engine(engine: object) -> None:
    """Raise `ConfigError` for the name of no engine."""
    if engine not in ENGINES:
        raise ConfigError(
            f"engine: expected one of {', '.join(map(repr, ENGINES))}, found {engine!r}"
        )


@dataclass(eq=False)
class Casts:
    """Finds what is cast, by the settings and by how the model is quantized.

    Attributes:
        tree: The walk of the model, on a device or on the meta device.
        config: The settings.
        quantization: How the model is quantized, as found, or as PEFT would find it.
        freeze_adapters: Whether adapters are treated as the base, as PEFT's function
            treats them.
        engine: The engine that will shard the model, of `ENGINES`; ``None``: none is
            known.
    """

    tree: ModelTree
    config: PrepareConfig
    quantization: Quantization
    freeze_adapters: bool = False
    engine: str | None = None

    @functools.cached_property
    def base(self) -> _Tensors:
        """The parameters that are prepared, each once: all but adapters', unless these are treated alike."""
        return prepared_tensors(self.tree, self.freeze_adapters)

    @functools.cached_property
    def roles(self) -> dict[int, Role]:
        """The role of every parameter, by ``id``."""
        return parameter_roles(self.tree, self.config.norm_modules)

    def role(self, tensor: NamedTensor) -> Role:
        """Return the role of a parameter."""
        return self.roles[id(tensor.parameter)]

    @functools.cached_property
    def half(self) -> _Tensors:
        """The half parameters outside the quantized storage."""
        return [
            tensor
            for tensor in self.base
            if tensor.parameter.dtype in HALF_DTYPES
            and not is_quantized_parameter(tensor.parameter)
        ]

    @functools.cached_property
    def castable(self) -> _Tensors:
        """The half parameters, where the method permits a cast; none made of others."""
        found = []
        method = self.tree.quantization
        for tensor in self.half if self.quantization.casts else ():
            # Assigning to ``.data`` leaves what a composed tensor is made of as it is.
            kind = type(tensor.parameter)
            if not is_composed(kind):
                found.append(tensor)
            elif not method.is_known_to_peft:
                raise UnsupportedModelError(
                    f"{tensor.path} is a {kind.__name__} of {method.method}, whose "
                    "dtype cannot be changed: PEFT's function raises half-way on this "
                    "model. KbitPreparedModel(model) prepares it",
                    fqn=tensor.path,
                )
        return found

    @property
    def upcasts(self) -> list[Edit]:
        """The edits by which ``"compute"`` makes weights float32 where they are used.

        There is one for each role, in the order of the roles.
        """
        is_asked_for = self.config.precision is Precision.COMPUTE
        found = self.castable if is_asked_for else []
        upcast = [one for one in found if key_of(one.parameter) not in self._stored]
        edits = []
        for role in Role:
            tensors = [tensor for tensor in upcast if self.role(tensor) is role]
            if not tensors:
                continue
            # A tied weight is seen as float32 from each of its modules.
            refs = []
            for tensor in tensors:
                for module, name in self._places(tensor):
                    refs.append(TensorRef(weakref.ref(module), name))
            apply = upcast_at_use(refs, self.config.head_chunk_bytes)
            fqns = tuple(tensor.fqn for tensor in tensors)
            edits.append(Edit("upcast", fqns, apply, role=role))
        return edits

    def _places(self, tensor: NamedTensor) -> list[Place]:
        """Return every place of a weight, also in modules that the model is a part of."""
        places = list(self.tree.places(tensor))
        for module, name in self._outside:
            if module._parameters[name] is tensor.parameter:
                places.append((module, name))
        return places

    @functools.cached_property
    def _outside(self) -> list[Place]:
        """The places outside of the model of what could be upcast at use."""
        parameters = [tensor.parameter for tensor in self.castable]
        matrices = [one for one in parameters if one.dim() >= 2 and not one.is_meta]
        return self.tree.places_outside(matrices) if matrices else []

    @functools.cached_property
    def _stored(self) -> dict[int, str]:
        """The keys of the memory that is stored in float32, each with the reason."""
        found: dict[int, str] = {}
        for tensor in self.castable if self.config.precision.upcasts_all else ():
            reason = self._stored_because(tensor)
            if reason is not None:
                found.setdefault(key_of(tensor.parameter), reason)
        return found

    def _stored_because(self, tensor: NamedTensor) -> str | None:
        """Say why a half parameter is stored in float32; ``None``: it is upcast at use."""
        if self.config.precision is Precision.FULL:
            return ""
        parameter = tensor.parameter
        is_layers = isinstance(tensor.module, (nn.Linear, nn.Embedding))
        is_plain = is_layers and not is_quantized_layer(tensor.module)
        is_weight = is_plain and tensor.name == "weight"
        is_expert = self.role(tensor) is Role.EXPERT and parameter.dim() >= 2
        if not (is_weight or is_expert):
            return "not the weight of an embedding or of a linear layer"
        if self.engine in TAKE_STAND_INS:
            return "FSDP takes what stands in front of a weight for the weight"
        if parameter.requires_grad and not self.config.freeze:
            return "trained"
        if not all(can_stand_in(*place) for place in self._places(tensor)):
            return (
                "its module does not compute with the parameter itself, or writes to it"
            )
        return None

    @functools.cached_property
    def stores(self) -> list[Edit]:
        """The casts to float32, largest first.

        In this order the peak is what stays plus the last, small, originals.
        """
        # of parameters that share memory
        groups = defaultdict(list)
        for tensor in self.castable:
            key = key_of(tensor.parameter)
            if key in self._stored or is_rewritten(tensor.module, tensor.name):
                groups[key].append(tensor)
        stores = [self._store(group) for group in groups.values()]
        return sorted(stores, key=lambda edit: -edit.transient_bytes)

    def _store(self, group: _Tensors) -> Edit:
        """Make the edit that casts parameters of one memory.

        Where the precision stores nothing, it only records what their layers rewrite
        when they run.
        """
        parameters = [tensor.parameter for tensor in group]
        key = key_of(parameters[0])
        role = self.role(group[0])
        fqns = tuple(tensor.fqn for tensor in group)
        refs = tuple(TensorRef(weakref.ref(t.module), t.name) for t in group)
        rewrites = any(is_rewritten(t.module, t.name) for t in group)
        is_viewed = key in self._viewed
        keep = key in self._stored and self.config.keep_originals
        dtype = torch.float32 if key in self._stored else None
        held = {"keep": keep, "is_rewritten": rewrites, "is_viewed": is_viewed}
        apply = store(fqns, refs, dtype, held)
        if dtype is None:
            return Edit("record", fqns, apply, role=role, refs=refs)
        cast_bytes = sum(p.numel() for p in parameters) * dtype.itemsize
        # The originals leave their memory, unless others view it, or what is kept on the
        # CPU is the original itself.
        freed_bytes = 0
        if not (is_viewed or (keep and parameters[0].device.type == "cpu")):
            # They may overlap.
            together = sum(parameter.nbytes for parameter in parameters)
            freed_bytes = min(together, parameters[0].untyped_storage().nbytes())
        # The digest of an original is made before its cast, where no original is held.
        is_held = any(held.values())
        # of what is held elsewhere: on the CPU, or on its device
        record_bytes = freed_bytes if keep or rewrites else 0
        return Edit(
            "store",
            fqns,
            apply,
            role=role,
            added_bytes=cast_bytes - freed_bytes,
            transient_bytes=cast_bytes,
            reason=self._stored[key],
            refs=refs,
            dtype=dtype,
            record_bytes=record_bytes,
            held_bytes=record_bytes if rewrites else 0,
            digest_bytes=0 if is_held else max(map(digest_bytes, parameters)),
        )

    @functools.cached_property
    def _viewed(self) -> set[int]:
        """The keys of the memory that plain tensors and buffers of modules lie in.

        A parameter that lies there too goes back to that very memory.
        """
        found = set()
        for node in self.tree.modules:
            for value in (*vars(node.module).values(), *node.module._buffers.values()):
                if type(value) is torch.Tensor and value.layout is torch.strided:
                    found.add(key_of(value))
        return found

    @functools.cached_property
    def norms(self) -> list[Node]:
        """The norms that the precision computes in float32: all that store half, or those in blocks with an adapter.

        There are none where the quantization method permits no cast.
        """
        precision = self.config.precision
        if precision is Precision.NORMS:
            prefixes: tuple[str, ...] = ("",)  # every name begins with it
        elif precision is Precision.ADAPTED:
            prefixes = tuple(self.tree.adapted_blocks)
        else:
            return []
        half_ids = {id(tensor.parameter) for tensor in self.castable}
        found: dict[nn.Module, Node] = {}
        for node in self.tree.base:
            ids = {id(one) for one in node.module._parameters.values()}
            is_half = not ids.isdisjoint(half_ids) and node.fqn.startswith(prefixes)
            if is_half and is_norm(node.module, self.config.norm_modules):
                found.setdefault(node.module, node)
        return [*found.values()]

    @functools.cached_property
    def heads(self) -> list[Node]:
        """The output heads, and trained copies of them, that compute in float32."""
        is_asked_for = self.config.head is not None and self.quantization.casts
        if not is_asked_for or self.config.precision.upcasts_all:
            return []
        return heads(self.tree)

    @functools.cached_property
    def cast_adapters(self) -> list[Edit]:
        """The adapters that are in another dtype than asked for, as at most one edit.

        Trained copies of base modules follow the precision, and are none. Neither is
        what cannot be cast here: a shard, a composed tensor.
        """
        if self.config.adapter_dtype is None:
            return []
        dtype = parse_dtype(self.config.adapter_dtype)
        base_fqns = {tensor.fqn for tensor in self.tree.base_tensors}
        found = []
        for tensor in self.tree.tensors:
            parameter = tensor.parameter
            is_adapter = id(parameter) in self.tree.adapter_ids
            if not is_adapter or tensor.fqn in base_fqns or parameter.dtype == dtype:
                continue
            if is_sharded_tensor(parameter) or is_quantized_parameter(parameter):
                continue
            if parameter.is_floating_point() and not is_composed(type(parameter)):
                found.append(tensor)
        return [cast_adapters(found, dtype)] if found else []

    def by_role(self) -> dict[str, dict[str, int]]:
        """Count parameters, and the bytes they hold and are to hold, by role."""
        rows = {role: {"count": 0, "bytes": 0, "added_bytes": 0} for role in Role}
        for tensor in self.tree.tensors:
            row = rows[self.role(tensor)]
            row["count"] += 1
            row["bytes"] += tensor.parameter.nbytes
        for edit in [*self.stores, *self.cast_adapters]:
            assert edit.role is not None
            rows[edit.role]["added_bytes"] += edit.added_bytes
        return {role.value: row for role, row in rows.items() if row["count"]}


def peak_bytes(edits: Sequence[Edit]) -> int:
    """Return the most bytes live above the start, were the edits made in this order."""
    live = peak = 0
    for edit in edits:
        # What else is kept is a copy on the host.
        made = edit.transient_bytes + edit.held_bytes
        peak = max(peak, live + made, live + edit.digest_bytes)
        live += edit.added_bytes + edit.held_bytes
    return max(peak, live)
