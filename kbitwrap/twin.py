"""The exact base on paper: copied module shells that share the live model's tensors.

Nothing of the live model is changed, and no tensor is copied: what is stored in another dtype than the original stands
in the twin as a ``LazyTensor`` that reads the original when it is asked for.
"""

from __future__ import annotations

import copy
import functools
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .edits import Anchor, RecordChange
from .errors import ExportError
from .journal import Change
from .lazy import LazyTensor
from .precision import Float32Forward
from .quantization import RuntimeChange, has_runtime_state
from .sharding import Gathering, Recorded, class_before_sharding, is_sharded_tensor
from .storage import Layout, SharedStorageChange, StorageChange
from .topology import is_adapter_module, kept_while_walking, named_tensors
from .upcast import Float32Copy, Float32First, StandInState, UpcastTensor

# Under one of PEFT's own modules, the child in which the base goes on; the first that is there.
_BASE_CHILDREN = ("base_layer", "token_adapter", "original_module", "base_model", "lora_model", "model")
# Under a wrapper of torch's or deepspeed's: DDP and engines, torch.compile, activation checkpointing.
_WRAPPED_CHILDREN = ("module", "_orig_mod", "_checkpoint_wrapped_module")
_CHILDREN = {*_BASE_CHILDREN, *_WRAPPED_CHILDREN}
# Torch's own layers and containers are none: whoever fills a container names its children.
_WRAPS = re.compile(r"(?:torch|deepspeed)\b(?!\.nn\.modules\b)")
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
        stand_ins: What stands for a parameter, by its ``id``.
        layers: What was recorded of a quantized layer, by its ``id``.
        kept_dtype: The ids of those stand-ins that have their parameter's dtype.
        origin: What was recorded of the base, if it was.
        memo: The copies made of configs, by the ``id`` of the original, as ``copy.deepcopy`` keeps it.
    """

    stand_ins: dict[int, torch.Tensor]
    layers: dict[int, RuntimeChange]
    origin: Origin | None
    kept_dtype: set[int] = field(default_factory=set)
    memo: dict[int, Any] = field(default_factory=dict)
    shells: dict[int, nn.Module] = field(default_factory=dict)
    peeled: list[Peeled] = field(default_factory=list)

    def copy(self, fqn: str, module: nn.Module) -> nn.Module:
        base, wrappers = peel(module)
        for wrapper in wrappers:
            if getattr(wrapper, "merged", False):
                raise ExportError(
                    f"{fqn or 'the model'}: an adapter is merged into its weight, which has changed; "
                    "export before merging, or load the base anew",
                    fqn=fqn,
                )
        shell = self.shells.get(id(base))
        is_new = shell is None
        if shell is None:
            shell = self.shells[id(base)] = self._shell(base)
        if wrappers:
            self.peeled.append(Peeled(fqn, shell, base, wrappers))
        if is_new:
            prefix = f"{fqn}." if fqn else ""
            shell.__dict__["_modules"] = {
                name: child if child is None else self.copy(prefix + name, child)
                for name, child in base._modules.items()
            }
        return shell

    def _shell(self, module: nn.Module) -> nn.Module:
        shell: nn.Module = object.__new__(class_before_sharding(module))
        fields = shell.__dict__
        fields.update({name: value for name, value in vars(module).items() if not isinstance(value, _STAND_INS)})
        for name in _ADAPTER_ATTRIBUTES:
            fields.pop(name, None)
        for name, config in _configs(module):
            recorded = config if self.origin is None else self.origin.config(config)
            fields[name] = copy.deepcopy(recorded, self.memo)
        fields["_buffers"] = dict(module._buffers)
        fields["_parameters"] = {name: self._original(p) for name, p in module._parameters.items()}
        if has_runtime_state(module):
            weight = (self.layers.get(id(module)) or RuntimeChange(module)).unpacked_weight()
            if weight is not None:
                fields["_parameters"]["weight"] = weight
        return shell

    def _original(self, parameter: nn.Parameter | None) -> torch.Tensor | None:
        stand_in = self.stand_ins.get(id(parameter))
        if parameter is None or stand_in is None:
            return parameter
        if stand_in.dtype == parameter.dtype:
            self.kept_dtype.add(id(stand_in))
        return stand_in


def peel(module: nn.Module) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Find what is underneath PEFT's modules and other wrappers.

    Args:
        module: Any module.

    Returns:
        The first that is none of them, and PEFT's modules above it, the outermost first.
    """
    wrappers: list[nn.Module] = []
    while not _CHILDREN.isdisjoint(module._modules):
        is_adapter = is_adapter_module(module)
        names: tuple[str, ...] = ()
        if is_adapter:
            names = _BASE_CHILDREN
        elif _WRAPS.match(class_before_sharding(module).__module__):
            names = _WRAPPED_CHILDREN
        child = next((c for name in names if (c := module._modules.get(name)) is not None), None)
        if child is None:
            break
        if is_adapter:
            wrappers.append(module)
        module = child
    return module, tuple(wrappers)


