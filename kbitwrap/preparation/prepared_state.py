"""The state that a preparation left, for ``verify`` to compare a live model with."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ..edits.checkpointing import CHECKPOINTING_ATTRIBUTES, input_gradient_hooks
from ..edits.journal import MISSING
from ..edits.norms import Float32Forward, forward_slot
from ..model.quantization import is_rewritten
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor, only_reading
from ..reports import StateDiff
from ..tensors.upcast import UpcastTensor
from .comparison import Replacement
from .process import is_distributed

State = dict[str, Any]
"""The values of a parameter or of a module that are compared, by the names of differences.
"""
_Differences = defaultdict[str, dict[str, tuple[Any, Any]]]
_HOOKS = "input_gradient_hooks"


class PreparedState:
    """The state of every parameter, and of the base's modules, as it was left."""

    def __init__(self, tree: ModelTree) -> None:
        with only_reading():
            self._parameters = {
                tree.record(tensor): _state_of_parameter(tensor.parameter)
                for tensor in tree.tensors
            }
            self._modules = {
                node.fqn: _state_of_module(node.module) for node in tree.base
            }

    def of(self, record: ParameterRecord) -> State | None:
        """The state that a parameter was left in.

        ``None`` of one that was not there.
        """
        return self._parameters.get(record)

    def reread(self, tree: ModelTree, modules: Collection[nn.Module]) -> PreparedState:
        """This state, with modules read again that were edited since.

        Their attributes now are the expected ones.
        """
        edited = [node for node in tree.base if node.module in modules]
        state = copy.copy(self)
        state._modules = {
            **self._modules,
            **{node.fqn: _state_of_module(node.module) for node in edited},
        }
        return state

    def diff(
        self,
        tree: ModelTree,
        replaced: Mapping[str, Replacement],
        drifted: Collection[str],
    ) -> StateDiff:
        """Compare a live model with this state. Adapters do not count.

        Args:
            tree: The live model, in which the recorded parameters were found again.
            replaced: What happened to parameters of the base that are not there, by
                fqn. Nothing else of them is compared.
            drifted: The fqns of frozen parameters that hold other values.

        Returns:
            The differences by fqn, each a pair of what was expected and what was found.
        """
        found: _Differences = defaultdict(dict)
        for fqn, replacement in replaced.items():
            found[fqn]["parameter"] = "the prepared one", replacement.what
        for fqn in drifted:
            what = "another value, although the parameter is frozen"
            found[fqn]["value"] = "the original value", what
        self._diff_parameters(tree, found)
        self._diff_modules(tree, found)
        return StateDiff({fqn: pairs for fqn, pairs in found.items() if pairs})

    def _diff_parameters(self, tree: ModelTree, found: _Differences) -> None:
        """Add the differences of parameters."""
        written = _written_by_adapters(tree)
        for tensor in tree.base_tensors:
            key = id(tensor.parameter)
            record = tree.known.get(key) or tree.sharded.get(key)
            if record not in self._parameters:
                continue
            ignored = _rewritten(tensor)
            if key in written or is_distributed():
                # DistributedDataParallel writes every parameter when it is made.
                ignored.add("writes")
            if key in tree.sharded:
                ignored |= {"shape", "writes"}
            now = _state_of_parameter(tensor.parameter)
            expected = self._parameters[record]
            found[tensor.fqn] |= _differences(expected, now, ignored)

    def _diff_modules(self, tree: ModelTree, found: _Differences) -> None:
        """Add the differences of modules."""
        for node in tree.base:
            expected = self._modules.get(node.fqn)
            if expected is None:
                continue
            # A hook where none is needed changes nothing; transformers adds one
            # whenever it enables checkpointing.
            ignored = set() if expected[_HOOKS] else {_HOOKS}
            now = _state_of_module(node.module)
            found[node.fqn] |= _differences(expected, now, ignored)


def _differences(
    expected: State, found: State, ignored: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """The values that differ, each with the one found instead."""
    return {
        name: (value, found[name])
        for name, value in expected.items()
        if name not in ignored and found[name] != value
    }


def _rewritten(tensor: NamedTensor) -> set[str]:
    """The properties that may differ because a quantized layer ran.

    It casts its bias to the dtype that it computes in, in inference mode too.
    """
    if not is_rewritten(tensor.module, tensor.name):
        return set()
    return {"dtype", "writes"} if tensor.parameter.is_inference() else {"dtype"}


def _written_by_adapters(tree: ModelTree) -> set[int]:
    """The ``id`` of each parameter that an adapter writes back after each forward.

    Adapters on parameters (``target_parameters``) do so.
    """
    found: set[int] = set()
    for node in tree.adapters:
        if hasattr(node.module, "parameter_name"):
            layer: nn.Module = node.module.get_base_layer()  # type: ignore[operator]
            found.update(id(parameter) for parameter in layer.parameters())
    return found


def _state_of_parameter(parameter: nn.Parameter) -> State:
    """The properties that an edit or an optimizer changes.

    Writes are counted in place of values: a tensor made in inference mode counts none.
    """
    return {
        "dtype": parameter.dtype,
        "shape": tuple(parameter.shape),
        "requires_grad": parameter.requires_grad,
        "writes": None if parameter.is_inference() else parameter._version,
    }


def _state_of_module(module: nn.Module) -> State:
    """The attributes that a preparation sets on a module."""
    fields = vars(module)
    forward = fields.get(forward_slot(module))
    upcast = [n for n in module._parameters if isinstance(fields.get(n), UpcastTensor)]
    state = {
        "forward": forward if isinstance(forward, Float32Forward) else None,
        "upcast": set(upcast),
        _HOOKS: bool(input_gradient_hooks(module)),
    }
    for name in CHECKPOINTING_ATTRIBUTES:
        state[name] = _plain(fields.get(name, MISSING))
    return state


def _plain(value: Any) -> Any:
    """A value that can be compared.

    Two partials of the same call are not equal; their parts are.
    """
    if isinstance(value, functools.partial):
        return value.func.__qualname__, value.args, dict(value.keywords)
    return value
