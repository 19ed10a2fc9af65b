"""The state that a preparation left, for ``verify`` to compare a live model with."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ..edits.checkpointing import CHECKPOINTING_ATTRIBUTES, input_gradient_hooks
from ..edits.journal import MISSING
from ..edits.norms import Float32Forward
from ..model.quantization import is_rewritten
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, only_reading
from ..reports import StateDiff
from ..tensors.upcast import UpcastTensor

Differences = dict[str, dict[str, tuple[Any, Any]]]


class PreparedState:
    """The state of every parameter and module of the base at the end of a preparation, by fqn."""

    def __init__(self, tree: ModelTree) -> None:
        with only_reading():
            self._numbers = {
                tree.record(tensor): number
                for number, tensor in enumerate(tree.tensors)
            }
            self._columns = _read([tensor.parameter for tensor in tree.tensors])
            # Two of them may have one fqn, or be one parameter.
            self._base = tree.base_records, [tensor.fqn for tensor in tree.base_tensors]
            self._modules = {node.fqn: _read_module(node.module) for node in tree.base}

    def of(self, record: ParameterRecord) -> tuple[torch.dtype, bool] | None:
        """The dtype and ``requires_grad`` that a parameter was left with; ``None`` of one that was not there."""
        number = self._numbers.get(record)
        return (
            None
            if number is None
            else (
                self._columns["dtype"][number],
                self._columns["requires_grad"][number],
            )
        )

    def reread(self, tree: ModelTree, modules: Collection[nn.Module]) -> PreparedState:
        """This state, with modules read again that were edited since: their attributes now are the expected ones."""
        state, edited = (
            copy.copy(self),
            [node for node in tree.base if node.module in modules],
        )
        state._modules = self._modules | {
            node.fqn: _read_module(node.module) for node in edited
        }
        return state

    def diff(self, tree: ModelTree, drifted: Collection[str]) -> StateDiff:
        """Compare a live model with this state. Adapters do not count; frozen parameters that ``drifted`` are named."""
        differences: Differences = {}
        live: dict[str, list[nn.Parameter]] = {}
        for tensor in tree.base_tensors:
            live.setdefault(tensor.fqn, []).append(tensor.parameter)
        rewritten = {
            id(t.parameter) for t in tree.all_tensors if is_rewritten(t.module, t.name)
        }
        adapting = [
            node.module
            for node in tree.adapters
            if hasattr(node.module, "parameter_name")
        ]
        parametrized = {
            id(p)
            for lora in adapting
            for p in lora.get_base_layer().parameters()  # type: ignore[operator]
        }
        is_distributed = (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )
        for record, fqn in zip(*self._base, strict=True):
            here = live.get(fqn, [])
            found = next(
                (p for p in here if record.is_seen(p)), here[-1] if here else None
            )
            is_sharded = tree.sharded.get(id(found)) is record
            if found is None or not (is_sharded or record.is_seen(found)):
                what = "none" if found is None else "another"
                differences.setdefault(fqn, {})["parameter"] = (
                    "the prepared one",
                    what,
                )
            if found is not None:
                # A quantized layer casts its bias to the dtype it computes in whenever
                # it runs, in inference mode too.
                is_bias = id(found) in rewritten
                ignored = ["dtype"] if is_bias else []
                if (
                    is_distributed
                    or id(found) in parametrized
                    or (is_bias and found.is_inference())
                ):
                    # DistributedDataParallel writes every parameter when it is made,
                    # with the value it has; a LoRA on a parameter
                    # (``target_parameters``) writes it back after each forward.
                    ignored.append("writes")
                if is_sharded:
                    ignored += ["shape", "writes"]
                expected = {
                    name: column[self._numbers[record]]
                    for name, column in self._columns.items()
                }
                now = {name: value for name, (value,) in _read([found]).items()}
                _compare(differences, fqn, expected, now, ignored)
        for fqn in drifted:
            found_value = "another value, although the parameter is frozen"
            differences.setdefault(fqn, {})["value"] = (
                "the original value",
                found_value,
            )
        modules = {node.fqn: node.module for node in tree.base}
        for fqn, marks in self._modules.items():
            if fqn in modules:
                # A hook where none is needed changes nothing; transformers adds one
                # whenever it enables checkpointing.
                ignored = (
                    [] if marks["input_gradient_hooks"] else ["input_gradient_hooks"]
                )
                _compare(differences, fqn, marks, _read_module(modules[fqn]), ignored)
        return StateDiff(differences)


def _read(parameters: list[nn.Parameter]) -> dict[str, list[Any]]:
    """List each compared property of all parameters: one list for each parameter would slow the garbage collector."""
    shapes: dict[torch.Size, tuple[int, ...]] = {}
    return {
        "dtype": [p.dtype for p in parameters],
        "shape": [
            shapes.setdefault(shape := p.shape, tuple(shape)) for p in parameters
        ],
        "requires_grad": [p.requires_grad for p in parameters],
        "writes": [None if p.is_inference() else p._version for p in parameters],
    }


_MARKS = {*CHECKPOINTING_ATTRIBUTES, "forward", "_old_forward", "__deepcopy__"}
_UNMARKED: dict[str, Any] = {
    **dict.fromkeys(CHECKPOINTING_ATTRIBUTES, MISSING),
    "forward": None,
    "upcast": frozenset(),
    "input_gradient_hooks": False,
}


def _read_module(module: nn.Module) -> dict[str, Any]:
    """The attributes that a preparation sets on a module; most modules have none of them."""
    fields = vars(module)
    if not module._forward_hooks and fields.keys().isdisjoint(_MARKS):
        return _UNMARKED
    forwards = [fields.get(slot) for slot in ("forward", "_old_forward")]
    state = {
        name: _plain(fields.get(name, MISSING)) for name in CHECKPOINTING_ATTRIBUTES
    }
    state["forward"] = next(
        (f for f in forwards if isinstance(f, Float32Forward)), None
    )
    # A stand-in for a weight comes with a copier.
    named = fields.items() if "__deepcopy__" in fields else ()
    state["upcast"] = frozenset(
        name for name, value in named if isinstance(value, UpcastTensor)
    )
    state["input_gradient_hooks"] = bool(input_gradient_hooks(module))
    return state


def _plain(value: Any) -> Any:
    """A value that can be compared: two partials of the same call are not equal, their parts are."""
    if isinstance(value, functools.partial):
        return value.func.__qualname__, value.args, dict(value.keywords)
    return value


def _compare(
    differences: Differences,
    fqn: str,
    expected: dict[str, Any],
    found: dict[str, Any],
    ignored: Collection[str],
) -> None:
    """Add the values that differ from the expected ones."""
    for what, value in expected.items():
        if what not in ignored and found[what] is not value and found[what] != value:
            differences.setdefault(fqn, {})[what] = (value, found[what])
