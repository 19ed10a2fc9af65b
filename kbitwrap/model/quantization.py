"""The quantization of a model, and what it permits.

It names the quantization libraries, and so does `bitsandbytes_layers.py`.

Half parameters outside the quantized layers are upcast where bitsandbytes quantized
these, told by attributes of the model or by its layers. They are never cast beside
gptq, aqlm, eetq, hqq and torchao (PEFT's own list), other methods of transformers
(there PEFT casts) and a library's own function: these compute their layers in the dtype
that was loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import QuantKind
from ..tensors.bits import is_composed, parts_of
from .wrappers import loaded_class

BITSANDBYTES = "bitsandbytes"
DISTRIBUTIONS = (
    "bitsandbytes", "torchao", "hqq", "gptqmodel", "aqlm", "eetq", "optimum-quanto", "compressed-tensors",
)  # fmt: skip
"""The libraries that quantize, as package indexes call them."""
SKIPPED_LAYERS = "llm_int8_skip_modules"
"""The field of a config of bitsandbytes for the layers that stay as they are."""
_SELF_MANAGED_IN_PEFT = ("gptq", "aqlm", "eetq", "hqq", "torchao")
_DEQUANTIZED_BY_LIBRARY = (
    "awq",
    "compressed-tensors",
    "gptq",
    "hqq",
    "quanto",
    "torchao",
)
# The classes of gptqmodel whose codes lie as in the checkpoint until they run in eval
# mode.
_GPTQ_CLASSES = ("TorchLinear", "TorchAtenLinear", "TorchFusedLinear")
_AWQ_CLASSES = ("AwqTorchLinear", "TorchAtenAwqLinear", "TorchFusedAwqLinear")
PEFT_MODULES = ("awq", "bnb", "gptq", "hqq", "torchao")
"""The modules in which PEFT has a method's layers for quantized bases.

