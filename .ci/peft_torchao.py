"""Runs PEFT's own tests of torchao with PEFT's function and with the drop-in, which must pass all that PEFT's does.

    pip download --no-deps --no-binary peft peft==0.21.2  # the wheel has no tests
    python .ci/peft_torchao.py peft-0.21.2.tar.gz

PEFT runs `tests/test_gpu_examples.py::TestPeftTorchao` on a GPU and with a model from the hub. Here its devices are the
CPU, and the checkpoint, the tokenizer and the data are tiny local ones; the tests are otherwise as PEFT's archive has
them. Its tests of several devices skip themselves.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers

import kbitwrap

QUOTES = ["be yourself everyone else is already taken", "so many books so little time"] * 20
NEEDS_MSLK = "int4_raises"  # torchao's int4 needs a library that is for GPUs
# What in PEFT's file says that it is for a GPU, and how often.
FOR_A_GPU = {
    r'pytest\.skip\(allow_module_level=True, reason="GPU tests[^\n]*': ("pass", 1),
    r"@require_non_cpu\n(?=@require_torchao\nclass TestPeftTorchao)": ("", 1),
}


def unpack(archive: Path, folder: Path) -> Path:
    """PEFT's tests as a package, with the CPU for a device."""
    with tarfile.open(archive) as found:
        found.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    (root / "tests" / "__init__.py").touch()
    path = root / "tests" / "test_gpu_examples.py"
    before, begin, rest = path.read_text(encoding="utf-8").partition("class TestPeftTorchao:\n")
    body, end, after = rest.partition("\nclass ")
    body, count = re.subn(r"device = 0\b", 'device = "cpu"', body)
    source = before + begin + body + end + after
    for pattern, (replacement, expected) in FOR_A_GPU.items():
        source, found_here = re.subn(pattern, replacement, source)
        if found_here != expected or not count:
            raise SystemExit(f"{path}: expected {pattern!r} {expected} times, found {found_here}: another version?")
    path.write_text(source, encoding="utf-8")
    return root


def checkpoint(folder: Path) -> None:
    """A tiny OPT with a tokenizer for the quotes."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=64,
    )
    transformers.OPTForCausalLM(config).save_pretrained(folder)
    words = ["<pad>", "<unk>", *dict.fromkeys(" ".join(QUOTES).split())]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


class Quotes:
    """The data, with the one method that the tests call."""

    def map(self, function: Callable[[dict[str, list[str]]], Any], *, batched: bool) -> dict[str, list[Any]]:
        """What the function makes of all rows at once."""
        found = function({"quote": QUOTES})
        return {"train": [{key: values[row] for key, values in found.items()} for row in range(len(QUOTES))]}


class Run:
    """A plugin of pytest: one run of the tests with one function to prepare models."""

    def __init__(self, prepare: Callable[..., Any], local: Path) -> None:
        self.prepare, self.local = prepare, local
        self.num_calls = 0
        self.outcomes: dict[str, str] = {}

    def _prepare(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self.prepare(*args, **kwargs)

    @pytest.fixture(scope="class", autouse=True)
    def offline(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request.cls, "causal_lm_model_id", str(self.local))
            patch.setattr(request.module, "load_dataset_english_quotes", Quotes)
            patch.setattr(request.module, "prepare_model_for_kbit_training", self._prepare)
            yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test: that of the first phase that does not pass."""
        if report.when == "call" or not report.passed:
            self.outcomes.setdefault(report.nodeid, report.outcome)


def main() -> int:
    archive = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as work:
        local = Path(work, "opt")
        checkpoint(local)
        Path(work, "peft").mkdir()
        os.chdir(unpack(archive, Path(work, "peft")))
        runs = []
        for prepare in (peft.prepare_model_for_kbit_training, kbitwrap.prepare_model_for_kbit_training):
            run = Run(prepare, local)
            options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "ignore"]
            pytest.main([*options, "tests/test_gpu_examples.py", "-k", "TestPeftTorchao"], plugins=[run])
            runs.append(run)
        os.chdir("/")
    theirs, ours = runs
    for test, outcome in theirs.outcomes.items():
        print(f"{outcome} with PEFT's function, {ours.outcomes.get(test)} with the drop-in: {test.partition('::')[2]}")
    failed = [test for test, outcome in theirs.outcomes.items() if outcome == "failed"]
    passed = [test for test, outcome in theirs.outcomes.items() if outcome == "passed"]
    if not passed or not ours.num_calls or any(not test.endswith(NEEDS_MSLK) for test in failed):
        print("expected every other test to pass with PEFT's function, and some to prepare a model")
        return 1
    return int(any(ours.outcomes.get(test) != "passed" for test in passed))


if __name__ == "__main__":
    sys.exit(main())
