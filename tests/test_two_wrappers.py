"""One parameter has one holder: parts of a model that share one are not prepared by two wrappers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, LifecycleState, StateError, prepare_model_for_kbit_training, prepared_of
from support.snapshot import Snapshot
from support.thorough import each_once

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


def in_threads(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Make calls at the same time, and return what each raised."""
    barrier, raised = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number: int) -> None:
        barrier.wait()
        try:
            calls[number]()
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return raised


@pytest.mark.parametrize(
    ("relation", "precision"),
    each_once(
        ["the model", "a part of it", "a shared parameter", "one wrapper", "the drop-in"], ["full", "compute", "norms"]
    ),
)
def test_of_two_threads_that_prepare_at_once_one_gets_a_state_error(relation: str, precision: str) -> None:
    encoder, decoder = tied()
    whole = nn.ModuleList([encoder, decoder])
    second = {"a part of it": encoder[1], "a shared parameter": decoder}.get(relation, encoder)
    wrappers = [KbitPreparedModel(model, precision=precision) for model in (encoder, second)]
    if relation == "one wrapper":
        wrappers[1] = wrappers[0]
    calls = [wrapper.prepare for wrapper in wrappers]
    if relation == "the drop-in":
        calls[1] = lambda: prepare_model_for_kbit_training(decoder, precision=precision)
    before, winners = Snapshot(whole), set()
    for _ in range(20):
        raised = in_threads(*calls)
        assert sorted(type(error) for error in raised if error is not None) == [StateError]
        winners.add(raised.index(None))
        holder = prepared_of(encoder) or prepared_of(decoder)
        assert holder is not None
        assert not holder.verify()
        restored = in_threads(holder.restore, holder.restore)
        assert restored == [None, None]
        assert before.diff(Snapshot(whole), moved=True) == []
        assert {wrapper.state for wrapper in wrappers} <= {LifecycleState.NEW, LifecycleState.RESTORED}


def test_suspending_in_two_threads_suspends_once() -> None:
    model, _ = tied()
    prepared = KbitPreparedModel(model, precision="full").prepare()
    during = Snapshot(model)
    for _ in range(20):
        assert sorted(type(error).__name__ for error in in_threads(prepared.suspend, prepared.suspend)) == [
            "NoneType",
            "StateError",
        ]
        assert in_threads(prepared.resume, prepared.resume) == [None, None]
        assert during.diff(Snapshot(model), moved=True, ignore=(": attributes",)) == []
    prepared.restore()
