"""Merges compared on texts: the loss of each beside that of the adapter model, and which of them to take.

One model at a time is in memory. What the adapter model predicts is kept on the disk, and
every other model is compared with it.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import StrPath
from ..errors import ConfigError, ExportError
from ..export.forms import FORMS, HALF, MIXED, QUANTIZED
from ..export.merge import NO_GAIN
from ..model.pretrained import load_pretrained, meta_model, read_config
from ..model.quantization import is_quantized_layer
from ..preparation.process import empty_cache, plain_mode
from ..reports import Report, in_one_line, table
from ..tensors.devices import accelerator_type
from .adapters import read_adapter
from .base import load_adapted, load_base, named_base
from .base_quantization import OF_BASE, UNQUANTIZED, find_quantization
from .measure import ORIGINAL
from .merge import merge_checkpoint
from .reader import load_manifest, saved_manifest

_ADAPTER, _MERGED, _BASE = "adapter", "merged", "base"
_SMALLEST_FIRST = (QUANTIZED, MIXED, HALF, ORIGINAL)
_MOST = 512  # tokens of a text
_CHARACTERS = 4  # of plain text that are taken for a token
_MOST_KEPT = 1024  # tokens whose log-probabilities are kept at each place
_NOTHING = 1e-12  # the least probability that all others have together
_ERRORS = 2  # standard errors within which two figures are not told apart

Told = Callable[[str, int, int], object]
"""A function that is called with the model that is measured, the number of its texts, and of all."""


@dataclass(frozen=True, repr=False)
class TextMeasure(Report):
    """The measure of a merge on texts, beside the adapter model and the base.

    The divergence is that of the predictions of each next token, KL(adapter model ‖ other
    model). At each place the 1,024 likeliest tokens of the adapter model are compared one
    by one, and all others as one: of a larger vocabulary it is a lower bound.

    Attributes:
        loss: The losses of ``"adapter"``, the adapter model, of ``"merged"`` and of
            ``"base"``: the mean over texts of the mean over their tokens, in nats.
        gain_kept: The part of the adapter's gain in loss that the merge has.
        divergence_left: The merge's divergence, in parts of the base's.
        samples: The number of texts.
        standard_error: The standard errors over the texts: of the three losses, of
            ``"difference"``, the merge's loss less the adapter model's, of
            ``"gain_kept"`` and of ``"divergence_left"``.
    """

    loss: Mapping[str, float]
    gain_kept: float
    divergence_left: float
    samples: int
    standard_error: Mapping[str, float]

    def __str__(self) -> str:
        adapter, merged = self.loss[_ADAPTER], self.loss[_MERGED]
        error = self.standard_error["difference"]
        beside = "as"
        if abs(merged - adapter) > _ERRORS * error:
            beside = f"{merged - adapter:+.3f} beside"
        return (
            f"On {self.samples} texts: loss {merged:.3f}, {beside} the adapter model ({adapter:.3f} ± {error:.3f}); "
            f"{100 * self.gain_kept:.1f} % of the gain, {100 * self.divergence_left:.1f} % of the divergence left."
        )

    _brief = __str__


@dataclass(frozen=True, repr=False)
class MergeComparison(Report):
    """The measures of several merges of one adapter on the same texts. ``print`` gives a table.

    Attributes:
        merges: The measure of each merge: by its form, or by the path of its folder.
        recommended: The merge to take: the one that keeps most of the gain, or the
            smallest of those whose losses are within two standard errors of it, each
            compared with it text by text; of two of a size the one on the base that was
            trained. Where the adapter gains nothing on the texts, the divergence decides.
        reason: Why it is that one.
        notes: Why other forms were not measured.
    """

    merges: Mapping[str, TextMeasure]
    recommended: str
    reason: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [["", "loss", "gain kept, %", "divergence left, %"]]
        for name, one in self.merges.items():
            errors = one.standard_error
            kept = f"{100 * one.gain_kept:.1f} ± {100 * errors['gain_kept']:.1f}"
            left = f"{100 * one.divergence_left:.2f} ± {100 * errors['divergence_left']:.2f}"
            rows.append([name, f"{one.loss[_MERGED]:.4f}", kept, left])
        for name in (_ADAPTER, _BASE):
            rows.append([f"({name})", f"{one.loss[name]:.4f}", "", ""])
        return f"{table(rows)}\n\n{self._brief()}"

    def _brief(self) -> str:
        return f"take {self.recommended}: {self.reason}"


def compare_merges(
    adapter: StrPath,
    texts: StrPath | Sequence[Any],
    *,
    base: StrPath | None = None,
    forms: Sequence[StrPath] = (HALF, QUANTIZED),
    samples: int = 64,
    progress: Told | None = None,
    **merging: Any,
) -> MergeComparison:
    """Measure on texts what merges of an adapter keep of what it gained, and say which one to take.

    The adapter model is the base, quantized as in training, with the adapter on it; it
    computes with the kernel that trained. Merges are written to a temporary folder
    (``TMPDIR``), one at a time, and removed.

    Args:
        adapter: The folder that PEFT saved the adapter in.
        texts: A file: JSON lines that have ``text`` or ``messages`` (``.jsonl``), or else
            plain text, which is cut into pieces of four characters a token. Or the texts, as
            strings or such rows. Each is cut after 512 tokens.
        base: The base, as for `merge_checkpoint`.
        forms: The merges: ``"half"``, ``"mixed"`` and ``"quantized"``, as for
            `merge_checkpoint`; ``"original"``, PEFT's merge onto the base's own 16-bit
            weights; and folders that any tool merged. The tokenizer is that of such a
            folder, or else the adapter's, or the base's.
        samples: The most texts that are taken, evenly spread.
        progress: A function that is called with the model that is measured, the number of
            its texts, and of all.
        **merging: ``manifest``, ``quantization_config``, ``dtype``, ``seed``, ``device``
            and ``trust_remote_code``, as for `merge_checkpoint`.

    Returns:
        The measures of the merges, and the one to take.

    Raises:
        ConfigError: As for `merge_checkpoint`; or there are fewer than two texts, no
            tokenizer or no chat template, or the model does not predict next tokens.
        ManifestMismatchError: As for `merge_checkpoint`.
        ExportError: There is no room for a merge, or none of the forms can be merged.

    Example:
        >>> from kbitwrap import compare_merges
        >>> compare_merges("/no/adapter", ["A text.", "Another one."])
        Traceback (most recent call last):
        ...
        kbitwrap.errors.ConfigError: there is no adapter_config.json ... in '/no/adapter'
    """
    saved = read_adapter(Path(adapter))
    base = base or named_base(saved)
    record = saved_manifest(saved.folder)
    if merging.get("manifest"):
        record = load_manifest(merging["manifest"])
    device = merging.get("device") or accelerator_type() or "cpu"
    trust = merging.get("trust_remote_code", False)
    dtype = merging.get("dtype")
    given = merging.get("quantization_config")
    quantization = find_quantization(base, given, record, saved, trust)
    run = (saved, record, quantization, dtype, device, trust)
    folders = [form for form in forms if form not in _SMALLEST_FIRST]
    rows = _tokenize(texts, samples, [*folders, adapter, base], trust)

    def load(name: Any, merged: Path) -> Any:
        if name == _ADAPTER:
            trained, model = load_adapted(base, *run, may_be_pending=False)
            trained.finish_check()
            return model
        if name == _BASE:
            trained = load_base(base, *run)
            for fqn in trained.unknown:  # rows that only the adapter holds
                trained.model.get_parameter(fqn).data.nan_to_num_()
            return trained.model
        if name == ORIGINAL:
            if quantization.source == OF_BASE:
                raise ConfigError("the base was saved quantized: its own are not here")
            own = dtype or (record and record.model.dtype)
            plain = (saved, None, UNQUANTIZED, own, device, trust)
            adapted: Any = load_adapted(base, *plain, may_be_pending=False)[1]
            return adapted.merge_and_unload()
        if name in FORMS:
            options = {**merging, "merge_as": name, "overwrite": True}
            if NO_GAIN in merge_checkpoint(base, adapter, merged, **options).notes:
                raise ExportError(NO_GAIN)
            name = merged
        return load_pretrained(name, None, None, device, None, trust)[0]

    measured: dict[str, Tensor] = {}
    notes: list[str] = []
    with (
        plain_mode(),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),  # loading draws numbers
        tempfile.TemporaryDirectory(prefix="kbitwrap-") as place,
    ):
        warnings.simplefilter("ignore", UserWarning)  # the report's notes have them
        if len(folders) < len(forms):
            config = read_config(base, trust)
            config.quantization_config = None
            model: Any = meta_model(config)
            num_bytes = 2 * model.num_parameters()
            if num_bytes > shutil.disk_usage(place).free:
                raise ExportError(
                    f"a merge takes {num_bytes:,} bytes for a while, and {place!r} has no room for them: name another "
                    "folder in TMPDIR"
                )
        for name in (_ADAPTER, _BASE, *(os.fspath(form) for form in forms)):
            try:
                model = load(name, Path(place, _MERGED))
                measured[name] = _predict(model, name, rows, place, progress)
            except (ConfigError, ExportError, torch.OutOfMemoryError) as error:
                if name not in _SMALLEST_FIRST:
                    raise
                notes.append(f"{name} is not measured: {in_one_line(error)}")
            model = None
            gc.collect()  # models are cycles of references
            empty_cache()

    adapted, plain = measured.pop(_ADAPTER), measured.pop(_BASE)
    if not measured:
        raise ExportError(f"nothing can be merged: {'; '.join(notes)}")
    merges = {name: _compare(one, adapted, plain) for name, one in measured.items()}
    taken, reason = _recommend(measured, plain[0] - adapted[0])
    return MergeComparison(merges, taken, reason, tuple(notes))


def _tokenize(
    texts: Any, samples: int, places: Sequence[StrPath], trust_remote_code: bool
) -> list[Tensor]:
    """Read the texts that are taken, and return the tokens of each; the base is the last of the places."""
    from transformers import AutoTokenizer

    *folders, place = places
    config = read_config(place, trust_remote_code).get_text_config(decoder=True)
    length = min(getattr(config, "max_position_embeddings", _MOST), _MOST)
    for folder in reversed(folders):
        if os.path.isfile(os.path.join(folder, "tokenizer_config.json")):
            place = folder

    rows = []
    try:
        if isinstance(texts, (str, os.PathLike)):
            path = Path(texts)
            content = path.read_text(encoding="utf-8")
            size = _CHARACTERS * length
            starts = range(0, len(content), size)
            texts = [content[start : start + size] for start in starts]
            if path.suffix == ".jsonl":
                texts = [*map(json.loads, content.splitlines())]
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code
        )
        for text in texts[:: max(len(texts) // samples, 1)][:samples]:
            if isinstance(text, dict):
                text = text["text"] if "text" in text else text["messages"]
            is_chat = not isinstance(text, str)
            if is_chat:  # whose template writes the special tokens
                text = tokenizer.apply_chat_template(text, tokenize=False)
            tokens = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
            if len(tokens) > 1:
                rows.append(torch.tensor(tokens[:length]))
    except Exception as error:  # of JSON, of tokenizers and their templates
        raise ConfigError(
            f"the texts cannot be read, expected plain text or JSON lines with 'text' or 'messages', and tokenized by "
            f"{os.fspath(place)!r}: {type(error).__name__}: {in_one_line(error)}"
        ) from error

    if len(rows) < 2:
        raise ConfigError(f"expected at least two texts, found {len(rows)}")
    return rows


def keep_kernels_of_training(model: nn.Module) -> None:
    """Put a model in eval mode, but for its quantized layers, which compute as in training.

    Nothing drops out in these layers. In eval mode those of bitsandbytes may take other
    kernels on a CPU.
    """
    model.eval()
    for module in model.modules():
        if is_quantized_layer(module):
            module.training = True


def _predict(
    model: Any, name: StrPath, rows: Sequence[Tensor], place: str, told: Told | None
) -> Tensor:
    """Return the losses of a model on the texts, and its divergences from the first model, in two rows.

    What the first model predicts is kept in the folder.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ConfigError(
            f"expected a model that predicts the next token, found {type(model).__name__}"
        )
    keep_kernels_of_training(model)
    figures = []
    for number, tokens in enumerate(rows):
        if told is not None:
            told(os.path.basename(name), number, len(rows))
        ids = tokens.to(model.device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        found = logits.double().log_softmax(-1)
        path = Path(place, f"{number}.pt")
        if not path.exists():
            likely = found.topk(min(_MOST_KEPT, found.shape[-1])).indices
            torch.save((likely, _gather(found, likely)), path)
        likely, expected = torch.load(path, ids.device)
        off = expected - _gather(found, likely)
        divergence = (expected.exp() * off).sum(-1).mean()
        loss = -found.gather(-1, ids[1:, None]).mean()
        figures.append(torch.stack([loss, divergence]).cpu())
    return torch.stack(figures, 1)


def _gather(found: Tensor, likely: Tensor) -> Tensor:
    """Return the log-probabilities of some tokens, and that of all others together."""
    some = found.gather(-1, likely).exp()
    others = 1 - some.sum(-1, keepdim=True)
    return torch.cat([some, others.clamp(min=_NOTHING)], -1).log()


def _error(values: Tensor) -> float:
    """Return the standard error of a mean."""
    return float(values.std() / math.sqrt(len(values)))


def _in_parts(part: Tensor, whole: Tensor) -> Tensor:
    """Return values whose mean is the ratio of two means, and has its standard error (the delta method)."""
    ratio = part.mean() / whole.mean()
    return ratio + (part - ratio * whole) / whole.mean()


def _compare(merged: Tensor, adapted: Tensor, plain: Tensor) -> TextMeasure:
    """Compare the figures of a merge with those of the adapter model and the base."""
    losses = {_ADAPTER: adapted[0], _MERGED: merged[0], _BASE: plain[0]}
    kept = _in_parts(plain[0] - merged[0], plain[0] - adapted[0])
    left = _in_parts(merged[1], plain[1])
    others = {"difference": merged[0] - adapted[0], "gain_kept": kept}
    figures = {**losses, **others, "divergence_left": left}
    return TextMeasure(
        {name: values.mean().item() for name, values in losses.items()},
        kept.mean().item(),
        left.mean().item(),
        len(kept),
        {name: _error(values) for name, values in figures.items()},
    )


def _recommend(measured: Mapping[str, Tensor], gain: Tensor) -> tuple[str, str]:
    """Return the merge to take, and why: by losses, or by divergences where the adapter gains nothing."""
    what, row = "loss", 0
    if gain.mean() <= _ERRORS * _error(gain):
        what, row = "divergence (the adapter gains nothing here)", 1
    values = {name: figures[row] for name, figures in measured.items()}
    best = min(values, key=lambda name: values[name].mean().item())
    alike = []
    for name, own in values.items():
        difference = own - values[best]
        if difference.mean() <= _ERRORS * _error(difference):
            alike.append(name)
    if len(alike) == 1:
        return best, f"its {what} is the lowest, by more than two standard errors"
    taken = next(name for name in (*_SMALLEST_FIRST, *alike) if name in alike)
    why = "on the base that was trained"
    if taken in (QUANTIZED, MIXED):
        why = "the smallest"
    return taken, (
        f"{' and '.join(alike)} are within two standard errors of the lowest {what}, that of {best}, and it is {why}"
    )
