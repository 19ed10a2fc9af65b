"""What a notebook shows of a report: one line, bars, and no more than a page however large the model is."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
    assert repr(diff(StateDiff)) == "StateDiff(1 dtype, 352 value)"
    assert repr(ManifestDiff(missing=("a",))) == "ManifestDiff(1 missing)"
    assert repr(replace(of_export(), path=Path("out"))) == "ExportReport(63 tensors, 110,282 bytes, 'out')"
    assert repr(doctor(nn.Linear(2, 2))) == "DoctorReport(findings: 0, not measured: 0, 'Linear')"
    assert repr(step()).startswith("StepMemory('norms', batch 1, 8 tokens, on cuda: ")


@pytest.mark.parametrize(("bits", "is_said"), [(4, True), (8, True), (16, False)])
def test_the_error_of_codes_is_said_to_be_random(bits: int, is_said: bool) -> None:
    merged = replace(of_export(), kept=0.98, error=2.4, tensors={"a": TensorMeasure(0.98, 2.4, bits)})
    assert "98.0% of the delta kept, error 240.0% of its length" in str(merged)
    assert ("random: it cancels in a layer's sums" in str(merged)) == is_said


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
    assert str(said) == "a: value: expected the original value, found another value"
    assert RestoreReport(replaced=NAMES).to_dict()["replaced"] == [*NAMES]
    assert [*StateDiff({name: {"value": (1, 2)} for name in NAMES}).to_dict()] == [*NAMES]
    assert len(findings().to_dict()["findings"]) == 352


@pytest.mark.parametrize("name", REPORTS)
def test_html_is_well_formed_small_and_escaped(name: str) -> None:
    html = getattr(made(name), "_repr_html_", lambda: None)()
    has_bars = name not in ("checkpoint", "checkpoint of a stranger", "export", "sharding", "prepared")
    assert (html is not None) == (has_bars and name not in ("nothing", "no difference", "doctor of a healthy model"))
    if html is not None:
        assert len(html) < 20_000
        assert "<script" not in html
        found = {element.tag for element in ElementTree.fromstring(html.replace("\x1b", "")).iter()}
        assert found == {"div", "b", "table", "tr", "td", "span"}
        # The page's own colors of text and background: it is read on light and dark ones.
        assert not re.search(r'(^|[";])color:', html)


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    two = {
        "small": {"count": 1, "bytes": 100, "added_bytes": 0},
        "large": {"count": 1, "bytes": 100, "added_bytes": 300},
    }
    html = replace(plan(), by_role=two)._repr_html_()
    assert html is not None
    widths = [float(width) for width in re.findall(r"[^-]width:([\d.]+)em", html)]
    assert widths == [3.5, 0, 3.5, 10.5]
    for name, figures in (("small", "100 B"), ("large", "100 B + 300 B")):
        assert re.search(f">{name}<.*?>{re.escape(figures)}<", html)


def test_a_step_shows_what_memory_is_held_for() -> None:
    html = step()._repr_html_()
    assert html is not None
    assert all(f">{kind.replace('_', ' ')}<" in html for kind, size in step().by_kind.items() if size)
    assert "peaks of the phases: before " in html
