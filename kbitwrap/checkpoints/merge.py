"""Merging a saved adapter into the base that it was trained on."""

from __future__ import annotations

import itertools
import os
import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import StrPath
from ..errors import ConfigError, ExportError
from ..export.export import export_model, save_model, saves_itself
from ..export.forms import HALF, MIXED, QUANTIZED, MergeForm, skip_layers
from ..export.merge import Merged, merge_into
from ..export.twin import build_twin
from ..export.writer import (
    CARD,
    Progress,
    checkpoint_writer,
    is_of_a_model,
    split_into_files,
)
from ..manifest.contents import versions
from ..manifest.manifest import Manifest
from ..model.pretrained import kept_dtype
from ..model.quantization import skipped_layers
from ..model.tree import ModelTree, join
from ..preparation.preparation import Preparation
from ..preparation.process import plain_mode
from ..reports import ExportReport, first_of, shown
from ..tensors.devices import accelerator_type
from ..tensors.dtypes import HALF_DTYPES, parse_dtype
from .adapters import SavedAdapter, read_adapter
from .base import (
    TrainedBase,
    load_adapted,
    name_of_base,
    named_base,
    other_named_base,
)
from .base_quantization import (
    OF_BASE,
    OF_MANIFEST,
    BaseQuantization,
    find_quantization,
    run_on_original,
)
from .beside import are_copies, copy_files, files_beside
from .measure import ORIGINAL, measure_merge
from .reader import (
    lazy_tensors,
    load_manifest,
    recorded_quantization,
    saved_manifest,
)
from .sides import read_merged

_CARD = """\
---
{base_model}library_name: transformers
tags:
- merged
---

# {title}

The weights of the base, {name}, were {form} in training, which {source}.{added} \
Written by kbitwrap {version} on {device}.{notes}
"""
_NAME_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BASE_MODEL = 'base_model: "{name}"\n'
_ADDED = (
    " The {adapter} was added in float32 and {rounded}. {kept:.1%} of what the adapter adds is "
    "in these weights{error}. `kbitwrap doctor` measures it again."
)
_ROUNDED = {
    HALF: "rounded once",
    MIXED: "rounded once, where it touches a layer; the others stay quantized",
    QUANTIZED: "rounded at random to the codes of its layers, which stay quantized",
}
_DIGEST = "SHA-256 of the adapter's file: {}"
_LEFT = "files of the base were left behind, because others take their place or they are no part of a merge: {}"
_ON_ORIGINAL = "the adapter is merged onto the base's original weights, not onto those that it was trained on"
_OF_ANOTHER_BASE = (
    "the adapter names {named} as its base; what was merged is {merged!r}. If these are not the "
    "same model, the merge is wrong"
)


