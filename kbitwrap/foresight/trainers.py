"""A trainer that takes given arguments, built by its own code around a model without values."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ConfigError
from ..model.pretrained import classes_of, read_config
from .adapters import with_adapters
from .batch import ordinary_token
from .built import BuiltTrainer
from .fakes import FakeModel, tensors_in
from .kernels import TRL_VERSION, fused_heads_on_cuda
from .optimizer_names import optimizer_of
from .optimizers import OptimizerSteps, Shapes
from .rows import ROWS, completion_length, tokenizer_of
from .trace import ModelStep, StepRecorder
from .trainer_arguments import quiet_copy, trainer_class
from .untouched import process_of_trainer


def recorded_class(cls: Any) -> Any:
    """Derive a class of trainers whose steps are recorded, and which computes no norms of gradients.

    Args:
        cls: A class of trainers.

    Returns:
        The derived class; ``recorder`` of its instances is told where a step begins and
        ends, and ``clip`` is what would compute norms.
    """

    class RecordedTrainer(cls):  # type: ignore[misc]
        recorder: Any = None
        completion: list[int] = []  # noqa: RUF012

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            """Draw batches with values, as samplers and loaders use random numbers; the step begins with them."""
            with _disable_current_modes():
                found = super().get_batch_samples(*args, **kwargs)
            self.recorder.begin(tensors_in(found[0]))
            return found

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            """Make it with values: some compute tables."""
            with _disable_current_modes():
                return super().create_optimizer(*args, **kwargs)

        def _clip_grad_norm(self, model: Any) -> float:
            return 0.0

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
            groups: dict[int, int] = {}
            for number, group in enumerate(self.optimizer.param_groups):
                groups |= dict.fromkeys(map(id, group["params"]), number)
            self.recorder.end(groups)
            return 0.0

        def clip(self, model: nn.Module) -> Any:
            """Clip the gradients of a model as the trainer does."""
            norm = None
            if self.args.max_grad_norm > 0:
                norm = super()._clip_grad_norm(model)
            return super()._get_grad_norm(model, grad_norm=norm)

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            """Return completions without generating them; an engine tells their log-probabilities too."""
            completions = [list(self.completion) for _ in prompt_ids]
            if not self.use_vllm:
                return completions, None
            return completions, [[-1.0] * len(one) for one in completions]

        def _send_telemetry(self) -> None:
            """Report nothing: this is no training."""

    RecordedTrainer.__name__ = cls.__name__
    return RecordedTrainer


def _reward(completions: Any, **_: Any) -> list[float]:
    """Score completions, of which some are better."""
    return [float(number % 2) for number, _ in enumerate(completions)]


def _steps_of(trainer: Any, on_cuda: bool) -> OptimizerSteps:
    """Return the steps of the optimizer that a trainer makes, after its clipping of gradients."""

    def make(trained: list[nn.Parameter], shapes: Shapes) -> Any:
        cls, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        groups = []
        for number, group in enumerate(trainer.optimizer.param_groups):
            chosen = zip(trained, shapes, strict=True)
            parameters = [one for one, shape in chosen if shape.group == number]
            groups.append({**group, "params": parameters})
        return optimizer_of(cls, groups, options, on_cuda)

    def clip(trained: list[nn.Parameter]) -> Any:
        return trainer.clip(nn.ParameterList(trained))

    return OptimizerSteps(make, on_cuda, clip)


class Rehearsal(ModelStep):
    """Runs the step of a trainer around a model without values.

    Args:
        args: The arguments that the real trainer gets; they are not changed.
        on_cuda: Whether the operations of a CUDA device are followed.
        built: The real trainer, if it was built.

    Raises:
        ConfigError: There is no trainer for the arguments, or its step is not predicted.
    """

    gives_figures = True

    def __init__(
        self, args: Any, on_cuda: bool, built: BuiltTrainer | None = None
    ) -> None:
        self._class = trainer_class(args)
        self._name: str = self._class.__name__
        rows = ROWS.get(self._name)
        if rows is None:
            raise ConfigError(f"args: the step of {self._name} is not predicted")
        self._rows = rows
        self._args = quiet_copy(args, on_cuda)
        self._given = args
        self._on_cuda = on_cuda
        self._built = built
        self._shared: list[dict[str, Any]] = [{}, {}, {}]
        self._trainer: Any = None
        self._token = 0
        said = (built.note if built is not None else "") or rows.said
        notes = [said] if said else []
        package = importlib.import_module(self._class.__module__.partition(".")[0])
        version = f"{package.__name__} {package.__version__}"
        if on_cuda and version.startswith("trl ") and TRL_VERSION not in version:
            notes.append(
                f"the kernels of {version} were not followed: its own code ran as without Triton"
            )
        self.notes = tuple(notes)

    def source(self, source: Any) -> Any:
        """Return the source of the model: the config of one that scores sequences, where the trainer trains those.

        Raises:
            ConfigError: The architecture has no such model.
        """
        if self._name != "RewardTrainer" or isinstance(source, nn.Module):
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

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """Let the process have the trainer's state."""
        return process_of_trainer(self._shared)

    def build(self, model: Any, lora: Any) -> nn.Module:
        """Make the trainer, and return the model that it trains, with adapters of a config; ``None`` where it has them.

        Raises:
            ConfigError: The trainer refuses the arguments.
        """
        args = self._args
        self._token = ordinary_token(model)
        if getattr(model, "hf_device_map", None) is not None:
            model.hf_device_map = {"": "cpu"}
        vocabulary_size = model.config.get_text_config().vocab_size
        if self._built is not None:
            self._built.drop_reference(model)
        takes = inspect.signature(self._class.__init__).parameters
        options = {}
        if "peft_config" in takes:
            options["peft_config"] = lora
        else:
            model = with_adapters(model, lora)
        if "reward_funcs" in takes:
            options["reward_funcs"] = _reward
        with self.in_force(), tempfile.TemporaryDirectory() as folder:
            args.output_dir = folder
            _ = args.device  # is set up before there is an accelerator
            rows = [self._rows.first] * 4
            if self._name != "Trainer":
                rows = importlib.import_module("datasets").Dataset.from_list(rows)
                tokenizer = tokenizer_of(vocabulary_size, self._token)
                options["processing_class"] = tokenizer
            try:
                trainer = recorded_class(self._class)(
                    model=model, args=args, train_dataset=rows, **options
                )
            except (ValueError, NotImplementedError, ImportError) as error:
                said = str(error).partition("\n")[0]
                raise ConfigError(f"args: {self._name} refuses them: {said}") from error
            accelerator = trainer.accelerator
            accelerator.device_placement = False  # the model is where it is
            accelerator.free_memory = lambda *objects: objects  # there is none
            printer = importlib.import_module("transformers").PrinterCallback
            trainer.remove_callback(printer)
            if self._given.fp16:
                accelerator.state._mixed_precision = "fp16"
            if getattr(self._given, "use_vllm", False):
                trainer.use_vllm = True
            if self._built is not None:
                self._built.hand_over(trainer, recorded_class)
        self._trainer = trainer
        self.optimizer = _steps_of(trainer, self._on_cuda)
        return trainer.model  # type: ignore[no-any-return]

    def run(
        self, fakes: FakeModel, batch_size: int, seq_len: int, recorder: StepRecorder
    ) -> None:
        """Run one step, and tell the recorder where it begins and where its optimizer does."""
        trainer = self._trainer
        for name, value in vars(trainer).items():
            if isinstance(value, Tensor) and value.is_meta:
                # weights of rewards and the like: no size depends on their values
                vars(trainer)[name] = torch.ones(value.shape, dtype=value.dtype)
        args = self._args
        args.per_device_train_batch_size = trainer._train_batch_size = batch_size
        number = batch_size * args.gradient_accumulation_steps
        steps = getattr(args, "steps_per_generation", None)
        if steps is not None:
            number *= steps
            args.generation_batch_size = batch_size * steps
            if args.generation_batch_size % args.num_generations:
                # of how many prompts they are changes no size
                trainer.num_generations = args.generation_batch_size
        if self._built is not None and self._built.seq_len == seq_len:
            rows = self._built.rows(number)
        else:
            if getattr(trainer.data_collator, "max_length", None) is not None:
                trainer.data_collator.max_length = seq_len  # longer ones are cut
            rows = [self._rows.make(self._args, self._token, seq_len)] * number
        trainer.train_dataset = rows
        if self._rows.first.keys() == {"prompt"}:
            trainer.completion = [self._token] * completion_length(self._args, seq_len)
            trainer._buffered_inputs = None  # completions are made in each step
        trainer.recorder = recorder
        try:
            with fused_heads_on_cuda() if self._on_cuda else contextlib.nullcontext():
                trainer.train()
        finally:
            trainer.recorder = None

    run_first = run  # a trainer's loop runs no step by halves
