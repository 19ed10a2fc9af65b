"""``kbitwrap merge``: a saved adapter, merged into the base that it was trained on."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import ExportReport
from .console import (
    EXIT_DONE,
    Doing,
    InputError,
    checked_device,
    say,
    with_options,
)
from .convert import write
from .quantization import quantization_in_training
from .usage import (
    Device,
    DtypeOfBase,
    Json,
    MaxShardSize,
    Overwrite,
    QuantInTraining,
    Samples,
    TrustRemoteCode,
)

SUMMARY = "Merge a saved adapter into the base that it was trained on."
HELP = (
    "Merge a saved adapter into the base that it was trained on: kbitwrap merge BASE ADAPTER --out DST, or kbitwrap "
    "merge ADAPTER --out DST with the base that the config of ADAPTER names.\n\n"
    "The base is loaded quantized as it was in training, the adapter that PEFT saved in ADAPTER is merged into its "
    "exactly dequantized weights, and the half-precision model is written, one tensor at a time, with what else the "
    "folders hold that loaders read: the tokenizer, chat templates, poolings, code. With --as mixed the layers that "
    "the adapter does not touch stay quantized; with --as quantized all do, and what the adapter adds is rounded at "
    "random, without bias. With --no-adapter the dequantized BASE alone is written.\n\n"
    "Which form? With --compare FILE each is merged, and its loss on your own texts is compared with that of the "
    "adapter model, and with a merge onto the base's 16-bit weights, where these are at hand. The last line says which "
    "to take, and why. Without --out nothing is written.\n\n"
    "The manifest of the run, kbitwrap.json in ADAPTER or --manifest, says how BASE was quantized, and is compared "
    "with it. Without one, the config.json in ADAPTER says it, where axolotl or another tool saved one. A GPU and a "
    "CPU may quantize a last bit differently: merge on the type of device that was trained on.\n\n"
    "Exit status: 0 written, 1 BASE or --quant is not what the manifest records, 2 bad usage, bad input, or it cannot "
    "be written; unless it is 0, nothing is left at DST."
)
_COMPARED = ("half", "mixed", "quantized", "original")


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="[BASE] ADAPTER",
            help="The folder of a saved adapter, and before it its base: a folder, or a name on the hub; if left out, "
            "what the config of ADAPTER names.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DST", help="The folder to make.")
    ] = None,
    as_: Annotated[
        Literal["half", "mixed", "quantized"],
        typer.Option(
            "--as",
            metavar="FORM",
            help="The form of the merged model: half, in half precision; mixed, layers that the adapter does not touch "
            "quantized; or quantized, all layers.",
        ),
    ] = "half",
    no_adapter: Annotated[
        bool,
        typer.Option(
            "--no-adapter",
            help="Write BASE alone, dequantized: for an engine that is sent adapters only.",
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="The seed of --as quantized.")
    ] = 0,
    overwrite: Overwrite = False,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The manifest of the run; kbitwrap.json in ADAPTER, if left out.",
        ),
    ] = None,
    quant: QuantInTraining = None,
    dtype: DtypeOfBase = None,
    max_shard_size: MaxShardSize = None,
    device: Device = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Measure what was written, from its files, before it takes its place: it is a merge, or nothing is "
            "written.",
        ),
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare the forms by their loss on FILE, JSON lines (.jsonl) with text or messages, or plain text; "
            "--out then writes the form of --as.",
        ),
    ] = None,
    samples: Samples = 64,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Compare, or merge, and print what was found or written.

    Raises:
        InputError: There is no usable base, adapter, manifest or destination.
    """
    if len(paths) > (1 if no_adapter else 2):
        raise InputError(
            f"expected [BASE] ADAPTER, or BASE alone with --no-adapter, found {' '.join(paths)}"
        )
    base: str | None = paths[0]
    adapter = None if no_adapter else Path(paths[-1])
    if adapter is not None and len(paths) == 1:
        base = None  # what the config of the adapter names
    if out is None and compare is None:
        raise InputError("Missing option '--out', or '--compare'")
    if compare is not None and (adapter is None or (json_ and out)):
        raise InputError("--compare takes an ADAPTER, and with --json no --out")
    options: dict[str, Any] = {
        "manifest": manifest,
        "quantization_config": quantization_in_training(quant, dtype),
        "dtype": dtype,
        "seed": seed,
        "device": checked_device(device),
        "trust_remote_code": trust_remote_code,
    }

    def measure(doing: Doing) -> Any:
        from .. import compare_merges

        return compare_merges(
            paths[-1],
            str(compare),
            base=base,
            forms=_COMPARED,
            samples=samples,
            progress=doing.now,
            **options,
        )

    if compare is not None:
        status = write(measure, f"comparing {paths[-1]}", json_, trust_remote_code)
        if status != EXIT_DONE:
            return status
    if out is None:
        return EXIT_DONE

    def merge(doing: Doing) -> ExportReport:
        from .. import merge_checkpoint

        with warnings.catch_warnings(record=True) as caught:
            report = merge_checkpoint(
                base,
                adapter,
                str(out),
                merge_as=as_,
                max_shard_size="5GB" if max_shard_size is None else max_shard_size,
                overwrite=overwrite,
                progress=doing.written,
                check=check,
                **options,
            )
        said = [str(one.message) for one in caught]
        notes = dict.fromkeys([*said, *report.notes])
        return replace(report, notes=tuple(map(with_options, notes)))

    status = write(merge, f"merging {' and '.join(paths)}", json_, trust_remote_code)
    if status == EXIT_DONE and adapter is not None and quant is not None:
        _tell_unrecorded(base, adapter, manifest, quant, trust_remote_code)
    return status


def _tell_unrecorded(
    base: str | None,
    adapter: Path,
    manifest: Path | None,
    quant: str,
    trust_remote_code: bool,
) -> None:
    """Say that nothing records how a base was quantized in training, where that is so."""
    from ..checkpoints.adapters import read_adapter
    from ..checkpoints.base import named_base
    from ..checkpoints.base_quantization import GIVEN, find_quantization
    from ..checkpoints.reader import load_manifest, saved_manifest

    saved = read_adapter(adapter)
    record = saved_manifest(adapter) if manifest is None else load_manifest(manifest)
    given = quantization_in_training(quant, None)
    found = find_quantization(
        base or named_base(saved), given, record, saved, trust_remote_code
    )
    if found.source == GIVEN:
        say(
            f"note: nothing here records how BASE was quantized in training, so --quant {quant} was taken at its word"
        )
