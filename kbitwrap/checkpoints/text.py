"""Merges compared on texts: the loss of each beside that of the adapter model, and which of them to take.

One model at a time is in memory. What the adapter model predicts is kept on the disk, and
every other model is compared with it.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import StrPath
from ..errors import ConfigError, ExportError
from ..export.forms import FORMS, HALF, MIXED, QUANTIZED
from ..export.merge import NO_GAIN
from ..model.pretrained import load_pretrained, read_config
from ..model.quantization import BITSANDBYTES, keep_kernels_of_training
from ..model.wrappers import unwrap
from ..preparation.process import empty_cache, plain_mode
from ..reports import Report, caller_level, first_of, in_one_line, shown, table
from ..tensors.devices import accelerator_type
from .adapters import read_adapter
from .base import load_adapted, load_base, named_base
from .base_quantization import GIVEN, find_quantization
from .measure import ORIGINAL
from .merge import merge_checkpoint
from .reader import load_manifest, saved_manifest

_ADAPTER, _MERGED, _BASE = "adapter", "merged", "base"
_MODEL, _BASE_MODEL = "adapter model", "base model"
_FORMS = (*FORMS, ORIGINAL)
_LOADS_WITH = {
    HALF: "anything",
    MIXED: BITSANDBYTES,
    QUANTIZED: BITSANDBYTES,
    ORIGINAL: "anything",
}
_MOST = 512  # tokens of a text
_PIECE = re.compile(r"(?s).{1,2048}")  # of plain text
_MOST_KEPT = 1024  # tokens whose log-probabilities are kept at each place
_NOTHING = 1e-12  # the least probability that all others have together
_ROUNDING = 0.01  # the most that rounding changes predictions, as a divergence
_ERRORS = 2  # standard errors within which two figures are not told apart

_NO_GAIN = (
    "on these texts the adapter's loss ({0[adapter]:.3f}) is not below the base's ({0[base]:.3f}) by two standard "
    "errors; give texts of what it learned, or more of them"
)

Told = Callable[[str], object]
"""A function that is called with words on how far the work is."""


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
            ``"difference"``, the merge's loss less the adapter model's, of ``"gain"``,
            the base's loss less the adapter model's, of ``"gain_kept"`` and of
            ``"divergence_left"``.
    """

    loss: Mapping[str, float]
    gain_kept: float
    divergence_left: float
    samples: int
    standard_error: Mapping[str, float]

    @property
    def has_gain(self) -> bool:
        """Whether the adapter gains on the texts more than two standard errors."""
        gain = self.loss[_BASE] - self.loss[_ADAPTER]
        return gain > _ERRORS * self.standard_error["gain"]

    def __str__(self) -> str:
        adapter, merged = self.loss[_ADAPTER], self.loss[_MERGED]
        error = self.standard_error["difference"]
        # as many as show two digits of the error
        decimals = 3
        if error > 0:
            decimals = min(max(1 - math.floor(math.log10(error)), 3), 6)
        beside = "as"
        if abs(merged - adapter) > _ERRORS * error:
            beside = f"{merged - adapter:+.{decimals}f} beside"
        gain = f"{100 * self.gain_kept:.1f} % of the gain"
        if not self.has_gain:
            gain = f"no gain over the base ({self.loss[_BASE]:.3f})"
        return (
            f"On {self.samples} texts: loss {merged:.{decimals}f}, {beside} the adapter model "
            f"({adapter:.{decimals}f} ± {error:.{decimals}f}); {gain}, "
            f"{100 * self.divergence_left:.1f} % of the divergence left."
        )

    _brief = __str__


