"""The effect of each engine that trains with several processes on a prepared model.

It is told before it happens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..config import Precision, PrepareConfig
from ..errors import UnsupportedModelError
from ..model.checks import tree_of
from ..model.quantization import is_quantized_parameter
from ..model.tree import ModelTree
from ..reports import ShardingOutcome, ShardingReport
from ..tensors.dtypes import dtype_name, parse_dtype
from .casts import refuse_unknown_engine
from .plan import Plan, plan_for


def check_sharding(
    model: nn.Module, engine: str, param_dtype: torch.dtype | str | None = None
) -> ShardingReport:
    """Say what will happen with each precision under an engine; changes nothing.

    Args:
        model: The model as it is before it is prepared, on a device or on the meta
            device; with its adapters where these are there already, because FSDP1 lays
            them out together with the base.
        engine: ``"ddp"`` (DistributedDataParallel), ``"fsdp1"``
            (FullyShardedDataParallel), ``"fsdp2"`` (``fully_shard``), ``"zero2"`` or
            ``"zero3"`` (DeepSpeed).
        param_dtype: The dtype of the engine's mixed-precision policy, or its name;
            ``None`` for no policy.

    Returns:
        The report.

    Raises:
        ConfigError: There is no such engine, or no such floating-point dtype.
        UnsupportedModelError: ``model`` is no module.

    Example:
        >>> import torch
        >>> from kbitwrap import check_sharding
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(8, 4), torch.nn.LayerNorm(4)
        ... ).bfloat16()
        >>> print(check_sharding(model, "fsdp2"))
        engine 'fsdp2', param_dtype None
        precision  trains  restore, suspended  export, manifest
        full          yes                  no               yes
        compute       yes                  no               yes
        norms         yes                 yes               yes
        adapted       yes                 yes               yes
        none          yes                 yes               yes
        full, compute: what is sharded stays float32: suspended() raises, restore() names it, export() writes the base
        full, compute, norms, adapted, none: export() and manifest() are called on every rank
        compute: prepare(engine='fsdp2') stores in float32 what is upcast at use elsewhere
    """
    refuse_unknown_engine(engine)
    dtype = (
        None
        if param_dtype is None
        else parse_dtype(param_dtype, "param_dtype", is_floating=True)
    )
    tree = tree_of(model)
    outcomes = {
        precision.value: _outcome(tree, precision, engine, dtype)
        for precision in Precision
    }
    return ShardingReport(
        engine, None if dtype is None else dtype_name(dtype), outcomes
    )


def _outcome(
    tree: ModelTree, precision: Precision, engine: str, param_dtype: torch.dtype | None
) -> ShardingOutcome:
    """Return the outcome of one precision under an engine.

    Its notes name first what fails, and then what is to be minded.
    """
    config = PrepareConfig(precision=precision, gradient_checkpointing=False)
    try:
        plan = plan_for(tree, config, engine)
    except UnsupportedModelError as error:
        return ShardingOutcome(False, False, False, (f"cannot be prepared: {error}",))
    is_retyped = precision.upcasts_all and plan.casts
    stays_whole = engine in ("ddp", "zero2")
    failures = [*_failures(tree, plan, engine, param_dtype)]
    notes = []
    if is_retyped and stays_whole:
        notes.append(
            "suspended() is refused while a trained copy (modules_to_save) is stored "
            "in float32"
        )
    elif is_retyped:
        notes.append(
            "what is sharded stays float32: suspended() raises, restore() "
            "names it, export() writes the base"
        )
    if engine == "fsdp1":
        notes.append("needs use_orig_params=True")
    if engine == "fsdp2" and precision is Precision.COMPUTE and plan.casts:
        notes.append(
            "prepare(engine='fsdp2') stores in float32 what is upcast at use elsewhere"
        )
    if engine == "fsdp2" and any(t.parameter.dtype == torch.int8 for t in tree.tensors):
        notes.append(
            "8-bit weights lose their scales in shards: fully_shard(..., ignored_params={every Int8Params})"
        )
    exports = engine != "fsdp1" or not failures
    restores = exports and (stays_whole or not is_retyped)
    if exports and not stays_whole:
        notes.append("export() and manifest() are called on every rank")
    return ShardingOutcome(not failures, restores, exports, (*failures, *notes))


def _failures(
    tree: ModelTree, plan: Plan, engine: str, param_dtype: torch.dtype | None
) -> Iterator[str]:
    """Say why an engine would not train the prepared model, or not with right numbers."""
    stored = {}  # the dtypes that the preparation stores
    for edit in plan.edits:
        if edit.dtype is not None:
            stored.update({id(ref()): edit.dtype for ref in edit.refs})
    packed = []
    first: dict[torch.dtype, str] = {}  # parameter of each dtype
    for tensor in tree.tensors:
        dtype = tensor.parameter.dtype
        first.setdefault(stored.get(id(tensor.parameter), dtype), tensor.path)
        is_packed = is_quantized_parameter(tensor.parameter) and dtype.is_floating_point
        if is_packed and param_dtype not in (None, dtype):
            packed.append(tensor.path)

    if packed and param_dtype is not None and engine != "ddp":
        yield (
            f"{packed[0]} packs 4-bit values in a dtype that would be cast to "
            f"{param_dtype} as if they were numbers: load with "
            f"bnb_4bit_quant_storage={dtype_name(param_dtype)}"
        )
    integers = [dtype for dtype in first if not dtype.is_floating_point]
    is_old = torch.__version__ < "2.12"  # compared as versions are
    if engine == "fsdp2" and not (is_old and torch.uint8 in integers):
        integers = []
    if integers and engine in ("fsdp1", "fsdp2"):
        yield (
            "FSDP1, and FSDP2 before torch 2.12, lay out no integers, and "
            f"{first[integers[0]]} is {dtype_name(integers[0])}: load 4-bit weights "
            "with bnb_4bit_quant_storage set to the dtype of the model"
        )
    elif engine == "fsdp1" and len(first) > 1:
        named = [f"{path} in {dtype_name(dtype)}" for dtype, path in first.items()]
        yield (
            "FSDP1 lays out parameters of one dtype together, and would find "
            f"{', '.join(named)}: take a precision that stores no other dtype, "
            "get_peft_model(..., autocast_adapter_dtype=False), or wrap what differs "
            "by itself"
        )
