"""The plan of a preparation: its edits in order and their exact bytes.

Read-only; works on the meta device.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import Precision, PrepareConfig, format_bytes
from ..edits.base import Edit
from ..edits.checkpointing import checkpoint
from ..edits.flags import freeze
from ..edits.norms import Float32Forward, can_rebind_forward, compute_in_float32
from ..edits.stand_ins import HeadForward
from ..edits.training import record
from ..errors import MemoryBudgetError
from ..model.checks import (
    refuse_transposed_scales,
    refuse_unsupported_tensors,
    refuse_without_backward,
    tree_of,
)
from ..model.pretrained import ASSUMED, meta_model
from ..model.quantization import has_runtime_state, is_quantized_parameter
from ..model.roles import Role
from ..model.tree import ModelTree, only_reading
from ..reports import Report, few, table
from ..tensors.allocator import Allocator
from ..tensors.bits import digest_bytes, is_dense
from . import advice
from .casts import Casts, peak_bytes
from .fingerprints import sample_bytes


@dataclass(frozen=True, repr=False)
class Plan(Report):
    """The edits of a preparation and their cost in memory, before anything is changed.

    ``print(plan)`` is a table by role.

    Attributes:
        config: The settings planned for.
        quantization: The quantization method found, or ``None``.
        edits: The edits, in the order in which they are applied.
        by_role: ``{role: {"count", "bytes", "added_bytes"}}``: parameters, the bytes
            they hold now, and those added.
        added_bytes: Live bytes that the prepared parameters hold beyond the loaded
            ones, until they are restored.
        peak_bytes: The most bytes live at any moment of ``prepare``, above those at its
            start.
        cache_bytes: The bytes that PEFT's way would leave in CUDA's caching allocator:
            those of half originals that no later cast uses again.
        record_bytes: The bytes that the record itself holds beyond that: biases that
            bitsandbytes rewrites and, of a model on an accelerator, host copies of
            adapters that ``adapter_dtype`` rounds and, with ``keep_originals``, of all
            that is cast. (On the CPU those are the originals themselves, and count in
            ``added_bytes``.)
        sample_bytes: The bytes of the samples that tell what training changed, kept on
            the parameters' devices while the model is prepared; beside the figures
            above, which do not count them.
        warnings: Consequences of these settings that need attention.
        alarms: The warnings that ``prepare`` gives as ``UserWarning``, whether anybody
            looks at the plan or not.
        casts: Whether half parameters may be cast: false where the quantization method
            manages its own precision.
    """

    config: PrepareConfig
    quantization: str | None
    edits: tuple[Edit, ...]
    by_role: dict[str, dict[str, int]]
    added_bytes: int
    peak_bytes: int
    cache_bytes: int
    record_bytes: int
    warnings: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    casts: bool = True
    sample_bytes: int = 0

    @classmethod
    def for_pretrained(
        cls,
        name_or_path: Any,
        quantization_config: Any = None,
        dtype: Any = None,
        **fields: Any,
    ) -> Plan:
        """Plan from a config alone: no weight is read or allocated.

        The bytes are those of the loaded model.

        Args:
            name_or_path: A name or path as for ``from_pretrained``, a ``config.json``,
                or a config of transformers.
            quantization_config: As for ``from_pretrained``; ``None`` for the config's
                own.
            dtype: The dtype to load in, or its name; ``None`` for the config's, or else
                bfloat16.
            **fields: Fields of ``PrepareConfig``.

        Returns:
            The plan.

        Raises:
            ConfigError: There is no such config, no model can be built from it, or a
                setting is invalid.
            UnsupportedModelError: The model cannot be prepared with these settings.
            MemoryBudgetError: The plan's peak is over ``memory_budget``.

        Example:
            >>> from transformers import BitsAndBytesConfig, LlamaConfig
            >>> from kbitwrap import Plan
            >>> quantization = BitsAndBytesConfig(
            ...     load_in_4bit=True, bnb_4bit_quant_type="nf4"
            ... )
            >>> plan = Plan.for_pretrained(
            ...     LlamaConfig(num_hidden_layers=2), quantization, precision="full"
            ... )
            >>> plan.added_bytes == (
            ...     2 * 32000 * 4096 + 5 * 4096
            ... ) * 2  # embeddings, head and norms
            True
        """
        config = PrepareConfig.of(None, fields)
        return build_plan(meta_model(name_or_path, quantization_config, dtype), config)

    def grown_by(
        self, edits: Sequence[Edit], casts: Casts, warnings: Sequence[str]
    ) -> Plan:
        """Return this plan with edits that were made when all else stood."""
        by_role = dict(self.by_role)
        if casts.cast_adapters:
            role = Role.ADAPTER.value
            before = self.by_role.get(role, {}).get("added_bytes", 0)
            row = by_role[role] = casts.by_role()[role]
            row["added_bytes"] += before
        all_edits = (*self.edits, *edits)
        return dataclasses.replace(
            self,
            edits=all_edits,
            by_role=by_role,
            added_bytes=sum(edit.added_bytes for edit in all_edits),
            peak_bytes=max(self.peak_bytes, peak_bytes(all_edits)),
            record_bytes=sum(edit.record_bytes for edit in all_edits),
            warnings=(*self.warnings, *warnings),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON.

        Returns:
            Names as the attributes; each edit with its action, names, role and bytes.
        """
        totals = (
            "added_bytes",
            "peak_bytes",
            "cache_bytes",
            "record_bytes",
            "sample_bytes",
        )
        names = ("quantization", *totals, "by_role")
        return {
            "precision": self.config.precision.value,
            **{name: getattr(self, name) for name in names},
            "warnings": list(self.warnings),
            "edits": [edit.to_dict() for edit in self.edits],
        }

    def __str__(self) -> str:
        keys = ("count", "bytes", "added_bytes")
        total = dict.fromkeys(keys, 0)
        for row in self.by_role.values():
            for key in keys:
                total[key] += row[key]
        rows = [("role", "parameters", "loaded", "added")]
        for role, figures in {**self.by_role, "total": total}.items():
            count, loaded, added = (figures[key] for key in keys)
            rows.append((role, str(count), format_bytes(loaded), format_bytes(added)))
        peak, cache = format_bytes(self.peak_bytes), format_bytes(self.cache_bytes)
        lines = [
            f"precision {self.config.precision.value!r}, quantization {self.quantization or 'none'}",
            table(rows),
            f"peak while preparing {peak}; PEFT's function leaves {cache} in the allocator's cache",
            f"beside it, samples of the parameters: {format_bytes(self.sample_bytes)}",
            *few([f"warning: {warning}" for warning in self.warnings]),
        ]
        return "\n".join(lines)

    def _brief(self) -> str:
        added, peak = format_bytes(self.added_bytes), format_bytes(self.peak_bytes)
        said = f"{self.config.precision.value!r} on {self.quantization or 'none'}: {added} added, peak {peak}"
        return said + (f", warnings: {len(self.warnings)}" if self.warnings else "")


