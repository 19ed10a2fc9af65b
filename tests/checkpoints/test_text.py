"""Merges compared on texts: the figures are those of plain transformers and PEFT, and the best merge is recommended."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kbitwrap import ConfigError, ExportError, MergeComparison, TextMeasure, compare_merges, merge_checkpoint
from kbitwrap.cli import main
from kbitwrap.model.quantization import bitsandbytes_config
from support import memory
from support.texts import TextRun, divergences, make_run, tokenizer
from support.thorough import few

QUANTS, RATES = ("nf4", "fp4-double", "int8"), (3e-4, 1e-3, 3e-3)
CASES = [("llama", quant, rate) for quant, rate in itertools.product(QUANTS, RATES)]
TEXTS = ["The quick brown fox jumps over the lazy dog.", "def f(x): return x + 1", "Lorem ipsum dolor sit amet"]
CASES += [("mixtral", quant, rate) for quant, rate in zip(QUANTS, RATES, strict=True)]


@pytest.fixture(scope="module")
def runs(figures: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextRun]:
    """Makes runs, whose bases are trained once."""
    bases: dict[str, Path] = {}

    def make(architecture: str, quant: str, rate: float, seed: int = 0, **lora: Any) -> TextRun:
        folder = tmp_path_factory.mktemp("run")
        if architecture in bases:
            shutil.copytree(bases[architecture], folder / "base")
        run = make_run(figures, folder, architecture, quant, rate, seed, **lora)
        bases.setdefault(architecture, run.base)
        return run

    return make


@pytest.fixture(scope="module")
def run(runs: Callable[..., TextRun]) -> TextRun:
    return runs("llama", "nf4", 3e-4)


def standard_error(values: torch.Tensor) -> float:
    return float(values.std() / len(values) ** 0.5)


# ----------------------------------------------------------------------------------------------------
# The figures
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "quant", "rate"), few(CASES, [CASES[7]]))
def test_the_figures_are_those_of_plain_transformers_and_peft(
    architecture: str, quant: str, rate: float, runs: Callable[..., TextRun], tmp_path: Path
) -> None:
    run = runs(architecture, quant, rate)
    merge_checkpoint(run.base, run.adapter, tmp_path / "half", device="cpu")
    run.reload().save_pretrained(tmp_path / "reload")
    found = compare_merges(run.adapter, run.texts, base=run.base, forms=["half", tmp_path / "reload"], device="cpu")
    adapter, expected = run.evaluate(run.adapter_model())
    base, before = run.evaluate(run.load(quant))
    for name, folder in (("half", tmp_path / "half"), (str(tmp_path / "reload"), tmp_path / "reload")):
        merged, after = run.evaluate(run.load(folder=folder))
        measure = found.merges[name]
        losses = {"adapter": adapter, "merged": merged, "base": base}
        assert measure.loss == pytest.approx({key: float(one.mean()) for key, one in losses.items()}, rel=1e-5)
        assert measure.samples == len(run.texts)
        gain = base - adapter
        kept = float((base - merged).mean() / gain.mean())
        assert measure.gain_kept == pytest.approx(kept, abs=5e-5)
        left = float(divergences(after, expected).mean() / divergences(before, expected).mean())
        assert measure.divergence_left == pytest.approx(left, abs=5e-5, rel=1e-4)
        # that of a ratio, by leaving out each text in turn
        several = len(gain)
        others = [torch.arange(several) != number for number in range(several)]
        jackknifed = torch.stack([(base - merged)[some].mean() / gain[some].mean() for some in others])
        error = float(((several - 1) * (jackknifed - jackknifed.mean()).square().mean()).sqrt())
        assert measure.standard_error["gain_kept"] == pytest.approx(error, rel=0.25, abs=1e-4)
        assert measure.standard_error["merged"] == pytest.approx(standard_error(merged), rel=1e-4)
        assert measure.standard_error["difference"] == pytest.approx(standard_error(merged - adapter), rel=1e-3)


def test_a_4_bit_layer_computes_as_in_training_on_a_cpu_that_repacks_it(
    run: TextRun, repacking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a weight was repacked for the kernel of inference")

    monkeypatch.setattr("bitsandbytes.nn.modules._convert_weight_packed_for_cpu", refuse)
    found = compare_merges(run.adapter, run.texts[:4], base=run.base, forms=["half"], device="cpu")
    adapter, _ = run.evaluate(run.adapter_model())
    assert found.merges["half"].loss["adapter"] == pytest.approx(float(adapter[:4].mean()), rel=1e-6)


@pytest.mark.thorough
def test_of_a_large_vocabulary_the_divergence_that_is_left_is_nearly_that_of_all_tokens(
    run: TextRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"base": run.base, "forms": ["half", "original"], "device": "cpu"}
    exact = compare_merges(run.adapter, run.texts, **options).merges
    monkeypatch.setattr("kbitwrap.checkpoints.text._MOST_KEPT", 64)
    bounds = compare_merges(run.adapter, run.texts, **options).merges
    assert bounds["original"].divergence_left == pytest.approx(exact["original"].divergence_left, rel=0.1)
    assert bounds["half"].loss == exact["half"].loss


def test_one_model_at_a_time_is_in_memory_and_nothing_is_left(
    run: TextRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    before = sum(isinstance(one, LlamaForCausalLM) for one in gc.get_objects())
    alive = []

    def told(words: str) -> None:
        models = sum(isinstance(one, LlamaForCausalLM) for one in gc.get_objects())
        alive.append((words, models - before))

    forms = ["half", "mixed", "quantized", "original"]
    found = compare_merges(run.adapter, run.texts[:3], base=run.base, forms=forms, progress=told, device="cpu")
    assert {count for _, count in alive} == {1}
    names = ["adapter model", "base", *found.merges]
    assert [words for words, _ in alive] == [f"{name}: {number} of 3 texts" for name in names for number in range(3)]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.thorough
def test_the_peak_is_that_of_the_largest_step_by_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).bfloat16().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    run = TextRun(tmp_path, "nf4", None)
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(run.load(), config).save_pretrained(run.adapter)
    quantization = bitsandbytes_config("nf4", torch.bfloat16)
    options: dict[str, Any] = {"quantization_config": quantization, "device": "cpu"}

    def merge() -> None:
        merge_checkpoint(run.base, run.adapter, tmp_path / "half", **options)

    def compare() -> None:
        forms = ["half", "original"]
        compare_merges(run.adapter, ["some text", "some other"], base=run.base, forms=forms, **options)

    steps = [run.adapter_model, run.reload, merge, lambda: run.load(folder=tmp_path / "half")]
    largest = max(map(memory.peak_bytes, steps))
    half = memory.live_bytes(run.load())
    gc.collect()
    assert memory.peak_bytes(compare) < largest + 0.5 * half  # two models are more


# ----------------------------------------------------------------------------------------------------
# The recommendation
# ----------------------------------------------------------------------------------------------------


def check_recommendation(run: TextRun, found: MergeComparison, folder: Path) -> None:
    """It has the lowest loss by an independent evaluation, or one within two standard errors of it, which is said."""
    losses = {}
    for form in found.merges:
        merge_checkpoint(run.base, run.adapter, folder / form, merge_as=form, device="cpu")
        losses[form], _ = run.evaluate(run.load(folder=folder / form))
    best = min(losses, key=lambda form: float(losses[form].mean()))
    if best != found.recommended:
        difference = losses[found.recommended] - losses[best]
        assert float(difference.mean()) <= 2 * standard_error(difference) + 1e-6
        assert "within two standard errors" in found.reason
        assert best in found.reason


TWENTY = [
    (architecture, quant, rate, seed)
    for architecture, quant in (("llama", "nf4"), ("llama", "int8"), ("llama", "fp4"), ("mixtral", "nf4"))
    for rate, seed in ((1e-4, 0), (3e-4, 1), (1e-3, 2), (2e-3, 4), (3e-3, 3))
]


@pytest.mark.parametrize(("architecture", "quant", "rate", "seed"), few(TWENTY, [TWENTY[1]]))
def test_the_recommended_merge_is_the_best_by_an_independent_evaluation_or_within_the_error(
    architecture: str, quant: str, rate: float, seed: int, runs: Callable[..., TextRun], tmp_path: Path
) -> None:
    run = runs(architecture, quant, rate, seed)
    forms = ("half", "mixed", "quantized", "original")
    found = compare_merges(run.adapter, run.texts, base=run.base, forms=forms, device="cpu")
    assert len(found.merges) >= 2
    check_recommendation(run, found, tmp_path)


def test_a_merge_that_lost_the_adapter_is_not_recommended_and_the_table_says_what_each_keeps(
    run: TextRun, tmp_path: Path
) -> None:
    run.load().save_pretrained(tmp_path / "base")  # no delta at all
    found = compare_merges(run.adapter, run.texts, base=run.base, forms=[tmp_path / "base", "half"], device="cpu")
    assert found.recommended == "half"
    assert found.reason == "its loss is the lowest, and no other is within two standard errors of it"
    assert found.merges["half"].gain_kept > 0.9 > 0.5 > found.merges[str(tmp_path / "base")].gain_kept
    *_, last = str(found).splitlines()
    assert last == f"take half: {found.reason}"
    assert repr(found) == f"MergeComparison({last})"
    assert str(found.merges["half"]).startswith(f"On {len(run.texts)} texts: loss ")
    assert "beside the adapter model" in str(found.merges[str(tmp_path / "base")])
    assert json.loads(json.dumps(found.to_dict()))["merges"]["half"]["gain_kept"] == found.merges["half"].gain_kept


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (0.034, "loss 2.161, as the adapter model (2.160 ± 0.034)"),
        (0.00034, "loss 2.16052, as the adapter model (2.16000 ± 0.00034)"),
        (0.00014, "loss 2.16052, +0.00052 beside the adapter model (2.16000 ± 0.00014)"),
        (1e-9, "loss 2.160520, +0.000520 beside the adapter model (2.160000 ± 0.000000)"),
        (0.0, "loss 2.161, +0.001 beside the adapter model (2.160 ± 0.000)"),
    ],
)
def test_losses_have_the_digits_that_show_two_of_their_error(error: float, said: str) -> None:
    errors = dict.fromkeys(["adapter", "merged", "base", "gain", "gain_kept", "divergence_left"], 0.1)
    loss = {"adapter": 2.16, "merged": 2.16052, "base": 3.0}
    assert f"{said}; " in str(TextMeasure(loss, 1.0, 0.0, 64, {**errors, "difference": error}))


def test_a_folder_is_not_taken_for_a_form_of_its_name_nor_for_a_larger_one(
    run: TextRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"base": run.base, "device": "cpu"}
    run.load().save_pretrained(tmp_path / "half")  # no delta at all
    merge_checkpoint(run.base, run.adapter, tmp_path / "best", merge_as="quantized", seed=6, device="cpu")
    monkeypatch.chdir(tmp_path)
    found = compare_merges(run.adapter, run.texts, forms=[Path("half"), "best", "quantized"], seed=6, **options)
    assert [*found.merges] == ["./half", "best", "quantized"]
    assert found.merges["./half"].gain_kept < 0.5
    assert found.recommended == "quantized"
    assert "within two standard errors of it" in found.reason
    assert "smaller" not in found.reason  # than a folder, whose size is not known


def test_where_the_adapter_gains_nothing_no_form_is_recommended(
    run: TextRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["\x01\x02 what nobody trains on %d" % number * 4 for number in range(4)]  # noqa: UP031
    found = compare_merges(run.adapter, texts, base=run.base, forms=["half", "original"], device="cpu")
    measure = found.merges["half"]
    gain = measure.loss["base"] - measure.loss["adapter"]
    assert gain <= 2 * measure.standard_error["gain"]
    assert found.recommended == ""
    header, half, *_, last = str(found).splitlines()
    assert half[header.index("gain") : header.index("%") + 1].strip() == ""
    losses = f"the adapter's loss ({measure.loss['adapter']:.3f}) is not below the base's ({measure.loss['base']:.3f})"
    remedy = "give texts of what it learned, or more of them"
    assert last == f"no form is recommended: on these texts {losses} by two standard errors; {remedy}"
    assert f"no gain over the base ({measure.loss['base']:.3f})" in str(measure)
    file, out = tmp_path / "texts.jsonl", tmp_path / "merged"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    arguments = ["merge", str(run.base), str(run.adapter), "--compare", str(file), "--out", str(out), "--device", "cpu"]
    assert main(arguments) == 0
    assert "kbitwrap: wrote half: --compare recommends none\n" in capsys.readouterr().err
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_a_prompt_and_its_completion_are_read_as_one_text(run: TextRun, tmp_path: Path) -> None:
    def losses(rows: list[Any]) -> Any:
        return compare_merges(run.adapter, rows, base=run.base, forms=["half"], device="cpu").merges["half"].loss

    whole = [{"text": text} for text in run.texts[:3]]
    assert losses([{"prompt": text[:9], "completion": text[9:]} for text in run.texts[:3]]) == losses(whole)
    turns = [{"role": "user", "content": "a question"}], [{"role": "assistant", "content": "an answer"}]
    parts, joined = {"prompt": turns[0], "completion": turns[1]}, {"messages": [*turns[0], *turns[1]]}
    assert losses([parts, parts]) == losses([joined, joined])


def test_plain_text_whose_lines_are_rows_is_told(
    run: TextRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.txt"
    arguments = ["merge", str(run.base), str(run.adapter), "--compare", str(file), "--device", "cpu"]
    file.write_text(f"{json.dumps({'text': 'x' * 99})}\n" * 50)
    assert main(arguments) == 0
    note = f"{file} is read as plain text, and its lines are JSON: call it .jsonl to read them as rows"
    assert capsys.readouterr().err.startswith(f"kbitwrap: note: {note}\n")
    file.write_text("[1]\n" * 1200)
    assert main(arguments) == 0
    assert "is read as plain text" not in capsys.readouterr().err


def test_the_original_form_is_written_by_its_name_and_is_pefts_merge(
    run: TextRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["merge", str(run.base), str(run.adapter), "--as", "original", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path / "merged"), "--check"]) == 0
    assert "merged onto the base's original weights" in capsys.readouterr().err
    written = run.load(folder=tmp_path / "merged").state_dict()
    expected = run.reload().state_dict()
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


@pytest.mark.parametrize("scale", [0.01, 100])  # a large one, and one that leaves nothing of the base
def test_the_original_form_is_measured_as_it_is_written(scale: float, tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(num_attention_heads=2, initializer_range=0.2, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    run = TextRun(tmp_path, "nf4", None)
    run.texts = TEXTS
    lora = LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(run.load(), lora)
    for name, parameter in model.named_parameters():
        if "lora_embedding_B" in name:
            parameter.data *= scale
    model.save_pretrained(run.adapter, save_embedding_layers=False)

    options: dict[str, Any] = {"device": "cpu", "quantization_config": bitsandbytes_config("nf4", torch.bfloat16)}
    found = compare_merges(run.adapter, TEXTS, base=run.base, forms=["original"], **options).merges["original"]
    merge_checkpoint(run.base, run.adapter, tmp_path / "merged", merge_as="original", **options)
    losses, predicted = run.evaluate(run.load(folder=tmp_path / "merged"))
    assert found.loss["merged"] == pytest.approx(float(losses.mean()), rel=1e-6)
    _, of_adapter = run.evaluate(run.adapter_model())
    _, of_base = run.evaluate(run.load("nf4"))
    left = divergences(predicted, of_adapter).mean() / divergences(of_base, of_adapter).mean()
    assert found.divergence_left == pytest.approx(float(left), rel=1e-5)


def test_forms_that_cannot_be_merged_are_named_with_the_reason(run: TextRun) -> None:
    forms = ["half", "mixed"]
    found = compare_merges(run.adapter, run.texts[:3], base=run.base, forms=forms, device="cpu")
    assert [*found.merges] == ["half"]
    (note,) = found.notes
    assert note.startswith("mixed is not measured: an adapter touches every quantized layer")
    with pytest.raises(ExportError, match="nothing can be merged: mixed is not measured"):
        compare_merges(run.adapter, run.texts[:3], base=run.base, forms=["mixed"], device="cpu")


def test_what_cannot_be_merged_onto_the_original_weights_is_named_with_the_reason(run: TextRun, tmp_path: Path) -> None:
    config = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    get_peft_model(run.load(run.quant), config).save_pretrained(tmp_path)
    options: dict[str, Any] = {"quantization_config": bitsandbytes_config(run.quant, torch.bfloat16), "device": "cpu"}
    found = compare_merges(tmp_path, run.texts[:3], base=run.base, forms=["original", run.base], **options)
    assert [*found.merges] == [str(run.base)]
    assert found.notes[0].startswith("original is not measured: the model: PeftModelForCausalLM (peft_model) with")
    assert "cannot be merged exactly: PREFIX_TUNING adds to the input" in found.notes[0]


def test_a_merge_for_which_the_disk_has_no_room_is_a_note_and_the_others_are_measured(
    run: TextRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        monkeypatch.undo()  # the next one has room
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    found = compare_merges(run.adapter, run.texts[:3], base=run.base, forms=["half", "original"], device="cpu")
    assert [*found.merges] == ["original"]
    assert "No space left on device" in found.notes[0]


@pytest.mark.parametrize(
    ("quant", "options"),
    [("nf4", {"bias": "all"}), (False, {"init_lora_weights": "pissa"}), ("nf4", {"init_lora_weights": "olora"})],
)
def test_the_base_is_the_one_without_the_adapter_whatever_that_wrote_into_it(
    quant: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = Qwen2Config(num_attention_heads=4, num_key_value_heads=4, initializer_range=0.1, **sizes)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    run = TextRun(tmp_path, quant, None)
    run.texts = TEXTS
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    model = get_peft_model(run.load(quant or None), lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(run.adapter)

    settings = bitsandbytes_config(quant, torch.bfloat16) if quant else False
    found = compare_merges(
        run.adapter, TEXTS, base=run.base, forms=["half"], quantization_config=settings, device="cpu"
    ).merges["half"]
    base, _ = run.evaluate(run.load(quant or None))
    assert found.loss["base"] == pytest.approx(float(base.mean()), rel=1e-6)


def test_texts_that_are_longer_than_the_model_has_positions_are_cut(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, vocab_size=256, resid_pdrop=0, embd_pdrop=0)
    config.attn_pdrop = 0
    GPT2LMHeadModel(config).bfloat16().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    run = TextRun(tmp_path, "", None)
    lora = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(run.load(), lora).save_pretrained(run.adapter)
    options: dict[str, Any] = {"base": run.base, "forms": ["half"], "quantization_config": False, "device": "cpu"}
    cut = [text[:16] for text in TEXTS]
    found = compare_merges(run.adapter, TEXTS, **options).merges["half"]
    assert found == compare_merges(run.adapter, cut, **options).merges["half"]


def test_virtual_tokens_of_a_prompt_predict_nothing_that_is_measured(run: TextRun, tmp_path: Path) -> None:
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(run.load("nf4"), prompt)
    model.save_pretrained(tmp_path / "prompt")
    options: dict[str, Any] = {"quantization_config": bitsandbytes_config("nf4", torch.bfloat16), "device": "cpu"}
    found = compare_merges(tmp_path / "prompt", run.texts[:2], base=run.base, forms=[run.base], **options)
    expected = []
    for row in run.rows[:2]:
        with torch.no_grad():
            logits = model.train()(input_ids=row[None]).logits[0, 3:-1].double()
        expected.append(float(torch.nn.functional.cross_entropy(logits, row[1:])))
    assert found.merges[str(run.base)].loss["adapter"] == pytest.approx(sum(expected) / 2, rel=1e-6)


def with_fewer_tokens(model: Any) -> None:
    model.resize_token_embeddings(200)


def not_a_number(model: Any) -> None:
    model.lm_head.weight.data[3] = torch.nan


def without_a_tensor(model: Any) -> None:
    del model.model.layers[1].mlp.down_proj.weight


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (with_fewer_tokens, "its vocabulary has 200 tokens|it predicts 200 tokens"),
        (not_a_number, "is not finite"),
        (without_a_tensor, r"merged' lacks tensors of its model, .*: model\.layers\.1\.mlp\.down_proj\.weight"),
    ],
)
def test_a_merge_that_predicts_nothing_to_compare_is_refused(
    damage: Callable[[Any], None], said: str, run: TextRun, tmp_path: Path
) -> None:
    model = run.reload()
    damage(model)
    model.save_pretrained(tmp_path / "merged")
    with pytest.raises(ConfigError, match=said):
        compare_merges(run.adapter, run.texts[:3], base=run.base, forms=[tmp_path / "merged"], device="cpu")


def test_tokens_that_the_base_has_not_are_refused(run: TextRun, tmp_path: Path) -> None:
    larger = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer)
    larger.add_tokens(["<new>"])
    base = shutil.copytree(run.base, tmp_path / "base")
    larger.save_pretrained(base)
    with pytest.raises(ConfigError, match="its vocabulary has 256 tokens, and the tokenizer gave token 256"):
        compare_merges(run.adapter, ["some", "a <new> one"], base=base, forms=["half"], device="cpu")


# ----------------------------------------------------------------------------------------------------
# Texts
# ----------------------------------------------------------------------------------------------------


class Rows(list[dict[str, Any]]):
    """Rows that are laid out as a ``datasets.Dataset`` has them: a slice is a dict of columns."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            rows = [*self][key]
            return {name: [row[name] for row in rows] for name in self[0]}
        return super().__getitem__(key)


