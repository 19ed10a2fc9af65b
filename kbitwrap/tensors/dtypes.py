"""Dtypes: their names, and their codes in safetensors files."""

from __future__ import annotations

import torch

from ..errors import ConfigError

HALF_DTYPES = (torch.float16, torch.bfloat16)

TWO_A_BYTE = "F4"
"""The code of the dtype that holds two values in a byte.

The library safetensors counts the values, and torch the bytes.
"""
# In the order in which a safetensors file holds its tensors.
_SAFETENSORS_CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": TWO_A_BYTE,
    "bool": "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: object) -> torch.dtype | None:
    """Return the dtype of that name; ``None`` where this torch has none."""
    if not isinstance(name, str):
        return None
    found = getattr(torch, name, None)  # older versions of torch have fewer
    return found if isinstance(found, torch.dtype) else None


def parse_dtype(
    dtype: object, name: str = "dtype", *, is_floating: bool = False
) -> torch.dtype:
    """Return the dtype that a caller gave, itself or by its name.

    ``ConfigError`` is raised for anything else.
    """
    found = dtype if isinstance(dtype, torch.dtype) else find_dtype(dtype)
    is_wrong_kind = is_floating and found is not None and not found.is_floating_point
    if found is None or is_wrong_kind:
        kind = "floating-point dtype" if is_floating else "dtype"
        raise ConfigError(
            f"{name}: expected a {kind} such as torch.bfloat16 or 'bfloat16', found {dtype!r}"
        )
    return found


SAFETENSORS_DTYPES = {
    code: dtype
    for name, code in _SAFETENSORS_CODES.items()
    if (dtype := find_dtype(name)) is not None
}
"""The dtypes that both this torch and safetensors have, by their codes.

They are in the order of a file.
"""