def build_plan(
    model: nn.Module, config: PrepareConfig | None = None, **fields: Any
) -> Plan:
    """Plan a preparation and what it costs; changes nothing.

    Args:
        model: The model, on a device or on the meta device.
        config: The settings; ``None`` for the defaults.
        **fields: Fields of ``PrepareConfig``, which win over ``config``.

    Returns:
        The plan.

    Raises:
        ConfigError: A setting is invalid.
        UnsupportedModelError: The model cannot be prepared with these settings.
        MemoryBudgetError: The plan's peak is over ``memory_budget``.

    Example:
        >>> import torch
        >>> from kbitwrap import build_plan
        >>> head = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        >>> build_plan(head, precision="full", gradient_checkpointing=False).added_bytes
        8192
    """
    return plan_for(tree_of(model), PrepareConfig.of(config, fields))


def plan_for(tree: ModelTree, config: PrepareConfig, engine: str | None = None) -> Plan:
    """Plan for a model that an engine may shard; raises as ``build_plan`` does."""
    with only_reading():
        refuse_unsupported_tensors(tree, allow_meta=True)
        plan = write_plan(Casts(tree, config, tree.quantization, engine=engine))
    budget = config.memory_budget_bytes
    if budget is None or plan.peak_bytes <= budget:
        return plan
    fitting = []
    for precision in Precision:
        other = dataclasses.replace(config, memory_budget=None, precision=precision)
        if plan_for(tree, other, engine).peak_bytes <= budget:
            fitting.append(precision.value)
    raise MemoryBudgetError(
        f"preparing with precision {config.precision.value!r} needs "
        f"{format_bytes(plan.peak_bytes)} at its peak, the budget is "
        f"{format_bytes(budget)}; precisions that fit: {', '.join(fitting) or 'none'}",
        plan=plan,
        budget_bytes=budget,
        fitting=tuple(fitting),
    )