def merge_checkpoint(
    base: StrPath | None,
    adapter: StrPath | None,
    dst: StrPath,
    *,
    merge_as: str = "half",
    manifest: Manifest | StrPath | None = None,
    quantization_config: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    seed: int = 0,
    progress: bool | Progress = False,
    device: torch.device | str | None = None,
    check: bool = False,
    trust_remote_code: bool = False,
) -> ExportReport:
    """Merge a saved adapter into the base it was trained on, and write the 16-bit model that results.

    The base is loaded as the run had it: of its class, with its vocabulary, which may
    have been resized, and with a head that the adapter's file holds. It is quantized as
    in training, and dequantized exactly; the adapter's part is added in float32 and the
    sum rounded once. That is, bit for bit, what
    ``KbitPreparedModel.export(merge_adapters=True)`` writes after training, on the same
    type of device: a GPU and a CPU may quantize, and so round, a last bit differently.
    Tensors are computed and written one at a time. What else the base's folder holds is
    copied, as are the tensors that its class does not build; a tokenizer that lies beside
    the adapter comes first. The report's ``notes`` name what had to be left behind, and a
    model card says what was merged.

    Args:
        base: The folder of the base, or its name on the hub; ``None`` for the one that
            the adapter's config names.
        adapter: The folder that PEFT saved the adapter in, or its name on the hub; ``None`` for the dequantized
            base alone, which an engine needs that is sent adapters only.
        dst: The folder to make: complete in the end, or absent.
        merge_as: The form of the merged model, as for ``KbitPreparedModel.export``:
            ``"half"``, ``"mixed"`` or ``"quantized"``; or ``"original"``: onto the
            base's original weights, which no manifest is compared with.
        manifest: The record of the preparation, or its path: it says how the base was
            quantized, and the base is compared with its digests. ``None`` for
            ``kbitwrap.json`` in the adapter's folder, if there is one.
        quantization_config: How the base was quantized in training, as for
            ``from_pretrained``; ``None`` for what the base's own config, the manifest, or
            the ``config.json`` beside the adapter says; ``False`` for a base that was not
            quantized.
        dtype: The dtype of what is not quantized; ``None`` for the manifest's, or else
            the config's.
        max_shard_size: The maximum size of a file in bytes, or a string such as
            ``"5GB"``.
        overwrite: Replace the files of a checkpoint at ``dst``; where others are there,
            nothing is written.
        seed: The seed of ``"quantized"``: the same gives the same bytes.
        progress: Show a bar of the bytes written, on a terminal; or a function that is
            called with each number of them.
        device: The device to quantize and merge on; ``None`` for the accelerator if
            there is one, else the CPU.
        check: Measure what was written, from its files, before it takes its place at
            ``dst``.
        trust_remote_code: Run the code that the base's folder brings along.

    Returns:
        The report of what was written.

    Raises:
        ConfigError: There is no base or adapter, or neither was given, the adapter does not belong to the
            base, or it is not known how the base was quantized, or it was saved
            quantized otherwise than given; rows or a head of the run are neither in the
            base's files nor in the adapter's; the adapter's config says what the
            installed PEFT does not know, or lays out experts in a way that is not
            known.
        ManifestMismatchError: The base, or the quantization that was given, is not what
            the manifest records.
        ExportError: It cannot be merged or written, or ``dst`` is, holds or lies in
            what is read, or the check found a fault. Nothing was left at ``dst``.

    Example:
        >>> from kbitwrap import merge_checkpoint
        >>> merge_checkpoint("/no/such/base", "/no/adapter", "/tmp/merged")
        Traceback (most recent call last):
        ...
        kbitwrap.errors.ConfigError: there is no adapter_config.json ... in '/no/adapter': ...
    """
    start = time.perf_counter()
    is_onto_original = merge_as == ORIGINAL
    form = MergeForm(HALF if is_onto_original else merge_as, seed)
    saved = None if adapter is None else read_adapter(adapter)
    if base is None:
        if saved is None:
            raise ConfigError("expected a base or an adapter, found neither")
        base = named_base(saved)

    if saved is not None:
        _refuse_merged(base, saved)

    # refuses an invalid size before anything is computed
    split_into_files({}, max_shard_size)
    if device is None:
        device = accelerator_type() or "cpu"

    files, left = files_beside(base, None if saved is None else saved.folder)
    target = Path(os.path.realpath(dst))

    def owns(found: Path) -> bool:
        return is_of_a_model(found) or are_copies(found, target, files)

    writing = checkpoint_writer(
        dst,
        "merge",
        overwrite=overwrite,
        progress=None if progress is True else progress,
        sources=[base, adapter, manifest],
        owns=owns,
    )
    with torch.random.fork_rng(devices=[]), writing as writer:  # loading draws numbers
        record = None
        if manifest is not None:
            record = load_manifest(manifest)
        elif saved is not None:
            record = saved_manifest(saved.folder)
        quantization = find_quantization(
            base, quantization_config, record, saved, trust_remote_code
        )
        run: Any = (record, quantization, dtype)
        if is_onto_original:
            run = run_on_original(quantization, record, dtype)
        trained, adapted = load_adapted(
            base,
            saved,
            *run,
            device,
            trust_remote_code,
            may_be_pending=form.merge_as == HALF,
        )
        with plain_mode():
            twin = build_twin(ModelTree(adapted))
            merged = merge_into(twin, form=form, measures=True)
            if merged.note:
                warnings.warn(merged.note, UserWarning, stacklevel=2)
            others, note = _taken_over(trained, twin.model)
            save_model(twin.model, writer, max_shard_size, others)
            trained.finish_check()
        copy_files(files, writer.folder)
        if check:  # which may run code that was copied
            written = read_merged(writer.folder, trust_remote_code)
            found = measure_merge(written, adapted, saved, trained)
            if found.faults:
                raise ExportError(f"what was written is {found}; nothing was left")
        # a manifest that was compared proves the base, whatever its name
        is_proven = trained.check is not None
        other = None if is_proven or saved is None else other_named_base(saved, base)
        name = os.fspath(base)
        if saved is not None and other is None:
            name = saved.config.get("base_model_name_or_path") or name
        notes = [note] if note else []
        if is_onto_original:
            notes.append(_ON_ORIGINAL)
        loaded = trained.model.dtype
        is_own = quantization.source == OF_BASE
        if dtype is not None and is_own and parse_dtype(dtype) != loaded:
            notes.append(kept_dtype(loaded, parse_dtype(dtype)))
        if left:
            notes.append(_LEFT.format(first_of([shown(name) for name in left], 10)))
        added, of_card = "", notes
        if saved is not None:
            of_card = [*notes, _DIGEST.format(saved.digest)]
            peft_type = saved.config.get("peft_type", "PEFT")
            added = f"{peft_type} adapter `{name_of_base(os.fspath(saved.folder))}`"
        card = _card(name, added, form, quantization, merged, device, of_card)
        (writer.folder / CARD).write_text(card, encoding="utf-8")

    of_merge = merged.report()
    if other is not None:
        told = _OF_ANOTHER_BASE.format(named=shown(other), merged=os.fspath(base))
        notes.insert(0, told)
    of_merge["notes"] = (*notes, *of_merge["notes"])

    return ExportReport(
        Path(dst),
        writer.files,
        writer.num_tensors,
        writer.num_bytes,
        twin.converted,
        seconds=time.perf_counter() - start,
        is_merge=saved is not None,
        **of_merge,
    )


