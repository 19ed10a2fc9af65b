"""Adapters that PEFT saved: read, refused where PEFT does not know what they say, and put on a base."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import StrPath
from ..errors import ConfigError
from ..model.quantization import is_of_another_library, is_quantized_layer
from ..model.wrappers import canonical_fqn
from ..reports import first_of, in_one_line, shown
from .reader import StoredTensor, adapter_file, read_json, read_tensors

BASE_MODEL = "base_model_name_or_path"
_MOST_RANKS = 1024  # so many are allocated without a tensor of that size
# What Unsloth adds to a config: how the columns of LoRA's factors lie for a stack of
# experts, and the same by parameter.
_LAYOUT_OF_A, _LAYOUT_OF_B = "lora_A_layout", "lora_B_layout"
_DETAIL = "unsloth_fused_expert_lora"
_BY_RANK = "rank_major"  # PEFT's own: of each rank the columns of all experts
_BY_EXPERT = "grouped_by_expert"  # of each expert the columns of all ranks
# one of a list of experts, as transformers had them before it put them in stacks
_EXPERT = re.compile(r"\.experts\.\d+\.")
# an owner and a name: no adapter has a name alone, which may be a folder's
_NAME_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# PEFT's ways to begin an adapter that leave a residual in the base
_REWRITING = ("pissa", "olora", "corda", "loftq", "lora_ga")
# what a Trainer saves beside an adapter in order to go on
_OF_TRAINING = ["checkpoint-*/*", "*.pt", "*.pth", ".*"]
_NO_VALUES: tuple[Any, ...] = (None, False, "", [], {})


def rewrites_base(config: Mapping[str, Any]) -> bool:
    """Return whether PEFT leaves a residual in the base when it makes an adapter with this config."""
    return str(config.get("init_lora_weights")).startswith(_REWRITING)


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter that PEFT saved.

    Attributes:
        folder: Its folder.
        config: The content of ``adapter_config.json``.
        tensors: Its tensors, by their names in the file.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def digest(self) -> str:
        """The SHA-256 of the file of its tensors."""
        digest = hashlib.sha256()
        with open(str(adapter_file(self.folder)), "rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
        return digest.hexdigest()

    @property
    def name(self) -> str:
        """The adapter in the words of a message."""
        return f"the adapter in {os.fspath(self.folder)!r}"

    @property
    def config_of_model(self) -> dict[str, Any]:
        """The config of the quantized model that was trained.

        Some trainers, such as axolotl, save it beside the adapter. Empty where there is
        none, or it does not say how the model was quantized.
        """
        path = self.folder / "config.json"
        if not path.is_file():
            return {}

        config = read_json(path)
        quantization = config.get("quantization_config")
        is_known = isinstance(quantization, dict) and not is_of_another_library(
            quantization
        )
        return config if is_known else {}

    @property
    def held(self) -> set[str]:
        """The canonical names of its tensors.

        That of a copy of a base's tensor is that tensor's.
        """
        return {canonical_fqn(name) for name in self.tensors}


def adapter_folder(adapter: StrPath) -> Path:
    """Return the folder of an adapter, of one on the hub its snapshot, which is in the cache where there is no network.

    Raise `ConfigError` where the hub is asked, and has none.
    """
    from huggingface_hub import snapshot_download

    name = os.fspath(adapter)
    if os.path.exists(name) or not _NAME_ON_HUB.fullmatch(name):
        return Path(name)

    try:
        return Path(snapshot_download(name, ignore_patterns=_OF_TRAINING))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"there is no adapter in a folder {name!r}, and none of that name on the hub: {in_one_line(error)}"
        ) from error


def read_adapter(adapter: StrPath) -> SavedAdapter:
    """Read the headers of an adapter in a folder or on the hub.

    Raise `ConfigError` where it is damaged, or says what PEFT does not know.
    """
    from transformers.trainer_utils import get_last_checkpoint

    folder = adapter_folder(adapter)
    file = adapter_file(folder)
    path = folder / "adapter_config.json"
    if file is None or not os.path.isfile(path):
        # of a Trainer that was not asked to save the model itself
        newest = get_last_checkpoint(folder) if os.path.isdir(folder) else None
        if newest is not None and adapter_file(Path(newest)) is not None:
            raise ConfigError(
                f"{os.fspath(folder)!r} holds no adapter; its newest checkpoint does: give {newest!r}"
            )
        why = "" if os.path.exists(folder) else ": there is no such folder"
        if os.path.isfile(folder / "config.json"):
            why = ": it holds a model, and not what PEFT saves of an adapter"
        raise ConfigError(
            f"there is no adapter_config.json with adapter_model.safetensors in {os.fspath(folder)!r}{why}"
        )

    saved = SavedAdapter(folder, read_json(path), read_tensors(file))
    named = saved.config.get(BASE_MODEL)
    if not isinstance(named, str | None):
        raise ConfigError(
            f"{os.fspath(path)!r}: {BASE_MODEL}: expected a name or a path, found {shown(named)}"
        )

    # PEFT allocates what the config says before anything is compared
    rank = saved.config.get("r")
    sizes = [_MOST_RANKS]
    for stored in saved.tensors.values():
        sizes += stored.shape
    if isinstance(rank, (int, float)) and rank > max(sizes):
        raise ConfigError(
            f"{saved.name} has a rank of {shown(rank)}, and no such tensor"
        )

    _refuse_unknown_keys(saved)
    _layout_of(saved, "")
    return saved


def _refuse_unknown_keys(saved: SavedAdapter) -> None:
    """Raise for what the installed PEFT would pass over, though it may change what the adapter computes."""
    import peft

    peft_type = str(saved.config.get("peft_type"))
    config_class: Any = peft.PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type)  # type: ignore[call-overload]
    if config_class is None:
        raise ConfigError(
            f"{saved.name} is of the type {shown(peft_type)}, which PEFT {peft.__version__} does not know"
        )

    known = {field.name for field in dataclasses.fields(config_class)}
    known.update(["peft_version", _LAYOUT_OF_B, _DETAIL])
    said = []
    for key, value in saved.config.items():
        if key not in known and value not in _NO_VALUES:
            said.append(f"{key}: {shown(value)}")

    if said:
        raise ConfigError(
            f"the config of {saved.name} says what PEFT {peft.__version__} does not know, and what it computes may "
            f"depend on it ({first_of(said)}): install the PEFT that wrote it "
            f"({shown(saved.config.get('peft_version'))}), or take out what is only a note"
        )


def _layout_of(saved: SavedAdapter, parameter: str) -> str:
    """Return how the columns of ``lora_B`` lie for a stack of experts.

    Raise `ConfigError` where it is a way that is not known.
    """
    detail = saved.config.get(_DETAIL) or {}
    fields = detail.get("parameters", {}).get(parameter, saved.config)
    of_a = detail.get(_LAYOUT_OF_A, _BY_EXPERT)
    of_b = fields.get(_LAYOUT_OF_B, _BY_RANK)
    if of_a != _BY_EXPERT or of_b not in (_BY_RANK, _BY_EXPERT):
        raise ConfigError(
            f"the config of {saved.name} says {_LAYOUT_OF_A}: {shown(of_a)} and {_LAYOUT_OF_B}: {shown(of_b)}; "
            f"expected {_BY_EXPERT!r} of the first, and that or {_BY_RANK!r} of the second: how it lays out experts is "
            "not known, so it cannot be merged"
        )

    return str(of_b)


def with_adapter(model: nn.Module, saved: SavedAdapter) -> nn.Module:
    """Put an adapter on a model, and return the adapted model.

    Raise where a tensor saved has no place there, or a place no tensor.
    """
    import peft
    from peft import PeftModel, get_peft_model_state_dict

    folder = os.fspath(saved.folder)
    names_before = getattr(model, "_checkpoint_conversion_mapping", None)
    _refuse_unknown_stacks(model, saved)
    _refuse_other_codes(model, saved)
    _refuse_single_experts(model, saved)
    with warnings.catch_warnings():
        # the comparison below names them
        warnings.filterwarnings("ignore", r"Found missing adapter keys", UserWarning)
        # of Unsloth's keys
        warnings.filterwarnings("ignore", r"Unexpected keyword arguments", UserWarning)
        try:
            adapted: Any = PeftModel.from_pretrained(model, folder)
            given = peft.load_peft_weights(folder, "cpu", key_mapping=names_before)
            # once more, because this says what is read
            loaded: Any = peft.set_peft_model_state_dict(adapted, given)
            places = get_peft_model_state_dict(adapted, save_embedding_layers=False)
            written = {}
            if loaded.unexpected_keys:  # what PEFT itself writes beside the adapter
                written = get_peft_model_state_dict(adapted, save_embedding_layers=True)
        except Exception as error:  # whatever PEFT raises, the adapter does not fit
            said = in_one_line(error).removesuffix(".")
            raise ConfigError(
                f"{saved.name} does not fit the base: {said}; give the base that was trained on, if this is another"
            ) from error

    state = adapted.state_dict()
    unexpected = set(loaded.unexpected_keys)
    unread, lost = [*unexpected.difference(given)], []
    for name, value in given.items():
        is_unexpected = name in unexpected
        there = written.get(name) if is_unexpected else state.get(name)
        is_there = False
        if there is not None and there.shape == value.shape:
            expected = value.to(there)  # in the dtype of the model's
            is_there = torch.allclose(there, expected, 0, 0, equal_nan=True)
        if is_unexpected and not is_there:
            unread.append(name)
        elif there is not None and not is_there:
            lost.append(name)

    if unread:
        raise _no_place(saved, unread)

    if lost:
        raise ConfigError(
            f"{saved.name} has one value under this name, and another under another name of the same tensor "
            f"({first_of(sorted(lost))}): the base ties what was trained apart; give the base that was trained on"
        )

    missing = set(loaded.missing_keys)
    read = {state[key].data_ptr() for key in state.keys() - missing}
    absent = []
    for name, tensor in places.items():
        if name not in given and tensor.data_ptr() not in read:
            absent.append(name)

    if absent:
        raise ConfigError(
            f"{saved.name} lacks tensors of this base ({first_of(sorted(absent))}): give the base that was trained on, "
            "or the whole adapter"
        )

    for layer in adapted.modules():
        name = getattr(layer, "parameter_name", None)
        if name is not None and _layout_of(saved, name) == _BY_EXPERT:
            for factor in layer.lora_B.values():
                # PEFT reads the columns by rank
                weight = factor.weight
                by_expert = weight.data.unflatten(1, (layer.num_experts, -1))
                weight.data = by_expert.transpose(1, 2).flatten(1)

    return adapted  # type: ignore[no-any-return]


def vocabulary_layers(model: Any) -> list[nn.Module]:
    """Return a model's embeddings and head, as far as it has them."""
    try:
        layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):
        return []

    return [layer for layer in layers if layer is not None]


