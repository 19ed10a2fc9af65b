"""How a base was quantized in training, and who says so: the one answer, made from all that may say it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..config import QuantKind, StrPath
from ..errors import ConfigError, ManifestMismatchError
from ..manifest.manifest import Manifest
from ..model.pretrained import as_plain, own_settings, read_config
from ..model.quantization import kind_of
from ..tensors.dtypes import find_dtype
from .adapters import BASE_MODEL, SavedAdapter
from .reader import recorded_quantization

QUANTIZATION = "how the base was quantized in training"
"""The words in ``unknown`` of a manifest that was made afterwards, where nothing said how the base was quantized."""
CONFIRMED = "whether the quantization that was given is that of the training"
"""The words in it where only the caller said how the base was quantized."""
OF_BASE = "the base's config.json says"
OF_MANIFEST = "the manifest says"
BESIDE_ADAPTER = "the config.json beside the adapter says"
GIVEN = "the caller said, and nothing recorded confirms"
STAMPED = "the caller said when the manifest was made, and nothing recorded confirms"
OF_MERGE = "the merged checkpoint's config.json says"
FITTED = "the checkpoint fits"
UNKNOWN = "nothing says"
_COMPUTE_DTYPE = "bnb_4bit_compute_dtype"


class BaseQuantization(NamedTuple):
    """The quantization of a base in training, and who says so.

    Attributes:
        config: The config for ``from_pretrained``, as plain values; empty of a base
            that was not quantized.
        source: Who says so: one of the constants of this module, to follow "which" in a
            sentence.
    """

    config: Mapping[str, Any]
    source: str

    @property
    def kind(self) -> QuantKind | None:
        """The kind of quantization; ``None`` of one that has no word."""
        return kind_of(self.config)

    @property
    def form(self) -> str:
        """The form of the base's weights, in words."""
        if self.kind is None:
            return "quantized"
        return "as they are" if self.kind is QuantKind.NONE else f"in {self.kind}"


# as a caller would say it: `load_base` takes it without a question
UNQUANTIZED = BaseQuantization({}, GIVEN)


def run_on_original(
    quantization: BaseQuantization, record: Manifest | None, dtype: Any
) -> tuple[Manifest | None, BaseQuantization, Any]:
    """Return the record, quantization and dtype by which `load_base` loads the base's original weights.

    Raise `ConfigError` where the base was saved quantized.
    """
    if quantization.source == OF_BASE:
        raise ConfigError(
            "the base was saved quantized: its original weights are not here"
        )

    if dtype is None and record is not None:
        dtype = record.model.dtype
    return None, UNQUANTIZED, dtype


def find_quantization(
    base: StrPath,
    given: Any,
    manifest: Manifest | None,
    saved: SavedAdapter | None,
    trust_remote_code: bool = False,
) -> BaseQuantization:
    """Find out how a base was quantized in training: the first source that says it counts.

    These are, in this order, the base's own config, which loading takes whatever else is
    given, the manifest, the config beside the adapter, and the caller.

    Args:
        base: The base.
        given: The config that the caller gave; ``False`` for none, ``None`` for not known.
        manifest: The manifest of the run, or ``None``.
        saved: The adapter, or ``None``.
        trust_remote_code: Run the code that the base's folder brings along.

    Raises:
        ConfigError: A config says otherwise than the caller, or the base has none.
        ManifestMismatchError: The manifest records another kind than was given.
    """
    if os.path.isfile(base):
        raise ConfigError(
            f"cannot load a model from the file {os.fspath(base)!r}: give its folder"
        )

    given = as_plain(given)
    if given not in (None, False) and not isinstance(given, dict):
        raise ConfigError(
            "quantization_config: expected a config of transformers such as BitsAndBytesConfig, False for none, or "
            f"None, found {given!r}"
        )

    try:
        own = own_quantization(base, trust_remote_code)
    except ConfigError as error:
        is_named = saved is not None and base == saved.config.get(BASE_MODEL)
        if not is_named or os.path.exists(base):
            raise
        raise ConfigError(
            f"{error}; the config of the adapter names this base: give the base that is here: "
            "--base DIR, or for merge DIR before the adapter"
        ) from error

    if own is not None:
        _refuse_other(f"the base {os.fspath(base)!r}", own, given)
        return BaseQuantization(own, OF_BASE)

    if manifest is not None and QUANTIZATION not in manifest.unknown:
        source = STAMPED if CONFIRMED in manifest.unknown else OF_MANIFEST
        if given is None:
            config = recorded_quantization(manifest) or {}
            return BaseQuantization(config, source)

        recorded = manifest.model.quantization.config
        kinds = kind_of(recorded), kind_of(given or {})
        if None not in kinds and kinds[0] is not kinds[1]:
            raise ManifestMismatchError(
                f"the manifest records {kinds[0]} as the quantization of the base in training, and {kinds[1]} was "
                "given",
                different={"": {"quantization": kinds}},
            )

        # The manifest confirms the kind of what was given, which is taken: its other
        # settings are compared after loading. Only the compute dtype, which changes no
        # weight, is the recorded one.
        config = dict(given or {})
        compute_dtype = recorded.get(_COMPUTE_DTYPE)
        config.pop(_COMPUTE_DTYPE, None)
        if given and compute_dtype is not None:
            config[_COMPUTE_DTYPE] = compute_dtype
        return BaseQuantization(config, source)

    if saved is not None and saved.config_of_model:
        beside = saved.config_of_model["quantization_config"]
        _refuse_other(f"the config.json beside {saved.name}", beside, given)
        return BaseQuantization(beside, BESIDE_ADAPTER)

    return BaseQuantization(given or {}, UNKNOWN if given is None else GIVEN)


def own_quantization(
    base: StrPath, trust_remote_code: bool = False
) -> dict[str, Any] | None:
    """Read the quantization config of a base that was saved quantized; ``None`` of another.

    Raise `ConfigError` where there is no base, or its config cannot be read.
    """
    own = own_settings(read_config(base, trust_remote_code))
    return as_plain(own)  # type: ignore[no-any-return]


def _refuse_other(holder: str, recorded: Mapping[str, Any], given: Any) -> None:
    """Raise where a config records another quantization than was given; dtypes change no weight."""
    differing = []
    for name, value in (given or {}).items():
        is_dtype = find_dtype(value) is not None
        expected = recorded.get(name, value)  # what is not recorded is no difference
        if value not in (None, expected) and not is_dtype:
            differing.append(f"{name}: {recorded[name]!r}, given: {value!r}")

    if given is False or differing:
        raise ConfigError(
            f"{holder} has a quantization of its own, and it is not the one given "
            f"({'; '.join(differing) or 'none'}): leave that out (quantization_config), or give the base "
            "that was trained on"
        )
