"""Models by name, and how they are quantized: one that is nowhere is refused at once, without torch and retries."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .. import ConfigError, UnsupportedModelError
from .console import Doing, InputError, first_line, quiet_libraries, say
from .usage import DEFAULT_QUANT

_TIMEOUT = 3.0  # seconds for a hub to answer
_OFFLINE = "HF_HUB_OFFLINE"
_QUANTIZATION = "quantization_config"
BITSANDBYTES = "bitsandbytes"
_ADAPTER_CONFIG = "adapter_config.json"
_IN_OPTIONS = {
    r"^optimizer:": "--optimizer:",
    r"^args\.use_liger_kernel:": "--liger:",
    r"^engine:": "--engine:",
    r"quantization_config=\w+\(dequantize=True\)": "--quant none",
    r"batch_size and seq_len:": "--batch and --seq:",
    r"\(seq_len\)": "(--seq)",
}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class NoModelError(InputError):
    """A model that is nowhere."""


@contextlib.contextmanager
def models(name: str | None, trust_remote_code: bool = False) -> Iterator[None]:
    """See that a model is here, in the cache, or on a hub that answers; while none does, nothing asks it again.

    Args:
        name: A folder, a file or a name; ``None`` for no model.
        trust_remote_code: Whether the code that it brings along is run: that is said.

    Yields:
        Nothing.

    Raises:
        InputError: The model is nowhere.
    """
    if name is None:
        yield
        return
    is_here = _is_here(name)
    if trust_remote_code:
        say(f"--trust-remote-code: code that {name!r} brings along is run")
    if is_here:
        yield
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise NoModelError(
            f"there is no model at {name!r}, and the hub has no such names"
        ) from error
    was_offline = constants.HF_HUB_OFFLINE
    if not was_offline and _answers(constants.ENDPOINT):
        yield
        return
    if not isinstance(cached, str):
        why = f"{constants.ENDPOINT} cannot be reached"
        if was_offline:
            why = f"{_OFFLINE} is set"
        raise NoModelError(
            f"there is no model {name!r}: no folder here, nothing in the cache of the hub, and {why}"
            f"{_neighbour(Path(name))}"
        )
    before = os.environ.get(_OFFLINE)
    # read when libraries are imported, or at every use: both
    constants.HF_HUB_OFFLINE = True
    os.environ[_OFFLINE] = "1"
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        del os.environ[_OFFLINE]
        if before is not None:
            os.environ[_OFFLINE] = before


@contextlib.contextmanager
def working(
    model: str | None, what: str, trust_remote_code: bool = False
) -> Iterator[Doing]:
    """See that a model is to be had, and work on it: with a line of progress, and libraries that are quiet.

    Args:
        model: As for ``models``, as is ``trust_remote_code``.
        what: What is being done, in a few words.
        trust_remote_code: Whether the code that the model brings along is run.

    Yields:
        The line of progress.

    Raises:
        InputError: The model is nowhere.
    """
    with models(model, trust_remote_code), Doing(what) as doing, quiet_libraries():
        yield doing


def quantization_in_training(quant: str | None, dtype: str | None) -> Any:
    """Make what `merge_checkpoint` and others take for how a base was quantized.

    Args:
        quant: The word for a ``QuantKind``, or ``None`` where it was not told.
        dtype: The dtype that 4-bit layers compute in; ``None`` for the library's
            default.

    Returns:
        The config; ``False`` of ``"none"``, and ``None`` where nothing was told.
    """
    if quant is None:
        return None
    from ..model.quantization import bitsandbytes_config

    return bitsandbytes_config(quant, dtype) or False


def _is_here(name: str) -> bool:
    """Whether a model is a folder or a file; raises where it can be neither, nor a name on the hub."""
    if not name or "\0" in name:
        raise InputError(
            f"expected a folder, a config.json or a name on the hub such as org/model, found {name!r}"
        )
    path = Path(name)
    if os.path.exists(name):
        _check_model(path)
        return True
    if _NAME.fullmatch(name) is None or name.endswith(".json"):
        raise NoModelError(f"there is no model at {name!r}{_neighbour(path)}")
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
        base = _base_of(folder / _ADAPTER_CONFIG)
        raise NoModelError(
            f"{str(path)!r} is an adapter: give the model that it was trained on{base}"
        )
    if path.is_dir():
        raise NoModelError(
            f"there is no config.json in {str(path)!r}: expected the folder of a model"
        )
    if path.suffix != ".json":
        raise InputError(
            f"expected a folder, a config.json or a name on the hub, found the file {str(path)!r}"
        )


def _base_of(config: Path) -> str:
    """The base that the config of an adapter names, in words; empty where it names none."""
    try:
        base = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return f", {base!r}" if isinstance(base, str) and base else ""


def _neighbour(path: Path) -> str:
    """A suggestion: the path beside the one that was typed that is most like it; empty where none is."""
    if not os.path.isdir(path.parent) or not os.access(path.parent, os.R_OK):
        return ""
    alike = get_close_matches(path.name, os.listdir(path.parent), n=1)
    return f"; did you mean {str(path.with_name(alike[0]))!r}?" if alike else ""


def _answers(endpoint: str) -> bool:
    """Whether there is a hub, whatever it answers: one attempt of a few seconds, through a proxy if there is one."""
    found: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(endpoint, method="HEAD"), timeout=_TIMEOUT
            ):
                found.append(True)
        except urllib.error.HTTPError:
            found.append(True)
        except (OSError, ValueError) as error:
            # A certificate that only the hub's own client knows, say, is an answer too.
            reason = getattr(error, "reason", error)
            found.append("SSL" in type(reason).__name__)

    # looking a name up has no time limit of its own
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_TIMEOUT + 1)
    return any(found)


@dataclass(frozen=True)
class Quantization:
    """How a model is to be quantized when it is loaded.

    Attributes:
        name: What to call it.
        config: The config for ``from_pretrained``; ``None`` for the model's own, or for
            none.
    """

    name: str
    config: Any


def choose_quantization(model: str, quant: str | None, dtype: str) -> Quantization:
    """Choose how a model is quantized: one that is quantized already keeps its own, or is dequantized.

    Args:
        model: A folder, a ``config.json``, or a name on the hub.
        quant: The word for a ``QuantKind``; ``None`` for the model's own, or else nf4.
        dtype: The dtype that 4-bit layers compute in.

    Returns:
        The choice.

    Raises:
        InputError: The model is quantized already, otherwise than asked for.
    """
    from ..model.quantization import bitsandbytes_config

    own = own_quantization(model)
    if own is None:
        name = quant or DEFAULT_QUANT
        return Quantization(name, bitsandbytes_config(name, dtype))
    method = str(own.get("quant_method", BITSANDBYTES))
    if quant is None or (method == BITSANDBYTES and quant != "none"):
        return Quantization(method, None)
    dequantizing = _dequantizing(own)
    instead = ""
    if dequantizing is not None:
        if quant == "none":
            return Quantization("none", dequantizing)
        instead = ", or give --quant none for its dequantized weights"
    raise InputError(
        f"--quant {quant}: {model!r} is quantized already, by {method}: leave --quant out{instead}"
    )


def described_by(model: str, trust_remote_code: bool) -> Any:
    """The source that the library builds a model from.

    Args:
        model: A folder, a ``config.json``, or a name on the hub.
        trust_remote_code: Run the code that it brings along.

    Returns:
        The same, or the config that its own code reads.

    Raises:
        InputError: That code cannot read it.
    """
    if not trust_remote_code:
        return model
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=True)
    except Exception as error:  # whatever the code of others raises
        raise InputError(
            f"cannot read a config from {model!r}: {first_line(error)}"
        ) from error


def own_quantization(model: str) -> dict[str, Any] | None:
    """Read the quantization that the config of a model names.

    Args:
        model: A folder, a ``config.json``, or a name on the hub.

    Returns:
        It; ``None`` where the model is not quantized, or the config cannot be read.
    """
    from transformers import PretrainedConfig

    try:
        content = PretrainedConfig.get_config_dict(model)[0]
    except Exception:  # whatever transformers and the JSON parser raise: it is read again, and told then
        return None
    if not isinstance(content, dict):
        return None
    text = content.get("text_config")
    nested = text.get(_QUANTIZATION) if isinstance(text, dict) else None
    own = content.get(_QUANTIZATION) or nested
    return own if isinstance(own, dict) else None


def _dequantizing(own: dict[str, Any]) -> Any:
    """The config by which weights are dequantized when they are loaded; ``None`` where transformers does not."""
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
    except (ConfigError, UnsupportedModelError) as error:
        said = first_line(error)
        for pattern, words in _IN_OPTIONS.items():
            said = re.sub(pattern, words, said)
        if isinstance(error, UnsupportedModelError):
            said = f"{what}: {said}"
        raise InputError(said) from error
