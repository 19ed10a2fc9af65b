"""The wrapper's life: states, refusals, faults, suspension, what is reported."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LevitConfig, LevitModel, Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

import kbitwrap
from kbitwrap import (
    ConfigError,
    EditError,
    KbitPreparedModel,
    LifecycleState,
    MemoryBudgetError,
    Precision,
    RestoreError,
    StateError,
    UnsupportedModelError,
    build_plan,
    prepared_of,
)
from support import zoo
from support.plain import Shadowed
from support.snapshot import Snapshot
from support.thorough import each_once
from support.training import adapt, is_checkpointing, step

PRECISIONS = list(Precision)
# Suspending takes instance attributes away and puts them back, at the end; each is still compared by itself.
REORDERED = (": attributes",)

pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
]


def test_states_follow_the_life() -> None:
    prepared = KbitPreparedModel(zoo.load("llama"))
    assert prepared.state is LifecycleState.NEW
    assert prepared.prepare() is prepared
    assert prepared.state is LifecycleState.PREPARED
    with prepared.suspended() as model:
        assert model is prepared.model
        assert prepared.state is LifecycleState.SUSPENDED
    assert prepared.state is LifecycleState.PREPARED
    report = prepared.restore()
    assert prepared.state is LifecycleState.RESTORED
    assert prepared.restore() is report
    assert prepared.prepare().state is LifecycleState.PREPARED


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_constructing_and_planning_change_nothing(precision: Precision) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision)
    assert str(prepared.plan)
    assert prepared.model is model
    assert before.diff(Snapshot(model)) == []


@pytest.mark.parametrize(("precision", "name"), each_once(PRECISIONS, ["llama", "opt", "bart", "gemma2"]))
def test_suspended_is_the_original_state_and_ends_as_before(name: str, precision: Precision) -> None:
    model = zoo.load(name, "int8" if name == "opt" else "nf4", torch.float16)
    original = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt(name, model)
    step(name, peft_model)
    names = {fqn for fqn, _ in model.named_modules() if "lora" not in fqn}
    during = Snapshot(model)
    with prepared.suspended():
        inside = {fqn: (p.dtype, p.requires_grad) for fqn, p in model.named_parameters() if "lora" not in fqn}
        assert not any(module.training for module in model.modules())
        assert not any("_kbitwrap" in key for module in model.modules() for key in vars(module))
        assert not any("forward" in vars(module) for fqn, module in model.named_modules() if fqn in names)
    assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []
    assert not prepared.verify()
    prepared.restore()
    restored = {fqn: (p.dtype, p.requires_grad) for fqn, p in model.named_parameters() if "lora" not in fqn}
    assert inside == restored
    peft_model.unload()
    assert original.diff(Snapshot(model), moved=precision.upcasts_all) == []


@pytest.mark.parametrize(("precision", "dropout"), each_once(PRECISIONS, [0.0, 0.2]))
def test_training_with_a_suspended_generate_is_training_without(precision: Precision, dropout: float) -> None:
    losses: dict[bool, list[torch.Tensor]] = {}
    for suspends in (False, True):
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        peft_model = adapt("llama", model, modules_to_save=True, lora_dropout=dropout)
        trainable = [p for p in peft_model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=0.01)
        losses[suspends] = []
        torch.manual_seed(1)
        for seed in range(4):
            peft_model.train()
            loss = peft_model(**zoo.inputs("llama", model, seed=seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[suspends].append(loss.detach())
            if suspends:
                with prepared.suspended():
                    assert {p.dtype for p in trainable if p.dim() == 2 and p.shape[0] > 90} <= {torch.bfloat16}
                    prompt = zoo.inputs("llama", model)["input_ids"][:1, :4]
                    peft_model.generate(input_ids=prompt, max_new_tokens=4, do_sample=True, pad_token_id=0)
        prepared.restore()
    assert all(torch.equal(a, b) for a, b in zip(losses[False], losses[True], strict=True))
    assert losses[True][-1] < losses[True][0]


# ----------------------------------------------------------------------------------------------------
# What modules keep from one forward to the next, in the dtype of the one.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "name"), each_once(PRECISIONS, ["ctrl", "qwen2_vl"]))
def test_a_suspended_forward_leaves_training_as_it_is(name: str, precision: Precision) -> None:
    """CTRL casts its position encodings to the dtype of its input, for good; Qwen2-VL keeps offsets of its input."""
    found = {}
    for suspends in (False, True):
        model = zoo.load(name)
        enable = name != "ctrl"  # which has no checkpointing
        prepared = KbitPreparedModel(model, precision=precision, gradient_checkpointing=enable).prepare()
        peft_model = adapt(name, model)
        prepared.adopt(peft_model)
        first, _ = step(name, peft_model)
        if suspends:
            with prepared.suspended(), torch.no_grad():
                peft_model(**zoo.inputs(name, model, seed=1))
        found[suspends] = step(name, peft_model)
    (loss, gradients), (suspended_loss, suspended_gradients) = found.values()
    assert not torch.equal(loss, first)
    assert torch.equal(suspended_loss, loss)
    assert [fqn for fqn, gradient in gradients.items() if not torch.equal(suspended_gradients[fqn], gradient)] == []


def conformer() -> Wav2Vec2ConformerModel:
    """It keeps the rotary embeddings of the last length, in the last dtype, and computes them anew for another length.

    Not quantized: on a CPU a batch norm with statistics in half refuses float32, under PEFT's function as well.
    """
    torch.manual_seed(0)
    config = Wav2Vec2ConformerConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_kernel=(10, 4),
        conv_stride=(5, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        position_embeddings_type="rotary",
        apply_spec_augment=False,
    )
    model = Wav2Vec2ConformerModel(config).bfloat16().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.float()
    return model


@pytest.mark.filterwarnings("ignore:.*has neither a quantization attribute:UserWarning")
@pytest.mark.parametrize("has_run", [False, True], ids=["fresh", "has-run"])
@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_rotary_embeddings_that_are_kept(precision: str, has_run: bool) -> None:
    waveforms = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def run(model: Wav2Vec2ConformerModel) -> torch.Tensor:
        return model(waveforms.to(model.dtype)).last_hidden_state

    expected = run(conformer())
    model = conformer()
    embeddings = vars(model.encoder.embed_positions)
    kept = embeddings["cached_rotary_positional_embedding"]
    assert kept is None
    if has_run:
        assert torch.equal(run(model), expected)
        kept = embeddings["cached_rotary_positional_embedding"]
        assert kept.dtype == torch.bfloat16
        model.encoder.embed_positions.cached_sequence_length = 1  # so that the next forward computes them anew
    with KbitPreparedModel(model, precision=precision) as prepared:
        during = run(model)
        while_prepared = dict(embeddings)
        with prepared.suspended():
            assert embeddings["cached_rotary_positional_embedding"] is kept
            assert embeddings["cached_sequence_length"] == (1 if has_run else None)
            assert torch.equal(run(model), expected)
        assert embeddings == while_prepared
        assert torch.equal(run(model), during)
    assert embeddings["cached_rotary_positional_embedding"] is kept
    assert embeddings["cached_sequence_length"] == (1 if has_run else None)
    assert torch.equal(run(model), expected)


def test_rope_that_grew_with_a_long_input_is_what_it_was() -> None:
    model = zoo.load("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    before = Snapshot(model)
    with KbitPreparedModel(model, precision="compute") as prepared:
        during = Snapshot(model)
        long = torch.arange(model.config.max_position_embeddings + 8).view(1, -1) % 64
        with prepared.suspended(), torch.no_grad():
            model(input_ids=long)
            assert any("inv_freq" in line or "_buffers" in line for line in before.diff(Snapshot(model)))
        assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []
        model(input_ids=long)
    assert before.diff(Snapshot(model), moved=True) == []


class Keeping(nn.Module):
    """Keeps a table of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("positions", torch.arange(2.0), persistent=False)
        self.register_buffer("statistics", torch.zeros(2))
        self.seen: Any = None
        self.length = 0
        self.title = "before"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.positions, self.seen, self.length = self.positions.to(hidden.dtype), hidden.detach(), len(hidden)
        self.statistics = self.statistics + 1
        return hidden * self.scale * self.positions


