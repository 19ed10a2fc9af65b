"""A model of tensors without values, on the CPU: what computes with it allocates nothing, and has every shape."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import ConfigError, UnsupportedModelError
from ..model.quantization import is_quantized_parameter
from ..tensors.bits import is_composed
from ..tensors.upcast import UpcastTensor, written_arguments
from .quantization import fake_weight, places_of_tensors

OPERATION = "_kbitwrap_operation"
"""The attribute of an exception that names the operation which raised it."""

_aten = torch.ops.aten
_LARGE = 1 << 24  # bytes of a tensor whose values are not worth computing
_FINITE = "the model asks whether its activations are finite; they are taken to be"


def _grouped_product(
    left: Any, right: Any, offsets: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Return the output of a product of groups, whose fake kernel refuses the dtypes that a CPU multiplies."""
    shapes = torch._meta_registrations
    return shapes._create_grouped_mm_output_tensor(left, right, offsets, out_dtype)


def _alignments(
    log_probs: Tensor,
    targets: Any,
    input_lengths: Any,
    lengths: Any,
    *_: Any,
    **__: Any,
) -> Any:
    """Return the outputs of the CTC loss: by sequence, and for the blanks and labels of the longest, at each time."""
    times, batch, _classes = log_probs.shape
    with _disable_current_modes():
        longest = int(lengths.max())
    losses = log_probs.new_empty(batch)
    alignments = log_probs.new_empty(batch, times, 2 * longest + 1)
    return losses, alignments


def _counts(indices: Tensor, weights: Any = None, minlength: int = 0) -> Any:
    """Return the counts of indices that are all below the number of counts asked for, as those of experts are."""
    if not minlength or weights is not None:
        return _aten.bincount.default(indices, weights)  # which torch refuses
    return indices.new_empty(minlength, dtype=torch.int64)


_SHAPES: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _grouped_product,
    "aten::_ctc_loss.Tensor": _alignments,
    "aten::bincount": _counts,
}
"""Functions that make the outputs of operations whose shapes torch does not tell of tensors without values."""


Memory = dict[torch.UntypedStorage, torch.UntypedStorage]
"""Storages, each with the one that stands for it."""


def in_memory_of(tensor: Tensor, memory: Memory, device: str) -> Tensor:
    """Make a tensor like another on a device; those of one memory lie in one again.

    Args:
        tensor: A tensor of any class.
        memory: The storages that stand for others so far; it is added to.
        device: ``"meta"``, or under a mode of fake tensors another one.

    Returns:
        A tensor of the same shape, strides and dtype, without values.
    """
    shape, strides = tensor.shape, tensor.stride()
    made = torch.empty(0, dtype=tensor.dtype, device=device)
    if is_composed(type(tensor)) or not tensor.untyped_storage().nbytes():
        return made.new_empty_strided(shape, strides)
    storage = tensor.untyped_storage()
    if storage not in memory:
        bits = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        memory[storage] = bits.untyped_storage()
    place = memory[storage]
    return made.set_(place, tensor.storage_offset(), shape, strides)


_NORMS = {
    "aten::native_layer_norm": 2,
    "aten::native_group_norm": 1,
    "aten::native_batch_norm": 1,
}
"""Norms, with the position of the weight: a CPU keeps the statistics of a half input in the dtype of the weight."""


def _as_computed(name: str, args: Any, output: Any) -> Any:
    """Give the outputs of an operation of fake tensors the dtypes that a CPU gives them."""
    if name in _NORMS:
        weight = args[_NORMS[name]]
        if weight is None:
            return output
        normed, *statistics = output
        return normed, *(value.to(weight.dtype) for value in statistics)
    if name == "aten::native_group_norm_backward":
        gradient, *others = output
        if gradient is not None:
            return gradient.to(args[1].dtype), *others
    return output


class TooLongError(ConfigError):
    """A position, or another index, is looked up in an embedding that has no row for it."""


