"""The step of a trainer that is predicted, and tracked where the trainer really runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kbitwrap import KbitPreparedModel, StepMemory, StepTracker, predict_step
from support import zoo

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
    checkpointing = {"gradient_checkpointing": args.activation_checkpointing}
    if args.activation_checkpointing_kwargs is not None:
        checkpointing["gradient_checkpointing_kwargs"] = args.activation_checkpointing_kwargs
    return KbitPreparedModel(model, precision=cell.way, **checkpointing).prepare()


def tracked(trainer: Any, at: int = 1) -> StepTracker:
    """A step of a training, from its first micro-step to the end of its optimizer's; by default the second."""
    trackers: list[StepTracker] = []
    get_batch_samples, training_step = trainer.get_batch_samples, trainer.training_step
    batches: list[Any] = []

    def get(*args: Any, **kwargs: Any) -> Any:
        found = get_batch_samples(*args, **kwargs)
        batches[:] = found[0]
        return found

    def end(*_: Any) -> None:
        trackers[0].__exit__(None, None, None)
        hook.remove()

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal hook
        if trainer.state.global_step == at and not trackers:
            optimizer = trainer.optimizer.optimizer
            trackers.append(StepTracker(trainer.model, optimizer, list(batches)))
            trackers[0].__enter__()
            hook = optimizer.register_step_post_hook(end)
        return training_step(*args, **kwargs)

    hook: Any = None
    trainer.get_batch_samples, trainer.training_step = get, step
    trainer.train()
    return trackers[0]


def spread(kind: str, settings: list[Mapping[str, Any]], names: tuple[str, ...], ways: tuple[str, ...]) -> list[Cell]:
    """Cells of all settings: each of the next architecture and way, and a second round of others."""
    cells = []
    for turn in range(2):
        for number, chosen in enumerate(settings):
            name = names[(number + 3 * turn) % len(names)]
            way = ways[(number + turn) % len(ways)]
            cells.append(Cell(kind, name, way, tuple(chosen.items())))
    return cells