def test_a_dataset_is_measured_on_its_rows(run: TextRun) -> None:
    options: dict[str, Any] = {"base": run.base, "forms": ["half"], "device": "cpu"}
    rows = Rows([{"text": text, "source": "web"} for text in run.texts[:4]])
    found = compare_merges(run.adapter, rows, samples=3, **options).merges["half"]
    assert found == compare_merges(run.adapter, run.texts[:3], **options).merges["half"]


def test_the_splits_of_a_dataset_are_not_taken_for_its_texts(run: TextRun) -> None:
    splits: Any = {"train": run.texts, "test": run.texts}
    with pytest.raises(ConfigError, match="expected a sequence, such as one split of a dataset, found a dict of"):
        compare_merges(run.adapter, splits, base=run.base)


@pytest.mark.parametrize("options", [{"samples": -1}, {"samples": 1}, {"forms": []}])
def test_too_few_samples_and_no_form_are_refused(options: dict[str, Any], run: TextRun) -> None:
    with pytest.raises(ConfigError, match="expected at least two samples and one form"):
        compare_merges(run.adapter, run.texts, base=run.base, **options)


# ----------------------------------------------------------------------------------------------------
# Texts in files
# ----------------------------------------------------------------------------------------------------


def test_texts_are_read_from_json_lines_and_plain_text(run: TextRun, tmp_path: Path) -> None:
    def measure(texts: Any, samples: int = 64) -> Any:
        options: dict[str, Any] = {"base": run.base, "forms": ["half"], "device": "cpu"}
        return compare_merges(run.adapter, texts, samples=samples, **options).merges["half"]

    some = run.texts[:4]
    lines = tmp_path / "some.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text, "other": 1}) for text in some))
    assert measure(lines) == measure(some)
    assert measure(lines, samples=2) == measure(some[:2])
    odd = [some[0].replace(" ", "\u2028", 1), some[1], "x"]  # of "x" nothing is predicted: another is taken
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in (*odd, some[2])]
    lines.write_text("\ufeff" + "\n\n".join([*rows, "no JSON"]), encoding="utf-8")
    assert measure(lines, samples=3) == measure([*odd[:2], some[2]])

    chats = [[{"role": "user", "content": text}] for text in some]
    lines.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    assert measure(lines) == measure([f"<user>{text}" for text in some]) == measure(chats)

    plain = tmp_path / "some.txt"
    long = ["".join(run.texts)[start : start + 512] * 4 for start in (0, 512)]
    plain.write_text("".join(long))  # in pieces of 2,048 characters
    assert measure(plain) == measure(long)


