"""The plan: the edits in order and their exact bytes. Read-only; works on the meta device."""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .checkpointing import Checkpoint, refuse_without_checkpointing, refuse_without_embeddings
from .compute import ComputeInFloat32, UpcastAtUse
from .config import Precision, PrepareConfig
from .edits import EditBase, Freeze, Record, references
from .errors import MemoryBudgetError
from .precision import can_rebind_forward, computes_in_float32
from .pretrained import meta_model
from .quantization import (
    HALF_DTYPES,
    Quantization,
    detect,
    has_runtime_state,
    is_quantized_layer,
    is_quantized_parameter,
)
from .roles import Role, computes_in_half, is_norm, parameter_roles
from .storage import Store
from .topology import (
    NamedTensor,
    adapter_parameter_ids,
    base_modules,
    is_adapter_module,
    named_modules,
    named_tensors,
    refuse_unsupported_tensors,
    storage_key,
)
from .upcast import can_stand_in


def format_bytes(num_bytes: int) -> str:
    """Write a number of bytes in binary units.

    Args:
        num_bytes: The number of bytes.

    Returns:
        Such as ``"512.5 MiB"``.

    Example:
        >>> format_bytes(537395200)
        '512.5 MiB'
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@dataclass(frozen=True)
class Plan:
    """What a preparation will do, and what it costs, before anything is done.

    ``print(plan)`` is a table by role.

    Attributes:
        config: The settings planned for.
        quantization: The quantization method found, or ``None``.
        edits: The edits, in the order in which they are applied.
        by_role: ``{role: {"count", "bytes", "added_bytes"}}``: parameters, the bytes they hold now, and those added.
        added_bytes: Live bytes that the prepared parameters hold beyond the loaded ones, until they are restored.
        peak_bytes: The most bytes live at any moment of ``prepare``, above those at its start.
        cache_bytes: What PEFT's way would leave in a caching allocator: the half originals, freed and kept.
        record_bytes: What the record itself holds beyond that: biases that bitsandbytes rewrites and, of a model on an
            accelerator with ``keep_originals``, host copies of all that is cast. (On the CPU those are the originals
            themselves, and count in ``added_bytes``.)
        warnings: What a reader should know before going on.
        is_quantized: Whether the model is quantized: one that is not is never checkpointed.
        casts: Whether half parameters may be cast: not where the method manages its own precision.
    """

    config: PrepareConfig
    quantization: str | None
    edits: tuple[EditBase, ...] = field(repr=False)
    by_role: dict[str, dict[str, int]]
    added_bytes: int
    peak_bytes: int
    cache_bytes: int
    record_bytes: int
    warnings: tuple[str, ...] = ()
    is_quantized: bool = True
    casts: bool = True

    @classmethod
    def for_pretrained(
        cls, name_or_path: Any, quantization_config: Any = None, dtype: Any = None, **fields: Any
    ) -> Plan:
        """Plan from a config alone: no weight is read or allocated. The bytes are those of the loaded model.

        Args:
            name_or_path: What ``from_pretrained`` takes, a ``config.json``, or a config object of transformers.
            quantization_config: As for ``from_pretrained``; ``None`` for what the config itself says.
            dtype: The dtype to load in, or its name; ``None`` for the config's, or else bfloat16.
            **fields: Fields of ``PrepareConfig``.

        Returns:
            The plan.

        Raises:
            ConfigError: There is no such config, no model can be built from it, or a setting cannot be meant.
            UnsupportedModelError: The model cannot be prepared so.
            MemoryBudgetError: The plan's peak is over ``memory_budget``.

        Example:
            >>> from transformers import BitsAndBytesConfig, LlamaConfig
            >>> from kbitwrap import Plan
            >>> quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
            >>> plan = Plan.for_pretrained(LlamaConfig(num_hidden_layers=2), quantization, precision="full")
            >>> plan.added_bytes == (2 * 32000 * 4096 + 5 * 4096) * 2  # embeddings, head and norms
            True
        """
        config = PrepareConfig.of(None, fields)
        return build_plan(meta_model(name_or_path, quantization_config, dtype), config)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON.

        Returns:
            Names as the attributes; each edit with its action, names, role and bytes.
        """
        return {
            "precision": self.config.precision.value,
            "quantization": self.quantization,
            "added_bytes": self.added_bytes,
            "peak_bytes": self.peak_bytes,
            "cache_bytes": self.cache_bytes,
            "record_bytes": self.record_bytes,
            "by_role": self.by_role,
            "warnings": list(self.warnings),
            "edits": [
                {
                    "action": edit.action,
                    "fqns": list(edit.fqns),
                    "role": None if edit.role is None else edit.role.value,
                    "added_bytes": edit.added_bytes,
                    "transient_bytes": edit.transient_bytes,
                    "reason": edit.reason,
                }
                for edit in self.edits
            ],
        }

    def __str__(self) -> str:
        rows = [("role", "parameters", "loaded", "added")]
        for role, figures in self.by_role.items():
            rows.append(
                (role, str(figures["count"]), format_bytes(figures["bytes"]), format_bytes(figures["added_bytes"]))
            )
        total = {key: sum(row[key] for row in self.by_role.values()) for key in ("count", "bytes")}
        rows.append(("total", str(total["count"]), format_bytes(total["bytes"]), format_bytes(self.added_bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [f"precision {self.config.precision.value!r}, quantization {self.quantization or 'none'}"]
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells))
        lines.append(
            f"peak while preparing {format_bytes(self.peak_bytes)}; "
            f"PEFT's way leaves {format_bytes(self.cache_bytes)} in the allocator's cache"
        )
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def build_plan(model: nn.Module, config: PrepareConfig | None = None, **fields: Any) -> Plan:
    """Plan a preparation and what it costs; changes nothing.

    Args:
        model: The model, on a device or on the meta device.
        config: The settings; ``None`` for the defaults.
        **fields: Fields of ``PrepareConfig``, which win over ``config``.

    Returns:
        The plan.

    Raises:
        ConfigError: A setting that cannot be meant.
        UnsupportedModelError: The model cannot be prepared so.
        MemoryBudgetError: The plan's peak is over ``memory_budget``.

    Example:
        >>> import torch
        >>> from kbitwrap import build_plan
        >>> head = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        >>> build_plan(head, precision="full", gradient_checkpointing=False).added_bytes
        8192
    """
    config = PrepareConfig.of(config, fields)
    refuse_unsupported_tensors(model, allow_meta=True)
    plan = Planner(model, config, detect(model)).plan()
    budget = config.memory_budget_bytes
    if budget is not None and plan.peak_bytes > budget:
        _refuse_over_budget(model, plan, budget)
    return plan


def _refuse_over_budget(model: nn.Module, plan: Plan, budget_bytes: int) -> None:
    without_budget = dataclasses.replace(plan.config, memory_budget=None)
    fitting = tuple(
        precision.value
        for precision in Precision
        if build_plan(model, without_budget, precision=precision).peak_bytes <= budget_bytes
    )
    remedy = f"these precisions fit: {', '.join(fitting)}" if fitting else "no precision fits"
    raise MemoryBudgetError(
        f"preparing with precision {plan.config.precision.value!r} needs {format_bytes(plan.peak_bytes)} at its peak, "
        f"the budget is {format_bytes(budget_bytes)}; {remedy}",
        plan=plan,
        budget_bytes=budget_bytes,
        fitting=fitting,
    )


class Planner:
    """Writes the edits down, from a model, a config, and what the model is quantized with.

    Args:
        model: The model; read only.
        config: The settings.
        quantization: How the model is quantized.
        freeze_adapters: Treat adapters as the base, as PEFT's function does.
    """

    def __init__(
        self, model: nn.Module, config: PrepareConfig, quantization: Quantization, *, freeze_adapters: bool = False
    ) -> None:
        self.model = model
        self.config = config
        self.quantization = quantization
        self.tensors = named_tensors(model)
        self.roles = parameter_roles(model, config.norm_modules)
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for _, module in named_modules(model):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, name))
        adapters = set() if freeze_adapters else adapter_parameter_ids(model)
        self.base = [t for t in self.tensors if id(t.parameter) not in adapters]
        self.warnings: list[str] = []

    def plan(self) -> Plan:
        """Write the plan.

        Raises:
            UnsupportedModelError: Checkpointing is asked for and the model does not support it.
        """
        if not self.quantization.is_quantized:
            self.warnings.append(
                f"{type(self.model).__name__} has neither a quantization attribute nor a quantized layer: "
                "it is frozen and cast as asked, but not checkpointed"
            )
        edits: list[EditBase] = [self._record(), self._freeze(), *self._store()]
        edits += self._upcast_at_use()
        edits += self.compute_norms()
        edits.append(self._checkpoint())
        self._warn()
        stores = [edit for edit in edits if isinstance(edit, Store)]
        return Plan(
            config=self.config,
            quantization=self.quantization.method,
            edits=tuple(edits),
            by_role=self._by_role(stores),
            added_bytes=sum(edit.added_bytes for edit in stores),
            peak_bytes=_peak(stores),
            cache_bytes=sum(_bytes(t.parameter) for t in self._castable()),
            record_bytes=sum(edit.record_bytes for edit in stores),
            warnings=tuple(self.warnings),
            is_quantized=self.quantization.is_quantized,
            casts=self.quantization.casts,
        )

    def _record(self) -> Record:
        layers = [(fqn, module) for fqn, module in named_modules(self.model) if has_runtime_state(module)]
        return Record(
            "record",
            tuple(fqn for fqn, _ in layers),
            model=weakref.ref(self.model),
            layers=tuple(weakref.ref(module) for _, module in layers),
        )

    def _freeze(self) -> Freeze:
        return Freeze(
            "freeze", tuple(t.fqn for t in self.base), tensors=references(self.base), freeze=self.config.freeze
        )

    def _castable(self) -> list[NamedTensor]:
        """The half parameters outside the quantized storage, where the method permits a cast."""
        if not self.quantization.casts:
            return []
        return [t for t in self.base if t.parameter.dtype in HALF_DTYPES and not is_quantized_parameter(t.parameter)]

    def _upcast(self) -> list[NamedTensor]:
        """The weights that precision ``"compute"`` upcasts as they are used."""
        if self.config.precision is not Precision.COMPUTE:
            return []
        return [t for t in self._castable() if self._kept_in_float32_because(t) is None]

    def _kept_in_float32_because(self, tensor: NamedTensor) -> str | None:
        """Why a half parameter is stored in float32 under ``"compute"``; ``None`` where it is upcast at use."""
        module, name, parameter = tensor.module, tensor.name, tensor.parameter
        is_expert = self.roles[id(parameter)] is Role.EXPERT and parameter.dim() >= 2
        if not (isinstance(module, (nn.Linear, nn.Embedding)) and name == "weight") and not is_expert:
            return "not the weight of a lookup or of a linear layer"
        if not self.config.freeze and parameter.requires_grad:
            return "trained"
        if not all(can_stand_in(m, n) for m, n in self._places[id(parameter)]):
            return "its module computes with something else than the parameter, or writes to it"
        return None

    def _upcast_at_use(self) -> list[UpcastAtUse]:
        edits = []
        for role in Role:
            found = [t for t in self._upcast() if self.roles[id(t.parameter)] is role]
            if found:
                # A tied weight is seen as float32 from each of its modules.
                places = [place for t in found for place in self._places[id(t.parameter)]]
                edits.append(
                    UpcastAtUse(
                        "upcast",
                        tuple(t.fqn for t in found),
                        role=role,
                        weights=tuple((weakref.ref(module), name) for module, name in places),
                        chunk_bytes=self.config.head_chunk_bytes,
                    )
                )
        return edits

    def _store(self) -> list[Store]:
        """Casts to float32, largest first: so the peak is what stays plus the last, small, originals."""
        upcast = {id(t.parameter) for t in self._upcast()}
        groups: dict[int, list[NamedTensor]] = {}
        for tensor in self._castable():
            is_rewritten = tensor.name == "bias" and is_quantized_layer(tensor.module)
            if (self.config.precision.upcasts_all and id(tensor.parameter) not in upcast) or is_rewritten:
                groups.setdefault(storage_key(tensor.parameter), []).append(tensor)
        stores = [self._store_group(group) for group in groups.values()]
        return sorted(stores, key=lambda edit: -edit.transient_bytes)

    def _store_group(self, group: list[NamedTensor]) -> Store:
        dtype = torch.float32 if self.config.precision.upcasts_all else None
        is_compute = self.config.precision is Precision.COMPUTE
        parameters = [t.parameter for t in group]
        is_rewritten = any(is_quantized_layer(t.module) for t in group)
        keep = self.config.keep_originals and dtype is not None
        shared_bytes = min(sum(map(_bytes, parameters)), parameters[0].untyped_storage().nbytes())
        cast_bytes = sum(p.numel() * dtype.itemsize for p in parameters) if dtype is not None else 0
        # On the CPU a kept original is the original itself, which is then not freed.
        keeps_in_place = keep and parameters[0].device.type == "cpu"
        freed_bytes = shared_bytes if dtype is not None and not keeps_in_place else 0
        return Store(
            "store" if dtype is not None else "record",
            tuple(t.fqn for t in group),
            role=self.roles[id(parameters[0])],
            added_bytes=cast_bytes - freed_bytes,
            transient_bytes=cast_bytes,
            reason=(self._kept_in_float32_because(group[0]) or "") if is_compute else "",
            parameters=references(group),
            dtype=dtype,
            keep=keep,
            is_rewritten=is_rewritten,
            record_bytes=shared_bytes if (keep or is_rewritten) and dtype is not None and not keeps_in_place else 0,
        )

    def compute_norms(self) -> list[ComputeInFloat32]:
        """The norms that the precision computes in float32 and that do not yet, as at most one edit."""
        precision = self.config.precision
        if precision not in (Precision.NORMS, Precision.ADAPTED) or not self.quantization.casts:
            return []
        modules = base_modules(self.model)
        blocks = _adapted_blocks(self.model, modules) if precision is Precision.ADAPTED else {""}
        found = []
        for fqn, module in modules:
            if not is_norm(module, self.config.norm_modules) or not computes_in_half(module):
                continue
            if not any(fqn.startswith(block) for block in blocks) or computes_in_float32(module):
                continue
            if can_rebind_forward(module):
                found.append((fqn, module))
            else:
                self.warnings.append(
                    f"{fqn} computes as loaded: it has buffers, where norms keep statistics, or its forward was "
                    "replaced by a function that is no method of it"
                )
        if not found:
            return []
        return [
            ComputeInFloat32(
                "compute",
                tuple(fqn for fqn, _ in found),
                role=Role.NORM,
                model=weakref.ref(self.model),
                modules=tuple(weakref.ref(module) for _, module in found),
            )
        ]

    def _checkpoint(self) -> Checkpoint:
        enable = self.config.gradient_checkpointing and self.quantization.is_quantized
        if enable:
            refuse_without_checkpointing(self.model)
        kwargs = dict(self.config.gradient_checkpointing_kwargs)
        hook_inputs = self.config.input_require_grads
        if hook_inputs is None:
            # torch's own default is reentrant, also where None is given.
            use_reentrant = kwargs.get("use_reentrant")
            hook_inputs = enable and (use_reentrant is None or bool(use_reentrant))
        if hook_inputs:
            refuse_without_embeddings(self.model)
        return Checkpoint(
            "checkpoint", ("",), model=weakref.ref(self.model), enable=enable, kwargs=kwargs, hook_inputs=hook_inputs
        )

    def _by_role(self, stores: list[Store]) -> dict[str, dict[str, int]]:
        rows = {role: {"count": 0, "bytes": 0, "added_bytes": 0} for role in Role}
        seen: set[tuple[int, int, int]] = set()
        for tensor in self.tensors:
            row = rows[self.roles[id(tensor.parameter)]]
            row["count"] += 1
            parameter = tensor.parameter
            key = (storage_key(parameter), int(parameter.storage_offset()), parameter.numel())
            if key not in seen:
                seen.add(key)
                row["bytes"] += _bytes(tensor.parameter)
        for store in stores:
            assert store.role is not None
            rows[store.role]["added_bytes"] += store.added_bytes
        return {role.value: row for role, row in rows.items() if row["count"]}

    def _warn(self) -> None:
        config, quantization = self.config, self.quantization
        if not quantization.casts and config.precision is not Precision.NONE:
            self.warnings.append(
                f"{quantization.method} manages its own precision: precision {config.precision.value!r} changes nothing"
            )
        if config.precision.upcasts_all and quantization.casts:
            if any(self.roles[id(t.parameter)] in (Role.INPUT_EMBEDDINGS, Role.NORM) for t in self._castable()):
                self.warnings.append(
                    "float32 embeddings and norms make the residual stream float32 in most models: activations take "
                    "twice the bytes, and FlashAttention refuses float32 queries, keys and values"
                )
            stored = [t for store in self._store() for t in store.parameters]
            experts = sum(_bytes(p) for r in stored if (p := r()) is not None and self.roles[id(p)] is Role.EXPERT)
            if experts:
                self.warnings.append(f"unquantized experts are doubled: {format_bytes(experts)} more")


def _adapted_blocks(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> set[str]:
    """The prefixes of the blocks that hold an adapter. A block is an element of an outermost ``ModuleList``."""
    lists = [fqn for fqn, module in modules if isinstance(module, nn.ModuleList)]
    blocks = set()
    for fqn, module in modules:
        if not is_adapter_module(module):
            continue
        inside = [name for name in lists if fqn.startswith(f"{name}.")]
        if inside:
            outermost = min(inside, key=len)
            blocks.add(f"{outermost}.{fqn[len(outermost) + 1 :].partition('.')[0]}.")
    return blocks


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _peak(stores: list[Store]) -> int:
    """The most bytes live above the start, were the stores made in this order."""
    live = peak = 0
    for store in stores:
        # What else is kept is a copy on the host.
        held = store.record_bytes if store.is_rewritten else 0
        peak = max(peak, live + store.transient_bytes + held)
        live += store.added_bytes + held
    return max(peak, live)