They are those that can be merged; its other layers are in ``layer``.
"""


def bitsandbytes_config(
    kind: str, compute_dtype: torch.dtype | str | None = None
) -> Any:
    """Make the config of a kind of quantization for ``from_pretrained``; ``None`` for ``"none"``.

    ``compute_dtype`` is the dtype that 4-bit layers compute in, by default the library's.
    """
    from transformers import BitsAndBytesConfig

    settings = QuantKind(kind).settings
    if not settings:
        return None
    return BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=compute_dtype)


def kind_of(settings: Mapping[str, Any]) -> QuantKind | None:
    """Return the kind of bitsandbytes' quantization that settings describe.

    ``None`` where they describe another library's, several parts of a model, or an unknown kind.
    """
    if not settings:
        return QuantKind.NONE

    if settings.get("load_in_8bit"):
        return QuantKind.INT8

    asked = {
        "load_in_4bit": bool(settings.get("load_in_4bit")),
        "bnb_4bit_quant_type": settings.get("bnb_4bit_quant_type") or "fp4",
        "bnb_4bit_use_double_quant": bool(settings.get("bnb_4bit_use_double_quant")),
    }
    return next((kind for kind in QuantKind if kind.settings == asked), None)


@dataclass(frozen=True)
class Quantization:
    """The quantization of a model."""

    method: str | None  # "bitsandbytes_4bit", "bitsandbytes_8bit" or another one's name

    @property
    def is_quantized(self) -> bool:
        """Whether it is quantized at all."""
        return self.method is not None

    @property
    def casts(self) -> bool:
        """Whether half parameters outside the quantized layers may be cast."""
        return self.method is None or self.method.startswith("bitsandbytes_")

    @property
    def is_known_to_peft(self) -> bool:
        """Whether PEFT's function leaves the weights of the method alone.

        It does so wherever the model's attributes tell the method.
        """
        return self.casts or self.method in _SELF_MANAGED_IN_PEFT

    @property
    def can_dequantize(self) -> bool:
        """Whether the values of the quantized weights can be computed."""
        return self.casts or self.method in _DEQUANTIZED_BY_LIBRARY


@functools.cache
def _is_of_bitsandbytes(cls: Any, *names: str) -> bool:
    """Return whether a class is one of bitsandbytes', or made from it.

    An answer stays true: the library was loaded when the class was made.
    """
    return issubclass(
        cls, tuple(loaded_class("bitsandbytes.nn", name) for name in names)
    )


def is_quantized_layer(module: nn.Module) -> bool:
    """Return whether a module is a bitsandbytes 4-bit or 8-bit layer."""
    cls: Any = type(module)
    return _is_of_bitsandbytes(
        cls, "Linear4bit", "Linear8bitLt", "Embedding4bit", "Embedding8bit"
    )


def is_rewritten(module: nn.Module, name: str) -> bool:
    """Return whether a layer casts a parameter of its own whenever it runs.

    It casts it to the dtype that it computes in.
    """
    return name == "bias" and is_quantized_layer(module)


STACKS_QUANTIZED_BY = "bitsandbytes.nn.parametrize.replace_parameter_4bit"
"""The function that quantizes stacks of experts, which loading leaves as they are."""


def quantized_stacks(module: nn.Module) -> dict[str, tuple[nn.Module, Any]]:
    """Return the parameters that `STACKS_QUANTIZED_BY` quantized, by name.

    Each comes with the module that computes it, and its 4-bit statistics.
    """
    parametrized = module._modules.get("parametrizations")
    if parametrized is None:
        return {}

    cls = loaded_class("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")
    found = {}
    for name, computes in parametrized._modules.items():
        first = None if computes is None else computes._modules.get("0")
        if computes is not None and isinstance(first, cls):
            found[name] = computes, vars(first)["quant_state"]

    return found


_PARAMETERS = frozenset({"Params4bit", "Int8Params"})


def is_quantized_parameter(parameter: Tensor) -> bool:
    """Return whether a parameter holds quantized storage, whatever its dtype.

    4-bit weights can be packed into half. An 8-bit layer may keep its weight in half,
    and quantize it again in each forward (``has_fp16_weights``).
    """
    is_kept_half = getattr(parameter, "has_fp16_weights", False)
    return _is_bitsandbytes_parameter(parameter) and not is_kept_half


def _is_bitsandbytes_parameter(parameter: Tensor) -> bool:
    """Return whether a parameter is of a class of bitsandbytes'."""
    cls = type(parameter)
    # Subclasses that other libraries swap in (sharding, quanto, torchao) keep the class
    # name but not the class.
    return cls is not nn.Parameter and (
        cls.__name__ in _PARAMETERS or _is_of_bitsandbytes(cls, *_PARAMETERS)
    )


def _method_of(model: nn.Module) -> str | None:
    method = getattr(model, "quantization_method", None)
    return None if method is None else str(getattr(method, "value", method))


def is_of_another_library(settings: Any) -> bool:
    """Return whether a config's quantization is by another library than bitsandbytes.

    The layers of such keep float32 parts of their own, as scales.
    """
    return (
        isinstance(settings, dict)
        and settings.get("quant_method", BITSANDBYTES) != BITSANDBYTES
    )


def detect(model: nn.Module, modules: Sequence[nn.Module]) -> Quantization:
    """Find out by attributes and layers how a model is quantized, wrapped or not."""
    peft = detect_as_peft(model)
    if peft.is_quantized:
        return peft

    # Inside a container, too, a model says how it is quantized.
    for module in modules:
        method = _method_of(module) if "quantization_method" in vars(module) else None
        if method not in (None, BITSANDBYTES):
            return Quantization(method)

    for module in modules:
        if is_quantized_layer(module) or quantized_stacks(module):
            cls: Any = type(module)
            is_8bit = _is_of_bitsandbytes(cls, "Linear8bitLt", "Embedding8bit")
            return Quantization(f"bitsandbytes_{'8bit' if is_8bit else '4bit'}")

    for module in modules:
        library = _library_of(module)
        if library is not None:
            return Quantization(library)

    return peft