def _refuse_beyond(weight: Any, indices: Any, *_: Any) -> None:
    """Refuse known indices that are beyond an embedding: without values, it would give rows all the same.

    Raises:
        TooLongError: The weight has no row for one of them.
    """
    with _disable_current_modes():
        largest = int(indices.max()) if indices.numel() else 0
    if largest >= weight.shape[0]:
        raise TooLongError(
            f"the step looks up index {largest:,} in an embedding of {weight.shape[0]:,} rows: give a shorter sequence "
            "(seq_len), or inputs with smaller values"
        )


_DRAWN = "_kbitwrap_drawn"  # the attribute of a tensor of numbers drawn from [0, 1)


def _assumed_answer(name: str, args: Any) -> bool | None:
    """Answer a question for all values: whether they are finite, or whether drawn numbers are below a rate of 0.

    ``None`` is returned for an operation that is no part of such a question.
    """
    if name in ("aten::isnan", "aten::isinf"):
        return False
    # layers are dropped at a rate
    if name == "aten::lt.Scalar" and hasattr(args[0], _DRAWN) and args[1] <= 0:
        return False
    is_equal = name.startswith("aten::eq.")
    if not is_equal and not name.startswith("aten::ne."):
        return None
    # of a value and itself, which differ if it is no number
    if name.endswith(".Tensor") and args[0] is args[1]:
        return is_equal
    if name.endswith(".Scalar") and math.isinf(args[1]):
        return not is_equal
    return None


