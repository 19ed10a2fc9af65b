"""Plain layers in the place of quantized ones."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import ExportError
from ..model.quantization import (
    is_made_plain,
    is_quantized_layer,
    library_dequantizer,
    quantized_stacks,
)
from ..tensors.lazy import LazyTensor
from .twin import Twin


def dequantize(twin: Twin, dtype: torch.dtype, modules: set[nn.Module]) -> set[int]:
    """Dequantize other libraries' weights in some modules of a twin.

    Returns:
        The ``id`` of each module whose weight has to be rounded to ``dtype``.
    """
    # what takes the place of a shell whose class is of the library
    plains = {}
    # of dequantized weights, by the classes of layer and weight
    dtypes = {}
    rounded = set()

    for fqn, shell in twin.model.named_modules():
        if shell not in modules:
            continue
        _dequantize_stacks(fqn, shell)
        compute = library_dequantizer(shell)
        if compute is None:
            continue

        weight = shell._parameters.get("weight")
        kind = type(shell), type(weight)
        if kind not in dtypes:
            try:
                dtypes[kind] = compute().dtype
            except Exception as error:
                raise ExportError(
                    f"{fqn}: its library cannot dequantize its weight ({error!r}); "
                    "export without merging",
                    fqn=fqn,
                ) from error

        plain = shell
        if is_made_plain(shell):
            plain = plain_layer(shell).train(shell.training)
            bias = getattr(shell, "bias", None)
            # One that is a buffer may have the dtype of the weight, not the model's.
            if bias is not None and "bias" in shell._buffers:
                bias = bias.to(dtype)
            plain._parameters["bias"] = bias
            plains[shell] = plain

        if weight is None and dtypes[kind] != dtype:
            rounded.add(id(plain))
        shape = parameter_of(plain, "weight").shape
        vars(plain)["_parameters"]["weight"] = LazyTensor(shape, dtypes[kind], compute)

    # The class of a shell of these libraries cannot always be replaced: its objects may
    # have another layout.
    for module in twin.model.modules():
        for name, child in module._modules.items():
            if child in plains:
                module._modules[name] = plains[child]

    for peeled in twin.peeled:
        peeled.shell = plains.get(peeled.shell, peeled.shell)

    return rounded


def make_plain(shell: nn.Module) -> None:
    """Make a layer of bitsandbytes, in place, the one that it was made from.

    Its parameters are on the meta device, until others take their place.
    """
    plain = plain_layer(shell).train(shell.training)
    shell.__class__ = type(plain)
    vars(shell).clear()
    vars(shell).update(vars(plain))


def _dequantize_stacks(fqn: str, shell: nn.Module) -> None:
    """Make a shell whose stacks of experts are quantized a plain one.

    It gets the class that it had before.
    """
    stacks = quantized_stacks(shell)
    if not stacks:
        return

    others = {*shell._modules["parametrizations"]._modules} - {*stacks}  # type: ignore[union-attr]
    if others or any(len(computes._modules) > 1 for computes, _ in stacks.values()):
        raise ExportError(
            f"{fqn}: parametrizations of its own lie beside the quantized experts; "
            "remove them",
            fqn=fqn,
        )

    del vars(shell)["_modules"]["parametrizations"]
    shell.__class__ = type(shell).__bases__[0]
    for name, (computes, state) in stacks.items():
        vars(shell)["_parameters"][name] = LazyTensor(
            state.shape, state.dtype, computes, is_own=True
        )


def parameter_of(module: nn.Module, name: str) -> torch.Tensor:
    """Return a module's parameter, which is not ``None``.

    That of a twin may be a lazy tensor.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def is_transposed(module: nn.Module) -> bool:
    """Return whether a quantized layer was made from transformers' ``Conv1D``.

    The weight of that is a linear's transposed.
    """
    return (
        is_quantized_layer(module)
        and getattr(vars(module).get("source_cls"), "__name__", "") == "Conv1D"
    )


def plain_layer(module: nn.Module, *, as_linear: bool = False) -> nn.Module:
    """Return the layer that a quantized one was made from, on the meta device.

    With ``as_linear`` it is a linear where it was a ``Conv1D``, too.
    """
    with torch.device("meta"):
        if isinstance(module, nn.Embedding):
            return nn.Embedding(
                module.num_embeddings, module.embedding_dim, module.padding_idx
            )
        # Not every library's are of ``nn.Linear``.
        widths = vars(module)["in_features"], vars(module)["out_features"]
        if is_transposed(module) and not as_linear:
            return vars(module)["source_cls"](*reversed(widths))  # type: ignore[no-any-return]
        return nn.Linear(*widths, module._parameters.get("bias") is not None)
