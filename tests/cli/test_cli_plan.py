"""`kbitwrap plan`: PEFT's way beside each precision, and what fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, prepare_model_for_kbit_training
from rich.cells import cell_len
from transformers import TrainingArguments
from transformers.quantizers import AutoHfQuantizer

from kbitwrap import StepPredictor, StepTracker, predict_step
from kbitwrap.cli import main
from kbitwrap.config import format_bytes
from kbitwrap.model.quantization import bitsandbytes_config
from support import zoo
from support.memory import live_bytes
from support.thorough import every_other

# What a process holds, as `python docs/figures eight_gb --host` measured it.
PROCESS = json.loads((Path(__file__).parents[2] / "docs/benchmarks/host.json").read_text())["process"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", every_other(["llama", "mixtral", "t5"]))
@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_pefts_row_is_what_its_function_does_to_the_byte(
    name: str, quant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = zoo.load(name, quant)
    before = live_bytes(model)
    with StepTracker(model) as tracker:
        prepare_model_for_kbit_training(model)
    result = run_json(capsys, str(zoo.checkpoint(name)), "--quant", quant, "--precision", "norms")
    assert result["peft"]["added_bytes"] == live_bytes(model) - before
    assert result["peft"]["peak_bytes"] == tracker.peak_bytes - tracker.static_bytes
    assert result["peft"]["cache_bytes"] == result["plans"]["norms"]["cache_bytes"]
    assert list(result["plans"]) == list(result["fits"]) == ["norms"]


def rows_of(out: str) -> dict[str, list[str]]:
    return {line.split("  ")[0]: line.split()[1:] for line in out.splitlines() if line}


def test_a_plan_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = str(zoo.checkpoint("llama"))
    result = run_json(capsys, model)
    assert main(["plan", model, "--memory-budget", "40KiB"]) == 1
    out = capsys.readouterr().out
    assert max(map(cell_len, out.splitlines())) <= 80
    verdict, _, costs, *_ = out.split("\n\n")
    assert verdict == "40.0 KiB: fits with compute, norms, adapted, none; does not fit with full."
    rows = rows_of(costs)
    peft = result["peft"]
    figures = peft["added_bytes"], peft["peak_bytes"], peft["reserved_by_phase"]["prepared"]
    assert " ".join(rows["peft"]) == " ".join(map(format_bytes, figures))
    reserved = result["plans"]["norms"]["reserved_by_phase"]
    assert " ".join(rows["norms"]) == f"0 B 0 B {format_bytes(reserved['prepared'])}"
    words = " ".join(out.split())
    assert "preparing it, in nf4 and bfloat16" in words
    assert f"once it is loaded, {format_bytes(reserved['loaded'])}. In each row but" in words
    assert "added by peft" in words


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
@pytest.mark.parametrize("name", every_other(["llama", "mixtral", "t5", "gpt2"]))
def test_what_preparing_reserves_is_what_a_step_has_before_it(
    name: str, settings: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With embeddings of 64 MiB, whose halves lie in segments of their own."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    config = json.loads((zoo.checkpoint(name) / "config.json").read_text())
    size = config.get("hidden_size") or config.get("n_embd") or config["d_model"]
    model = saved(tmp_path, config | {"vocab_size": (64 << 20) // (2 * size), "pad_token_id": 0})
    result = run_json(capsys, model)
    planned = {"peft": result["peft"], **result["plans"]}
    assert [*planned] == ["peft", "full", "compute", "norms", "adapted", "none"]
    for precision, plan in planned.items():
        nf4 = bitsandbytes_config("nf4", "bfloat16")
        step = predict_step(
            model, precision=precision, quantization_config=nf4, dtype="bfloat16", batch_size=1, seq_len=8
        )
        assert plan["reserved_by_phase"].items() <= (step.reserved_by_phase or {}).items(), precision
    least, most = (planned[way]["reserved_by_phase"]["prepared"] for way in ("norms", "peft"))
    assert most > least


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the searches find, which are tested elsewhere."""
    largest = {"norms": 3, "none": 4, "peft": 2}
    monkeypatch.setattr(StepPredictor, "longest_sequence", lambda *_: 64)
    monkeypatch.setattr(StepPredictor, "largest_batch", lambda self, *_: largest[self.precision])


