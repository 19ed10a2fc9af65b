"""``kbitwrap merge``: a saved adapter, merged into the base that it was trained on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from .. import ExportReport
from .adapters import asking_for_base, check_adapter, is_unrecorded, named_base
from .console import (
    EXIT_DONE,
    InputError,
    check_folder,
    say,
    warnings_for,
    with_options,
)
from .convert import write
from .hub import models, quantization_in_training
from .usage import (
    QUANT_BY_CONFIG,
    DtypeOfBase,
    Json,
    Out,
    Overwrite,
    QuantInTraining,
    TrustRemoteCode,
    argument,
    choice,
    device,
    file_size,
    flag,
    integer,
    path,
    value,
)

SUMMARY = "Merge a saved adapter into the base that it was trained on."
HELP = """Merge a saved adapter into the base that it was trained on.

BASE, or what the config of ADAPTER names, is loaded quantized as it was in training, the adapter that PEFT saved in
ADAPTER is merged into its exactly dequantized weights, and the half-precision model is written, one tensor at a time,
with what else the folders hold that loaders read: the tokenizer, chat templates, poolings, code. With --as mixed the
layers that the adapter does not touch stay quantized; with --as quantized all do, and what the adapter adds is rounded
at random, without bias. With --no-adapter the dequantized BASE alone is written.

The manifest of the run, kbitwrap.json in ADAPTER or --manifest, says how BASE was quantized, and is compared with it.
Without one, the config.json in ADAPTER says it, where axolotl or another tool saved one. A GPU and a CPU may quantize
a last bit differently: merge on the type of device that was trained on.

Exit status: 0 written, 1 BASE or --quant is not what the manifest records, 2 bad usage, bad input, or it cannot be
written; unless it is 0, nothing is left at DST."""


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


_As = Annotated[
    str,
    choice(
        "--as",
        ("half", "mixed", "quantized"),
        "The form: half precision; layers that the adapter does not touch quantized; or all layers quantized.",
    ),
]
_Seed = Annotated[
    int,
    value("--seed", "N", integer(0), "The seed of --as quantized."),
]
_NoAdapter = Annotated[
    bool,
    flag(
        "--no-adapter",
        "Write BASE alone, dequantized: for an engine that is sent adapters only.",
    ),
]


def command(
    out: Out,
    first: _First = None,
    second: _Second = None,
    as_: _As = "half",
    no_adapter: _NoAdapter = False,
    seed: _Seed = 0,
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
    if seed and as_ != "quantized":
        raise InputError("--seed is for --as quantized, which alone draws numbers")
    base, adapter = _named(first, second, no_adapter)
    if adapter is not None:
        check_adapter(adapter)

    notes: list[str] = []

    def merge(written: Callable[[int], None]) -> ExportReport:
        from .. import merge_checkpoint
        from .devices import choose_device

        quantization = quantization_in_training(quant, dtype)
        with warnings_for(__name__) as warned:
            report = merge_checkpoint(
                base,
                adapter,
                out,
                merge_as=as_,
                manifest=manifest,
                quantization_config=quantization,
                dtype=dtype,
                max_shard_size=max_shard_size,
                overwrite=overwrite,
                seed=seed,
                progress=written,
                device=choose_device(device),
                check=check,
                trust_remote_code=trust_remote_code,
            )
        for note in dict.fromkeys([*warned, *report.notes]):
            notes.append(with_options(note))
        return replace(report, notes=tuple(notes))

    is_named = second is None and adapter is not None
    with asking_for_base(is_named), models(base, trust_remote_code):
        doing = f"dequantizing {base}" if adapter is None else f"merging {adapter}"
        status = write(merge, doing, as_json=json_)
        if status == EXIT_DONE and check:
            wanted = "the base" if adapter is None else "a merge of the two"
            say(f"checked: the files in {out} are what {wanted} is")
        for note in notes:
            say(f"note: {note}")
        if adapter is None:
            return status
        if status == EXIT_DONE:
            _say_unknown(adapter, manifest)
        has_manifest = manifest is not None or (adapter / "kbitwrap.json").is_file()
        is_done = status == EXIT_DONE and quant is not None and not has_manifest
        if is_done and base and is_unrecorded(base, adapter):
            say(
                f"note: nothing here records how BASE was quantized in training, so --quant {quant} was taken at its "
                f"word; another quantization in training has other weights. {QUANT_BY_CONFIG}"
            )
    return status


def _named(
    first: str | None, second: Path | None, no_adapter: bool
) -> tuple[str | None, Path | None]:
    """The base and the adapter that were typed; ``None`` for a base that is to be found."""
    if no_adapter:
        if first is None or second is not None:
            raise InputError("--no-adapter takes BASE alone")
        return first, None

    if first is None:
        raise InputError("ADAPTER is missing: the folder of a saved adapter")
    if second is None:
        return named_base(Path(first)), Path(first)
    return first, second


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
