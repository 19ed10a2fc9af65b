"""TRL's fused head, which reads the weight of a head and never calls it, on a model whose head is float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from trl.trainer.utils import add_fused_lm_head

from kbitwrap import KbitPreparedModel
from runs import tokenizer
from support import zoo
from support.snapshot import tensor_digest
from trl import SFTConfig, SFTTrainer

# TRL 1.16 sets the field by the name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


def sft(model: Any, folder: Path, **settings: Any) -> SFTTrainer:
    ids = torch.randint(zoo.FIRST_ORDINARY_ID, zoo.VOCAB_SIZE, (4, 16), generator=torch.Generator().manual_seed(0))
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        **settings,
    )
    return SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=tokenizer(),
        peft_config=zoo.lora_config("llama", task_type="CAUSAL_LM"),
    )


@pytest.mark.parametrize("bf16", [False, True])
def test_with_its_own_switch_it_is_as_exact_as_the_head_itself(bf16: bool, tmp_path: Path) -> None:
    model = zoo.load("llama")
    before = {fqn: tensor_digest(parameter) for fqn, parameter in model.named_parameters()}
    batch = zoo.inputs("llama", model)
    labels = batch["labels"][:, 1:]
    seen: dict[str, torch.Tensor] = {}
    with KbitPreparedModel(model, head="float32", gradient_checkpointing=False) as prepared:
        trainer = sft(model, tmp_path, bf16=bf16)
        model.model.register_forward_hook(lambda module, args, output: seen.update(hidden=output.last_hidden_state))
        errors = {}
        for switch in (False, True):
            if switch:
                add_fused_lm_head(model, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy", "is_top1"))
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                found = trainer.model(**batch, fused_lm_head=True).log_probs
                whole = trainer.model(**batch)
            exact = F.linear(seen["hidden"].double(), model.lm_head.weight.double()).log_softmax(-1)[:, :-1]
            exact = exact.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0)
            errors[switch] = (found - exact).abs().max().item()
        assert whole.logits.dtype == torch.float32
        assert errors[True] < 2e-6
        assert errors[False] > 1e-3  # TRL rounds tiles to the dtype that the hidden states or autocast have
        trainer.train()
        assert all(torch.isfinite(torch.tensor(row["loss"])) for row in trainer.state.log_history if "loss" in row)
        assert not prepared.verify()
        trainer.model.unload()
    assert {fqn: tensor_digest(parameter) for fqn, parameter in model.named_parameters()} == before