def test_the_tokenizer_is_the_merged_folders_then_the_adapters_then_the_bases(run: TextRun, tmp_path: Path) -> None:
    merge_checkpoint(run.base, run.adapter, tmp_path / "merged", device="cpu")
    adapter = tmp_path / "adapter"
    shutil.copytree(run.adapter, adapter)
    chat = [[{"role": "user", "content": text}] for text in run.texts[:2]]

    def tokens(*forms: Any) -> float:
        found = compare_merges(adapter, chat, base=run.base, forms=forms, device="cpu")
        return next(iter(found.merges.values())).loss["adapter"]

    of_base = tokens("half")
    for place in (adapter, tmp_path / "merged"):
        own = shutil.copytree(run.base, tmp_path / f"tokenizer-{place.name}")
        (own / "chat_template.jinja").write_text(f"{place.name}: {{{{ messages[0].content }}}}")
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(own / file, place / file)
    assert len({of_base, tokens("half"), tokens(tmp_path / "merged")}) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"text": "some"}\n{"instruction": "some", "output": "more"}',
            "some.jsonl, line 2: expected 'text' or 'messages' that is not empty, or 'prompt' and 'completion', found "
            "'instruction', 'output'",
        ),
        ('{"text": "some"}\n{"text": ""}', "some.jsonl, line 2: expected 'text' or 'messages' that is not empty"),
        ('{"text": "some"}\n{"prompt": "some"}', "or 'prompt' and 'completion', found 'prompt'"),
        ('{"text": "some"}\n{"prompt": "some", "completion": [{}]}', "or 'prompt' and 'completion', found"),
        ('{"text": "some"}\nsome', "some.jsonl, line 2: expected a row of JSON: Expecting value: line 1"),
        ('{"text": "some"}', "some.jsonl: expected at least two texts, found 1"),
        ("[" * 100_000, "some.jsonl, line 1: expected a row of JSON: maximum recursion depth exceeded"),
        ("", "some.jsonl: expected at least two texts, found 0"),
    ],
)
def test_texts_that_cannot_be_read_are_refused_before_a_model_is_loaded(
    content: str, said: str, run: TextRun, tmp_path: Path
) -> None:
    (tmp_path / "some.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=said):
        compare_merges(run.adapter, tmp_path / "some.jsonl", base=run.base, progress=lambda *_: pytest.fail("loaded"))


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.jsonl", "none.jsonl: no such file"), ("some.json", "some.json: expected JSON lines")],
)
def test_a_file_that_is_not_there_or_has_another_name_is_refused(
    name: str, said: str, run: TextRun, tmp_path: Path
) -> None:
    (tmp_path / "some.json").write_text('{"text": "some"}\n{"text": "more"}')
    with pytest.raises(ConfigError, match=said):
        compare_merges(run.adapter, tmp_path / name, base=run.base)


