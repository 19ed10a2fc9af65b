"""On every architecture, a predicted step holds, to the byte, what a tracker counts of the real one."""

from __future__ import annotations

import pytest

from steps import Cell, cells, each_value_once, figures, predicted, tracked
from support.thorough import few

pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:head=.float32. changes nothing:UserWarning"),  # a classifier is no such head
]


CELLS = list(cells())


@pytest.mark.parametrize("cell", few(CELLS, each_value_once(CELLS)[::4]), ids=str)
def test_a_predicted_step_equals_the_real_one_to_the_byte(cell: Cell) -> None:
    tracker, batch = tracked(cell)
    assert figures(predicted(cell, batch)) == figures(tracker)
