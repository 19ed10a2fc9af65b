"""Checkpoints with hand-made weights, in the layouts of methods that transformers only loads: GPTQ, AWQ and others.

The linear layers of the blocks are codes of a few bits, with a scale and a zero point for each group of inputs.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support import zoo

GROUP_SIZE = 32
# Where AWQ has the codes of eight neighbouring outputs in a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


def codes_of(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes ``(in, out)``, and scales and zero points ``(groups, out)``, of a weight ``(out, in)``."""
    groups = weight.float().t().unflatten(0, (-1, GROUP_SIZE))
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    # A zero point of 0 is stored by no version of GPTQ: it is one less there.
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    codes = (groups / scales.float().unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, 2**bits - 1)
    return codes.flatten(0, 1).int(), scales, zeros.int()


def packed(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes as words of 32 bits, the first in the lowest bits, along a dimension."""
    words = codes.long().unflatten(dim, (-1, 32 // bits)).movedim(dim + 1, 0)
    found = sum(word << (bits * number) for number, word in enumerate(words))
    return torch.where(found >= 2**31, found - 2**32, found).int().contiguous()


def gptq(weight: torch.Tensor, bits: int) -> Tensors:
    codes, scales, zeros = codes_of(weight, bits)
    groups = torch.arange(len(codes), dtype=torch.int32) // GROUP_SIZE
    qzeros = packed(zeros - 1, bits, 1)
    return {"qweight": packed(codes, bits, 0), "qzeros": qzeros, "scales": scales, "g_idx": groups}


def awq(weight: torch.Tensor, bits: int) -> Tensors:
    codes, scales, zeros = codes_of(weight, bits)
    qweight, qzeros = (packed(c.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), bits, 1) for c in (codes, zeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}


def aqlm(weight: torch.Tensor, bits: int) -> Tensors:
    """The code of each eight inputs is drawn: a codebook that fits a weight takes minutes to find."""
    drawn = torch.Generator().manual_seed(weight.shape[1])
    codes = torch.randint(0, 2**bits, (len(weight), weight.shape[1] // 8, 1), generator=drawn)
    dtype = torch.int8 if bits <= 8 else torch.int16
    codebooks = torch.randn(1, 2**bits, 1, 8, generator=drawn)
    scales = weight.float().std(1).view(-1, 1, 1, 1).bfloat16()
    return {"codes": codes.to(dtype), "codebooks": codebooks.bfloat16(), "scales": scales}


def compressed_tensors(weight: torch.Tensor, bits: int) -> Tensors:
    """Symmetric codes, packed by the library."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    scales = (groups.abs().amax(2) / (2 ** (bits - 1) - 1)).bfloat16()
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    packed_codes = pack_to_int32(codes.flatten(1).to(torch.int8), bits)
    return {"weight_packed": packed_codes, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def bitnet(weight: torch.Tensor, bits: int) -> Tensors:
    """The weight itself: it is quantized as it is used."""
    return {"weight": weight}


def gemma(weight: torch.Tensor, bits: int) -> Tensors:
    """Symmetric codes of 8 bits with a scale for each output, and the steps of the activations."""
    scales = weight.float().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    codes = (weight.float() / scales).round().to(torch.int8)
    steps = {f"{side}_activation_scale": torch.tensor(0.05) for side in ("input", "output")}
    return {"weight": codes, "weight_scale": scales, **steps}


@functools.cache
def checkpoint(architecture: str, method: str, bits: int, config: str) -> Path:
    """The folder with an architecture's checkpoint whose blocks hold packed weights; ``config`` is JSON."""
    source = zoo.checkpoint(architecture)
    tensors = {fqn: tensor.bfloat16() for fqn, tensor in load_file(source / "model.safetensors").items()}
    for fqn in [fqn for fqn, tensor in tensors.items() if ".layers." in fqn and tensor.dim() == 2]:
        packed_weight = PACK[method](tensors.pop(fqn), bits)
        tensors.update({f"{fqn.removesuffix('weight')}{name}": tensor for name, tensor in packed_weight.items()})
    folder = Path(tempfile.mkdtemp(dir=zoo.checkpoints()))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings: dict[str, Any] = json.loads((source / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": method, **json.loads(config)}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


PACK = {
    "gptq": gptq,
    "awq": awq,
    "aqlm": aqlm,
    "compressed-tensors": compressed_tensors,
    "bitnet": bitnet,
    "gemma": gemma,
}
