"""What a first forward leaves on modules of the base is taken away again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel
from support.snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")


class Rotary(nn.Module):
    """A table in the dtype of the input that made it."""

    def __init__(self, inputs: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", inputs.detach().cos(), persistent=False)


class Lazy(nn.Module):
    """A module that makes a child when it first runs, as remote code does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.norm(inputs)
        if not hasattr(self, "rotary"):
            self.rotary = nn.Sequential(Rotary(inputs))
            self.has_rotary = True
        return inputs * self.rotary[0].table


def lazy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), Lazy()).bfloat16()


INPUTS = torch.arange(8)[None]


@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_a_child_without_parameters_that_a_first_forward_made_is_removed(precision: str) -> None:
    expected = lazy()(INPUTS)
    model = lazy()
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    output = model(INPUTS)
    with prepared.suspended():
        assert not hasattr(model[1], "rotary")
        assert torch.equal(model(INPUTS), expected)
    assert torch.equal(model(INPUTS), output)
    assert prepared.restore().put_back == ("1.has_rotary", "1.rotary")
    assert before.diff(Snapshot(model), moved=True) == []
    assert torch.equal(model(INPUTS), expected)


def test_a_child_without_tensors_is_the_users_and_stays() -> None:
    model = lazy()
    with KbitPreparedModel(model, precision="full"):
        model[1].dropout = nn.Dropout()
    assert hasattr(model[1], "dropout")


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_the_plain_weight_of_old_weight_norm_is_put_back(precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), torch.nn.utils.weight_norm(nn.Linear(4, 4))).bfloat16()
    expected = model(INPUTS)
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision) as prepared:
        model(INPUTS)
        with prepared.suspended():
            assert torch.equal(model(INPUTS), expected)
    assert before.diff(Snapshot(model), moved=True) == []
    assert torch.equal(model(INPUTS), expected)


def test_the_settings_of_a_layer_whose_weight_was_widened_stay() -> None:
    layer = nn.Linear(4, 4).bfloat16()
    prepared = KbitPreparedModel(nn.Sequential(nn.Embedding(8, 4), layer).bfloat16()).prepare()
    layer.weight, layer.in_features = nn.Parameter(torch.ones(4, 6)), 6
    report = prepared.restore()
    assert layer.in_features == 6
    assert report.replaced == ("1.weight",)
    assert report.put_back == ()
