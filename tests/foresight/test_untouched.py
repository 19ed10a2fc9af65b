"""A prediction changes nothing, also where it raises, and names what it cannot follow."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from peft import get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import BitsAndBytesConfig, LlamaConfig
from transformers.utils import import_utils

import kbitwrap.foresight.predict as predict_module
from kbitwrap import ConfigError, KbitPreparedModel, StateError, StepTracker, UnsupportedModelError, predict_step
from steps import LEARNING_RATE, Cell, figures, predicted, tracked
from support import zoo
from support.snapshot import Snapshot
from support.thorough import few

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
BATCH = {"batch_size": 2, "seq_len": 12, "kernels": "cpu", "exact": True}


def process_state() -> dict[str, Any]:
    tables = {name: (type(table), table.device) for name, table in functional.name2qmap.items()}
    return {
        "random": torch.get_rng_state().tolist(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "warnings": list(warnings.filters),
        "tracing": import_utils.is_fake_tensor,
        "tables": tables or {"dynamic": (torch.Tensor, torch.device("cpu"))},  # made by the first who needs it
    }


def fakes_alive() -> list[Any]:
    for _ in range(2):  # on Python 3.13 a mode outlived one collection at times, why is not known
        gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, (FakeTensor, FakeTensorMode))]


CELLS = [
    Cell("llama", way="compute", quant="nf4-double", adapters="dora"),
    Cell("llama", way="full", quant="int8"),
    Cell("mixtral", way="peft", adapters="modules_to_save"),
    Cell("dbrx"),
    Cell("llama", quant="nf4-double", adapters="dora", source="folder"),
    Cell("llama", quant="int8", source="config"),
]


@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
@pytest.mark.parametrize("cell", few(CELLS, [CELLS[0], CELLS[3]]), ids=str)
def test_a_prediction_changes_nothing_and_leaves_nothing(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cell.load()
    batch = zoo.inputs(cell.name, model)
    if CELLS.index(cell) % 2:  # half of the models have run
        model.train()
        model(**batch).loss.backward()
        model.zero_grad()
    before, process = Snapshot(model), process_state()
    others = fakes_alive()  # dynamo keeps some of what other tests compiled
    monkeypatch.setattr(zoo, "load", lambda *_, **__: model)
    try:
        predicted(cell, batch)
    except UnsupportedModelError:
        assert cell.name == "dbrx"
    assert before.diff(Snapshot(model)) == []
    assert process_state() == process
    assert [type(thing) for thing in fakes_alive() if all(thing is not other for other in others)] == []


@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
@pytest.mark.parametrize("quant", few(["nf4-double", "int8"], ["int8"]))
def test_a_model_that_has_run_is_predicted_like_a_new_one(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("llama", quant=quant)
    tracker, batch = tracked(cell)
    model = cell.load()
    model.train()
    model(**batch).loss.backward()
    model.zero_grad()
    monkeypatch.setattr(zoo, "load", lambda *_, **__: model)
    assert figures(predicted(cell, batch)) == figures(tracker)


@pytest.mark.thorough
def test_float16_activations_are_taken_to_be_finite_where_a_model_asks() -> None:
    cell = Cell("bart", dtype="fp16")
    tracker, batch = tracked(cell)
    memory = predicted(cell, batch)
    assert figures(memory) == figures(tracker)
    assert "finite" in memory.notes[0]


@pytest.mark.thorough
def test_buffers_that_an_architecture_keeps_in_float32_are_built_so_from_a_config() -> None:
    cell = Cell("deepseek_v3", way="compute", dtype="fp16", source="folder")
    tracker, batch = tracked(cell)
    assert figures(predicted(cell, batch)) == figures(tracker)


def test_experts_that_get_their_tokens_by_value_are_refused_by_the_operation() -> None:
    model = zoo.load("dbrx")
    with pytest.raises(UnsupportedModelError, match=r"the step of DbrxForCausalLM .* aten::nonzero"):
        predict_step(model, inputs=zoo.inputs("dbrx", model), lora=zoo.lora_config("dbrx"), **BATCH)


@torch.library.custom_op("kbitwrap_tests::double", mutates_args=())
def double(tensor: torch.Tensor) -> torch.Tensor:
    """An operation without a fake kernel."""
    return tensor * 2


class Plain(nn.Module):
    """A model of torch alone, with a loss."""

    def __init__(self, operation: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.operation = operation

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        hidden = self.first(x).relu()
        if self.operation is not None:
            hidden = hidden + self.operation(hidden)
        return SimpleNamespace(loss=self.second(hidden).square().mean())


LORA = zoo.lora_config("llama", target_modules=["first"])
FIELDS = {"gradient_checkpointing": False, "inputs": {"x": ((3, 16), "float32")}, "lora": LORA}


@pytest.mark.parametrize(
    "operation",
    [
        None,
        # As transformers before 5.23 counts tokens of experts, and drops no layer.
        lambda hidden: hidden * torch.bincount(hidden.argmax(-1), minlength=32).float(),
        lambda hidden: hidden if torch.rand([]) < 0.0 else hidden * 2,
    ],
)
def test_a_plain_module_is_predicted_from_the_shapes_of_its_inputs(operation: Any) -> None:
    model: Any = get_peft_model(Plain(operation), LORA)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, batch = torch.optim.AdamW(trained, lr=LEARNING_RATE), {"x": torch.zeros(3, 16)}
    for _ in range(2):
        optimizer.zero_grad()
        with StepTracker(model, optimizer, batch) as tracker:
            model(**batch).loss.backward()
            optimizer.step()
    memory = predict_step(Plain(operation), precision="none", **FIELDS, **BATCH)
    assert figures(memory) == figures(tracker)


def test_adapters_that_the_model_has_are_kept() -> None:
    cell = Cell("llama")
    tracker, batch = tracked(cell)
    model: Any = get_peft_model(cell.load(), cell.lora)
    assert figures(predict_step(model, inputs=batch, **BATCH)) == figures(tracker)
    with pytest.raises(ConfigError, match="adapters already"):
        predict_step(model, inputs=batch, lora=cell.lora, **BATCH)


def test_a_prepared_model_is_refused() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model).prepare()
    with pytest.raises(StateError, match="is prepared"):
        predict_step(model, **BATCH)
    prepared.restore()
    predict_step(model, lora=zoo.lora_config("llama", target_modules=["q_proj"]), gradient_checkpointing=False, **BATCH)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda hidden: double(hidden), "kbitwrap_tests::double"),
        (lambda hidden: hidden * hidden.sum().item(), "aten::_local_scalar_dense"),
        (lambda hidden: hidden if torch.rand([]) < 0.5 else hidden * 2, "aten::_local_scalar_dense"),
        (lambda hidden: hidden * torch.bincount(hidden.argmax(-1)).sum(), "aten::bincount"),
        (lambda hidden: hidden[hidden > 0].sum(), "aten::index.Tensor|aten::nonzero"),
        (lambda hidden: torch.from_numpy(hidden.detach().numpy()), "numpy"),
    ],
)
def test_what_cannot_be_followed_is_named(operation: Any, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"the step of Plain cannot be followed.*({name})"):
        predict_step(Plain(operation), precision="none", **FIELDS, **BATCH)


def test_an_operation_that_refuses_its_inputs_is_named_and_not_logged() -> None:
    logged: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = logged.append
    logger.addHandler(handler)
    model = Plain(lambda hidden: hidden.to(torch.uint8).clamp_(-1.0, 1.0))
    try:
        with pytest.raises(UnsupportedModelError, match="aten::clamp_"):
            predict_step(model, precision="none", **FIELDS, **BATCH)
    finally:
        logger.removeHandler(handler)
    assert logged == []


class Shared(Plain):
    """Two parameters over one memory, a buffer that is written in pieces, and a cache in a list."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(2, 32, 16)
        self.first.weight, self.third = nn.Parameter(memory[0]), nn.Parameter(memory[1], requires_grad=False)
        self.cache = [{"scale": torch.ones(32)}]

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        pieces = torch.empty(3, 2, 32)
        pieces[:, 0] = x @ self.third.T
        pieces[:, 1] = self.first(x) * self.cache[0]["scale"]
        if (pieces[:, 0].isnan() | torch.ones(3, 32).bool()).all():
            pieces = pieces[..., :16].repeat(1, 1, 2)
        return SimpleNamespace(loss=self.second(pieces.sum(1)).square().mean())


