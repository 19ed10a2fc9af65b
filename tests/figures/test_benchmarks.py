"""The benchmarks of docs/figures: pages show what was saved, bytes are exact, "compute" is PEFT bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kbitwrap import build_plan

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
WIDE = TINY | {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 896, "vocab_size": 2048}
TABLE_BYTES = WIDE["vocab_size"] * WIDE["hidden_size"] * 2  # the embeddings', and the head's
NORM_BYTES = 3 * WIDE["hidden_size"] * 2  # bfloat16: what float32 adds to a weight is what it holds


@pytest.fixture(scope="module")
def benchmarks(figures: Callable[[str], Any]) -> Any:
    return figures("benchmarks")


@pytest.fixture(scope="module")
def cases(figures: Callable[[str], Any]) -> Any:
    return figures("benchmark_cases")


@pytest.fixture(scope="module")
def measured(benchmarks: Any, cases: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All cases, by name, measured in this process."""
    folder = tmp_path_factory.mktemp("gradients")
    settings = cases.Settings(benchmarks.STEPPED, WIDE, (8, 16), repeats=1)
    return {name: cases.measure(name, settings, folder) for name in settings.cases}


def test_the_page_shows_what_was_saved(benchmarks: Any, figures: Callable[[str], Any]) -> None:
    section = figures("sections").section
    for name in benchmarks.BENCHMARKS:
        result = json.loads((benchmarks.FIGURES / f"{name}.json").read_text(encoding="utf-8"))
        shown = section(benchmarks.PAGE, f"benchmark: {name}")
        assert shown.partition("```text\n")[2].partition("\n```")[0] == benchmarks.text(name, result)


def test_the_model_is_as_loaded_and_always_the_same(figures: Callable[[str], Any]) -> None:
    model, again = (figures("drawn").build_model(TINY) for _ in range(2))
    assert build_plan(model, precision="full").quantization == "bitsandbytes_4bit"
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_measured_peak_of_tensors_is_exact(figures: Callable[[str], Any]) -> None:
    def run() -> None:
        a = torch.empty(5000, dtype=torch.uint8)
        b = torch.empty(300, dtype=torch.uint8)
        del a
        torch.empty(4000, dtype=torch.uint8)
        del b

    assert figures("measuring").tensor_peak(run) == 5300


@pytest.mark.thorough
def test_added_bytes_are_exact(measured: dict[str, Any]) -> None:
    full = 2 * TABLE_BYTES + NORM_BYTES
    assert {name: case["added_bytes"] for name, case in measured.items()} == {
        **dict.fromkeys(("peft", "full"), full),
        **dict.fromkeys(("compute", "compute-chunked"), NORM_BYTES),
        **dict.fromkeys(("norms", "adapted", "none"), 0),
    }


@pytest.mark.thorough
def test_full_and_compute_are_pefts_numbers_bit_for_bit_and_others_are_not(measured: dict[str, Any]) -> None:
    for name, case in measured.items():
        for step in case["steps"]:
            differences = step["loss_difference"], step["largest_gradient_difference"]
            assert step["num_gradients"] == 2 * 7
            assert (differences == (0, 0)) == (name in ("peft", "full", "compute", "compute-chunked"))


@pytest.mark.thorough
def test_a_steps_peak_is_less_by_what_is_not_stored(measured: dict[str, Any]) -> None:
    for number in range(2):
        peak = {name: case["steps"][number]["peak_bytes"] for name, case in measured.items()}
        # the head's copy is made as a whole, as its pieces are no smaller
        assert peak["compute-chunked"] <= peak["compute"] < peak["peft"]
        assert peak["norms"] < peak["compute-chunked"]
        assert peak["full"] <= peak["peft"]  # which has a hook more: the first norm then keeps something for backward


@pytest.mark.thorough
def test_every_combination_is_compared(benchmarks: Any, cases: Any, tmp_path: Path) -> None:
    settings = cases.Settings(("peft", "compute"), TINY | {"num_hidden_layers": 1}, (16,), repeats=0)
    found = benchmarks.compared(settings, tmp_path)
    options = ("tie_word_embeddings", "reentrant", "autocast", "modules_to_save")
    assert len({tuple(case[name] for name in options) for case in found}) == 16
    for case in found:
        (step,) = case["steps"]
        assert step["num_gradients"] == 2 * 7 + case["modules_to_save"]
        assert benchmarks.numbers(step)[1:] == ["0", "0"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["full", "merged"])
def test_an_export_writes_the_librarys_bytes(benchmarks: Any, cases: Any, name: str, tmp_path: Path) -> None:
    shape = TINY | {"vocab_size": 32768, "hidden_size": 1024}
    case = benchmarks.alone(cases.measure_export, name, cases.Settings((name,), shape, repeats=1), str(tmp_path))
    assert case["is_identical"]
    assert case["largest_bytes"] == 32768 * 1024 * 2
    # Large enough that what Python and the C library take on the way, some 20 MiB, does not decide.
    assert case["export_peak_bytes"] <= 2 * case["largest_bytes"]
    assert ("merge_seconds" in case) == (name == "merged")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.thorough
def test_what_was_measured_is_shown(
    benchmarks: Any, cases: Any, figures: Callable[[str], Any], measured: dict[str, Any]
) -> None:
    settings = dataclasses.asdict(cases.Settings(benchmarks.STEPPED, WIDE, (8, 16), repeats=1))
    environment = figures("machine").environment()
    result = {"environment": environment, "settings": settings, "cases": [*measured.values()]}
    assert json.loads(json.dumps(result))["cases"] == result["cases"]
    text = benchmarks.text("step", result)
    assert f"torch {torch.__version__}" in text
    assert text.count("\n16 ") == len(measured)
