"""Fingerprints of a model's parameters.

They are taken without waiting for the device, and compared in one read of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from types import MappingProxyType
from typing import Any

import torch

from ..model.quantization import is_quantized_parameter
from ..model.records import ParameterRecord
from ..tensors.bits import (
    RUNS,
    begin_digest,
    dense_parts,
    differs,
    is_composed,
    is_dense,
    num_sampled,
    sample,
)

# their samples tell whether a parameter is the recorded one, and no more
_RUNS_OF_QUANTIZED = 8

Recorded = Iterable[tuple[ParameterRecord, torch.Tensor]]
_Tensors = dict[ParameterRecord, torch.Tensor]


def _sampled_part(parameter: torch.Tensor) -> torch.Tensor | None:
    """The strided tensor that a parameter is sampled by.

    It is the first of those that a parameter is made of; ``None`` where there is none.
    """
    parts = dense_parts(parameter)
    return parts[0] if parts else None


def sample_bytes(parameter: torch.Tensor) -> int:
    """The bytes that a parameter's sample takes, without reading a value.

    It is the same on the meta device as on any other.
    """
    is_quantized = is_quantized_parameter(parameter)
    if is_quantized and parameter.dtype is not torch.int8:
        return 0  # one of 4 bits is told by its statistics
    part = _sampled_part(parameter)
    if part is None:
        return 0
    num_runs = _RUNS_OF_QUANTIZED if is_quantized else RUNS
    return num_sampled(part, num_runs) * part.itemsize


def _sample(record: ParameterRecord, parameter: torch.Tensor) -> torch.Tensor | None:
    """A sample of a parameter, in the recorded dtype.

    ``None`` without values, and of a 4-bit weight, which its statistics tell.
    """
    if record.quant_state is not None:
        return None
    part = _sampled_part(parameter)
    if part is None or part.is_meta:
        return None
    part = part.as_subclass(torch.Tensor)
    if record.quantized_class is not None:
        return sample(part, _RUNS_OF_QUANTIZED)
    taken = sample(part)
    return taken if is_composed(type(parameter)) else taken.to(record.dtype)


class Fingerprints:
    """A sample of every parameter, on its device; with ``audit``, digests too.

    A sample of a large parameter may miss a change of a few elements; a digest sees
    any.

    Attributes:
        samples: The samples, flat, in the recorded dtypes.
        digests: The digests of whole parameters; each is read when it is called.
    """

    def __init__(self, parameters: Recorded, audit: bool) -> None:
        self.samples: _Tensors = {}
        self.digests: dict[ParameterRecord, Callable[[], int]] = {}
        taken: _Tensors = {}
        for record, parameter in parameters:
            sample_of = _sample(record, parameter)
            if sample_of is not None:
                taken[record] = sample_of
            if audit and record.quantized_class is None and is_dense(parameter):
                self.digests[record] = begin_digest(parameter)
        for alike in _alike(taken):
            # In one piece of memory, and in none of a parameter's.
            together = torch.cat([*alike.values()])
            pieces = together.split([one.numel() for one in alike.values()])
            self.samples.update(zip(alike, pieces, strict=True))

    def changed(
        self,
        parameters: Recorded,
        answers: Mapping[ParameterRecord, torch.Tensor] = MappingProxyType({}),
    ) -> set[ParameterRecord]:
        """Find the parameters whose samples are others than the recorded ones.

        Args:
            parameters: The live parameters, or their values, with their records. One
                that has no sample is not compared.
            answers: Boolean scalars that tell of parameters that were compared
                otherwise whether they changed: they are read together with the rest.

        Returns:
            The records of those that changed, after one read of each device.
        """
        changed: set[ParameterRecord] = set()
        comparable: _Tensors = {}
        for record, parameter in parameters:
            old = self.samples.get(record)
            new = _sample(record, parameter)
            if old is None or new is None:
                continue
            if old.shape == new.shape and old.dtype == new.dtype:
                comparable[record] = new
            else:
                changed.add(record)
        found = dict(answers)
        for alike in _alike(comparable):
            olds = [
                self.samples[record].to(new.device) for record, new in alike.items()
            ]
            masks = differs(torch.cat(olds), torch.cat([*alike.values()]))
            of_each = masks.split([old.numel() for old in olds])
            found.update(zip(alike, [mask.any() for mask in of_each], strict=True))
        for alike in _alike(found):
            is_true = torch.stack([*alike.values()]).tolist()
            changed.update(compress(alike, is_true))
        return changed


def _alike(tensors: _Tensors) -> list[_Tensors]:
    """The tensors, those of one dtype on one device together."""
    kinds: defaultdict[tuple[Any, Any], _Tensors] = defaultdict(dict)
    for record, tensor in tensors.items():
        kinds[tensor.device, tensor.dtype][record] = tensor
    return [*kinds.values()]