def test_memory_that_is_shared_or_written_in_pieces_counts_once() -> None:
    lora = zoo.lora_config("llama", target_modules=["second"])
    model: Any = get_peft_model(Shared(), lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, batch = torch.optim.SGD(trained, lr=LEARNING_RATE), {"x": torch.zeros(3, 16)}
    with StepTracker(model, optimizer, batch) as tracker:
        model(**batch).loss.backward()
        optimizer.step()
    memory = predict_step(Shared(), precision="none", optimizer="sgd", **FIELDS | {"lora": lora}, **BATCH)
    assert figures(memory) == figures(tracker)


def test_a_forward_that_was_replaced_is_refused() -> None:
    model = Plain()
    forward = model.forward
    model.forward = lambda x: forward(x)
    with pytest.raises(UnsupportedModelError, match="the forward of this Plain"):
        predict_step(model, precision="none", **FIELDS, **BATCH)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a Plain cannot be copied"):
        predict_step(Plain(double), precision="none", **FIELDS, **BATCH)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("inputs", {"inputs": {"x": 5}}),
        ("inputs", {"inputs": {"x": ((3, -1), "float32")}}),
        ("inputs", {"inputs": [1]}),
        ("x", {"inputs": {"x": ((3, 16), "floaty")}}),
        ("batch_size", {"batch_size": 0}),
        ("seq_len", {"seq_len": 1.5}),
        ("kernels", {"kernels": "tpu"}),
        ("optimizer", {"optimizer": "lion"}),
        ("precision", {"precision": "half"}),
        ("lora", {"lora": {"r": 4}}),
        ("dtype", {"dtype": "float16"}),
        ("no_such_field", {"no_such_field": 1}),
        ("no_such_field", {"no_such_field": 1, "precision": "peft"}),
        ("autocast", {"autocast": "int8"}),
    ],
)
def test_a_bad_argument_is_named(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=field):
        predict_step(Plain(), **{"precision": "none"} | FIELDS | BATCH | given)