class Caching(nn.Module):
    """Makes, in its first forward, a buffer, a tensor, and a flag that tells of it."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.persistent = persistent

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "has_scales"):
            self.register_buffer("table", self.scale.detach() * 2, persistent=self.persistent)
            self.scales, self.has_scales = self.scale.detach() + 1, True
        return hidden * self.table * self.scales


class Moving(nn.Module):
    """Moves a buffer, in its first forward, to a plain attribute in the dtype of the input."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("table", torch.ones(2), persistent=persistent)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if "table" in self._buffers:
            table = self.table.to(hidden.dtype)
            del self.table
            self.table = table
        return hidden * self.scale * self.table


class Sharing(nn.Module):
    """Keeps tables in a dictionary that it shares, and in one that it makes in its first forward."""

    def __init__(self, tables: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.tables = tables
        self.pair: Any = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.pair is None:
            self.pair, self.lists = [self.scale.detach(), self.scale.detach()], {"length": [self.scale.detach()]}
        return hidden * self.tables.setdefault(len(hidden), self.scale.detach() + 1) * self.pair[0]


class Repacking(nn.Module):
    """Keeps codes in a buffer of the checkpoint, which it repacks in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("codes", torch.tensor([1, 2], dtype=torch.int32))
        self.mode: str | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.mode is None:
            self.codes, self.mode = self.codes.to(torch.uint8), "packed"
        return hidden * self.codes * self.scale


@pytest.mark.filterwarnings("ignore:.*has neither a quantization attribute:UserWarning")
class TestCaches:
    def test_a_persistent_buffer_is_trained_and_stays(self) -> None:
        model = nn.Sequential(Keeping())
        positions = model[0].positions
        with KbitPreparedModel(model, precision="full"):
            model(torch.ones(2, dtype=torch.float64))
        assert model[0].positions is positions
        assert (model[0].seen, model[0].length, model[0].statistics.tolist()) == (None, 0, [1, 1])

    def test_what_others_set_goes_back_and_is_named_where_it_is_a_plain_value_and_stays_where_not(self) -> None:
        model, table = nn.Sequential(Keeping(), nn.Dropout(0.1)), object()
        prepared = KbitPreparedModel(model, precision="full").prepare()
        model[0].title, model[0].seen, model[1].p, model[1].note = "another", table, 0.0, "new"
        report = prepared.restore()
        assert (model[0].title, model[0].seen, model[1].p, model[1].note) == ("before", table, 0.1, "new")
        assert report.put_back == ("0.title", "1.p")
        assert str(report) == "restored\nput back: 0.title, 1.p"

    @pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
    @pytest.mark.parametrize("is_suspended", [False, True], ids=["", "suspended"])
    def test_names_that_a_forward_makes_are_absent_again_and_are_named(
        self, is_suspended: bool, persistent: bool
    ) -> None:
        torch.manual_seed(0)
        model, inputs = nn.Sequential(Caching(persistent)), torch.ones(1, 2, dtype=torch.bfloat16)
        before = Snapshot(model)
        prepared = KbitPreparedModel(model, precision="full").prepare()
        if is_suspended:
            during = Snapshot(model)
            with prepared.suspended():
                model(inputs)
                assert model[0].table.dtype == torch.bfloat16
            assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []
        model(inputs.float())
        assert model[0].table.dtype == torch.float32
        report = prepared.restore()
        assert before.diff(Snapshot(model), moved=True) == []
        assert set(report.put_back) == {"0.table", "0.scales", "0.has_scales"}
        assert "0.table" not in model._non_persistent_buffers_set

    @pytest.mark.parametrize("made", [Caching(), Caching(True)], ids=["", "persistent"])
    def test_what_a_forward_made_while_prepared_is_there_after_a_suspension(self, made: nn.Module) -> None:
        model, inputs = nn.Sequential(copy.deepcopy(made)), torch.ones(1, 2)
        with KbitPreparedModel(model, precision="full") as prepared:
            output, state = model(inputs), list(model.state_dict())
            with prepared.suspended():
                assert "table" not in model[0]._buffers
            assert torch.equal(model(inputs), output)
            assert list(model.state_dict()) == state

    @pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
    def test_a_buffer_that_a_forward_deletes_is_there_again(self, persistent: bool) -> None:
        model, inputs = nn.Sequential(Moving(persistent)), torch.ones(1, 2, dtype=torch.bfloat16)
        before = Snapshot(model)
        with KbitPreparedModel(model, precision="full") as prepared:
            model(inputs.float())
            with prepared.suspended():
                assert model(inputs).dtype == torch.bfloat16
            model(inputs.float())
        assert before.diff(Snapshot(model), moved=True, ignore=REORDERED) == []

    def test_tables_in_lists_and_dictionaries_are_those_that_were_there(self) -> None:
        tables: dict[int, torch.Tensor] = {9: torch.ones(2)}
        model, inputs = nn.Sequential(Sharing(tables), Sharing(tables)), torch.ones(1, 2, dtype=torch.bfloat16)
        before = Snapshot(model)
        prepared = KbitPreparedModel(model, precision="full").prepare()
        output = model(inputs.float())
        with prepared.suspended():
            assert model(inputs).dtype == torch.bfloat16
        assert tables[1].dtype == torch.float32
        assert torch.equal(model(inputs.float()), output)
        report = prepared.restore()
        assert before.diff(Snapshot(model), moved=True) == []
        assert model[0].tables is model[1].tables is tables
        assert set(report.put_back) == {"0.tables", "0.pair", "0.lists", "1.pair", "1.lists"}

    def test_the_biases_that_levit_keeps_in_a_dictionary_are_those_of_a_model_never_prepared(self) -> None:
        sizes = {"hidden_sizes": [16, 32, 48], "num_attention_heads": [1, 2, 2], "key_dim": [8, 8, 8]}
        config = LevitConfig(image_size=64, depths=[1, 1, 1], patch_size=16, **sizes)
        torch.manual_seed(0)
        model, images = LevitModel(config).bfloat16().eval(), torch.ones(1, 3, 64, 64)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()
        with torch.no_grad():
            expected = copy.deepcopy(model)(images.bfloat16())[0]
            options = {"gradient_checkpointing": False, "input_require_grads": False}
            with KbitPreparedModel(model, precision="full", **options) as prepared:
                model(images)
                with prepared.suspended():
                    assert torch.equal(model(images.bfloat16())[0], expected)
                model(images)
            assert torch.equal(model(images.bfloat16())[0], expected)

    def test_a_weight_that_old_weight_norm_computes_is_what_it_was(self) -> None:
        with pytest.warns(FutureWarning, match="deprecated"):
            model = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2, dtype=torch.bfloat16)))
        weight = model[0].weight
        with KbitPreparedModel(model, precision="full"):
            model(torch.ones(1, 2))
            assert model[0].weight.dtype == torch.float32
        assert model[0].weight is weight

    def test_a_buffer_of_the_checkpoint_that_a_layer_repacks_is_what_it_was_and_is_exported_so(
        self, tmp_path: Path
    ) -> None:
        model = nn.Sequential(Repacking())
        codes = model[0].codes
        prepared = KbitPreparedModel(model, precision="norms").prepare()
        expected = prepared.manifest()
        model(torch.ones(2))
        assert model[0].codes.dtype == torch.uint8
        assert not expected.diff(prepared.manifest())
        prepared.export(tmp_path / "exported")
        assert torch.equal(load_file(tmp_path / "exported" / "model.safetensors")["0.codes"], codes)
        assert (model[0].codes.dtype, model[0].mode) == (torch.uint8, "packed")
        assert prepared.restore().put_back == ("0.mode", "0.codes")
        assert model[0].codes is codes

    def test_a_module_whose_weight_was_resized_keeps_what_says_so(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16))
        with KbitPreparedModel(model, precision="none"):
            model[0].weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
            model[0].out_features = 3
        assert model[0].out_features == 3

    def test_a_moved_tensor_stays_on_its_device(self) -> None:
        model = nn.Sequential(Keeping())
        with KbitPreparedModel(model, precision="full"):
            model[0].positions = model[0].positions.to("meta")
        assert model[0].positions.is_meta

    def test_a_tensor_that_was_taken_away_is_back(self) -> None:
        model = nn.Sequential(Keeping())
        seen = model[0].seen = torch.ones(1)
        prepared = KbitPreparedModel(model, precision="full").prepare()
        del model[0].seen
        prepared.restore()
        assert model[0].seen is seen

    def test_a_copied_module_gets_the_recorded_tensor_too(self) -> None:
        model = nn.Sequential(Keeping())
        prepared = KbitPreparedModel(model, precision="full").prepare()
        model[0] = copy.deepcopy(model[0])
        model(torch.ones(2))
        prepared.restore()
        assert (model[0].seen, model[0].length) == (None, 0)


def test_an_exception_in_the_body_passes_and_the_model_is_restored() -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    error = ValueError("from the body")
    with pytest.raises(ValueError, match="from the body") as caught, KbitPreparedModel(model, precision="full"):
        raise error
    assert caught.value is error
    assert before.diff(Snapshot(model), moved=True) == []


def test_a_failing_restore_does_not_hide_the_body() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    prepared._preparation.journal.changes[2].undo = None  # type: ignore[method-assign]
    error = ValueError("from the body")
    assert prepared.__exit__(ValueError, error, None) is None  # type: ignore[func-returns-value]
    with pytest.raises(RestoreError, match="not callable"):
        prepared.__exit__(None, None, None)


def test_suspended_resumes_after_an_exception() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    during = Snapshot(model)
    with pytest.raises(ValueError, match="inside"), prepared.suspended():
        raise ValueError("inside")
    assert prepared.state is LifecycleState.PREPARED
    assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []


def test_no_bar_is_made_where_none_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of tqdm starts a thread that stays, even a bar that is not shown."""
    monkeypatch.setattr("kbitwrap.preparation.process.tqdm", None)
    model = zoo.load("llama")
    KbitPreparedModel(model).prepare().restore()
    with pytest.raises(EditError, match="NoneType"):
        KbitPreparedModel(model, progress=True).prepare()


class FaultError(Exception):
    """Raised on purpose."""


@pytest.mark.parametrize(("precision", "kind"), each_once(PRECISIONS, [FaultError, KeyboardInterrupt, SystemExit]))
def test_a_fault_anywhere_in_prepare_leaves_the_model_as_it_was(
    precision: Precision, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("gemma2")
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision, progress=True)
    num_edits = len(prepared.plan.edits) + 1
    for position in range(num_edits):
        for phase in ("capture", "apply"):
            count = 0

            def faulty(edits: object, position: int = position, phase: str = phase) -> object:
                nonlocal count
                for edit in edits:  # type: ignore[attr-defined]
                    if count == position:
                        call = getattr(type(edit), phase)

                        def fail(self: object, argument: object, call: object = call) -> object:
                            if self is edit:  # noqa: B023 - the generator waits here while it is called
                                if phase == "apply":
                                    call(self, argument)  # type: ignore[operator]
                                raise kind("a fault")
                            return call(self, argument)  # type: ignore[operator]

                        with monkeypatch.context() as patch:
                            patch.setattr(type(edit), phase, fail)
                            yield edit
                    else:
                        yield edit
                    count += 1

            monkeypatch.setattr("kbitwrap.preparation.process.tqdm", lambda edits, **_: faulty(edits))
            expected = EditError if kind is FaultError else kind
            with pytest.raises(expected) as caught:
                prepared.prepare()
            if kind is FaultError:
                assert isinstance(caught.value.__cause__, FaultError)
            assert prepared.state is LifecycleState.NEW
            assert prepared_of(model) is None
            assert before.diff(Snapshot(model), moved=True) == []


def test_a_fault_inside_transformers_enabling_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    whole = type(model).enable_input_require_grads

    def fails_late(self: nn.Module) -> None:
        whole(self)
        raise FaultError("after the hooks were installed")

    monkeypatch.setattr(type(model), "enable_input_require_grads", fails_late)
    with pytest.raises(EditError, match="as it was"):
        KbitPreparedModel(model, precision="full").prepare()
    assert before.diff(Snapshot(model), moved=True) == []


class TestBadInput:
    def test_an_argument_that_is_not_a_module_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"torch\.nn\.Module"):
            KbitPreparedModel("meta-llama/Llama-3-8B")  # type: ignore[arg-type]

    def test_a_model_with_no_parameters_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="no parameters"):
            KbitPreparedModel(nn.ReLU())

    def test_meta(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
        with pytest.raises(UnsupportedModelError, match="meta device") as caught:
            KbitPreparedModel(model)
        assert caught.value.fqn == "1.weight"

    @pytest.mark.parametrize("what", ["model", "part", "parent", "peft"])
    def test_prepared_already(self, what: str) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model).prepare()
        during = Snapshot(model)
        candidate = {
            "model": lambda: model,
            "part": lambda: model.model,
            "parent": lambda: nn.ModuleDict({"inner": model}),
            "peft": lambda: adapt("llama", model),
        }[what]()
        with pytest.raises(StateError, match="prepared already") as caught:
            KbitPreparedModel(candidate)
        assert caught.value.state is LifecycleState.PREPARED
        if what != "peft":
            assert during.diff(Snapshot(model)) == []
        assert prepared_of(candidate) is prepared

    def test_a_second_wrapper_made_before(self) -> None:
        model = zoo.load("llama")
        first, second = KbitPreparedModel(model), KbitPreparedModel(model)
        with first:
            with pytest.raises(StateError, match="prepared already"):
                second.prepare()
            with first.suspended(), pytest.raises(StateError, match="prepared already"):
                second.prepare()
        second.prepare()

    def test_preparing_twice(self) -> None:
        with KbitPreparedModel(zoo.load("llama")) as prepared, pytest.raises(StateError, match="restore"):
            prepared.prepare()

    @pytest.mark.parametrize("call", ["restore", "verify"])
    def test_before_prepare(self, call: str) -> None:
        with pytest.raises(StateError, match="prepare") as caught:
            getattr(KbitPreparedModel(zoo.load("llama")), call)()
        assert caught.value.state is LifecycleState.NEW

    def test_suspended_before_prepare_and_twice(self) -> None:
        prepared = KbitPreparedModel(zoo.load("llama"))
        with pytest.raises(StateError, match="prepare"), prepared.suspended():
            pass
        prepared.prepare()
        with prepared.suspended():
            with pytest.raises(StateError, match="leave suspended"), prepared.suspended():
                pass
            with pytest.raises(StateError, match="leave suspended"):
                prepared.restore()
        prepared.restore()
        with pytest.raises(StateError, match="restored"), prepared.suspended():
            pass

    def test_unknown_precision_and_field(self) -> None:
        model = zoo.load("llama")
        with pytest.raises(ConfigError, match="'norms'"):
            KbitPreparedModel(model, precision="half")
        with pytest.raises(ConfigError, match="did you mean 'precision'"):
            KbitPreparedModel(model, precison="full")

    @pytest.mark.parametrize("name", ["ctrl", "convnext"])
    def test_a_model_that_cannot_be_checkpointed(self, name: str) -> None:
        model = zoo.load(name)
        before = Snapshot(model)
        with pytest.raises(UnsupportedModelError, match="gradient_checkpointing=False"):
            KbitPreparedModel(model, precision="full")
        assert before.diff(Snapshot(model)) == []

    def test_a_plan_over_the_budget_names_the_precisions_that_fit(self) -> None:
        model = zoo.load("llama")
        needed = build_plan(model, precision="full").peak_bytes
        with pytest.raises(MemoryBudgetError, match="norms") as caught:
            KbitPreparedModel(model, precision="full", memory_budget=needed - 1)
        assert caught.value.plan.peak_bytes == needed
        assert caught.value.budget_bytes == needed - 1
        assert set(caught.value.fitting) == {"compute", "norms", "adapted", "none"}
        exact = build_plan(model, precision="compute").peak_bytes
        with pytest.raises(MemoryBudgetError) as caught:
            KbitPreparedModel(model, precision="full", memory_budget=exact)
        assert 0 < exact < needed
        assert "compute" in caught.value.fitting
        assert KbitPreparedModel(model, precision="full", memory_budget=needed).plan.peak_bytes == needed

    def test_trained_policies(self) -> None:
        with KbitPreparedModel(zoo.load("llama"), precision="full") as prepared:
            with pytest.raises(ConfigError, match="'keep', 'discard' or 'error'"):
                prepared.restore("round")  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="keep_originals"):
                prepared.restore("discard")