def test_messages_without_a_chat_template_are_refused(run: TextRun, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(run.base, base)
    (base / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"the tokenizer in '.*base' has no chat template: give 'text'"):
        compare_merges(run.adapter, [[{"role": "user", "content": "some"}]] * 2, base=base)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_that_sees_the_tokens_that_it_predicts_is_refused(is_decoder: bool, tmp_path: Path) -> None:
    config = BertConfig(vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    config.initializer_range, config.is_decoder = 0.3, is_decoder
    torch.manual_seed(0)
    model = BertLMHeadModel(config)
    model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(target_modules=["query"], task_type="CAUSAL_LM")).save_pretrained(tmp_path / "a")
    options: dict[str, Any] = {"base": tmp_path / "base", "quantization_config": False, "device": "cpu"}
    refused = pytest.raises(ConfigError, match="found BertLMHeadModel, whose predictions change with the tokens after")
    with contextlib.nullcontext() if is_decoder else refused:
        compare_merges(tmp_path / "a", TEXTS, forms=["original"], **options)


def test_a_model_that_cannot_compute_with_the_texts_is_refused(run: TextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("expected scalar type Float")

    monkeypatch.setattr(LlamaForCausalLM, "forward", refuse)
    with pytest.raises(ConfigError, match="adapter model: it does not compute with the texts: expected scalar type"):
        compare_merges(run.adapter, run.texts[:3], base=run.base, device="cpu")


def test_a_model_that_predicts_no_next_token_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4)
    model = T5ForConditionalGeneration(config).bfloat16()
    model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(target_modules=["q"], task_type="SEQ_2_SEQ_LM")).save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match="expected a model that predicts the next token"):
        compare_merges(tmp_path / "a", ["some", "more"], base=tmp_path / "base", quantization_config=False)


