"""A small model, built from a config and loaded in nf4: running this file writes its checkpoint."""

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")


def load():
    """The base as `from_pretrained` returns it: linear layers in nf4, the rest in bfloat16."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(
        "tiny", quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )


def examples():
    """Sixteen sequences of eight tokens."""
    tokens = torch.randint(0, 256, (16, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(peft_model, num_steps=4):
    """A loop of one's own."""
    trainable = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    peft_model.train()
    for example in examples()[:num_steps]:
        loss = peft_model(**{name: row.unsqueeze(0) for name, row in example.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).to(torch.bfloat16).save_pretrained("tiny")
