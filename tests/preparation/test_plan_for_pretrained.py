"""Planning from a config alone: the bytes are those of the loaded model, and no weight is read."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BitsAndBytesConfig, LlamaConfig

from kbitwrap import (
    ConfigError,
    KbitPreparedModel,
    MemoryBudgetError,
    Plan,
    Precision,
    UnsupportedModelError,
    build_plan,
)
from kbitwrap.cli import main
from kbitwrap.config import format_bytes
from support import zoo
from support.memory import live_bytes
from support.thorough import every_other, few

FIGURES = ("quantization", "added_bytes", "peak_bytes", "cache_bytes", "record_bytes", "by_role", "warnings")
FURTHER = ("falcon", "gemma3", "gpt_oss", "mamba", "deepseek_v3")
# The core, and what else is unquantized: experts, convolutions, sinks, subclasses of linear layers, a Q-Former.
NAMES = [*zoo.CORE, *(n for n in FURTHER if n in zoo.ARCHITECTURES)]
CASES = [(name, quant) for name in NAMES for quant in ("nf4", "int8") if quant in zoo.ARCHITECTURES[name].quants]
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
MIB = 2**20


def quantization(name: str, quant: str, dtype: torch.dtype = torch.bfloat16) -> BitsAndBytesConfig:
    return zoo._quantization_config(zoo.ARCHITECTURES[name], quant, dtype)


def without_checkpointing() -> str:
    rows = zoo.ARCHITECTURES.values()
    return next(row.name for row in rows if row.is_quantized and not row.supports_gradient_checkpointing)


def figures(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in FIGURES}


@pytest.fixture
def memory_tables(figures: Callable[[str], Any]) -> Any:
    return figures("memory_tables")


@pytest.fixture
def llama() -> LlamaConfig:
    return LlamaConfig(**zoo.ARCHITECTURES["llama"].config)


def test_the_samples_of_a_tied_weight_are_counted_once() -> None:
    tied, untied = (zoo.load("gemma2", tie_word_embeddings=is_tied) for is_tied in (True, False))
    runs = build_plan(untied).sample_bytes - build_plan(tied).sample_bytes
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert runs == 64 * 64 * tied.lm_head.weight.element_size()


# ----------------------------------------------------------------------------------------------------
# Exactness.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "quant"), few(CASES, CASES[::6]))
def test_the_plan_is_that_of_the_loaded_model(name: str, quant: str) -> None:
    model = zoo.load(name, quant)
    for precision in Precision:
        settings = zoo.fields(name, precision=precision)
        plan = Plan.for_pretrained(zoo.checkpoint(name), quantization(name, quant), torch.bfloat16, **settings)
        assert figures(plan) == figures(build_plan(model, **settings))
        assert [edit.fqns for edit in plan.edits] == [edit.fqns for edit in build_plan(model, **settings).edits]
        loaded = live_bytes(model)
        with KbitPreparedModel(model, **settings):
            assert live_bytes(model) - loaded == plan.added_bytes


@pytest.mark.parametrize("name", every_other(["llama", "t5", "gpt2", "bert"]))
@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_the_plan_is_exact_in_float16(name: str, quant: str) -> None:
    model = zoo.load(name, quant, torch.float16)
    settings = zoo.fields(name, precision="full")
    plan = Plan.for_pretrained(zoo.checkpoint(name), quantization(name, quant, torch.float16), "float16", **settings)
    assert figures(plan) == figures(build_plan(model, **settings))


@pytest.mark.parametrize(
    "options",
    [
        {"bnb_4bit_use_double_quant": True},
        {"bnb_4bit_quant_storage": torch.bfloat16},
        {"llm_int8_skip_modules": ["lm_head", "down_proj"]},
        {"llm_int8_skip_modules": []},
    ],
)
def test_the_options_of_the_quantization_count(options: dict[str, Any]) -> None:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    model = zoo.load("llama", quantization_config=config)
    plan = Plan.for_pretrained(zoo.checkpoint("llama"), config, torch.bfloat16, precision="full")
    assert figures(plan) == figures(build_plan(model, precision="full"))


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_the_quantization_of_a_checkpoint_is_read_from_its_config(tmp_path: Path, quant: str) -> None:
    zoo.load("llama", quant).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, dtype="auto")
    plan = Plan.for_pretrained(tmp_path, precision="full")
    assert figures(plan) == figures(build_plan(model, precision="full"))
    assert plan.added_bytes > 0


def test_a_config_with_two_text_models_is_planned(tmp_path: Path) -> None:
    """MusicGen reads one text, with T5's encoder, and writes another, of sounds."""
    text = {"model_type": "t5", "vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1}
    sound = {"model_type": "encodec", "codebook_size": 16, "num_filters": 2, "hidden_size": 16, "codebook_dim": 16}
    config = transformers.MusicgenConfig(
        text_encoder={**text, "num_heads": 2},
        audio_encoder={**sound, "upsampling_ratios": [4, 2], "sampling_rate": 160, "target_bandwidths": [1.0]},
        decoder={
            "vocab_size": 16,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "num_codebooks": 2,
            "pad_token_id": 16,
            "bos_token_id": 16,
        },
    )
    transformers.MusicgenForConditionalGeneration(config).save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    settings = {"precision": "full", "gradient_checkpointing": False}
    for dtype in ("auto", torch.bfloat16):
        model = transformers.MusicgenForConditionalGeneration.from_pretrained(
            tmp_path, dtype=dtype, quantization_config=nf4, device_map={"": "cpu"}
        )
        plan = Plan.for_pretrained(tmp_path, nf4, dtype, **settings)
        assert figures(plan) == figures(build_plan(model, **settings))


def test_an_unquantized_model_can_be_planned_too() -> None:
    plan = Plan.for_pretrained(zoo.checkpoint("llama"), None, torch.bfloat16, precision="full")
    assert figures(plan) == figures(build_plan(zoo.load("llama", None), precision="full"))
    assert plan.quantization is None


def test_a_quantization_that_transformers_does_not_know_is_ignored_as_when_it_is_loaded(llama: LlamaConfig) -> None:
    llama.quantization_config = {"quant_method": "nonsense"}
    assert Plan.for_pretrained(llama).quantization is None
    assert Plan.for_pretrained(llama, NF4).quantization == "bitsandbytes_4bit"


# ----------------------------------------------------------------------------------------------------
# The models that people use.
# ----------------------------------------------------------------------------------------------------


def test_a_70b_is_planned_by_arithmetic_and_without_its_memory() -> None:
    hidden, layers, intermediate, vocabulary, key_value = 8192, 80, 28672, 128256, 8 * 128
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = Plan.for_pretrained(config, NF4, torch.bfloat16, precision="full")
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 256 * MIB
    embeddings, norms = 2 * vocabulary * hidden, 2 * (2 * layers + 1) * hidden
    linears = layers * (2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * intermediate)
    assert plan.by_role == {
        "input embeddings": {"count": 1, "bytes": embeddings, "added_bytes": embeddings},
        "output embeddings": {"count": 1, "bytes": embeddings, "added_bytes": embeddings},
        "norm": {"count": 2 * layers + 1, "bytes": norms, "added_bytes": norms},
        "quantized": {"count": 7 * layers, "bytes": linears // 2, "added_bytes": 0},
    }
    assert plan.added_bytes == 2 * embeddings + norms
    assert 0 <= 2 * embeddings - plan.cache_bytes < MIB  # those of the norms are used again


@pytest.mark.parametrize(
    ("name", "added", "peak"),
    [
        ("Mistral-7B-v0.3", 512 + 65 * 8192 / MIB, 768),
        ("Llama-3-8B", 2004 + 65 * 8192 / MIB, 3006),
        # Head and embeddings are one tensor: 1750 more stay. Its float32 copy has 3500, which is the peak, and also
        # what PEFT's way adds to the memory reserved: 1750 that stay and 1750 freed.
        ("Gemma-2-9B", 1750 + 169 * 7168 / MIB, 3500),
    ],
)
def test_the_known_figures_of_full(memory_tables: Any, name: str, added: float, peak: float) -> None:
    plan = Plan.for_pretrained(memory_tables.CONFIGS[name], NF4, torch.bfloat16, precision="full")
    assert plan.added_bytes / MIB == added
    assert plan.peak_bytes / MIB == peak
    assert abs(plan.cache_bytes - plan.added_bytes) < 3 * MIB
    assert plan.by_role["norm"]["added_bytes"] / MIB < 1.2


@pytest.mark.thorough
def test_the_tables_of_the_memory_guide_are_those_of_the_planner(
    memory_tables: Any, figures: Callable[[str], Any]
) -> None:
    section = figures("sections").section
    written = []
    for name, table in memory_tables.TABLES.items():
        found = section(memory_tables.MEMORY_PAGE, name)
        assert found.strip() == table()
        written += found.splitlines()
    assert [line for line in written if line.startswith("| Mistral-7B-v0.3 |")] == [
        "| Mistral-7B-v0.3 | 3,840.5 | +512.5 | +0.5 | 0 | 0 | 0 |",
        "| Mistral-7B-v0.3 | +256.0 | +256.0 | +0.5 | 0 | 0 |",
        "| Mistral-7B-v0.3 | 512.5 | 768.0 | 511.5 | 4,392.0 | 5,416.0 |",
    ]


@pytest.mark.thorough
def test_the_table_of_steps_is_the_predictors(memory_tables: Any, figures: Callable[[str], Any]) -> None:
    found = figures("sections").section(memory_tables.STEP_PAGE, memory_tables.STEPS)
    assert found.strip() == memory_tables.step_table()


# ----------------------------------------------------------------------------------------------------
# What is given, and what is left alone.
# ----------------------------------------------------------------------------------------------------


def test_folder_file_and_object_are_the_same_model(llama: LlamaConfig) -> None:
    folder = zoo.checkpoint("llama")
    plans = [
        Plan.for_pretrained(given, NF4, torch.bfloat16, precision="full")
        for given in (folder, str(folder), folder / "config.json", str(folder / "config.json"), llama)
    ]
    assert all(figures(plan) == figures(plans[0]) for plan in plans)


@pytest.mark.parametrize(
    ("own", "given", "is_half"),
    [
        (None, None, True),
        ("float32", None, False),
        ("float32", "auto", False),
        ("float32", "float16", True),
        ("bfloat16", torch.float32, False),
        ("float16", None, True),
    ],
)
def test_the_dtype_is_the_one_given_or_the_configs(
    llama: LlamaConfig, own: str | None, given: Any, is_half: bool
) -> None:
    llama.dtype = own
    assert (Plan.for_pretrained(llama, NF4, given, precision="full").added_bytes > 0) == is_half


def test_nothing_of_the_callers_is_changed(llama: LlamaConfig) -> None:
    settings = BitsAndBytesConfig(load_in_4bit=True)
    before = llama.to_dict(), settings.to_dict(), torch.get_default_dtype(), torch.get_rng_state()
    Plan.for_pretrained(llama, settings, torch.float16)
    llama.vocab_size = -1
    with pytest.raises(ConfigError, match="no model can be built from the config of LlamaConfig"):
        Plan.for_pretrained(llama, settings, torch.float16)
    llama.vocab_size = zoo.VOCAB_SIZE
    assert (llama.to_dict(), settings.to_dict(), torch.get_default_dtype()) == before[:3]
    assert torch.equal(torch.get_rng_state(), before[3])
    assert torch.empty(1).device.type == "cpu"


def test_an_architecture_that_is_not_named_is_found_by_its_config(llama: LlamaConfig) -> None:
    for architectures in (None, [], ["NoSuchModel"], ["LlamaForCausalLM"]):
        llama.architectures = architectures
        assert "output embeddings" in Plan.for_pretrained(llama, NF4).by_role
    llama.architectures = ["LlamaModel"]
    assert "output embeddings" not in Plan.for_pretrained(llama, NF4).by_role


def test_the_budget_and_the_fields_are_those_of_build_plan(llama: LlamaConfig) -> None:
    with pytest.raises(MemoryBudgetError) as found:
        Plan.for_pretrained(llama, NF4, torch.bfloat16, precision="full", memory_budget="1KiB")
    assert "norms" in found.value.fitting
    with pytest.raises(ConfigError, match="the fields are precision, "):
        Plan.for_pretrained(llama, NF4, presicion="full")


def test_a_model_without_checkpointing_is_refused_as_when_it_is_loaded() -> None:
    name = without_checkpointing()
    with pytest.raises(UnsupportedModelError):
        Plan.for_pretrained(zoo.checkpoint(name), quantization(name, "nf4"), torch.bfloat16)


@pytest.mark.parametrize("given", ["", None, 42, LlamaConfig])
def test_an_invalid_model_argument_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="expected a folder"):
        Plan.for_pretrained(given)


@pytest.mark.parametrize("dtype", ["int8", torch.int8, "nonsense", "nn", 16])
def test_an_invalid_dtype_is_refused(llama: LlamaConfig, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        Plan.for_pretrained(llama, NF4, dtype)


@pytest.mark.parametrize("given", ["nf4", 4, BitsAndBytesConfig])
def test_an_invalid_quantization_config_is_refused(llama: LlamaConfig, given: Any) -> None:
    with pytest.raises(ConfigError, match="quantization_config: expected"):
        Plan.for_pretrained(llama, given)


BROKEN = {
    "malformed": "{",
    "a list": "[]",
    "no type": "{}",
    "unknown type": '{"model_type": "nonsense"}',
    "wrong type of value": '{"model_type": "llama", "hidden_size": "wide"}',
    "impossible shape": '{"model_type": "llama", "hidden_size": -64}',
    "quantized by nothing": '{"model_type": "llama", "quantization_config": {}}',
    "code of its own": '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    (tmp_path / "mine.py").write_text("raise SystemExit('this code was run')", encoding="utf-8")
    with pytest.raises(ConfigError) as found:
        Plan.for_pretrained(tmp_path, NF4)
    assert str(tmp_path) in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("given", ["/no/such/model", "./no/such/model", Path("no-such-model"), "no such model!"])
def test_a_path_that_is_not_there_is_named(given: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"no.such.model"):
        Plan.for_pretrained(given)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Plan.for_pretrained(tmp_path)


# ----------------------------------------------------------------------------------------------------
# The command.
# ----------------------------------------------------------------------------------------------------


def exit_status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as found:
        raise SystemExit(main(["plan", *arguments]))
    return found.value.code


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = exit_status(str(zoo.checkpoint("llama")), "--json", *options)
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("quant", every_other(["nf4", "nf4-double", "fp4", "fp4-double", "int8", "none"]))
def test_the_command_prints_the_plans_figures(capsys: pytest.CaptureFixture[str], quant: str) -> None:
    zoo.checkpoint("llama")
    capsys.readouterr()
    status, result = run_json(capsys, "--quant", quant)
    assert status == 0
    config = None if quant == "none" else quantization("llama", quant)
    assert list(result["plans"]) == [precision.value for precision in Precision]
    for precision, plan in result["plans"].items():
        expected = Plan.for_pretrained(zoo.checkpoint("llama"), config, "bfloat16", precision=precision).to_dict()
        reserved = plan.pop("reserved_by_phase")  # which a plan of a live model has not
        assert reserved["prepared"] >= reserved["loaded"] > 0
        assert plan == {key: expected[key] for key in plan}
        assert plan.keys() >= {"added_bytes", "peak_bytes", "cache_bytes", "by_role"}
    assert result["fits"] == dict.fromkeys(result["plans"], True)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(zoo.checkpoint("llama") / "config.json")
    capsys.readouterr()
    assert exit_status(model, "--precision", "full", "norms") == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    added = format_bytes(Plan.for_pretrained(model, NF4, "bfloat16", precision="full").added_bytes)
    assert lines[0] == f"{model}: preparing it, in nf4 and bfloat16"
    explained = ["full computes and stores what PEFT's function does", "norms the default: norms compute in float32, "]
    rows = [" ".join(line.split()) for line in lines if line.startswith(("full", "norms", "compute"))]
    assert [row.split()[0] for row in rows] == ["full", "norms"] * 2
    assert rows[0].startswith(f"full {added} ")
    assert all(row.startswith(text) for row, text in zip(rows[2:], explained, strict=True))
    assert any(line.startswith("parameters ") for line in lines)
    assert any(line.startswith("input embeddings") for line in lines)
    assert any(line.startswith("warnings: ") for line in lines)
    assert captured.err == ""


def test_the_budget_decides(capsys: pytest.CaptureFixture[str]) -> None:
    zoo.checkpoint("llama")
    capsys.readouterr()
    peak = Plan.for_pretrained(zoo.checkpoint("llama"), NF4, "bfloat16", precision="full").peak_bytes
    assert run_json(capsys, "--precision", "full", "--memory-budget", f"{peak}B")[0] == 0
    status, result = run_json(capsys, "--precision", "full", "--memory-budget", f"{peak - 1}B")
    assert (status, result["fits"]) == (1, {"full": False})
    assert result["fitting"] == ["compute", "norms", "adapted", "none"]
    assert run_json(capsys, "--precision", "norms", "none", "--memory-budget", "0")[0] == 0
    assert exit_status(str(zoo.checkpoint("llama")), "--memory-budget", "1KiB") == 1
    said = "1.0 KiB: fits with compute, norms, adapted, none; does not fit with full."
    assert capsys.readouterr().out.splitlines()[0] == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kbitwrap plan: error: Missing argument 'MODEL'"),
        (["MODEL", "--quant", "int3"], "'--quant': 'int3' is not one of 'nf4', 'nf4-double', 'fp4', 'fp4-double', "),
        (["MODEL", "--dtype", "float32"], "'--dtype': 'float32' is not one of 'bfloat16', 'float16'"),
        (
            ["MODEL", "--precision", "half"],
            "'--precision': 'half' is not one of 'full', 'compute', 'norms', 'adapted', 'none', 'peft', 'unprepared'",
        ),
        (["MODEL", "--precision"], "Option '--precision' requires an argument"),
        (["MODEL", "--memory-budget", "much"], "'--memory-budget': expected a number of bytes"),
        (["MODEL", "--memory-budget", "50%"], "found '50%'"),
        (["MODEL", "--memory-budget", "-5MiB"], "found '-5MiB'"),
        (["MODEL", "--memory-budget=-1"], "'--memory-budget': expected a number of bytes"),
        (["/no/such/model"], "there is no model at '/no/such/model'"),
        (["no such model!"], "cannot read a config from 'no such model!': "),
    ],
)
def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert exit_status(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_an_unreadable_config_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert exit_status(str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kbitwrap: error: ")
    assert str(tmp_path) in captured.err
    assert captured.err.count("\n") == 1


def test_a_refusal_to_prepare_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    name = without_checkpointing()
    model = str(zoo.checkpoint(name))
    capsys.readouterr()
    assert exit_status(model) == 2
    assert "does not support activation checkpointing" in capsys.readouterr().err


def test_architectures_that_are_no_list_name_no_class(tmp_path: Path) -> None:
    shutil.copytree(zoo.checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    expected = Plan.for_pretrained(tmp_path, precision="full").added_bytes
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": 10**12}))
    assert Plan.for_pretrained(tmp_path, precision="full").added_bytes == expected


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_a_composite_base_that_was_saved_quantized_keeps_the_dtype_of_its_files(
    is_in_parts: bool, tmp_path: Path
) -> None:
    zoo.load("llava", "nf4", torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if is_in_parts:
        config["text_config"]["dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    of_its_own, asked = (Plan.for_pretrained(tmp_path, dtype=dtype, precision="full") for dtype in (None, "bfloat16"))
    assert asked.added_bytes == of_its_own.added_bytes == 0  # nothing is half
    assert "files are float32, which loading keeps where they are quantized" in " ".join(asked.warnings)
