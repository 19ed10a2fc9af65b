"""Dtypes by their names, and by their codes in safetensors files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import _SIZE as LIBRARY_SIZES

from kbitwrap import ConfigError
from kbitwrap.tensors.dtypes import SAFETENSORS_DTYPES, dtype_name, find_dtype, parse_dtype

ALL = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_dtype_is_found_by_its_printed_name(dtype: torch.dtype) -> None:
    assert f"torch.{dtype_name(dtype)}" == str(dtype)
    assert find_dtype(dtype_name(dtype)) is parse_dtype(dtype_name(dtype)) is parse_dtype(dtype) is dtype


@pytest.mark.parametrize("name", ["float31", "torch.float32", "nn", "", 5, None])
def test_an_unknown_name_is_refused(name: object) -> None:
    assert find_dtype(name) is None
    with pytest.raises(ConfigError, match=r"dtype: expected a dtype such as torch.bfloat16 or 'bfloat16', found "):
        parse_dtype(name)


def test_every_dtype_of_safetensors_has_its_code() -> None:
    assert set(SAFETENSORS_DTYPES.values()) == {dtype for dtype in LIBRARY_SIZES if dtype is not None}
