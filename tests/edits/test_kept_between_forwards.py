"""What modules keep from one forward to the next, in the dtype of the one, is what it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LevitConfig, LevitModel, Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

from kbitwrap import (
    KbitPreparedModel,
    Precision,
)
from support import zoo
from support.snapshot import Snapshot
from support.thorough import each_once, every_other
from support.training import adapt, step

PRECISIONS = list(Precision)


# Suspending takes instance attributes away and puts them back, at the end; each is still compared by itself.
REORDERED = (": attributes",)


pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
]


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
@pytest.mark.parametrize("has_run", every_other([False, True]), ids=["fresh", "has-run"])
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