def test_an_unquantized_model_is_frozen_and_cast_with_a_warning() -> None:
    model = zoo.load("llama", None)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision="full")
    with pytest.warns(UserWarning, match="not checkpointed"):
        prepared.prepare()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert not is_checkpointing(model)
    prepared.restore()
    assert before.diff(Snapshot(model), moved=True) == []


def test_bitsandbytes_layers_without_an_attribute_are_recognised() -> None:
    model = zoo.load("llama")
    for name in ("is_loaded_in_4bit", "quantization_method"):
        delattr(model, name)
    assert KbitPreparedModel(model).plan.quantization == "bitsandbytes_4bit"
    with KbitPreparedModel(model):
        assert is_checkpointing(model)


@pytest.mark.parametrize(
    ("method", "precision"), each_once(["gptq", "aqlm", "eetq", "hqq", "torchao", "awq", "fp8"], PRECISIONS)
)
def test_methods_that_manage_their_own_precision_are_never_cast(method: str, precision: Precision) -> None:
    model = zoo.load("llama", None)  # stands in for layers whose kernels do not run here; only detection is tested
    model.quantization_method = method
    dtypes = {fqn: p.dtype for fqn, p in model.named_parameters()}
    with KbitPreparedModel(model, precision=precision) as prepared:
        assert prepared.plan.quantization == method
        assert {fqn: p.dtype for fqn, p in model.named_parameters()} == dtypes
        assert not any("forward" in vars(module) for module in model.modules())
        assert is_checkpointing(model)
        assert not any(p.requires_grad for p in model.parameters())