@pytest.mark.usefixtures("searched")
def test_what_fits_stands_beside_each_precision_and_what_comes_on_top_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--step", "--seq", "8", "--budget", "8GiB", "--precision", "norms", "none"]
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    assert main(["plan", model, *arguments]) == 0
    out = capsys.readouterr().out
    title = f"{model}: a step of 1 x 8 tokens on cuda, nf4, LoRA "
    assert out.startswith(f"8.0 GiB: 1 x 8 tokens fit with norms, none.\n\n{title}")
    assert [line.split() for line in out.splitlines() if " yes " in line] == [
        ["norms", "yes", "64", "3"],
        ["none", "yes", "64", "4"],
    ]
    out = " ".join(out.split())
    assert "longest sequence at batch 1 largest batch at 8" in out
    assert "unknown, at most " in out
    assert "workspaces of cuBLAS" in out
    assert "the CUDA context, 0.267 to 0.621 GiB" in out
    assert "and other programs" in out


@pytest.mark.usefixtures("searched")
def test_a_step_is_shown_prepared_by_peft_and_by_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    assert [*run_json(capsys, model, "--step", "--seq", "8")["steps"]] == ["peft", "norms"]


@pytest.mark.usefixtures("searched")
def test_the_first_sentence_says_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    arguments = [model, "--step", "--seq", "8", "--precision", "none", "norms"]
    for budget, said in (
        ("1KiB", "1.0 KiB: 1 x 8 tokens do not fit with none, norms; 3 x 8 fit with all.\n"),
        ("1GiB", "1.0 GiB: 1 x 8 tokens fit with none, norms.\n"),
    ):
        assert main(["plan", *arguments, "--budget", budget]) == (budget == "1KiB")
        assert capsys.readouterr().out.startswith(said)
    monkeypatch.setattr(StepPredictor, "largest_batch", lambda *_: 0)
    assert main(["plan", *arguments, "--budget", "1KiB"]) == 1
    assert "tokens do not fit with none, norms; 1 x 64 fit with all.\n" in capsys.readouterr().out
    monkeypatch.setattr(StepPredictor, "longest_sequence", lambda *_: 0)
    assert main(["plan", *arguments, "--budget", "1KiB"]) == 1
    assert "tokens do not fit with none, norms.\n" in capsys.readouterr().out


@pytest.mark.usefixtures("searched")
def test_what_loading_takes_has_to_fit_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    arguments = [model, "--step", "--seq", "8", "--precision", "none"]
    loaded = run_json(capsys, *arguments)["steps"]["none"]["loading_bytes"]
    assert main(["plan", *arguments, "--budget", "1KiB"]) == 1
    said = f"Loading the model, before the step, takes {format_bytes(loaded)}. It has to fit as well."
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("searched")
def test_a_model_that_cannot_be_loaded_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "vocab_size": 4096})
    arguments = [model, "--step", "--seq", "1", "--quant", "int8", "--precision", "none"]
    step = run_json(capsys, *arguments)["steps"]["none"]
    needed = max(step["reserved_by_phase"].values())
    for budget, status in ((needed, 0), (step["peak_bytes"] - 1, 1)):
        assert main(["plan", *arguments, "--budget", f"{budget}B"]) == status


