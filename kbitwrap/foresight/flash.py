"""The attention of the flash_attn package, which need not be there: it holds what torch's flash kernel holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..model.pretrained import meta_model, read_config
from .loading import refuse_replaced

_ASKED, _OWN = "flash_attention_2", "kbitwrap_flash_attention_2"


def built_model(source: Any, quantization_config: Any, dtype: Any) -> nn.Module:
    """Build the model that is loaded, on the meta device; one that asks for the package attends by a stand-in.

    Raises:
        UnsupportedModelError: Its weights become tensors that cannot be followed.
    """
    # a config object: files do not say it
    has_flash = getattr(source, "_attn_implementation", None) == _ASKED
    if has_flash:
        source = read_config(source)
        source._attn_implementation = "sdpa"
    model: Any = meta_model(source, quantization_config, dtype)
    refuse_replaced(model)
    if has_flash:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(_OWN, _attend)
        AttentionMaskInterface.register(_OWN, _no_mask)
        model.config._attn_implementation = _OWN
    return model  # type: ignore[no-any-return]


def _no_mask(*_: Any, **__: Any) -> None:
    """Windows and causality are arguments of the package's kernel, and batches without padding need no more."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend by transformers' function for torch's kernels; float32 inputs are cast before, as for the package."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.dtype == torch.float32:
        lower: Any = module.config.dtype
        if torch.is_autocast_enabled("cpu"):
            lower = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(lower) for tensor in (query, key, value))
    return sdpa_attention_forward(
        module, query, key, value, None, dropout, scaling, is_causal
    )
