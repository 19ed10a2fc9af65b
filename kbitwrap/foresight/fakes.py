"""A model of tensors without values, on the CPU: what computes with it allocates nothing, and has every shape."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError, UnsupportedModelError
from ..model.quantization import is_quantized_parameter
from ..tensors.bits import is_composed
from ..tensors.upcast import UpcastTensor
from .quantization import quantize_fakes, replace_tensors, warm_tables

_LARGE = 1 << 24  # bytes of a tensor whose values are not worth computing


def _grouped_product(
    left: Any, right: Any, offsets: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """The output of a product of groups, whose fake kernel refuses the dtypes that a CPU multiplies."""
    shapes: Any = torch._meta_registrations
    return shapes._create_grouped_mm_output_tensor(left, right, offsets, out_dtype)


def _alignments(
    log_probs: torch.Tensor,
    targets: Any,
    input_lengths: Any,
    lengths: Any,
    *_: Any,
    **__: Any,
) -> Any:
    """The outputs of the CTC loss: of each sequence, and of the blanks and labels of the longest, at each time."""
    times, batch, _classes = log_probs.shape
    with _disable_current_modes():
        longest = int(lengths.max())
    return log_probs.new_empty(batch), log_probs.new_empty(
        batch, times, 2 * longest + 1
    )


def _bags(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The outputs of sums of embeddings, which a CPU computes of bfloat16 as of float16, with as little beside them."""
    half = weight.half() if weight.dtype == torch.bfloat16 else weight
    output = torch.ops.aten._embedding_bag_forward_only.default(half, *args, **kwargs)
    return output[0].to(weight.dtype), *output[1:]


_SHAPES: dict[str, Callable[..., Any]] = {
    "aten::_embedding_bag_forward_only": _bags,
    "aten::_grouped_mm": _grouped_product,
    "aten::_ctc_loss.Tensor": _alignments,
}
"""Functions that make the outputs of operations whose shapes torch does not tell of tensors without values."""


def in_memory_of(
    tensor: torch.Tensor, memory: dict[int, tuple[Any, Any]], device: str
) -> torch.Tensor:
    """A tensor like another on a device; those of one memory lie in one again, and ``memory`` has it by its storage."""
    made = torch.empty(0, dtype=tensor.dtype, device=device)
    storage = None if is_composed(type(tensor)) else tensor.untyped_storage()
    if storage is None or not storage.nbytes():
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
    if storage._cdata not in memory:
        memory[storage._cdata] = (
            storage,
            torch.empty(
                storage.nbytes(), dtype=torch.uint8, device=device
            ).untyped_storage(),
        )
    place: Any = memory[storage._cdata][1]
    return made.set_(place, tensor.storage_offset(), tensor.shape, tensor.stride())


_NORMS = {
    "aten::native_layer_norm": 2,
    "aten::native_group_norm": 1,
    "aten::native_batch_norm": 1,
}
"""Norms, with the position of the weight: a CPU keeps the statistics of a half input in the dtype of the weight."""


def _as_computed(name: str, args: Any, output: Any) -> Any:
    """The outputs of an operation of fake tensors in the dtypes that a CPU gives them."""
    if name in _NORMS and (weight := args[_NORMS[name]]) is not None:
        return output[0], *(value.to(weight.dtype) for value in output[1:])
    if name == "aten::native_group_norm_backward" and output[0] is not None:
        return output[0].to(args[1].dtype), *output[1:]
    return output


class TooLongError(ConfigError):
    """A position, or another index, is looked up in an embedding that has no row for it."""


def _refuse_beyond(weight: Any, indices: Any, *_: Any) -> None:
    """Raise where known indices are beyond an embedding: without values, it would give rows all the same."""
    with _disable_current_modes():
        largest = int(indices.max()) if indices.numel() else 0
    if largest >= weight.shape[0]:
        raise TooLongError(
            f"the step looks up index {largest:,} in an embedding of {weight.shape[0]:,} rows: give a shorter sequence "
            "(seq_len), or inputs with smaller values"
        )


def _is_finite(func: Any, args: Any) -> bool | None:
    """The answer to a question whether values are finite, if an operation is part of one: all of them are."""
    name = func.name()
    # of those that are no NaNs
    if name in ("aten::eq.Tensor", "aten::ne.Tensor") and args[0] is args[1]:
        return bool(name == "aten::eq.Tensor")
    if name in ("aten::eq.Scalar", "aten::ne.Scalar") and math.isinf(args[1]):
        return bool(name == "aten::ne.Scalar")
    return False if name in ("aten::isnan", "aten::isinf") else None


