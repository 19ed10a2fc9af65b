"""``kbitwrap stamp``: the manifest of a run that was made without kbitwrap."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..bench.settings import QUANTS, quantization_config
from .console import EXIT_DONE, InputError, first_line, say, show_json
from .hub import working
from .usage import (
    HALF_DTYPES,
    KINDS_OF_NF4,
    Json,
    TrustRemoteCode,
    argument,
    choice,
    device,
    path,
    value,
)

SUMMARY = "Write the manifest of a run that was made without kbitwrap."
HELP = """Write the manifest of a run that was made without kbitwrap, beside its adapter.

kbitwrap.json gets what ADAPTER and its base prove: the class, and the names, shapes, dtypes and digests of the base as
the run had it. With it merge and doctor tell another base. What nothing proves is in it as unknown, and is printed.
Stamp on the type of device that was trained on: a GPU and a CPU may quantize a last bit differently.

Exit status: 0 written, 2 bad usage, bad input, or there is a manifest already."""


def command(
    adapter: Annotated[
        Path, argument("ADAPTER", path, "The folder of a saved adapter.")
    ],
    base: Annotated[
        str | None,
        value(
            "--base",
            "BASE",
            str,
            "A folder, or a name on the hub; what the config of ADAPTER names, if left out.",
        ),
    ] = None,
    quant: Annotated[
        str | None,
        choice(
            "--quant",
            QUANTS,
            f"How BASE was quantized in training, where its config does not say it: {KINDS_OF_NF4}.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        choice(
            "--dtype",
            HALF_DTYPES,
            "Dtype of the tensors that were not quantized; what the config of BASE names, if left out.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        value(
            "--device",
            "DEVICE",
            device,
            "The device that was trained on; cuda if there is one, else cpu.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Stamp, and print what is unknown.

    Raises:
        InputError: There is no usable base or adapter, or there is a manifest already.
    """
    with working(base, f"stamping {adapter}", trust_remote_code):
        from .. import KbitWrapError, stamp_adapter  # not before: they load torch
        from .loading import choose_device

        quantization = None
        if quant is not None:
            quantization = quantization_config(quant, dtype) or False
        try:
            manifest = stamp_adapter(
                adapter,
                base,
                quantization_config=quantization,
                dtype=dtype,
                device=choose_device(device),
                trust_remote_code=trust_remote_code,
            )
        except (KbitWrapError, OSError) as error:
            raise InputError(first_line(error)) from error
    if json_:
        show_json({"path": str(adapter), "unknown": list(manifest.unknown)})
        return EXIT_DONE
    print(f"{adapter}: kbitwrap.json, {len(manifest.rows)} tensors of the base")
    for what in manifest.unknown:
        say(f"unknown: {what}")
    return EXIT_DONE
