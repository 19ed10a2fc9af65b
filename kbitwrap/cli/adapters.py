"""The files of an adapter, read before torch is imported: whether it is there, its base, and its quantization."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .console import InputError
from .hub import BITSANDBYTES, own_quantization


def check_adapter(folder: Path) -> None:
    """Refuse an adapter that is not there, before a library is imported for it.

    Args:
        folder: What was typed for it.

    Raises:
        InputError: There is no folder, or no adapter in it.
    """
    if not folder.exists():
        raise InputError(
            f"there is no folder {str(folder)!r}: ADAPTER is the folder of a saved adapter"
        )
    if not (folder / "adapter_config.json").is_file():
        raise InputError(
            f"there is no adapter_config.json in {str(folder)!r}: ADAPTER is the folder of a saved adapter"
        )


def named_base(adapter: Path) -> str | None:
    """Find the base that the config of an adapter names.

    Args:
        adapter: The adapter's folder.

    Returns:
        The base; ``None`` where the config names none, or cannot be read, of which the
        library says what is wrong.
    """
    try:
        config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
        name = config["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) and name else None


def is_unrecorded(base: str, adapter: Path) -> bool:
    """Find out whether no config says how a base was quantized in training.

    Args:
        base: Its folder, or its name.
        adapter: The adapter's folder, where axolotl and others save the model's config.

    Returns:
        Whether neither says it.
    """
    if own_quantization(base) is not None:
        return False
    if not (adapter / "config.json").is_file():
        return True
    beside = own_quantization(os.fspath(adapter))
    return beside is None or beside.get("quant_method", BITSANDBYTES) != BITSANDBYTES
