"""Predicts the published memory of training steps, and writes prediction and measurement side by side.

    python docs/figures published [--from] [WORD ...]

The measurements are those of published.csv, in this folder, by others; published_sources.csv says of which files,
cards and versions they are, and what was guessed. Models are built from their published shapes: nothing is downloaded.
The result is the data of docs/benchmarks/published.json, its picture docs/pictures/published.svg, and the tables of
docs/published.md. WORD picks the rows that have it in their source, model or settings: these are predicted, and the
others stay as the data have them. With `--from` nothing is predicted, and picture and tables show the data again.

A prediction follows the libraries that are installed. Where a run's version of transformers computed the loss
otherwise, the row says so in its column `code`, and the same is written out here: in 4.39 to 4.45 the logits became
float32 at once, and were copied without their last position; in 4.48 the loss did both, with the logits still there;
4.39 kept tables of rotary positions in every layer. Up to 4.45, Mistral's flash attention repeated keys and values for
all heads (`flash-expanded`). `keeps-output` are scripts that hold the model's output, and so its logits, to the end;
`mean` is a notebook that does so too, whose loss is the mean of the logits, without an optimizer; in its version of
bitsandbytes, 4-bit layers kept their inputs by themselves, so that checkpointing that is not reentrant kept them too.
`trainer` is transformers' trainer, `trl-0.27` to `trl-1.14` are TRL's: published_trl.py says how they compute the loss.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import transformers
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)

import style
import trl
from kbitwrap import StepMemory, StepPredictor
from kbitwrap.cli.limits import budget_of
from kbitwrap.foresight import simulated
from published_trl import TRAINERS, arguments, loss_of
from sections import DOCS, markdown_table, replace_section

MEASURED = Path(__file__).with_name("published.csv")
PAGE = DOCS / "published.md"
DATA = DOCS / "benchmarks" / "published.json"
PICTURE = DOCS / "pictures" / "published.svg"
SOURCES = Path(__file__).with_name("published_sources.csv")


def _shapes(
    hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


def _config(cls: type[PretrainedConfig], *shapes: Any, **others: Any) -> PretrainedConfig:
    name = cls.__name__.replace("Config", "ForCausalLM")
    return cls(**_shapes(*shapes), architectures=[name], **others)


# The trainer of fms-acceleration added a padding token: 32001 rows. Its flash attention takes the window, whole here.
MODELS: dict[str, PretrainedConfig] = {
    "Mistral-7B-v0.1": _config(
        MistralConfig, 4096, 14336, 32, 32, 8, 32001, False, sliding_window=None, max_position_embeddings=32768
    ),
    "Llama-2-70b": _config(LlamaConfig, 8192, 28672, 80, 64, 8, 32001, False, max_position_embeddings=4096),
    "PowerLM-3b": _config(GraniteConfig, 2304, 9216, 40, 36, 36, 49152, True),
    "Qwen2.5-0.5B-Instruct": _config(Qwen2Config, 896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": _config(Qwen2Config, 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-1.5B-Instruct": _config(Qwen2Config, 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-Coder-1.5B-Instruct": _config(Qwen2Config, 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B-Instruct": _config(Qwen2Config, 2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B-Instruct": _config(Qwen2Config, 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-14B-Instruct": _config(Qwen2Config, 5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B-Instruct": _config(Qwen2Config, 5120, 27648, 64, 40, 8, 152064, False),
    "SmolLM2-135M": _config(LlamaConfig, 576, 1536, 30, 9, 3, 49152, True),
    "SmolLM2-360M": _config(LlamaConfig, 960, 2560, 32, 15, 5, 49152, True),
    "SmolLM2-1.7B": _config(LlamaConfig, 2048, 8192, 24, 32, 32, 49152, True),
    "TinyLlama-1.1B-Chat-v1.0": _config(LlamaConfig, 2048, 5632, 22, 32, 4, 32000, False),
    "Mistral-7B-Instruct-v0.3": _config(MistralConfig, 4096, 14336, 32, 32, 8, 32768, False, sliding_window=None),
    "Mistral-Small-24B-Instruct-2501": _config(
        MistralConfig, 5120, 32768, 40, 32, 8, 131072, False, head_dim=128, sliding_window=None
    ),
    "Bielik-1.5B-v3": _config(LlamaConfig, 1536, 8960, 32, 12, 2, 32000, False),
    "Bielik-1.5B-Instruct": _config(LlamaConfig, 1536, 8960, 32, 12, 2, 32000, False),
    "Bielik-4.5B-Instruct": _config(LlamaConfig, 2048, 11008, 60, 16, 2, 32000, False),
    "tiny-gpt2": GPT2Config(n_embd=2, n_layer=2, n_head=2, architectures=["GPT2LMHeadModel"]),
    "deepseek-coder-1.3b-instruct": _config(LlamaConfig, 2048, 5504, 24, 16, 16, 32256, False),
    "Llama-3.2-1B-Instruct": _config(LlamaConfig, 2048, 8192, 16, 32, 8, 128256, True),
    "Llama-3.2-3B-Instruct": _config(LlamaConfig, 3072, 8192, 28, 24, 8, 128256, True),
    "Llama-3.1-8B-Instruct": _config(LlamaConfig, 4096, 14336, 32, 32, 8, 128256, False),
    "Phi-4-mini-instruct": _config(
        Phi3Config, 3072, 8192, 32, 24, 8, 200064, True, pad_token_id=None, sliding_window=None
    ),
}
MODELS["Llama, 24 blocks of 2048"] = _config(LlamaConfig, 2048, 4096, 24, 16, 16, 32000, False)
_held: dict[str, torch.Tensor] = {}


def _shifted_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    wanted = labels[..., 1:].contiguous().view(-1)
    return F.cross_entropy(shifted.view(-1, vocab_size), wanted)


def _mean(logits: torch.Tensor, **_: Any) -> torch.Tensor:
    return logits.mean()


def _keep_input(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    if output.grad_fn is not None:
        output.grad_fn.metadata["input"] = args[0].to(module.compute_dtype)


def _as_float(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()


def _keep_rotary_tables(model: Any) -> None:
    """Tables of cosines and sines in every layer, for all positions that the config allows."""
    shape = (model.config.max_position_embeddings, model.config.hidden_size // model.config.num_attention_heads)
    for layer in model.model.layers:
        for name in ("cos_cached", "sin_cached"):
            layer.register_buffer(name, torch.empty(shape, dtype=model.dtype, device="meta"), persistent=False)


def _hold(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    _held["logits"] = output


def _let_go(module: nn.Module, args: Any) -> None:
    _held.clear()


def _quantization(row: dict[str, str]) -> BitsAndBytesConfig | None:
    if row["base"] == "half":
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, row["dtype"]),
        bnb_4bit_use_double_quant=row["base"] == "nf4-double",
    )


def _source(row: dict[str, str]) -> PretrainedConfig:
    config = MODELS[row["model"]]
    is_named = row["code"] in TRAINERS or row["attention"] == "eager"
    config._attn_implementation = row["attention"] if is_named else "sdpa"
    return config


def _change(row: dict[str, str], model: Any) -> nn.Module:
    """Let a model compute as that of the run, and return it."""
    if row["code"] in ("4.39", "4.45", "4.48"):
        model.loss_function = _shifted_loss
    if row["code"] == "4.39":
        _keep_rotary_tables(model)
    if row["code"] == "mean":
        model.loss_function = _mean
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":
                module.register_forward_hook(_keep_input)
    if row["code"] in ("4.39", "4.45", "mean"):
        model.get_output_embeddings().register_forward_hook(_as_float)
    if row["code"] in ("keeps-output", "mean"):
        model.get_output_embeddings().register_forward_hook(_hold)
        model.get_input_embeddings().register_forward_pre_hook(_let_go)
    reentrant = _reentrant(row)
    if row["way"] == "norms-stored":  # PEFT's function, after which TRL casts embeddings and head back
        tables = [model.get_input_embeddings(), model.get_output_embeddings()]
        peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=reentrant)
        for table in tables:
            table.to(getattr(torch, row["dtype"]))
    if row["base"] == "half" and row["code"] not in TRAINERS:
        model.gradient_checkpointing_enable(reentrant)
        model.enable_input_require_grads()
    if row["code"] == "mean":  # adapters in bfloat16
        return peft.get_peft_model(model, _lora(row), autocast_adapter_dtype=False)
    return model  # type: ignore[no-any-return]


@contextlib.contextmanager
def _changed(row: dict[str, str]) -> Iterator[None]:
    """Let models that are built from configs compute as that of the run."""
    build = simulated.built_model

    def changed(*args: Any) -> nn.Module:
        with torch.device("meta"):
            return _change(row, build(*args))

    with mock.patch.object(simulated, "built_model", changed):
        yield


def _expanded(attention: Any) -> Any:
    """Attention with keys and values repeated for all heads: by fitcheck's script, and Mistral's code up to 4.47."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if (groups := query.size(-3) // key.size(-3)) > 1:
            key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
            kwargs.pop("enable_gqa", None)
        return attention(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]

    return attend


