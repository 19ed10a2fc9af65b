"""CUDA's rules on a CPU: what its kernels refuse is refused, and what makes the host wait for the device is counted.

A stand-in, for machines without a GPU. ``tests/gpu`` compares the rules with those of a real one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
SYNCS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.is_nonzero}
"""The operations whose results the host needs before it can go on."""
READS = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist}
"""The methods that copy to the host. On a CPU they run no operation."""
# The normalizations whose kernels want weights in the dtype of the input, with the positions of input, weight and bias.
NORMALIZATIONS = {aten.native_layer_norm: (0, 2, 3), aten.native_group_norm: (0, 1, 2)}
FLASH_ATTENTION = {aten._scaled_dot_product_flash_attention, aten._flash_attention_forward}


def refusal(packet: Any, args: tuple[Any, ...]) -> str | None:
    """The reason for which CUDA would refuse an operation that a CPU computes."""
    if packet in NORMALIZATIONS:
        given = [args[n] for n in NORMALIZATIONS[packet] if n < len(args) and isinstance(args[n], torch.Tensor)]
        dtypes = [str(tensor.dtype) for tensor in given]
        return f"{packet}: inputs of {', '.join(dtypes)}" if len(set(dtypes)) > 1 else None
    if packet in FLASH_ATTENTION and args[0].dtype not in (torch.float16, torch.bfloat16):
        return f"{packet}: a query of {args[0].dtype}"
    return None


class CudaRules(TorchDispatchMode):
    """Refuse with ``RuntimeError`` what CUDA refuses, and list in ``syncs`` what the host would wait for.

    What was copied to the host, and what is computed from it alone, is on the host: nothing waits for it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []
        self._on_host: dict[int, torch.Tensor] = {}  # by the key of its memory, which it keeps from being reused
        self._reads = _Reads(self)

    def __enter__(self) -> CudaRules:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._reads.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for cls in types):
            return NotImplemented  # a subclass computes by other operations, which come by here
        reason = refusal(func.overloadpacket, args)
        if reason is not None:
            raise RuntimeError(f"CUDA refuses {reason}")
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        is_on_host = bool(given) and all(_memory(tensor) in self._on_host for tensor in given)
        if func.overloadpacket in SYNCS and not is_on_host:
            self.syncs.append(str(func.overloadpacket))
        found = func(*args, **(kwargs or {}))
        if is_on_host:
            self.copied(found)
        return found

    def read(self, tensor: torch.Tensor, how: str) -> None:
        """Count a copy to the host, unless it is there."""
        if _memory(tensor) not in self._on_host:
            self.syncs.append(how)

    def copied(self, found: Any) -> None:
        """Note that this is on the host."""
        self._on_host.update({_memory(t): t for t in tree_leaves(found) if isinstance(t, torch.Tensor)})


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Reads(TorchFunctionMode):
    def __init__(self, rules: CudaRules) -> None:
        self._rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in READS:
            self._rules.read(args[0], f"Tensor.{func.__name__}")
        if func is torch.Tensor.cpu:
            found = found.clone()  # a copy, as of what is on a device
            self._rules.copied(found)
        return found
