"""Keep the manifest with a run: the callback writes it into every checkpoint."""

from peft import get_peft_model
from tiny import examples, load, lora
from transformers import Trainer, TrainingArguments, set_seed

from kbitwrap import KbitPreparedModel, Manifest
from kbitwrap.integrations import KbitTrainerCallback

set_seed(0)
arguments = TrainingArguments(
    output_dir="run", max_steps=8, save_steps=4, per_device_train_batch_size=2, report_to="none", use_cpu=True
)

with KbitPreparedModel(load(), precision="full") as prepared:
    peft_model = get_peft_model(prepared.model, lora)
    callback = KbitTrainerCallback(prepared)
    Trainer(model=peft_model, args=arguments, train_dataset=examples(), callbacks=[callback]).train()

manifest = Manifest.load("run/checkpoint-4/kbitwrap.json")
print(manifest.model.class_name, manifest.config.precision, len(manifest.tensors), "tensors")