@pytest.mark.usefixtures("searched")
def test_of_a_devices_memory_the_context_is_taken_off(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    arguments = [model, "--step", "--seq", "8", "--precision", "norms", "--device-memory", "24GB"]
    assert run_json(capsys, *arguments)["budget_bytes"] == 24 * 10**9 - 666_632_192
    assert main(["plan", *arguments]) == 0
    assert capsys.readouterr().out.startswith("22.4 GiB (21.7 GiB for torch): 1 x 8 tokens fit with norms.\n")


@pytest.mark.usefixtures("searched")
def test_of_unified_memory_the_process_is_taken_off_too_and_what_is_assumed_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    arguments = [model, "--step", "--seq", "8", "--precision", "norms", "--device-memory", "8GB"]
    alone, unified = (run_json(capsys, *arguments, *more) for more in ([], ["--unified"]))
    assert alone["budget_bytes"] - unified["budget_bytes"] == PROCESS["resident_bytes"]
    assert alone["steps"] == unified["steps"]
    assert main(["plan", *arguments, "--unified"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    mapped = format_bytes(unified["steps"]["norms"]["mapped_bytes"])
    assert f"{format_bytes(PROCESS['resident_bytes'])} are taken off for the process" in out
    assert f"{mapped} of them have to fit, the largest tensor" in out
    assert "is assumed" in out


@pytest.mark.thorough
def test_on_unified_memory_loading_has_to_fit_with_the_pages_of_the_files_that_it_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 8, "vocab_size": 128000, "hidden_size": 512}
    model = saved(tmp_path, LLAMA | sizes)
    arguments = [model, "--step", "--seq", "1", "--precision", "none", "--device-memory"]
    step = run_json(capsys, *arguments[:-1])["steps"]["none"]
    assert step["reserved_bytes"] < step["loading_bytes"] + step["mapped_bytes"]
    taken = 666_632_192 + PROCESS["resident_bytes"]
    needed = step["loading_bytes"] + step["mapped_bytes"] + taken
    for memory, fits in ((needed, True), (needed - 1, False)):
        assert main(["plan", *arguments, f"{memory}B", "--unified", "--json"]) == (not fits)
        found = json.loads(capsys.readouterr().out)["steps"]["none"]
        assert found["fits"] == fits
        assert (found["longest_sequence"] > 0) == (found["largest_batch"] > 0) == fits
    request.getfixturevalue("searched")
    assert main(["plan", *arguments, f"{needed - 1 - PROCESS['resident_bytes']}B"]) == 0


@pytest.mark.thorough
def test_a_base_that_was_saved_quantized_is_planned_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    zoo.load("llama").save_pretrained(tmp_path)
    found = []
    for base in ([str(tmp_path)], [str(zoo.checkpoint("llama")), "--quant", "nf4"]):
        step_of_base = run_json(capsys, *base, "--step", "--seq", "8", "--precision", "none")["steps"]["none"]
        del step_of_base["loading_bytes"], step_of_base["mapped_bytes"]
        found.append(step_of_base)
    assert found[0] == found[1]


@pytest.mark.thorough
def test_a_step_of_the_trainer_has_its_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 64})
    options = ["--step", "--trainer", "trainer", "--seq", "8", "--precision", "none", "--rank", "2", "--kernels", "cpu"]
    assert main(["plan", model, *options]) == 0
    said = "a step of 8 x 8 tokens on cpu, nf4, LoRA of rank 2, --trainer trainer\n"
    assert said in capsys.readouterr().out
    found = run_json(capsys, model, *options, "--accumulate", "2", "--optimizer", "sgd")["steps"]["none"]
    args = TrainingArguments(str(tmp_path), optim="sgd", gradient_accumulation_steps=2, use_cpu=True)
    expected = predict_step(
        model,
        args=args,
        precision="none",
        seq_len=8,
        kernels="cpu",
        lora=LoraConfig(r=2, target_modules="all-linear"),
        quantization_config=bitsandbytes_config("nf4", "bfloat16"),
    )
    assert found == json.loads(json.dumps(expected.to_dict()))


def test_what_the_allocator_of_cuda_takes_is_said_where_it_is_known_or_has_to_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1})
    said = {}
    for options in ("", "--kernels cpu", "--engine fsdp2 --devices 2 --quant none"):
        step = ["--step", "--seq", "8", "--precision", "none", "--budget", "1GiB", *options.split()]
        assert main(["plan", model, *step]) == 0
        said[options] = " ".join(capsys.readouterr().out.split())
    usual, of_cpu, sharded = said.values()
    assert "What has to fit is what CUDA's caching allocator reserves" in usual
    assert "CUDA" not in of_cpu
    assert "unknown" not in of_cpu
    assert "is not known where FSDP2 shards the model: the peak has to fit" in sharded


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--accumulate", "2"], "--accumulate applies to the step of a trainer: add --trainer"),
        (
            ["--trainer", "trainer", "--optimizer", "adam"],
            "--trainer trainer: adam is not a valid OptimizerNames",
        ),
        (["--trainer", "trainer", "--optimizer", "lomo"], "--optimizer: 'lomo' is not predicted: "),
        (["--trainer", "sgd"], "Invalid value for '--trainer': 'sgd' is not one of 'sft', 'dpo', 'grpo', 'reward', "),
        (["--devices", "2"], "--engine and --devices are given together"),
        (["--budget", "1GiB", "--device-memory", "1GiB"], "expected at most one of --budget, --device-memory"),
        (["--kernels", "cpu", "--device-memory", "1GiB"], "--device-memory is of a device for CUDA"),
        (["--unified"], "--unified says that host and device share --device-memory: give both"),
        (["--unified", "--budget", "1GiB"], "--unified says that host and device share --device-memory: give both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_setting_of_a_trainer_that_cannot_be_is_refused_in_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1})
    assert main(["plan", model, "--step", "--precision", "none", "--seq", "8", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.thorough
def test_a_step_on_each_of_several_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1})
    options = ["--step", "--precision", "none", "--seq", "8"]
    alone = run_json(capsys, model, *options)["steps"]["none"]
    shared = run_json(capsys, model, *options, "--engine", "ddp", "--devices", "2")["steps"]["none"]
    assert shared["backward_bytes"] > alone["backward_bytes"]


# ----------------------------------------------------------------------------------------------------
# What a config says, or leaves open.
# ----------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "quantization_config": {"quant_method": "mxfp4"},
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
}
DEQUANTIZED = "the model's weights, quantized by mxfp4, are dequantized to bfloat16 when it is loaded"
STEP = ["--step", "--precision", "peft", "none"]


