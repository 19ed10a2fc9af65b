"""The exact base as a twin: copied modules ("shells") that share the live model's tensors.

No tensor is copied: where the stored dtype is not the original one, a ``LazyTensor`` computes the original.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..edits.base import Anchor, HeldOriginal
from ..edits.kept import KeptChange, lay_as_stored
from ..edits.norms import Float32Forward
from ..edits.stand_ins import Float32Copy, Float32First, StandInState
from ..edits.storage import StorageChange
from ..errors import ExportError
from ..model.quantization import has_runtime_state, lacks_statistics, unpacked_copy
from ..model.tree import ModelTree, join, shallow_copy
from ..model.wrappers import class_before_sharding, is_sharded_tensor, unwrap
from ..preparation.original import DECOMPRESSED, Changes, Original, configs_of
from ..preparation.preparation import Preparation
from ..tensors.bits import Layout, differ
from ..tensors.upcast import UpcastTensor
from .sharding import Gathering, drift_of

# The attributes that PEFT, and transformers' own use of it, leave on the base model.
_ADAPTER_ATTRIBUTES = ("peft_config", "_hf_peft_config_loaded", "active_adapter")
_Held = dict[tuple[int, str], HeldOriginal]  # by the ``id`` of the owner and the parameter's name there
_STAND_INS = (Anchor, Float32Copy, Float32First, Float32Forward, StandInState, UpcastTensor)


@dataclass(frozen=True)
class Peeled:
    """A module of the base that PEFT wrapped."""

    fqn: str  # its name in the twin; ``""`` is the model itself
    shell: nn.Module  # the twin's module
    wrappers: tuple[nn.Module, ...]  # PEFT's live modules around it, the outermost first


@dataclass(frozen=True)
class Twin:
    """A model's base before it was prepared. Its modules and configs may be changed; its tensors may only be read."""

    model: nn.Module  # without adapters and wrappers
    peeled: tuple[Peeled, ...]  # one for each place of a shared module
    converted: tuple[str, ...]  # the names of the tensors that the live model stores in another dtype