class KnownValues(TorchDispatchMode):
    """Computes for real what depends on no weight and no activation, such as positions, so that models may ask for it.

    Below it is a mode of fake tensors, which gets all the rest. A real tensor that is
    written to with values that are not known keeps its place and is known no longer.

    Args:
        gives_figures: Whether to answer who reads an unknown float, such as a metric:
            it is 1.

    Attributes:
        has_assumed: Whether values were taken to be finite.
    """

    def __init__(self, *, gives_figures: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unknown: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._gives_figures = gives_figures
        self.has_assumed = False

    def _is_known(self, tensor: Tensor) -> bool:
        return _is_real(tensor) and tensor.untyped_storage() not in self._unknown

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation for real if all that it reads is known and what it makes is small."""
        if asks_for_device(func, args):
            return args[0].device
        kwargs = kwargs or {}
        try:
            return self._run(func, args, kwargs)
        except Exception as error:
            vars(error)[OPERATION] = func.name()
            raise

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.name()
        if name == "aten::embedding" and self._is_known(args[1]):
            _refuse_beyond(*args)
        is_order = self._gives_figures and name == "aten::randperm"
        if is_order or self._is_for_real(func, args, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if name in _SHAPES:
            return _SHAPES[name](*args, **kwargs)
        is_read = self._gives_figures and name == "aten::_local_scalar_dense"
        if is_read and args[0].is_floating_point():
            return 1.0
        if name == "aten::index.Tensor":
            args = args[0], self._positions(args[1])
        answer = _assumed_answer(name, args)
        if answer is not None:
            self.has_assumed |= name != "aten::lt.Scalar"
            with _disable_current_modes():
                return torch.full(args[0].shape, answer)
        computed = func(*args, **kwargs)
        output = _as_computed(name, args, computed)
        if name == "aten::rand":
            setattr(output, _DRAWN, True)
        written = list(filter(_is_real, written_arguments(func, args, kwargs)))
        for tensor in written:  # not known any longer
            self._unknown.add(tensor.untyped_storage())
        if written and isinstance(output, Tensor):
            return written[0]
        return output

    def _is_for_real(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operation is computed: a view of what is real, or what is known and small."""
        tensors = tensors_in((args, kwargs))
        if func.is_view and all(map(_is_real, tensors)):
            return True  # it lies in the memory of a real tensor, known or not
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if not all(map(self._is_known, tensors)):
            return False
        # What depends on values has no fake result; its size is at most that of what it
        # reads. What is written in place is there already, and would be written twice.
        if func._schema.is_mutable or not _DEPENDING.isdisjoint(func.tags):
            made = tensors
        else:
            made = tensors_in(func(*args, **kwargs))
        # a large one that is known was given, such as images
        most = max([_LARGE, *(tensor.nbytes for tensor in tensors)])
        return all(tensor.nbytes <= most for tensor in made)

    def _positions(self, indices: Any) -> list[Any]:
        """Return the indices, with the positions that known masks select in place of these."""
        positions = []
        for index in indices:
            is_mask = index is not None and index.dtype == torch.bool
            if is_mask and self._is_known(index):
                with _disable_current_modes():
                    positions += index.nonzero().unbind(1)
            else:
                positions.append(index)
        return positions


_DEPENDING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, such as the arguments or outputs of an operation."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    found = []
    for part in value:
        found += tensors_in(part)
    return found


def asks_for_device(func: Any, args: Any) -> bool:
    """Return whether an operation asks a fake tensor for its device, as every second one does: no memory is in it."""
    return func is _DEVICE and isinstance(args[0], FakeTensor)


_DEVICE = torch.ops.prim.device.default


def _is_real(value: Any) -> bool:
    return type(value) is Tensor


class FakeModel:
    """A model given fake tensors on the CPU in place of its own; ties stay ties.

    Args:
        model: A model to throw away, on the meta device.

    Attributes:
        model: The same.
        mode: The mode of its fake tensors.
        notes: What was assumed of values in it.
        was_run: Whether it was run before, so that what a first forward leaves is there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.notes: tuple[str, ...] = ()
        self.was_run = False
        self._made: dict[Tensor, Tensor] = {}
        self._memory: Memory = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is None or parameter in self._made:
                    continue
                if is_quantized_parameter(parameter):
                    made = fake_weight(module, parameter, self.fake)
                    if made is not None:
                        self._made[parameter] = made
            for fields, key, value in list(places_of_tensors(vars(module))):
                fields[key] = self.fake(value)

    @contextlib.contextmanager
    def running(self, *, gives_figures: bool = False) -> Iterator[None]:
        """Run what is inside on the fake tensors, one thread at a time.

        Then ``notes`` say what was assumed. An exception that an operation raised has its
        name under ``OPERATION``.

        Args:
            gives_figures: Whether to answer who reads an unknown float.

        Yields:
            Nothing.
        """
        known = KnownValues(gives_figures=gives_figures)

        def is_of_compiler(value: Any) -> bool:
            return (
                False  # for a compiler's fake tensors, transformers makes other masks
            )

        name = "transformers.utils.import_utils.is_fake_tensor"
        with mock.patch(name, is_of_compiler), self.mode, known:
            yield
        self.notes = (_FINITE,) if known.has_assumed else ()

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that stands for another, with its shape, strides and dtype.

        Args:
            tensor: A tensor, on the meta device or with values.

        Returns:
            The fake one on the CPU: the same one for the same tensor, and a parameter
            for a parameter.

        Raises:
            UnsupportedModelError: The tensor is of a class with operations of its own.
        """
        if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
            return tensor
        if tensor in self._made:
            return self._made[tensor]
        if isinstance(tensor, UpcastTensor):
            # a stand-in for the fake parameter, in place of one for the parameter
            assert tensor.owner is not None
            module, name = tensor.owner
            stored = self.fake(module._parameters[name])  # type: ignore[arg-type]
            return UpcastTensor(stored, tensor.owner, tensor._chunk_bytes)
        if is_composed(type(tensor)):
            raise UnsupportedModelError(
                f"expected plain tensors and weights of bitsandbytes, found a {type(tensor).__name__}, whose "
                "operations cannot be followed without values"
            )
        with self.mode:
            made = in_memory_of(tensor, self._memory, "cpu")
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._made[tensor] = made
        return made
