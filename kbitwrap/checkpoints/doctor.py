"""Diagnosis of a run: faults of a checkpoint, an adapter, a ``Trainer``'s output folder or a live model."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ConfigError, ManifestMismatchError
from ..export.adapters import Merger, active_adapters, is_tuner_layer
from ..export.plain import float32_module, parameter_of, plain_layer
from ..manifest.manifest import Manifest
from ..model.checks import refuse_unreadable
from ..model.pretrained import load_pretrained, meta_model
from ..model.quantization import dequantizer, is_quantized_layer, is_quantized_parameter, quant_state_of
from ..model.tree import ModelTree
from ..model.wrappers import canonical_fqn, unwrap
from ..preparation.original import DECOMPRESSED
from ..preparation.preparation import Preparation
from ..preparation.process import plain_mode
from ..reports import Report, few, shown
from ..tensors.bits import content_digest
from ..tensors.dtypes import HALF_DTYPES, dtype_name, find_dtype
from ..tensors.lazy import materialize
from .inspection import inspect_checkpoint
from .merge import read_adapter, with_adapter
from .reader import (
    MANIFEST_NAME,
    adapter_file,
    has_weights,
    is_beside,
    is_trained_copy,
    load_pickled,
    open_checkpoint,
    read_tensors,
    recorded_quantization,
    tied_names,
)

_OPTIMIZER = "optimizer.pt"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_EXPERTS = re.compile(r"(?:^|\.)experts?\.(?!.*bias)")
_MOMENTS = ("exp_avg", "state1", "momentum_buffer")  # an optimizer's state in the shape of its parameter
_MERGED = "an adapter was merged into 4-bit weights"
_EXPORT = "merge by export(merge_adapters=True), which writes half precision and leaves the base as it is"
_Tensors = Mapping[str, torch.Tensor]
_Record = Mapping[str, Any]
_Faults = Iterator[tuple[str, str, str]]  # what, the evidence, and the remedy; none where something was not measured


class Finding(NamedTuple):
    """A fault: what it is, where it was found, the evidence, and what to do about it."""

    what: str
    where: str
    evidence: str
    remedy: str


@dataclass(frozen=True, repr=False)
class DoctorReport(Report):
    """The faults of a run. False where none was found.

    Attributes:
        subject: The path that was examined, or the class of the model.
        findings: The faults, each with ``what``, ``where``, ``evidence`` and ``remedy``.
        not_measured: What could not be told, and what that needs.
    """

    subject: str
    findings: tuple[Finding, ...]
    not_measured: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
        return {**vars(self), "findings": [f._asdict() for f in self.findings], "not_measured": [*self.not_measured]}

    def __str__(self) -> str:
        found = [f"{f.what}: {f.where}: {f.evidence}; {f.remedy}" for f in self.findings]
        return "\n".join([repr(self), *few(found), *self._lines()])

    def _brief(self) -> str:
        return f"findings: {len(self.findings)}, not measured: {len(self.not_measured)}, {shown(self.subject)}"

    def _bars(self) -> list[tuple[str, tuple[int, ...], str]]:
        found: dict[str, list[str]] = {}
        for finding in self.findings:
            found.setdefault(finding.what, []).append(f"{finding.where}: {finding.evidence}; {finding.remedy}")
        return [(what, (len(texts),), " | ".join(few(texts, 3))) for what, texts in found.items()]

    def _lines(self) -> list[str]:
        return few([f"not measured: {what}" for what in self.not_measured])


def doctor(path_or_model: str | os.PathLike[str] | nn.Module, *, base: Any = None, adapter: Any = None) -> DoctorReport:
    """Look for faults that raise no error. Nothing is changed, and no code in a file is run.

    Of files, headers are read first, then adapters and tied weights. A base that is given is loaded.

    Args:
        path_or_model: A folder (a checkpoint, an adapter, a ``Trainer``'s output), a file of weights, or a model.
        base: What was trained on: a folder, a name, or a loaded model, which is only compared with a manifest.
        adapter: The folder of an adapter that may have been merged.

    Returns:
        The report.

    Raises:
        ConfigError: There is nothing to examine at a path, or it is damaged, or a base cannot be loaded.
        ManifestError: A manifest cannot be read.
        UnsupportedModelError: The model is sharded, or on the meta device.

    Example:
        >>> import torch, kbitwrap
        >>> kbitwrap.doctor(torch.nn.Linear(2, 2)).findings
        ()
    """
    with plain_mode(), torch.random.fork_rng(devices=[]):  # loading draws numbers
        if isinstance(path_or_model, nn.Module):
            places = {type(path_or_model).__name__: [*_of_model(path_or_model, base, adapter)]}
        else:
            folders = _folders(Path(path_or_model))
            places = {str(folder): [*_of_folder(folder, base, adapter)] for folder in folders}
            for folder in [one for one in folders if (one / MANIFEST_NAME).is_file()][-1:]:  # those of one run agree
                places[str(folder)] += _of_manifest(folder, base)
    found = [Finding(what, where, *rest) for where, faults in places.items() for what, *rest in faults]
    missing = dict.fromkeys(f"{row.what}: {row.evidence}" for row in found if not row.remedy)
    return DoctorReport(next(iter(places)), tuple(row for row in found if row.remedy), tuple(missing))


def _folders(path: Path) -> list[Path]:
    """A folder, or a file of weights, and the checkpoints that a ``Trainer`` left in it, the newest last."""
    first = path.parent if path.stem == "adapter_model" else path
    inside = first.iterdir() if os.path.isdir(first) else ()
    numbered = [(int(match[1]), found) for found in inside if (match := _CHECKPOINT.fullmatch(found.name))]
    folders = [first, *(folder for _, folder in sorted(numbered))]
    if not any(has_weights(folder) or _adapters(folder) for folder in folders):
        raise ConfigError(f"{str(path)!r}: expected a checkpoint, an adapter or a Trainer's output, found neither")
    return folders


def _adapters(folder: Path) -> dict[str, _Tensors]:
    """The adapters in a folder and in those in it, by folder."""
    places = [folder, *(path for path in folder.glob("*/") if not _CHECKPOINT.fullmatch(path.name))]
    files = {at: file for at in places if (file := adapter_file(at)) is not None}
    return {str(at): {name: t.lazy() for name, t in read_tensors(file)[0].items()} for at, file in files.items()}


def _of_model(model: nn.Module, base: Any, adapter: Any) -> _Faults:
    tree, preparation = Preparation.tree_of(model)
    refuse_unreadable(tree, allow_sharded=False)
    config, meta = getattr(unwrap(model)[0], "config", None), None
    with contextlib.suppress(ConfigError):  # the model is none of transformers
        meta = meta_model(config)
    if preparation is not None:
        changes = preparation.changes(tree)
        drifted = [*changes.drifted, *(fqn for fqn, how in changes.replaced.items() if how != DECOMPRESSED)]
        if drifted:
            yield "the base drifted since it was prepared", shown(drifted), f"load the base again; {_EXPORT}"
    packed = {t.fqn: t for t in tree.base_tensors if is_quantized_parameter(t.parameter)}
    plain = {t.fqn: t.parameter for t in tree.base_tensors if t.fqn not in packed}
    known = {} if meta is None else {fqn: p.dtype for fqn, p in meta.named_parameters(remove_duplicate=False)}
    left = [fqn for fqn, t in plain.items() if t.dtype == torch.float32 and known.get(fqn) in HALF_DTYPES]
    is_prepared, use_cache = preparation is not None, getattr(config, "use_cache", None)
    ties = [] if meta is None else tied_names(meta)
    yield from _of_base(plain, meta, ties, [] if is_prepared else left, use_cache is False and not is_prepared)
    adapters = {t.path: t.parameter for t in tree.tensors if id(t.parameter) in tree.adapter_ids}
    yield from _of_adapters({"the model": adapters}, {}, {})
    states = {fqn: quant_state_of(t.module, t.parameter) for fqn, t in packed.items()}
    sources = {fqn: vars(s).get("original_dtype", s.dtype) for fqn, s in states.items() if s is not None}
    yield from _of_merge(sources, getattr(config, "dtype", None), model, base, adapter)


def _of_folder(folder: Path, base: Any, adapter: Any) -> _Faults:
    optimizer: Mapping[str, Any] = {}
    try:
        optimizer = load_pickled(folder / _OPTIMIZER) if (folder / _OPTIMIZER).is_file() else {}
    except ConfigError as error:
        yield "what the optimizer trained", str(error), ""
    # PEFT saves the adapter "default" in the folder, and others in folders of their names.
    records = Manifest.load(folder / MANIFEST_NAME).adapters if (folder / MANIFEST_NAME).is_file() else {}
    recorded = {name.rpartition(".")[2]: {*record.dtypes} for name, record in records.items()}
    recorded = {str(folder if name == "default" else folder / name): found for name, found in recorded.items()}
    yield from _of_adapters(_adapters(folder), optimizer, recorded)
    if not has_weights(folder):
        return
    checkpoint, report = open_checkpoint(folder), inspect_checkpoint(folder)
    stored = {canonical_fqn(name): t.lazy() for name, t in checkpoint.tensors.items() if not is_trained_copy(name)}
    plain = {fqn: t for fqn, t in stored.items() if f"{fqn}.quant_map" not in stored and not is_beside(fqn, stored)}
    sources: dict[str, torch.dtype | None] = {}
    for fqn, tensor in stored.items():
        if ".quant_state." in fqn and tensor.nbytes < 4096:
            with contextlib.suppress(ValueError, LookupError, TypeError):  # damaged, it tells nothing
                sources[fqn] = find_dtype(json.loads(bytes(materialize(tensor).tolist()))["dtype"])
    is_half = {*sources.values()} != {torch.float32}  # otherwise it was loaded in float32
    left = [name for names in report.leftovers.values() for name in names if is_half]
    meta = checkpoint.meta_model()
    ties = [] if meta is None or checkpoint.config.get("tie_word_embeddings") is False else tied_names(meta)
    if report.config_dtype == "float32" and report.dtypes.keys() == {"float32"}:
        evidence = "all is float32, as the config says; if the original was half: `kbitwrap convert --dtype bfloat16`"
        yield "whether a preparation left float32", evidence, ""
    yield from _of_base(plain, meta, ties, left, report.use_cache is False)
    yield from _of_merge(sources, checkpoint.dtype, folder, base, adapter)


def _of_base(base: _Tensors, meta: Any, ties: list[list[str]], left: list[str], has_no_cache: bool) -> _Faults:
    if left:
        yield "float32 was left by a preparation", shown(left), "`kbitwrap convert` gives a checkpoint its dtypes back"
    if has_no_cache and getattr(meta, "can_generate", bool)():
        yield "use_cache was left off", "the config says false", "set it to true: generation is slow without the cache"
    for names in ties:
        tensors = {id(base[fqn]): base[fqn] for fqn in names if fqn in base}.values()  # what is one is not read
        if len(tensors) > 1 and len({(t.dtype, content_digest(materialize(t))) for t in tensors}) > 1:
            evidence = f"the config ties {shown(names)}, and they differ"
            yield "tied weights came apart", evidence, "save one of them, or set tie_word_embeddings to false"
    if meta is None or not (found := ModelTree(meta).quantization).is_quantized or not found.casts:
        return
    skipped = meta.hf_quantizer.modules_to_not_convert or ()
    # A plain layer of the model is one that loading skips; one of a class that its authors derived is never quantized.
    linear = {f"{fqn}.weight": type(m) for fqn, m in meta.named_modules() if isinstance(m, nn.Linear)}
    numbers = [fqn for fqn, tensor in base.items() if tensor.is_floating_point() and tensor.dim() > 1]
    whole = [fqn for fqn in numbers if not any(f".{key}." in f".{fqn}." for key in skipped)]
    experts = [fqn for fqn in whole if _EXPERTS.search(fqn) and not any("expert" in key for key in skipped)]
    layers = [fqn for fqn in whole if fqn in linear and not linear[fqn].__module__.startswith("torch.")]
    for what, names in (("experts", experts), ("layers", layers)):
        if names:
            yield f"{what} are not quantized", shown(names), "quantize them, or name them in llm_int8_skip_modules"


def _of_adapters(adapters: Mapping[str, _Tensors], optimizer: _Record, recorded: _Record) -> _Faults:
    """``recorded``: the names of the dtypes that an adapter had in training, by its folder."""
    states = [state for state in optimizer.get("state", {}).values() if isinstance(state, dict)]
    moments = [m for state in states for key in _MOMENTS if isinstance(m := state.get(key), torch.Tensor)]
    # Told by torch's optimizer alone; and of several adapters, one may be a frozen reference.
    is_told = len(adapters) == 1 and any("foreach" in group for group in optimizer.get("param_groups", ()))
    trained: dict[torch.Size, set[torch.dtype]] = {}
    for moment in moments if is_told else ():
        trained.setdefault(moment.shape, set()).add(moment.dtype)
    outer = [tensor for tensors in adapters.values() for name, tensor in tensors.items() if ".lora_B." in name]
    if outer and not any(materialize(tensor).any() for tensor in outer):
        remedy = "train it, and see that it gets gradients"
        yield "lora_B is zero in every layer", f"{', '.join(adapters)} adds nothing", remedy
    for where, tensors in adapters.items():
        if broken := [name for name, tensor in tensors.items() if not materialize(tensor).float().isfinite().all()]:
            yield "an adapter is not finite", shown(broken), "go back to a checkpoint from before the loss diverged"
        dtypes = {name: tensors.get(name.replace(".lora_B.", ".lora_A."), t).dtype for name, t in tensors.items()}
        named = recorded.get(where, set())
        is_other = bool(named) and named.isdisjoint(map(dtype_name, dtypes.values()))
        others = [n for n, t in tensors.items() if is_other or t.dtype not in trained.get(t.shape, {dtypes[n]})]
        if others:
            yield "an adapter has another dtype than in training", shown(others), "save it in the dtype of its training"
    saved = [(name, tensor.shape) for tensors in adapters.values() for name, tensor in tensors.items()]
    is_prompt = any(name.startswith("prompt_") for name, _ in saved)  # what computes prompts is not saved
    if saved and len(states) > len(saved) and not is_prompt:
        others = [str(tuple(shape)) for shape in {moment.shape for moment in moments}.difference(dict(saved).values())]
        evidence = f"{len(states)} states, {len(saved)} saved tensors; shapes that none of these has: {shown(others)}"
        remedy = "freeze what is not saved, or save it (modules_to_save): what it learned is lost"
        yield "the optimizer has a state for parameters that are not the adapter's", evidence, remedy


def _of_manifest(folder: Path, base: Any) -> _Faults:
    manifest = Manifest.load(folder / MANIFEST_NAME)
    model, remedy = manifest.model, f"load the base that was trained on, {manifest.model.name_or_path!r}, as it was"
    if manifest.world_size == 1 and manifest.visible_devices > 1:
        evidence = f"world_size is 1, and {manifest.visible_devices} devices were visible"
        yield "visible devices were idle", evidence, "start the script by torchrun or accelerate launch"
    device = "cpu" if manifest.before.memory.allocated_bytes is None else "cuda"  # others may quantize otherwise
    if base is None and manifest.config.freeze and has_weights(folder) and inspect_checkpoint(folder).is_quantized:
        base = folder  # otherwise it was merged or trained
    if base is None or (device == "cuda" and not torch.cuda.is_available()):
        yield "whether the base is the manifest's, and unchanged", f"give base (--base), on a machine with {device}", ""
        return
    new: set[str] = set()  # a head that was made for the task, say
    if not isinstance(base, nn.Module):
        base, new = load_pretrained(base, recorded_quantization(manifest), model.dtype, device, model.class_name)
    try:
        manifest.check(base)
    except ManifestMismatchError as error:
        if error.missing or error.unexpected or not error.different.keys() <= new:
            yield "the base is not the one in the manifest, or it drifted", str(error), remedy


def _of_merge(sources: Mapping[str, Any], dtype: torch.dtype | None, subject: Any, base: Any, adapter: Any) -> _Faults:
    """``sources``: the dtype from which each 4-bit weight was quantized, which PEFT's merge makes float32."""
    if sources and (base is None or adapter is None or isinstance(base, nn.Module)):
        yield "how much of an adapter 4-bit weights hold, if merged", "give the folders of both (--base, --adapter)", ""
        merged = [fqn.partition(".quant_state.")[0] for fqn, source in sources.items() if source == torch.float32]
        if merged and (len(merged) < len(sources) or dtype in HALF_DTYPES):
            yield _MERGED, f"quantized from float32: {shown(merged)}; how much survived: not measured", _EXPORT
    elif sources:
        _, saved = read_adapter(Path(adapter))
        found: Any = unwrap(subject)[0] if isinstance(subject, nn.Module) else load_pretrained(subject, None, dtype)[0]
        layers = {node.fqn: node.module for node in ModelTree(found).base if is_quantized_layer(node.module)}
        original, _ = load_pretrained(base, found.config.quantization_config, dtype)
        sums = torch.zeros(3, dtype=torch.float64)
        for node in ModelTree(with_adapter(original, Path(adapter), saved)).nodes:
            fqn, layer = node.fqn, node.module
            if fqn in layers and is_tuner_layer(layer):
                one: Any = layer
                source = one.get_base_layer()
                before = dequantizer(source)(...).float()
                plain = float32_module(plain_layer(source, as_linear=True), {"weight": before.clone()})
                merge = Merger(fqn, [(one, active_adapters(one, None))], source.weight, [...])
                delta = parameter_of(merge(plain, ...), "weight").double() - before
                merge.check()
                change = dequantizer(layers[fqn])(...).cpu().double() - before
                sums += torch.stack([(change * delta).sum(), delta.square().sum(), change.square().sum()])
        dot, wanted, changed = sums.tolist()
        if changed and wanted:
            error = (max(changed - 2 * dot + wanted, 0) / wanted) ** 0.5
            yield _MERGED, f"{dot / wanted:.0%} of the delta survived, with an error of {error:.0%} of it", _EXPORT
