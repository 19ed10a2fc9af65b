"""The planner: which edits a preparation takes, and what each of them costs. Read-only; works on the meta device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config import Precision, PrepareConfig, format_bytes
from ..edits.base import EditBase
from ..edits.checkpointing import Checkpoint, refuse_without_checkpointing, refuse_without_embeddings
from ..edits.flags import Freeze, prepared_tensors
from ..edits.norms import ComputeInFloat32, Float32Forward, can_rebind_forward, computes_in_float32
from ..edits.stand_ins import HeadForward, UpcastAtUse, can_stand_in
from ..edits.storage import Store
from ..edits.training import Record
from ..errors import UnsupportedModelError
from ..model.checks import refuse_without_backward
from ..model.quantization import (
    STACKS_QUANTIZED_BY,
    Quantization,
    has_runtime_state,
    is_quantized_parameter,
    is_rewritten,
)
from ..model.records import TensorRef
from ..model.roles import Role, heads, is_norm, loses_gradients, parameter_roles, returns_float32
from ..model.tree import ModelTree, NamedTensor, Node, storage_key
from ..reports import first_of
from ..tensors.bits import is_composed
from ..tensors.dtypes import HALF_DTYPES
from .fingerprints import sample_bytes
from .process import mixed_precision


class Planner:
    """Writes the edits down; ``freeze_adapters`` treats adapters as the base, as PEFT's function does."""

    def __init__(
        self, tree: ModelTree, config: PrepareConfig, quantization: Quantization, *, freeze_adapters: bool = False
    ) -> None:
        self.tree = tree
        self.config = config
        self.quantization = quantization
        self.freeze_adapters = freeze_adapters
        self.base = prepared_tensors(tree, freeze_adapters)  # all but adapters', unless these are to be treated alike
        self.warnings: list[str] = []
        self.alarms: list[str] = []  # those of the warnings that nobody may miss

    @functools.cached_property
    def roles(self) -> dict[int, Role]:
        """The role of every parameter, by ``id``."""
        return parameter_roles(self.tree, self.config.norm_modules)

    def edits(self) -> tuple[EditBase, ...]:
        """Write the edits down, in the order in which they are applied; gathers ``warnings`` on the way."""
        if not self.quantization.is_quantized:
            self.warnings.append(
                f"{type(self.tree.model).__name__} has neither a quantization attribute nor a quantized layer: "
                "it is frozen and cast as asked, but not checkpointed"
            )
        elif self.upcast_before:
            self.warnings.append(
                f"{type(self.tree.model).__name__} was upcast before, as peft.prepare_model_for_kbit_training does it: "
                f"its config says {self._config_dtype}, and all that is not quantized, "
                f"{format_bytes(self.upcast_before)}, is frozen and float32; nothing is left to cast, and restore() "
                "returns to this state; prepare a model as from_pretrained returned it"
            )
            self.alarms += [] if self.freeze_adapters else self.warnings
        layers = [node for node in self.tree.modules if has_runtime_state(node.module)]
        refuse_without_backward(self.tree, layers)
        references = tuple(weakref.ref(node.module) for node in layers)
        fqns = tuple(t.fqn for t in self.base)
        edits: list[EditBase] = [
            Record("record", tuple(node.fqn for node in layers), layers=references),
            Freeze("freeze", fqns, freeze=self.config.freeze, freeze_adapters=self.freeze_adapters),
            *self._store,
            *self._upcast_at_use(),
            *self.compute_norms(),
            *self.compute_head(),
            self._checkpoint(),
        ]
        self._warn()
        return tuple(edits)

    @property
    def _config_dtype(self) -> Any:
        return getattr(getattr(self.tree.model, "config", None), "dtype", None)

    @functools.cached_property
    def upcast_before(self) -> int:
        """The float32 bytes of a quantized half model that somebody has frozen and upcast as a whole; else 0."""
        is_half = self.quantization.is_quantized and self._config_dtype in HALF_DTYPES
        tensors = [t for t in self.base if is_half and not is_quantized_parameter(t.parameter)]
        # A quantized layer rounds its bias when it runs.
        found = [p for t in tensors if (p := t.parameter).dtype == torch.float32 or not is_rewritten(t.module, t.name)]
        is_upcast = all(p.dtype == torch.float32 and not p.requires_grad for p in found if p.is_floating_point())
        return sum(p.nbytes for p in found) if is_upcast else 0

    def cache_bytes(self) -> int:
        """The bytes of the half originals that PEFT's way frees, and an allocator keeps."""
        return sum(t.parameter.nbytes for t in self._castable)

    def sample_bytes(self) -> int:
        """The bytes of the samples that the record of the base keeps, each parameter counted once."""
        base = {id(tensor.parameter): tensor.parameter for tensor in self.tree.base_tensors}
        return sum(map(sample_bytes, base.values()))

    @functools.cached_property
    def _castable(self) -> list[NamedTensor]:
        """The half parameters outside the quantized storage, where the method permits a cast; none made of others."""
        if not self.quantization.casts:
            return []
        half = [t for t in self.base if t.parameter.dtype in HALF_DTYPES and not is_quantized_parameter(t.parameter)]
        composed = next((t for t in half if is_composed(type(t.parameter))), None)
        if composed is not None and not (found := self.tree.quantization).is_known_to_peft:
            raise UnsupportedModelError(
                f"{composed.path} is a {type(composed.parameter).__name__} of {found.method}, whose dtype cannot be "
                "changed: PEFT's function raises half-way on this model. KbitPreparedModel(model) prepares it",
                fqn=composed.path,
            )
        # Assigning to ``.data`` leaves what such a tensor is made of as it is.
        return [t for t in half if not is_composed(type(t.parameter))]

    @functools.cached_property
    def _upcast(self) -> list[NamedTensor]:
        """The weights that precision ``"compute"`` upcasts as they are used."""
        if self.config.precision is not Precision.COMPUTE:
            return []
        stored = {storage_key(t.parameter) for t in self._castable if self._kept_in_float32_because(t) is not None}
        return [t for t in self._castable if storage_key(t.parameter) not in stored]

    @functools.cached_property
    def _seen(self) -> set[int]:
        """The memory that plain tensors and buffers of modules lie in: a parameter there goes back to it."""
        modules = [node.module for node in self.tree.modules]
        fields = [value for m in modules for value in (*vars(m).values(), *m._buffers.values())]
        return {storage_key(t) for t in fields if type(t) is torch.Tensor and t.layout is torch.strided}

    def _kept_in_float32_because(self, tensor: NamedTensor) -> str | None:
        """Why a half parameter is stored in float32 under ``"compute"``; ``None`` where it is upcast at use."""
        module, name, parameter = tensor.module, tensor.name, tensor.parameter
        is_expert = self.roles[id(parameter)] is Role.EXPERT and parameter.dim() >= 2
        if not (isinstance(module, (nn.Linear, nn.Embedding)) and name == "weight") and not is_expert:
            return "not the weight of an embedding or of a linear layer"
        if not self.config.freeze and parameter.requires_grad:
            return "trained"
        if not all(can_stand_in(m, n) for m, n in self.tree.places(tensor)):
            return "its module does not compute with the parameter itself, or writes to it"
        return None

    def _upcast_at_use(self) -> list[UpcastAtUse]:
        edits = []
        for role in Role:
            found = [t for t in self._upcast if self.roles[id(t.parameter)] is role]
            if found:
                fqns = tuple(t.fqn for t in found)
                # A tied weight is seen as float32 from each of its modules.
                weights = tuple(TensorRef(weakref.ref(m), name) for t in found for m, name in self.tree.places(t))
                chunk_bytes = self.config.head_chunk_bytes
                edits.append(UpcastAtUse("upcast", fqns, role=role, weights=weights, chunk_bytes=chunk_bytes))
        return edits

    @functools.cached_property
    def _store(self) -> list[Store]:
        """Casts to float32, largest first: so the peak is what stays plus the last, small, originals."""
        upcast = {id(t.parameter) for t in self._upcast}
        groups: dict[int, list[NamedTensor]] = {}
        for tensor in self._castable:
            is_cast = self.config.precision.upcasts_all and id(tensor.parameter) not in upcast
            if is_cast or is_rewritten(tensor.module, tensor.name):
                groups.setdefault(storage_key(tensor.parameter), []).append(tensor)
        stores = [self._store_group(group) for group in groups.values()]
        return sorted(stores, key=lambda edit: -edit.transient_bytes)

    def _store_group(self, group: list[NamedTensor]) -> Store:
        dtype = torch.float32 if self.config.precision.upcasts_all else None
        is_compute = self.config.precision is Precision.COMPUTE
        parameters = [t.parameter for t in group]
        is_kept = any(is_rewritten(t.module, t.name) for t in group)
        keep = self.config.keep_originals and dtype is not None
        shared_bytes = min(sum(p.nbytes for p in parameters), parameters[0].untyped_storage().nbytes())
        cast_bytes = sum(p.numel() * dtype.itemsize for p in parameters) if dtype is not None else 0
        # On the CPU a kept original is the original itself, which is then not freed.
        is_seen = storage_key(parameters[0]) in self._seen
        keeps_in_place = is_seen or (keep and parameters[0].device.type == "cpu")
        freed_bytes = shared_bytes if dtype is not None and not keeps_in_place else 0
        return Store(
            "store" if dtype is not None else "record",
            tuple(t.fqn for t in group),
            role=self.roles[id(parameters[0])],
            added_bytes=cast_bytes - freed_bytes,
            transient_bytes=cast_bytes,
            reason=(self._kept_in_float32_because(group[0]) or "") if is_compute else "",
            refs=tuple(TensorRef(weakref.ref(t.module), t.name) for t in group),
            dtype=dtype,
            keep=keep,
            is_rewritten=is_kept,
            is_seen=is_seen,
            record_bytes=shared_bytes if (keep or is_kept) and dtype is not None and not keeps_in_place else 0,
        )

    def compute_norms(self) -> list[ComputeInFloat32]:
        """The norms that the precision computes in float32 and that do not yet, as at most one edit."""
        precision = self.config.precision
        if precision not in (Precision.NORMS, Precision.ADAPTED) or not self.quantization.casts:
            return []
        blocks = tuple(self.tree.adapted_blocks) if precision is Precision.ADAPTED else ("",)
        # Few modules own a half parameter: only these get the slower checks.
        halves = {id(module) for tensor in self._castable for module, _ in self.tree.places(tensor)}
        found: dict[int, Node] = {}
        for node in [node for node in self.tree.base if id(node.module) in halves]:
            fqn, module = node.fqn, node.module
            if id(module) in found or not is_norm(module, self.config.norm_modules):
                continue
            if not fqn.startswith(blocks) or computes_in_float32(module):
                continue
            if can_rebind_forward(module):
                found[id(module)] = node
            else:
                self.warnings.append(
                    f"{fqn} computes as loaded: it has buffers, as norms with statistics do, or its forward was "
                    "replaced by a function that is not its method"
                )
        return _compute(list(found.values()), Role.NORM, Float32Forward)

    def compute_head(self) -> list[ComputeInFloat32]:
        """The output head in float32, and trained copies of it, where that is asked for and not so yet."""
        if self.config.head is None or self.config.precision.upcasts_all:
            return []
        found = [n for n in heads(self.tree) if self.quantization.casts and can_rebind_forward(n.module)]
        if not found:
            self.warnings.append(
                "head='float32' changes nothing: no output head was found that is an unquantized linear layer with a "
                "half weight and its own forward, in a model whose quantization method permits casts"
            )
            self.alarms.append(self.warnings[-1])
        forward = functools.partial(HeadForward, chunk_bytes=self.config.head_chunk_bytes)
        return _compute([n for n in found if not computes_in_float32(n.module)], Role.OUTPUT_EMBEDDINGS, forward)

    def _checkpoint(self) -> Checkpoint:
        enable = self.config.gradient_checkpointing and self.quantization.is_quantized
        if enable:
            refuse_without_checkpointing(self.tree)
        kwargs = dict(self.config.gradient_checkpointing_kwargs)
        hook_inputs, hook_blocks = self.config.input_require_grads, False
        if hook_inputs is None:
            # torch's own default is reentrant, also where None is given.
            use_reentrant = kwargs.get("use_reentrant")
            hook_inputs = enable and (use_reentrant is None or bool(use_reentrant))
            hook_blocks = enable and not hook_inputs
        if hook_inputs:
            refuse_without_embeddings(self.tree.model)
        return Checkpoint(
            "checkpoint",
            ("",),
            enable=enable,
            kwargs=kwargs,
            hook_inputs=hook_inputs,
            hook_blocks=hook_blocks,
            hook_model=self.config.precision.upcasts_all and self.quantization.casts,
        )

    def by_role(self, stores: list[Store]) -> dict[str, dict[str, int]]:
        """Count parameters, and the bytes they hold and are to hold, by the part they play."""
        rows = {role: {"count": 0, "bytes": 0, "added_bytes": 0} for role in Role}
        seen = set()  # what is one memory seen in one way counts once
        for tensor in self.tree.tensors:
            parameter = tensor.parameter
            view = storage_key(parameter), parameter.storage_offset(), parameter.numel()
            row = rows[self.roles[id(parameter)]]
            row["count"] += 1
            row["bytes"] += 0 if view in seen else view[2] * parameter.element_size()
            seen.add(view)
        for store in stores:
            assert store.role is not None
            rows[store.role]["added_bytes"] += store.added_bytes
        return {role.value: row for role, row in rows.items() if row["count"]}

    def _warn_of_lost_gradients(self) -> None:
        """Say which layers let no gradient through to their input: nothing else would."""
        kinds: dict[Any, bool] = {}
        found = []
        for node in self.tree.of_class(lambda cls: cls is nn.Linear):
            weight = node.module._parameters.get("weight")
            if not node.is_base or weight is None or not is_composed(type(weight)) or weight.is_meta:
                continue
            kind = type(weight), repr(weight.__tensor_flatten__()[1])  # type: ignore[attr-defined]
            if kind not in kinds:
                kinds[kind] = loses_gradients(weight)
            if kinds[kind]:
                found.append(node.fqn)
        if found:
            self.warnings.append(
                f"{len(found)} layers, {found[0]} the first, let no gradient through to their input, so adapters in "
                "front of them are trained by what goes around them, or not at all: activations that are quantized as "
                "they are used have no backward; quantize weights only"
            )
            self.alarms.append(self.warnings[-1])

    def _warn_of_unquantized_stacks(self) -> None:
        """Name the stacks of experts in a model that bitsandbytes quantizes, which loading leaves as they are."""
        experts = [t for t in self.tree.tensors if self.roles[id(t.parameter)] is Role.EXPERT and t.parameter.dim() > 2]
        if experts and self.quantization.is_quantized and self.quantization.casts:
            num_bytes = format_bytes(sum(t.parameter.nbytes for t in experts))
            self.warnings.append(
                f"{len(experts)} stacks of experts are not quantized, {experts[0].fqn} the first: {num_bytes}; "
                f"{STACKS_QUANTIZED_BY} quantizes them"
            )

    def _warn(self) -> None:
        config, quantization = self.config, self.quantization
        self._warn_of_lost_gradients()
        self.warnings += self.warnings_of_adapters()
        self._warn_of_unquantized_stacks()
        if not quantization.casts and config.precision is not Precision.NONE:
            self.warnings.append(
                f"{quantization.method} manages its own precision: precision {config.precision.value!r} changes nothing"
            )
        if config.precision.upcasts_all and quantization.casts:
            if any(self.roles[id(t.parameter)] in (Role.INPUT_EMBEDDINGS, Role.NORM) for t in self._castable):
                self.warnings.append(
                    "float32 embeddings and norms make the residual stream float32 in most models: activations take "
                    "twice the bytes, and FlashAttention refuses float32 queries, keys and values"
                )
            self._warn_of_mixed_precision()
            stored = [ref for store in self._store for ref in store.refs]
            experts = sum(p.nbytes for ref in stored if (p := ref()) is not None and self.roles[id(p)] is Role.EXPERT)
            if experts:
                self.warnings.append(f"unquantized experts are doubled: {format_bytes(experts)} more")

    def warnings_of_adapters(self, *, is_suspended: bool = False) -> list[str]:
        """Name the adapters whose float32 output breaks the half model, prepared or not; at most one."""
        halves = (p.dtype for t in self.base if not is_quantized_parameter(p := t.parameter) and p.dtype in HALF_DTYPES)
        dtype = next(halves, None)  # that the model computes in
        can_be_float32 = self.quantization.casts
        is_float32 = self.config.precision.upcasts_all and can_be_float32
        if (is_float32 and not is_suspended) or dtype is None or mixed_precision(self.base) is not None:
            return []
        found: dict[Any, list[Node]] = {}
        for node in self.tree.adapters:
            if "base_layer" in node.module._modules:
                found.setdefault((type(node.module), str(getattr(node.module, "active_adapters", ""))), []).append(node)
        names = [n.fqn for nodes in found.values() if returns_float32(nodes[0].module, dtype) for n in nodes]
        if not names:
            return []
        others = " or prepare with precision 'full' or 'compute'" if can_be_float32 and not is_float32 else ""
        return [
            f"the adapters on {first_of(names, 1)} return float32 where the model computes in {dtype}: attention, or "
            "the head, will raise that dtypes differ, as in the unprepared model; run it under autocast "
            f"(torch.autocast, Trainer(bf16=True)){others}"
        ]

    def _warn_of_mixed_precision(self) -> None:
        """Say where a policy computes in half what is cast: the bytes are spent, and the numbers are not PEFT's."""
        policy = mixed_precision(self.base)
        if policy is None or not self._castable:
            return
        if policy.casts_parameters:
            self.warnings.append(
                f"the mixed-precision policy of FSDP casts every parameter to {policy.dtype} before it is used, which "
                "nullifies the upcast: precision 'norms' or 'none' computes the same from half the bytes"
            )
        elif any(isinstance(t.module, nn.Linear) for t in self._castable):
            self.warnings.append(
                f"under {policy.dtype} autocast linear layers, the head among them, are computed in {policy.dtype} "
                "whatever they store: their upcast is nullified, as it is in PEFT"
            )


def _compute(nodes: list[Node], role: Role, forward: Callable[[nn.Module], Float32Forward]) -> list[ComputeInFloat32]:
    fqns, modules = tuple(node.fqn for node in nodes), tuple(weakref.ref(node.module) for node in nodes)
    return [ComputeInFloat32("compute", fqns, role=role, modules=modules, forward=forward)] if nodes else []


def peak_bytes(stores: list[Store]) -> int:
    """The most bytes live above the start, were the stores made in this order."""
    live = peak = 0
    for store in stores:
        # What else is kept is a copy on the host.
        held = store.record_bytes if store.is_rewritten else 0
        peak = max(peak, live + store.transient_bytes + held)
        live += store.added_bytes + held
    return max(peak, live)
