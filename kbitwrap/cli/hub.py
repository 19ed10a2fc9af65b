"""Models by name, and how they are quantized: one that is nowhere is refused at once, without torch and retries."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from unittest import mock

from .. import ConfigError, UnsupportedModelError
from .console import Doing, InputError, first_line, quiet_libraries, say
from .usage import DEFAULT_QUANT

_TIMEOUT = 3.0  # seconds for a hub to answer
_OFFLINE = "HF_HUB_OFFLINE"
_BITSANDBYTES = "bitsandbytes"
_ADAPTER_CONFIG = "adapter_config.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


NAMED_BY_ADAPTER = "; the config of the adapter names it: give BASE"
"""The hint to a base that is nowhere, and that nobody typed."""


@contextlib.contextmanager
def working(
    model: str | None, what: str, trust_remote_code: bool = False, hint: str = ""
) -> Iterator[Doing]:
    """See that a model is to be had, and work on it: with a line of progress, and libraries that are quiet.

    While no hub answers, nothing asks it again.

    Args:
        model: A folder, a file or a name; ``None`` for no model.
        what: What is being done, in a few words.
        trust_remote_code: Whether the code that the model brings along is run: that is
            said.
        hint: What is said of a model that is nowhere, too.

    Yields:
        The line of progress.

    Raises:
        InputError: The model is nowhere.
    """
    with contextlib.ExitStack() as stack:
        try:
            if model is not None and not _is_here(model):
                _expect_in_cache_or_hub(model, stack)
        except InputError as error:
            raise InputError(f"{error}{hint}") from error
        if model is not None and trust_remote_code:
            say(f"--trust-remote-code: code that {model!r} brings along is run")
        with Doing(what) as doing, quiet_libraries():
            yield doing


def _expect_in_cache_or_hub(name: str, stack: contextlib.ExitStack) -> None:
    """Refuse a model that neither the cache nor a hub has; stay offline until the stack ends where no hub answers."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise InputError(
            f"there is no model at {name!r}, and the hub has no such names"
        ) from error
    was_offline = constants.HF_HUB_OFFLINE
    if not was_offline and _answers(constants.ENDPOINT):
        return
    if not isinstance(cached, str):
        why = f"{constants.ENDPOINT} cannot be reached"
        if was_offline:
            why = f"{_OFFLINE} is set"
        raise InputError(
            f"there is no model {name!r}: no folder here, nothing in the cache of the hub, and {why}"
            f"{_neighbour(Path(name))}"
        )
    # read when libraries are imported, or at every use: both
    stack.enter_context(mock.patch.object(constants, _OFFLINE, True))
    stack.enter_context(mock.patch.dict(os.environ, {_OFFLINE: "1"}))


def _answers(endpoint: str) -> bool:
    """Ask whether there is a hub, whatever it answers: one attempt of a few seconds, by the hub's own client."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_TIMEOUT)
    except Exception:  # whatever the library raises that the hub asks with
        return False
    return True


def _is_here(name: str) -> bool:
    """Tell whether a model is a folder or a file; refuse what can be neither, nor a name on the hub."""
    if not name:
        raise InputError(
            f"expected a folder, a config.json or a name on the hub such as org/model, found {name!r}"
        )
    path = Path(name)
    if os.path.exists(name):
        _check_model(path)
        return True
    if _NAME.fullmatch(name) is None or name.endswith(".json"):
        raise InputError(f"there is no model at {name!r}{_neighbour(path)}")
    return False


def _check_model(path: Path) -> None:
    """Refuse a file or a folder that is something else than a model of transformers, and say what to give instead."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (path / "config.json").is_file():
        return
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf"))):
        raise InputError(
            f"{str(path)!r} is a GGUF, which has no config.json: give the model that it was made from"
        )
    is_adapter = path.is_dir() or path.name == _ADAPTER_CONFIG
    if is_adapter and (folder / _ADAPTER_CONFIG).is_file():
        base = named_base(folder)
        named = f", {base!r}" if base else ""
        raise InputError(
            f"{str(path)!r} is an adapter: give the model that it was trained on{named}"
        )
    if path.is_dir():
        raise InputError(
            f"there is no config.json in {str(path)!r}: expected the folder of a model"
        )
    if path.suffix != ".json":
        raise InputError(
            f"expected a folder, a config.json or a name on the hub, found the file {str(path)!r}"
        )


def _neighbour(path: Path) -> str:
    """Suggest the path beside the one that was typed that is most like it; ``""`` where none is."""
    if not os.path.isdir(path.parent) or not os.access(path.parent, os.R_OK):
        return ""
    alike = get_close_matches(path.name, os.listdir(path.parent), n=1)
    return f"; did you mean {str(path.with_name(alike[0]))!r}?" if alike else ""


