"""PEFT's function, with a way back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from .config import Precision, PrepareConfig
from .edits.base import TrainedPolicy
from .errors import StateError
from .model.quantization import detect_as_peft
from .model.tree import ModelTree
from .preparation.preparation import Preparation
from .preparation.process import empty_cache
from .prepared import KbitPreparedModel
from .reports import RestoreReport


def prepared_of(model: nn.Module) -> KbitPreparedModel | None:
    """Find the wrapper that holds a model.

    Args:
        model: A prepared model, a part of it, or what was wrapped around it since (a ``PeftModel``, DDP).

    Returns:
        The wrapper, in state ``PREPARED`` or ``SUSPENDED``, or ``None``.

    Example:
        >>> import torch, kbitwrap
        >>> kbitwrap.prepared_of(torch.nn.Linear(2, 2)) is None
        True
    """
    preparation = Preparation.find(ModelTree(model)) if isinstance(model, nn.Module) else None
    holder = None if preparation is None else preparation.holder()
    return holder if isinstance(holder, KbitPreparedModel) else None


# TRL reads the names of this function's parameters, and of its local variables too: it takes no others.
def prepare_model_for_kbit_training(
    model: nn.Module,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    auto_clear_cache: bool = True,
    *,
    precision: Precision | str = "full",
) -> nn.Module:
    """Prepare a model as ``peft.prepare_model_for_kbit_training`` does, with the same numbers, and a way back.

    Every parameter is frozen, adapters included; half parameters outside the quantized storage are cast to float32;
    a model that is quantized, by the attributes that PEFT reads, is checkpointed. ``kbitwrap.restore(model)`` undoes
    it, ``kbitwrap.prepared_of(model)`` finds its record. A second call on the same model is applied on top of the
    first; ``restore`` returns to before the first. Two differences from PEFT: no input-gradient hook is left orphaned,
    and none is installed where checkpointing is not reentrant; on CPUs with AVX512-BF16, 4-bit layers keep the layout
    that has a backward, where bitsandbytes would end gradients at every layer that once ran in eval mode.

    ``"full"`` costs, as PEFT does, twice the bytes of every unquantized half parameter; ``"compute"`` those of norms,
    biases and the like alone; ``"norms"``, ``"adapted"`` and ``"none"`` cost nothing.

    Args:
        model: The model; changed in place.
        use_gradient_checkpointing: Enable activation checkpointing if the model is quantized.
        gradient_checkpointing_kwargs: Passed to ``torch.utils.checkpoint.checkpoint``; its default is reentrant.
        auto_clear_cache: Return freed blocks to the CUDA device once, after the casts.
        precision: A ``Precision`` or its value; ``"full"`` is PEFT's.

    Returns:
        The same model object.

    Raises:
        UnsupportedModelError: The model is sharded, on the meta device, or quantized without support for
            checkpointing that was asked for.
        EditError: An edit failed; the model is as it was.

    Example:
        >>> import warnings, torch, kbitwrap
        >>> warnings.simplefilter("ignore", UserWarning)  # it says that this model is not quantized
        >>> model = kbitwrap.prepare_model_for_kbit_training(torch.nn.Linear(4, 4).half())
        >>> model.weight.dtype, model.weight.requires_grad
        (torch.float32, False)
        >>> _ = kbitwrap.restore(model)
        >>> model.weight.dtype, model.weight.requires_grad
        (torch.float16, True)
    """
    _prepare(model, use_gradient_checkpointing, gradient_checkpointing_kwargs, auto_clear_cache, precision)
    return model


def _prepare(
    model: nn.Module,
    use_gradient_checkpointing: bool,
    kwargs: Mapping[str, Any] | None,
    auto_clear_cache: bool,
    precision: Precision | str,
) -> None:
    config = PrepareConfig(
        precision=precision,  # type: ignore[arg-type]
        gradient_checkpointing=bool(use_gradient_checkpointing),
        gradient_checkpointing_kwargs=kwargs or {},
        empty_cache=False,
    )
    wrapper = KbitPreparedModel.as_peft(model, config)
    if auto_clear_cache and detect_as_peft(model).casts:
        empty_cache()
    if not wrapper.plan.is_quantized:
        warnings.warn(wrapper.plan.warnings[0], UserWarning, stacklevel=3)


def restore(model: nn.Module, trained: TrainedPolicy = "keep") -> RestoreReport:
    """Undo ``prepare_model_for_kbit_training``, or the preparation of any wrapper that holds the model.

    Args:
        model: The model that was prepared, or what was wrapped around it since (a ``PeftModel``).
        trained: As in ``KbitPreparedModel.restore``.

    Returns:
        The report of what others changed.

    Raises:
        StateError: The model is not prepared.
    """
    wrapper = prepared_of(model)
    if wrapper is None:
        raise StateError(f"this {type(model).__name__} is not prepared, so there is nothing to restore")
    return wrapper.restore(trained)
