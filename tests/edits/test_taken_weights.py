"""Weights that others take from their modules under "compute": pruned, normalized, adapted; copied, averaged, tied."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import prune, remove_weight_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from kbitwrap import KbitPreparedModel
from support import zoo
from support.thorough import every_other
from support.training import step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning"),
]
NEW = ("lora_", "weight_g", "weight_v")
IDS = torch.arange(8).view(1, 8)


class Attending(nn.Module):
    """A model of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.linear(x)


def pruned(model: nn.Module) -> nn.Module:
    prune.l1_unstructured(model.linear, "weight", 0.3)
    return model


def pruned_for_good(model: nn.Module) -> nn.Module:
    prune.remove(pruned(model).linear, "weight")
    return model


def normalized(model: nn.Module) -> nn.Module:
    weight_norm(model.linear)
    return model


def normalized_for_good(model: nn.Module) -> nn.Module:
    remove_weight_norm(normalized(model).linear)
    return model


def adapted(model: nn.Module) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["attention"], init_lora_weights=False))


def merged(model: nn.Module) -> nn.Module:
    return adapted(model).merge_and_unload()


@pytest.mark.parametrize("take", [pruned, pruned_for_good, normalized, normalized_for_good, adapted, merged])
def test_a_weight_that_others_take_gives_the_numbers_of_full(take: Callable[[nn.Module], nn.Module]) -> None:
    found = []
    for precision in ("full", "compute"):
        model = Attending().bfloat16()
        with KbitPreparedModel(model, precision=precision):
            torch.manual_seed(1)
            taken = take(model)
            outputs = [taken(IDS), taken(IDS)]
            if outputs[0].requires_grad:
                outputs[0].sum().backward()
            gradients = {name: p.grad for name, p in taken.named_parameters() if p.grad is not None}
        assert bool(gradients) == (take in (normalized, normalized_for_good, adapted, merged))
        found.append((outputs, gradients))
        base = {p for name, p in model.named_parameters() if not any(new in name for new in NEW)}
        assert {p.dtype for p in base} == {torch.bfloat16}
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("quant", every_other(["nf4", None]))
@pytest.mark.parametrize("layers", [[(0, 2), (1, 2)], [(0, 1), (0, 2)]], ids=str)
def test_layers_that_peft_replicates_train_as_under_full_and_get_the_original_dtype(
    layers: list[tuple[int, int]], quant: str | None
) -> None:
    found = []
    for precision in ("full", "compute"):
        with KbitPreparedModel(zoo.load("llama", quant), precision=precision) as prepared:
            torch.manual_seed(0)
            config = zoo.lora_config("llama", layer_replication=layers)
            model = peft.get_peft_model(prepared.model, config)
            gc.collect()  # the layers that were there before
            steps = [step("llama", model, seed=0)]
            with prepared.suspended():
                assert_as_loaded(model)
                assert not [name for name, m in model.named_modules() if vars(m).get("gradient_checkpointing")]
                model(**zoo.inputs("llama", model))
            steps.append(step("llama", model, seed=1))
        assert_as_loaded(model)
        assert not [name for name, m in model.named_modules() if "_gradient_checkpointing_func" in vars(m)]
        assert not [name for name, m in model.named_modules() if any("kbitwrap" in key for key in vars(m))]
        model(**zoo.inputs("llama", model))
        found.append(steps)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def assert_as_loaded(model: nn.Module) -> None:
    base = {p for name, p in model.named_parameters() if "lora_" not in name and p.is_floating_point()}
    assert {p.dtype for p in base} == {torch.bfloat16}
    assert all(p.requires_grad for p in base)


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_a_copy_of_a_module_gets_the_original_dtype_wherever_it_is(precision: str) -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model, precision=precision) as prepared:
        model.copies = nn.ModuleList(copy.deepcopy(m) for m in (model.model.norm, model.lm_head, model.model.layers[0]))
        copied = [p for p in model.copies.parameters() if p.is_floating_point()]
        assert {p.dtype for p in copied} == {torch.float32}
        with prepared.suspended():
            assert {p.dtype for p in copied} == {torch.bfloat16}
        assert {p.dtype for p in copied} == {torch.float32}
    assert {p.dtype for p in copied} == {torch.bfloat16}
    assert not [name for name, m in model.named_modules() if any("kbitwrap" in key for key in vars(m))]


def test_a_copied_model_that_is_prepared_itself_keeps_what_its_own_copies_store() -> None:
    with KbitPreparedModel(zoo.load("llama", None), precision="full") as prepared:
        model = copy.deepcopy(prepared.model)
    with KbitPreparedModel(model, precision="full"):
        model.copied = copy.deepcopy(model.model.norm)
    assert model.copied.weight.dtype == model.model.norm.weight.dtype == torch.float32


@pytest.mark.parametrize("saved", [None, ["lm_head"], ["embed_tokens"]], ids=str)
def test_a_merge_in_the_block_tells_ties_as_under_full(saved: list[str] | None) -> None:
    found = []
    for precision in ("full", "compute"):
        with KbitPreparedModel(zoo.load("gemma2"), precision=precision) as prepared:
            torch.manual_seed(0)
            config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=saved, init_lora_weights=False)
            model = peft.get_peft_model(prepared.model, config)
            step("gemma2", model)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                merged_model = model.merge_and_unload()
            says = [str(w.message) for w in told if "no longer tied" in str(w.message)]
            logits = merged_model(**zoo.inputs("gemma2", merged_model)).logits.detach()
            found.append((merged_model.config.tie_word_embeddings, says, logits))
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])


def test_an_average_over_steps_pairs_each_parameter_with_itself() -> None:
    with KbitPreparedModel(zoo.load("llama", None), precision="compute") as prepared:
        # Torch's own way refuses, before 2.13, a half model whose average is float32.
        average = AveragedModel(prepared.model, avg_fn=get_swa_avg_fn())
        average.update_parameters(prepared.model)
        average.update_parameters(prepared.model)
        averaged = dict(average.module.named_parameters())
        for name, parameter in prepared.model.named_parameters():
            assert torch.equal(averaged[name], parameter.float()), name