def test_quantized_bytes_in_a_half_storage_are_never_cast() -> None:
    model = zoo.load("llama", None)
    path = zoo.checkpoint("llama")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.bfloat16)
    before = Snapshot(model)
    packed = {fqn: p.data_ptr() for fqn, p in model.named_parameters() if type(p).__name__ == "Params4bit"}
    assert packed
    with KbitPreparedModel(model, precision="full"):
        live = dict(model.named_parameters())
        assert all(live[fqn].dtype == torch.bfloat16 and live[fqn].data_ptr() == packed[fqn] for fqn in packed)
    assert before.diff(Snapshot(model), moved=True) == []


class TestTrained:
    """A base parameter that the caller unfroze and trained while it was stored in float32."""

    def prepared(self, **fields: object) -> tuple[KbitPreparedModel, nn.Parameter, torch.Tensor]:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full", **fields).prepare()
        weight = model.model.norm.weight
        original = weight.detach().bfloat16()
        weight.requires_grad_(True)
        with torch.no_grad():
            weight.add_(0.01)
        return prepared, weight, original

    def test_keep_rounds(self) -> None:
        prepared, weight, _ = self.prepared()
        trained = weight.detach().clone()
        report = prepared.restore()
        assert report.trained == ("model.norm.weight",)
        assert torch.equal(weight, trained.bfloat16())

    def test_discard_puts_the_bits_back(self) -> None:
        prepared, weight, original = self.prepared(keep_originals=True)
        assert prepared.restore("discard").trained == ("model.norm.weight",)
        assert torch.equal(weight, original)

    def test_the_error_policy_names_all_trained_parameters_and_restores_the_rest(self) -> None:
        prepared, weight, _ = self.prepared()
        trained = weight.detach().clone()
        with pytest.raises(RestoreError, match=r"model\.norm\.weight") as caught:
            prepared.restore("error")
        assert set(caught.value.failures) == {"model.norm.weight"}
        others = {p.dtype for fqn, p in prepared.model.named_parameters() if fqn != "model.norm.weight"}
        assert torch.float32 not in others
        assert torch.equal(weight, trained)
        assert prepared.restore("keep").trained == ("model.norm.weight",)
        assert torch.equal(weight, trained.bfloat16())

    def test_error_without_training_is_a_plain_restore(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        prepared = KbitPreparedModel(model, precision="full").prepare()
        assert prepared.restore("error").trained == ()
        assert before.diff(Snapshot(model), moved=True) == []


class TestOthers:
    """What others add or replace is left alone and reported."""

    def test_a_merge(self) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        peft_model = adapt("llama", model, modules_to_save=True)
        step("llama", peft_model)
        merged = peft_model.merge_and_unload()
        weight = merged.model.layers[0].self_attn.q_proj.weight
        head = merged.lm_head.weight
        report = prepared.restore()
        assert merged.model.layers[0].self_attn.q_proj.weight is weight
        assert "model.layers.0.self_attn.q_proj.weight" in report.replaced
        assert merged.lm_head.weight is head
        assert head.dtype == torch.bfloat16
        assert "lm_head.weight" in report.replaced
        assert report.trained == ("lm_head.weight",)
        assert torch.float32 not in {p.dtype for p in merged.parameters()}
        with torch.no_grad():
            assert not merged(**zoo.inputs("llama", model)).logits.requires_grad

    def test_hooks_and_adapters(self) -> None:
        model = zoo.load("llama")

        def was_there(module: nn.Module, args: object, output: object) -> None: ...

        model.lm_head.register_forward_hook(was_there)
        prepared = KbitPreparedModel(model).prepare()
        peft_model = adapt("llama", model)

        def watch(module: nn.Module, args: object, output: object) -> None: ...

        handle = model.lm_head.register_forward_hook(watch)
        report = prepared.restore()
        assert handle.id in model.lm_head._forward_hooks
        assert [line for line in report.foreign if "hook" in line] == ["lm_head: forward hook watch"]
        adapters = {fqn for fqn, _ in model.named_parameters() if "lora_" in fqn}
        assert adapters
        assert adapters <= set(report.foreign)
        assert sum("lora_" in fqn for fqn, _ in peft_model.named_parameters()) == len(adapters)

    @pytest.mark.parametrize("precision", ["full", "norms"])
    def test_resized_embeddings(self, precision: str) -> None:
        model, size = zoo.load("llama"), zoo.VOCAB_SIZE + 5
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        model.resize_token_embeddings(size, mean_resizing=False)
        embeddings = model.model.embed_tokens._parameters["weight"], model.lm_head._parameters["weight"]
        with prepared.suspended():
            assert all(weight.requires_grad for weight in embeddings)
        assert not any(weight.requires_grad for weight in embeddings)
        report = prepared.restore()
        assert [(weight.dtype, weight.requires_grad) for weight in embeddings] == [(torch.bfloat16, True)] * 2
        assert (model.vocab_size, model.config.vocab_size, model.lm_head.out_features) == (size, size, size)
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(report.replaced)
        assert not report.trained
        assert not report.put_back

    @pytest.mark.parametrize("precision", ["full", "compute", "norms"])
    @pytest.mark.parametrize("by", [5, -5])
    def test_embeddings_that_were_resized_and_resized_back_get_dtypes_and_flags(self, by: int, precision: str) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        for size in (zoo.VOCAB_SIZE + by, zoo.VOCAB_SIZE):
            model.resize_token_embeddings(size, mean_resizing=False)
        embeddings = model.model.embed_tokens._parameters["weight"], model.lm_head._parameters["weight"]
        prepared_as = [(weight.dtype, weight.requires_grad) for weight in embeddings]
        with prepared.suspended():
            assert [(weight.dtype, weight.requires_grad) for weight in embeddings] == [(torch.bfloat16, True)] * 2
        assert [(weight.dtype, weight.requires_grad) for weight in embeddings] == prepared_as
        report = prepared.restore()
        assert [(weight.dtype, weight.requires_grad) for weight in embeddings] == [(torch.bfloat16, True)] * 2
        assert "lm_head.weight" in report.replaced

    def test_nothing_is_said_of_what_others_made_trainable(self) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model).prepare()
        adapt("llama", model)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepared.restore()
            step("llama", model)

    def test_user_settings_from_before_are_settings_after(self) -> None:
        model = zoo.load("llama")
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True, "preserve_rng_state": False})
        model.model.layers[0].gradient_checkpointing = False
        model.model.norm.weight.requires_grad_(False)
        model.train()
        before = Snapshot(model)
        for kwargs in ({"use_reentrant": False}, {"use_reentrant": True}):
            with KbitPreparedModel(model, precision="full", gradient_checkpointing_kwargs=kwargs) as prepared:
                assert not prepared.verify()
            assert before.diff(Snapshot(model), moved=True) == []


