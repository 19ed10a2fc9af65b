"""``kbitwrap merge``: a saved adapter, merged into the base that it was trained on."""

from __future__ import annotations

import os
import shlex
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import ExportReport
from .console import (
    ADAPTER_CONFIG,
    EXIT_DONE,
    Doing,
    InputError,
    checked_device,
    first_line,
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
    given,
)

SUMMARY = "Merge a saved adapter into the base that it was trained on."
HELP = (
    "Merge a saved adapter into the base that it was trained on: kbitwrap merge BASE ADAPTER --out DST, or kbitwrap "
    "merge ADAPTER --out DST with the base that the config of ADAPTER names.\n\n"
    "The base is loaded quantized as it was in training, the adapter that PEFT saved in ADAPTER is merged into its "
    "exactly dequantized weights, and a 16-bit model is written, one tensor at a time, with what else the "
    "folders hold that loaders read: the tokenizer, chat templates, poolings, code. With --as mixed the layers that "
    "the adapter does not touch stay quantized; with --as quantized all do, and what the adapter adds is rounded at "
    "random, without bias. With --as original it is merged onto the original weights of BASE, from "
    "before they were quantized. With --no-adapter the dequantized BASE alone is written.\n\n"
    "Which form? With --compare FILE each is merged, and its loss on your own texts is compared with that of the "
    "adapter model, and with a merge onto the original weights, where these are at hand. The table says "
    "which need bitsandbytes to load; the last line says which to take, and why. With --out that one is written, or "
    "the form of --as; without --out nothing is written.\n\n"
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
            help="A saved adapter, and before it its base, each a folder or a name on the hub; without BASE, the one "
            "that the config of ADAPTER names.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DST", help="The folder to make.")
    ] = None,
    as_: Annotated[
        Literal["half", "mixed", "quantized", "original"] | None,
        typer.Option(
            "--as",
            metavar="FORM",
            help="The form of the merged model: half, all in 16 bits; mixed, layers that the adapter does not touch "
            "quantized; quantized, all layers; or original, in 16 bits onto the original weights. If left out, the "
            "form that --compare recommends, or half.",
        ),
    ] = None,
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
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Upload what was written to this repository on the hub, such as me/merged, which is made if it is not "
            "there.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare the forms by their loss on FILE, JSON lines (.jsonl) with text, or messages, or prompt and "
            "completion, or plain text; --out then writes the form that is recommended, or that of --as.",
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
    holding = [os.path.isfile(os.path.join(path, ADAPTER_CONFIG)) for path in paths]
    if holding == [True, False] and os.path.isdir(paths[-1]):
        raise InputError(
            f"{paths[1]!r} holds no adapter, {paths[0]!r} does: the order is BASE ADAPTER"
        )
    base: str | None = paths[0]
    adapter = None if no_adapter else paths[-1]
    if adapter is not None and len(paths) == 1:
        base = None  # what the config of the adapter names
    if out is None and compare is None:
        raise InputError("Missing option '--out', or '--compare'")
    if compare is not None and (adapter is None or (json_ and out)):
        raise InputError("--compare takes an ADAPTER, and with --json no --out")
    if out is None and push_to_hub is not None:
        raise InputError("--push-to-hub uploads what --out writes: add --out")
    if push_to_hub is not None:
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(push_to_hub)
        except ValueError as error:
            raise InputError(f"--push-to-hub: {first_line(error)}") from error
    options: dict[str, Any] = {
        "manifest": manifest,
        "quantization_config": quantization_in_training(quant, dtype),
        "dtype": dtype,
        "seed": seed,
        "device": checked_device(device),
        "trust_remote_code": trust_remote_code,
    }
    of_both = {
        "quant": quant,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }

    recommended = ""

    def measure(doing: Doing) -> Any:
        from .. import compare_merges

        nonlocal recommended
        found = compare_merges(
            paths[-1],
            str(compare),
            base=base,
            forms=_COMPARED,
            samples=samples,
            progress=doing.now,
            **options,
        )
        recommended = found.recommended
        return found

    if compare is not None:
        status = write(measure, f"comparing {paths[-1]}", json_, trust_remote_code)
        if status != EXIT_DONE:
            return status
    if out is None:
        if recommended:
            typed = _typed(
                *("merge", *paths, "--as", recommended, "--out", "DIR"),
                manifest=manifest,
                dtype=dtype,
                seed=seed or None,
                **of_both,
            )
            say(f"to write it: {typed}")
        return EXIT_DONE

    def merge(doing: Doing) -> ExportReport:
        from .. import merge_checkpoint

        with warnings.catch_warnings(record=True) as caught:
            report = merge_checkpoint(
                base,
                adapter,
                str(out),
                merge_as=as_ or recommended or "half",
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
    if status != EXIT_DONE:
        return status
    if compare is not None and as_ is None:
        told = f"{recommended}, which --compare recommends"
        say(f"wrote {told if recommended else 'half: --compare recommends none'}")
    if adapter is not None and quant is not None and compare is None:
        # The card says who told the quantization.
        card = (out / "README.md").read_text(encoding="utf-8")
        if "nothing recorded confirms" in card:
            say(
                f"note: nothing records how the base was quantized, so --quant {quant} was taken at its word"
            )
    if not (json_ or check):
        typed = _typed("doctor", str(out), base=base, adapter=adapter, **of_both)
        print(f"to check it: {typed}")
    if push_to_hub is not None:
        _push(out, push_to_hub)
    return status


def _typed(*words: str, **options: object) -> str:
    """Write a command as it is typed, with those of the options that were given."""
    typed = ["kbitwrap", *words]
    for name, value in options.items():
        option = given(**{name: value})
        if option and value is not True:
            option.append(str(value))
        typed += option
    return shlex.join(typed)


def _push(folder: Path, name: str) -> None:
    """Upload a merged model, into a repository that is made where there is none."""
    try:
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name, exist_ok=True)
        url = api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # of the network and of its libraries
        raise InputError(
            f"{folder} is written, and was not uploaded to {name!r}: {first_line(error)}"
        ) from error
    say(f"uploaded: {url}")
