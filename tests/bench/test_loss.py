"""The benchmark of losses: a seed trains the same LoRA in each arithmetic, and float64 is told from the others."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from kbitwrap.bench import loss as bench_loss
from kbitwrap.bench.loss import COMPARED_WITH, read_text, run_loss
from kbitwrap.bench.plot import draw_losses
from kbitwrap.bench.report import loss_header, loss_rows
from kbitwrap.bench.settings import DEFAULT_LOSS_CASES, LOSS_CASES, BenchError, LossSettings
from kbitwrap.cli import main
from kbitwrap.cli.console import quiet_libraries

TINY = LossSettings(
    repeats=2,
    hidden_size=64,
    num_layers=1,
    pretraining_steps=12,
    steps=4,
    batch_size=4,
    length=32,
    learning_rate=1e-2,
    rank=4,
    num_held_out=4,
)

pytestmark = pytest.mark.thorough  # trains for seconds, for a table of the authors' own


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    lines: list[str] = []
    with quiet_libraries():
        result = run_loss(TINY, LOSS_CASES, lines.append)
    assert len(lines) == TINY.repeats * (1 + len(LOSS_CASES))
    return result


def by_case(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in result["losses"]}


def test_every_case_is_trained_and_is_json(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured)) == measured
    assert [case["case"] for case in measured["losses"]] == list(LOSS_CASES)
    assert measured["settings"].items() >= dataclasses.asdict(TINY).items()
    for case in measured["losses"]:
        assert len(case["train_loss"]) == TINY.steps
        for key in ("base_loss", "end_loss", "held_out_loss"):
            spread = case[key]
            assert len(set(spread["all"])) == TINY.repeats
            assert spread["mean"] == pytest.approx(sum(spread["all"]) / 2)
            assert spread["error"] == pytest.approx(abs(spread["all"][0] - spread["all"][1]) / 2)
        assert case["held_out_loss"]["mean"] < case["base_loss"]["mean"]


def test_differences_are_taken_seed_by_seed(measured: dict[str, Any]) -> None:
    cases = by_case(measured)
    assert {name: case["difference"]["case"] for name, case in cases.items() if "difference" in case} == COMPARED_WITH
    for name, other in COMPARED_WITH.items():
        difference = cases[name]["difference"]
        pairs = zip(cases[name]["held_out_loss"]["all"], cases[other]["held_out_loss"]["all"], strict=True)
        assert difference["held_out_loss"]["all"] == [mine - theirs for mine, theirs in pairs]
        own, its = (cases[found]["train_loss"] for found in (name, other))
        assert difference["train_loss"]["mean"] == pytest.approx([a - b for a, b in zip(own, its, strict=True)])
        # Another base, adapter or batch would differ by far more than arithmetic does.
        assert max(map(abs, difference["held_out_loss"]["all"])) < 0.1 * cases[name]["held_out_loss"]["deviation"]
        assert any(difference["train_loss"]["mean"])


def test_only_float64_computes_what_float64_computes(measured: dict[str, Any]) -> None:
    for name, case in by_case(measured).items():
        for key in ("logits_distance", "gradient_distance"):
            for distance in (value for spread in case[key].values() for value in spread["all"]):
                # bfloat16 has eight bits: half a percent of rounding, more or less, and no other model's figures.
                assert (distance == 0) if name == "float64" else (1e-4 < distance < 2e-2)


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_the_float64_model_multiplies_with_the_quantized_weights(tmp_path: Path, quant: str) -> None:
    settings = dataclasses.replace(TINY, pretraining_steps=1, quant=quant)
    text = read_text(settings)
    with quiet_libraries():
        bench_loss.pretrain(text, settings, seed=0).bfloat16().save_pretrained(tmp_path)
        exact, quantized = bench_loss._exact(tmp_path, settings), bench_loss._load(tmp_path, settings)
        x = torch.eye(64, dtype=torch.bfloat16)
        name = "model.layers.0.self_attn.q_proj"
        products = quantized.get_submodule(name)(x)
    assert {parameter.dtype for parameter in exact.parameters()} == {torch.float64}
    # An int8 layer rounds its product to bfloat16; a 4-bit one has weights that are rounded already.
    assert torch.equal(exact.get_submodule(name).weight.T.to(x.dtype), products)
    if quant == "nf4":
        assert torch.equal(exact.get_submodule(name).weight.T, products.double())
    norm = exact.get_submodule("model.norm")
    x = torch.randn(3, 64, dtype=torch.float64)
    scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    torch.testing.assert_close(norm(x), norm.weight * x * scale, rtol=1e-13, atol=0)


def test_full_gives_the_losses_of_pefts_function(measured: dict[str, Any], tmp_path: Path) -> None:
    settings = dataclasses.replace(TINY, repeats=1, steps=4, quant="int8", autocast=False)
    with quiet_libraries():
        without = run_loss(settings, ("peft", "full-float32"), lambda line: None, tmp_path)
        again = run_loss(
            settings, ("peft",), lambda line: pytest.fail(line) if "pretraining" in line else None, tmp_path
        )
    assert again["losses"] == without["losses"][:1]
    for result in (measured, without):
        cases = by_case(result)
        figures = [{**cases[name], "case": "", "difference": None} for name in ("peft", "full-float32")]
        assert figures[0] == figures[1]
    (case,) = again["losses"]
    assert case["train_loss"] != by_case(measured)["peft"]["train_loss"][:4]
    # On a CPU, int8 layers in training multiply in their input's dtype, which here is float32 from the embeddings on.
    assert case["logits_distance"]["start"]["mean"] < 1e-6
    header = loss_header(without)
    assert "in int8 and bfloat16" in header
    assert "no autocast" in header


def test_the_table_shows_it(measured: dict[str, Any]) -> None:
    rows = [dict(zip(loss_rows(measured)[0], row, strict=True)) for row in loss_rows(measured)[1:]]
    assert [row["case"] for row in rows] == list(LOSS_CASES)
    assert [row["adapters"] for row in rows] == ["bfloat16"] * 2 + ["float32"] * 3 + ["float64", "float32"]
    assert [row["minus"] for row in rows] == ["-", *COMPARED_WITH.values()]


def test_one_seed_has_no_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossSettings, "__init__", lambda self, **given: self.__dict__.update(vars(TINY), repeats=1))
    assert main(["bench", "--loss", "--case", "none", "--case", "norms"]) == 0
    (row,) = re.findall("^norms .*", capsys.readouterr().out, re.MULTILINE)
    assert row.count("± -") == 2


def test_what_was_saved_is_shown_and_drawn_again(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(measured))
    plots = [tmp_path / f"{name}.svg" for name in "ab"]
    for plot in plots:
        assert main(["bench", "--from", str(saved), "--plot", str(plot)]) == 0
    assert len(re.findall(f"^(?:{'|'.join(LOSS_CASES)}) ", capsys.readouterr().out, re.MULTILINE)) == 2 * len(
        LOSS_CASES
    )
    assert plots[0].read_bytes() == plots[1].read_bytes()
    texts = [element.text for element in ET.parse(plots[0]).iter() if element.tag.endswith("}text")]
    assert {*LOSS_CASES, *(f"{name} - {other}" for name, other in COMPARED_WITH.items())} <= set(texts)


def test_a_case_without_one_to_compare_it_with_is_drawn(measured: dict[str, Any], tmp_path: Path) -> None:
    alone = {**measured, "losses": [case for case in measured["losses"] if case["case"] == "none"]}
    draw_losses(alone, tmp_path / "plot.svg")
    texts = [element.text for element in ET.parse(tmp_path / "plot.svg").iter() if element.tag.endswith("}text")]
    assert "none" in texts


def test_the_command_takes_its_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(bench_loss, "run_loss", lambda *given: asked.extend(given) or {"losses": []})
    options = [
        "--repeats",
        "5",
        "--seed",
        "7",
        "--layers",
        "2",
        "--hidden-size",
        "192",
        "--steps",
        "9",
        "--learning-rate",
        "1e-3",
        "--quant",
        "int8",
        "--no-autocast",
    ]
    assert main(["bench", "--loss", *options, "--pretraining-steps", "8", "--json"]) == 0
    settings, cases, _ = asked
    assert settings == LossSettings(
        repeats=5,
        seed=7,
        num_layers=2,
        hidden_size=192,
        steps=9,
        pretraining_steps=8,
        learning_rate=1e-3,
        quant="int8",
        autocast=False,
    )
    assert cases == DEFAULT_LOSS_CASES


@pytest.mark.parametrize(
    "options",
    [
        ["--loss", "--tied"],
        ["--loss", "--reentrant"],
        ["--no-autocast"],
        ["--identity", "--no-autocast"],
        ["--step", "--quant", "int8"],
        ["--loss", "--tokens", "8"],
        ["--loss", "--vocab-size", "512"],
        ["--loss", "--compute-dtype", "float32"],
        ["--loss", "--case", "compute"],
        ["--loss", "--hidden-size", "100"],
        ["--loss", "--plot", "plot.txt"],
        ["--loss", "--output", "/no/such/folder/file"],
        ["--steps", "3"],
        ["--step", "--pretraining-steps", "3"],
        ["--identity", "--learning-rate", "1"],
        ["--case", "float64"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert re.fullmatch(r"kbitwrap: error: .+\n", capsys.readouterr().err)


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast"])
def test_a_learning_rate_is_positive(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--loss", f"--learning-rate={rate}"]) == 2
    assert f"expected a positive number, found {rate!r}" in capsys.readouterr().err


def test_a_library_without_source_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match="blocks"):
        read_text(dataclasses.replace(TINY, batch_size=10**6))

    def refuse(module: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(bench_loss.inspect, "getsource", refuse)
    assert main(["bench", "--loss"]) == 2
    assert re.fullmatch(r"kbitwrap: error: .*source code.*\n", capsys.readouterr().err)
