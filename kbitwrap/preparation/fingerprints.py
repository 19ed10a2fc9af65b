"""Samples of a model's parameters.

They are taken without waiting for the device. The sample of a large parameter may miss
a change of a few elements; a digest sees any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..model.quantization import is_quantized_parameter
from ..model.records import ParameterRecord
from ..tensors.bits import RUNS, dense_parts, differ, is_composed, num_sampled, sample

# their samples tell whether a parameter is the recorded one, and no more
_RUNS_OF_QUANTIZED = 8

Recorded = Iterable[tuple[ParameterRecord, Tensor]]
Samples = dict[ParameterRecord, Tensor]


def sample_bytes(parameter: Tensor) -> int:
    """Return the bytes that a parameter's sample takes, without reading a value.

    They are the same on the meta device as on any other.
    """
    is_quantized = is_quantized_parameter(parameter)
    parts = dense_parts(parameter)
    if not parts or (is_quantized and parameter.dtype is not torch.int8):
        return 0  # one of 4 bits is told by its statistics
    num_runs = _RUNS_OF_QUANTIZED if is_quantized else RUNS
    return num_sampled(parts[0], num_runs) * parts[0].itemsize


def _sample(record: ParameterRecord, parameter: Tensor) -> Tensor | None:
    """Return a sample of a parameter, of the first of its parts, in the recorded dtype.

    ``None`` without values, and of a 4-bit weight, which its statistics tell.
    """
    parts = dense_parts(parameter)
    if record.quant_state is not None or not parts or parts[0].is_meta:
        return None
    part = parts[0].as_subclass(Tensor)
    if record.quantized_class is not None:
        return sample(part, _RUNS_OF_QUANTIZED)
    taken = sample(part)
    return taken if is_composed(type(parameter)) else taken.to(record.dtype)


def take_samples(parameters: Recorded) -> Samples:
    """Return a flat sample of each parameter that has one, on its device."""
    kinds: defaultdict[Any, Samples] = defaultdict(dict)
    for record, parameter in parameters:
        taken = _sample(record, parameter)
        if taken is not None:
            kinds[taken.device, taken.dtype][record] = taken

    samples: Samples = {}
    for alike in kinds.values():
        # In one piece of memory, and in none of a parameter's.
        together = torch.cat([*alike.values()])
        pieces = together.split([one.numel() for one in alike.values()])
        samples.update(zip(alike, pieces, strict=True))
    return samples


def is_changed(samples: Samples, record: ParameterRecord, value: Tensor) -> Tensor:
    """Compare a parameter's sample with the recorded one; does not wait for the device.

    Returns:
        A boolean: whether they differ. A parameter that has no sample is not compared.
    """
    old, new = samples.get(record), _sample(record, value)
    if old is None or new is None:
        return torch.tensor(False)
    if old.shape != new.shape or old.dtype != new.dtype:
        return torch.tensor(True)
    return differ(old.to(new.device), new)
