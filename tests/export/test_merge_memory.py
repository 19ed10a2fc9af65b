"""A merged export holds two tensors in memory at most."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kbitwrap.export.merged as merged_module
from kbitwrap import ExportReport, KbitPreparedModel
from support.layers import LARGE_LAYERS, LORA, adapted_layers
from support.memory import allocations, peak
from support.thorough import few


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge layers as small as these by rows too, in a few blocks."""
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 3000)


PAGE = Path(__file__).parents[2] / "docs" / "merge.md"


@pytest.mark.parametrize(
    ("kind", "options"), few(LARGE_LAYERS, LARGE_LAYERS[::4]), ids=str
)  # by default the others as weights
def test_two_tensors_are_in_memory_at_most(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, tensor = 512, 2 * 512 * 512
    # In as many blocks as a layer of 4096 times 4096 elements.
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 4 * width * width // 32)
    wrapper = KbitPreparedModel(adapted_layers(kind, width, **options), gradient_checkpointing=False)
    reports: list[ExportReport] = []
    sizes = allocations(lambda: reports.append(wrapper.export(tmp_path / "merged", merge_adapters=True)))
    assert (len(reports[0].merged), reports[0].num_bytes) == (3, 3 * tensor + 2 * width)
    mapped = (tmp_path / "merged" / "model.safetensors").stat().st_size  # to read its header
    assert 0 < peak(size for size in sizes if abs(size) != mapped) <= 2 * tensor


@pytest.mark.parametrize("kind", few(["nf4", "int8"], ["nf4"]))
def test_codes_take_the_memory_of_two_half_tensors_at_most(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, tensor = 1024, 2 * 1024 * 1024
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 4 * width * width // 64)
    layers = adapted_layers(kind, width, **LORA)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if "lora_B" in name:
                parameter *= 0.01
    wrapper = KbitPreparedModel(layers, gradient_checkpointing=False)
    reports: list[ExportReport] = []
    options = {"merge_adapters": True, "merge_as": "quantized"}
    sizes = allocations(lambda: reports.append(wrapper.export(tmp_path / "merged", **options)))
    assert len(reports[0].tensors) == 3
    mapped = (tmp_path / "merged" / "model.safetensors").stat().st_size  # to read its header
    assert 0 < peak(size for size in sizes if abs(size) != mapped) <= 2 * tensor


MEMORY = """
import gc, re, sys
from pathlib import Path
from kbitwrap import KbitPreparedModel
from support.layers import LORA, adapted_layers

def status(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

for width in (64, 3072):  # what is loaded and cached once is so by the first
    wrapper = KbitPreparedModel(adapted_layers("nf4", width, **LORA), gradient_checkpointing=False)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    start = status("VmRSS")
    wrapper.export(f"{width}", merge_adapters=True)
print(status("VmHWM") - start)
"""


@pytest.mark.thorough
def test_the_process_grows_by_two_tensors_at_most(tmp_path: Path) -> None:
    folders = os.pathsep.join(map(str, (PAGE.parents[1], *Path(__file__).parents[:2])))
    # What is freed goes back to the system: which pieces the C library keeps is not measured.
    variables = {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    result = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **variables}
    )
    assert result.returncode == 0, result.stderr
    assert 0 < int(result.stdout) <= 2 * 2 * 3072 * 3072
