"""The losses and rollouts of docs/figures: pages show what was saved, a seed trains one LoRA in each arithmetic."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kbitwrap.cli.console import quiet_libraries

TINY = {
    "repeats": 2,
    "hidden_size": 64,
    "num_layers": 1,
    "pretraining_steps": 12,
    "steps": 4,
    "batch_size": 4,
    "length": 32,
    "learning_rate": 1e-2,
    "rank": 4,
    "num_held_out": 4,
}


@pytest.fixture(scope="module")
def llamas(figures: Callable[[str], Any]) -> Any:
    return figures("llamas")


@pytest.fixture(scope="module")
def losses(figures: Callable[[str], Any]) -> Any:
    return figures("losses")


@pytest.fixture(scope="module")
def measured(llamas: Any, losses: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return losses.train(llamas.Settings(**TINY), (*losses.CASES, "full-float32"), tmp_path_factory.mktemp("bases"))


def by_case(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in result["losses"]}


@pytest.mark.parametrize(("name", "section", "text"), [("losses", "loss", "text"), ("rollouts", "rollout", "text_of")])
def test_the_page_shows_what_was_saved(name: str, section: str, text: str, figures: Callable[[str], Any]) -> None:
    command = figures(name)
    shown = figures("sections").section(command.PAGE, f"benchmark: {section}")
    saved = json.loads(command.FIGURES.read_text(encoding="utf-8"))
    assert shown.partition("```text\n")[2].partition("\n```")[0] == getattr(command, text)(saved)


@pytest.mark.thorough
def test_differences_are_taken_seed_by_seed(losses: Any, measured: dict[str, Any]) -> None:
    cases = by_case(measured)
    assert {name: case["difference"]["case"] for name, case in cases.items() if "difference" in case} == (
        losses.COMPARED_WITH
    )
    for name, other in losses.COMPARED_WITH.items():
        difference = cases[name]["difference"]["held_out_loss"]["all"]
        pairs = zip(cases[name]["held_out_loss"]["all"], cases[other]["held_out_loss"]["all"], strict=True)
        assert difference == [mine - theirs for mine, theirs in pairs]
        # Another base, adapter or batch would differ by far more than arithmetic does.
        assert max(map(abs, difference)) < 0.1 * cases[name]["held_out_loss"]["deviation"]
        assert cases[name]["held_out_loss"]["mean"] < cases[name]["base_loss"]["mean"]


@pytest.mark.thorough
def test_only_float64_computes_what_float64_computes(llamas: Any, measured: dict[str, Any]) -> None:
    for name, case in by_case(measured).items():
        for key in llamas.DISTANCES:
            for distance in (value for spread in case[key].values() for value in spread["all"]):
                # bfloat16 has eight bits: half a percent of rounding, more or less, and no other model's figures.
                assert (distance == 0) if name == "float64" else (1e-4 < distance < 2e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_the_float64_model_multiplies_with_the_quantized_weights(llamas: Any, tmp_path: Path, quant: str) -> None:
    settings = llamas.Settings(**{**TINY, "pretraining_steps": 1})
    with quiet_libraries():
        llamas.pretrain(llamas.read_text(settings), settings, seed=0).bfloat16().save_pretrained(tmp_path)
        exact, quantized = llamas.load_exact(tmp_path, quant), llamas.load(tmp_path, quant)
        x = torch.eye(64, dtype=torch.bfloat16)
        name = "model.layers.0.self_attn.q_proj"
        products = quantized.get_submodule(name)(x)
    assert {parameter.dtype for parameter in exact.parameters()} == {torch.float64}
    # An int8 layer rounds its product to bfloat16; a 4-bit one has weights that are rounded already.
    assert torch.equal(exact.get_submodule(name).weight.T.to(x.dtype), products)
    norm = exact.get_submodule("model.norm")
    x = torch.randn(3, 64, dtype=torch.float64)
    scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    torch.testing.assert_close(norm(x), norm.weight * x * scale, rtol=1e-13, atol=0)


@pytest.mark.thorough
def test_full_gives_the_losses_of_pefts_function(losses: Any, measured: dict[str, Any]) -> None:
    peft, full = ({**by_case(measured)[name], "case": "", "difference": None} for name in ("peft", "full-float32"))
    assert full == peft


@pytest.mark.thorough
def test_what_was_trained_is_shown_and_drawn(
    losses: Any, measured: dict[str, Any], figures: Callable[[str], Any], tmp_path: Path
) -> None:
    shown = {**measured, "losses": measured["losses"][:-1]}
    assert json.loads(json.dumps(shown)) == shown
    rows = losses.text(shown).splitlines()[-len(losses.CASES) :]
    assert [row.split()[0] for row in rows] == list(losses.CASES)
    plots = [tmp_path / f"{name}.svg" for name in "ab"]
    for plot in plots:
        figures("style").draw(losses.figure, plot, shown)
    assert plots[0].read_bytes() == plots[1].read_bytes()


@pytest.mark.thorough
def test_a_dequantized_base_is_as_near_to_the_trainer_in_4_bits_as_arithmetic_lets_it(
    llamas: Any, figures: Callable[[str], Any]
) -> None:
    rollouts = figures("rollouts")
    settings = llamas.Settings(**{**TINY, "repeats": 1, "pretraining_steps": 15, "steps": 5, "batch_size": 8})
    result = rollouts.compare(settings)
    assert json.loads(json.dumps(result)) == {**result, "settings": dataclasses.asdict(settings)}
    for case in result["rollouts"]:
        assert case["held_out_loss"] < case["base_loss"]
        original, dequantized, quantized = (case[engine]["divergence"] for engine in rollouts.ENGINES)
        if case["case"].endswith("nf4"):
            assert dequantized < original / 4
            assert dequantized < 3 * quantized
    assert rollouts.text_of(result).count("\ngemma-") == 2
