"""The exact base as a twin.

Its modules are copies ("shells") that share the live model's tensors.

No tensor is copied: where the stored dtype is not the original one, a ``LazyTensor``
computes the original.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..edits.base import Anchor, OriginalSlot
from ..edits.kept import ForwardState, lay_as_stored
from ..edits.norms import Float32Forward
from ..edits.stand_ins import STAND_INS
from ..edits.storage import SharedMemory
from ..errors import ExportError
from ..model.bitsandbytes_layers import (
    has_transposed_scales,
    lacks_statistics,
    unpacked_copy,
)
from ..model.checks import TRANSPOSED_SCALES
from ..model.quantization import has_runtime_state
from ..model.records import Mark, ParameterRecord
from ..model.tree import CONFIG_ATTRIBUTES, ModelTree, join, shallow_copy
from ..model.wrappers import class_before_sharding, unwrap
from ..preparation.comparison import DECOMPRESSED, Changes
from ..preparation.preparation import Preparation
from ..preparation.state import Original
from ..tensors.bits import content_digest
from ..tensors.lazy import materialize
from .sharding import Gathering, drift_message

# The attributes that PEFT, and transformers' own use of it, leave on the base model.
_ADAPTER_ATTRIBUTES = ("peft_config", "_hf_peft_config_loaded", "active_adapter")
_Held = dict[ParameterRecord, OriginalSlot]
# by the ``id`` of the live parameter
_Promised = dict[int, Tensor]
# the classes of the attributes that a preparation sets on modules
_OURS = (Anchor, Float32Forward, Mark, *STAND_INS)


@dataclass
class Peeled:
    """A module of the base that PEFT wrapped.

    A module that has several places is peeled at each.
    """

    fqn: str  # its name in the twin; ``""`` is the model itself
    shell: nn.Module  # the twin's module
    # PEFT's live modules around it, the outermost first
    wrappers: tuple[nn.Module, ...]


@dataclass
class Twin:
    """A model's base before it was prepared.

    Its modules and configs may be changed; its tensors may only be read.
    """

    model: nn.Module  # without adapters and wrappers
    peeled: tuple[Peeled, ...]  # one for each place of a shared module
    # the names of the tensors that the live model stores in another dtype
    converted: tuple[str, ...]


@dataclass(eq=False)
class _Copier:
    """Copies a model's modules as shells, with the original tensors and configs.

    Attributes:
        held: The changes that hold the originals of parameters stored in another dtype.
        rewritten: The changes of attributes that are taken back on each shell.
        original: The record of the model; ``None`` where the model was not prepared,
            or is only a part or a container of the prepared one.
        promised: The twin's tensors, each the same at all places of the parameter.
    """

    tree: ModelTree
    promised: _Promised = field(default_factory=dict)
    held: _Held = field(default_factory=dict)
    rewritten: Sequence[ForwardState] = ()
    original: Original | None = None

    def __post_init__(self) -> None:
        self._memo: dict[int, Any] = {}  # of configs, for ``copy.deepcopy``
        self._shells: dict[int, nn.Module] = {}
        self._peeled: list[Peeled] = []

    def twin(self) -> Twin:
        """Return the twin of the model, which this copies once.

        A tensor counts as converted where the live model stores it in another dtype.
        """
        model = self._copy("", self.tree.model)
        stored = {}
        for node in self.tree.base:
            for name, parameter in node.module._parameters.items():
                stored[join(node.fqn, name)] = parameter

        converted = []
        for fqn, original in model.named_parameters():
            parameter = stored[fqn]
            if parameter is not None and parameter.dtype != original.dtype:
                converted.append(fqn)

        return Twin(model, tuple(self._peeled), tuple(converted))

    def _copy(self, fqn: str, module: nn.Module) -> nn.Module:
        """Return the shell of what a module wraps, and of all below it.

        A module that is there twice has one shell.
        """
        base, wrappers = unwrap(module)
        if any(getattr(wrapper, "merged", False) for wrapper in wrappers):
            # A merge that is taken back leaves rounding, so it is not taken back here.
            raise ExportError(
                f"{fqn or 'the model'}: an adapter is merged into its weight, which has "
                "changed; export before merging, or load the base again",
                fqn=fqn,
            )
        shell = self._shells.get(id(base))
        is_new = shell is None
        if shell is None:
            if lacks_statistics(base):
                raise ExportError(
                    f"{fqn}: the scales of its quantized weight are gone, so its values "
                    "cannot be computed (PEFT's DoRA on 8-bit layers loses them in "
                    "training on a CPU); load the base again",
                    fqn=fqn,
                )
            # of a prepared model, the recorded scales are read
            if self.original is None and has_transposed_scales(base):
                raise ExportError(f"{fqn}: {TRANSPOSED_SCALES}", fqn=fqn)
            shell = self._shells[id(base)] = self._shell(base)

        if wrappers:
            self._peeled.append(Peeled(fqn, shell, wrappers))

        if is_new:
            for name, child in shell._modules.items():
                if child is not None:
                    shell._modules[name] = self._copy(join(fqn, name), child)

        return shell

    def _shell(self, module: nn.Module) -> nn.Module:
        """Return the copy of one module, with the original tensors.

        Its class, attributes and configs are those from before. What adapters, sharding and
        the preparation itself set on it is left out.
        """
        shell = shallow_copy(module)
        shell.__class__ = class_before_sharding(module)
        for change in self.rewritten:
            change.undo_on(shell, module)

        fields = vars(shell)
        for name, value in list(fields.items()):
            if isinstance(value, _OURS) or name in _ADAPTER_ATTRIBUTES:
                del fields[name]

        for name in CONFIG_ATTRIBUTES:
            config = vars(module).get(name)
            if hasattr(config, "save_pretrained"):
                if self.original is not None:
                    config = self.original.config(config)
                fields[name] = copy.deepcopy(config, self._memo)

        for name, parameter in module._parameters.items():
            if self.original is not None and self.original.is_alias(module, name):
                del fields["_parameters"][name]
            elif parameter is not None:
                fields["_parameters"][name] = self._promise(module, name, parameter)

        return shell

    def _promise(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the twin's tensor for a parameter, with its original value."""
        key = id(parameter)
        if key in self.promised:
            return self.promised[key]

        held = self.held_of(module, name, parameter)

        value: Tensor = parameter
        if held is not None:
            value = held.original(parameter)
        elif name == "weight" and has_runtime_state(module):
            value = unpacked_copy(parameter)

        self.promised[key] = value
        return value

    def held_of(
        self, module: nn.Module, name: str, parameter: nn.Parameter
    ) -> OriginalSlot | None:
        """Return the change that holds the original of a parameter.

        It is ``None`` where the parameter stores that itself.
        """
        record = self.tree.found(parameter) or self.tree.records.at(module, name)
        return None if record is None else self.held.get(record)


