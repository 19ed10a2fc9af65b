"""The model whose step is predicted: built or copied on the meta device, prepared, and given its adapters."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..config import PrepareConfig
from ..errors import ConfigError, StateError, UnsupportedModelError
from ..model.pretrained import ASSUMED
from ..model.tree import ModelTree
from ..model.wrappers import REPLACES
from ..preparation.engines import check_sharding
from ..preparation.plan import plan_for
from ..preparation.preparation import Preparation
from .adapters import are_default, checked
from .blocks import Blocks
from .fakes import FakeModel, Memory, in_memory_of
from .flash import built_model
from .loading import LOADING, events_of, loading_of, refuse_hqq_files
from .quantization import add_statistics, follow_cuda
from .reserved import Cast, casts_of

PEFT = "peft"
"""The precision that stands for PEFT's own preparation."""
UNPREPARED = "unprepared"
"""The precision that stands for no preparation: the model is trained as it was loaded."""


_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE_OF = torch.Tensor.device.__get__


class _ShapeCopies(TorchFunctionMode):
    """Makes ``copy.deepcopy`` put tensors of the meta device in place of copies; those of one memory share it again."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Memory = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy a tensor's shape alone."""
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = made = in_memory_of(tensor, self.memory, "meta")
            return made
        return func(*args, **(kwargs or {}))


class as_on_cpu(TorchFunctionMode):  # noqa: N801
    """Calls the meta device a CPU, and makes on it what is asked for on a CPU.

    PEFT casts adapters to the dtype of the layer under them, and then to float32. On
    the meta device it would not: ties that the casts break would stay, and parameters
    would stay frozen that they make trainable.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one function, on the meta device."""
        if func == _DEVICE_OF:
            return _CPU
        args = tuple(
            _META if isinstance(value, torch.device) else value for value in args
        )
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        return func(*args, **kwargs)


