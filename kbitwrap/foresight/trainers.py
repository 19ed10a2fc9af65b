"""A trainer that takes given arguments, built by its own code around a model without values."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ConfigError
from ..model.pretrained import classes_of, read_config
from .batch import ordinary_token
from .built import Built
from .rows import Row, completion_length, rows_of, tokenizer_of
from .trainer_arguments import quiet_copy, trainer_class
from .untouched import OwnState

_PREPARES = "prepare_model_for_kbit_training"


def _told(cls: Any) -> Any:
    """A trainer's class that tells of its steps, and computes no norms of gradients: they are counted apart.

    Args:
        cls: The class.

    Returns:
        The derived class, whose instances have a ``listener``.
    """

    class Told(cls):  # type: ignore[misc]
        listener: Any = None
        completion: list[int] = []  # noqa: RUF012
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

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            """Make it with values: some compute tables."""
            with _disable_current_modes():
                return super().create_optimizer(*args, **kwargs)

        def _clip_grad_norm(self, model: Any) -> float:
            return 0.0

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
            if self.listener is not None:
                self.listener.end(self.optimizer)
            return 0.0

        def clip(self, model: nn.Module) -> Any:
            """Clip the gradients of a model as the trainer does."""
            norm = None
            if self.args.max_grad_norm > 0:
                norm = super()._clip_grad_norm(model)
            return super()._get_grad_norm(model, grad_norm=norm)

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            """Completions in place of generated ones; an engine tells their log-probabilities too."""
            completions = [list(self.completion) for _ in prompt_ids]
            if not self.use_vllm:
                return completions, None
            return completions, [[-1.0] * len(one) for one in completions]

        def _send_telemetry(self) -> None:
            """Report nothing: this is no training."""

    Told.__name__ = cls.__name__
    return Told


def _reward(completions: Any, **_: Any) -> list[float]:
    """A function that scores completions, of which some are better."""
    return [float(number % 2) for number, _ in enumerate(completions)]


@contextlib.contextmanager
def _prepared_already(cls: Any) -> Iterator[None]:
    """Let a trainer that calls PEFT's preparation leave the model as it is: it has one."""
    module: Any = sys.modules[cls.__module__]
    original = vars(module).get(_PREPARES)
    if original is None:
        yield
        return
    setattr(module, _PREPARES, lambda model, **_: model)
    try:
        yield
    finally:
        setattr(module, _PREPARES, original)


