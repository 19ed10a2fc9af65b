"""A predicted step of TRL's trainers has adapters of the dtype that was asked for, and their optimizer's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kbitwrap import KbitPreparedModel
from support.foreseen import DEPRECATED, Cell, figures, predicted, tracked
from support.thorough import few
from test_foreseen import arguments, load, real

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

CASES = [(kind, dtype) for kind in ("sft", "dpo", "grpo", "reward") for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("kind", "dtype"), few(CASES, [("sft", "float32"), ("reward", "float32")]))
def test_a_step_with_adapters_of_a_dtype_equals_the_real_one_to_the_byte(kind: str, dtype: Any, tmp_path: Path) -> None:
    cell = Cell(kind, way="none")
    model = load(cell)
    args = arguments(cell, tmp_path)
    step = predicted(cell, model, args, adapter_dtype=dtype)
    with KbitPreparedModel(model, precision="none", adapter_dtype=dtype) as prepared:
        trainer = real(cell, model, args)
        prepared.adopt(trainer.model)
        adapters = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
        assert {parameter.dtype for parameter in adapters} == {getattr(torch, dtype)}
        assert figures(step) == figures(tracked(trainer))
        trainer.model.unload()