def has_no_values(model: nn.Module) -> bool:
    """Return whether a model was built without weights."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextlib.contextmanager
def adapting(model: nn.Module) -> Iterator[None]:
    """Let PEFT add adapters to a model without values as it does to one that was loaded."""
    if not has_no_values(model):
        yield
        return
    add_statistics(model)
    with torch.device("meta"), as_on_cpu():
        yield


def without_values(model: nn.Module) -> nn.Module:
    """Copy a model onto the meta device; nothing of it changes, and no value is read.

    Tensors of the copy share memory where those of the model do.

    Raises:
        UnsupportedModelError: A forward is a function that was made for the model.
    """
    memo = {}
    with _ShapeCopies() as copies:
        for parameter in model.parameters():
            data = in_memory_of(parameter.data, copies.memory, "meta")
            made = torch.Tensor._make_subclass(
                type(parameter), data, parameter.requires_grad
            )
            memo[id(parameter)] = made
            for name, value in vars(parameter).items():
                vars(made)[name] = copy.deepcopy(value, memo)
        copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        # functions that were made for the original, of which the copy's class has its own
        for name, value in list(vars(module).items()):
            if not (isinstance(value, types.FunctionType) and value.__closure__):
                continue
            if name == "forward":
                raise UnsupportedModelError(
                    f"the forward of this {type(module).__name__} is a function that was made for it, and cannot be "
                    "run without values; undo what replaced it"
                )
            if hasattr(type(module), name):
                delattr(module, name)
    return copied


def base_of(source: Any, quantization_config: Any, dtype: Any) -> nn.Module:
    """Return the model of a step, on the meta device: copied from a live one, or built from a config.

    Raises:
        ConfigError: A model is given with one of these.
        StateError: The model is prepared.
    """
    if not isinstance(source, nn.Module):
        if isinstance(source, (str, os.PathLike)):
            refuse_hqq_files(source)
        return built_model(source, quantization_config, dtype)
    if quantization_config is not None or dtype is not None:
        raise ConfigError(
            "quantization_config and dtype are for a model that is built from a config; this one is loaded already"
        )
    preparation = Preparation.tree_of(source)[1]
    if preparation is not None:
        raise StateError(
            f"this {type(source).__name__} is prepared; predict its step before prepare(), or after restore()",
            state=getattr(preparation.holder(), "state", None),
            expected=(),
        )
    return without_values(source)


class SimulatedModel:
    """A prepared model with adapters, of tensors without values; it is thrown away after the prediction.

    Arguments that are not named here are those of ``predict_step``.

    Args:
        source: A model, or a name, folder or config of one.
        lora: The adapters' config; ``None`` for those that the model has, or else
            QLoRA's choice of layers (Dettmers et al. 2023), here of rank 16: adapters
            on every linear layer.
        adapt: Gives the model adapters of a config; of ``None``, where it has some.
        is_exact: Whether to keep all blocks.
        on_cuda: Whether it computes as on CUDA.

    Attributes:
        fakes: The model, of fake tensors.
        blocks: Those of its blocks that are kept.
        has_int8: Whether it has 8-bit layers, and computes as on CUDA.
        loading: What loading allocates; ``None`` where it is not known.
        loaded: The events of ``loading``; if that is not known, one for each tensor.
        casts: What preparing casts, in order.
        sample_bytes: The bytes of the samples that preparing keeps.
        warnings: What a user has to know of the preparation.
        name: The name of the model's class.
    """

    def __init__(
        self,
        source: Any,
        *,
        precision: str,
        lora: Any,
        quantization_config: Any,
        dtype: Any,
        fields: Mapping[str, Any],
        engine: str | None,
        adapt: Callable[[nn.Module, Any], nn.Module],
        is_exact: bool,
        on_cuda: bool,
    ) -> None:
        base = base_of(source, quantization_config, dtype)
        if engine is not None:
            _refuse_untrained(base, precision, engine)
        self.name = type(base).__name__
        tree = ModelTree(base)
        self.loading = None
        if not isinstance(source, nn.Module):
            self.loading = loading_of(base)
        else:  # it was loaded, or stands for one that would be
            for module in base.modules():
                if LOADING in vars(module):
                    self.loading = vars(module)[LOADING]
                    break
        self.loaded = events_of(self.loading, tree)
        has_adapters = bool(tree.adapter_ids)
        if has_adapters and lora is not None:
            raise ConfigError(
                "lora: the model has adapters already; give a model without, or no lora"
            )
        # While it lives, weights that are upcast at use follow what is done to the
        # model.
        self._preparation = None
        self.casts: list[Cast] = []
        self.sample_bytes = 0
        self.warnings: tuple[str, ...] = vars(base).get(ASSUMED, ())
        if precision == PEFT:
            sizes = {one: one.nbytes for one in base.parameters()}
            kept = [
                (one, one.dtype, one.requires_grad)
                for one in base.parameters()
                if id(one) in tree.adapter_ids
            ]
            base = _prepared_by_peft(base, fields)
            for one, num_bytes in sizes.items():
                if one.nbytes > num_bytes:
                    self.casts.append((one, one.nbytes))
            if fields.get("empty_cache", True):
                self.casts.append(None)
            for one, stored, is_trained in kept:  # they are made after it
                one.data = one.data.to(stored)
                one.requires_grad = is_trained
        elif precision != UNPREPARED:
            config = PrepareConfig.of(None, {**fields, "precision": precision})
            # What is only recorded is not read, for there are no values; a step does
            # not depend on it.
            config = dataclasses.replace(
                config, progress=False, keep_originals=False, audit=False
            )
            self._preparation = Preparation(self)
            self._preparation.apply(plan_for(tree, config, engine), tree)
            plan = self._preparation.plan
            self.warnings = plan.warnings
            self.casts = casts_of(plan)
            self.sample_bytes = plan.sample_bytes
        adapters = None if has_adapters else checked(lora)
        is_cut_first = are_default(adapters)  # to make fewer adapters
        if is_cut_first:
            self.blocks = Blocks(base, is_exact=is_exact)
        with adapting(base):
            model = adapt(base, adapters)
        if self._preparation is not None:
            self._preparation.adopt(model)
        model.train()
        if not is_cut_first:
            self.blocks = Blocks(model, is_exact=is_exact)
        self.fakes = FakeModel(model)
        self.has_int8 = on_cuda and follow_cuda(model)


def _refuse_untrained(model: nn.Module, precision: str, engine: str) -> None:
    """Refuse a precision whose model an engine does not train; PEFT's own stores what ``full`` stores."""
    name = {PEFT: "full", UNPREPARED: "none"}.get(precision, precision)
    outcome = check_sharding(model, engine).outcomes[name]
    if not outcome.trains:
        raise UnsupportedModelError(
            f"engine: {engine!r} does not train this model with precision {name!r}: {outcome.notes[0]}"
        )


def _prepared_by_peft(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    """Prepare a model by PEFT's own function; raises ``ConfigError`` for a field that the function does not take."""
    import peft

    prepare: Any = peft.prepare_model_for_kbit_training
    while (own := vars(prepare).get(REPLACES)) is not None:
        prepare = own
    others = dict(fields)
    options = {
        "use_gradient_checkpointing": others.pop("gradient_checkpointing", True),
        "gradient_checkpointing_kwargs": others.pop(
            "gradient_checkpointing_kwargs", None
        ),
    }
    others.pop("empty_cache", None)
    if others:
        raise ConfigError(
            "precision 'peft': expected gradient_checkpointing, gradient_checkpointing_kwargs and empty_cache alone, "
            f"found {', '.join(others)}"
        )
    try:
        with torch.device("meta"):
            prepared: nn.Module = prepare(model, **options)
    # whatever PEFT raises for a model that it cannot prepare
    except Exception as error:
        raise UnsupportedModelError(
            f"PEFT cannot prepare this {type(model).__name__}: {error}"
        ) from error
    return prepared
