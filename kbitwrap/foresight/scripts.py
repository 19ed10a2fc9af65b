"""A script's training: run up to where it would begin, on models without weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch

from ..model.pretrained import read_config
from .flash import built_model
from .imports import when_imported
from .loading import LOADING, loading_of
from .simulated import adapting, has_no_values

_PREPARED = "kbitwrap_prepared_with"
Act = Callable[[Any, dict[str, Any]], NoReturn]


@contextlib.contextmanager
def instead_of_training(
    act: Act, *, precision: str = "full", loads: bool = False
) -> Iterator[None]:
    """Call a function where a trainer of transformers, or one derived from it, would begin to train.

    Nothing is trained, and the code that builds the trainer is not changed. Unless
    ``loads``, ``from_pretrained`` of transformers' models reads no weights: a model has
    the shapes and dtypes of the one that would be loaded, and lies on the meta device.
    PEFT's ``prepare_model_for_kbit_training`` only freezes; its arguments are recorded.

    Args:
        act: Called with the trainer and the settings of ``predict_step`` for it; it
            does not return.
        precision: What PEFT's function stands for.
        loads: Whether models are loaded as the code says.

    Yields:
        Nothing.

    Example:
        >>> from kbitwrap import instead_of_training
        >>> def told(trainer, settings):
        ...     raise SystemExit(f"{type(trainer).__name__} would train")
        >>> with instead_of_training(told):
        ...     pass  # build a trainer, and call its train()
    """
    changes = _LibraryPatches(act, precision)
    try:
        hooks = {
            "transformers.trainer": changes.stop_trainers,
            "transformers.training_args": changes.allow_bfloat16,
            "peft": changes.record_preparation,
        }
        if not loads:
            hooks["transformers.modeling_utils"] = changes.build_models
            hooks["peft.peft_model"] = changes.adapt_models
        changes.replace(torch.Tensor, "backward", changes.refuse_backward)
        with when_imported(hooks):
            yield
    finally:
        changes.undo()


class _LibraryPatches:
    """The functions of the libraries that are replaced, and put back for a while where the training would begin."""

    def __init__(self, act: Act, precision: str) -> None:
        self._act = act
        self._precision = precision
        self._patches: list[Any] = []

    def replace(self, place: Any, name: str, value: Any) -> None:
        """Set an attribute until the changes are undone."""
        patch = mock.patch.object(place, name, value)
        patch.start()
        self._patches.append(patch)

    def undo(self) -> None:
        """Put everything back, the last first."""
        for patch in reversed(self._patches):
            patch.stop()

    def stop_trainers(self, module: Any) -> None:
        """Let no trainer train, publish, or move a model that has no weights."""
        move = module.Trainer._move_model_to_device

        def train(trainer: Any, *_: Any, **__: Any) -> NoReturn:
            settings: dict[str, Any] = {"precision": "unprepared"}
            for one in trainer.model.modules():
                recorded = vars(one).pop(_PREPARED, None)
                if recorded is not None:
                    settings = {"precision": self._precision, **recorded}
                    break
            self.undo()
            try:
                self._act(trainer, settings)
            finally:
                for patch in self._patches:
                    patch.start()

        def move_model(trainer: Any, model: Any, device: Any) -> Any:
            return model if has_no_values(model) else move(trainer, model, device)

        self.replace(module.Trainer, "train", train)
        self.replace(module.Trainer, "init_hf_repo", lambda *_, **__: None)
        self.replace(module.Trainer, "_move_model_to_device", move_model)

    def allow_bfloat16(self, module: Any) -> None:
        """Let arguments ask for bfloat16 where there is no device that has it."""
        self.replace(module, "is_torch_bf16_gpu_available", lambda: True)

    def build_models(self, module: Any) -> None:
        """Let models be built without weights."""
        build = classmethod(_build_pretrained)  # type: ignore[arg-type]
        self.replace(module.PreTrainedModel, "from_pretrained", build)

    def adapt_models(self, module: Any) -> None:
        """Let PEFT make adapters for models without weights as for others."""
        init, add_adapter = module.PeftModel.__init__, module.PeftModel.add_adapter

        def adapt(peft_model: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            with adapting(model):
                init(peft_model, model, *args, **kwargs)

        def add(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
            with adapting(peft_model):
                return add_adapter(peft_model, *args, **kwargs)

        self.replace(module.PeftModel, "__init__", adapt)
        self.replace(module.PeftModel, "add_adapter", add)

    def record_preparation(self, module: ModuleType) -> None:
        """Let PEFT's function only freeze, and record its arguments for the prediction."""
        for name in (module.__name__, "peft.utils", "peft.utils.other"):
            place = sys.modules[name]
            self.replace(place, "prepare_model_for_kbit_training", _record)

    @staticmethod
    def refuse_backward(*_: Any, **__: Any) -> NoReturn:
        """Refuse a loop that no trainer runs."""
        raise RuntimeError("nothing is trained here, and this is no trainer's train()")


# TRL reads the names of the parameters of PEFT's function.
def _record(
    model: Any,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    auto_clear_cache: bool = True,
) -> Any:
    """Freeze a model, and note that it was prepared."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    is_quantized = getattr(model, "quantization_method", None) is not None
    vars(model)[_PREPARED] = {
        "gradient_checkpointing": use_gradient_checkpointing and is_quantized,
        "gradient_checkpointing_kwargs": dict(gradient_checkpointing_kwargs or {}),
        "empty_cache": auto_clear_cache,
    }
    return model


def _build_pretrained(
    cls: Any,
    name: Any,
    *_: Any,
    config: Any = None,
    quantization_config: Any = None,
    dtype: Any = None,
    torch_dtype: Any = None,
    attn_implementation: Any = None,
    **kwargs: Any,
) -> Any:
    """Build the model that ``from_pretrained`` would load, without weights."""
    config = read_config(name if config is None else config)
    for key, value in kwargs.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    config.architectures = [cls.__name__]
    chosen = dtype if dtype is not None else torch_dtype
    model: Any = built_model(config, quantization_config, chosen)
    model.name_or_path = model.config.name_or_path = str(name)
    setattr(model, LOADING, loading_of(model))
    for parameter in model.parameters():
        parameter.requires_grad = parameter.is_floating_point()
    if kwargs.get("output_loading_info"):
        return model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    return model
