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
from ..edits.checkpointing import (
    Checkpoint,
    refuse_without_checkpointing,
    refuse_without_embeddings,
)
from ..edits.flags import Freeze, prepared_tensors
from ..edits.norms import (
    ComputeInFloat32,
    Float32Forward,
    can_rebind_forward,
    computes_in_float32,
)
from ..edits.stand_ins import HeadForward
from ..edits.training import Record
from ..model.checks import refuse_without_backward
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
from ..tensors.dtypes import HALF_DTYPES
from .advice import Advice
from .casts import Casts
from .fingerprints import sample_bytes


class Planner:
    """Writes the edits down; ``freeze_adapters`` treats adapters as the base, as PEFT's function does."""

    def __init__(
        self,
        tree: ModelTree,
        config: PrepareConfig,
        quantization: Quantization,
        *,
        freeze_adapters: bool = False,
    ) -> None:
        self.tree = tree
        self.config = config
        self.quantization = quantization
        self.freeze_adapters = freeze_adapters
        # all but adapters', unless these are to be treated alike
        self.base = prepared_tensors(tree, freeze_adapters)
        self.casts = Casts(tree, self.base, config, quantization)
        self.advice = Advice(self.casts)

    def edits(self) -> tuple[EditBase, ...]:
        """Write the edits down, in the order in which they are applied; gathers ``advice`` on the way."""
        self._warn_of_what_it_is()
        layers = [node for node in self.tree.modules if has_runtime_state(node.module)]
        refuse_without_backward(self.tree, layers)
        references = tuple(weakref.ref(node.module) for node in layers)
        fqns = tuple(tensor.fqn for tensor in self.base)
        edits: list[EditBase] = [
            Record("record", tuple(node.fqn for node in layers), layers=references),
            Freeze(
                "freeze",
                fqns,
                freeze=self.config.freeze,
                freeze_adapters=self.freeze_adapters,
            ),
            *self.casts.stores,
            *self.casts.upcast_at_use(),
            *self.compute_norms(),
            *self.compute_head(),
            self._checkpoint(),
        ]
        self.advice.of_lost_gradients()
        for warning in self.advice.of_adapters():
            self.advice.warn(warning)
        self.advice.of_unquantized_stacks()
        self.advice.of_precision()
        for warning in vars(self.tree.model).get(ASSUMED, ()):
            self.advice.warn(warning)
        return tuple(edits)

    def _warn_of_what_it_is(self) -> None:
        """Warn of a model that is not quantized, or was upcast before."""
        name = type(self.tree.model).__name__
        if not self.quantization.is_quantized:
            self.advice.warn(
                f"{name} has neither a quantization attribute nor a quantized layer: it is frozen and cast as asked, "
                "but not checkpointed"
            )
        elif self.upcast_before:
            self.advice.warn(
                f"{name} was upcast before, as peft.prepare_model_for_kbit_training does it: its config says "
                f"{self._config_dtype}, and all that is not quantized, {format_bytes(self.upcast_before)}, is frozen "
                "and float32; nothing is left to cast, and restore() returns to this state; prepare a model as "
                "from_pretrained returned it",
                is_alarm=not self.freeze_adapters,
            )

    @property
    def _config_dtype(self) -> Any:
        return getattr(getattr(self.tree.model, "config", None), "dtype", None)

    @functools.cached_property
    def upcast_before(self) -> int:
        """The float32 bytes of a quantized half model that somebody has frozen and upcast as a whole; else 0."""
        if not self.quantization.is_quantized or self._config_dtype not in HALF_DTYPES:
            return 0
        num_bytes = 0
        for tensor in self.base:
            parameter = tensor.parameter
            if is_quantized_parameter(parameter):
                continue
            is_float32 = parameter.dtype == torch.float32
            if not is_float32 and is_rewritten(tensor.module, tensor.name):
                continue  # a quantized layer rounds its bias when it runs
            if parameter.is_floating_point() and (
                parameter.requires_grad or not is_float32
            ):
                return 0
            num_bytes += parameter.nbytes
        return num_bytes

    def cache_bytes(self) -> int:
        """The bytes of the half originals that PEFT's way frees, and an allocator keeps."""
        return sum(tensor.parameter.nbytes for tensor in self.casts.castable)

    def sample_bytes(self) -> int:
        """The bytes of the samples that the record of the base keeps, each parameter counted once."""
        base = {
            id(tensor.parameter): tensor.parameter for tensor in self.tree.base_tensors
        }
        return sum(sample_bytes(parameter) for parameter in base.values())

    def compute_norms(self) -> list[ComputeInFloat32]:
        """The norms that the precision computes in float32 and that do not yet, as at most one edit."""
        precision = self.config.precision
        if (
            precision not in (Precision.NORMS, Precision.ADAPTED)
            or not self.quantization.casts
        ):
            return []
        blocks = (
            tuple(self.tree.adapted_blocks) if precision is Precision.ADAPTED else ("",)
        )
        # Few modules own a half parameter: only these get the slower checks.
        halves = {
            id(module)
            for tensor in self.casts.castable
            for module, _ in self.tree.places(tensor)
        }
        found: dict[int, Node] = {}
        for node in self.tree.base:
            module = node.module
            if (
                id(module) not in halves
                or id(module) in found
                or not node.fqn.startswith(blocks)
            ):
                continue
            if computes_in_float32(module) or not is_norm(
                module, self.config.norm_modules
            ):
                continue
            if can_rebind_forward(module):
                found[id(module)] = node
            else:
                self.advice.warn(
                    f"{node.fqn} computes as loaded: it has buffers, as norms with statistics do, or its forward was "
                    "replaced by a function that is not its method"
                )
        return _compute(list(found.values()), Role.NORM, Float32Forward)

    def compute_head(self) -> list[ComputeInFloat32]:
        """The output head in float32, and trained copies of it, where that is asked for and not so yet."""
        if self.config.head is None or self.config.precision.upcasts_all:
            return []
        found = [node for node in heads(self.tree) if can_rebind_forward(node.module)]
        if not found or not self.quantization.casts:
            self.advice.warn(
                "head='float32' changes nothing: no output head was found that is an unquantized linear layer with a "
                "half weight and its own forward, in a model whose quantization method permits casts",
                is_alarm=True,
            )
            return []
        forward = functools.partial(
            HeadForward, chunk_bytes=self.config.head_chunk_bytes
        )
        new = [node for node in found if not computes_in_float32(node.module)]
        return _compute(new, Role.OUTPUT_EMBEDDINGS, forward)

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

    def by_role(self) -> dict[str, dict[str, int]]:
        """Count parameters, and the bytes they hold and are to hold, by the part they play."""
        rows = {role: {"count": 0, "bytes": 0, "added_bytes": 0} for role in Role}
        seen = set()  # what is one memory seen in one way counts once
        for tensor in self.tree.tensors:
            parameter = tensor.parameter
            row = rows[self.casts.roles[id(parameter)]]
            row["count"] += 1
            view = key_of(parameter), parameter.storage_offset(), parameter.numel()
            if view not in seen:
                seen.add(view)
                row["bytes"] += parameter.numel() * parameter.element_size()
        for store in self.casts.stores:
            assert store.role is not None
            rows[store.role]["added_bytes"] += store.added_bytes
        return {role.value: row for role, row in rows.items() if row["count"]}


def _compute(
    nodes: list[Node], role: Role, forward: Callable[[nn.Module], Float32Forward]
) -> list[ComputeInFloat32]:
    """The edit that replaces the forwards of modules; none where there are no modules."""
    if not nodes:
        return []
    fqns = tuple(node.fqn for node in nodes)
    modules = tuple(weakref.ref(node.module) for node in nodes)
    return [
        ComputeInFloat32("compute", fqns, role=role, modules=modules, forward=forward)
    ]