def saved(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("step", [[], STEP])
@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (
            GPT_OSS,
            [],
            "quantized by mxfp4, in which transformers trains nothing: plan for dequantized ones (--quant none)",
        ),
        (GPT_OSS, ["--quant", "nf4"], "is quantized already, by mxfp4: leave --quant out, or give --quant none"),
        (
            LLAMA | {"quantization_config": {"load_in_8bit": True}},
            ["--quant", "none"],
            "by bitsandbytes: leave --quant out",
        ),
        (
            LLAMA | {"hidden_size": "wide"},
            [],
            "Validation error for field 'hidden_size': TypeError: Field 'hidden_size'",
        ),
        (
            LLAMA | {"hidden_size": 33},
            [],
            "The hidden size (33) is not a multiple of the number of attention heads (2).",
        ),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, ["--quant", "int8"], "quantized already, by gptq"),
    ],
)
def test_a_model_that_cannot_be_planned_for_as_asked_is_refused_with_the_whole_reason_on_one_line(
    config: dict[str, Any],
    options: list[str],
    said: str,
    step: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", saved(tmp_path, config), *options, *step]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


WARNED_OF = [
    (GPT_OSS, ["--quant", "none"], DEQUANTIZED),
    (zoo.checkpoint("mixtral"), [], "stacks of experts are not quantized"),
]
WARNED_STEPS = [(*case, ["--step", "--precision", "none", "--seq", "4"]) for case in WARNED_OF]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "options", "said", "step"),
    [*((*case, []) for case in WARNED_OF), *WARNED_STEPS],
)
def test_what_a_plan_warns_of_is_told_of_a_step_too(
    config: Any, options: list[str], said: str, step: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path, config) if isinstance(config, dict) else str(config)
    if not step:
        found = run_json(capsys, model, *options)
        assert any(said in warning for warning in found["plans"]["none"]["warnings"])
    assert main(["plan", model, *options, *step]) == 0
    out = capsys.readouterr().out
    assert " ".join(out.split()).count(said) == 1
    if step and config is not GPT_OSS:
        assert main(["plan", model, *options, *step, "--budget", "1KiB"]) == 1
        _, second, *_ = capsys.readouterr().out.split("\n\n")
        assert second.startswith(f"warnings: {said}")


def test_a_model_that_is_quantized_already_keeps_its_own_quantization(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path, LLAMA | {"quantization_config": {"load_in_8bit": True}})
    for options in ([], ["--quant", "nf4"]):
        assert run_json(capsys, model, *options)["quantization"] == "bitsandbytes_8bit"
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    model = saved(tmp_path, LLAMA | {"quantization_config": fp8})
    if AutoHfQuantizer.from_config(dict(fp8)).is_trainable:
        assert run_json(capsys, model)["quantization"] == "fp8"
        return
    assert main(["plan", model]) == 2  # transformers 5.20 trains nothing in it
    assert "quantized by fp8, in which transformers trains nothing" in capsys.readouterr().err


def test_a_sequence_is_no_longer_than_positions_that_are_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path, GPT2)
    monkeypatch.setattr(StepPredictor, "largest_batch", lambda *_: 1)  # how it is searched for is tested elsewhere
    step = ["--step", "--precision", "none", "--budget", "8GiB"]
    found = run_json(capsys, model, *step)["steps"]["none"]
    assert (found["seq_len"], found["longest_sequence"]) == (16, 16)
    for seq, batch, said in (
        ("17", "1", "the step looks up index 16 in an embedding of 16 rows: give a shorter sequence (--seq)"),
        ("16", "99999999", "--batch and --seq: expected a batch of at most 1,048,576 tokens, found 99,999,999 x 16"),
        ("9" * 30, "1", "--batch and --seq: expected a batch of at most 1,048,576 tokens"),
    ):
        assert main(["plan", model, *step, "--seq", seq, "--batch", batch]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err


@pytest.mark.thorough
def test_a_sequence_longer_than_the_model_is_made_for_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path, LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 8})
    step = ["--step", "--precision", "none"]
    assert run_json(capsys, model, *step)["steps"]["none"]["warnings"] == []
    (said,) = run_json(capsys, model, *step, "--seq", "9")["steps"]["none"]["warnings"]
    assert said == "a sequence of 9 tokens is longer than the model's own longest, 8"
