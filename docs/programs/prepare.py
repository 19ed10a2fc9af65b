"""Prepare a model in a with-block: after it, the model is the one from before, bit for bit."""

import torch
from peft import get_peft_model
from tiny import load, lora, train

from kbitwrap import KbitPreparedModel

model = load()
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
flags = [parameter.requires_grad for parameter in model.parameters()]

with KbitPreparedModel(model, precision="full") as prepared:
    print(prepared.plan)  # what is done, and what it costs
    assert model.lm_head.weight.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in model.parameters())
    peft_model = get_peft_model(prepared.model, lora)
    train(peft_model)
    with prepared.suspended():  # the original state for a while, to see what it generates
        print(peft_model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, pad_token_id=0))

model = peft_model.unload()
after = model.state_dict()
assert list(after) == list(before)
assert all(torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in before)
assert [parameter.requires_grad for parameter in model.parameters()] == flags
assert model.dtype == torch.bfloat16