# ----------------------------------------------------------------------------------------------------
# Adapters.
# ----------------------------------------------------------------------------------------------------


def is_adapter(folder: Path) -> bool:
    """Find out whether the config of an adapter is in a folder."""
    return os.path.isfile(folder / _ADAPTER_CONFIG)


def check_adapter(folder: Path) -> None:
    """Refuse an adapter that is not there, before a library is imported for it.

    Raises:
        InputError: There is no folder, or no adapter in it; one that lies in a folder of
            it is named, the newest checkpoint of a run.
    """
    expected = "ADAPTER is the folder of a saved adapter"
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {str(folder)!r}: {expected}")
    if is_adapter(folder):
        return
    said = f"there is no {_ADAPTER_CONFIG} in {str(folder)!r}"
    if (folder / "config.json").is_file():
        said += ", which holds a model"
    inside = [config.parent for config in folder.glob(f"*/{_ADAPTER_CONFIG}")]
    numbered = sorted(inside, key=lambda path: (len(path.name), path.name))
    if numbered:
        expected += f", such as {str(numbered[-1])!r}"
    raise InputError(f"{said}: {expected}")


def named_base(adapter: Path) -> str | None:
    """Read which base the config of an adapter names, before a library is imported for it.

    Args:
        adapter: The adapter's folder.

    Returns:
        The base; ``None`` where the config names none, or cannot be read, of which the
        library says what is wrong.
    """
    try:
        config = json.loads((adapter / _ADAPTER_CONFIG).read_text("utf-8"))
        name = config["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) and name else None


# ----------------------------------------------------------------------------------------------------
# Quantization.
# ----------------------------------------------------------------------------------------------------


def quantization_in_training(quant: str | None, dtype: str | None) -> Any:
    """Make what `merge_checkpoint` and others take for how a base was quantized.

    Args:
        quant: The word for a ``QuantKind``, or ``None`` where it was not told.
        dtype: The dtype that 4-bit layers compute in; ``None`` for the library's
            default.

    Returns:
        The config; ``False`` of ``"none"``, and ``None`` where nothing was told.
    """
    from ..model.quantization import bitsandbytes_config

    return None if quant is None else bitsandbytes_config(quant, dtype) or False


def choose_quantization(
    source: Any, name: str, quant: str | None, dtype: str
) -> tuple[str, Any]:
    """Choose how a model is quantized: one that is quantized already keeps its own, or is dequantized.

    Args:
        source: What the model is built from.
        name: How it was named.
        quant: The word for a ``QuantKind``; ``None`` for the model's own, or else nf4.
        dtype: The dtype that 4-bit layers compute in.

    Returns:
        What to call the quantization, and the config for ``from_pretrained``, ``None``
        for the model's own, or for none.

    Raises:
        InputError: The model is quantized already, otherwise than asked for.
    """
    from ..checkpoints.base_quantization import own_quantization
    from ..model.quantization import bitsandbytes_config

    own = own_quantization(source)
    if own is None:
        kind = quant or DEFAULT_QUANT
        return str(kind), bitsandbytes_config(kind, dtype)
    method = str(own.get("quant_method", _BITSANDBYTES))
    if quant is None or (method == _BITSANDBYTES and quant != "none"):
        return method, None
    dequantizing = _dequantizing(own)
    instead = ""
    if dequantizing is not None:
        if quant == "none":
            return "none", dequantizing
        instead = ", or give --quant none for its dequantized weights"
    raise InputError(
        f"--quant {quant}: {name!r} is quantized already, by {method}: leave --quant out{instead}"
    )


def _dequantizing(own: dict[str, Any]) -> Any:
    """Make the config by which weights are dequantized when they are loaded; ``None`` where transformers does not."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        settings = AutoQuantizationConfig.from_dict(dict(own))
    except Exception:  # whatever the config of a method raises that is damaged, not known, or not installed
        return None
    if not hasattr(settings, "dequantize"):
        return None
    settings.dequantize = True
    return settings


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Say what the library refuses in one line, with options in place of arguments.

    Args:
        what: What cannot be done with a model of such a kind.

    Raises:
        InputError: A setting is invalid, or the model is not of a kind that it can be
            done with.
    """
    try:
        yield
    except ConfigError as error:
        raise InputError(first_line(error)) from error
    except UnsupportedModelError as error:
        raise InputError(f"{what}: {first_line(error)}") from error