def _library_of(module: nn.Module) -> str | None:
    """Return the library that quantized a layer.

    Its class is the library's, or its weight is one made of narrow parts.
    """
    if _compressed_tensors_status(module) is not None:
        return "compressed-tensors"

    if is_made_plain(module):
        return _library_named_by(type(module))

    weight = module._parameters.get("weight")
    if weight is None or not is_composed(type(weight)):
        return None

    for part in parts_of(weight):
        # The parts of no unquantized weight hold integers or numbers of one byte.
        if part.itemsize == 1 or not part.is_floating_point():
            return _library_named_by(type(weight))

    return None


def _library_named_by(cls: type) -> str:
    root, *inner = cls.__module__.split(".")
    return inner[0] if root == "optimum" else root


def detect_as_peft(model: nn.Module) -> Quantization:
    """Find out how a model is quantized as PEFT's function does.

    It reads these attributes, and nothing else.
    """
    if getattr(model, "hqq_quantized", False):
        return Quantization("hqq")

    method = _method_of(model)
    if method in _SELF_MANAGED_IN_PEFT:
        return Quantization(method)

    for bits in ("8bit", "4bit"):
        if getattr(model, f"is_loaded_in_{bits}", False):
            return Quantization(f"bitsandbytes_{bits}")

    return Quantization(None)


def is_made_plain(module: nn.Module) -> bool:
    """Return whether a library made of a layer more than one with a weight of its class.

    Layers of bitsandbytes do not count.
    """
    if _compressed_tensors_status(module) is not None:
        return True

    classes = (
        loaded_class("hqq.core.quantize", "HQQLinear"),
        loaded_class("optimum.quanto.nn", "QLinear"),
    )
    return isinstance(module, (*classes, _gptqmodel_class()))


def _compressed_tensors_status(module: nn.Module) -> str | None:
    fields = vars(module)
    if "quantization_scheme" not in fields:
        return None
    return getattr(fields.get("quantization_status"), "value", None)


def was_decompressed(module: nn.Module) -> bool:
    """Return whether compressed-tensors has decompressed a layer: it does in the first run."""
    return _compressed_tensors_status(module) == "decompressed"


def _weight_by_compressed_tensors(module: Any) -> Tensor:
    """Return the weight of a layer, compressed or not; the module stays as it is."""
    if "weight" in module._parameters:
        return module._parameters["weight"].detach()  # type: ignore[no-any-return]

    compressors = sys.modules["compressed_tensors.compressors"]
    scheme = vars(module)["quantization_scheme"]
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format.value)
    tensors = {**module._parameters, **module._buffers}
    with torch.no_grad():
        return compressor.decompress(tensors, scheme)["weight"]  # type: ignore[no-any-return]


def _gptqmodel_class() -> type | tuple[()]:
    return loaded_class("gptqmodel.nn_modules.qlinear", "BaseQuantLinear")


def _weight_by_gptqmodel(module: Any) -> Tensor:
    """Return the weight of a layer of gptqmodel, for GPTQ or AWQ.

    ``ValueError`` is raised where its codes do not tell it.
    """
    cls, fields = type(module), {**vars(module), **module._buffers}
    kernels = {base.__name__ for base in cls.__mro__}
    is_awq = not kernels.isdisjoint(_AWQ_CLASSES)
    if not is_awq and kernels.isdisjoint(_GPTQ_CLASSES):
        raise ValueError(
            f"{cls.__name__} may have repacked its codes; load the model with a torch kernel"
        )

    if fields["qweight"].dtype != fields["pack_dtype"]:
        raise ValueError(
            f"{cls.__name__} has repacked its codes in eval mode; prepare the model before it runs"
        )

    with torch.no_grad():
        if not is_awq:
            # The class's own: an instance may have a compiled one, which is bound to
            # the module that this is a copy of.
            return cls.dequantize_weight(module).t()  # type: ignore[no-any-return]
        packing = sys.modules["gptqmodel.quantization.awq.utils.packing_utils"]
        names = ("qweight", "qzeros", "scales", "bits", "group_size")
        return packing.dequantize_gemm(*(fields[name] for name in names)).t()  # type: ignore[no-any-return]


