"""``kbitwrap merge``: a saved adapter, merged into the base that it was trained on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from .. import ConfigError, ExportReport
from ..bench.settings import QUANTS, quantization_config
from .console import EXIT_DONE, check_folder, say
from .convert import write
from .hub import models
from .usage import (
    HALF_DTYPES,
    KINDS_OF_NF4,
    Json,
    Out,
    Overwrite,
    TrustRemoteCode,
    argument,
    choice,
    device,
    file_size,
    path,
    value,
)

SUMMARY = (
    "Merge a saved adapter into the base that it was trained on, in half precision."
)
HELP = """Merge a saved adapter into the base that it was trained on, in half precision.

BASE is loaded quantized as it was in training, the adapter that PEFT saved in ADAPTER is merged into its exactly
dequantized weights, and the half-precision model is written with its tokenizer, one tensor at a time. The manifest of
the run, kbitwrap.json in ADAPTER or --manifest, says how BASE was quantized, and is compared with it. A GPU and a CPU
may quantize a last bit differently: merge on the type of device that was trained on.

Exit status: 0 written, 1 BASE is not the one that the manifest records, 2 bad usage, bad input, or it cannot be
written; unless it is 0, nothing is left at DST."""
_OPTIONS = {
    "(manifest)": "(--manifest)",
    "(quantization_config)": "(--quant)",
    "(quantization_config; False for none)": "(--quant; 'none' for none)",
}


_Base = Annotated[str, argument("BASE", str, "A folder, or a name on the hub.")]
_Adapter = Annotated[Path, argument("ADAPTER", path, "The folder of a saved adapter.")]
_Manifest = Annotated[
    Path | None,
    value(
        "--manifest",
        "FILE",
        path,
        "The manifest of the run; kbitwrap.json in ADAPTER, if left out.",
    ),
]
_Quant = Annotated[
    str | None,
    choice(
        "--quant",
        QUANTS,
        "How BASE was quantized in training, where neither its config nor a manifest says it: "
        f"{KINDS_OF_NF4}. Another than in training gives other weights.",
    ),
]
_Dtype = Annotated[
    str | None,
    choice(
        "--dtype",
        HALF_DTYPES,
        "Dtype of the tensors that were not quantized; what the manifest or the config of BASE names, "
        "if left out.",
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


def command(
    base: _Base,
    adapter: _Adapter,
    out: Out,
    overwrite: Overwrite = False,
    manifest: _Manifest = None,
    quant: _Quant = None,
    dtype: _Dtype = None,
    max_shard_size: _MaxShardSize = "5GB",  # type: ignore[assignment]  # which Typer shows, and parses
    device: _Device = None,
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

    def merge(written: Callable[[int], None]) -> ExportReport:
        from .. import merge_checkpoint
        from .loading import choose_device

        quantization = None
        if quant is not None:
            quantization = quantization_config(quant, dtype) or False
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
                trust_remote_code=trust_remote_code,
            )
        except ConfigError as error:
            text = str(error)
            for argument, option in _OPTIONS.items():
                text = text.replace(argument, option)
            raise ConfigError(text) from error

    with models(base, trust_remote_code):
        status = write(merge, f"merging into {base}", as_json=json_)
        is_done = status == EXIT_DONE and quant is not None
        if is_done and _is_unrecorded(base, adapter, manifest):
            say(
                f"note: nothing here records how BASE was quantized in training, so --quant {quant} was taken at its "
                f"word ({KINDS_OF_NF4}); another quantization in training has other weights"
            )
    return status


def _is_unrecorded(base: str, adapter: Path, manifest: Path | None) -> bool:
    """Whether neither a manifest nor the config of the base says how it was quantized."""
    if manifest is not None or (adapter / "kbitwrap.json").is_file():
        return False
    from transformers import PretrainedConfig

    return "quantization_config" not in PretrainedConfig.get_config_dict(base)[0]