@dataclass
class _Copier:
    """Copies modules as shells with the original tensors and configs."""

    promised: dict[int, torch.Tensor]  # the twin's tensor, by the ``id`` of the live parameter
    held: _Held
    original: Original | None  # of a model that was prepared
    rewritten: Sequence[KeptChange] = ()
    converted: set[int] = field(default_factory=set)  # ids of the twin's tensors of another dtype than the live ones
    memo: dict[int, Any] = field(default_factory=dict)  # of configs, for ``copy.deepcopy``
    shells: dict[int, nn.Module] = field(default_factory=dict)
    peeled: list[Peeled] = field(default_factory=list)

    def copy(self, fqn: str, module: nn.Module) -> nn.Module:
        base, wrappers = unwrap(module)
        if any(getattr(wrapper, "merged", False) for wrapper in wrappers):
            raise ExportError(
                f"{fqn or 'the model'}: an adapter is merged into its weight, which has changed; "
                "export before merging, or load the base again",
                fqn=fqn,
            )
        shell = self.shells.get(id(base))
        is_new = shell is None
        if shell is None:
            if lacks_statistics(base):
                raise ExportError(
                    f"{fqn}: the scales of its quantized weight are gone, so its values cannot be computed (PEFT's "
                    "DoRA on 8-bit layers loses them in training on a CPU); load the base again",
                    fqn=fqn,
                )
            shell = self.shells[id(base)] = self._shell(base)
        if wrappers:
            self.peeled.append(Peeled(fqn, shell, wrappers))
        if is_new:
            shell.__dict__["_modules"] = {
                name: child if child is None else self.copy(join(fqn, name), child)
                for name, child in shell._modules.items()
            }
        return shell

    def _shell(self, module: nn.Module) -> nn.Module:
        shell = shallow_copy(module)
        shell.__class__ = class_before_sharding(module)
        fields = shell.__dict__
        for change in self.rewritten:
            change.undo_on(shell, module)
        for name in [name for name, value in fields.items() if isinstance(value, _STAND_INS)]:
            del fields[name]
        for name in _ADAPTER_ATTRIBUTES:
            fields.pop(name, None)
        for name, config in configs_of(module):
            recorded = config if self.original is None else self.original.config(config)
            fields[name] = copy.deepcopy(recorded, self.memo)
        fields["_parameters"] = {
            name: self._original(module, name, p)
            for name, p in module._parameters.items()
            if self.original is None or not self.original.is_alias(module, name)
        }
        return shell

    def _original(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> torch.Tensor | None:
        if parameter is None:
            return None
        if id(parameter) not in self.promised:
            held = self.held.get((id(module), name))
            if held is not None:
                self.promised[id(parameter)] = held.read(parameter)
            else:
                is_rewritten = name == "weight" and has_runtime_state(module)
                self.promised[id(parameter)] = unpacked_copy(parameter) if is_rewritten else parameter
        value = self.promised[id(parameter)]
        if value.dtype != parameter.dtype:
            self.converted.add(id(value))
        return value


def build_twin(tree: ModelTree, preparation: Preparation | None = None, gathering: Gathering | None = None) -> Twin:
    """Copy a live model's base as it was; raise `ExportError` where that cannot be told. ``gathering`` gets shards."""
    lay_as_stored(tree)
    held: _Held = {}
    promised: dict[int, torch.Tensor] = {}
    original, changes = None, Changes()
    if preparation is not None:
        # As when undoing, the oldest decides.
        for one in [*preparation.copies(tree), *preparation.journal.parts(HeldOriginal)]:
            held.update({(id(module), ref.name): one for ref in one.record.refs if (module := ref.owner()) is not None})
        prepared = preparation.original.model()
        if prepared is not None and unwrap(prepared)[0] is unwrap(tree.model)[0]:  # and no part or container of it
            original = preparation.original
            changes = preparation.changes(tree)
            _refuse_replaced(changes)
            if gathering is not None:
                promised |= _gathered(tree, original, held, gathering)
        promised |= _sharing_memory(held)
    copier = _Copier(promised, held, original, () if preparation is None else preparation.journal.parts(KeptChange))
    twin = copier.copy("", tree.model)
    for fqn in changes.drifted:
        raise ExportError(drift_of(fqn), fqn=fqn)
    names = tuple(fqn for fqn, p in twin.named_parameters() if id(p) in copier.converted)
    return Twin(twin, tuple(copier.peeled), names)


def _refuse_replaced(changes: Changes) -> None:
    for fqn, what in changes.replaced.items():
        if what == DECOMPRESSED:
            cause, remedy = "", "; run the model before it is prepared, or load it with dequantize=True in its config"
        else:
            cause = " (by a merge, resized embeddings or unloaded modules_to_save)"
            remedy = "; export before that, or load the base again"
        raise ExportError(
            f"{fqn or 'the model'} {what} since the model was prepared{cause}, so the exact base is gone{remedy}",
            fqn=fqn,
        )


def _gathered(tree: ModelTree, original: Original, held: _Held, gathering: Gathering) -> dict[int, torch.Tensor]:
    """The tensors promised for the parameters that were sharded since, by the ``id`` of the parameter."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tree.base_tensors:
        fqn, parameter = tensor.fqn, tensor.parameter
        if not is_sharded_tensor(parameter) or id(parameter) in found:
            continue
        was = original.base.get(fqn)
        if was is None or was in original.sharing_memory:
            why = "shared its memory with another parameter" if was else "was added after the model was prepared"
            raise ExportError(
                f"{fqn}: it {why}, so its original cannot be written from shards; export before sharding", fqn=fqn
            )
        holder = held.get((id(tensor.module), tensor.name))
        found[id(parameter)] = gathering.promise(tensor, was, holder, original)
    return found


def _sharing_memory(held: _Held) -> dict[int, torch.Tensor]:
    """Copies of parameters that lay in one memory, in one storage, unless trained apart: lazy tensors cannot share."""
    found: dict[int, torch.Tensor] = {}
    for group in {one.group for one in held.values() if isinstance(one, StorageChange) and one.group is not None}:
        placed = [(c, p) for c in group.changes if (p := c.record.live()) is not None and c.converts(p)]
        if len(placed) > 1:
            originals = [(change.original_of(p.data), change.layout) for change, p in placed]
            views = Layout.place(originals)
            if not any(differ(view, value) for view, (value, _) in zip(views, originals, strict=True)):
                found |= {id(parameter): view for (_, parameter), view in zip(placed, views, strict=True)}
    return found