def library_dequantizer(module: nn.Module) -> Callable[[], Tensor] | None:
    """Return the function of another library than bitsandbytes that computes a weight.

    It is ``None`` where no library computes the module's weight.
    """
    if _compressed_tensors_status(module) is not None:
        return functools.partial(_weight_by_compressed_tensors, module)

    weight = module._parameters.get("weight")
    if weight is not None:
        return weight.dequantize if is_composed(type(weight)) else None

    if isinstance(module, _gptqmodel_class()):
        return functools.partial(_weight_by_gptqmodel, module)

    return module.dequantize if is_made_plain(module) else None  # type: ignore[return-value]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is of a class whose layers quantizers replace."""
    conv = loaded_class("transformers.pytorch_utils", "Conv1D")
    return isinstance(module, (nn.Linear, conv))


def skipped_layers(settings: Any) -> list[str]:
    """Return the layers that a config of bitsandbytes names as not to be quantized."""
    fields = settings if isinstance(settings, dict) else vars(settings)
    return [*(fields.get(SKIPPED_LAYERS) or ())]


def rounds_activations(module: nn.Module) -> bool:
    """Return whether a layer rounds its input or output, which has no gradient.

    They are layers of transformers, for BitNet and for Gemma.
    """
    integrations = "transformers.integrations"
    if isinstance(module, loaded_class(f"{integrations}.bitnet", "BitLinear")):
        return True

    gemma = loaded_class(f"{integrations}.gemma_quant", "QuantizedLinear")
    if not isinstance(module, gemma):
        return False

    names = ("input_activation_scale", "output_activation_scale")
    steps = [module.get_parameter(name) for name in names]
    # a step of zero rounds nothing
    return any(not step.is_meta and bool(step) for step in steps)


def has_runtime_state(module: nn.Module) -> bool:
    """Return whether a module rewrites fields of its own when it runs.

    Linear layers of bitsandbytes and of gptqmodel do.
    """
    weight = module._parameters.get("weight")
    if weight is None or not _is_bitsandbytes_parameter(weight):
        return KERNEL in vars(module) and isinstance(module, _gptqmodel_class())

    cls: Any = type(module)
    return _is_of_bitsandbytes(cls, "Linear4bit", "Linear8bitLt")


def transposed_codes(module: nn.Module) -> Tensor | None:
    """Return the codes of a layer of aqlm, if a run on a CPU transposed them.

    It does so for codebooks of 256 entries.
    """
    if not isinstance(module, loaded_class("aqlm.inference", "QuantizedLinear")):
        return None

    codes = module._parameters["codes"]
    is_on_cpu = codes is not None and codes.is_cpu
    has_run = vars(module).get("gemv_op") is not None
    is_transposed = has_run and vars(module).get("codebook_size") == 256
    return codes if is_transposed and is_on_cpu else None


def is_of_a_quantizer(conversion: Any) -> bool:
    """Return whether a model's quantizer added this one of its weight conversions."""
    return any(
        "hf_quantizer" in vars(operation)
        for operation in getattr(conversion, "operations", ())
    )


KERNEL = "linear_mode"
"""The attribute of a layer of gptqmodel for the kernel that its first run chose."""


def keep_kernels_of_training(model: nn.Module) -> None:
    """Put a model in eval mode, but for its quantized layers, which compute as in training.

    Nothing drops out in these layers. In eval mode those of bitsandbytes may take other
    kernels on a CPU, and those of gptqmodel repack their codes for good.
    """
    model.eval()
    for module in model.modules():
        if is_quantized_layer(module) or has_runtime_state(module):
            module.training = True


def has_kernel_without_backward(module: nn.Module) -> bool:
    """Return whether a layer of gptqmodel chose the kernel of inference, for good.

    It repacked its codes for that.
    """
    kernel = vars(module).get(KERNEL)
    return getattr(kernel, "value", kernel) == "inference"