def test_verify_names_what_differs() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, gradient_checkpointing_kwargs={"use_reentrant": True}).prepare()
    assert not prepared.verify()
    model.model.norm.weight.requires_grad_(True)
    model.model.layers[1].gradient_checkpointing = False
    model.lm_head.weight.data = model.lm_head.weight.data.float()
    shaped = model.model.layers[1].input_layernorm.weight
    shaped.data = shaped.data.view(1, -1)
    del model.model.layers[0].input_layernorm.forward
    model.disable_input_require_grads()
    model.model._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
    diff = prepared.verify()
    assert {fqn: set(rows) for fqn, rows in diff.differences.items()} == {
        "model.norm.weight": {"requires_grad"},
        "lm_head.weight": {"dtype"},
        "model.layers.1.input_layernorm.weight": {"shape"},
        "model.embed_tokens.weight": {"writes", "value"},
        "model": {"_gradient_checkpointing_func"},
        "model.layers.1": {"gradient_checkpointing"},
        "model.layers.0.input_layernorm": {"forward"},
        "model.embed_tokens": {"input_gradient_hooks"},
    }
    assert "lm_head.weight: dtype: expected torch.bfloat16, found torch.float32" in str(diff)


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute")
def test_verify_names_a_tensor_below_one_that_only_looks_like_a_wrapper() -> None:
    model = Shadowed()
    with KbitPreparedModel(model, precision="full") as prepared:
        assert not prepared.verify()
        for fqn, linear in (("inner.weight", model.inner), ("inner.base_layer.weight", model.inner.base_layer)):
            weight = linear.weight
            weight.requires_grad_(True)
            assert {name: set(rows) for name, rows in prepared.verify().differences.items()} == {fqn: {"requires_grad"}}
            weight.requires_grad_(False)
            linear.weight = nn.Parameter(weight.detach() * 2, requires_grad=False)
            assert "parameter" in prepared.verify().differences[fqn]
            linear.weight = weight
            assert not prepared.verify()
        report = prepared.restore()
    assert (report.replaced, report.foreign) == ((), ())
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_parameter_objects_stay_the_same() -> None:
    model = zoo.load("gemma2")
    ids = {fqn: id(p) for fqn, p in model.named_parameters(remove_duplicate=False)}

    def live() -> dict[str, int]:
        return {fqn: id(p) for fqn, p in model.named_parameters(remove_duplicate=False)}

    with KbitPreparedModel(model, precision="full") as prepared:
        assert live() == ids
        with prepared.suspended():
            assert live() == ids
        assert live() == ids
    assert live() == ids


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute")
def test_two_models_may_share_a_module_without_parameters() -> None:
    """OpenAI GPT's activation functions are the library's, one for all models."""
    shared = nn.ReLU()
    first, second = (nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), shared) for _ in range(2))
    with KbitPreparedModel(first, precision="full") as prepared:
        assert prepared_of(second) is None
        with KbitPreparedModel(second, precision="full") as other:
            assert prepared_of(second) is other
            assert prepared_of(first) is prepared_of(first[0]) is prepared
            assert prepared_of(nn.Sequential(first)) is prepared
    assert {p.dtype for model in (first, second) for p in model.parameters()} == {torch.bfloat16}


