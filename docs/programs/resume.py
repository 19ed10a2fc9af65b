"""Resume the run of record.py in a new process: the adapter has the same bytes, and another preparation is refused."""

from pathlib import Path

from peft import get_peft_model
from tiny import examples, load, lora
from transformers import Trainer, TrainingArguments

from kbitwrap import KbitPreparedModel, ManifestMismatchError
from kbitwrap.integrations import KbitTrainerCallback

arguments = TrainingArguments(
    output_dir="resumed", max_steps=8, save_steps=4, per_device_train_batch_size=2, report_to="none", use_cpu=True
)


def resume(prepared):
    with prepared:
        peft_model = get_peft_model(prepared.model, lora)
        callback = KbitTrainerCallback(prepared)
        trainer = Trainer(model=peft_model, args=arguments, train_dataset=examples(), callbacks=[callback])
        trainer.train(resume_from_checkpoint="run/checkpoint-4")


resume(KbitPreparedModel.from_manifest(load(), "run/checkpoint-4/kbitwrap.json"))
name = "checkpoint-8/adapter_model.safetensors"
assert Path("resumed", name).read_bytes() == Path("run", name).read_bytes()

try:
    resume(KbitPreparedModel(load(), precision="norms"))
except ManifestMismatchError as error:
    print(error)  # ... config.precision: expected 'full', found 'norms' ... No step was taken. ...
else:
    raise AssertionError("resumed on a base that was prepared differently")
