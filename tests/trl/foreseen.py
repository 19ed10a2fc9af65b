"""The step of a trainer that is predicted, and tracked where the trainer really runs it."""

from __future__ import annotations

from typing import Any

from kbitwrap import StepMemory, StepTracker

Figures = dict[str, Any]


def figures(memory: StepMemory | StepTracker) -> Figures:
    names = ("static_bytes", "peak_bytes", "phases", "by_kind")
    return {name: getattr(memory, name) for name in names}


def tracked(trainer: Any) -> StepTracker:
    """The second step of a training, from its first micro-step to the end of the optimizer's step."""
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
        if trainer.state.global_step == 1 and not trackers:
            optimizer = trainer.optimizer.optimizer
            trackers.append(StepTracker(trainer.model, optimizer, list(batches)))
            trackers[0].__enter__()
            hook = optimizer.register_step_post_hook(end)
        return training_step(*args, **kwargs)

    hook: Any = None
    trainer.get_batch_samples, trainer.training_step = get, step
    trainer.train()
    return trackers[0]