class Rehearsal:
    """A trainer around a model without values.

    Args:
        args: The arguments that the real trainer gets; they are not changed.
        built: The real trainer, if it was built.

    Attributes:
        name: The name of the trainer's class.
        args: The copy of the arguments that it has.
        trainer: The trainer, once its model is there.
        process: The state of the process in which it runs.

    Raises:
        ConfigError: There is no trainer for the arguments, or its step is not predicted.
    """

    def __init__(self, args: Any, built: Built | None = None) -> None:
        cls = trainer_class(args)
        self.name: str = cls.__name__
        rows = rows_of(self.name)
        if rows is None or not hasattr(cls, "_get_grad_norm"):
            raise ConfigError(f"args: the step of {self.name} is not predicted")
        self._class = cls
        self._built = built
        self._rows = rows
        self._takes = inspect.signature(cls.__init__).parameters
        self.args = quiet_copy(args)
        self.trainer: Any = None
        self.process = OwnState()
        self._is_fp16 = args.fp16
        self._uses_engine = getattr(args, "use_vllm", False)
        self._token = 0

    def source(self, source: Any) -> Any:
        """The source of the model: the config of one that scores sequences, where the trainer trains those.

        Args:
            source: A model, or a name, folder or config of one.

        Returns:
            The same, or a config.

        Raises:
            ConfigError: The architecture has no such model.
        """
        if self.name != "RewardTrainer" or isinstance(source, nn.Module):
            return source
        config = read_config(source)
        classes = classes_of("AutoModelForSequenceClassification", config)
        if not classes:
            raise ConfigError(
                f"args: transformers has no model for rewards of a {type(config).__name__}"
            )
        config.architectures = [classes[0].__name__]
        config.num_labels = 1
        return config

    def build(self, model: Any, lora: Any) -> nn.Module:
        """Make the trainer.

        Args:
            model: The model, with adapters or without.
            lora: The config of the adapters to make, or ``None`` where it has them.

        Returns:
            The model that it trains.

        Raises:
            ConfigError: The trainer refuses the arguments.
        """
        with self.process.in_force(), tempfile.TemporaryDirectory() as folder:
            self.args.output_dir = folder
            try:
                return self._build(model, lora)
            except (ValueError, NotImplementedError, ImportError) as error:
                said = str(error).partition("\n")[0]
                raise ConfigError(f"args: {self.name} refuses them: {said}") from error

    def _build(self, model: Any, lora: Any) -> nn.Module:
        _ = self.args.device  # is set up before there is an accelerator
        self._token = ordinary_token(model)
        if getattr(model, "hf_device_map", None) is not None:
            model.hf_device_map = {"": "cpu"}
        vocabulary_size = model.config.get_text_config().vocab_size
        options: dict[str, Any] = {}
        if self._built is not None:
            self._built.prepare(model)
        if lora is not None and "peft_config" in self._takes:
            options["peft_config"] = lora
        elif lora is not None:
            model = importlib.import_module("peft").get_peft_model(model, lora)
        if "reward_funcs" in self._takes:
            options["reward_funcs"] = _reward
        rows: Any = [self._rows.first] * 4
        if self.name != "Trainer":
            rows = importlib.import_module("datasets").Dataset.from_list(rows)
            tokenizer = tokenizer_of(vocabulary_size, self._token)
            options["processing_class"] = tokenizer
        with _prepared_already(self._class):
            trainer = _told(self._class)(
                model=model, args=self.args, train_dataset=rows, **options
            )
        accelerator = trainer.accelerator
        accelerator.device_placement = False  # the model is where it is
        accelerator.free_memory = lambda *objects: objects  # there is none
        printer = importlib.import_module("transformers").PrinterCallback
        trainer.remove_callback(printer)
        if self._is_fp16:
            accelerator.state._mixed_precision = "fp16"
        if self._uses_engine:
            trainer.use_vllm = True
        if self._built is not None:
            self._built.hand_over(trainer, _told)
        self.trainer = trainer
        return trainer.model  # type: ignore[no-any-return]

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions where the arguments say nothing."""
        own = self._built.note if self._built is not None else ""
        said = own or self._rows.said
        return (said,) if said else ()

    def train(self, batch_size: int, seq_len: int, listener: Any) -> None:
        """Run one step.

        Args:
            batch_size: Sequences in a batch of one micro-step.
            seq_len: Tokens in a sequence.
            listener: What is told where the step begins, with its batches, and ends.
        """
        trainer = self.trainer
        for name, value in vars(trainer).items():
            if isinstance(value, Tensor) and value.is_meta:
                # weights of rewards and the like: no size depends on their values
                vars(trainer)[name] = torch.ones(value.shape, dtype=value.dtype)
        number = self._set_batch_size(batch_size)
        rows = self._own_rows(number, seq_len)
        if not rows:
            if getattr(trainer.data_collator, "max_length", None) is not None:
                trainer.data_collator.max_length = seq_len  # longer ones are cut
            row: Row = self._rows.make(self.args, self._token, seq_len)
            rows = [row] * number
        trainer.train_dataset = rows
        if self._rows.first.keys() == {"prompt"}:
            trainer.completion = [self._token] * completion_length(self.args, seq_len)
            trainer._buffered_inputs = None  # completions are made in each step
        trainer.listener = listener
        try:
            trainer.train()
        finally:
            trainer.listener = None

    def _own_rows(self, number: int, seq_len: int) -> list[Any]:
        """The rows of the trainer that was built, where they have so many tokens; else none."""
        if self._built is None or self._built.seq_len != seq_len:
            return []
        return self._built.rows(number)

    def _set_batch_size(self, batch_size: int) -> int:
        """Set the size of batches, and return the rows of a step."""
        args = self.args
        args.per_device_train_batch_size = batch_size
        self.trainer._train_batch_size = batch_size
        steps = getattr(args, "steps_per_generation", None)
        if steps is None:
            return batch_size * args.gradient_accumulation_steps  # type: ignore[no-any-return]
        args.generation_batch_size = batch_size * steps
        if args.generation_batch_size % args.num_generations:
            # of how many prompts they are changes no size
            self.trainer.num_generations = args.generation_batch_size
        return args.generation_batch_size * max(1, args.gradient_accumulation_steps)  # type: ignore[no-any-return]
