"""The state that a preparation left, for ``verify`` to compare a live model with."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from typing import Any

from torch import nn

from ..edits.checkpointing import CHECKPOINTING_ATTRIBUTES, input_gradient_hooks
from ..edits.journal import MISSING
from ..edits.norms import Float32Forward
from ..model.quantization import is_rewritten
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, only_reading
from ..reports import StateDiff
from ..tensors.upcast import UpcastTensor
from .process import is_distributed

State = dict[str, Any]
"""What is compared of a parameter or of a module, by the name that a difference gets."""


class PreparedState:
    """The state of every parameter and of the base's modules at the end of a preparation."""

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
        """The state that a parameter was left in; ``None`` of one that was not there."""
        return self._parameters.get(record)

    def reread(self, tree: ModelTree, modules: Collection[nn.Module]) -> PreparedState:
        """This state, with modules read again that were edited since: their attributes now are the expected ones."""
        state = copy.copy(self)
        state._modules = dict(self._modules)
        for node in tree.base:
            if node.module in modules:
                state._modules[node.fqn] = _state_of_module(node.module)
        return state

    def diff(
        self, tree: ModelTree, replaced: dict[str, str], drifted: Collection[str]
    ) -> StateDiff:
        """Compare a live model with this state. Adapters do not count.

        The parameters that were found ``replaced`` and ``drifted`` are named too.
        """
        found = _Differences()
        for fqn, what in replaced.items():
            found.add(fqn, "parameter", "the prepared one", what)
        may_be_written = _written_by_adapters(tree)
        for tensor in tree.base_tensors:
            parameter = tensor.parameter
            is_sharded = id(parameter) in tree.sharded
            record = tree.known.get(id(parameter)) or tree.sharded.get(id(parameter))
            expected = None if record is None else self._parameters.get(record)
            if expected is None:
                continue
            ignored = set()
            if is_sharded:
                ignored |= {"shape", "writes"}
            if id(parameter) in may_be_written or is_distributed():
                # DistributedDataParallel writes every parameter when it is made.
                ignored.add("writes")
            if is_rewritten(tensor.module, tensor.name):
                # A quantized layer casts its bias to the dtype it computes in whenever
                # it runs, in inference mode too.
                ignored.add("dtype")
                if parameter.is_inference():
                    ignored.add("writes")
            now = _state_of_parameter(parameter)
            found.compare(tensor.fqn, expected, now, ignored)
        for fqn in drifted:
            what = "another value, although the parameter is frozen"
            found.add(fqn, "value", "the original value", what)
        for node in tree.base:
            expected = self._modules.get(node.fqn)
            if expected is None:
                continue
            # A hook where none is needed changes nothing; transformers adds one
            # whenever it enables checkpointing.
            hook = "input_gradient_hooks"
            ignored = set() if expected[hook] else {hook}
            found.compare(node.fqn, expected, _state_of_module(node.module), ignored)
        return StateDiff(found.by_fqn)


class _Differences:
    """Gathers pairs of an expected and a found value, by fqn and name."""

    def __init__(self) -> None:
        self.by_fqn: dict[str, dict[str, tuple[Any, Any]]] = {}

    def add(self, fqn: str, what: str, expected: Any, found: Any) -> None:
        self.by_fqn.setdefault(fqn, {})[what] = (expected, found)

    def compare(
        self, fqn: str, expected: State, found: State, ignored: Collection[str]
    ) -> None:
        """Add the values that differ."""
        for what, value in expected.items():
            if what not in ignored and found[what] != value:
                self.add(fqn, what, value, found[what])


def _written_by_adapters(tree: ModelTree) -> set[int]:
    """The ``id`` of each parameter that an adapter on it (``target_parameters``) writes back after each forward."""
    found: set[int] = set()
    for node in tree.adapters:
        if hasattr(node.module, "parameter_name"):
            layer: nn.Module = node.module.get_base_layer()  # type: ignore[operator]
            found.update(id(parameter) for parameter in layer.parameters())
    return found


def _state_of_parameter(parameter: nn.Parameter) -> State:
    return {
        "dtype": parameter.dtype,
        "shape": tuple(parameter.shape),
        "requires_grad": parameter.requires_grad,
        "writes": None if parameter.is_inference() else parameter._version,
    }


def _state_of_module(module: nn.Module) -> State:
    """The attributes that a preparation sets on a module."""
    fields = vars(module)
    forwards = [fields.get(slot) for slot in ("forward", "_old_forward")]
    ours = [forward for forward in forwards if isinstance(forward, Float32Forward)]
    state = {
        "forward": ours[0] if ours else None,
        "upcast": {n for n, value in fields.items() if isinstance(value, UpcastTensor)},
        "input_gradient_hooks": bool(input_gradient_hooks(module)),
    }
    for name in CHECKPOINTING_ATTRIBUTES:
        state[name] = _plain(fields.get(name, MISSING))
    return state


def _plain(value: Any) -> Any:
    """A value that can be compared: two partials of the same call are not equal, their parts are."""
    if isinstance(value, functools.partial):
        return value.func.__qualname__, value.args, dict(value.keywords)
    return value
