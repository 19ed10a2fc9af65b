"""``kbitwrap stamp``: the manifest of a run that was made without kbitwrap."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import (
    EXIT_DONE,
    QUANT_BY_CONFIG,
    InputError,
    checked_device,
    first_line,
    say,
    show_json,
    warnings_for,
)
from .hub import (
    NAMED_BY_ADAPTER,
    check_adapter,
    named_base,
    quantization_in_training,
    working,
)
from .usage import (
    BaseInTraining,
    Device,
    DtypeOfBase,
    Json,
    QuantInTraining,
    TrustRemoteCode,
    path,
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
        typer.Argument(
            metavar="ADAPTER", parser=path, help="The folder of a saved adapter."
        ),
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
    check_adapter(adapter)
    hint = NAMED_BY_ADAPTER if base is None else ""
    base = base or named_base(adapter)
    with working(base, f"stamping {adapter}", trust_remote_code, hint):
        from .. import KbitWrapError, stamp_adapter  # not before: they load torch
        from ..checkpoints.adapters import read_adapter
        from ..checkpoints.base_quantization import UNKNOWN, find_quantization

        try:
            if base and quant is None:
                saved = read_adapter(adapter)
                told = find_quantization(base, None, None, saved, trust_remote_code)
                if told.source == UNKNOWN:
                    raise InputError(
                        f"it is not known how the base {base!r} was quantized in training: no config says it; give "
                        f"--quant. {QUANT_BY_CONFIG}"
                    )
            with warnings_for(__name__) as notes:
                manifest = stamp_adapter(
                    adapter,
                    base,
                    quantization_config=quantization_in_training(quant, dtype),
                    dtype=dtype,
                    device=checked_device(device),
                    trust_remote_code=trust_remote_code,
                )
        except (KbitWrapError, OSError) as error:
            raise InputError(first_line(error)) from error
    for note in notes:
        say(f"note: {note}")
    if json_:
        show_json({"path": str(adapter), "unknown": list(manifest.unknown)})
        return EXIT_DONE
    print(f"{adapter}: kbitwrap.json, {len(manifest.rows)} tensors of the base")
    for what in manifest.unknown:
        say(f"unknown: {what}")
    return EXIT_DONE
