"""Runs the step of a trainer without values, and writes down its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import cuda
from .blocks import Blocks
from .built import Built
from .fakes import FakeModel, tensors_in
from .kernels import SAID, fused_heads_on_cuda
from .ledger import INPUTS, Ledger
from .optimizers import OptimizerSteps, Shapes
from .trace import Trace, held_bytes, trained_shapes, watch_of
from .tracker import Watch
from .trainer_arguments import check_on_cuda
from .trainers import Rehearsal


class TrainerOptimizer(OptimizerSteps):
    """The steps of the optimizer that a trainer makes, after its clipping of gradients.

    Args:
        rehearsal: The trainer.
        on_cuda: Whether the step is one on a CUDA device.
    """

    def __init__(self, rehearsal: Rehearsal, on_cuda: bool) -> None:
        super().__init__(rehearsal.args.optim, on_cuda)
        self._trainer = rehearsal.trainer

    def _make(self, trained: list[nn.Parameter], shapes: Shapes) -> Any:
        trainer = self._trainer
        cls, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        groups = []
        for number, group in enumerate(trainer.optimizer.param_groups):
            own = {name: value for name, value in group.items() if name != "params"}
            if self._on_cuda and "foreach" in own and not own.get("fused"):
                own["foreach"] = True  # torch's choice on CUDA
            chosen = zip(trained, shapes, strict=True)
            own["params"] = [one for one, shape in chosen if shape.group == number]
            groups.append(own)
        with _disable_current_modes():  # some compute tables
            made = cls(groups, **options)
        if hasattr(made, "train"):
            made.train()
        return made

    def _clip(self, trained: list[nn.Parameter]) -> Any:
        return self._trainer.clip(nn.ParameterList(trained))


class Count:
    """Counts the memory of a step while a trainer runs it: from its first micro-step to where its optimizer begins.

    Args:
        model: The model with the kept blocks.
        blocks: Its stacks of blocks.
        on_cuda: Whether to count as on a CUDA device.

    Attributes:
        ledger: What was written down.
        shapes: The shapes of what has got gradients.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, on_cuda: bool) -> None:
        self.ledger = Ledger()
        self.shapes: Shapes = ()
        self._model = model
        self._blocks = blocks
        self._on_cuda = on_cuda
        self._stack = contextlib.ExitStack()
        self._watch: Watch | None = None

    def begin(self, batches: list[Any]) -> None:
        """Begin to count, before the first micro-step of a step.

        Args:
            batches: The batches of all its micro-steps.
        """
        watch = watch_of(self._model, self._blocks, self._on_cuda)
        for tensor in tensors_in(batches):
            watch.hold(tensor, INPUTS)
        self._stack.enter_context(self._blocks.announced(watch))
        watch.follow_phase()
        self._stack.enter_context(watch)
        self._watch = watch

    def end(self, optimizer: Any) -> None:
        """Stop counting, when gradients are there, and take them away.

        Args:
            optimizer: The optimizer.
        """
        assert self._watch is not None
        self._stack.close()
        self.ledger = self._watch.close()
        groups: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            groups |= {id(parameter): number for parameter in group["params"]}
        self.shapes = trained_shapes(self._model, self._blocks, groups)

    def abandon(self) -> None:
        """Leave what was entered, if the step failed."""
        self._stack.close()


class TrainerStep:
    """The step of the trainer that takes given arguments.

    Args:
        args: The arguments.
        on_cuda: Whether the operations of a CUDA device are followed.
        built: The trainer that was built with them, if one was.
    """

    def __init__(self, args: Any, on_cuda: bool, built: Built | None = None) -> None:
        self.rehearsal = Rehearsal(args, built)
        if on_cuda:
            check_on_cuda(args)
        self._has_fused_heads = False
        self._on_cuda = on_cuda
        self._optimizer: OptimizerSteps | None = None

    @contextlib.contextmanager
    def _kernels(self) -> Iterator[None]:
        """Follow the operations of the device."""
        if not self._on_cuda:
            yield
            return
        with cuda.CudaFunctions(), fused_heads_on_cuda() as launches:
            yield
        self._has_fused_heads = launches.has_any

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions, and the kernels that a rule follows."""
        notes = self.rehearsal.notes
        return (*notes, SAID) if self._has_fused_heads else notes

    def trace(
        self, fakes: FakeModel, blocks: Blocks, batch_size: int, seq_len: int
    ) -> Trace:
        """Run a step without values, and write down its memory.

        Args:
            fakes: The model that the trainer trains.
            blocks: Its stacks of blocks, of which some may be left out.
            batch_size: Sequences in a batch of one micro-step.
            seq_len: Tokens in a sequence.

        Returns:
            The step that was run.

        Raises:
            NotRepeatedError: The blocks that are left out cannot be told from the
                others.
        """
        shapes: Shapes = ()

        def run() -> Ledger:
            nonlocal shapes
            count = Count(fakes.model, blocks, self._on_cuda)
            try:
                self.rehearsal.train(batch_size, seq_len, count)
            finally:
                count.abandon()
            shapes = count.shapes
            return count.ledger

        with self.rehearsal.process.in_force():
            with fakes.running(gives_figures=True), self._kernels():
                # what a first step leaves on its modules is there in later ones
                if not fakes.was_run:
                    run()
                    fakes.was_run = True
                held = held_bytes(fakes.model)
                ledger = run()
                if held != held_bytes(fakes.model):
                    ledger = run()  # a longer sequence may leave more
                if blocks.is_cut and not blocks.is_tried:
                    ledger = blocks.expect_repeated(ledger, run)
            if self._optimizer is None:
                self._optimizer = TrainerOptimizer(self.rehearsal, self._on_cuda)
            state, last = self._optimizer(fakes.mode, shapes)
        return Trace(ledger, blocks, shapes, state, last)
