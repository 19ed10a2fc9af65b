"""The exact base on paper: copied module shells that share the live model's tensors.

Nothing of the live model is changed, and no tensor is copied: what is stored in another dtype than the original stands
in the twin as a ``LazyTensor`` that reads the original when it is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..edits.base import HeldOriginal
from ..edits.flags import Anchor
from ..edits.norms import Float32Forward
from ..edits.stand_ins import Float32Copy, Float32First, StandInState
from ..edits.storage import SharedStorageChange, StorageChange
from ..errors import ExportError
from ..model.checks import is_sharded_tensor
from ..model.quantization import has_runtime_state, lacks_statistics, unpacked_copy
from ..model.tree import ModelTree, join, shallow_copy
from ..model.wrappers import class_before_sharding, unwrap
from ..preparation.original import Changes, Original, configs_of
from ..preparation.preparation import Preparation
from ..tensors.bits import Layout
from ..tensors.upcast import UpcastTensor
from .sharding import Gathering

# What PEFT, and transformers' own use of it, leave on the base model.
_ADAPTER_ATTRIBUTES = ("peft_config", "_hf_peft_config_loaded", "active_adapter")
_STAND_INS = (Anchor, Float32Copy, Float32First, Float32Forward, StandInState, UpcastTensor)


@dataclass(frozen=True)
class Peeled:
    """A module of the base that PEFT wrapped.

    Attributes:
        fqn: Its name in the twin; ``""`` is the model itself.
        shell: The twin's module.
        base: The live module that the shell is a copy of.
        wrappers: PEFT's live modules around it, the outermost first: for a linear layer under LoRA its
            ``lora.Linear4bit``, for a model its ``PeftModel`` and ``LoraModel``.
    """

    fqn: str
    shell: nn.Module
    base: nn.Module
    wrappers: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Twin:
    """A model's base as it was before it was prepared.

    Its modules are of the same classes, with dictionaries of their own: replacing a tensor, a module or a field of a
    config in the twin reaches nothing of the live model. The tensors are the live model's own, to be read only.

    Attributes:
        model: The twin of the base model, freed of adapters and wrappers.
        peeled: Where adapters were taken off, each place of a shared module by itself.
        converted: Names of the tensors that the live model stores in another dtype.
    """

    model: nn.Module
    peeled: tuple[Peeled, ...]
    converted: tuple[str, ...]


@dataclass
class _Copier:
    """Copies shells; what the record says of tensors and configs is put in their place.

    Attributes:
        promised: What stands for a parameter, by its ``id``.
        held: What the preparation holds of the originals of parameters, by the ``id`` of the owner and the name there.
        converted: The ids of those that stand for a parameter of another dtype.
        original: The record of the base, if it was prepared.
        memo: The copies made of configs, by the ``id`` of the original, as ``copy.deepcopy`` keeps it.
    """

    promised: dict[int, torch.Tensor]
    held: dict[tuple[int, str], HeldOriginal]
    original: Original | None
    converted: set[int] = field(default_factory=set)
    memo: dict[int, Any] = field(default_factory=dict)
    shells: dict[int, nn.Module] = field(default_factory=dict)
    peeled: list[Peeled] = field(default_factory=list)

    def copy(self, fqn: str, module: nn.Module) -> nn.Module:
        base, wrappers = unwrap(module)
        for wrapper in wrappers:
            if getattr(wrapper, "merged", False):
                raise _merged(fqn)
        shell = self.shells.get(id(base))
        is_new = shell is None
        if shell is None:
            if lacks_statistics(base):
                raise ExportError(
                    f"{fqn}: the scales of its quantized weight are gone, so its values cannot be computed (PEFT's "
                    "DoRA on 8-bit layers loses them in training on a CPU); load the base anew",
                    fqn=fqn,
                )
            shell = self.shells[id(base)] = self._shell(base)
        if wrappers:
            self.peeled.append(Peeled(fqn, shell, base, wrappers))
        if is_new:
            shell.__dict__["_modules"] = {
                name: child if child is None else self.copy(join(fqn, name), child)
                for name, child in base._modules.items()
            }
        return shell

    def _shell(self, module: nn.Module) -> nn.Module:
        shell = shallow_copy(module)
        shell.__class__ = class_before_sharding(module)
        fields = shell.__dict__
        for name in [name for name, value in fields.items() if isinstance(value, _STAND_INS)]:
            del fields[name]
        for name in _ADAPTER_ATTRIBUTES:
            fields.pop(name, None)
        for name, config in configs_of(module):
            recorded = config if self.original is None else self.original.config(config)
            fields[name] = copy.deepcopy(recorded, self.memo)
        fields["_parameters"] = {name: self._original(module, name, p) for name, p in module._parameters.items()}
        return shell

    def _original(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> torch.Tensor | None:
        if parameter is None:
            return None
        if id(parameter) not in self.promised:
            held = self.held.get((id(module), name))
            if held is not None:
                value = held.read(parameter)
            else:
                copied = unpacked_copy(parameter) if name == "weight" and has_runtime_state(module) else None
                value = parameter if copied is None else copied
            self.promised[id(parameter)] = value
        value = self.promised[id(parameter)]
        if value.dtype != parameter.dtype:
            self.converted.add(id(value))
        return value


def build_twin(tree: ModelTree, preparation: Preparation | None = None, gathering: Gathering | None = None) -> Twin:
    """Copy a model's base on paper, with a preparation taken back.

    Args:
        tree: The live model, prepared or not, with adapters and wrappers inside and around it or without.
        preparation: The preparation that holds it.
        gathering: What gathers the parameters, where they were sharded since.

    Returns:
        The twin.

    Raises:
        ExportError: Adapters are merged into a layer, the base's tensors are others than those that were recorded or
            hold other values although they are frozen, or a quantized layer has lost its statistics; ``fqn`` names the
            first one.
    """
    held: dict[tuple[int, str], HeldOriginal] = {}
    promised: dict[int, torch.Tensor] = {}
    original, changes = None, Changes()
    if preparation is not None:
        originals = [*preparation.copies(tree), *preparation.journal.originals()]
        # Undoing goes from the newest to the oldest, so that the oldest has the last word.
        for one in originals:
            held.update({(id(module), ref.name): one for ref in one.record.refs if (module := ref.owner()) is not None})
        if preparation.is_of(tree.model):
            original = preparation.original
            changes = preparation.changes(tree)
            _refuse_replaced(changes)
            if gathering is not None:
                promised |= _gathered(tree, original, held, gathering)
        promised |= _sharing_memory(held)
    copier = _Copier(promised, held, original)
    twin = copier.copy("", tree.model)
    _refuse_drifted(changes)
    names = tuple(fqn for fqn, p in twin.named_parameters() if id(p) in copier.converted)
    return Twin(twin, tuple(copier.peeled), names)


def _merged(fqn: str) -> ExportError:
    return ExportError(
        f"{fqn or 'the model'}: an adapter is merged into its weight, which has changed; "
        "export before merging, or load the base anew",
        fqn=fqn,
    )


def _refuse_replaced(changes: Changes) -> None:
    for fqn, what in changes.replaced.items():
        raise ExportError(
            f"{fqn or 'the model'} {what} since the model was prepared (by a merge, resized embeddings or unloaded "
            "modules_to_save), so the exact base is not there any more; export before that, or load the base anew",
            fqn=fqn,
        )


def _refuse_drifted(changes: Changes) -> None:
    for fqn in changes.drifted:
        raise ExportError(
            f"{fqn} holds other values than when the model was prepared, although it is frozen (a merge that was taken "
            "back is rounded; PiSSA and OLoRA leave a residual), so the exact base is not there any more; export "
            "before that, or load the base anew",
            fqn=fqn,
        )


def _gathered(
    tree: ModelTree, original: Original, held: dict[tuple[int, str], HeldOriginal], gathering: Gathering
) -> dict[int, torch.Tensor]:
    """What stands for the parameters that were sharded since, by the ``id`` of the parameter."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tree.base_tensors:
        fqn, parameter = tensor.fqn, tensor.parameter
        if not is_sharded_tensor(parameter) or id(parameter) in found:
            continue
        was = original.at(fqn)
        if was is None:
            raise _cannot_tell(fqn, "it was not there when the model was prepared")
        if original.shared_memory(was):
            raise _cannot_tell(fqn, "another parameter lay in its memory")
        found[id(parameter)] = gathering.promise(fqn, parameter, was, held.get((id(tensor.module), tensor.name)))
    return found


def _cannot_tell(fqn: str, why: str) -> ExportError:
    return ExportError(f"{fqn}: {why}, which a sharded model does not show any more; export before sharding", fqn=fqn)


def _sharing_memory(held: dict[tuple[int, str], HeldOriginal]) -> dict[int, torch.Tensor]:
    """What stands for parameters over one memory, which only real tensors can share: copies in one storage."""
    groups = {one.group for one in held.values() if isinstance(one, StorageChange) and one.group is not None}
    found: dict[int, torch.Tensor] = {}
    for group in groups:
        found |= _sharing_memory_of(group)
    return found


def _sharing_memory_of(group: SharedStorageChange) -> dict[int, torch.Tensor]:
    live = [(change, p) for change in group.changes if (p := change.record.live()) is not None]
    placed: Sequence[tuple[StorageChange, nn.Parameter]] = [(c, p) for c, p in live if c.converts(p)]
    if len(placed) < 2:
        return {}
    views = Layout.place([(change.original_of(p.data), change.layout) for change, p in placed])
    return {id(parameter): view for (_, parameter), view in zip(placed, views, strict=True)}