# ----------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(run: TextRun, tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in run.texts[:4]))
    return path


@pytest.mark.thorough
def test_a_comparison_that_is_asked_to_end_leaves_nothing(run: TextRun, file: Path, tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    file.write_text(file.read_text() + 100 * ("\n" + json.dumps({"text": run.texts[0]})))
    options = ["--base", run.base, "--adapter", run.adapter, "--text", file, "--samples", "104", "--device", "cpu"]
    command = [sys.executable, "-m", "kbitwrap", "doctor", run.base, *options]
    process = subprocess.Popen(map(str, command), env={**os.environ, "TMPDIR": str(place)}, stderr=subprocess.PIPE)
    while process.poll() is None and not [*place.glob("kbitwrap-*/1.pt")]:
        time.sleep(0.05)
    process.terminate()
    process.communicate()
    assert process.returncode == 143
    assert [*place.glob("kbitwrap-*")] == []


def test_doctor_says_what_a_merge_keeps_on_a_text(
    run: TextRun, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = tmp_path / "merged"
    merge_checkpoint(run.base, run.adapter, merged, device="cpu")
    options = ["--base", str(run.base), "--adapter", str(run.adapter), "--text", str(file), "--device", "cpu"]
    assert main(["doctor", str(merged), *options]) == 0
    verdict, _, said, *_ = capsys.readouterr().out.splitlines()
    assert verdict.startswith("a merge: 100.0% of the adapter's delta")
    found = compare_merges(run.adapter, file, base=run.base, forms=[merged], device="cpu").merges[str(merged)]
    assert said == str(found)
    assert main(["doctor", str(merged), *options, "--samples", "2", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text["samples"] == 2
    assert {*text} == {"loss", "gain_kept", "divergence_left", "samples", "standard_error"}
    assert {*text["loss"]} == {"adapter", "merged", "base"}


@pytest.mark.parametrize("damage", [not_a_number, without_a_tensor])
def test_a_damaged_merge_is_a_fault_with_a_text_as_without(
    damage: Callable[[Any], None], run: TextRun, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run.reload()
    damage(model)
    model.save_pretrained(tmp_path / "merged")
    options = ["--base", str(run.base), "--adapter", str(run.adapter), "--device", "cpu"]
    assert main(["doctor", str(tmp_path / "merged"), *options]) == 1
    without, _ = capsys.readouterr()
    assert main(["doctor", str(tmp_path / "merged"), *options, "--text", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (said,) = [line for line in lines if line.startswith(f"not measured on {file}: ")]
    assert {*lines} - {said} == {*without.splitlines()}


def test_a_model_of_tied_weights_is_measured_without_its_second_name(run: TextRun, tmp_path: Path) -> None:
    model = run.reload()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "merged")
    assert compare_merges(run.adapter, run.texts[:3], base=run.base, forms=[tmp_path / "merged"], device="cpu").merges


def test_pefts_merge_in_4_bits_is_called_what_it_is_with_what_it_costs(
    run: TextRun, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.adapter_model().merge_and_unload().save_pretrained(tmp_path / "merged")
    options = ["--base", str(run.base), "--adapter", str(run.adapter), "--text", str(file), "--device", "cpu"]
    assert main(["doctor", str(tmp_path / "merged"), *options]) == 1
    verdict, _, said, *_ = capsys.readouterr().out.splitlines()
    assert verdict.startswith("a merge in 4 bits: an adapter was merged into 4-bit weights (")
    assert said.startswith("On 4 texts: loss ")


def test_merge_compares_the_forms_and_writes_nothing_without_out(
    run: TextRun, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    file.write_text("\n".join(json.dumps({"text": text}) for text in run.texts))  # so many show a gain
    arguments = ["merge", str(run.base), str(run.adapter), "--compare", str(file), "--device", "cpu"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    header, *rows = out.splitlines()
    assert header.split() == ["loss", "gain", "kept,", "%", "divergence", "left,", "%", "loads", "with"]
    assert [row.split()[-1] for row in rows[:3]] == ["anything", "bitsandbytes", "anything"]
    assert [row.split()[0] for row in rows[:4]] == ["half", "quantized", "original", "(adapter)"]
    assert rows[-1].startswith("take ")
    assert "kbitwrap: note: mixed is not measured: an adapter touches every quantized layer" in err
    recommended = rows[-1].split()[1].rstrip(":")
    command = f"kbitwrap merge {run.base} {run.adapter} --as {recommended} --out DIR --device cpu"
    assert f"kbitwrap: to write it: {command}\n" in err
    assert [*place.iterdir()] == []
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found} == {"merges", "recommended", "reason", "notes"}
    assert main([*arguments, "--out", "merged"]) == 0
    assert f"kbitwrap: wrote {recommended}, which --compare recommends\n" in capsys.readouterr().err
    assert main(["merge", *arguments[1:3], "--as", recommended, "--out", "alone", "--device", "cpu"]) == 0
    written = [(place / name / "model.safetensors").read_bytes() for name in ("merged", "alone")]
    assert written[0] == written[1]
    other = "quantized" if recommended != "quantized" else "half"
    adapter = shutil.copytree(run.adapter, tmp_path / "adapter", ignore=shutil.ignore_patterns("kbitwrap.json"))
    arguments[2] = str(adapter)
    assert main([*arguments, "--out", "other", "--as", other, "--quant", "nf4"]) == 0
    err = capsys.readouterr().err
    assert "which --compare recommends" not in err
    told = "nothing records how the base was quantized, so the quantization given (--quant) was taken at its word"
    assert [line for line in err.splitlines() if "its word" in line] == [f"kbitwrap: note: {told}"]
    config = json.loads((place / "other" / "config.json").read_text())
    assert ("quantization_config" in config) == (other == "quantized")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["merge", "a"], "Missing option '--out', or '--compare'"),
        (["merge", "a", "--no-adapter", "--compare", "f"], "--compare takes an ADAPTER"),
        (["merge", "a", "--compare", "f", "--out", "b", "--json"], "with --json no --out"),
        (["doctor", ".", "--text", "f"], "--text compares PATH with the adapter model: give --adapter"),
        (["doctor", ".", "--adapter", "a", "--text", "f", "--samples", "1"], "Invalid value for '--samples'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
