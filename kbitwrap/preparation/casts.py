"""What a preparation casts to float32: stored so, or cast as it is used. Read-only; works on the meta device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..config import Precision, PrepareConfig
from ..edits.stand_ins import UpcastAtUse, can_stand_in
from ..edits.storage import Store
from ..errors import UnsupportedModelError
from ..model.quantization import Quantization, is_quantized_parameter, is_rewritten
from ..model.records import TensorRef, key_of
from ..model.roles import Role, parameter_roles
from ..model.tree import ModelTree, NamedTensor
from ..tensors.bits import is_composed
from ..tensors.dtypes import HALF_DTYPES


class Casts:
    """Finds what is cast of the parameters ``base`` of a model that is quantized as ``quantization`` says."""

    def __init__(
        self,
        tree: ModelTree,
        base: Sequence[NamedTensor],
        config: PrepareConfig,
        quantization: Quantization,
    ) -> None:
        self.tree = tree
        self.base = base
        self.config = config
        self.quantization = quantization

    @functools.cached_property
    def roles(self) -> dict[int, Role]:
        """The role of every parameter, by ``id``."""
        return parameter_roles(self.tree, self.config.norm_modules)

    @functools.cached_property
    def castable(self) -> list[NamedTensor]:
        """The half parameters outside the quantized storage, where the method permits a cast; none made of others."""
        if not self.quantization.casts:
            return []
        found = []
        for tensor in self.base:
            if tensor.parameter.dtype not in HALF_DTYPES or is_quantized_parameter(
                tensor.parameter
            ):
                continue
            # Assigning to ``.data`` leaves what a composed tensor is made of as it is.
            if is_composed(type(tensor.parameter)):
                self._refuse_unknown_to_peft(tensor)
            else:
                found.append(tensor)
        return found

    def _refuse_unknown_to_peft(self, tensor: NamedTensor) -> None:
        """Raise for a composed weight of a method that PEFT's function does not know, and would begin to cast."""
        quantization = self.tree.quantization
        if not quantization.is_known_to_peft:
            raise UnsupportedModelError(
                f"{tensor.path} is a {type(tensor.parameter).__name__} of {quantization.method}, whose dtype cannot be "
                "changed: PEFT's function raises half-way on this model. KbitPreparedModel(model) prepares it",
                fqn=tensor.path,
            )

    def upcast_at_use(self) -> list[UpcastAtUse]:
        """The edits by which weights are float32 where they are used, one for each role."""
        edits = []
        for role in Role:
            found = [
                tensor
                for tensor in self._upcast
                if self.roles[id(tensor.parameter)] is role
            ]
            if not found:
                continue
            # A tied weight is seen as float32 from each of its modules.
            places = [place for tensor in found for place in self.tree.places(tensor)]
            edits.append(
                UpcastAtUse(
                    "upcast",
                    tuple(tensor.fqn for tensor in found),
                    role=role,
                    weights=tuple(
                        TensorRef(weakref.ref(module), name) for module, name in places
                    ),
                    chunk_bytes=self.config.head_chunk_bytes,
                )
            )
        return edits

    @functools.cached_property
    def _upcast(self) -> list[NamedTensor]:
        """The weights that precision ``"compute"`` upcasts as they are used."""
        if self.config.precision is not Precision.COMPUTE:
            return []
        stored = {
            key_of(t.parameter)
            for t in self.castable
            if self._stored_because(t) is not None
        }
        return [t for t in self.castable if key_of(t.parameter) not in stored]

    def _stored_because(self, tensor: NamedTensor) -> str | None:
        """Why a half parameter is stored in float32 under ``"compute"``; ``None`` where it is upcast at use."""
        parameter = tensor.parameter
        is_expert = self.roles[id(parameter)] is Role.EXPERT and parameter.dim() >= 2
        is_weight = (
            isinstance(tensor.module, (nn.Linear, nn.Embedding))
            and tensor.name == "weight"
        )
        if not is_weight and not is_expert:
            return "not the weight of an embedding or of a linear layer"
        if not self.config.freeze and parameter.requires_grad:
            return "trained"
        if not all(
            can_stand_in(module, name) for module, name in self.tree.places(tensor)
        ):
            return (
                "its module does not compute with the parameter itself, or writes to it"
            )
        return None

    @functools.cached_property
    def stores(self) -> list[Store]:
        """Casts to float32, largest first: so the peak is what stays plus the last, small, originals."""
        upcast = {id(tensor.parameter) for tensor in self._upcast}
        groups: dict[int, list[NamedTensor]] = {}  # of parameters that share memory
        for tensor in self.castable:
            is_cast = (
                self.config.precision.upcasts_all and id(tensor.parameter) not in upcast
            )
            if is_cast or is_rewritten(tensor.module, tensor.name):
                groups.setdefault(key_of(tensor.parameter), []).append(tensor)
        stores = [self._store(group) for group in groups.values()]
        return sorted(stores, key=lambda edit: -edit.transient_bytes)

    def _store(self, group: list[NamedTensor]) -> Store:
        """The edit that casts parameters of one memory, or only records what their layers rewrite when they run."""
        first = group[0].parameter
        role = self.roles[id(first)]
        fqns = tuple(tensor.fqn for tensor in group)
        refs = tuple(
            TensorRef(weakref.ref(tensor.module), tensor.name) for tensor in group
        )
        rewrites = any(is_rewritten(tensor.module, tensor.name) for tensor in group)
        is_seen = key_of(first) in self._seen
        if not self.config.precision.upcasts_all:
            return Store(
                "record",
                fqns,
                role=role,
                refs=refs,
                is_rewritten=rewrites,
                is_seen=is_seen,
            )
        keep = self.config.keep_originals
        figures = self._bytes_of(
            group, keeps_host_copy=keep, rewrites=rewrites, is_seen=is_seen
        )
        reason = (
            self._stored_because(group[0])
            if self.config.precision is Precision.COMPUTE
            else None
        )
        return Store(
            "store",
            fqns,
            role=role,
            added_bytes=figures.cast - figures.freed,
            transient_bytes=figures.cast,
            reason=reason or "",
            refs=refs,
            dtype=torch.float32,
            keep=keep,
            is_rewritten=rewrites,
            is_seen=is_seen,
            record_bytes=figures.recorded,
        )

    def _bytes_of(
        self,
        group: list[NamedTensor],
        *,
        keeps_host_copy: bool,
        rewrites: bool,
        is_seen: bool,
    ) -> _CastBytes:
        parameters = [tensor.parameter for tensor in group]
        of_each = sum(parameter.nbytes for parameter in parameters)
        original = min(of_each, parameters[0].untyped_storage().nbytes())
        cast = (
            sum(parameter.numel() for parameter in parameters) * torch.float32.itemsize
        )
        # On the CPU a kept original is the original itself, which is then not freed.
        is_kept_in_place = keeps_host_copy and parameters[0].device.type == "cpu"
        if is_seen or is_kept_in_place:
            return _CastBytes(cast, freed=0, recorded=0)
        return _CastBytes(
            cast,
            freed=original,
            recorded=original if keeps_host_copy or rewrites else 0,
        )

    @functools.cached_property
    def _seen(self) -> set[int]:
        """The memory that plain tensors and buffers of modules lie in: a parameter there goes back to it."""
        found = set()
        for node in self.tree.modules:
            for value in (*vars(node.module).values(), *node.module._buffers.values()):
                if type(value) is torch.Tensor and value.layout is torch.strided:
                    found.add(key_of(value))
        return found


class _CastBytes(NamedTuple):
    """The bytes of one cast."""

    cast: int  # of the float32 storage
    freed: int  # of the original
    recorded: int  # of the original where a copy of it is kept


def peak_bytes(stores: list[Store]) -> int:
    """The most bytes live above the start, were the stores made in this order."""
    live = peak = 0
    for store in stores:
        # What else is kept is a copy on the host.
        held = store.record_bytes if store.is_rewritten else 0
        peak = max(peak, live + store.transient_bytes + held)
        live += store.added_bytes + held
    return max(peak, live)
