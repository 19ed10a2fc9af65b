"""Undo the preparation before PEFT's merge: it gives what it gives on a base that was never prepared."""

import torch
from peft import PeftModel, get_peft_model
from tiny import load, lora, train

from kbitwrap import KbitPreparedModel

model = load()
with KbitPreparedModel(model, precision="full") as prepared:
    peft_model = get_peft_model(prepared.model, lora)
    train(peft_model)
peft_model.save_pretrained("adapter")

merged = peft_model.merge_and_unload()
assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16, torch.uint8}  # uint8: packed nf4
merged.save_pretrained("merged")

never_prepared = PeftModel.from_pretrained(load(), "adapter").merge_and_unload()
expected = never_prepared.state_dict()
assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.state_dict().items())
