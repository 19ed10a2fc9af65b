"""Adapters that PEFT saved: read, refused where PEFT does not know what they say, and put on a base."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..export.adapters import parameter_name
from ..model.tree import join
from ..model.wrappers import canonical_fqn
from ..reports import first_of, shown
from .reader import StoredTensor, adapter_file, read_json, read_tensors

_RANKS = ("r", "init_r", "num_virtual_tokens")
# What Unsloth adds to a config: how the columns of ``lora_B`` lie for a stack of
# experts, and the same by parameter.
_LAYOUT, _DETAIL = "lora_B_layout", "unsloth_fused_expert_lora"
_BY_RANK = "rank_major"  # PEFT's own: of each rank the columns of all experts
_BY_EXPERT = "grouped_by_expert"  # of each expert the columns of all ranks
_NO_VALUES: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter that PEFT saved."""

    folder: Path
    config: Mapping[str, Any]  # the content of ``adapter_config.json``
    tensors: Mapping[str, StoredTensor]  # by their names in the file

    @property
    def name(self) -> str:
        """How a message names it."""
        return f"the adapter in {os.fspath(self.folder)!r}"

    @property
    def held(self) -> set[str]:
        """The canonical names of its tensors; that of a copy of a base's tensor is that tensor's."""
        return {canonical_fqn(name) for name in self.tensors}


def read_adapter(folder: Path) -> SavedAdapter:
    """Read the headers of an adapter; `ConfigError` where it is damaged, or says what PEFT does not know."""
    file = adapter_file(folder)
    path = folder / "adapter_config.json"
    if file is None or not path.is_file():
        raise ConfigError(
            f"there is no adapter_config.json with adapter_model.safetensors in {os.fspath(folder)!r}"
        )
    saved = SavedAdapter(folder, read_json(path), read_tensors(file)[0])
    largest = 1024
    for stored in saved.tensors.values():
        largest = max([largest, *stored.shape])
    for rank in _ranks(saved.config):
        # as much would be allocated before it is compared
        if isinstance(rank, (int, float)) and rank > largest:
            raise ConfigError(
                f"{saved.name} has a rank of {shown(rank)}, and no such tensor"
            )
    _refuse_unknown_keys(saved)
    _layout_of(saved, "")
    return saved


def _ranks(config: Mapping[str, Any]) -> list[Any]:
    pattern = config.get("rank_pattern")
    by_layer = pattern.values() if isinstance(pattern, dict) else ()
    return [*map(config.get, _RANKS), *by_layer]


def _refuse_unknown_keys(saved: SavedAdapter) -> None:
    """Name what the installed PEFT would pass over; raise where it may change what the adapter computes."""
    import peft

    kind = str(saved.config.get("peft_type"))
    config_class: Any = peft.PEFT_TYPE_TO_CONFIG_MAPPING.get(kind)  # type: ignore[call-overload]
    if config_class is None:
        raise ConfigError(
            f"{saved.name} is of the type {shown(kind)}, which PEFT {peft.__version__} does not know"
        )
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = {key: value for key, value in saved.config.items() if key not in known}
    for key in ("peft_version", _LAYOUT, _DETAIL):
        unknown.pop(key, None)
    said = [
        f"{key}: {shown(value)}"
        for key, value in unknown.items()
        if value not in _NO_VALUES
    ]
    if said:
        raise ConfigError(
            f"the config of {saved.name} says what PEFT {peft.__version__} does not know, and what it computes may "
            f"depend on it ({first_of(said)}): install the PEFT that wrote it "
            f"({shown(saved.config.get('peft_version'))}), or take out what is only a note"
        )
    if unknown:
        warnings.warn(
            f"the config of {saved.name} has keys without a value that PEFT {peft.__version__} does not know: "
            f"{first_of(sorted(unknown))}",
            UserWarning,
            stacklevel=4,  # the caller of merge_checkpoint
        )


def _layout_of(saved: SavedAdapter, parameter: str) -> str:
    """How the columns of ``lora_B`` lie for a stack of experts; `ConfigError` where it is a way that is not known."""
    detail: Any = saved.config.get(_DETAIL) or {}
    try:
        of_a = detail.get("lora_A_layout", _BY_EXPERT)
        of_b = (
            detail.get("parameters", {})
            .get(parameter, saved.config)
            .get(_LAYOUT, _BY_RANK)
        )
    except AttributeError:
        of_a, of_b = detail, _BY_RANK
    for key, layout, layouts in (
        ("lora_A_layout", of_a, (_BY_EXPERT,)),
        (_LAYOUT, of_b, (_BY_RANK, _BY_EXPERT)),
    ):
        if layout not in layouts:
            raise ConfigError(
                f"the config of {saved.name} says {key}: {shown(layout)}; expected "
                f"{' or '.join(map(repr, layouts))}: how it lays out experts is not known, so it cannot be merged"
            )
    return str(of_b)