class Origin:
    """What is recorded of a base for its export: its configs, and which parameter is where.

    A ``Trainer``, PEFT and a model's own forward write to configs, and none of it is the base's.

    Args:
        model: The model before it is prepared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._configs: dict[int, Any] = {}
        self._places: dict[str, tuple[weakref.ref[nn.Module], dict[str, Recorded]]] = {}
        self._keys = {tensor.fqn: id(tensor.parameter) for tensor in named_tensors(model)}
        by_memory: dict[int, set[int]] = {}
        for fqn, module in peeled_modules(model):
            for _, config in _configs(module):
                copy.deepcopy(config, self._configs)
            recorded = {n: Recorded.of(p) for n, p in module._parameters.items() if p is not None}
            self._places[fqn] = weakref.ref(module), recorded
            for was in recorded.values():
                by_memory.setdefault(was.storage.cdata, set()).add(was.key)
        self._sharing_memory = {key for keys in by_memory.values() if len(keys) > 1 for key in keys}

    def config(self, config: Any) -> Any:
        """A config as it was recorded; one that is new, as it is."""
        return self._configs.get(id(config), config)

    def refuse_changed(self, model: nn.Module) -> None:
        """Raise where the base's tensors are not the ones that were recorded.

        Args:
            model: The live model.

        Raises:
            ExportError: A parameter was replaced, resized, added or taken away since; ``fqn`` names the first one.
        """
        live = dict(peeled_modules(model))
        for fqn, (reference, recorded) in self._places.items():
            module = live.pop(fqn, None)
            if module is None or (recorded and module is not reference()):
                raise _changed(fqn, "is gone" if module is None else "was replaced")
            parameters = dict(_parameters(module))
            for name in {**recorded, **parameters}:
                parameter, was = parameters.get(name), recorded.get(name)
                if parameter is None or was is None or not was.is_same(module, parameter):
                    raise _changed(f"{fqn}.{name}" if fqn else name, "was replaced or resized")
        for fqn, module in live.items():
            if any(True for _ in _parameters(module)):
                raise _changed(fqn, "was added")

    def promised(
        self, model: nn.Module, changes: Sequence[StorageChange], layers: dict[int, RuntimeChange], gathering: Gathering
    ) -> dict[int, torch.Tensor]:
        """Have the originals of the parameters that were sharded since promised.

        Args:
            model: The live model; its parameters are those that were recorded.
            changes: What parameters stored, the newest first.
            layers: What was recorded of quantized layers, by their ``id``.
            gathering: What gathers the parameters.

        Returns:
            What stands for a sharded parameter, by its ``id``.

        Raises:
            ExportError: An original cannot be told from what is there; ``fqn`` names the first one.
        """
        unknown = next((change.fqn for change in changes if change.fqn not in self._keys), None)
        if unknown is not None:  # the drop-in's second preparation, of a model with adapters by then
            raise _cannot_tell(unknown, "it was prepared again, under this name")
        stored = {self._keys[change.fqn]: change for change in changes}
        found: dict[int, torch.Tensor] = {}
        for prefix, module in peeled_modules(model):
            for name, parameter in _parameters(module):
                if is_sharded_tensor(parameter) and id(parameter) not in found:
                    fqn, was = f"{prefix}.{name}" if prefix else name, self._places[prefix][1][name]
                    if was.key in self._sharing_memory:
                        raise _cannot_tell(fqn, "another parameter lay in its memory")
                    layer = layers.get(id(module))
                    found[id(parameter)] = gathering.promise(fqn, parameter, was, stored.get(was.key), layer)
        return found


def _changed(fqn: str, what: str) -> ExportError:
    return ExportError(
        f"{fqn or 'the model'} {what} since the model was prepared (by a merge, resized embeddings or unloaded "
        "modules_to_save), so the exact base is not there any more; export before that, or load the base anew",
        fqn=fqn,
    )


def _cannot_tell(fqn: str, why: str) -> ExportError:
    return ExportError(f"{fqn}: {why}, which a sharded model does not show any more; export before sharding", fqn=fqn)


def _configs(module: nn.Module) -> list[tuple[str, Any]]:
    found = []
    for name in ("config", "generation_config"):
        config = vars(module).get(name)
        # Of the class first: asking a config of transformers takes many times as long.
        if config is not None and (hasattr(type(config), "save_pretrained") or hasattr(config, "save_pretrained")):
            found.append((name, config))
    return found


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in module._parameters.items() if p is not None)


@kept_while_walking
def peeled_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the base's modules by the names that they have without adapters and wrappers.

    Args:
        model: The live model.

    Returns:
        ``(fqn, module)`` in depth-first order, a shared module under each of its names.
    """
    found: list[tuple[str, nn.Module]] = []
    stack = [("", model)]
    while stack:
        fqn, module = stack.pop()
        base = module if _CHILDREN.isdisjoint(module._modules) else peel(module)[0]
        found.append((fqn, base))
        if base._modules:
            prefix = f"{fqn}." if fqn else ""
            stack += [(prefix + name, m) for name, m in reversed(base._modules.items()) if m is not None]
    return found


