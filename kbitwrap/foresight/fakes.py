"""A model of tensors without values, on the CPU: what computes with it allocates nothing, and has every shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import UnsupportedModelError
from ..model.quantization import is_quantized_parameter
from ..tensors.bits import is_composed
from ..tensors.upcast import UpcastTensor
from .quantization import quantize_fakes, warm_tables

_LARGE = 1 << 20  # elements of an integer tensor that is not worth computing


class HostIntegers(TorchDispatchMode):
    """Computes for real what is made of integers and booleans alone, such as positions, so that models may ask for it.

    Below it is a mode of fake tensors, which gets all the rest.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation for real if its inputs are real and its result is small."""
        kwargs = kwargs or {}
        if any(cls is not torch.Tensor for cls in types):
            return func(*args, **kwargs)
        has_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)
        fake = func(*args, **kwargs) if has_values else None
        made = [value for value in tree_leaves(fake) if isinstance(value, torch.Tensor)]
        is_float = any(value.is_floating_point() for value in made)
        if (is_float and not types) or any(value.numel() > _LARGE for value in made):
            return fake
        if torch.Tag.nondeterministic_seeded in func.tags:
            return fake
        with _disable_current_modes():
            real = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: self._fakes.from_tensor(t) if t.is_floating_point() else t, real)


class FakeModel:
    """A throwaway model, on the meta device, given fake tensors on the CPU in place of its own; ties stay ties."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        warm_tables()
        with self.mode:
            for module in model.modules():
                self._replace(module)

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
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
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
                made = quantize_fakes(module, name, parameter, self.fake)
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
                vars(module)[name] = UpcastTensor(self.fake(stored), value.owner, value._chunk_bytes)  # type: ignore[arg-type]
            elif isinstance(value, torch.Tensor):
                vars(module)[name] = self.fake(value)