@contextlib.contextmanager
def _attention(kind: str) -> Iterator[None]:
    if kind not in ("efficient", "flash-expanded"):
        yield
        return
    kernel = SDPBackend.EFFICIENT_ATTENTION if kind == "efficient" else SDPBackend.FLASH_ATTENTION
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _expanded(original)
    try:
        with sdpa_kernel(kernel):
            yield
    finally:
        functional.scaled_dot_product_attention = original


def _inputs(row: dict[str, str]) -> dict[str, torch.Tensor]:
    """What the run's model was called with: the labels were the tokens themselves, or beside a mask of ones."""
    tokens = torch.full((int(row["batch"]), int(row["seq"])), 5)
    if row["source"].startswith(("fms", "can-i-finetune")):
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    return {"input_ids": tokens, "labels": tokens}


def _lora(row: dict[str, str]) -> peft.LoraConfig:
    targets: str | list[str] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if row["code"] == "mean":
        targets = ["q_proj", "v_proj"]
    elif row["targets"]:
        targets = row["targets"] if row["targets"] == "all-linear" else row["targets"].split()
    return peft.LoraConfig(
        r=int(row["rank"]), lora_dropout=float(row["dropout"]), target_modules=targets, task_type="CAUSAL_LM"
    )


def _reentrant(row: dict[str, str]) -> dict[str, bool]:
    return {"use_reentrant": row["source"].startswith("fms")}


