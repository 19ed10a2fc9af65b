"""The configs of a written model: the base's own files, with what differs from them.

transformers writes the fields of its own version. Other clients read those of the base's
file, and compute with their defaults, without an error, where one is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
# The names in transformers 5 of fields that files may have by an older one.
_RENAMED = {"rope_parameters", "num_local_experts"}
_DTYPES = {"dtype", "torch_dtype"}
_USE_CACHE = "use_cache"
_Fields = dict[str, Any]


def keep_base_configs(model: Any, folder: Path) -> None:
    """Make the configs of a saved model the files of its base, with what differs.

    Where no file of the base is there, the config gets old names beside the new ones.
    """
    config = vars(model).get("config")
    generation_config = vars(model).get("generation_config")
    for name, live in {_CONFIG: config, _GENERATION_CONFIG: generation_config}.items():
        path = folder / name
        if not path.is_file() or not hasattr(live, "from_dict"):
            continue
        source = getattr(config, "_name_or_path", None)
        written = json.loads(path.read_text("utf-8"))
        fields = _base_fields(live, source, name)
        if fields is None:
            fields = _with_old_names(live, written)
        if fields != written:
            text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
            path.write_text(text, encoding="utf-8")


def _base_fields(live: Any, source: Any, name: str) -> _Fields | None:
    """Return the fields of a base's file, with what differs in the config of a model.

    The file is in the folder that the model was loaded from, or in the hub's cache.
    ``None`` is returned where there is none, or it is another model's: its kind, its
    positions or its experts are others.
    """
    path = cached_path(source, name)
    file = None  # what lies there by now may be anything
    with contextlib.suppress(OSError, ValueError):
        file = None if path is None else json.loads(path.read_text("utf-8"))

    # all of the file is of the config's kind, or a part such as ``text_config``
    after = _fields_of(live)
    own = before = None
    for part in [file, *file.values()] if isinstance(file, dict) else []:
        is_part = isinstance(part, dict) and own is None
        if is_part and part.get("model_type") == after.get("model_type"):
            own, before = part, _read(live, part)

    if own is None or before is None:
        return None
    after.pop(_USE_CACHE, None)  # a Trainer turns it off, or adds it
    if _USE_CACHE in before:
        after[_USE_CACHE] = before[_USE_CACHE]
    try:
        fields = _changed(own, before, after, _DTYPES & own.keys() or _DTYPES)
    except LookupError:
        return None
    return fields if _read(live, fields) == after else None


def cached_path(source: Any, name: str) -> Path | None:
    """Find a file of a model in its folder, or in the hub's cache; ``None`` where it is in neither."""
    from transformers.utils.hub import cached_file

    # a folder that is gone is no name on the hub
    with contextlib.suppress(OSError, ValueError):
        found = source and cached_file(
            os.fspath(source),
            name,
            local_files_only=True,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return Path(found) if found else None
    return None


def _fields_of(config: Any) -> _Fields:
    """Return the public fields of a config, as JSON has them."""
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _read(live: Any, fields: _Fields) -> _Fields | None:
    """Return the public fields that the class of a config reads from a file's; ``None`` where it cannot."""
    own_copy = json.loads(json.dumps(fields), object_hook=_decoded)
    try:
        return _fields_of(type(live).from_dict(own_copy))
    except Exception:  # of a class that may be anyone's
        return None


def _decoded(value: _Fields) -> Any:
    """Return a number that is not finite, as transformers writes it into JSON; else the value itself."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _changed(
    own: _Fields, before: _Fields, after: _Fields, dtypes: set[str]
) -> _Fields:
    """Return a file's fields, with what differs between two configs; `dtypes` names the dtype.

    ``LookupError`` is raised where the positions or the experts are another model's.
    """
    fields = dict(own)
    for name in before.keys() | after.keys():
        part, old, new = own.get(name), before.get(name), after.get(name)
        if old == new:
            continue
        if name in _RENAMED:
            raise LookupError(name)
        if name not in after:
            fields.pop(name, None)
        elif name in _DTYPES:
            fields.update(dict.fromkeys(dtypes, new))
        elif isinstance(part, dict) and isinstance(old, dict) and isinstance(new, dict):
            fields[name] = _changed(part, old, new, dtypes)
        else:
            fields[name] = new
    return fields


def _with_old_names(live: Any, fields: _Fields) -> _Fields:
    """Return the fields of a config, also under the old names that its class reads as the same."""
    for name, part in vars(live).items():
        if hasattr(part, "from_dict") and isinstance(fields.get(name), dict):
            fields = {**fields, name: _with_old_names(part, fields[name])}

    read = _read(live, fields)
    for name, value in _old_names(fields):
        more = {name: value, **fields}
        if value is not None and read is not None and _read(live, more) == read:
            fields = more
    return fields


def _old_names(fields: _Fields) -> Iterator[tuple[str, Any]]:
    """Yield the fields of transformers 5 as older files may have them."""
    yield "torch_dtype", fields.get("dtype")
    yield "num_experts", fields.get("num_local_experts")

    rope = fields.get("rope_parameters") or {}
    local = rope.get("sliding_attention") or {}
    rope = dict(rope.get("full_attention") or rope)
    theta = rope.pop("rope_theta", None)
    factor = rope.pop("partial_rotary_factor", None)
    yield from dict.fromkeys(("rope_theta", "rotary_emb_base"), theta).items()
    yield from dict.fromkeys(("partial_rotary_factor", "rotary_pct"), factor).items()
    yield "rope_local_base_freq", local.get("rope_theta")
    if rope.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in rope.items() if key not in fields}
        if "type" in scaling:  # older yet, and refused where both are there
            del scaling["rope_type"]
        yield "rope_scaling", scaling
