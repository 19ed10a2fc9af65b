"""PEFT's function, with a way back."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .config import Precision, PrepareConfig
from .edits.journal import TrainedPolicy
from .errors import StateError
from .model.quantization import detect_as_peft
from .model.tree import ModelTree
from .model.wrappers import REPLACES
from .preparation.preparation import Preparation, changing
from .preparation.process import empty_cache
from .prepared import KbitPreparedModel, PeftPreparedModel
from .reports import RestoreReport


def prepared_of(model: nn.Module) -> KbitPreparedModel | None:
    """Find the wrapper that holds a model.

    Args:
        model: A prepared model, a part of it, or what was wrapped around it since (a
            ``PeftModel``, DDP).

    Returns:
        The wrapper, in state ``PREPARED`` or ``SUSPENDED``, or ``None``.

    Example:
        >>> import torch, kbitwrap
        >>> kbitwrap.prepared_of(torch.nn.Linear(2, 2)) is None
        True
    """
    if not isinstance(model, nn.Module):
        return None
    preparation = Preparation.find(ModelTree(model))
    holder = None if preparation is None else preparation.holder()
    return holder if isinstance(holder, KbitPreparedModel) else None


# TRL reads the names of this function's parameters, and of its local variables too: it
# takes no others.
def prepare_model_for_kbit_training(
    model: nn.Module,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    auto_clear_cache: bool = True,
    *,
    precision: Precision | str = "full",
) -> nn.Module:
    """Prepare a model as ``peft.prepare_model_for_kbit_training`` does, with the same numbers, and a way back.

    Every parameter is frozen, adapters included; half parameters outside the quantized
    storage are cast to float32; a model that is quantized, by the attributes that PEFT
    reads, is checkpointed. ``kbitwrap.restore(model)`` undoes it,
    ``kbitwrap.prepared_of(model)`` finds its record. A second call on the same model is
    applied on top of the first; ``restore`` returns to before the first. Two
    differences from PEFT: no input-gradient hook is left orphaned, and none is
    installed where checkpointing is not reentrant; on CPUs with AVX512-BF16, 4-bit
    layers keep the layout that has a backward, where bitsandbytes would end gradients
    at every layer that once ran in eval mode.

    ``"full"`` costs, as PEFT does, twice the bytes of every unquantized half parameter;
    ``"compute"`` those of norms, biases and the like alone; ``"norms"``, ``"adapted"``
    and ``"none"`` cost nothing.

    Args:
        model: The model; changed in place.
        use_gradient_checkpointing: Enable activation checkpointing if the model is
            quantized.
        gradient_checkpointing_kwargs: Passed to ``torch.utils.checkpoint.checkpoint``;
            its default is reentrant.
        auto_clear_cache: Return freed blocks to the CUDA device once, after the casts.
        precision: A ``Precision`` or its value; ``"full"`` is PEFT's.

    Returns:
        The same model object.

    Raises:
        UnsupportedModelError: The model is sharded, on the meta device, or quantized
            without support for checkpointing that was asked for.
        StateError: It is suspended, or a wrapper of another model holds a part or a
            parameter of it.
        EditError: An edit failed; the model is as it was.

    Example:
        >>> import warnings, torch, kbitwrap
        >>> # A warning says that this model is not quantized.
        >>> warnings.simplefilter("ignore", UserWarning)
        >>> model = kbitwrap.prepare_model_for_kbit_training(
        ...     torch.nn.Linear(4, 4).half()
        ... )
        >>> model.weight.dtype, model.weight.requires_grad
        (torch.float32, False)
        >>> _ = kbitwrap.restore(model)
        >>> model.weight.dtype, model.weight.requires_grad
        (torch.float16, True)
    """
    # TRL takes local variables for parameters too, so there are none.
    with changing:
        PeftPreparedModel.apply_on_top(
            model,
            PrepareConfig(
                precision=precision,  # type: ignore[arg-type]
                empty_cache=False,
                gradient_checkpointing=bool(use_gradient_checkpointing),
                gradient_checkpointing_kwargs=gradient_checkpointing_kwargs or {},
            ),
        )
    if auto_clear_cache and detect_as_peft(model).casts:
        empty_cache()
    return model


def restore(model: nn.Module, trained: TrainedPolicy = "keep") -> RestoreReport:
    """Undo ``prepare_model_for_kbit_training``, or the preparation of any wrapper that holds the model.

    Args:
        model: The model that was prepared, or what was wrapped around it since (a
            ``PeftModel``).
        trained: As in ``KbitPreparedModel.restore``.

    Returns:
        The report of what others changed.

    Raises:
        StateError: The model is not prepared.
    """
    wrapper = prepared_of(model)
    if wrapper is None:
        raise StateError(
            f"this {type(model).__name__} is not prepared, so there is nothing to restore"
        )
    return wrapper.restore(trained)


@contextlib.contextmanager
def patched(precision: Precision | str = "full") -> Iterator[None]:
    """Put the drop-in in the place of PEFT's ``prepare_model_for_kbit_training``, and PEFT's function back at the end.

    For a library that prepares a model inside a call of its own, as TRL's
    ``ORPOTrainer`` does. Inside, every name of a loaded module that holds PEFT's
    function holds the drop-in, in modules that are imported meanwhile too. What another
    library put in the place of ``peft.prepare_model_for_kbit_training`` counts as that.
    A model that was prepared inside stays prepared until ``kbitwrap.restore(model)``.

    A function that is held elsewhere is not replaced: in a closure, a
    ``functools.partial``, a default argument, or an attribute of a class. The names are
    the process's: one thread uses this at a time, and other processes are not affected.

    Args:
        precision: The precision that the drop-in prepares with; under ``"adapted"``,
            ``prepared_of(model).adopt(peft_model)`` has to be called afterwards, as
            ``KbitTrainerCallback`` does.

    Raises:
        ConfigError: An unknown precision; nothing was replaced.

    Example:
        >>> import peft, torch, warnings, kbitwrap
        >>> # A warning says that this model is not quantized.
        >>> warnings.simplefilter("ignore", UserWarning)
        >>> with kbitwrap.patched(precision="norms"):
        ...     model = peft.prepare_model_for_kbit_training(
        ...         torch.nn.LayerNorm(4).bfloat16()
        ...     )
        >>> kbitwrap.prepared_of(model)
        KbitPreparedModel(LayerNorm, precision='norms', prepared)
    """
    own, new = _drop_in(precision)
    places: list[dict[str, Any]] = []
    try:
        _replace(own, new, places)
        yield
    finally:
        _replace(new, own, places)


def patch_peft(precision: Precision | str = "full") -> None:
    """Put the drop-in in the place of PEFT's function for good: the first line of a script. It imports PEFT.

    Args:
        precision: As in ``patched``, which says what is replaced; a later call replaces
            an earlier one's.

    Raises:
        ConfigError: An unknown precision; nothing was replaced.
    """
    _replace(*_drop_in(precision), [])


def _drop_in(precision: Precision | str) -> tuple[Any, Any]:
    """Return the function that PEFT has, and a drop-in for it that prepares with a precision."""
    import peft

    own, drop_in = peft.prepare_model_for_kbit_training, prepare_model_for_kbit_training
    new = types.FunctionType(
        drop_in.__code__, drop_in.__globals__, argdefs=drop_in.__defaults__
    )
    # Without `__wrapped__`: `inspect` would show the precision that the other prepares with.
    del functools.update_wrapper(new, drop_in).__wrapped__
    new.__kwdefaults__ = {"precision": PrepareConfig(precision=precision).precision}  # type: ignore[arg-type]
    vars(new)[REPLACES] = own
    return own, new


def _replace(old: Any, new: Any, places: list[dict[str, Any]]) -> None:
    """Put a function in the place of another in all loaded modules and in ``places``.

    Each namespace that was changed is appended to ``places``.
    """
    all_names = [*places]
    for module in tuple(sys.modules.values()):
        # others put objects there that are loaded when they are looked at
        if issubclass(type(module), types.ModuleType):
            all_names.append(object.__getattribute__(module, "__dict__"))
    for names in all_names:
        for name, value in tuple(names.items()):
            if value is old:
                names[name] = new
                places.append(names)