def _refuse_other_codes(model: nn.Module, saved: SavedAdapter) -> None:
    """Raise for the own weight, or scales, of a quantized layer: PEFT saves these of the vocabulary alone."""
    vocabulary = vocabulary_layers(model)
    quantized = set()
    for fqn, module in model.named_modules():
        if is_quantized_layer(module) and module not in vocabulary:
            quantized.update([f"{fqn}.weight", f"{fqn}.SCB"])

    found = [name for name in saved.tensors if canonical_fqn(name) in quantized]
    if found:
        raise _no_place(saved, found)


def _no_place(saved: SavedAdapter, names: list[str]) -> ConfigError:
    return ConfigError(
        f"{saved.name} has tensors that the base has no place for ({first_of(sorted(names))}): give the base that was "
        "trained on, or these tensors under the names that PEFT's save_pretrained writes"
    )


def _refuse_single_experts(model: nn.Module, saved: SavedAdapter) -> None:
    """Raise for factors of single experts where the base has stacks of experts beside quantized layers.

    The transformers that trained had a quantized layer for each expert; the stacks are not quantized.
    """
    modules = dict(model.named_modules())
    if not any(map(is_quantized_layer, modules.values())):
        return

    names = []
    for name in saved.tensors:
        fqn, _, _ = canonical_fqn(name).partition(".lora_")
        if _EXPERT.search(fqn) and fqn not in modules:
            names.append(name)

    if names:
        raise ConfigError(
            f"{saved.name} has names of an older transformers ({first_of(sorted(names))}), which had layers for each "
            "expert: the installed one has them in stacks, unquantized: merge with the transformers that trained"
        )