def test_a_model_without_a_loss_is_refused() -> None:
    model = zoo.load("clip")
    with pytest.raises(ConfigError, match="no loss"):
        predict_step(model, inputs=zoo.inputs("clip", model), lora=zoo.lora_config("clip"), **BATCH)


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ConfigError, match="unheard-of"):
        predict_step(tmp_path, **BATCH)


@pytest.mark.thorough
def test_predictions_in_two_threads_run_one_after_the_other_and_are_those_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: list[int] = []
    most: list[int] = []

    def trace(*args: Any) -> Any:
        running.append(threading.get_ident())
        most.append(len(running))
        try:
            return traced(*args)
        finally:
            running.remove(threading.get_ident())

    traced = predict_module.trace
    monkeypatch.setattr(predict_module, "trace", trace)
    configs = [
        LlamaConfig(
            **{**zoo.ARCHITECTURES["llama"].config, "num_hidden_layers": 1},
            architectures=["LlamaForCausalLM"],
            dtype=dtype,
            initializer_range=0.1,
        )
        for dtype in ("float16", "float32")
    ]

    def predict(config: Any) -> dict[str, Any]:
        lora = zoo.lora_config("llama", target_modules=["q_proj"])
        return figures(predict_step(config, quantization_config=NF4, lora=lora, optimizer="sgd", **BATCH))

    alone = [predict(config) for config in configs]
    found: dict[int, list[Any]] = {0: [], 1: []}

    def run(index: int) -> None:
        found[index].extend(predict(configs[index]) for _ in range(2))

    threads = [threading.Thread(target=run, args=(index,)) for index in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone[0] != alone[1]
    assert found == {0: [alone[0]] * 2, 1: [alone[1]] * 2}
    assert set(most) == {1}