def write_plan(casts: Casts) -> Plan:
    """Make a plan of the edits that are found for some casts.

    These say by which rules: the model's own detection, or PEFT's.
    """
    quantization, config, tree = casts.quantization, casts.config, casts.tree
    layers = [node for node in tree.modules if has_runtime_state(node.module)]
    refuse_without_backward(tree, layers)
    refuse_transposed_scales(layers)
    freezes = freeze(is_frozen=config.freeze, freeze_adapters=casts.freeze_adapters)
    # in the order in which they are applied
    edits = (
        Edit("record", tuple(node.fqn for node in layers), record),
        Edit("freeze", tuple(tensor.fqn for tensor in casts.base), freezes),
        *casts.stores,
        *casts.upcasts,
        *edits_of_adapters(casts, casts),
        checkpoint(tree, config, quantization),
    )
    alarms = [
        *advice.of_unquantized(casts),
        *advice.of_upcast_before(casts),
        *advice.of_head(casts),
        *advice.of_lost_gradients(tree),
    ]
    warnings = (
        *alarms,
        *advice.of_norms(casts),
        *advice.of_adapters(casts),
        *advice.of_unquantized_stacks(casts),
        *advice.of_precision(casts),
        *vars(tree.model).get(ASSUMED, ()),
    )
    base = {id(one.parameter): one.parameter for one in tree.base_tensors}
    audited = []  # the bytes that a digest of a parameter holds
    for parameter in base.values() if config.audit else ():
        if not is_quantized_parameter(parameter) and is_dense(parameter):
            audited.append(digest_bytes(parameter))
    return Plan(
        config=config,
        quantization=quantization.method,
        edits=edits,
        by_role=casts.by_role(),
        added_bytes=sum(edit.added_bytes for edit in edits),
        peak_bytes=max([peak_bytes(edits), *audited]),
        cache_bytes=_cached_by_peft(casts),
        record_bytes=sum(edit.record_bytes for edit in edits),
        warnings=warnings,
        alarms=tuple(alarms),
        casts=quantization.casts,
        sample_bytes=sum(map(sample_bytes, base.values())),
    )


def _cached_by_peft(casts: Casts) -> int:
    """Return the bytes that an allocator keeps of the originals that PEFT's way frees."""
    allocator = Allocator()
    blocks = {}
    for tensor in casts.tree.tensors:
        size = tensor.parameter.nbytes
        blocks[id(tensor.parameter)] = allocator.allocate(size)
    before = allocator.reserved_bytes - allocator.allocated_bytes
    for tensor in casts.castable:
        allocator.allocate(tensor.parameter.numel() * torch.float32.itemsize)
        allocator.free(blocks[id(tensor.parameter)])
    return max(allocator.reserved_bytes - allocator.allocated_bytes - before, 0)


def edits_of_adapters(casts: Casts, casts_of_whole: Casts) -> list[Edit]:
    """Return the edits of norms, heads and adapters, which adapters that are made later may add to.

    `adopt` asks for them again then. A forward that was replaced already is left alone.

    Args:
        casts: The casts of the model.
        casts_of_whole: The casts of what was made of the model: adapters of prompt learning lie
            outside.
    """
    of_heads = functools.partial(HeadForward, chunk_bytes=casts.config.head_chunk_bytes)
    edits = []
    for role, nodes, forward in (
        (Role.NORM, casts.norms, Float32Forward),
        (Role.OUTPUT_EMBEDDINGS, casts.heads, of_heads),
    ):
        found = [node for node in nodes if can_rebind_forward(node.module)]
        if found:
            fqns = tuple(node.fqn for node in found)
            modules = [weakref.ref(node.module) for node in found]
            apply = compute_in_float32(modules, forward)
            edits.append(Edit("compute", fqns, apply, role=role))
    return [*edits, *casts_of_whole.cast_adapters]