class TestLifetime:
    def test_the_record_lives_as_long_as_the_model(self) -> None:
        model = zoo.load("llama")
        KbitPreparedModel(model).prepare()
        gc.collect()
        assert prepared_of(model) is not None
        assert prepared_of(model).restore().trained == ()  # type: ignore[union-attr]

    def test_a_prepared_model_can_be_collected(self) -> None:
        model = zoo.load("llama")
        KbitPreparedModel(model, precision="full").prepare()
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None

    def test_a_deep_copy_is_another_model(self) -> None:
        model = zoo.load("llama")
        with KbitPreparedModel(model, precision="full") as prepared:
            other = copy.deepcopy(model)
            assert prepared_of(other) is None
            assert torch.equal(other(**zoo.inputs("llama", other)).loss, model(**zoo.inputs("llama", model)).loss)
        references = weakref.ref(model), weakref.ref(prepared)
        del model, prepared
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    def test_what_a_merge_replaces_is_freed(self) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        weight = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
        peft_model = adapt("llama", model)
        peft_model.merge_and_unload()
        del peft_model
        gc.collect()
        assert weight() is None
        assert "model.layers.0.self_attn.q_proj.weight" in prepared.restore().replaced


class TestOddMoments:
    """Found by trying to break it."""

    @pytest.mark.parametrize("precision", PRECISIONS, ids=str)
    def test_inside_inference_mode(self, precision: Precision) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        with torch.inference_mode():
            prepared = KbitPreparedModel(model, precision=precision).prepare()
        peft_model = adapt("llama", model, modules_to_save=True)
        step("llama", peft_model)
        with torch.inference_mode(), prepared.suspended():
            peft_model(**zoo.inputs("llama", model))
        step("llama", peft_model)
        with torch.inference_mode():
            prepared.restore()
        assert not any(p.is_inference() for p in peft_model.parameters())
        head = model.lm_head.original_module
        peft_model.unload()
        model.lm_head = head
        assert before.diff(Snapshot(model), moved=True) == []

    @pytest.mark.parametrize("where", ["empty_cache", "PreparedState"])
    @pytest.mark.parametrize("kind", [FaultError, KeyboardInterrupt])
    def test_a_fault_after_the_last_edit(
        self, where: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)

        def fail(*_: object) -> None:
            raise kind("late")

        monkeypatch.setattr(f"kbitwrap.preparation.preparation.{where}", fail)
        with pytest.raises(EditError if kind is FaultError else kind):
            KbitPreparedModel(model, precision="full").prepare()
        assert before.diff(Snapshot(model), moved=True) == []
        assert prepared_of(model) is None

    def test_leaving_the_block_while_suspended(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        state = torch.get_rng_state()

        def stream() -> object:
            with prepared.suspended():
                yield 1
                yield 2

        with KbitPreparedModel(model, precision="full") as prepared:
            generator = stream()
            next(generator)  # type: ignore[call-overload]
        assert prepared.state is LifecycleState.RESTORED
        torch.manual_seed(7)
        drawn = torch.get_rng_state()
        del generator
        gc.collect()
        assert prepared.state is LifecycleState.RESTORED
        assert torch.equal(torch.get_rng_state(), drawn)
        torch.set_rng_state(state)
        assert before.diff(Snapshot(model), moved=True) == []

    def test_an_interrupt_while_resuming_resumes_the_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        during = Snapshot(model)
        change = prepared._preparation.journal.changes[4]
        whole, is_interrupting = change.now, [True]

        def now(view: object) -> Any:
            way = whole(view)
            back = way.undo

            def interrupted(view: object) -> None:
                if is_interrupting:
                    raise KeyboardInterrupt
                back(view)

            way.undo = interrupted
            return way

        monkeypatch.setattr(change, "now", now)
        with pytest.raises(KeyboardInterrupt), prepared.suspended():
            pass
        monkeypatch.undo()
        assert prepared.state is LifecycleState.SUSPENDED
        assert prepared._suspension.changes[-1].undo.__name__ == "interrupted"  # the first to be undone again
        is_interrupting.clear()
        assert prepared.resume()
        assert prepared.state is LifecycleState.PREPARED
        assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []

    def test_a_comparison_that_fails_while_suspending_suspends_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        during = Snapshot(model)

        def fail(*_: object, **__: object) -> None:
            raise FaultError("out of memory")

        monkeypatch.setattr("kbitwrap.edits.storage.differ", fail)
        for suspend in (prepared.suspend, lambda: prepared.suspended().__enter__()):
            with pytest.raises(FaultError, match="out of memory"):
                suspend()
            assert prepared.state is LifecycleState.PREPARED
            assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []

    def test_a_failed_resume_can_be_repeated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        during = Snapshot(model)
        to = torch.Tensor.to

        def fail(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args == (torch.float32,) and self.shape == model.lm_head.weight.shape:
                raise torch.OutOfMemoryError("no room")
            return to(self, *args, **kwargs)

        prepared.suspend()
        monkeypatch.setattr(torch.Tensor, "to", fail)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                prepared.resume()
            assert prepared.state is LifecycleState.SUSPENDED
        monkeypatch.undo()
        assert prepared.resume()
        assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []

    def test_a_suspended_model_holds_its_wrapper(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        KbitPreparedModel(model, precision="full").prepare().suspend()
        gc.collect()
        prepared = prepared_of(model)
        assert prepared is not None
        assert prepared.resume()
        prepared.restore()
        assert before.diff(Snapshot(model), moved=True) == []

    def test_suspending_without_a_block(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        prepared = KbitPreparedModel(model, precision="full")
        assert not prepared.resume()
        with pytest.raises(StateError, match="prepare"):
            prepared.suspend()
        with prepared:
            during = Snapshot(model)
            torch.manual_seed(3)
            state = torch.get_rng_state()
            resume = prepared.suspend()
            assert prepared.state is LifecycleState.SUSPENDED
            held = (": _kbitwrap_prepared",)  # nothing else may hold the wrapper
            assert before.diff(Snapshot(model), moved=True, ignore=(*REORDERED, *held)) == []
            with pytest.raises(StateError, match=r"resume\(\) it, or leave suspended"):
                prepared.suspend()
            torch.rand(3)
            assert resume()
            assert not resume()
            assert torch.equal(torch.get_rng_state(), state)
            assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []
            with prepared.suspended():
                assert not resume()  # it ends its own suspension alone
                assert prepared.state is LifecycleState.SUSPENDED
                assert prepared.resume()  # the end of the block then changes nothing
                assert prepared.state is LifecycleState.PREPARED
                torch.rand(3)
                drawn = torch.get_rng_state()
            assert torch.equal(torch.get_rng_state(), drawn)
            prepared.suspend()
        assert prepared.state is LifecycleState.RESTORED
        assert before.diff(Snapshot(model), moved=True) == []

    def test_adapters_from_before_are_never_touched(self) -> None:
        model = zoo.load("llama")
        peft_model = adapt("llama", model, modules_to_save=True)
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float() + 1e-4
        copies = {fqn: p.detach().clone() for fqn, p in peft_model.named_parameters() if p.requires_grad}
        prepared = KbitPreparedModel(peft_model, precision="full").prepare()
        with prepared.suspended():
            live = dict(peft_model.named_parameters())
            assert all(torch.equal(live[fqn], value) for fqn, value in copies.items())
        report = prepared.restore()
        assert (report.trained, report.replaced, report.foreign) == ((), (), ())
        live = dict(peft_model.named_parameters())
        assert all(live[fqn].dtype == value.dtype and torch.equal(live[fqn], value) for fqn, value in copies.items())

    def test_an_error_about_training_keeps_the_record(self) -> None:
        model = zoo.load("llama")
        kbitwrap.prepare_model_for_kbit_training(model)
        with torch.no_grad():
            model.lm_head.weight.add_(0.001)
            model.model.norm.weight.add_(0.001)
        with pytest.raises(RestoreError, match=r"lm_head\.weight was trained") as caught:
            kbitwrap.restore(model, "error")
        assert set(caught.value.failures) == {"lm_head.weight", "model.norm.weight"}
        gc.collect()
        with prepared_of(model).suspended():  # what was asked of the restore is not asked of a suspension
            assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.lm_head.weight.dtype == torch.float32
        assert set(kbitwrap.restore(model, "keep").trained) == set(caught.value.failures)
        assert model.lm_head.weight.dtype == torch.bfloat16

    def test_none_is_reentrant_as_in_torch(self) -> None:
        model = zoo.load("llama")
        with KbitPreparedModel(model, gradient_checkpointing_kwargs={"use_reentrant": None}):
            assert model.get_input_embeddings()(torch.tensor([1])).requires_grad

    def test_norms_then_full_by_the_drop_in_leaves_no_float32_copy(self) -> None:
        model = zoo.load("llama")
        kbitwrap.prepare_model_for_kbit_training(model, precision="norms")
        kbitwrap.prepare_model_for_kbit_training(model, precision="full")
        peft_model = adapt("llama", model, modules_to_save=True)
        merged = peft_model.merge_and_unload()
        assert kbitwrap.restore(merged).trained == ("lm_head.weight",)
        assert merged.lm_head.weight.dtype == torch.bfloat16

    # PEFT's word on every norm class that is not torch's.
    @pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
    def test_ln_tuning_copies_end_in_half(self) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        config = peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM")
        peft_model = peft.get_peft_model(model, config)
        with prepared.suspended():
            assert torch.float32 not in {p.dtype for p in peft_model.parameters()}
            peft_model(**zoo.inputs("llama", model))
        prepared.restore()
        assert torch.float32 not in {p.dtype for p in peft_model.merge_and_unload().parameters()}

    def test_a_hook_that_its_owner_removed_stays_removed(self) -> None:
        model = zoo.load("llama")
        kwargs = {"use_reentrant": True}
        prepared = KbitPreparedModel(model, gradient_checkpointing_kwargs=kwargs).prepare()
        embeddings = model.model.embed_tokens
        (own,) = embeddings._forward_hooks
        handle = embeddings.register_forward_hook(lambda *_: None)
        with prepared.suspended():
            handle.remove()
            added = embeddings.register_forward_hook(lambda *_: None)
        assert list(embeddings._forward_hooks) == [own, added.id]  # in the order in which they were registered
        assert not prepared.verify()

    def test_verify_ignores_a_lora_on_parameters(self) -> None:
        model = zoo.load("mixtral")
        prepared = KbitPreparedModel(model).prepare()
        config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], r=2)
        peft_model = peft.get_peft_model(model, config)
        peft_model(**zoo.inputs("mixtral", model))
        assert not prepared.verify()

    def test_originals_kept_on_the_cpu_count(self) -> None:
        model = nn.Sequential(nn.Embedding(100, 64)).bfloat16()
        plan = build_plan(model, precision="full", keep_originals=True)
        assert (plan.added_bytes, plan.peak_bytes, plan.record_bytes) == (100 * 64 * 4, 100 * 64 * 4, 0)

    def test_two_slices_of_one_memory_are_two(self) -> None:
        memory = torch.zeros(10, dtype=torch.bfloat16)
        model = nn.ParameterList([nn.Parameter(memory[:4]), nn.Parameter(memory[4:])])
        plan = build_plan(model, precision="full")
        assert plan.by_role["other"]["bytes"] == 20
        assert plan.added_bytes == 20

    def test_a_model_without_checkpointable_layers_is_refused_by_the_constructor(self) -> None:
        model = zoo.load("llama")
        for module in model.modules():
            vars(module).pop("gradient_checkpointing", None)
        bare = nn.Linear(4, 4)
        bare.supports_gradient_checkpointing = True  # type: ignore[assignment]
        bare.gradient_checkpointing_enable = lambda: None  # type: ignore[assignment]
        bare.is_loaded_in_4bit = True  # type: ignore[assignment]
        with pytest.raises(UnsupportedModelError, match="does not support activation checkpointing"):
            KbitPreparedModel(bare)
        with pytest.raises(UnsupportedModelError, match="get_input_embeddings"):
            KbitPreparedModel(nn.Linear(4, 4), input_require_grads=True)

    def test_a_wrapper_that_is_prepared_can_be_entered(self) -> None:
        prepared = KbitPreparedModel(zoo.load("llama")).prepare()
        with prepared:
            assert prepared.state is LifecycleState.PREPARED
        assert prepared.state is LifecycleState.RESTORED


class TestAdapted:
    """Norms in float32 only in blocks that hold an adapter."""

    def norms_in_float32(self, model: nn.Module) -> set[str]:
        return {fqn for fqn, module in model.named_modules() if "forward" in vars(module)}

    @pytest.mark.parametrize("given", ["before", "after"])
    def test_only_the_last_layers(self, given: str) -> None:
        model = zoo.load("gpt_oss")
        num_layers = len(model.model.layers)
        config = peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[num_layers - 1], r=2)
        before = Snapshot(model)
        if given == "before":
            peft_model = peft.get_peft_model(model, config)
            prepared = KbitPreparedModel(peft_model, precision="adapted").prepare()
        else:
            prepared = KbitPreparedModel(model, precision="adapted").prepare()
            assert self.norms_in_float32(model) == set()
            peft_model = peft.get_peft_model(model, config)
            prepared.adopt(peft_model)
            prepared.adopt(peft_model)
        half = {f for f, m in model.named_modules() if "norm" in f and m.weight.dtype == torch.bfloat16}
        last = f"model.layers.{num_layers - 1}."
        assert self.norms_in_float32(model) == {fqn for fqn in half if fqn.startswith(last)}
        assert not prepared.verify()
        prepared.restore()
        peft_model.unload()
        # PEFT froze the base before it was prepared, where the PEFT model was made before.
        assert before.diff(Snapshot(model), ignore=(": requires_grad",) if given == "before" else ()) == []

    @pytest.mark.filterwarnings("ignore:.*neither a quantization attribute")
    def test_layer_10_is_not_inside_layer_1(self) -> None:
        blocks = [nn.ModuleDict({"norm": nn.LayerNorm(4), "q_proj": nn.Linear(4, 4)}) for _ in range(11)]
        model = nn.ModuleDict({"layers": nn.ModuleList(blocks)}).bfloat16()
        prepared = KbitPreparedModel(model, precision="adapted").prepare()
        prepared.adopt(peft.get_peft_model(model, peft.LoraConfig(target_modules=["layers.1.q_proj"])))
        assert self.norms_in_float32(model) == {"layers.1.norm"}

    def test_adapters_outside_of_the_model_are_adopted(self) -> None:
        prepared = KbitPreparedModel(zoo.load("llama"), precision="adapted").prepare()
        prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        prepared.adopt(peft.get_peft_model(prepared.model, prompts))
        assert not prepared.verify()

    def test_what_is_not_of_the_model_is_refused(self) -> None:
        prepared = KbitPreparedModel(zoo.load("llama"), precision="adapted").prepare()
        with pytest.raises(UnsupportedModelError, match="another"):
            prepared.adopt(adapt("llama", zoo.load("llama")))
        with pytest.raises(UnsupportedModelError, match="no adapter"):
            prepared.adopt(prepared.model)
        prepared.restore()
        with pytest.raises(StateError):
            prepared.adopt(prepared.model)


def big_halves() -> nn.Module:
    """Three weights that are cast, two of them large enough for a segment of their own in a caching allocator."""
    return nn.Sequential(nn.Embedding(4096, 1024), nn.LayerNorm(1024), nn.Linear(1024, 4096, bias=False)).bfloat16()


@pytest.mark.filterwarnings("ignore:Sequential has neither:UserWarning")
@pytest.mark.parametrize(
    ("precision", "empties", "calls"),
    [("full", True, ["large", "large", "end"]), ("full", False, []), ("none", True, ["end"])],
)
def test_freed_blocks_are_returned_between_large_casts(
    precision: str, empties: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = big_halves()
    found = []

    def emptied() -> None:
        found.append([p.dtype for p in model.parameters()])

    monkeypatch.setattr("kbitwrap.preparation.preparation.empty_cache", emptied)
    KbitPreparedModel(model, precision=precision, empty_cache=empties).prepare()
    half, full = torch.bfloat16, torch.float32
    if calls == ["large", "large", "end"]:
        # The largest are cast first, and each is returned before the next is cast.
        assert found == [[full, half, half, half], [full, half, half, full], [full] * 4]
    else:
        assert len(found) == len(calls)


class TestMixedPrecision:
    """What a mixed-precision policy makes of an upcast is said beforehand."""

    def warnings(self, precision: str = "full") -> str:
        return "\n".join(build_plan(zoo.load("llama"), precision=precision).warnings)

    def test_there_is_no_warning_without_a_mixed_precision_policy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("accelerate.state.AcceleratorState._shared_state", {})
        assert "nullif" not in self.warnings()

    def test_autocast_nullifies_the_heads_upcast(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            assert "under bfloat16 autocast" in self.warnings()
            assert "under bfloat16 autocast" in self.warnings("compute")
            assert "nullif" not in self.warnings("norms")

    def test_mixed_precision_is_read_from_the_launchers_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("accelerate.state.AcceleratorState._shared_state", {})
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
        assert "under float16 autocast" in self.warnings()
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        assert "FSDP casts every parameter to float16" in self.warnings()

    def test_mixed_precision_is_read_from_accelerates_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
        state = {"_mixed_precision": "bf16", "fsdp_plugin": plugin}
        monkeypatch.setattr("accelerate.state.AcceleratorState._shared_state", state)
        assert "under bfloat16 autocast" in self.warnings()
        plugin.set_mixed_precision("bf16")
        assert "FSDP casts every parameter to bfloat16" in self.warnings()


@pytest.mark.parametrize("offload", [False, True])
def test_options_of_transformers_checkpointing_pass_through_and_are_put_back(offload: bool) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    kwargs = {"use_reentrant": False, "every_n_layers": 2, "offload": offload}
    with KbitPreparedModel(model, gradient_checkpointing_kwargs=kwargs) as prepared:
        layers = list(model.model.layers)
        assert [layer.gradient_checkpointing for layer in layers] == [True, False]
        assert (layers[0]._gradient_checkpointing_func.func is checkpoint) is not offload
        assert prepared.manifest().config.gradient_checkpointing_kwargs == kwargs
        with prepared.suspended():
            assert not any(layer.gradient_checkpointing for layer in layers)
        assert [layer.gradient_checkpointing for layer in layers] == [True, False]
        if not offload:  # which pins memory, and so runs on accelerators only
            peft_model = adapt("llama", model)
            loss, gradients = step("llama", peft_model)
            peft_model.unload()
        assert not prepared.verify()
    assert before.diff(Snapshot(model)) == []
    if not offload:
        with KbitPreparedModel(model, gradient_checkpointing=False):
            expected_loss, expected = step("llama", adapt("llama", model))
        assert torch.equal(loss, expected_loss)
        assert all(torch.equal(gradients[fqn], expected[fqn]) for fqn in expected)
