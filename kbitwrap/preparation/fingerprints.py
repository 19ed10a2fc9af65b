"""Samples of a model's parameters.

They are taken without waiting for the device, and compared in one read of it. The
sample of a large parameter may miss a change of a few elements; a digest sees any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import compress
from types import MappingProxyType
from typing import Any

import torch

from ..model.quantization import is_quantized_parameter
from ..model.records import ParameterRecord
from ..tensors.bits import RUNS, dense_parts, differs, is_composed, num_sampled, sample

# their samples tell whether a parameter is the recorded one, and no more
_RUNS_OF_QUANTIZED = 8

Recorded = Iterable[tuple[ParameterRecord, torch.Tensor]]
Samples = dict[ParameterRecord, torch.Tensor]


def sample_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes that a parameter's sample takes, without reading a value.

    They are the same on the meta device as on any other.
    """
    is_quantized = is_quantized_parameter(parameter)
    parts = dense_parts(parameter)
    if not parts or (is_quantized and parameter.dtype is not torch.int8):
        return 0  # one of 4 bits is told by its statistics
    num_runs = _RUNS_OF_QUANTIZED if is_quantized else RUNS
    return num_sampled(parts[0], num_runs) * parts[0].itemsize


def _sample(record: ParameterRecord, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a sample of a parameter, of the first of its parts, in the recorded dtype.

    ``None`` without values, and of a 4-bit weight, which its statistics tell.
    """
    parts = dense_parts(parameter)
    if record.quant_state is not None or not parts or parts[0].is_meta:
        return None
    part = parts[0].as_subclass(torch.Tensor)
    if record.quantized_class is not None:
        return sample(part, _RUNS_OF_QUANTIZED)
    taken = sample(part)
    return taken if is_composed(type(parameter)) else taken.to(record.dtype)


def take_samples(parameters: Recorded) -> Samples:
    """Return a flat sample of each parameter that has one, on its device."""
    taken: Samples = {}
    for record, parameter in parameters:
        sample_of = _sample(record, parameter)
        if sample_of is not None:
            taken[record] = sample_of

    samples: Samples = {}
    for alike in _alike(taken):
        # In one piece of memory, and in none of a parameter's.
        together = torch.cat([*alike.values()])
        pieces = together.split([one.numel() for one in alike.values()])
        samples.update(zip(alike, pieces, strict=True))
    return samples


def changed_samples(
    samples: Samples,
    parameters: Recorded,
    answers: Mapping[ParameterRecord, torch.Tensor] = MappingProxyType({}),
) -> set[ParameterRecord]:
    """Find the parameters that have other samples than the recorded ones.

    Args:
        samples: The recorded samples. A parameter that has none is not compared.
        parameters: The live parameters, or their values, with their records.
        answers: Boolean scalars that tell of parameters that were compared otherwise
            whether they changed: they are read together with the rest.

    Returns:
        The records of those that changed, after one read of each device.
    """
    changed: set[ParameterRecord] = set()
    comparable: Samples = {}
    for record, parameter in parameters:
        old, new = samples.get(record), _sample(record, parameter)
        if old is None or new is None:
            continue
        if old.shape == new.shape and old.dtype == new.dtype:
            comparable[record] = new
        else:
            changed.add(record)

    found = dict(answers)
    for alike in _alike(comparable):
        olds = [samples[record].to(new.device) for record, new in alike.items()]
        masks = differs(torch.cat(olds), torch.cat([*alike.values()]))
        of_each = masks.split([old.numel() for old in olds])
        found.update(zip(alike, [mask.any() for mask in of_each], strict=True))
    for alike in _alike(found):
        changed.update(compress(alike, torch.stack([*alike.values()]).tolist()))
    return changed


def _alike(tensors: Samples) -> list[Samples]:
    """Return the tensors, those of one dtype on one device together."""
    kinds: defaultdict[Any, Samples] = defaultdict(dict)
    for record, tensor in tensors.items():
        kinds[tensor.device, tensor.dtype][record] = tensor
    return [*kinds.values()]
