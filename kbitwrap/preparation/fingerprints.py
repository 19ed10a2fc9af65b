"""Fingerprints of a model's parameters, taken without waiting for the device and compared in one read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..model.quantization import is_quantized_parameter, unpacked_copy
from ..model.records import ParameterRecord
from ..tensors.bits import (
    RUNS,
    begin_digest,
    content_digest,
    dense_parts,
    differs,
    is_dense,
    num_sampled,
    sample,
)

# their samples tell whether a parameter is the recorded one, and no more
_RUNS_OF_QUANTIZED = 8


def _sampled(record: ParameterRecord, parameter: torch.Tensor) -> torch.Tensor | None:
    """A sample in the recorded dtype; ``None`` without elements, and of a 4-bit weight, which its statistics tell."""
    if record.quant_state is not None:
        return None
    if record.quantized_class is not None:
        data = unpacked_copy(parameter).as_subclass(torch.Tensor)
        return None if data.is_meta else sample(data, _RUNS_OF_QUANTIZED)
    if type(parameter) is not nn.Parameter:
        parts = dense_parts(parameter)
        return (
            sample(parts[0].as_subclass(torch.Tensor))
            if parts and not parts[0].is_meta
            else None
        )
    if parameter.is_meta or parameter.layout is not torch.strided:
        return None
    taken = sample(parameter)
    return taken if taken.dtype is record.dtype else taken.to(record.dtype)


def sample_bytes(parameter: torch.Tensor) -> int:
    """The bytes that a parameter's sample takes, without reading a value; on the meta device as on any other."""
    is_quantized = is_quantized_parameter(parameter)
    if is_quantized and parameter.dtype is not torch.int8:
        return 0  # one of 4 bits is told by its statistics
    parts = dense_parts(parameter)
    num_runs = _RUNS_OF_QUANTIZED if is_quantized else RUNS
    return num_sampled(parts[0], num_runs) * parts[0].itemsize if parts else 0


class Fingerprints:
    """A sample of every parameter, on its device, which may miss a few elements; with ``audit`` digests too."""

    def __init__(
        self, parameters: Iterable[tuple[ParameterRecord, torch.Tensor]], audit: bool
    ) -> None:
        self._samples: dict[ParameterRecord, torch.Tensor] = {}
        self._digests: dict[ParameterRecord, Callable[[], int]] = {}
        groups: dict[Any, list[tuple[ParameterRecord, torch.Tensor]]] = {}
        for record, parameter in parameters:
            taken = _sampled(record, parameter)
            if taken is not None:
                groups.setdefault((taken.device, taken.dtype), []).append(
                    (record, taken)
                )
            if audit and record.quantized_class is None and is_dense(parameter):
                self._digests[record] = begin_digest(parameter)
        for found in groups.values():
            # one piece of memory, and nothing pinned
            together = torch.cat([taken for _, taken in found])
            pieces = together.split([taken.numel() for _, taken in found])
            self._samples.update(
                zip((record for record, _ in found), pieces, strict=True)
            )

    @property
    def num_bytes(self) -> int:
        """The bytes of the samples."""
        return sum(taken.nbytes for taken in self._samples.values())

    def has(self, record: ParameterRecord) -> bool:
        """Whether there is a sample of a parameter."""
        return record in self._samples

    def changed(
        self,
        parameters: Iterable[tuple[ParameterRecord, torch.Tensor]],
        # to compare its digest
        original_of: Callable[[ParameterRecord, torch.Tensor], torch.Tensor]
        | None = None,
        # answers for others, on their devices
        compared: Mapping[ParameterRecord, torch.Tensor] = MappingProxyType({}),
    ) -> set[ParameterRecord]:
        """Find the parameters that hold others than the recorded values, in one read for each device."""
        changed: set[ParameterRecord] = set()
        groups: dict[Any, list[tuple[ParameterRecord, torch.Tensor, torch.Tensor]]] = {}
        for record, parameter in parameters:
            old, new = self._samples.get(record), _sampled(record, parameter)
            if old is None or new is None:
                continue
            if old.shape != new.shape or old.dtype != new.dtype:
                changed.add(record)
                continue
            groups.setdefault((new.device, new.dtype), []).append((record, old, new))
            digest = self._digests.get(record)
            if (
                original_of
                and digest
                and content_digest(original_of(record, parameter)) != digest()
            ):
                changed.add(record)
        masks: dict[
            torch.device, list[tuple[list[ParameterRecord], list[int], torch.Tensor]]
        ] = {}
        for (device, _), found in groups.items():
            olds, news = (
                torch.cat([old.to(device) for _, old, _ in found]),
                torch.cat([new for _, _, new in found]),
            )
            mask = differs(olds, news)
            masks.setdefault(device, []).append(
                ([r for r, _, _ in found], [old.numel() for _, old, _ in found], mask)
            )
        for record, answer in compared.items():
            masks.setdefault(answer.device, []).append(([record], [1], answer.view(1)))
        for of_device in masks.values():
            is_different = torch.cat([mask for *_, mask in of_device]).cpu()
            records = [record for records, _, _ in of_device for record in records]
            lengths = [length for _, lengths, _ in of_device for length in lengths]
            changed.update(
                r
                for r, m in zip(records, is_different.split(lengths), strict=True)
                if bool(m.any())
            )
        return changed
