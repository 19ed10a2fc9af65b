"""Who does what README.md says reads no warning that a call of kbitwrap causes.

One new interpreter runs the block of README.md with a step of training, and then commands on what it left. Every
warning is shown, every time. What stays on standard error is what other libraries say without kbitwrap too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support import pages, zoo
from support.files import save_tokenizer

pytestmark = pytest.mark.thorough  # a new interpreter imports for seconds

# What the reader's own calls of other libraries print, each with the call.
OF_OTHERS = (
    r"Loading weights: .*",  # `from_pretrained`
    # PEFT's `get_peft_model`, by a name that transformers deprecates.
    r".*FutureWarning: `is_gradient_checkpointing` is deprecated .*",
    # A forward in train mode under checkpointing.
    r"\[transformers\] `use_cache=True` is incompatible with gradient checkpointing\..*",
    # Importing transformers, PEFT or bitsandbytes: of functions of torch, and of libraries that are not there.
    r".*DeprecationWarning: `torch\.jit\.script(_method)?` is deprecated.*",
    r"Failed to load .*",
    r".*torch/utils/_pytree\.py.*register_constant\(\) on Enum subclasses is deprecated.*",
    r"  (warnings\.)?warn\(.*",  # the line of the source below a warning
)

BEFORE = """\
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("base", quantization_config=quantization, dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained("tokenizer")
ids = torch.arange(16).view(2, 8)

def train(peft_model):
    trained = [one for one in peft_model.parameters() if one.requires_grad]
    peft_model.train()
    peft_model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.AdamW(trained, lr=0.01).step()
"""
TRAIN = "train(peft_model)"
GENERATE = "peft_model.eval(); peft_model.generate(input_ids=ids, attention_mask=ids >= 0, max_new_tokens=2)"
AFTER = """
from kbitwrap.cli import main
for command in COMMANDS:
    print("$", command, file=sys.stderr, flush=True)
    assert main(command.split()) == 0, command
"""
COMMANDS = [
    "plan base",
    "plan base --step --seq 16 --batch 1",
    "doctor base",
    "doctor adapter/kbitwrap.json",
    "merge adapter --out half",
    "merge adapter --out quantized --as quantized",
    "doctor half --base base --adapter adapter",
    "doctor adapter --base base",
    "convert --from base --out converted --dtype float16",
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines on standard error that no other library accounts for, by the command; those of the block by ''."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "base").symlink_to(zoo.checkpoint("llama"))
    save_tokenizer(folder / "tokenizer", 64)
    block = pages.program(pages.ROOT / "README.md", "with KbitPreparedModel(model) as prepared")
    block, count = re.subn(r"\.\.\.  # train$", TRAIN, block, flags=re.MULTILINE)
    assert count == 1
    block, count = re.subn(r"\.\.\.  # generate .*$", GENERATE, block, flags=re.MULTILINE)
    assert count == 1
    (folder / "program.py").write_text(BEFORE + block + AFTER.replace("COMMANDS", repr(COMMANDS)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(pages.ROOT)}
    arguments = [sys.executable, "-W", "always", "program.py"]
    found = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    lines: dict[str, list[str]] = {"": []}
    for line in found.stderr.splitlines():
        if line.startswith("$ "):
            lines[line.removeprefix("$ ")] = []
        elif line and not any(re.fullmatch(pattern, line) for pattern in OF_OTHERS):
            lines[list(lines)[-1]].append(line)
    return lines


def test_the_block_warns_of_nothing(said: dict[str, list[str]]) -> None:
    assert said[""] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_warns_of_nothing(command: str, said: dict[str, list[str]]) -> None:
    assert said[command] == []