@contextlib.contextmanager
def predicting(row: dict[str, str]) -> Iterator[StepPredictor]:
    """What predicts a run's steps, while all computes as in the run."""
    given: dict[str, Any] = {
        "quantization_config": _quantization(row),
        "dtype": getattr(torch, row["dtype"]),
        "lora": None if row["code"] == "mean" else _lora(row),
        "precision": "none" if row["way"] == "norms-stored" else row["way"],
    }
    if row["empties"] == "no":
        given["empty_cache"] = False
    if row["code"] in TRAINERS:
        given["args"] = arguments(row)
        if row["way"] == "none":
            given["precision"] = "unprepared"
    else:
        given |= {
            "inputs": _inputs(row),
            "optimizer": row["optimizer"] or ("sgd" if row["code"] == "mean" else "adamw_torch"),
            "autocast": row["autocast"] or None,
            "gradient_checkpointing": row["checkpointing"] != "off",
            "gradient_checkpointing_kwargs": _reentrant(row),
        }
    allocator = mock.patch.dict(os.environ, {"PYTORCH_ALLOC_CONF": row["allocator"]})
    with allocator, loss_of(row["code"]), _attention(row["attention"]), _changed(row):
        yield StepPredictor(_source(row), **given)
    _held.clear()


def predict(row: dict[str, str]) -> StepMemory:
    """The prediction for one row."""
    with predicting(row) as predictor:
        return predictor(int(row["batch"]), int(row["seq"]))


FIGURES = ("forward_bytes", "backward_bytes", "optimizer_bytes", "peak_bytes")


def _figures(row: dict[str, str], step: StepMemory) -> dict[str, int]:
    """What is predicted of what a row measured."""
    predicted = {name: getattr(step, name) for name in ("static_bytes", *FIGURES)}
    state, batch = (step.static_by_kind.get(kind, 0) for kind in ("optimizer", "inputs"))
    if row["source"].startswith(("fitcheck", "can-i-finetune")):  # read before both are there
        predicted["static_bytes"] -= state + batch
    if row["steps"] == "1":  # the optimizer makes its state at the step's end
        for name in ("forward_bytes", "backward_bytes"):
            predicted[name] -= state
        predicted["peak_bytes"] = max(predicted[name] for name in FIGURES[:3])
    return predicted


def _settings(row: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in row.items() if not key.endswith("_bytes") and value}


