"""A compiled step: as many graphs as the unprepared model has, none anew, and none of another model.

    pytest tests/compiled

Outside the test paths: inductor takes half a minute a model.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from kbitwrap import KbitPreparedModel, Precision
from support import zoo
from support.thorough import few
from support.training import adapt, step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def steps(model: torch.nn.Module, backend: CompileCounterWithBackend, num_steps: int = 2) -> torch.Tensor:
    compiled = torch.compile(model, backend=backend)
    return [step("llama", compiled, seed=0)[0] for _ in range(num_steps)][-1]


@pytest.mark.parametrize("precision", few(Precision, [Precision.COMPUTE, Precision.NORMS]), ids=str)
def test_a_compiled_step_has_one_graph_also_after_a_suspension(precision: Precision) -> None:
    model = zoo.load("llama")
    model.config.use_cache = False  # transformers logs that it turns it off, which no graph holds
    backend = CompileCounterWithBackend("inductor")
    with KbitPreparedModel(model, precision=precision) as prepared:
        peft_model = adapt("llama", model)
        prepared.adopt(peft_model)
        assert steps(peft_model, backend).isfinite()
        assert backend.frame_count == 1
        with prepared.suspended():
            assert prepared.state == "suspended"
        assert steps(peft_model, backend).isfinite()
        assert backend.frame_count == 1
        peft_model.unload()
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
# Of the versions that transformers compares for its experts.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning")
@pytest.mark.parametrize("name", few(zoo.CORE, ["gemma2", "mixtral"]))
def test_compute_has_the_numbers_of_full_after_a_model_of_the_class_was_compiled_in_half(name: str) -> None:
    def losses(precision: str) -> list[torch.Tensor]:
        model = zoo.load(name)
        model.config.use_cache = False
        with KbitPreparedModel(model, precision=precision, gradient_checkpointing=False):
            model.enable_input_require_grads()  # as Trainer does, and the compiler breaks its graph there
            compiled = torch.compile(model, backend="aot_eager")
            return [zoo.loss(name, compiled, zoo.inputs(name, model, seed=seed)).detach() for seed in (0, 1)]

    losses("none")
    assert torch.equal(torch.stack(losses("compute")), torch.stack(losses("full")))