def build_twin(
    tree: ModelTree,
    preparation: Preparation | None = None,
    gathering: Gathering | None = None,
) -> Twin:
    """Copy a live model's base as it was.

    Args:
        tree: The live model, in which recorded parameters were found again.
        preparation: The preparation that holds the model, or a part of it.
        gathering: The promises of what was sharded since, which are added to.

    Raises:
        ExportError: The base cannot be told any more.
    """
    lay_as_stored(tree)
    copier = _Copier(tree)
    if preparation is None:
        return copier.twin()

    changes = [*preparation.copies(tree), *preparation.journal.of(OriginalSlot)]
    copier.held = {one.record: one for one in changes}  # the oldest decides
    copier.rewritten = preparation.journal.of(ForwardState)
    for memory in preparation.journal.of(SharedMemory):
        copier.promised |= _as_one(memory)
    original = preparation.before
    prepared = original.model()
    # and no part or container of it
    if prepared is None or unwrap(prepared)[0] is not unwrap(tree.model)[0]:
        return copier.twin()

    found = preparation.changes(tree)
    _refuse_replaced(found)
    copier.original = original
    if gathering is not None and gathering.is_sharded:
        copier.promised |= gathering.promise_all(tree, original, copier.held_of)

    twin = copier.twin()
    for fqn in found.drifted:
        raise ExportError(drift_message(fqn), fqn=fqn)

    return twin


def promise_adapters(twin: Twin, gathering: Gathering) -> None:
    """Put copies, whose sharded tensors can be read, in the place of PEFT's modules.

    It is called on rank 0, while all ranks gather.
    """
    for peeled in twin.peeled:
        peeled.wrappers = tuple(map(gathering.shell, peeled.wrappers))


def _refuse_replaced(changes: Changes) -> None:
    """Raise for the first parameter that is another than was recorded."""
    for fqn, what in changes.replaced.items():
        cause = " (by a merge, resized embeddings or unloaded modules_to_save)"
        remedy = "export before that, or load the base again"
        if what == DECOMPRESSED:
            cause = ""
            remedy = (
                "run the model before it is prepared, or load it with dequantize=True "
                "in its config"
            )
        raise ExportError(
            f"{fqn} {what} since the model was prepared{cause}, so the "
            f"exact base is gone; {remedy}",
            fqn=fqn,
        )


def _as_one(memory: SharedMemory) -> _Promised:
    """Return one original for parameters that lay over the same memory.

    There is none where they were trained apart, or lay there differently.
    """
    originals = {}
    layouts = set()
    for storage in memory.storages:
        parameter = storage.record.live()
        if parameter is not None and storage.stores_other(parameter):
            originals[id(parameter)] = storage.original(parameter)
            layouts.add(storage.layout)

    digests = {content_digest(materialize(one)) for one in originals.values()}
    if len(layouts) != 1 or len(digests) != 1:
        return {}
    first, *_ = originals.values()
    return {key: first.detach() for key in originals}
