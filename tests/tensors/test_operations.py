"""What an operation writes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kbitwrap.tensors.upcast import written_arguments

A, B = torch.ones(3), torch.ones(3)


class Watching(TorchDispatchMode):
    """Notes what each operation writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written += written_arguments(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("operate", "expected"),
    [
        (lambda: A + B, []),
        (lambda: A.view(3, 1), []),
        (lambda: A.add_(B), [A]),
        (lambda: torch.add(A, A, out=B), [B]),
        (lambda: torch._foreach_add_([A, B], 1.0), [A, B]),
    ],
    ids=["none", "view", "in place", "out", "lists"],
)
def test_what_an_operation_writes_to_is_told_by_its_schema(operate: Any, expected: list[Any]) -> None:
    watching = Watching()
    with watching:
        operate()
    assert [id(one) for one in watching.written] == [id(one) for one in expected]
