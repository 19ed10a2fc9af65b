"""The planner: which edits a preparation takes, and what each of them costs.

Read-only; works on the meta device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..config import Precision, PrepareConfig, format_bytes
from ..edits.adapters import CastAdapters
from ..edits.base import EditBase
from ..edits.checkpointing import (
    Checkpoint,
    refuse_without_checkpointing,
    refuse_without_embeddings,
)
from ..edits.flags import Freeze
from ..edits.norms import (
    ComputeInFloat32,
    Float32Forward,
    can_rebind_forward,
    computes_in_float32,
)
from ..edits.stand_ins import HeadForward
from ..edits.training import Record
from ..model.checks import refuse_transposed_scales, refuse_without_backward
from ..model.pretrained import ASSUMED
from ..model.quantization import (
    Quantization,
    has_runtime_state,
    is_quantized_parameter,
    is_rewritten,
)
from ..model.records import key_of
from ..model.roles import Role, heads, is_norm
from ..model.tree import ModelTree, Node
from ..model.wrappers import is_sharded_tensor
from ..tensors.bits import digest_bytes, is_composed, is_dense
from ..tensors.dtypes import HALF_DTYPES, parse_dtype
from . import advice
from .casts import Casts
from .fingerprints import sample_bytes


class Planner(Casts):
    """Writes the edits down, the casts among them, and gathers warnings.

    Attributes:
        warnings: Consequences that need attention.
        alarms: Those of them that nobody may miss.
    """

    def __init__(
        self,
        tree: ModelTree,
        config: PrepareConfig,
        quantization: Quantization,
        *,
        freeze_adapters: bool = False,
        engine: str | None = None,
    ) -> None:
        super().__init__(tree, config, quantization, freeze_adapters, engine)
        self.warnings: list[str] = []
        self.alarms: list[str] = []

    def _alarm(self, *warnings: str) -> None:
        """Add warnings that nobody may miss."""
        self.warnings += warnings
        self.alarms += warnings

    def edits(self) -> tuple[EditBase, ...]:
        """Write the edits down, in the order in which they are applied.

        Warnings are gathered on the way, those of what the model is first.
        """
        self._warn_of_what_it_is()
        layers = [node for node in self.tree.modules if has_runtime_state(node.module)]
        refuse_without_backward(self.tree, layers)
        refuse_transposed_scales(layers)
        edits: list[EditBase] = [
            Record("record", tuple(node.fqn for node in layers)),
            Freeze(
                "freeze",
                tuple(tensor.fqn for tensor in self.base),
                freeze=self.config.freeze,
                freeze_adapters=self.freeze_adapters,
            ),
            *self.stores,
            *self.upcasts,
            *self.cast_adapters,
            *self.compute_norms(),
            *self.compute_head(),
            self._checkpoint(),
        ]
        self._alarm(*advice.of_lost_gradients(self.tree))
        self.warnings += advice.of_adapters(self)
        self.warnings += advice.of_unquantized_stacks(self)
        self.warnings += advice.of_precision(self)
        self.warnings += vars(self.tree.model).get(ASSUMED, ())
        return tuple(edits)

    def _warn_of_what_it_is(self) -> None:
        """Warn of a model that is not quantized, or was upcast before."""
        name = type(self.tree.model).__name__
        if not self.quantization.is_quantized:
            self.warnings.append(
                f"{name} has neither a quantization attribute nor a quantized layer: "
                "it is frozen and cast as asked, but not checkpointed"
            )
            return
        dtype = getattr(getattr(self.tree.model, "config", None), "dtype", None)
        num_bytes = self._upcast_before() if dtype in HALF_DTYPES else 0
        if not num_bytes:
            return
        warning = (
            f"{name} was upcast before, as peft.prepare_model_for_kbit_training does "
            f"it: its config says {dtype}, and all that is not quantized, "
            f"{format_bytes(num_bytes)}, is frozen and float32; nothing is left to "
            "cast, and restore() returns to this state; prepare a model as "
            "from_pretrained returned it"
        )
        self.warnings.append(warning)
        if not self.freeze_adapters:
            self.alarms.append(warning)

    def _upcast_before(self) -> int:
        """The float32 bytes of what is not quantized, if all was frozen and upcast.

        Else 0: then nobody has prepared the model.
        """
        num_bytes = 0
        for tensor in self.base:
            parameter = tensor.parameter
            if is_quantized_parameter(parameter):
                continue
            is_float32 = parameter.dtype == torch.float32
            if not is_float32 and is_rewritten(tensor.module, tensor.name):
                continue  # a quantized layer rounds its bias when it runs
            is_upcast = is_float32 and not parameter.requires_grad
            if parameter.is_floating_point() and not is_upcast:
                return 0
            num_bytes += parameter.nbytes
        return num_bytes

    @functools.cached_property
    def cast_adapters(self) -> list[CastAdapters]:
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
            is_adapter = id(tensor.parameter) in self.tree.adapter_ids
            if not is_adapter or tensor.fqn in base_fqns:
                continue
            if tensor.parameter.dtype != dtype and _can_be_cast(tensor.parameter):
                found.append(tensor)
        return [CastAdapters.of(found, dtype)] if found else []

    @property
    def memory_edits(self) -> list[EditBase]:
        """The edits that take memory, in the order in which they are applied."""
        return [*self.stores, *self.cast_adapters]

    def record_bytes(self) -> int:
        """The bytes of the originals that are held beside what is cast."""
        stores = sum(edit.record_bytes for edit in self.stores)
        return stores + sum(edit.record_bytes for edit in self.cast_adapters)

    def sample_bytes(self) -> int:
        """The bytes of the samples that the record of the base keeps.

        Each parameter counts once.
        """
        tensors = self.tree.base_tensors
        base = {id(tensor.parameter): tensor.parameter for tensor in tensors}
        return sum(sample_bytes(parameter) for parameter in base.values())

    def audit_bytes(self) -> int:
        """The most bytes that a digest holds of those that ``audit`` makes at first."""
        if not self.config.audit:
            return 0
        parameters = [tensor.parameter for tensor in self.tree.base_tensors]
        plain = [p for p in parameters if not is_quantized_parameter(p) and is_dense(p)]
        return max(map(digest_bytes, plain), default=0)

    def compute_norms(self) -> list[ComputeInFloat32]:
        """The norms that the precision computes in float32, as at most one edit.

        Those that compute so already are left out: adapters may be new, and the rest
        not.
        """
        precision = self.config.precision
        if precision is Precision.NORMS:
            blocks: tuple[str, ...] = ("",)
        elif precision is Precision.ADAPTED:
            blocks = tuple(self.tree.adapted_blocks)
        else:
            return []
        halves: set[nn.Module] = set()  # which have something to cast
        for tensor in self.castable:
            halves.update(module for module, _ in self.tree.places(tensor))
        found: dict[nn.Module, Node] = {}
        for node in self.tree.base:
            module = node.module
            if module not in halves or not node.fqn.startswith(blocks):
                continue
            if computes_in_float32(module):
                continue
            if is_norm(module, self.config.norm_modules):
                found.setdefault(module, node)
        nodes = []
        for module, node in found.items():
            if can_rebind_forward(module):
                nodes.append(node)
            else:
                self.warnings.append(
                    f"{node.fqn} computes as loaded: it has buffers, as norms with "
                    "statistics do, or its forward was replaced by a function that is "
                    "not its method"
                )
        return _compute(nodes, Role.NORM, Float32Forward)

    def compute_head(self) -> list[ComputeInFloat32]:
        """The output head in float32, and trained copies of it, as at most one edit.

        None where that was not asked for, and of those that compute so already.
        """
        if self.config.head is None or self.config.precision.upcasts_all:
            return []
        found = [node for node in heads(self.tree) if can_rebind_forward(node.module)]
        if not found or not self.quantization.casts:
            self._alarm(
                "head='float32' changes nothing: no output head was found that is an "
                "unquantized linear layer with a half weight and its own forward, in "
                "a model whose quantization method permits casts"
            )
            return []
        new = [node for node in found if not computes_in_float32(node.module)]
        chunk_bytes = self.config.head_chunk_bytes
        forward = functools.partial(HeadForward, chunk_bytes=chunk_bytes)
        return _compute(new, Role.OUTPUT_EMBEDDINGS, forward)

    def _checkpoint(self) -> Checkpoint:
        """The edit that enables checkpointing, and hooks what that needs hooked.

        Reentrant checkpointing of a frozen model needs inputs that require grad. The other
        kind needs none, but its blocks are hooked for backward hooks of others.
        """
        config = self.config
        enable = config.gradient_checkpointing and self.quantization.is_quantized
        if enable:
            refuse_without_checkpointing(self.tree)
        kwargs = dict(config.gradient_checkpointing_kwargs)
        hook_inputs, hook_blocks = config.input_require_grads, False
        if hook_inputs is None:
            # torch's own default is reentrant, also where None is given.
            use_reentrant = kwargs.get("use_reentrant")
            is_reentrant = use_reentrant is None or bool(use_reentrant)
            hook_inputs = enable and is_reentrant
            hook_blocks = enable and not is_reentrant
        if hook_inputs:
            refuse_without_embeddings(self.tree.model)
        return Checkpoint(
            "checkpoint",
            ("",),
            enable=enable,
            kwargs=kwargs,
            hook_inputs=hook_inputs,
            hook_blocks=hook_blocks,
            hook_model=config.precision.upcasts_all and self.quantization.casts,
        )

    def by_role(self) -> dict[str, dict[str, int]]:
        """Count parameters, and the bytes they hold and are to hold, by role.

        What is one memory, seen in one way, counts once.
        """
        rows = {role: {"count": 0, "bytes": 0, "added_bytes": 0} for role in Role}
        seen = set()
        for tensor in self.tree.tensors:
            parameter = tensor.parameter
            row = rows[self.role(tensor)]
            row["count"] += 1
            view = key_of(parameter), parameter.storage_offset(), parameter.numel()
            if view not in seen:
                seen.add(view)
                row["bytes"] += parameter.numel() * parameter.element_size()
        for edit in self.memory_edits:
            assert edit.role is not None
            rows[edit.role]["added_bytes"] += edit.added_bytes
        return {role.value: row for role, row in rows.items() if row["count"]}


def _can_be_cast(parameter: torch.Tensor) -> bool:
    """Whether a parameter of an adapter is a plain one of floating-point numbers."""
    if is_sharded_tensor(parameter) or is_quantized_parameter(parameter):
        return False
    return parameter.is_floating_point() and not is_composed(type(parameter))


def _compute(
    nodes: list[Node], role: Role, forward: Callable[[nn.Module], Float32Forward]
) -> list[ComputeInFloat32]:
    """The edit that replaces the forwards of modules, as a list.

    The list is empty where there are no modules.
    """
    if not nodes:
        return []
    fqns = tuple(node.fqn for node in nodes)
    modules = tuple(weakref.ref(node.module) for node in nodes)
    return [
        ComputeInFloat32("compute", fqns, role=role, modules=modules, forward=forward)
    ]
