"""The files of an adapter, read before torch is imported: whether it is there, its base, and its quantization."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .console import InputError
from .hub import BITSANDBYTES, NoModelError, own_quantization

_CONFIG = "adapter_config.json"
_EXPECTED = "ADAPTER is the folder of a saved adapter"


def check_adapter(folder: Path) -> None:
    """Refuse an adapter that is not there, before a library is imported for it.

    Args:
        folder: What was typed for it.

    Raises:
        InputError: There is no folder, or no adapter in it.
    """
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {str(folder)!r}: {_EXPECTED}")
    if is_adapter(folder):
        return
    holds = ", which holds a model" if (folder / "config.json").is_file() else ""
    inside = _adapters_in(folder)
    such_as = f", such as {str(inside[-1])!r}" if inside else ""
    raise InputError(
        f"there is no {_CONFIG} in {str(folder)!r}{holds}: {_EXPECTED}{such_as}"
    )


def is_adapter(folder: Path) -> bool:
    """Find out whether a folder is that of a saved adapter.

    Args:
        folder: The folder.

    Returns:
        Whether the config of an adapter is in it.
    """
    return (folder / _CONFIG).is_file()


def _adapters_in(folder: Path) -> list[Path]:
    """The folders of adapters in a folder, by the number in their names: the newest checkpoint comes last."""
    found = [config.parent for config in folder.glob(f"*/{_CONFIG}")]
    return sorted(found, key=_number_of)


def _number_of(folder: Path) -> int:
    numbers = re.findall(r"\d+", folder.name)
    return int(numbers[-1]) if numbers else -1


def named_base(adapter: Path) -> str | None:
    """Find the base that the config of an adapter names.

    Args:
        adapter: The adapter's folder.

    Returns:
        The base; ``None`` where the config names none, or cannot be read, of which the
        library says what is wrong.
    """
    try:
        config = json.loads((adapter / _CONFIG).read_text("utf-8"))
        name = config["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) and name else None


@contextlib.contextmanager
def asking_for_base(is_named: bool) -> Iterator[None]:
    """Ask for the base where the one that the config of an adapter names is nowhere.

    Args:
        is_named: Whether the base is named by a config, and was not typed.

    Yields:
        Nothing.

    Raises:
        InputError: The base that the config names is nowhere.
    """
    try:
        yield
    except NoModelError as error:
        if not is_named:
            raise
        raise InputError(
            f"{error}; the config of the adapter names it: give BASE"
        ) from error


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