def _refuse_unknown_stacks(model: nn.Module, saved: SavedAdapter) -> None:
    """Raise for an adapter on stacks of experts where another PEFT, or another library, laid them out otherwise."""
    import peft

    targets = saved.config.get("target_parameters")
    if not isinstance(targets, list):
        return

    version = saved.config.get("peft_version")
    numbers = [int(text) for text in re.findall(r"\d+", str(version))[:3]]
    origin = saved.config.get("auto_mapping")
    is_unsloths = isinstance(origin, dict) and "unsloth_fixed" in origin
    is_told = _LAYOUT_OF_B in saved.config or _DETAIL in saved.config
    ends = tuple(f".{target}" for target in targets)
    for stack, parameter in model.named_parameters():
        if parameter.dim() != 3 or not f".{stack}".endswith(ends):
            continue

        if is_unsloths and not is_told:
            raise ConfigError(
                f"{saved.name} is on the stack of experts {stack}, and it is not known how its lora_B lies: it was "
                f"saved by Unsloth without {_LAYOUT_OF_B}. Add that to its adapter_config.json: {_BY_EXPERT!r} if it "
                f"was trained by a version from before 17 September 2026, else {_BY_RANK!r}"
            )

        module = model.get_submodule(stack.rpartition(".")[0])
        is_transposed = bool(getattr(module, "is_transposed", False))
        # The second dimension of a stack was taken for its output by 0.19.0 where it is transposed, before that never,
        # and since then where it is not.
        is_alike = numbers > [0, 19, 0] or (numbers < [0, 19, 0] and is_transposed)
        if not is_alike:
            raise ConfigError(
                f"{saved.name} is on the stack of experts {stack}, where PEFT {version or 'before 0.18'}, which "
                f"saved it, takes its input for its output, other than the installed PEFT {peft.__version__}: "
                "merge with the PEFT that saved it (peft_version in adapter_config.json)"
            )
