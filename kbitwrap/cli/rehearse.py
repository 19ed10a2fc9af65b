"""``kbitwrap run --plan``: what a step of a script's trainer takes, before the first one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NoReturn

from .console import EXIT_DONE, EXIT_NO, InputError, quiet_libraries, show
from .hub import refusing
from .step import Limit, gib, limit_of

_UNLOADED = "models were built without weights, which --load loads"


class Stopped(BaseException):
    """Ends a script where its trainer would train; no ``except Exception`` of the script stops it."""


class Rehearsal:
    """A script that is run up to its training.

    Args:
        precision: What PEFT's function stands for in it.
        budget: The bytes that the step's tensors may take, or ``None``.
        device_memory: Those of the device, or ``None``.
        loads: Whether models are loaded.

    Attributes:
        status: The exit status, once the step was planned.
        error: What was refused, if something was.
    """

    def __init__(
        self,
        precision: str,
        budget: int | None,
        device_memory: int | None,
        loads: bool,
    ) -> None:
        self._precision = precision
        self._given = budget, device_memory
        self._loads = loads
        self.status: int | None = None
        self.error: InputError | None = None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Stop the training of what is run inside.

        Yields:
            Nothing.
        """
        from .. import instead_of_training

        with instead_of_training(
            self._plan, precision=self._precision, loads=self._loads
        ):
            yield

    def ended(self, how: str) -> int:
        """The exit status of a script that ended.

        Args:
            how: How it ended, where it was not stopped.

        Raises:
            InputError: Its step was not planned.
        """
        if self.error is not None:
            raise self.error
        if self.status is None:
            why = "" if self._loads else f"; {_UNLOADED}"
            raise InputError(f"{how} before a trainer's train(){why}")
        return self.status

    def _plan(self, trainer: Any, settings: dict[str, Any]) -> NoReturn:
        """Print what a step of a trainer takes, and end the script."""
        if self.status is None:
            try:
                self.status = self._tell(trainer, settings)
            except InputError as error:
                self.error = error
        raise Stopped

    def _tell(self, trainer: Any, settings: dict[str, Any]) -> int:
        from .. import predict_step, prepared_of

        prepared = prepared_of(trainer.model)
        if prepared is not None:
            settings = asdict(prepared.config)
            prepared.restore()
        kernels = "cpu" if trainer.args.use_cpu else "cuda"
        name = type(trainer).__name__
        with quiet_libraries(), refusing(f"the step of {name} cannot be predicted"):
            step = predict_step(trainer, kernels=kernels, **settings)
        limit = self._limit(kernels)
        takes = f"a step of {name} takes {gib(step.peak_bytes)} GiB"
        loading = step.loading_bytes or 0
        if loading > step.peak_bytes:
            takes += f", and loading the model {gib(loading)}"
        if limit is None:
            verdict, status = takes, EXIT_DONE
        elif step.needed_bytes <= limit.budget:
            verdict, status = f"{limit}: fits, {takes}", EXIT_DONE
        else:
            verdict, status = f"{limit}: does not fit, {takes}", EXIT_NO
        show(f"{verdict}.", str(step))
        sys.stdout.flush()
        return status

    def _limit(self, kernels: str) -> Limit | None:
        """The budget that was given, or else the memory of the device."""
        budget, device_memory = self._given
        if budget is None and device_memory is None and kernels == "cuda":
            import torch

            if torch.cuda.is_available():
                device_memory = torch.cuda.get_device_properties(0).total_memory
        return limit_of(budget, device_memory)