def _refuse_merged(base: StrPath, saved: SavedAdapter) -> None:
    """Raise where a base is a merge of this adapter by its card, and not the base that the adapter names."""
    named = other_named_base(saved, base)
    path = Path(base, CARD)
    if named is None or not os.path.isfile(path):
        return

    card = path.read_text(encoding="utf-8", errors="replace")
    if "Written by kbitwrap" not in card:
        return

    name = name_of_base(os.fspath(saved.folder))
    if f"`{name}` was added" in card or _DIGEST.format(saved.digest) in card:
        raise ConfigError(
            f"{os.fspath(base)!r} is a merge of the adapter {name!r} already, whose name or SHA-256 its {CARD} has: "
            f"give the base that was trained on, {shown(named)}"
        )


def merge_live(
    model: Any,
    preparation: Preparation | None,
    manifest: Manifest,
    dst: StrPath,
    *,
    form: MergeForm,
    name: str,
    processing_class: Any,
) -> ExportReport:
    """Write the merge of a live model, with a card; a checkpoint at the destination is replaced.

    Args:
        model: The model with its adapters.
        preparation: Its preparation.
        manifest: The manifest of that.
        dst: The folder to make.
        form: The form of the merged model.
        name: The name of the adapter, for the card.
        processing_class: The tokenizer or processor to write too, or ``None``.
    """
    config = recorded_quantization(manifest) or {}
    quantization = BaseQuantization(config, OF_MANIFEST)
    base = manifest.model.name_or_path
    device = next(model.parameters()).device
    *_, last = model.peft_config.values()
    added = f"{last.peft_type.value} adapter trained in `{name}`"

    def finish(folder: Path, merged: Merged) -> None:
        card = _card(base, added, form, quantization, merged, device, ())
        (folder / CARD).write_text(card, encoding="utf-8")

    return export_model(
        model,
        preparation,
        dst,
        merge_adapters=True,
        form=form,
        live=None,
        processing_class=processing_class,
        max_shard_size="5GB",
        overwrite=True,
        progress=False,
        finish=finish,
    )


def _taken_over(
    trained: TrainedBase, model: nn.Module
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors that a merge takes over from the base's files, and what to note where it takes none.

    They are those that the class does not build.
    """
    unexpected = trained.unexpected
    if not unexpected:
        return {}, ""

    # the shortest names that no module has
    modules = {name for name, _ in trained.model.named_modules()}
    parts: dict[str, None] = {}
    for name in unexpected:
        part = name
        for part in itertools.accumulate(name.split("."), join):
            if part not in modules:
                break
        parts[part] = None

    told = f"{len(unexpected):,} tensors of the base that a {type(model).__name__} does not build"
    why = ""
    if saves_itself(type(model)):
        why = "its class has its own save_pretrained"
    dtypes = {stored.dtype for stored in unexpected.values()}
    has_codes = not dtypes <= {*HALF_DTYPES, torch.float32}
    settings = getattr(model.config, "quantization_config", None)
    if settings is None and has_codes:
        why = "they are quantized, and the merge is not"
    if why:
        return {}, f"{told} were left out, because {why}: {first_of([*parts])}"

    if settings is not None and not has_codes:
        skip_layers(model, [*skipped_layers(settings), *parts])

    return lazy_tensors(unexpected), ""


def _card(
    base: str,
    adapter: str,
    form: MergeForm,
    quantization: BaseQuantization,
    merged: Merged,
    device: torch.device | str,
    notes: Sequence[str],
) -> str:
    """Return a model card that says what was made of what, and what to mind; ``""`` stands for no adapter.

    A folder is named by its last part, and is no base model that the hub knows.
    """
    name, base_model = base, _BASE_MODEL.format(name=base)
    if os.path.isdir(base) or not _NAME_ON_HUB.fullmatch(base):
        name, base_model = name_of_base(base), ""

    state = "dequantized" if form.merge_as == HALF else "quantized"
    title, added = f"{name}, {state}", ""
    if adapter:
        title = f"{name}, merged"
        error = ""
        if form.merge_as != QUANTIZED:  # whose random error cancels in a layer's sums
            error = f"; rounding them is off by {merged.total.error:.1%} of its length"
        added = _ADDED.format(
            adapter=adapter,
            rounded=_ROUNDED[form.merge_as],
            kept=merged.total.kept,
            error=error,
        )

    return _CARD.format(
        base_model=base_model,
        title=title,
        name=name,
        form=quantization.form,
        source=quantization.source,
        added=added,
        version=versions().get("kbitwrap", ""),
        device=torch.device(device).type,
        notes="".join(f" {note[:1].upper()}{note[1:]}." for note in notes),
    )
