"""One parameter has one holder: parts of a model that share one are not prepared by two wrappers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, LifecycleState, StateError, prepare_model_for_kbit_training, prepared_of
from snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")


def tied() -> tuple[nn.Sequential, nn.Sequential]:
    """An encoder and a decoder with one embedding."""
    encoder, decoder = (nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)).bfloat16() for _ in range(2))
    decoder[0].weight = encoder[0].weight
    return encoder, decoder


@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_a_model_that_shares_a_parameter_with_a_prepared_one_is_refused(precision: str) -> None:
    encoder, decoder = tied()
    late = KbitPreparedModel(decoder, precision=precision)
    prepared = KbitPreparedModel(encoder, precision=precision).prepare()
    both = nn.ModuleList([encoder, decoder])
    during = Snapshot(both)
    for refused in (
        late.prepare,
        lambda: KbitPreparedModel(decoder, precision=precision),
        lambda: prepare_model_for_kbit_training(decoder, precision=precision),
    ):
        with pytest.raises(StateError, match=r"shares its 0\.weight with a Sequential that is prepared") as caught:
            refused()
        assert caught.value.state is LifecycleState.PREPARED
    with prepared.suspended(), pytest.raises(StateError, match="shares its"):
        late.prepare()
    assert prepared_of(decoder) is None
    assert prepared_of(encoder) is prepared
    assert during.diff(Snapshot(both), moved=True, ignore=(": attributes",)) == []
    prepared.restore()
    late.prepare().restore()
    assert {(p.dtype, p.requires_grad) for m in (encoder, decoder) for p in m.parameters()} == {(torch.bfloat16, True)}


def test_the_drop_in_on_a_model_whose_parts_two_wrappers_hold_is_refused() -> None:
    first, second = (nn.Linear(4, 4).half() for _ in range(2))
    wrappers = [KbitPreparedModel(part).prepare() for part in (first, second)]
    with pytest.raises(StateError, match="prepared already"):
        prepare_model_for_kbit_training(nn.Sequential(first, second))
    assert [wrapper.restore().replaced for wrapper in wrappers] == [(), ()]