def compared(row: dict[str, str], card_bytes: int) -> dict[str, Any]:
    """One row with its prediction, the errors in percent, and whether it is predicted to fit its card."""
    start = time.perf_counter()
    batch = int(row["batch"]), int(row["seq"])
    with predicting(row) as predictor:
        step = predictor(*batch)
        fits = None
        if card_bytes and row["steps"] != "1":  # a step after the first is predicted
            fits = predictor.fits(budget_of(None, card_bytes) or 0, *batch)
    predicted = _figures(row, step) | {"reserved_bytes": step.reserved_bytes}
    measured = {
        name: int(row[name]) for name in ("static_bytes", *FIGURES, "reserved_bytes", "card_bytes") if row[name]
    }
    errors = {
        name: round(100 * (predicted[name] / value - 1), 2) for name, value in measured.items() if name in predicted
    }
    found = _settings(row) | {"measured": measured, "predicted": predicted, "error_percent": errors, "fits": fits}
    if "peak_bytes" in measured:
        least, most = (predicted["peak_bytes"] + number for number in step.unknown_bytes)
        found["range"] = [least, most]
        found["in_range"] = least <= measured["peak_bytes"] <= most
        found["error_with_least_percent"] = round(100 * (least / measured["peak_bytes"] - 1), 2)
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def _code(row: dict[str, Any]) -> str:
    """How a run computed otherwise than the libraries that predict, and otherwise than the other runs."""
    words = [row.get("code", "")]
    if "packed" in row:
        words.append("packed")
    if "steps" in row:
        words.append("first step")
    if "checkpointing" in row:
        words.append("no checkpointing")
    return ", ".join(word for word in words if word)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: measured and predicted bytes in MiB, and the errors in percent."""
    head = ["model", "batch x tokens", "base", "preparation", "measured", "predicted", "peak", "with workspaces"]
    head += ["forward", "backward", "optimizer", "static", "in range", "reserved", "predicted", "error"]
    lines = [[*head, "attention", "code", "source"]]
    for row in rows:
        errors, both = row["error_percent"], (row["measured"], row["predicted"])
        cells = [row["model"], f"{row['batch']} x {row['seq']}", row["base"], row["way"]]
        if "peak_bytes" in errors:
            cells += [f"{found['peak_bytes'] / 2**20:,.1f}" for found in both]
            cells += [f"{errors['peak_bytes']:+.2f}", f"{row['error_with_least_percent']:+.2f}"]
        else:
            cells += [""] * 4
        names = ("forward_bytes", "backward_bytes", "optimizer_bytes", "static_bytes")
        cells += [f"{errors[name]:+.2f}" if name in errors else "" for name in names]
        cells.append({True: "yes", False: "no", None: ""}[row.get("in_range")])
        if "reserved_bytes" in errors:
            cells += [f"{found['reserved_bytes'] / 2**20:,.0f}" for found in both]
            cells.append(f"{errors['reserved_bytes']:+.2f}")
        else:
            cells += [""] * 3
        lines.append([*cells, row["attention"], _code(row), row["source"]])
    return markdown_table(lines)


def ran_out(rows: list[dict[str, Any]]) -> str:
    """The runs that ran out of memory as Markdown, with what is predicted of them."""
    lines = [["model", "batch x tokens", "base", "preparation", "reserved without a limit, GiB", "fits", "source"]]
    for row in rows:
        reserved = f"{row['predicted']['reserved_bytes'] / GIB:,.1f}"
        fits = "yes" if row["fits"] else "no"
        lines.append(
            [row["model"], f"{row['batch']} x {row['seq']}", row["base"], row["way"], reserved, fits, row["source"]]
        )
    return markdown_table(lines)


def forecast(rows: list[dict[str, Any]]) -> str:
    """The runs of which no figure was published as Markdown: for each batch, bytes allocated and reserved in GiB."""
    batches = sorted({int(row["batch"]) for row in rows})
    lines = [["model", "tokens", "rank", *(f"batch {batch}" for batch in batches)]]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = {int(row["batch"]): row for row in rows if row["model"] == model}
        first = of_model[batches[0]]
        cells = [model, first["seq"], first["rank"]]
        for batch in batches:
            row = of_model[batch]
            allocated, reserved = (row["predicted"][name] / GIB for name in ("peak_bytes", "reserved_bytes"))
            cells.append(f"{allocated:.2f} / {reserved:.2f}" + ("" if row["fits"] else ", runs out"))
        lines.append(cells)
    return markdown_table(lines)


COLORS = {
    "fitcheck": "#0072b2",
    "fms-acceleration": "#d55e00",
    "fsdp_qlora": "#009e73",
    "can-i-finetune-this": "#cc79a7",
    "backpropagate": "#e69f00",
    "explore-persona-space": "#56b4e9",
    "alignlab": "#000000",
    "wikisql": "#f0e442",
    "doc2query": "#8c510a",
}
GIB = 2**30


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Predicted against measured peaks, and what each prediction is off by."""
    figure = Figure(figsize=(5.0, 7.0), layout="constrained")
    peaks, errors = figure.subplots(2, 1, height_ratios=(3, 2))
    for name, color in COLORS.items():
        of_source = [row for row in rows if row["source"].startswith(name) and "peak_bytes" in row["measured"]]
        measured = [row["measured"]["peak_bytes"] / GIB for row in of_source]
        predicted = [row["predicted"]["peak_bytes"] / GIB for row in of_source]
        off = [row["error_percent"]["peak_bytes"] for row in of_source]
        look = {"color": color, "s": 22, "alpha": 0.65, "linewidths": 0, "zorder": 3}
        peaks.scatter(measured, predicted, label=f"{name}: {len(of_source)} runs", **look)
        errors.scatter(measured, off, **look)
    least, most = 0.08, 80
    peaks.plot([least, most], [least, most], color="#8c959f", linewidth=0.8, zorder=1)
    errors.axhline(0, color="#8c959f", linewidth=0.8, zorder=1)
    errors.axhspan(-2, 2, color="#8c959f", alpha=0.15, linewidth=0, zorder=0)
    peaks.set_title("predicted peak, GiB", fontsize=10, loc="left")
    errors.set_title("predicted less measured, in % (gray: within 2 %)", fontsize=10, loc="left")
    peaks.set_yscale("log")
    for axis in (peaks, errors):
        axis.set_xscale("log")
        axis.set_xlim(least, most)
        axis.set_xlabel("measured peak, GiB")
        axis.xaxis.set_major_locator(FixedLocator(TICKS))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter("{x:g}")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    peaks.set_ylim(least, most)
    peaks.yaxis.set_major_locator(FixedLocator(TICKS))
    peaks.yaxis.set_minor_locator(NullLocator())
    peaks.yaxis.set_major_formatter("{x:g}")
    errors.set_ylim(-17, 4)
    peaks.legend(loc="upper left", frameon=False)
    return figure