@dataclass(frozen=True, repr=False)
class MergeComparison(Report):
    """The measures of several merges of one adapter on the same texts. ``print`` gives a table.

    Attributes:
        merges: The measure of each merge: by its form, or by the path of its folder.
        recommended: The merge to take: the one that keeps most of the gain, or the
            smallest form whose loss is within two standard errors of it, compared with it
            text by text; of two of a size the one on the base that was trained. A folder
            is taken where no form is within them. ``""`` where the adapter gains nothing
            on the texts.
        reason: Why it is that one, or none.
        notes: Why other forms were not measured; and that nothing records the quantization
            that was given, where nothing does.
    """

    merges: Mapping[str, TextMeasure]
    recommended: str
    reason: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [["", "loss", "gain kept, %", "divergence left, %", "loads with"]]
        for name, one in self.merges.items():
            errors = one.standard_error
            kept = ""
            if one.has_gain:
                kept = f"{100 * one.gain_kept:.1f} ± {100 * errors['gain_kept']:.1f}"
            left = f"{100 * one.divergence_left:.2f} ± {100 * errors['divergence_left']:.2f}"
            loss, loads = f"{one.loss[_MERGED]:.4f}", _LOADS_WITH.get(name, "")
            rows.append([name, loss, kept, left, loads])
        for name in (_ADAPTER, _BASE):
            rows.append([f"({name})", f"{one.loss[name]:.4f}", "", "", ""])
        return f"{table(rows)}\n\n{self._brief()}"

    def _brief(self) -> str:
        if not self.recommended:
            return f"no form is recommended: {self.reason}"
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
        adapter: The folder that PEFT saved the adapter in, or its name on the hub.
        texts: A file: JSON lines (``.jsonl``) that have ``text``, or ``messages``, or
            ``prompt`` and ``completion``; or else plain text, which is cut into pieces of
            2,048 characters. Or the texts, as strings or such rows, a ``Dataset`` too.
            Each is cut after 512 tokens, or after the positions that the model learned.
        base: The base, as for `merge_checkpoint`.
        forms: The merges: ``"half"``, ``"mixed"`` and ``"quantized"``, as for
            `merge_checkpoint`; ``"original"``, onto the base's original weights, as for
            it too; and folders that any tool merged. The tokenizer is that of such a
            folder, or else the adapter's, or the base's.
        samples: The most texts that are taken, from the beginning.
        progress: A function that is called before each text, with words on how far the
            work is, such as "half: 3 of 64 texts".
        **merging: ``manifest``, ``quantization_config``, ``dtype``, ``seed``, ``device``
            and ``trust_remote_code``, as for `merge_checkpoint`.

    Returns:
        The measures of the merges, and the one to take.

    Raises:
        ConfigError: As for `merge_checkpoint`; or there are fewer than two texts, no
            tokenizer or no chat template, or the model does not predict next tokens.
        ManifestMismatchError: As for `merge_checkpoint`.
        ExportError: None of the forms can be merged.

    Example:
        >>> from kbitwrap import compare_merges
        >>> compare_merges("/no/adapter", ["A text.", "Another one."])
        Traceback (most recent call last):
        ...
        kbitwrap.errors.ConfigError: there is no adapter_config.json ... in '/no/adapter': ...
    """
    if samples < 2 or not forms:
        raise ConfigError(
            f"expected at least two samples and one form, found {samples} and {[*forms]}"
        )
    saved = read_adapter(adapter)
    base = base or named_base(saved)
    record = saved_manifest(saved.folder)
    if merging.get("manifest"):
        record = load_manifest(merging["manifest"])
    given, dtype = merging.get("quantization_config"), merging.get("dtype")
    device = merging.get("device") or accelerator_type() or "cpu"
    trust = merging.get("trust_remote_code", False)
    quantization = find_quantization(base, given, record, saved, trust)
    names = []
    for form in forms:
        name = os.fspath(form)
        if isinstance(form, os.PathLike) and name in _FORMS:
            name = os.path.join(os.curdir, name)
        names.append(name)
    folders = [name for name in names if name not in _FORMS]
    rows = _tokenize(texts, samples, [*folders, saved.folder, base], trust)
    config = read_config(base, trust).get_text_config()
    num_virtual = saved.config.get("num_virtual_tokens") or 0
    num_positions = getattr(config, "max_position_embeddings", None) or 0
    is_rotary = any(name.startswith("rope_") for name in config.to_dict())
    if num_positions > 0 and not is_rotary:
        rows = [row[: max(num_positions - num_virtual, 2)] for row in rows]

    def load(form: str, merged: str) -> Any:
        if form in _FORMS:
            options = {**merging, "merge_as": form, "overwrite": True}
            if NO_GAIN in merge_checkpoint(base, saved.folder, merged, **options).notes:
                raise ExportError(NO_GAIN)
            form = merged
        if form not in (_MODEL, _BASE_MODEL):
            read, missing = load_pretrained(form, None, None, device, None, trust)
            if missing:
                raise ConfigError(
                    f"{form!r} lacks tensors of its model, in whose place loading draws others: "
                    f"{first_of(sorted(missing))}"
                )
            return read
        run: Any = (record, quantization, dtype, device, trust)
        if form == _MODEL:
            trained, model = load_adapted(base, saved, *run, may_be_pending=False)
            trained.finish_check()
            return model
        trained = load_base(base, saved, *run)
        for fqn, start in trained.unknown.items():
            trained.model.get_parameter(fqn).data[start:] = 0
        return trained.model

    measured: dict[str, Tensor] = {}
    notes = []
    with (
        plain_mode(),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),  # loading draws numbers
        tempfile.TemporaryDirectory(prefix="kbitwrap-") as place,
    ):
        warnings.simplefilter("ignore", UserWarning)  # the report's notes have them
        # An adapter may write into its base: turning it off does not give that back.
        for form in (_MODEL, _BASE_MODEL, *names):
            try:
                model = load(form, os.path.join(place, _MERGED))
                name = _BASE if form == _BASE_MODEL else form
                measured[form] = _predict(model, name, rows, place, progress)
            except (ConfigError, ExportError, OSError, torch.OutOfMemoryError) as error:
                if form not in _FORMS:
                    raise
                notes.append(f"{form} is not measured: {in_one_line(error)}")
            model = None
            gc.collect()  # models are cycles of references
            empty_cache()

    adapted, plain = measured.pop(_MODEL), measured.pop(_BASE_MODEL)
    if not measured:
        raise ExportError(f"nothing can be merged: {'; '.join(notes)}")
    merges = {form: _compare(one, adapted, plain) for form, one in measured.items()}
    one, *_ = merges.values()  # all have the same adapter model and base
    if one.has_gain:
        recommended, reason = _recommend(measured)
    else:
        recommended, reason = "", _NO_GAIN.format(one.loss)
    if quantization.source == GIVEN:
        notes.append(
            "nothing records how the base was quantized, so the quantization given (quantization_config) was taken at "
            "its word"
        )
    return MergeComparison(merges, recommended, reason, tuple(notes))


def _tokenize(
    texts: Any, samples: int, places: Sequence[StrPath], trust_remote_code: bool
) -> list[Tensor]:
    """Return the tokens of the texts that are taken, by the tokenizer of the first of the places that has one."""
    from transformers import AutoTokenizer

    for place in places:
        if os.path.isfile(os.path.join(place, "tokenizer_config.json")):
            break
    name = "texts"
    numbered: Iterable[tuple[int, Any]]
    if isinstance(texts, (str, os.PathLike)):
        name = os.fspath(texts)
        numbered = _read_texts(Path(name))
    elif isinstance(texts, Mapping):
        raise ConfigError(
            f"texts: expected a sequence, such as one split of a dataset, found a {type(texts).__name__} of "
            f"{first_of([*map(shown, texts)])}"
        )
    else:
        numbered = enumerate(texts, 1)
    rows: list[Tensor] = []
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code
        )
        for number, text in numbered:
            if isinstance(text, dict):
                found = text.get("text") or text.get("messages")
                parts: Any = (text.get("prompt"), text.get("completion"))
                if not found and all(parts) and type(parts[0]) is type(parts[1]):
                    found = parts[0] + parts[1]  # texts, or messages
                if not found:
                    keys = ", ".join(map(shown, text))
                    raise ConfigError(
                        f"{name}, line {number}: expected 'text' or 'messages' that is not empty, or 'prompt' and "
                        f"'completion', found {keys}"
                    )
                text = found
            is_chat = not isinstance(text, str)
            if is_chat and not tokenizer.chat_template:
                raise ConfigError(
                    f"the tokenizer in {os.fspath(place)!r} has no chat template: give 'text'"
                )
            if is_chat:  # whose template writes the special tokens
                text = tokenizer.apply_chat_template(text, tokenize=False)
            tokens = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
            if len(tokens) > 1:
                rows.append(torch.tensor(tokens[:_MOST]))
            if len(rows) == samples:
                break
    except ConfigError:
        raise
    except Exception as error:  # of tokenizers and their templates
        raise ConfigError(
            f"{name}: expected texts that the tokenizer in {os.fspath(place)!r} takes: {in_one_line(error)}"
        ) from error

    if len(rows) < 2:
        raise ConfigError(f"{name}: expected at least two texts, found {len(rows)}")
    return rows


def _looks_like_rows(text: str) -> bool:
    """Return whether the first lines of a text, up to three, are JSON objects."""
    try:
        rows = [json.loads(line) for line in text.split("\n", 3)[:3] if line.strip()]
    except (ValueError, RecursionError):
        return False
    return bool(rows) and all(isinstance(row, dict) for row in rows)


def _read_texts(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file of JSON lines with their numbers, or the pieces of plain text."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise ConfigError(
            f"{path}: expected JSON lines (.jsonl) or plain text; call JSON lines .jsonl"
        )
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            if suffix != ".jsonl":
                text = file.read()
                if _looks_like_rows(text):
                    warnings.warn(
                        f"{path} is read as plain text, and its lines are JSON: call it .jsonl to read them as rows",
                        UserWarning,
                        caller_level(),
                    )
                yield from enumerate(_PIECE.findall(text), 1)
                return
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, json.loads(line)
    except (OSError, UnicodeError) as error:
        reason = "no such file" if not path.exists() else in_one_line(error)
        raise ConfigError(f"{path}: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}, line {number}: expected a row of JSON: {in_one_line(error)}"
        ) from error


def _predict(
    model: Any, name: str, rows: Sequence[Tensor], place: str, told: Told | None
) -> Tensor:
    """Return the losses of a model on the texts, and its divergences from the first model, in two rows.

    What the first model predicts is kept in the folder.
    """
    expected_kind = f"expected a model that predicts the next token, found {type(unwrap(model)[0]).__name__}"
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ConfigError(expected_kind)
    largest = max(int(row.max()) for row in rows)
    vocab_size = getattr(model.config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and largest >= vocab_size:
        raise ConfigError(
            f"{name}: its vocabulary has {vocab_size} tokens, and the tokenizer gave token {largest}: expected the "
            "tokenizer, and the vocabulary, that was trained with"
        )
    keep_kernels_of_training(model)

    def predict(ids: Tensor) -> Tensor:
        try:
            logits = model(input_ids=ids[None], use_cache=False).logits
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of any model's own code
            raise ConfigError(
                f"{name}: it does not compute with the texts: {in_one_line(error)}"
            ) from error
        # virtual tokens of a prompt, which PEFT puts first, have logits too
        found: Tensor = logits[0, -len(ids) :].double().log_softmax(-1)
        return found

    figures = []
    for number, tokens in enumerate(rows):
        if told is not None:
            told(f"{name}: {number} of {len(rows)} texts")
        ids = tokens.to(model.device)
        found = predict(ids)[:-1]
        path = Path(place, f"{number}.pt")
        if not path.exists():
            if number == 0:
                off = found - predict(ids[:-1])
                if float((found.exp() * off).sum(-1).mean()) > _ROUNDING:
                    raise ConfigError(
                        f"{expected_kind}, whose predictions change with the tokens after them"
                    )
            likely = found.topk(min(_MOST_KEPT, found.shape[-1])).indices
            torch.save((likely, _gather(found, likely)), path)
        likely, expected = torch.load(path, ids.device)
        if int(likely.max()) >= found.shape[-1]:
            raise ConfigError(
                f"{name}: it predicts {found.shape[-1]} tokens, and the adapter model more: expected the vocabulary "
                "that was trained with"
            )
        off = expected - _gather(found, likely)
        divergence = (expected.exp() * off).sum(-1).mean()
        loss = -found.gather(-1, ids[1:, None]).mean()
        figures.append(torch.stack([loss, divergence]).cpu())
    measured = torch.stack(figures, 1)
    if not measured.isfinite().all():
        raise ConfigError(f"{name}: what it predicts for the texts is not finite")
    return measured


def _gather(found: Tensor, likely: Tensor) -> Tensor:
    """Return the log-probabilities of some tokens, and that of all others together."""
    some = found.gather(-1, likely)
    others = 1 - some.exp().sum(-1, keepdim=True)
    return torch.cat([some, others.clamp(min=_NOTHING).log()], -1)


def _error(values: Tensor) -> float:
    """Return the standard error of a mean."""
    return float(values.std() / math.sqrt(len(values)))


def _in_parts(part: Tensor, whole: Tensor) -> Tensor:
    """Return values whose mean is the ratio of two means, and has its standard error (the delta method)."""
    ratio = part.mean() / whole.mean()
    return ratio + (part - ratio * whole) / whole.mean()


def _compare(merged: Tensor, adapted: Tensor, plain: Tensor) -> TextMeasure:
    """Compare the figures of a merge with those of the adapter model and the base."""
    (merged, left), (adapted, _), (plain, whole) = merged, adapted, plain
    figures = {
        _ADAPTER: adapted,
        _MERGED: merged,
        _BASE: plain,
        "difference": merged - adapted,
        "gain": plain - adapted,
        "gain_kept": _in_parts(plain - merged, plain - adapted),
        "divergence_left": _in_parts(left, whole),
    }
    means = {name: float(values.mean()) for name, values in figures.items()}
    errors = {name: _error(values) for name, values in figures.items()}
    losses = {name: means[name] for name in (_ADAPTER, _MERGED, _BASE)}
    kept, left_over = means["gain_kept"], means["divergence_left"]
    return TextMeasure(losses, kept, left_over, len(merged), errors)


def _recommend(measured: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the merge to take, by its losses on the texts, and why."""
    best = min(measured, key=lambda form: float(measured[form][0].mean()))
    alike = []
    for form, figures in measured.items():
        difference = (figures - measured[best])[0]
        if difference.mean() <= _ERRORS * _error(difference):
            alike.append(form)
    if len(alike) == 1:
        return (
            best,
            "its loss is the lowest, and no other is within two standard errors of it",
        )
    smallest_first = reversed(FORMS)
    chosen = next(form for form in (*smallest_first, best) if form in alike)
    if chosen == best:
        alike.remove(best)
        return (
            best,
            f"its loss is the lowest; within two standard errors of it: {', '.join(alike)}",
        )
    better = "is on the base that was trained"
    if chosen != HALF and best in _FORMS:  # a folder's size is not known
        better = "is smaller"
    return (
        chosen,
        f"{best}'s loss is the lowest, but {chosen} is within two standard errors of it, and {better}",
    )
