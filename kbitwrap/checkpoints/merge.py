"""Merging a saved adapter into the base that it was trained on."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import format_bytes
from ..errors import ConfigError, ExportError
from ..export.export import save_model
from ..export.merge import merge_into
from ..export.twin import build_twin
from ..export.writer import Progress, checkpoint_writer, split_into_files
from ..manifest.contents import versions
from ..manifest.manifest import Manifest
from ..model.pretrained import load_pretrained, read_config
from ..model.tree import ModelTree
from ..model.wrappers import canonical_fqn
from ..preparation.process import plain_mode
from ..reports import ExportReport, first_of, shown
from ..tensors.dtypes import find_dtype
from .reader import MANIFEST_NAME, adapter_file, read_json, read_tensors, recorded_quantization

# What a tokenizer is saved as, and what a processor adds to it.
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_RANKS = ("r", "init_r", "num_virtual_tokens")


def merge_checkpoint(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    manifest: Manifest | str | os.PathLike[str] | None = None,
    quantization_config: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: bool | Progress = False,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> ExportReport:
    """Merge a saved adapter into the base it was trained on, and write the half-precision model that results.

    The base is quantized as in training, and dequantized exactly; the adapter's part is added in float32 and the sum
    rounded once. That is, bit for bit, what ``KbitPreparedModel.export(merge_adapters=True)`` writes after training, on
    the same type of device: a GPU and a CPU may quantize, and so round, a last bit differently. Tensors are computed
    and written one at a time; the tokenizer is copied from the adapter's folder or the base's, and a model card says
    what was merged.

    Args:
        base: The folder of the base, or its name on the hub.
        adapter: The folder that PEFT saved the adapter in.
        dst: The folder to make: complete in the end, or absent.
        manifest: The record of the preparation, or its path: it says how the base was quantized, and the base is
            compared with its digests. ``None`` for ``kbitwrap.json`` in the adapter's folder, if there is one.
        quantization_config: How the base was quantized in training, as for ``from_pretrained``; ``None`` for what the
            base's own config, or the manifest, says; ``False`` for a base that was not quantized.
        dtype: The dtype of what is not quantized; ``None`` for the manifest's, or else the config's.
        max_shard_size: The maximum size of a file in bytes, or a string such as ``"5GB"``.
        overwrite: Replace a folder that is not empty.
        progress: Show a bar of the bytes written, on a terminal; or a function that is called with each number of them.
        device: The device to quantize and merge on; ``None`` for CUDA if there is one, else the CPU.
        trust_remote_code: Run the code that the base's folder brings along.

    Returns:
        The report of what was written.

    Raises:
        ConfigError: There is no base or adapter, the adapter does not belong to the base, or it is not known how the
            base was quantized, or it was saved quantized otherwise than given.
        ManifestMismatchError: The base is not the one that the manifest records.
        ExportError: It cannot be merged or written. Nothing was left at ``dst``.

    Example:
        >>> from kbitwrap import merge_checkpoint
        >>> merge_checkpoint("/no/such/base", "/no/adapter", "/tmp/merged")
        Traceback (most recent call last):
        ...
        kbitwrap.errors.ConfigError: there is no adapter_config.json with adapter_model.safetensors in '/no/adapter'
    """
    start, folder = time.perf_counter(), Path(adapter)
    config, saved = read_adapter(folder)
    split_into_files({}, max_shard_size)  # refuses an invalid size before anything is computed
    writing = checkpoint_writer(dst, "merge", overwrite=overwrite, progress=None if progress is True else progress)
    with torch.random.fork_rng(devices=[]), writing as writer:  # loading draws numbers
        if manifest is None and (folder / MANIFEST_NAME).is_file():
            manifest = folder / MANIFEST_NAME
        record = manifest if manifest is None or isinstance(manifest, Manifest) else Manifest.load(manifest)
        settings = _quantization(base, quantization_config, record, trust_remote_code)
        chosen = record.model.dtype if dtype is None and record is not None else dtype
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, new = load_pretrained(base, settings, chosen, device, None, trust_remote_code)
        if new:
            raise ConfigError(f"the base {os.fspath(base)!r} lacks weights: {first_of(sorted(new))}")
        if record is not None:
            record.check(model)
        adapted = with_adapter(model, folder, saved)
        with plain_mode():
            twin = build_twin(ModelTree(adapted))
            merged = merge_into(twin)
            tensors = {id(t): t for t in (*twin.model.parameters(), *twin.model.buffers())}
            needed, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(writer.folder).free
            if free < needed:
                raise ExportError(
                    f"{os.fspath(dst)}: the merged model takes {format_bytes(needed)}, and {format_bytes(free)} are "
                    "free there; nothing was written"
                )
            save_model(twin.model, writer, max_shard_size)
        for names in (_TOKENIZER, _PROCESSOR):
            _copy(names, base, folder, writer.folder)
        is_said = record is None and (settings is not None or quantization_config is False)  # and recorded nowhere
        card = _card(base, folder, config, model, is_said, device)
        (writer.folder / "README.md").write_text(card, encoding="utf-8")
    seconds = time.perf_counter() - start
    return ExportReport(Path(dst), writer.files, writer.num_tensors, writer.num_bytes, twin.converted, merged, seconds)


def _quantization(base: Any, given: Any, manifest: Manifest | None, trust_remote_code: bool) -> Any:
    """The quantization config to load the base with; ``None`` where it has its own, or none."""
    if given not in (None, False) and not isinstance(given, dict) and not hasattr(given, "to_dict"):
        wanted = "a config of transformers such as BitsAndBytesConfig, False for none, or None"
        raise ConfigError(f"quantization_config: expected {wanted}, found {given!r}")
    own = getattr(read_config(base, trust_remote_code), "quantization_config", None)
    if own is not None:  # loading takes this one, whatever else is given
        asked = given.to_dict() if hasattr(given, "to_dict") else given or {}
        pairs = {name: (own[name], v) for name, v in asked.items() if name in own and v is not None}
        differing = [f"{name}: {a!r}, given: {b!r}" for name, (a, b) in pairs.items() if a != b and not find_dtype(b)]
        if given is False or differing:
            raise ConfigError(
                f"the base {os.fspath(base)!r} has a quantization of its own, and it is not the one given "
                f"({'; '.join(differing) or 'none'}): leave that out (quantization_config), or give the base "
                "that was trained on"
            )
        return None
    if given is not None:
        return given or None
    if manifest is None:
        raise ConfigError(
            f"it is not known how the base {os.fspath(base)!r} was quantized in training: its config says nothing; "
            "give the manifest (manifest), or the quantization (quantization_config; False for none)"
        )
    return recorded_quantization(manifest)


def read_adapter(folder: Path) -> tuple[dict[str, Any], set[str]]:
    """The config of the adapter that PEFT saved in a folder, and the names of its tensors."""
    file = adapter_file(folder)
    if file is None or not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"there is no adapter_config.json with adapter_model.safetensors in {os.fspath(folder)!r}")
    config, tensors = read_json(folder / "adapter_config.json"), read_tensors(file)[0]
    largest = max([1024, *(size for stored in tensors.values() for size in stored.shape)])
    pattern = config.get("rank_pattern")
    for rank in (*map(config.get, _RANKS), *(pattern.values() if isinstance(pattern, dict) else ())):
        if isinstance(rank, (int, float)) and rank > largest:  # as much would be allocated before it is compared
            raise ConfigError(f"the adapter in {os.fspath(folder)!r} has a rank of {shown(rank)}, and no such tensor")
    return config, set(tensors)


def with_adapter(model: nn.Module, folder: Path, saved: set[str]) -> nn.Module:
    """The model with the adapter on it; every tensor saved has its place there, and every place its tensor."""
    from peft import PeftModel, get_peft_model_state_dict

    known = set(model.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Found missing adapter keys", UserWarning)  # the comparison below names them
        try:
            adapted: Any = PeftModel.from_pretrained(model, os.fspath(folder))
            expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        except Exception as error:  # whatever PEFT raises, the adapter does not fit
            why = " ".join(map(str.strip, str(error).split("\n")[:2]))  # torch's second line names a tensor
            raise ConfigError(f"the adapter in {os.fspath(folder)!r} does not fit the base: {why}") from error
    unknown = {name for name in saved - expected if canonical_fqn(name) not in known}
    for names, what in ((unknown, "has tensors that the base has no place for"), (expected - saved, "lacks tensors")):
        if names:
            raise ConfigError(f"the adapter in {os.fspath(folder)!r} {what}: {first_of(sorted(names))}")
    return adapted  # type: ignore[no-any-return]


def _copy(names: tuple[str, ...], base: str | os.PathLike[str], adapter: Path, dst: Path) -> None:
    """Copy the files of those names that the adapter was saved with, or if there is none, the base's."""
    from transformers.utils.hub import cached_file

    is_beside = any((adapter / name).is_file() for name in names)
    for name in names:
        found = cached_file(
            os.fspath(adapter if is_beside else base),
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None and not (dst / name).exists():
            shutil.copyfile(found, dst / name)


def _card(base: Any, adapter: Path, config: dict[str, Any], model: nn.Module, is_said: bool, device: Any) -> str:
    """A model card that says what was merged from what; a folder is named by its last part."""
    named = str(config.get("base_model_name_or_path") or os.fspath(base))
    name = Path(named).name if os.path.isabs(named) or os.path.isdir(named) else named
    method, own = ModelTree(model).quantization.method, getattr(model.config, "quantization_config", None)
    kind, double = (getattr(own, f"bnb_4bit_{name}", None) for name in ("quant_type", "use_double_quant"))
    four = f" ({kind}, with{'' if double else 'out'} double quantization)" if getattr(own, "load_in_4bit", 0) else ""
    said = "as the merge was told, which no record of the training confirms," if is_said else "as in training"
    how = f"quantized with {method}{four} {said} and dequantized exactly" if method else f"unquantized, {said}"
    tool = " ".join(("kbitwrap", versions().get("kbitwrap", ""))).strip()
    return (
        f"---\nbase_model: {name}\nlibrary_name: transformers\ntags:\n- merged\n---\n\n# {name}, merged\n\n"
        f"The base, {name}, {how}, with the {config.get('peft_type', 'PEFT')} adapter `{adapter.name}` added in "
        f"float32 and rounded once. Merged by {tool} on {torch.device(device).type}.\n"
    )
