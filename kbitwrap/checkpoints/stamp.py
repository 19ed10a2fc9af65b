"""A manifest made after the run, of what an adapter's folder and a base prove."""

from __future__ import annotations

from typing import Any

import torch

from ..config import StrPath
from ..errors import ConfigError
from ..manifest.manifest import DTYPES_OF_4_BITS, MANIFEST_NAME, Manifest
from ..preparation.preparation import Preparation
from ..preparation.process import plain_mode
from ..tensors.devices import accelerator_type
from .adapters import read_adapter
from .base import adapted_base, load_base, named_base
from .base_quantization import (
    CONFIRMED,
    GIVEN,
    QUANTIZATION,
    UNKNOWN,
    UNQUANTIZED,
    find_quantization,
)

_UNKNOWN = (
    "how the model was prepared",
    "the dtypes of the adapters in training",
    "the number of processes and devices",
)


def stamp_adapter(
    adapter: StrPath,
    base: StrPath | None = None,
    *,
    quantization_config: Any = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> Manifest:
    """Write the manifest of a run that was made without kbitwrap, as ``kbitwrap.json`` beside its adapter.

    It has what the base and the adapter prove: the class, and the names, shapes, dtypes
    and digests of the base as the run had it. With it a merge and the doctor tell
    another base. What nothing proves is named in ``Manifest.unknown``.

    Args:
        adapter: The folder that PEFT saved the adapter in.
        base: The folder of the base, or its name on the hub; ``None`` for the one that
            the adapter's config names.
        quantization_config: How the base was quantized in training, as for
            ``merge_checkpoint``; ``None`` for what the base's own config says, or the one
            beside the adapter, and not known where these say nothing. The dtypes that
            4-bit layers compute in and are stored in change no weight: those given are
            not compared.
        dtype: The dtype of what is not quantized; ``None`` for the config's.
        device: The device that was trained on: a GPU and a CPU may quantize a last bit
            differently; ``None`` for the accelerator if there is one, else the CPU.
        trust_remote_code: Run the code that the base's folder brings along.

    Returns:
        The manifest that was written.

    Raises:
        ConfigError: There is no base or adapter, the adapter does not belong to the
            base, or there is a manifest already.
        ExportError: It cannot be written.

    Example:
        >>> from kbitwrap import stamp_adapter
        >>> stamp_adapter("/no/adapter", "/no/such/base")
        Traceback (most recent call last):
        ...
        kbitwrap.errors.ConfigError: there is no adapter_config.json ... in '/no/adapter': ...
    """
    saved = read_adapter(adapter)
    path = saved.folder / MANIFEST_NAME
    if path.exists():
        raise ConfigError(
            f"{path}: the run has its manifest; it is not replaced. Delete this file to stamp again, unless it was "
            "written in training, when it says more than a stamp"
        )

    if base is None:
        base = named_base(saved)

    if device is None:
        device = accelerator_type() or "cpu"

    unknown = list(_UNKNOWN)
    quantization = find_quantization(
        base, quantization_config, None, saved, trust_remote_code
    )
    if quantization.source == UNKNOWN:
        unknown.append(QUANTIZATION)
        quantization = UNQUANTIZED
    if quantization.source == GIVEN:
        unknown.append(CONFIRMED)
    is_given = quantization_config not in (None, False)
    if is_given and quantization.config.get("load_in_4bit"):
        unknown.append(DTYPES_OF_4_BITS)

    with torch.random.fork_rng(devices=[]), plain_mode():  # loading draws numbers
        trained = load_base(
            base, saved, None, quantization, dtype, device, trust_remote_code
        )
        trained.model.requires_grad_(False)  # as PEFT leaves the base of an adapter
        preparation = Preparation.recording(trained.model)
        manifest = Manifest.of(
            preparation, unknown=tuple(unknown), world_size=1, visible_devices=1
        )
        adapted_base(trained, saved)  # which raises for an adapter of another base
    manifest.save(path)
    return manifest
