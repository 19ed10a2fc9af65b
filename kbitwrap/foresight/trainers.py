"""A trainer that takes given arguments, built by its own code around a model without values."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ConfigError
from .batch import ordinary_token
from .rows import Row, row_of, tokenizer_of
from .trainer_arguments import quiet_copy, trainer_class
from .untouched import OwnState


def _told(cls: Any) -> Any:
    """A trainer's class that tells of its steps, and computes no norms of gradients: they are counted apart.

    Args:
        cls: The class.

    Returns:
        The derived class, whose instances have a ``listener``.
    """

    class Told(cls):  # type: ignore[misc]
        listener: Any = None
        _batches: Any = None

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            """Batches with values: samplers and loaders draw random numbers."""
            with _disable_current_modes():
                found = super().get_batch_samples(*args, **kwargs)
            self._batches = found[0]
            return found

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self._batches is not None and self.listener is not None:
                self.listener.begin(self._batches)
            self._batches = None
            return super().training_step(*args, **kwargs)

        def _clip_grad_norm(self, model: Any) -> float:
            return 0.0

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
            if self.listener is not None:
                self.listener.end(self.optimizer)
            return 0.0

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            """Make it with values: some compute tables."""
            with _disable_current_modes():
                return super().create_optimizer(*args, **kwargs)

        def clip(self, model: nn.Module) -> Any:
            """Clip the gradients of a model as the trainer does."""
            norm = None
            if self.args.max_grad_norm > 0:
                norm = super()._clip_grad_norm(model)
            return super()._get_grad_norm(model, grad_norm=norm)

        def _send_telemetry(self) -> None:
            """Report nothing: this is no training."""

    Told.__name__ = cls.__name__
    return Told


class Rehearsal:
    """A trainer around a model without values.

    Args:
        args: The arguments that the real trainer gets.

    Attributes:
        trainer: The trainer, once its model is there.
        args: The copy of the arguments that it has.
        name: The name of its class.
    """

    def __init__(self, args: Any) -> None:
        self._class = trainer_class(args)
        self.name: str = self._class.__name__
        self._takes = inspect.signature(self._class.__init__).parameters
        self.args = quiet_copy(args)
        self.trainer: Any = None
        self.token = 0
        self.process = OwnState()

    def build(self, model: Any, lora: Any) -> nn.Module:
        """Make the trainer.

        Args:
            model: The model, with adapters or without.
            lora: The config of the adapters to make, or ``None`` where it has them.

        Returns:
            The model that it trains.
        """
        with self.process.in_force(), tempfile.TemporaryDirectory() as folder:
            self.args.output_dir = folder
            return self._build(model, lora)

    def _build(self, model: Any, lora: Any) -> nn.Module:
        _ = self.args.device  # is set up before there is an accelerator
        self.token = ordinary_token(model)
        config = model.config.get_text_config()
        if getattr(model, "hf_device_map", None) is not None:
            model.hf_device_map = {"": "cpu"}
        tokenizer = tokenizer_of(config.vocab_size, self.token)
        options: dict[str, Any] = {}
        if lora is not None and "peft_config" in self._takes:
            options["peft_config"] = lora
        elif lora is not None:
            model = importlib.import_module("peft").get_peft_model(model, lora)
        rows: Any = [self.row(4)] * 2
        if self.name != "Trainer":
            rows = importlib.import_module("datasets").Dataset.from_list(rows)
            options["processing_class"] = tokenizer
        self.trainer = _told(self._class)(
            model=model, args=self.args, train_dataset=rows, **options
        )
        accelerator = self.trainer.accelerator
        accelerator.device_placement = False  # the model is where it is
        accelerator.free_memory = lambda *objects: objects  # there is none
        printer = importlib.import_module("transformers").PrinterCallback
        self.trainer.remove_callback(printer)
        return self.trainer.model  # type: ignore[no-any-return]

    def row(self, seq_len: int) -> Row:
        """A row of the trainer's data set, of the full length."""
        row = row_of(self.name, self.args, self.token, seq_len)
        if row is None:
            raise ConfigError(f"args: the batches of {self.name} are not known")
        return row

    def train(self, batch_size: int, seq_len: int, listener: Any) -> None:
        """Run one step.

        Args:
            batch_size: Sequences in a batch of one micro-step.
            seq_len: Tokens in a sequence.
            listener: What is told of the step.
        """
        trainer = self.trainer
        number = batch_size * self.args.gradient_accumulation_steps
        trainer.train_dataset = [self.row(seq_len)] * number
        self.args.per_device_train_batch_size = batch_size
        trainer._train_batch_size = batch_size
        trainer.listener = listener
        try:
            trainer.train()
        finally:
            trainer.listener = None
