"""The benchmark: every case is measured, bytes are exact, "compute" is PEFT bit for bit. No timing is asserted."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn

from kbitwrap import build_plan
from kbitwrap.bench import case as bench_case
from kbitwrap.bench import runner
from kbitwrap.bench import steps as bench_steps
from kbitwrap.bench.memory import MemoryMeter, live_bytes, stored_bytes
from kbitwrap.bench.models import build_model
from kbitwrap.bench.plot import draw
from kbitwrap.bench.report import (
    allocator_rows,
    export_rows,
    header,
    identity_rows,
    prediction_rows,
    preparation_rows,
    step_rows,
)
from kbitwrap.bench.settings import CASES, EXPORTED, MISTRAL_7B, SMALL, BenchError, Settings, default_cases
from support.benchmarks import (
    HIDDEN,
    LAYERS,
    PREDICTED_CASES,
    TINY,
    VOCAB,
    all_cases,
    all_combinations,
    predicted_cases,
    run_here,
    settings,
)
from support.training import is_checkpointing

pytestmark = pytest.mark.thorough  # measures for seconds, for a table of the authors' own

NORM_BYTES = (2 * LAYERS + 1) * HIDDEN * 2  # bfloat16: what float32 adds to a weight is what it holds


TABLE_BYTES = VOCAB * HIDDEN * 2  # the embeddings', and the head's


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return all_cases()


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return all_combinations()


@pytest.mark.parametrize("precision", EXPORTED)
def test_an_export_writes_the_librarys_bytes(precision: str, tmp_path: Path) -> None:
    # Large enough that what Python and the C library take on the way, some 20 MiB, does not decide.
    asked = settings(
        step=False, export=True, repeats=0, shape=dataclasses.replace(TINY, vocab_size=32768, hidden_size=1024)
    )
    case = run_here(precision, asked, tmp_path)
    assert case["is_identical"]
    assert case["largest_bytes"] == 32768 * 1024 * 2
    assert case["export_bytes"] > 2 * case["largest_bytes"]
    assert case["export_peak_bytes"] <= 2 * case["largest_bytes"]
    assert {path.name for path in tmp_path.iterdir()} == {"request.json", "answer.json"}
    summary = {"median": 1.0, "least": 1.0, "most": 1.0, "all": [1.0]}
    timed = dict.fromkeys((f"{part}_seconds" for part in ("save", "save_cpu", "export", "export_cpu")), summary)
    merged = dict.fromkeys(("merge_seconds", "merge_cpu_seconds"), summary) if precision == "merged" else {}
    (_, row) = export_rows({"cases": [{**case, **timed, **merged}]})
    assert (row[0], *row[5:7], row[-1]) == (precision, *["2.00" if merged else "1.00"] * 2, "identical")


def test_a_case_is_measured_by_an_interpreter_of_its_own(tmp_path: Path) -> None:
    case = runner._run_case("none", settings(step=False, repeats=0), tmp_path)
    assert case["case"] == "none"
    assert case["build_seconds"] > 0


def by_case(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in result["cases"]}


def test_every_case_is_measured_and_is_json(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured)) == {**measured, "settings": {**measured["settings"], "tokens": [8, 16]}}
    assert [case["case"] for case in measured["cases"]] == list(CASES)
    assert measured["environment"]["versions"]["torch"] == torch.__version__
    for case in measured["cases"]:
        assert [step["tokens"] for step in case["steps"]] == [8, 16]
        for timing in (case["prepare_seconds"], *(step["seconds"] for step in case["steps"])):
            assert 0 < timing["least"] <= timing["median"] <= timing["most"]
            assert len(timing["all"]) == 1
        assert bool(case["restore_seconds"]) == (not case["case"].startswith("peft"))
        assert case["transient_peak_bytes"] >= 0
        assert case["allocator"] is None
        for step in case["steps"]:
            assert step["system_peak_bytes"] > 0


def test_added_bytes_are_exact(measured: dict[str, Any]) -> None:
    added = {name: case["added_bytes"] for name, case in by_case(measured).items()}
    full = 2 * TABLE_BYTES + NORM_BYTES
    as_peft = dict.fromkeys(("peft", "peft-uncleared", "full"), full)
    assert added == {
        **as_peft,
        "compute": NORM_BYTES,
        "compute-chunked": NORM_BYTES,
        "norms": 0,
        "adapted": 0,
        "none": 0,
    }
    assert {case["left_bytes"] for case in measured["cases"]} == {0}


@pytest.mark.parametrize("index", [0, 1])
def test_a_steps_peak_is_exact(measured: dict[str, Any], index: int) -> None:
    """In pieces the head never doubles, so all that "compute" does not store is off the peak."""
    cases = by_case(measured)
    peak = {name: case["steps"][index]["peak_bytes"] for name, case in cases.items()}
    not_stored = cases["peft"]["added_bytes"] - cases["compute-chunked"]["added_bytes"]
    assert not_stored == 2 * TABLE_BYTES
    assert peak["peft"] - peak["compute-chunked"] >= not_stored
    assert peak["compute-chunked"] < peak["compute"] < peak["peft"]
    assert peak["peft-uncleared"] == peak["peft"]
    assert peak["full"] <= peak["peft"]  # which has a hook more: the first norm then keeps something for backward
    assert peak["norms"] < peak["compute-chunked"]


def test_more_tokens_take_more(measured: dict[str, Any]) -> None:
    for case in measured["cases"]:
        fewer, more = (step["peak_bytes"] for step in case["steps"])
        assert more - fewer >= 8 * VOCAB * 4  # the logits


@pytest.mark.parametrize("name", ["peft", "peft-uncleared", "full", "compute"])
def test_full_and_compute_are_peft_bit_for_bit(measured: dict[str, Any], name: str) -> None:
    for step in by_case(measured)[name]["steps"]:
        assert step["num_gradients"] == 2 * 7 * LAYERS
        assert step["largest_gradient"] > 0
        assert (step["loss_difference"], step["largest_gradient_difference"]) == (0, 0)


def test_precisions_other_than_compute_differ_from_peft(measured: dict[str, Any]) -> None:
    for name in ("norms", "adapted", "none"):
        assert by_case(measured)[name]["steps"][0]["largest_gradient_difference"] > 0


def test_a_predicted_step_is_the_tracked_one() -> None:
    result = predicted_cases()
    rows = prediction_rows(result)
    assert [row[:2] for row in rows[1:]] == [("8", case) for case in PREDICTED_CASES]
    for case in result["cases"]:
        for step in case["steps"]:
            assert step["predicted"]["peak_bytes"] == step["tracked_bytes"]
            # What an operation allocates inside itself the allocator alone knows.
            assert 0 <= step["peak_bytes"] - step["tracked_bytes"] < 0.03 * step["peak_bytes"]
    assert {row[4] for row in rows[1:]} == {"+0"}


def test_the_tables_show_it(measured: dict[str, Any]) -> None:
    preparation, step = preparation_rows(measured), step_rows(measured)
    for rows in (preparation, step):
        assert {len(row) for row in rows} == {len(rows[0])}
    assert [row[0] for row in preparation[1:]] == list(CASES)
    assert [row[:2] for row in step[1:]] == [(tokens, case) for tokens in ("8", "16") for case in CASES]
    compute = dict(zip(step[0], step[1 + CASES.index("compute")], strict=True))
    assert (compute["loss difference"], compute["gradient difference"]) == ("0", "0")
    assert compute["step peak MiB"] == f"{by_case(measured)['compute']['steps'][0]['peak_bytes'] / 2**20:.1f}"
    assert f"torch {torch.__version__}" in header(measured)
    assert "8, 16 tokens" in header(measured)


@pytest.fixture
def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Lets a training step run out of a device's memory, which a host's does not do in this way."""

    def install(fails: Callable[[int], bool]) -> None:
        def raise_where_it_fails(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if fails(kwargs["input_ids"].shape[1]):
                raise torch.OutOfMemoryError("CUDA out of memory.")

        def adapt(*args: Any, **kwargs: Any) -> PeftModel:
            model = get_peft_model(*args, **kwargs)
            model.register_forward_pre_hook(raise_where_it_fails, with_kwargs=True)
            return model

        monkeypatch.setattr(bench_case, "get_peft_model", adapt)
        monkeypatch.setattr(runner, "_run_case", run_here)

    return install


def test_a_case_that_runs_out_of_memory_is_named_and_the_others_are_measured(
    out_of_memory: Callable[[Callable[[int], bool]], None], tmp_path: Path
) -> None:
    out_of_memory(lambda tokens: tokens == 16)
    asked = settings(shape=dataclasses.replace(TINY, num_layers=1), tokens=(8, 16, 24))
    result = runner.run_benchmark(asked, ["peft", "compute"], lambda line: None)
    assert json.loads(json.dumps(result))["cases"] == result["cases"]
    for case in result["cases"]:
        for step in case["steps"]:
            found = {step[key] for key in ("loss", "peak_bytes", "system_peak_bytes", "largest_gradient_difference")}
            assert (None in found) == (step["tokens"] == 16) == (step["seconds"] is None)
            assert len(found) == 1 or step["tokens"] != 16
    rows = [dict(zip(step_rows(result)[0], row, strict=True)) for row in step_rows(result)[1:]]
    assert [row["step s"] == row["loss"] == "out of memory" for row in rows] == [False, False, True, True, False, False]
    assert {row["gradient difference"] for row in rows} == {"0", "-"}
    draw(result, tmp_path / "plot.svg")


def test_a_step_whose_comparison_runs_out_of_memory_keeps_its_costs(
    out_of_memory: Callable[[Callable[[int], bool]], None],
) -> None:
    out_of_memory(lambda tokens: torch.are_deterministic_algorithms_enabled())
    result = runner.run_benchmark(settings(), ["peft"], lambda line: None)
    (step,) = result["cases"][0]["steps"]
    assert step["peak_bytes"] > 0
    assert [step[key] for key in ("loss", "num_gradients", "largest_gradient_difference")] == [None, None, None]


def test_what_was_not_compared_is_not_called_identical(compared: dict[str, Any]) -> None:
    other = copy.deepcopy(compared)
    step = other["combinations"][7]["cases"][0]["steps"][0]
    step |= {"loss": None, "num_gradients": None, "largest_gradient_difference": None}
    del step["loss_difference"]
    assert not runner.is_identical(other)
    assert identity_rows(other)[8][6:] == ("-", "out of memory", "-", "-")


def test_the_allocators_table_is_of_cuda(measured: dict[str, Any]) -> None:
    assert allocator_rows(measured) == []
    on_cuda = copy.deepcopy(measured)
    held = {"allocated_bytes": 1 << 20, "allocated_peak_bytes": 1 << 20}
    held |= {"reserved_bytes": 2 << 20, "reserved_peak_bytes": 2 << 20}
    on_cuda["cases"][0]["allocator"] = {
        "before": held,
        "after": {**held, "allocated_bytes": 3 << 20, "allocated_peak_bytes": 9 << 20, "reserved_bytes": 7 << 20},
    }
    names, row = allocator_rows(on_cuda)
    assert dict(zip(names, row, strict=True)) == {
        "case": "peft",
        "allocated MiB before": "1.0",
        "allocated MiB after": "3.0",
        "allocated MiB added": "2.0",
        "allocated MiB peak": "9.0",
        "reserved MiB before": "2.0",
        "reserved MiB after": "7.0",
        "reserved MiB added": "5.0",
        "reserved MiB peak": "2.0",
    }


def test_compute_is_peft_bit_for_bit_in_every_combination(compared: dict[str, Any]) -> None:
    assert json.loads(json.dumps(compared))["combinations"]
    options = [combination["settings"] for combination in compared["combinations"]]
    names = ("reentrant", "autocast", "modules_to_save")
    assert len({(o["shape"]["is_tied"], *(o[name] for name in names)) for o in options}) == 16
    for combination in compared["combinations"]:
        (case,) = combination["cases"]
        (step,) = case["steps"]
        assert case["case"] == "compute"
        assert step["num_gradients"] == 2 * 7 + combination["settings"]["modules_to_save"]
        assert step["largest_gradient"] > 0
        assert (step["loss_difference"], step["largest_gradient_difference"]) == (0, 0)
    assert len({case["steps"][0]["loss"] for c in compared["combinations"] for case in c["cases"]}) >= 4
    assert runner.is_identical(compared)


def test_the_table_of_combinations(compared: dict[str, Any]) -> None:
    rows = identity_rows(compared)
    assert len(rows) == 17
    assert len(set(rows)) == 17
    assert {row[-2:] for row in rows[1:]} == {("0", "0")}
    assert "head" not in header(compared).splitlines()[2].replace("heads", "")


@pytest.mark.parametrize("key", ["loss_difference", "largest_gradient_difference"])
def test_one_difference_is_enough_to_differ(compared: dict[str, Any], key: str) -> None:
    other = copy.deepcopy(compared)
    other["combinations"][7]["cases"][0]["steps"][0][key] = 1e-12
    assert not runner.is_identical(other)


def test_a_precision_that_computes_otherwise_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = settings(repeats=0)
    run_here("peft", asked, tmp_path)
    step = run_here("none", asked, tmp_path)["steps"][0]
    assert step["largest_gradient_difference"] > 0
    assert "seconds" not in step


def test_compute_is_peft_bit_for_bit_where_quantized_layers_compute_in_half(tmp_path: Path) -> None:
    asked = settings(repeats=0, compute_dtype="bfloat16")
    peft, compute = (bench_case.Case(name, asked, tmp_path).run()["steps"][0] for name in ("peft", "compute"))
    assert compute["loss"] == peft["loss"]
    assert compute["largest_gradient"] > 0
    assert compute["largest_gradient_difference"] == 0


def test_numbers_are_compared_where_attention_is_computed_by_its_formula_on_cuda() -> None:
    """Its fused kernels add up in any order there, whatever is asked. Their flags can be read without a device."""

    def enabled() -> dict[str, bool]:
        kernels = ("math", "flash", "mem_efficient", "cudnn")
        return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in kernels}

    before = enabled()
    for device, allowed in (("cuda:0", {"math"}), ("cpu", {name for name, on in before.items() if on})):
        with bench_steps._deterministic(torch.device(device)):
            assert {name for name, on in enabled().items() if on} == allowed
            assert torch.are_deterministic_algorithms_enabled()
    assert enabled() == before
    assert len(allowed) > 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_cases_that_matter() -> None:
    on_host = ("peft", "full", "compute", "norms", "adapted", "none")
    assert default_cases(settings(step=False)) == on_host
    assert default_cases(settings(step=False, device="cuda:0")) == ("peft", "peft-uncleared", *on_host[1:])
    assert set(default_cases(settings())) == {*on_host, "compute-chunked"}
    assert default_cases(settings(device="cuda")) == CASES