class KnownValues(TorchDispatchMode):
    """Computes for real what depends on no weight and no activation, such as positions, so that models may ask for it.

    Below it is a mode of fake tensors, which gets all the rest. A real tensor that is
    written to with values that are not known keeps its place and is known no longer.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes
        self._unknown: dict[int, weakref.ref[Any]] = {}
        self.failed: tuple[str, BaseException] | None = None
        self.has_assumed = False

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.untyped_storage()._cdata not in self._unknown
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation for real if all that it reads is known and what it makes is small."""
        kwargs = kwargs or {}
        try:
            return self._run(func, args, kwargs)
        except Exception as error:
            self.failed = func.name(), error
            raise

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (make := _SHAPES.get(func.name())) is not None:
            return make(*args, **kwargs)
        tensors = [
            value
            for value in tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        ]
        if any(
            made.alias_info and not made.alias_info.is_write
            for made in func._schema.returns
        ) and all(type(tensor) is torch.Tensor for tensor in tensors):
            with _disable_current_modes():
                # a view of a real tensor lies in its memory, known or not
                return func(*args, **kwargs)
        if func.name() == "aten::embedding" and self._is_known(args[1]):
            _refuse_beyond(*args)
        if (
            all(map(self._is_known, tensors))
            and torch.Tag.nondeterministic_seeded not in func.tags
        ):
            # What depends on values has no fake result; its size is at most that of
            # what it reads. What is written in place is there already, and would be
            # written twice.
            depends = not {
                torch.Tag.data_dependent_output,
                torch.Tag.dynamic_output_shape,
            }.isdisjoint(func.tags)
            made = tree_leaves(
                tensors if depends or func._schema.is_mutable else func(*args, **kwargs)
            )
            if not any(
                isinstance(value, torch.Tensor) and value.nbytes > _LARGE
                for value in made
            ):
                with _disable_current_modes():
                    return func(*args, **kwargs)
        if (answer := _is_finite(func, args)) is not None:
            self.has_assumed = True
            with _disable_current_modes():
                return torch.full(args[0].shape, answer)
        output = _as_computed(func.name(), args, func(*args, **kwargs))
        written = [
            value
            for value in self._written(func, args, kwargs)
            if type(value) is torch.Tensor
        ]
        for tensor in written:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._unknown[key] = weakref.ref(
                storage,
                lambda _, key=key: self._unknown.pop(key, None),  # type: ignore[misc]
            )
        return written[0] if written and isinstance(output, torch.Tensor) else output

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    yield from tree_leaves(
                        args[position]
                        if position < len(args)
                        else kwargs.get(argument.name)
                    )


class FakeModel:
    """A throwaway model, on the meta device, given fake tensors on the CPU in place of its own; ties stay ties."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.failed: tuple[str, BaseException] | None = None
        self.notes: tuple[str, ...] = ()
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory: dict[int, tuple[Any, Any]] = {}
        warm_tables()
        with self.mode:
            for module in model.modules():
                self._replace(module)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run what is inside on the fake tensors, one thread at a time.

        Then ``failed`` names the operation that raised, if one did, and ``notes`` say
        what was assumed.
        """
        known = KnownValues(self.mode)
        try:
            with self._not_tracing(), self.mode, known:
                yield
        finally:
            self.failed = known.failed
            if known.has_assumed:
                self.notes = (
                    "the model asks whether its activations are finite; they are taken to be",
                )

    @contextlib.contextmanager
    def _not_tracing(self) -> Iterator[None]:
        """Keep transformers from taking the fake tensors for those of a compiler, for which its masks are others."""
        utils: Any = sys.modules.get("transformers.utils.import_utils")
        found = getattr(utils, "is_fake_tensor", None)
        if found is not None:
            utils.is_fake_tensor = lambda value: (
                found(value) and value.fake_mode is not self.mode
            )
        try:
            yield
        finally:
            if found is not None:
                utils.is_fake_tensor = found

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor of the shape, strides and dtype of another; the same one for the same one."""
        if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
            return tensor
        found = self._made.get(id(tensor))
        if found is None:
            if is_composed(type(tensor)):
                raise UnsupportedModelError(
                    f"expected plain tensors and weights of bitsandbytes, found a {type(tensor).__name__}, whose "
                    "operations cannot be followed without values"
                )
            made = in_memory_of(tensor, self._memory, "cpu")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            found = self._made[id(tensor)] = tensor, made
        return found[1]

    def _replace(self, module: nn.Module) -> None:
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            made = None
            if is_quantized_parameter(parameter) and id(parameter) not in self._made:
                made = quantize_fakes(module, parameter, self.fake)
                if made is not None:
                    self._made[id(parameter)] = parameter, made
            module._parameters[name] = self.fake(parameter)  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = self.fake(buffer)
        for name, value in list(vars(module).items()):
            if isinstance(value, UpcastTensor):
                assert value.owner is not None
                stored = value.owner[0]._parameters[value.owner[1]]
                assert stored is not None
                vars(module)[name] = UpcastTensor(
                    self.fake(stored),
                    value.owner,
                    value._chunk_bytes,
                )
            elif isinstance(value, torch.Tensor):
                vars(module)[name] = self.fake(value)
            elif isinstance(value, (dict, list)) and name not in (
                "_parameters",
                "_buffers",
                "_modules",
            ):
                replace_tensors(value, self.fake)
