"""What a report says: its repr in one line, and no more than a page however large the model is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import BitsAndBytesConfig

from kbitwrap import (
    CheckpointReport,
    DoctorReport,
    ExportReport,
    KbitPreparedModel,
    ManifestDiff,
    Plan,
    RestoreReport,
    StateDiff,
    StepMemory,
    build_plan,
    check_sharding,
    doctor,
    inspect_checkpoint,
    predict_step,
)
from kbitwrap.checkpoints.doctor import Finding
from kbitwrap.reports import TensorMeasure
from support import zoo

HOSTILE = "<script>alert('1')</script>\n\x1b[2J" + "x" * 300
NAMES = tuple(f"model.layers.{i}.norm.weight" for i in range(352))


def plan() -> Plan:
    return build_plan(zoo.load("llama", "nf4"), precision="full")


@functools.cache
def step() -> StepMemory:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return predict_step(zoo.checkpoint("llama"), batch_size=1, seq_len=8, quantization_config=config)


def diff(kind: type[StateDiff] | type[ManifestDiff]) -> Any:
    return kind({HOSTILE: {"dtype": (HOSTILE, HOSTILE)}, **{name: {"value": (1, 2)} for name in NAMES}})


def findings() -> DoctorReport:
    return DoctorReport(HOSTILE, tuple(Finding("it is zero", f, HOSTILE, "train it") for f in NAMES), (HOSTILE,))


def of_export() -> ExportReport:
    return ExportReport(Path(HOSTILE), (HOSTILE,), 63, 110282, NAMES, NAMES, 0.5, 7)


REPORTS: dict[str, Callable[[], Any]] = {
    "plan": plan,
    "plan of a stranger": lambda: replace(plan(), quantization=HOSTILE, by_role={HOSTILE: plan().by_role["norm"]}),
    "step": step,
    "restored": lambda: RestoreReport(trained=(HOSTILE, *NAMES), put_back=NAMES),
    "state": lambda: diff(StateDiff),
    "manifests": lambda: diff(ManifestDiff),
    "doctor": findings,
    "doctor of a healthy model": lambda: doctor(nn.Linear(2, 2)),
    "checkpoint": lambda: inspect_checkpoint(zoo.checkpoint("llama")),
    "checkpoint of a stranger": lambda: CheckpointReport(
        Path(HOSTILE), None, None, True, 10**9, 10**15, {}, {HOSTILE: 10**15}, 10**15
    ),
    "export": of_export,
    "sharding": lambda: check_sharding(zoo.load("llama", "nf4"), "fsdp2"),
    "prepared": lambda: KbitPreparedModel(zoo.load("llama", "nf4")),
    "nothing": RestoreReport,
    "no difference": StateDiff,
}


@functools.cache
def made(name: str) -> Any:
    """A report, which is made once."""
    return REPORTS[name]()


@pytest.mark.parametrize("name", REPORTS)
def test_a_repr_is_one_line_whatever_the_names(name: str) -> None:
    report = made(name)
    assert repr(report).startswith(f"{type(report).__name__}(")
    assert len(repr(report)) <= 120
    assert repr(report).isprintable()


def test_a_manifest_is_one_line_too() -> None:
    model = zoo.load("llama", "nf4")
    with KbitPreparedModel(model, precision="full") as prepared:
        manifest = prepared.manifest()
    said = f"Manifest('LlamaForCausalLM', 'full', {len(manifest.tensors)} tensors, {manifest.created})"
    assert (repr(manifest), str(manifest)) == (said, said)
    assert type(manifest).from_json(manifest.to_json()) == manifest


def test_reprs_say_what_matters() -> None:
    assert repr(plan()) == "Plan('full' on bitsandbytes_4bit: 32.6 KiB added, peak 64.0 KiB, warnings: 1)"
    assert repr(RestoreReport()) == "RestoreReport(nothing changed by others)"
    assert repr(RestoreReport(trained=("a",), replaced=("b", "c"))) == "RestoreReport(1 trained, 2 replaced)"
    assert repr(StateDiff()) == "StateDiff(as preparation left it)"
    assert repr(StateDiff({"a": {"value": (1, 2)}})) == "StateDiff(a: value: expected 1, found 2)"
    assert repr(ManifestDiff(missing=("a",))) == "ManifestDiff(a: missing)"
    assert repr(replace(of_export(), path=Path("out"))) == "ExportReport(63 tensors, 110,282 bytes, 'out')"
    assert repr(doctor(nn.Linear(2, 2))) == "DoctorReport(findings: 0, not measured: 0, 'Linear')"
    assert repr(step()).startswith("StepMemory('norms', batch 1, 8 tokens, on cuda: ")


@pytest.mark.parametrize("name", REPORTS)
def test_what_is_printed_is_bounded(name: str) -> None:
    printed = str(made(name))
    assert len(printed) < 16_000
    assert printed.count("\n") <= 45


def test_the_first_names_are_printed_and_how_many_there_are_more() -> None:
    assert str(RestoreReport(replaced=NAMES)) == f"restored\nreplaced: {', '.join(NAMES[:12])}, ... and 340 more"
    assert str(StateDiff({name: {"value": (1, 2)} for name in NAMES})).splitlines()[-2:] == [
        f"{NAMES[11]}: value: expected 1, found 2",
        "... and 340 more",
    ]
    said = StateDiff({"a": {"value": ("the original value", "another value")}})
    assert str(said) == "a: value: expected 'the original value', found 'another value'"
    assert RestoreReport(replaced=NAMES).to_dict()["replaced"] == [*NAMES]
    assert [*StateDiff({name: {"value": (1, 2)} for name in NAMES}).to_dict()] == [*NAMES]
    assert len(findings().to_dict()["findings"]) == 352


def test_what_stands_of_an_adapter_is_told_in_a_line_and_what_others_added_by_name() -> None:
    names = tuple(f"layers.{i}.q_proj.lora_A.default.weight" for i in range(20))
    told = "your adapter is still on the model: unload() takes it off"
    assert str(RestoreReport(foreign=names)) == f"restored\n{told}"
    assert str(RestoreReport(foreign=(*names, "extra"))) == f"restored\n{told}\nforeign: extra"
    assert "lora" not in str(RestoreReport(foreign=("extra",)))


def test_the_error_of_rounding_at_random_is_not_told_as_one_of_the_merge() -> None:
    for bits, is_told in ((16, True), (4, False)):
        tensors = {"weight": TensorMeasure(1.0, 2.23, bits)}
        said = str(replace(of_export(), tensors=tensors, kept=1.0, error=2.23))
        assert "100.0% of the delta kept" in said
        assert ("rounding is off by 223.0%" in said) == is_told


def test_another_quantization_is_told_before_the_tensors_that_differ_with_it() -> None:
    setting = {"model.quantization.config.bnb_4bit_use_double_quant": (True, None)}
    said = "another quantization: bnb_4bit_use_double_quant: expected True, found None"
    assert ManifestDiff({"": {**setting, "tensors": ("a1", "b2")}}).summary() == said
    tensors = {name: {"digest": ("a1", "b2")} for name in NAMES[:5]}
    assert ManifestDiff({"": setting, **tensors}, missing=("x",)).summary() == f"{said}; 6 tensors differ with it"
    of_another = ManifestDiff({"": {**setting, "model.class": ("A", "B")}, **tensors}).summary()
    assert "model.class: expected 'A', found 'B'" in of_another
    assert "digest" in of_another