def test_settings_travel_as_json() -> None:
    asked = settings(head_chunk_bytes=4096)
    assert Settings.from_dict(json.loads(json.dumps(asked.to_dict()))) == asked


def test_the_shapes() -> None:
    assert (SMALL.hidden_size, SMALL.num_layers, SMALL.vocab_size) == (1024, 4, 32768)
    assert MISTRAL_7B.resized(hidden_size=4096, num_layers=None, vocab_size=None) == MISTRAL_7B


def test_the_model_is_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(TINY, torch.device("cpu"), compute_dtype=torch.bfloat16, seed=0)
    plan = build_plan(model, precision="full")
    assert plan.quantization == "bitsandbytes_4bit"
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    again = build_model(TINY, torch.device("cpu"), compute_dtype=torch.bfloat16, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    packed = TINY.num_layers * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) // 2
    assert sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8) == packed


def test_pefts_preparation_is_taken_back_for_the_next_timing() -> None:
    model = build_model(TINY, torch.device("cpu"), compute_dtype=torch.bfloat16, seed=0)

    def read() -> list[Any]:
        hooks = [len(module._forward_hooks) for module in model.modules()]
        return [*((p.dtype, p.requires_grad) for p in model.parameters()), hooks, is_checkpointing(model)]

    before = read()
    undo = bench_case._undo_of_peft(model)
    prepare_model_for_kbit_training(model)
    assert all(now != then for now, then in zip(read()[-2:], before[-2:], strict=True))
    with bench_case._quiet():  # transformers renamed what it calls
        undo()
    assert read() == before


