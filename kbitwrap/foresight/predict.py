"""``predict_step``: the memory of a training step, without a weight and without a device."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..config import Precision, PrepareConfig, parse_bytes
from ..errors import ConfigError, KbitWrapError, UnsupportedModelError
from ..tensors.dtypes import parse_dtype
from .batch import MOST_TOKENS, batch_shape, complete
from .built import BuiltTrainer, is_trainer
from .devices import Devices
from .fakes import OPERATION, TooLongError
from .ledger import KINDS
from .loading import LOADING_HIGHEST
from .memory import StepMemory
from .optimizers import OptimizerSteps, named_steps
from .quantization import unlogged
from .reserved import Prepared, Reserved, replay
from .search import largest
from .simulated import PEFT, UNPREPARED, SimulatedModel
from .trace import ModelStep, Step, trace
from .trainer_arguments import (
    batch_of,
    check_alone,
    checkpointing_of,
    trainer_class,
)
from .trainers import Rehearsal
from .unknown import Unknown, unknowns

_OVER_EVERY_BUDGET = 1 << 80  # bytes
# the default dtype, and what transformers is told, are those of the process
_ONE_AT_A_TIME = threading.RLock()


def predict_step(
    model_or_name_or_config: Any,
    *,
    precision: Precision | str = Precision.NORMS,
    batch_size: int | None = None,
    seq_len: int | None = None,
    args: Any = None,
    inputs: Mapping[str, Any] | None = None,
    lora: Any = None,
    quantization_config: Any = None,
    dtype: Any = None,
    optimizer: Any = "adamw_torch",
    autocast: Any = None,
    kernels: str = "cuda",
    engine: str | None = None,
    num_devices: int = 1,
    exact: bool = False,
    **fields: Any,
) -> StepMemory:
    """Predict the memory of one training step, from a config alone: no weight is loaded, nothing is changed.

    The step is one after the first: the optimizer's state exists, gradients are
    ``None`` at its start. It runs on tensors without values, through the model's own
    code, and every storage that it makes is counted until it is freed.

    Args:
        model_or_name_or_config: A model, which is not prepared; or a name, folder,
            ``config.json`` or config object, as for ``Plan.for_pretrained``; or a
            trainer that was built, with its model, its arguments and its data.
        precision: A ``Precision`` or its value, ``"peft"`` for PEFT's own
            ``prepare_model_for_kbit_training``, or ``"unprepared"`` for none.
        batch_size: Sequences in the batch; ``None`` for those of ``inputs`` or ``args``.
        seq_len: Tokens in a sequence; ``None`` for those of ``inputs`` or ``args``.
        args: The arguments of a trainer: transformers' ``TrainingArguments``, or
            ``SFTConfig``, ``DPOConfig``, ``KTOConfig``, ``GRPOConfig`` or
            ``RewardConfig`` of TRL. The step is then that trainer's own, of its own
            batch, with its optimizer, checkpointing and autocast; they say the batch
            and the length as far as they can, and ``batch_size`` and ``seq_len`` win.
            They are not changed.
        inputs: What the model is called with, where ``input_ids`` and ``labels``, two
            int64 tensors of shape ``(batch_size, seq_len)``, do not describe it: by
            name a ``(shape, dtype)`` or a tensor. The output of a processor is taken
            as it is, with labels of the shape of ``input_ids`` where it has none.
        lora: A config of PEFT; ``None`` for the adapters that the model has, or else
            LoRA of rank 16 on every linear layer.
        quantization_config: As for ``from_pretrained``; ``None`` for the config's own.
        dtype: The dtype to load in; ``None`` for the config's.
        optimizer: A name of ``TrainingArguments.optim``, a function that makes an
            optimizer of the parameters, or ``None`` for a step that ends with the
            backward pass.
        autocast: The dtype of autocast in the forward pass, as of
            ``TrainingArguments(bf16=True)``; ``None`` for none.
        kernels: ``"cuda"`` to follow the operations of a CUDA device, ``"cpu"`` those
            of a CPU.
        engine: ``"ddp"`` or ``"fsdp2"`` for the step on one of several devices;
            ``batch_size`` is then what each of them gets.
        num_devices: The number of devices.
        exact: Run every block, and not a few of each kind whose memory the others
            repeat.
        **fields: Fields of ``PrepareConfig``; of these ``"peft"`` takes those of
            checkpointing, and ``empty_cache`` for its ``auto_clear_cache``, which is
            true from PEFT 0.19 on.

    Returns:
        The prediction.

    Raises:
        ConfigError: There is no such config, a setting is invalid, or the sequence is
            longer than learned positions.
        StateError: The model is prepared.
        UnsupportedModelError: The model cannot be prepared or run without values; the
            message names the operation.

    Example:
        >>> from transformers import BitsAndBytesConfig, LlamaConfig
        >>> from kbitwrap import predict_step
        >>> config = LlamaConfig(
        ...     num_hidden_layers=2, architectures=["LlamaForCausalLM"]
        ... )
        >>> nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        >>> step = predict_step(
        ...     config, quantization_config=nf4, batch_size=1, seq_len=128
        ... )
        >>> step.peak_bytes == max(
        ...     step.forward_bytes, step.backward_bytes, step.optimizer_bytes
        ... )
        True
    """
    predict = StepPredictor(
        model_or_name_or_config,
        precision=precision,
        args=args,
        inputs=inputs,
        lora=lora,
        quantization_config=quantization_config,
        dtype=dtype,
        optimizer=optimizer,
        autocast=autocast,
        kernels=kernels,
        engine=engine,
        num_devices=num_devices,
        exact=exact,
        **fields,
    )
    return predict(batch_size, seq_len)


class StepPredictor:
    """Predicts the steps of one model, for one batch after another: the model is built once.

    A step of a batch is predicted by a call with ``(batch_size, seq_len)``. Its errors, and
    the arguments here, are those of ``predict_step``.

    Example:
        >>> from transformers import BitsAndBytesConfig, LlamaConfig
        >>> from kbitwrap import StepPredictor
        >>> config = LlamaConfig(
        ...     num_hidden_layers=2, architectures=["LlamaForCausalLM"]
        ... )
        >>> nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        >>> predict = StepPredictor(config, quantization_config=nf4)
        >>> longest = predict.longest_sequence("1200MiB", batch_size=1)
        >>> predict.fits("1200MiB", 1, longest), predict.fits("1200MiB", 1, longest + 1)
        (True, False)
    """

    def __init__(
        self,
        model_or_name_or_config: Any,
        *,
        precision: Precision | str = Precision.NORMS,
        args: Any = None,
        inputs: Mapping[str, Any] | None = None,
        lora: Any = None,
        quantization_config: Any = None,
        dtype: Any = None,
        optimizer: Any = "adamw_torch",
        autocast: Any = None,
        kernels: str = "cuda",
        engine: str | None = None,
        num_devices: int = 1,
        exact: bool = False,
        **fields: Any,
    ) -> None:
        if kernels not in ("cuda", "cpu"):
            raise ConfigError(f"kernels: expected 'cuda' or 'cpu', found {kernels!r}")
        self._on_cuda = kernels == "cuda"
        self._devices = Devices(engine, num_devices)
        self.precision = str(precision)
        if precision not in (PEFT, UNPREPARED):
            config = PrepareConfig.of(None, {"precision": precision})
            self.precision = config.precision.value
        try:
            self._autocast = (
                None if autocast is None else parse_dtype(autocast, is_floating=True)
            )
        except ConfigError as error:
            raise ConfigError(f"autocast: {error}") from None
        self._built = None
        if is_trainer(model_or_name_or_config):
            if args is not None:
                raise ConfigError("args: the trainer has them: leave them out")
            self._built = BuiltTrainer(model_or_name_or_config)
            model_or_name_or_config, args = self._built.model, self._built.args
        if args is not None:
            trainer_class(args)
            check_alone(args, optimizer, autocast, inputs)
            fields = checkpointing_of(args) | fields
        self._source = model_or_name_or_config
        self._simulate = functools.partial(
            SimulatedModel,
            precision=self.precision,
            lora=lora,
            quantization_config=quantization_config,
            dtype=dtype,
            fields=fields,
            engine=engine,
            on_cuda=self._on_cuda,
        )
        self._args = args
        self._inputs, self._notes = complete(inputs)
        self._is_exact = exact
        if optimizer is None:
            self._optimizer = OptimizerSteps(None, self._on_cuda)
        elif callable(optimizer):
            self._optimizer = OptimizerSteps(
                lambda trained, _: optimizer(trained), self._on_cuda
            )
        else:
            self._optimizer = named_steps(optimizer, self._on_cuda)
        self._steps: dict[tuple[int, int], Step] = {}

    def __call__(
        self, batch_size: int | None = None, seq_len: int | None = None
    ) -> StepMemory:
        """Predict the step of one batch; see ``predict_step``."""
        batch_size, seq_len = self._shape(batch_size, seq_len)
        step = self._step(batch_size, seq_len)
        reserved = self._replay(step)
        simulated = self._simulated
        loading = self._loading_bytes
        notes = [*self._runner.notes, *simulated.fakes.notes, *self._notes]
        if loading is not None and loading > step.peak_bytes:
            notes.append(LOADING_HIGHEST)
        told = list(simulated.warnings)
        most = self.max_seq_len
        if most is not None and seq_len > most:
            told.append(
                f"a sequence of {seq_len:,} tokens is longer than the model's own longest, {most:,}"
            )
        return StepMemory(
            precision=self.precision,
            batch_size=batch_size,
            seq_len=seq_len,
            kernels="cuda" if self._on_cuda else "cpu",
            static_by_kind={kind: step.held[kind] for kind in KINDS if step.held[kind]},
            levels=step.levels,
            loading_bytes=loading,
            mapped_bytes=simulated.loading.mapped_bytes if simulated.loading else 0,
            reserved_by_phase=reserved.by_phase if reserved else None,
            traced_blocks=simulated.blocks.num_kept,
            num_blocks=simulated.blocks.num_all,
            unknown=self._unknown(step, reserved, batch_size * seq_len),
            notes=tuple(notes),
            warnings=tuple(told),
        )

    def _unknown(
        self, step: Step, reserved: Reserved | None, tokens: int
    ) -> tuple[Unknown, ...]:
        """Return what is not known of a step's peak, with what is reserved for it where that is known."""
        of_engine = self._devices.unknown(step)
        if not self._on_cuda:
            return of_engine
        simulated = self._simulated
        of_device = unknowns(
            step,
            reserved,
            tokens,
            simulated.sample_bytes,
            has_int8=simulated.has_int8,
        )
        return (*of_device, *of_engine)

    def _shape(self, batch_size: int | None, seq_len: int | None) -> tuple[int, int]:
        """Return the sequences of a batch and the tokens of each: those given, or else of the arguments or inputs."""
        if self._args is not None:
            if seq_len is None and self._built is not None:
                seq_len = self._built.seq_len
            batch_size, seq_len = batch_of(self._args, batch_size, seq_len)
        return batch_shape(self._inputs, batch_size, seq_len)

    @property
    def max_seq_len(self) -> int | None:
        """The tokens of the longest sequence that the model's config names; ``None`` where it names none."""
        config: Any = getattr(self._simulated.fakes.model, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else None

    def longest_sequence(self, budget: int | str, batch_size: int | None = None) -> int:
        """Find the longest sequence, in tokens, whose step fits a budget: at most the model's own longest.

        A batch of more than 1,048,576 tokens is not tried.

        Args:
            budget: Bytes, or a string such as ``"8GiB"``, for all that is reserved for
                the step, and for loading and preparing the model before it.
            batch_size: Sequences in the batch; ``None`` for those of ``args``, or 1.

        Returns:
            The number of tokens; 0 where not even one fits, or loading the model does
            not.

        Raises:
            ConfigError: The budget or the batch is invalid, or ``inputs`` fix the length.
        """
        self._refuse_inputs()
        if batch_size is None and self._args is None:
            batch_size = 1
        batch_size, _ = self._shape(batch_size, 1)
        limit = min(self.max_seq_len or MOST_TOKENS, MOST_TOKENS // batch_size)
        known = [other[1] for other in self._steps if other[0] == batch_size]
        return self._largest(
            lambda number: (batch_size, number), budget, known or [2048], limit
        )

    def largest_batch(self, budget: int | str, seq_len: int) -> int:
        """Find the largest batch whose step fits a budget; one of more than 1,048,576 tokens is not tried.

        Args:
            budget: Bytes, or a string such as ``"8GiB"``, for all that is reserved for
                the step, and for loading and preparing the model before it.
            seq_len: Tokens in a sequence.

        Returns:
            The number of sequences; 0 where not even one fits, or loading the model
            does not.

        Raises:
            ConfigError: The budget or the length is invalid, or ``inputs`` fix the batch.
        """
        self._refuse_inputs()
        _, seq_len = self._shape(1, seq_len)
        known = [other[0] for other in self._steps if other[1] == seq_len]
        return self._largest(
            lambda number: (number, seq_len),
            budget,
            known or [1],
            MOST_TOKENS // seq_len,
        )

    def fits(
        self,
        budget: int | str,
        batch_size: int | None = None,
        seq_len: int | None = None,
    ) -> bool:
        """Return whether loading, preparing and the step of a batch fit a budget.

        Tensors must fit, and so must what the allocator reserves for them, with the
        budget as its limit: where it would reserve more, it empties its cache first, and
        what still exceeds the budget does not fit. Where what is reserved is not known, the
        peak is compared, with the least that is unknown beside it.

        Args:
            budget: Bytes, or a string such as ``"8GiB"``.
            batch_size: Sequences in the batch; ``None`` for those of ``inputs`` or
                ``args``.
            seq_len: Tokens in a sequence; ``None`` for those of ``inputs`` or ``args``.
        """
        budget_bytes = parse_bytes(budget)
        batch_size, seq_len = self._shape(batch_size, seq_len)
        try:
            step = self._step(batch_size, seq_len)
        except (
            TooLongError
        ):  # the model keeps some positions of its own longest for itself
            return False
        needed = step.peak_bytes
        if step.static is None:
            unknown = self._unknown(step, None, batch_size * seq_len)
            needed += sum(max(part.least_bytes, 0) for part in unknown)
        if max(needed, self._loading_bytes or 0) > budget_bytes:
            return False
        try:
            self._replay(step, budget_bytes)
        except MemoryError:
            return False
        return True

    def _refuse_inputs(self) -> None:
        """Raise ``ConfigError`` where the inputs that were given leave nothing to search."""
        if self._inputs is not None:
            raise ConfigError(
                "inputs: they fix the batch and its length, so that there is nothing to search: ask `fits`"
            )

    def _largest(
        self,
        batch: Callable[[int], tuple[int, int]],
        budget: int | str,
        numbers: list[int],
        limit: int,
    ) -> int:
        """Find the largest number whose step fits a budget that holds what loading takes."""
        budget_bytes = parse_bytes(budget)
        if (self._loading_bytes or 0) > budget_bytes:
            return 0

        def peak_bytes(number: int) -> int:
            if number == 0:
                held = [step.held.total() for step in self._steps.values()]
                return max(held, default=0)
            try:
                return self._step(*batch(number)).peak_bytes
            except (
                TooLongError
            ):  # the model keeps some positions of its own longest for itself
                return _OVER_EVERY_BUDGET

        most = largest(peak_bytes, budget_bytes, numbers, limit)
        if most == 0 or self.fits(budget_bytes, *batch(most)):
            return most
        # What is reserved beside tensors allows less, and does not grow as evenly.
        return bisect_left(
            range(1, most), True, key=lambda n: not self.fits(budget_bytes, *batch(n))
        )

    @property
    def _loading_bytes(self) -> int | None:
        """The most that loading the model holds on the device; ``None`` where it is not known."""
        loading = self._simulated.loading if self._on_cuda else None
        return None if loading is None else loading.peak_bytes

    def _replay(self, step: Step, limit: float = math.inf) -> Reserved | None:
        """Return what a run with a step reserves, where that is known; raises as ``replay`` does."""
        if not self._on_cuda or step.static is None:
            return None
        simulated = self._simulated
        prepared = Prepared(
            simulated.loaded, simulated.casts, simulated.sample_bytes, limit
        )
        return replay(prepared, step)

    def _step(self, batch_size: int, seq_len: int) -> Step:
        """Return the step of a batch on each of the devices; run it, unless it was run before."""
        key = batch_size, seq_len
        if key not in self._steps:
            with _one_at_a_time():
                self._steps[key] = self._devices.on_each(self._run(batch_size, seq_len))
        return self._steps[key]

    def _run(self, batch_size: int, seq_len: int) -> Step:
        """Run the step of a batch; if the kept blocks do not tell the others, run all."""
        simulated = self._simulated
        blocks = simulated.blocks
        what = f"the step of {simulated.name} cannot be followed"
        try:
            with _explained(what):
                return trace(
                    self._runner,
                    simulated.fakes,
                    blocks,
                    batch_size,
                    seq_len,
                    self._on_cuda,
                )
        # `_explained` raises it for a NotRepeatedError, and for any error of a model that
        # cannot run with fewer blocks.
        except UnsupportedModelError:
            if not blocks.is_cut:
                raise
        self._is_exact = True
        del self._simulated  # built again, with all blocks, when it is asked for
        return self._run(batch_size, seq_len)

    @functools.cached_property
    def _simulated(self) -> SimulatedModel:
        """The model, built at the first time that it is asked for, with what runs its step."""
        what = f"a {type(self._source).__name__} cannot be copied or prepared"
        with _one_at_a_time(), _explained(what):
            self._runner = ModelStep(self._inputs, self._optimizer, self._autocast)
            if self._args is not None:
                self._runner = Rehearsal(self._args, self._on_cuda, self._built)
            return self._simulate(
                self._runner.source(self._source),
                adapt=self._runner.build,
                is_exact=self._is_exact,
            )


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one thread build or run a model; warnings of a preparation are not those of a prediction."""
    with _ONE_AT_A_TIME, warnings.catch_warnings(), unlogged():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say of what libraries and models raise for tensors without values in which operation it was."""
    try:
        yield
    except KbitWrapError:
        raise
    except Exception as error:
        operation = vars(error).get(OPERATION)
        place = "" if operation is None else f"{operation}: "
        raise UnsupportedModelError(
            f"{what} without values: {place}{type(error).__name__}: {error}"
        ) from error
