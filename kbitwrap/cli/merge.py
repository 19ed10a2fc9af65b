"""``kbitwrap merge``: a saved adapter, merged into the base that it was trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from .. import ConfigError, ExportReport
from .console import EXIT_DONE, InputError, check_folder, say
from .convert import write
from .hub import models, quantization_in_training
from .usage import (
    KINDS_OF_NF4,
    DtypeOfBase,
    Json,
    Out,
    Overwrite,
    QuantInTraining,
    TrustRemoteCode,
    argument,
    device,
    file_size,
    flag,
    path,
    value,
)

SUMMARY = (
    "Merge a saved adapter into the base that it was trained on, in half precision."
)
HELP = """Merge a saved adapter into the base that it was trained on, in half precision.

BASE, or what the config of ADAPTER names, is loaded quantized as it was in training, the adapter that PEFT saved in
ADAPTER is merged into its exactly dequantized weights, and the half-precision model is written with its tokenizer, one
tensor at a time. The manifest of the run, kbitwrap.json in ADAPTER or --manifest, says how BASE was quantized, and is
compared with it. A GPU and a CPU may quantize a last bit differently: merge on the type of device that was trained on.

Exit status: 0 written, 1 BASE is not the one that the manifest records, 2 bad usage, bad input, or it cannot be
written; unless it is 0, nothing is left at DST."""
_OPTIONS = {
    "(manifest)": "(--manifest)",
    "(quantization_config)": "(--quant)",
    "(quantization_config; False for none)": "(--quant; 'none' for none)",
}


_First = Annotated[
    str | None,
    argument(
        "[BASE]",
        str,
        "A folder, or a name on the hub; what the config of ADAPTER names, if left out.",
    ),
]
_Second = Annotated[
    Path | None, argument("ADAPTER", path, "The folder of a saved adapter.")
]
_Manifest = Annotated[
    Path | None,
    value(
        "--manifest",
        "FILE",
        path,
        "The manifest of the run; kbitwrap.json in ADAPTER, if left out.",
    ),
]
_MaxShardSize = Annotated[
    int, value("--max-shard-size", "SIZE", file_size, "The maximum size of a file.")
]
_Device = Annotated[
    str | None,
    value(
        "--device",
        "DEVICE",
        device,
        "The device to merge on; cuda if there is one, else cpu.",
    ),
]


_Check = Annotated[
    bool,
    flag(
        "--check",
        "Measure what was written, from its files, before it takes its place: it is a merge, or nothing is written.",
    ),
]


def command(
    out: Out,
    first: _First = None,
    second: _Second = None,
    overwrite: Overwrite = False,
    manifest: _Manifest = None,
    quant: QuantInTraining = None,
    dtype: DtypeOfBase = None,
    max_shard_size: _MaxShardSize = "5GB",  # type: ignore[assignment]  # which Typer shows, and parses
    device: _Device = None,
    check: _Check = False,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Merge, and print what was written. Of several processes that torchrun starts, the first one does it.

    Raises:
        InputError: There is no usable base, adapter, manifest or destination.
    """
    if os.environ.get("RANK", "0") != "0":
        return EXIT_DONE
    check_folder(out, overwrite=overwrite)
    if first is None:
        raise InputError("ADAPTER is missing: the folder of a saved adapter")
    adapter = Path(first) if second is None else second
    base = _named_base(adapter) if second is None else first

    def merge(written: Callable[[int], None]) -> ExportReport:
        from .. import merge_checkpoint
        from .loading import choose_device

        quantization = quantization_in_training(quant, dtype)
        try:
            return merge_checkpoint(
                base,
                adapter,
                out,
                manifest=manifest,
                quantization_config=quantization,
                dtype=dtype,
                max_shard_size=max_shard_size,
                overwrite=overwrite,
                progress=written,
                device=choose_device(device),
                check=check,
                trust_remote_code=trust_remote_code,
            )
        except ConfigError as error:
            text = str(error)
            for argument, option in _OPTIONS.items():
                text = text.replace(argument, option)
            raise ConfigError(text) from error

    with models(base, trust_remote_code):
        status = write(merge, f"merging {adapter}", as_json=json_)
        if status == EXIT_DONE and check:
            say(f"checked: the files in {out} are what a merge of the two is")
        if status == EXIT_DONE:
            _say_unknown(adapter, manifest)
        is_done = status == EXIT_DONE and quant is not None
        if is_done and base and _is_unrecorded(base, adapter, manifest):
            say(
                f"note: nothing here records how BASE was quantized in training, so --quant {quant} was taken at its "
                f"word ({KINDS_OF_NF4}); another quantization in training has other weights"
            )
    return status


def _named_base(adapter: Path) -> str | None:
    """The base that the config of an adapter names; ``None`` where it names none, or cannot be read."""
    try:
        config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
        name = config["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # merging says what is wrong with it
    return name if isinstance(name, str) and name else None


def _say_unknown(adapter: Path, manifest: Path | None) -> None:
    """Say what a manifest does not know that was made after the run."""
    from .. import Manifest

    path = manifest or adapter / "kbitwrap.json"
    if not path.is_file():
        return
    unknown = Manifest.load(path).unknown
    if unknown:
        say(
            f"note: the manifest was made after the run, and does not know {'; '.join(unknown)}"
        )


def _is_unrecorded(base: str, adapter: Path, manifest: Path | None) -> bool:
    """Whether neither a manifest nor the config of the base says how it was quantized."""
    if manifest is not None or (adapter / "kbitwrap.json").is_file():
        return False
    from transformers import PretrainedConfig

    return "quantization_config" not in PretrainedConfig.get_config_dict(base)[0]