def test_live_bytes_count_shared_memory_once() -> None:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = torch.nn.ModuleDict({"first": first, "second": second})
    assert live_bytes(model, lambda name: True) == 64
    assert live_bytes(model, lambda name: False) == 0


def test_stored_bytes_count_a_quantized_weights_scales() -> None:
    model = build_model(TINY, torch.device("cpu"), compute_dtype=torch.bfloat16, seed=0)
    layer = model.model.layers[0].self_attn.q_proj
    scales = layer.weight.quant_state.absmax
    state = layer.state_dict()["weight.quant_state.bitsandbytes__nf4"]
    assert stored_bytes(layer) == layer.weight.nbytes + scales.nbytes + 16 * 4 + state.nbytes


def test_the_measured_peak_of_tensors_is_exact() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    kept = torch.ones(1000, dtype=torch.uint8)

    def run() -> None:
        a = torch.empty(5000, dtype=torch.uint8)
        b = torch.empty(300, dtype=torch.uint8)
        del a
        torch.empty(4000, dtype=torch.uint8)
        del b

    for _ in range(2):
        assert meter.tensor_peak(lambda: kept.nbytes, run) == 1000 + 5300
    with pytest.raises(ZeroDivisionError):
        meter.tensor_peak(lambda: kept.nbytes, lambda: 1 / 0)
    assert gc.isenabled()


def test_a_short_peak_is_measured() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    if not meter.method.endswith("reset before"):
        pytest.skip("the high-water mark cannot be reset here")
    meter.start()
    torch.ones(16 << 20)
    assert meter.peak() > 60 << 20
    meter.start()
    assert meter.peak() < 30 << 20


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo Traceback >&2; echo 'ValueError: too wide' >&2; exit 1", "case 'none' failed: ValueError: too wide"),
        ("exit 3", "case 'none' failed: exit status 3"),
        ("kill -9 $$", "case 'none' was ended by signal 9: was there enough memory?"),
    ],
    ids=["raises", "exits", "is killed"],
)
@pytest.mark.skipif(os.name != "posix", reason="stands a shell script in for the interpreter")
def test_a_case_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, message: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(BenchError, match=re.escape(message)):
        runner.run_benchmark(settings(), ["none"], lambda line: None)