def with_adapter(model: nn.Module, saved: SavedAdapter) -> nn.Module:
    """The model with the adapter on it; every tensor saved has its place there, and every place its tensor."""
    from peft import PeftModel, get_peft_model_state_dict

    known = set(model.state_dict())
    _refuse_unknown_stacks(model, saved)
    with warnings.catch_warnings():
        # the comparison below names them
        warnings.filterwarnings("ignore", r"Found missing adapter keys", UserWarning)
        # named by `read_adapter`
        warnings.filterwarnings("ignore", r"Unexpected keyword arguments", UserWarning)
        try:
            adapted: Any = PeftModel.from_pretrained(model, os.fspath(saved.folder))
            expected = set(
                get_peft_model_state_dict(adapted, save_embedding_layers=False)
            )
        except Exception as error:  # whatever PEFT raises, the adapter does not fit
            # torch's second line names a tensor
            why = " ".join(map(str.strip, str(error).split("\n")[:2]))
            raise ConfigError(f"{saved.name} does not fit the base: {why}") from error
    there = set(saved.tensors)
    unknown = [name for name in there - expected if canonical_fqn(name) not in known]
    if unknown:
        raise ConfigError(
            f"{saved.name} has tensors that the base has no place for: {first_of(sorted(unknown))}"
        )
    absent = expected - there
    if absent:
        raise ConfigError(f"{saved.name} lacks tensors: {first_of(sorted(absent))}")
    for layer in adapted.modules():
        name = parameter_name(layer)
        if name is not None and _layout_of(saved, name) == _BY_EXPERT:
            _lay_by_rank(layer)
    return adapted  # type: ignore[no-any-return]


def _lay_by_rank(layer: Any) -> None:
    """Lay the columns of ``lora_B`` as PEFT reads them, where they lie by expert."""
    for factor in layer.lora_B.values():
        weight = factor.weight
        by_expert = weight.data.unflatten(1, (layer.num_experts, -1))
        weight.data = by_expert.transpose(1, 2).flatten(1)


def _refuse_unknown_stacks(model: nn.Module, saved: SavedAdapter) -> None:
    """Raise for an adapter on stacks of experts where another PEFT, or another library, laid them out otherwise."""
    import peft

    version = saved.config.get("peft_version")
    origin = saved.config.get("auto_mapping")
    is_unsloths = isinstance(origin, dict) and "unsloth_fixed" in origin
    is_told = _LAYOUT in saved.config or _DETAIL in saved.config
    for stack, module in _adapted_stacks(model, saved.config.get("target_parameters")):
        if is_unsloths and not is_told:
            raise ConfigError(
                f"{saved.name} is on the stack of experts {stack}, and it is not known how its lora_B lies: it was "
                f"saved by Unsloth without {_LAYOUT}. Add that to its adapter_config.json: {_BY_EXPERT!r} if it "
                f"was trained by a version from before 17 September 2026, else {_BY_RANK!r}"
            )
        is_transposed = bool(getattr(module, "is_transposed", False))
        if _exchanges(version, is_transposed) != _exchanges(
            peft.__version__, is_transposed
        ):
            raise ConfigError(
                f"{saved.name} is on the stack of experts {stack}, where PEFT {version or 'before 0.18'}, which "
                f"saved it, takes its input for its output, other than the installed PEFT {peft.__version__}: "
                "merge with the PEFT that saved it (peft_version in adapter_config.json)"
            )


def _adapted_stacks(model: nn.Module, targets: Any) -> list[tuple[str, nn.Module]]:
    """The stacks of experts that ``target_parameters`` names, by their fqns, each with the module that holds it."""
    if not isinstance(targets, list):
        return []
    ends = tuple(f".{target}" for target in targets)
    found = []
    for fqn, module in model.named_modules():
        for name, parameter in module._parameters.items():
            stack = join(fqn, name)
            if (
                parameter is not None
                and parameter.dim() == 3
                and f".{stack}".endswith(ends)
            ):
                found.append((stack, module))
    return found


def _exchanges(version: Any, is_transposed: bool) -> bool:
    """Whether a version of PEFT takes the second dimension of a stack for its output, not for its input."""
    numbers = [int(text) for text in re.findall(r"\d+", str(version))[:3]]
    if numbers < [0, 19, 0]:
        return False
    if numbers == [0, 19, 0]:
        return is_transposed
    return not is_transposed
