"""``kbitwrap stamp``: the manifest of a run that was made without kbitwrap."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from .console import (
    EXIT_DONE,
    QUANT_BY_CONFIG,
    InputError,
    checked_device,
    say,
    show_result,
    working,
)
from .quantization import quantization_in_training
from .usage import (
    BaseInTraining,
    Device,
    DtypeOfBase,
    Json,
    QuantInTraining,
    TrustRemoteCode,
)

SUMMARY = "Write the manifest of a run that was made without kbitwrap."
HELP = (
    "Write the manifest of a run that was made without kbitwrap, beside its adapter.\n\n"
    "kbitwrap.json gets what ADAPTER and its base prove: the class, and the names, shapes, dtypes and digests of the "
    "base as the run had it. By these merge and doctor recognize another base. What ADAPTER and its base do not prove "
    "is recorded as unknown, and printed. How BASE was quantized has to be known: --quant says it where no config "
    "does. Stamp on the type of device that was trained on: a GPU and a CPU may quantize a last bit differently.\n\n"
    "Exit status: 0 written, 2 bad usage, bad input, or there is a manifest already."
)


def command(
    adapter: Annotated[
        Path,
        typer.Argument(metavar="ADAPTER", help="The folder of a saved adapter."),
    ],
    base: BaseInTraining = None,
    quant: QuantInTraining = None,
    dtype: DtypeOfBase = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Stamp, and print what is unknown.

    Raises:
        InputError: There is no usable base or adapter, or there is a manifest already.
    """
    with working(f"stamping {adapter}", trust_remote_code):
        from .. import stamp_adapter  # not before: it loads torch
        from ..checkpoints.adapters import read_adapter
        from ..checkpoints.base import named_base
        from ..checkpoints.base_quantization import UNKNOWN, find_quantization

        saved = read_adapter(adapter)
        base = base or named_base(saved)
        given = quantization_in_training(quant, dtype)
        told = find_quantization(base, given, None, saved, trust_remote_code)
        if told.source == UNKNOWN:
            raise InputError(
                f"it is not known how the base {base!r} was quantized in training: no config says it; give --quant. "
                f"{QUANT_BY_CONFIG}"
            )
        with warnings.catch_warnings(record=True) as caught:
            manifest = stamp_adapter(
                adapter,
                base,
                quantization_config=given,
                dtype=dtype,
                device=checked_device(device),
                trust_remote_code=trust_remote_code,
            )
    for one in caught:
        say(f"note: {one.message}")
    if quant is not None:
        say(
            f"note: --quant {quant} was taken at its word; merge and doctor go by it now"
        )
    said = f"{adapter}: kbitwrap.json, {len(manifest.rows)} tensors of the base"
    unknown = [f"unknown: {what}" for what in manifest.unknown]
    result = {"path": str(adapter), "unknown": list(manifest.unknown)}
    show_result(result, [said, *unknown], json_)
    return EXIT_DONE