TICKS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sources() -> str:
    """Where the measurements were read, as Markdown."""
    lines = [["source", "read in", "card", "versions", "what it measured", "guesses"]]
    for row in _read(SOURCES):
        name = f"[{row['source']}]({row['address']})"
        lines.append([name, f"`{row['files']}`", *(row[key] for key in ("card", "versions", "measured", "guesses"))])
    return markdown_table(lines)


def show(rows: list[dict[str, Any]]) -> None:
    """Draw the picture and write the tables."""
    measured = [row for row in rows if row["measured"]]
    style.draw(draw, PICTURE, measured)
    replace_section(PAGE, "sources", sources())
    replace_section(PAGE, "published", table(measured))
    replace_section(PAGE, "ran out", ran_out([row for row in rows if "ran_out" in row]))
    replace_section(PAGE, "forecast", forecast([row for row in rows if not row["measured"] and "ran_out" not in row]))


def _kept(versions: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of the data, which have to be of the versions that predict now."""
    saved = json.loads(DATA.read_text())
    if not saved["versions"].items() <= versions.items():
        raise SystemExit(f"the data are of {saved['versions']}: without words, all rows are predicted")
    return saved["rows"]  # type: ignore[no-any-return]


def _is_of(found: dict[str, Any], row: dict[str, str]) -> bool:
    is_one = str(found["measured"].get("peak_bytes", "")) == row["peak_bytes"]  # of runs that were done twice
    return is_one and {name: found[name] for name in row if name in found} == _settings(row)


def _card_bytes(source: str) -> int:
    """The bytes of the card that a run was on; 0 where it is not known."""
    of_source = [row for row in _read(SOURCES) if source.startswith(row["source"])]
    gib = max(of_source, key=lambda row: len(row["source"]))["card_gib"]
    return int(float(gib or 0) * GIB)


def main() -> None:
    """Predict the rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--from", dest="is_predicted", action="store_true", help="show the file's data again")
    asked = parser.parse_args()
    words = asked.words
    if asked.is_predicted:
        show(json.loads(DATA.read_text())["rows"])
        return
    given = _read(MEASURED)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft, trl)}
    kept = _kept(versions) if words else []
    results = []
    for row in given:
        of_before = [found for found in kept if _is_of(found, row)]
        if all(any(word in cell for cell in row.values()) for word in words):
            found = compared(row, _card_bytes(row["source"]))
            print(*(row[key] for key in ("source", "model", "base", "way", "attention", "batch", "seq")), end=" ")
            print(found["error_percent"], found["fits"], f"{found['seconds']} s", flush=True)
            results.append(found)
        else:
            results += of_before[:1]
    result = {"versions": versions, "rows": results}
    DATA.write_text(json.dumps(result, indent=1) + "\n")
    show(results)
