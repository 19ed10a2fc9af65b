"""The parameters that a preparation casts to float32: stored so, or cast as they are used.

Read-only; works on the meta device.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from ..config import Precision, PrepareConfig
from ..edits.base import EditBase
from ..edits.flags import prepared_tensors
from ..edits.stand_ins import UpcastAtUse, can_stand_in
from ..edits.storage import Store
from ..errors import ConfigError, UnsupportedModelError
from ..model.quantization import (
    Quantization,
    is_quantized_layer,
    is_quantized_parameter,
    is_rewritten,
)
from ..model.records import Place, TensorRef, key_of
from ..model.roles import Role, parameter_roles
from ..model.tree import ModelTree, NamedTensor
from ..tensors.bits import digest_bytes, is_composed
from ..tensors.dtypes import HALF_DTYPES

ENGINES = ("ddp", "fsdp1", "fsdp2", "zero2", "zero3")
"""The engines that train with several processes, as their names are given."""
TAKE_STAND_INS = ("fsdp1", "fsdp2")
"""Those under which no weight can be upcast as it is used."""
_Tensors = list[NamedTensor]


def refuse_unknown_engine(engine: object) -> None:
    """Raise `ConfigError` for the name of no engine."""
    if engine not in ENGINES:
        raise ConfigError(
            f"engine: expected one of {', '.join(map(repr, ENGINES))}, found {engine!r}"
        )


class Casts:
    """Finds what is cast, by the settings and by how the model is quantized.

    Args:
        tree: The walk of the model, on a device or on the meta device.
        config: The settings.
        quantization: How the model is quantized, as found, or as PEFT would find it.
        freeze_adapters: Whether adapters are treated as the base, as PEFT's function
            treats them.
        engine: The engine that will shard the model, of `ENGINES`; ``None``: none is
            known.

    Attributes:
        base: The parameters that are prepared, each once.
    """

    def __init__(
        self,
        tree: ModelTree,
        config: PrepareConfig,
        quantization: Quantization,
        freeze_adapters: bool = False,
        engine: str | None = None,
    ) -> None:
        self.tree = tree
        self.engine = engine
        self.config = config
        self.quantization = quantization
        self.freeze_adapters = freeze_adapters
        # all but adapters', unless these are to be treated alike
        self.base = prepared_tensors(tree, freeze_adapters)

    @functools.cached_property
    def roles(self) -> dict[int, Role]:
        """The role of every parameter, by ``id``."""
        return parameter_roles(self.tree, self.config.norm_modules)

    def role(self, tensor: NamedTensor) -> Role:
        """The role of a parameter."""
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
        for tensor in self.half if self.quantization.casts else ():
            # Assigning to ``.data`` leaves what a composed tensor is made of as it is.
            if is_composed(type(tensor.parameter)):
                self._refuse_unknown_to_peft(tensor)
            else:
                found.append(tensor)
        return found

    def _refuse_unknown_to_peft(self, tensor: NamedTensor) -> None:
        """Raise for a composed weight of a method that PEFT's function does not know.

        That function would begin to cast it, and raise half-way.
        """
        quantization = self.tree.quantization
        if not quantization.is_known_to_peft:
            raise UnsupportedModelError(
                f"{tensor.path} is a {type(tensor.parameter).__name__} of "
                f"{quantization.method}, whose dtype cannot be changed: PEFT's "
                "function raises half-way on this model. KbitPreparedModel(model) "
                "prepares it",
                fqn=tensor.path,
            )

    @property
    def upcasts(self) -> list[UpcastAtUse]:
        """The edits by which weights are float32 where they are used.

        There is one for each role, in the order of the roles.
        """
        by_role: defaultdict[Role, _Tensors] = defaultdict(list)
        for tensor in self._upcast:
            by_role[self.role(tensor)].append(tensor)
        edits = []
        for role in Role:
            if role not in by_role:
                continue
            # A tied weight is seen as float32 from each of its modules.
            weights = [
                TensorRef(weakref.ref(module), name)
                for tensor in by_role[role]
                for module, name in self._places(tensor)
            ]
            edit = UpcastAtUse(
                "upcast",
                _fqns(by_role[role]),
                role=role,
                weights=tuple(weights),
                chunk_bytes=self.config.head_chunk_bytes,
            )
            edits.append(edit)
        return edits

    def _places(self, tensor: NamedTensor) -> list[Place]:
        """Every place of a weight, also in modules that the model is a part of."""
        outside = [
            (module, name)
            for module, name in self._outside
            if module._parameters[name] is tensor.parameter
        ]
        return [*self.tree.places(tensor), *outside]

    @functools.cached_property
    def _outside(self) -> list[Place]:
        """The places outside of the model of what could be upcast at use."""
        parameters = [tensor.parameter for tensor in self.castable]
        matrices = [one for one in parameters if one.dim() >= 2 and not one.is_meta]
        return self.tree.places_outside(matrices) if matrices else []

    @functools.cached_property
    def _upcast(self) -> _Tensors:
        """The weights that precision ``"compute"`` upcasts as they are used."""
        if self.config.precision is not Precision.COMPUTE:
            return []
        stored = {
            key_of(tensor.parameter)
            for tensor in self.castable
            if self._stored_because(tensor)
        }
        return [t for t in self.castable if key_of(t.parameter) not in stored]

    def _stored_because(self, tensor: NamedTensor) -> str:
        """Why a half parameter is stored in float32 under ``"compute"``.

        The reason is empty where the parameter is upcast at use.
        """
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
        return ""

    @functools.cached_property
    def stores(self) -> list[Store]:
        """Casts to float32, largest first.

        So the peak is what stays plus the last, small, originals.
        """
        upcast = {id(tensor.parameter) for tensor in self._upcast}
        # of parameters that share memory
        groups: defaultdict[int, _Tensors] = defaultdict(list)
        for tensor in self.castable:
            is_stored = id(tensor.parameter) not in upcast
            is_cast = is_stored and self.config.precision.upcasts_all
            if is_cast or is_rewritten(tensor.module, tensor.name):
                groups[key_of(tensor.parameter)].append(tensor)
        stores = [self._store(group) for group in groups.values()]
        return sorted(stores, key=lambda edit: -edit.transient_bytes)

    def _store(self, group: _Tensors) -> Store:
        """The edit that casts parameters of one memory.

        Where the precision stores nothing, it only records what their layers rewrite
        when they run.
        """
        parameters = [tensor.parameter for tensor in group]
        refs = [TensorRef(weakref.ref(tensor.module), tensor.name) for tensor in group]
        record = Store(
            "record",
            _fqns(group),
            role=self.role(group[0]),
            refs=tuple(refs),
            is_rewritten=any(is_rewritten(t.module, t.name) for t in group),
            is_viewed=key_of(parameters[0]) in self._viewed,
        )
        if not self.config.precision.upcasts_all:
            return record
        keep = self.config.keep_originals
        cast_bytes = sum(p.numel() for p in parameters) * torch.float32.itemsize
        # The originals leave their memory, unless others view it, or what is kept on the
        # CPU is the original itself.
        stays = record.is_viewed or (keep and parameters[0].device.type == "cpu")
        freed_bytes = 0
        if not stays:
            # They may overlap.
            together = sum(parameter.nbytes for parameter in parameters)
            freed_bytes = min(together, parameters[0].untyped_storage().nbytes())
        # The digest of an original is made before its cast, where no original is held.
        is_held = record.is_rewritten or record.is_viewed or keep
        digests = [0 if is_held else digest_bytes(one) for one in parameters]
        is_compute = self.config.precision is Precision.COMPUTE
        return dataclasses.replace(
            record,
            action="store",
            added_bytes=cast_bytes - freed_bytes,
            transient_bytes=cast_bytes,
            digest_bytes=max(digests),
            reason=self._stored_because(group[0]) if is_compute else "",
            dtype=torch.float32,
            keep=keep,
            # of what is held elsewhere: on the CPU, or on its device by a `StorageChange`
            record_bytes=freed_bytes if keep or record.is_rewritten else 0,
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


def _fqns(tensors: _Tensors) -> tuple[str, ...]:
    """The names of parameters, as an edit shows them."""
    return tuple(tensor.fqn for tensor in tensors)


def peak_bytes(edits: Sequence[EditBase]) -> int:
    """The most bytes live above the start, were the edits made in this order."""
    live = peak = 0
    for edit in edits:
        # What else is kept is a copy on the host.
        held = edit.held_bytes
        peak = max(peak, live + edit.transient_bytes + held, live + edit.digest_bytes)
        live += edit.added_bytes + held
    return max(peak, live)