def build_twin(
    model: nn.Module,
    changes: Iterable[Change] = (),
    origin: Origin | None = None,
    gathering: Gathering | None = None,
) -> Twin:
    """Copy a model's base on paper, with a preparation taken back.

    Args:
        model: The live model, prepared or not, with adapters and wrappers inside and around it or without.
        changes: What the preparation's journal holds, oldest first.
        origin: What was recorded of the base before it was prepared.
        gathering: What gathers the parameters, where they were sharded since.

    Returns:
        The twin.

    Raises:
        ExportError: Adapters are merged into a layer, or the base's tensors are others than those that were recorded;
            ``fqn`` names the first one.
    """
    if origin is not None:
        origin.refuse_changed(model)
    # Undoing goes from the newest to the oldest, so that the oldest has the last word.
    newest_first = list(changes)[::-1]
    stand_ins: dict[int, torch.Tensor] = {}
    stored: list[StorageChange] = []
    for change in newest_first:
        if isinstance(change, StorageChange):
            stand_ins |= _stand_ins([change])
            stored.append(change)
        elif isinstance(change, SharedStorageChange):
            stand_ins |= _shared_stand_ins(change.changes)
            stored += change.changes
    records = [change for change in newest_first if isinstance(change, RecordChange)]
    layers = {id(layer.module()): layer for record in records for layer in record.layers}
    if origin is not None and gathering is not None:
        stand_ins |= origin.promised(model, stored, layers, gathering)
    copier = _Copier(stand_ins, layers, origin)
    twin = copier.copy("", model)
    converted = {id(stand_in) for stand_in in stand_ins.values()} - copier.kept_dtype
    return Twin(twin, tuple(copier.peeled), tuple(fqn for fqn, p in twin.named_parameters() if id(p) in converted))


def _stand_ins(changes: Sequence[StorageChange]) -> dict[int, torch.Tensor]:
    """What stands for parameters that do not store their original, by the ``id`` of the parameter."""
    return {
        id(parameter): LazyTensor(parameter.shape, change.dtype, functools.partial(_read, change), change.read_pieces)
        for change in changes
        if (parameter := change.reference()) is not None
        and (parameter.dtype != change.dtype or change.kept is not None)
    }


def _shared_stand_ins(changes: Sequence[StorageChange]) -> dict[int, torch.Tensor]:
    """The same for different parameters over one memory, which only real tensors can share: copies in one storage."""
    found = _stand_ins(changes)
    placed = [change for change in changes if id(change.reference()) in found]
    if len(placed) < 2:
        return found
    views = Layout.place([(_read(change), change.layout) for change in placed])
    return {id(change.reference()): view for change, view in zip(placed, views, strict=True)}


def _read(change: StorageChange) -> torch.Tensor:
    original = change.read_original()
    if original is None:
        raise ExportError(f"{change.fqn}: the parameter is gone from the model; export before it is", fqn=change.fqn)
    return original
