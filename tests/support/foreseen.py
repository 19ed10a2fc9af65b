"""The step of a trainer that is predicted, and tracked where the trainer really runs it; and loading at its highest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from kbitwrap import KbitPreparedModel, StepMemory, StepTracker, predict_step
from support import zoo
from support.memory import peak, profiler, sizes_in

Figures = dict[str, Any]
# TRL 1.16 and older callers set the field by the name that transformers 5.23 deprecates.
DEPRECATED = r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"


@dataclass(frozen=True)
class Cell:
    """One trainer with one model.

    Attributes:
        kind: The trainer: ``"trainer"`` for transformers' own, or TRL's as in ``runs.TRAINERS``.
        name: A key of the zoo.
        way: A precision.
        settings: Fields of the trainer's arguments.
        seq_len: Tokens in a sequence.
    """

    kind: str
    name: str = "llama"
    way: str = "norms"
    settings: tuple[tuple[str, Any], ...] = ()
    seq_len: int = 16

    def __str__(self) -> str:
        told = [f"{name}={value}" for name, value in self.settings]
        return "-".join([self.kind, self.name, self.way, *told])

    @property
    def lora(self) -> Any:
        task = "SEQ_CLS" if self.kind == "reward" else "CAUSAL_LM"
        return zoo.lora_config(self.name, task_type=task)


def figures(memory: StepMemory | StepTracker) -> Figures:
    names = ("static_bytes", "peak_bytes", "phases", "by_kind")
    return {name: getattr(memory, name) for name in names}


def predicted(cell: Cell, model: Any, args: Any, **options: Any) -> StepMemory:
    """The step, predicted from the arguments of the trainer."""
    before = repr(vars(args))
    settings = {"precision": cell.way, "seq_len": cell.seq_len, "lora": cell.lora, "kernels": "cpu", "exact": True}
    step = predict_step(model, args=args, **settings | options)
    assert repr(vars(args)) == before
    return step


def prepared(cell: Cell, model: Any, args: Any) -> KbitPreparedModel:
    """The model, prepared with the checkpointing of the trainer's arguments."""
    # transformers 5.23 and later call the two fields `activation_checkpointing…`
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    checkpointing = {"gradient_checkpointing": getattr(args, name)}
    kwargs = getattr(args, f"{name}_kwargs")
    if kwargs is not None:
        checkpointing["gradient_checkpointing_kwargs"] = kwargs
    return KbitPreparedModel(model, precision=cell.way, **checkpointing).prepare()


def around_step(
    trainer: Any, begin: Callable[[Any, list[Any]], object], end: Callable[[], object], at: int = 1
) -> None:
    """Train, and do something where a step begins, with the optimizer and the step's batches, and where it ends."""
    get_batch_samples, training_step = trainer.get_batch_samples, trainer.training_step
    batches: list[Any] = []
    hooks: list[Any] = []

    def get(*args: Any, **kwargs: Any) -> Any:
        found = get_batch_samples(*args, **kwargs)
        batches[:] = found[0]
        return found

    def ended(*_: Any) -> None:
        end()
        hooks[0].remove()

    def step(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == at and not hooks:
            optimizer = trainer.optimizer.optimizer
            begin(optimizer, list(batches))
            hooks.append(optimizer.register_step_post_hook(ended))
        return training_step(*args, **kwargs)

    trainer.get_batch_samples, trainer.training_step = get, step
    trainer.train()


def tracked(trainer: Any, at: int = 1) -> StepTracker:
    """A step of a training, from its first micro-step to the end of its optimizer's; by default the second."""
    trackers: list[StepTracker] = []

    def begin(optimizer: Any, batches: list[Any]) -> None:
        trackers.append(StepTracker(trainer.model, optimizer, batches))
        trackers[0].__enter__()

    around_step(trainer, begin, lambda: trackers[0].__exit__(None, None, None), at)
    return trackers[0]


def allocated(trainer: Any) -> int:
    """The most that torch's allocator gives out in the second step of a training, beyond what it had given before."""
    profile = profiler()
    around_step(trainer, lambda *_: profile.__enter__(), lambda: profile.__exit__(None, None, None))
    return peak(sizes_in(profile))


def spread(kind: str, settings: list[Mapping[str, Any]], names: tuple[str, ...], ways: tuple[str, ...]) -> list[Cell]:
    """Cells of all settings: each of the next architecture and way, and a second round of others."""
    cells = []
    for turn in range(2):
        for number, chosen in enumerate(settings):
            name = names[(number + 3 * turn) % len(names)]
            way = ways[(number + turn) % len(ways)]
            cells.append(Cell(kind, name, way, tuple(chosen.items())))
    return cells


class ReadAhead:
    """In place of the threads that load: all files are read before anything is made of them, by the one that asks."""

    def __init__(self, max_workers: int) -> None:
        pass

    def submit(self, read: Any) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        future.set_result(read())
        return future

    def shutdown(self, **_: bool) -> None:
        pass
