"""``kbitwrap stamp``: the manifest of a run that was made without kbitwrap."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .adapters import asking_for_base, check_adapter, is_unrecorded, named_base
from .console import (
    EXIT_DONE,
    InputError,
    first_line,
    say,
    show_json,
    warnings_for,
)
from .hub import quantization_in_training, working
from .usage import (
    QUANT_BY_CONFIG,
    DtypeOfBase,
    Json,
    QuantInTraining,
    TrustRemoteCode,
    argument,
    device,
    path,
    value,
)

SUMMARY = "Write the manifest of a run that was made without kbitwrap."
HELP = """Write the manifest of a run that was made without kbitwrap, beside its adapter.

kbitwrap.json gets what ADAPTER and its base prove: the class, and the names, shapes, dtypes and digests of the base as
the run had it. By these merge and doctor recognize another base. What ADAPTER and its base do not prove is recorded as
unknown, and printed. How BASE was quantized has to be known: --quant says it where no config does.
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
    quant: QuantInTraining = None,
    dtype: DtypeOfBase = None,
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
    check_adapter(adapter)
    is_named = base is None
    base = base or named_base(adapter)
    doing = working(base, f"stamping {adapter}", trust_remote_code)
    with asking_for_base(is_named), doing:
        if base and quant is None and is_unrecorded(base, adapter):
            raise InputError(
                f"it is not known how the base {base!r} was quantized in training: no config says it; give --quant. "
                f"{QUANT_BY_CONFIG}"
            )
        from .. import KbitWrapError, stamp_adapter  # not before: they load torch
        from .devices import choose_device

        quantization = quantization_in_training(quant, dtype)
        try:
            with warnings_for(__name__) as notes:
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
    for note in notes:
        say(f"note: {note}")
    if json_:
        show_json({"path": str(adapter), "unknown": list(manifest.unknown)})
        return EXIT_DONE
    print(f"{adapter}: kbitwrap.json, {len(manifest.rows)} tensors of the base")
    for what in manifest.unknown:
        say(f"unknown: {what}")
    return EXIT_DONE
