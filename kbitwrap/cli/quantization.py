"""How a model is quantized: by the word of ``--quant``, or as it was saved."""

from __future__ import annotations

from typing import Any

from .console import InputError
from .usage import DEFAULT_QUANT

_BITSANDBYTES = "bitsandbytes"


def quantization_in_training(quant: str | None, dtype: str | None) -> Any:
    """Make what `merge_checkpoint` and others take for how a base was quantized.

    Args:
        quant: The word for a ``QuantKind``, or ``None`` where it was not told.
        dtype: The dtype that 4-bit layers compute in; ``None`` for the library's
            default.

    Returns:
        The config; ``False`` of ``"none"``, and ``None`` where nothing was told.
    """
    from ..model.quantization import bitsandbytes_config

    return None if quant is None else bitsandbytes_config(quant, dtype) or False


def choose_quantization(
    source: Any, name: str, quant: str | None, dtype: str
) -> tuple[str, Any]:
    """Choose how a model is quantized: one that is quantized already keeps its own, or is dequantized.

    Args:
        source: What the model is built from.
        name: How it was named.
        quant: The word for a ``QuantKind``; ``None`` for the model's own, or else nf4.
        dtype: The dtype that 4-bit layers compute in.

    Returns:
        What to call the quantization, and the config for ``from_pretrained``, ``None``
        for the model's own, or for none.

    Raises:
        InputError: The model is quantized already, otherwise than asked for.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    from ..checkpoints.base_quantization import own_quantization
    from ..model.quantization import bitsandbytes_config

    own = own_quantization(source)
    if own is None:
        kind = quant or DEFAULT_QUANT
        return str(kind), bitsandbytes_config(kind, dtype)
    method = str(own.get("quant_method", _BITSANDBYTES))
    if quant is None or (method == _BITSANDBYTES and quant != "none"):
        return method, None
    if quant == "none":
        settings = AutoQuantizationConfig.from_dict(dict(own))
        if hasattr(settings, "dequantize"):
            settings.dequantize = True
            return "none", settings
    raise InputError(
        f"--quant {quant}: {name!r} is quantized already, by {method}: leave --quant out, or give --quant none for "
        "its dequantized weights, where transformers can dequantize them"
    )
