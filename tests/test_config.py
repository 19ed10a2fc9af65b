"""The settings: each is validated, and a mistake names what is valid."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from kbitwrap import ConfigError, KbitPreparedModel, Precision, PrepareConfig, build_plan, errors
from kbitwrap.config import parse_bytes

FIELDS = [field.name for field in dataclasses.fields(PrepareConfig)]
UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
UNITS |= {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def test_the_defaults() -> None:
    assert dataclasses.asdict(PrepareConfig()) == {
        "precision": Precision.NORMS,
        "freeze": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "input_require_grads": None,
        "head": None,
        "head_chunk_bytes": None,
        "adapter_dtype": None,
        "norm_modules": (),
        "memory_budget": None,
        "audit": False,
        "keep_originals": False,
        "empty_cache": True,
        "progress": False,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("precision", value) for value in ("half", "FULL", "", None, 0, True, ["full"])),
        *(
            (field, value)
            for field in ("freeze", "gradient_checkpointing", "audit", "keep_originals", "empty_cache", "progress")
            for value in (None, 0, 1, "yes", [])
        ),
        *(("gradient_checkpointing_kwargs", value) for value in (None, True, "use_reentrant", [("a", 1)], {1: 2})),
        *(("input_require_grads", value) for value in ("yes", 2, 1, 0, [])),
        *(("head", value) for value in ("half", "bfloat16", torch.float32, True, ["float32"])),
        *(("adapter_dtype", value) for value in ("float16", "half", torch.float32, True, ["float32"])),
        *(("norm_modules", value) for value in (None, 3, (3,), [None], {"RMSNorm"}, (nn.LayerNorm(2),))),
        *(("memory_budget", value) for value in (-1, 1.5, True, "", "much", "12 parsecs", "-1MiB", "1e9", [1])),
    ],
)
def test_an_invalid_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PrepareConfig(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert repr(value) in str(caught.value)
    if field != "memory_budget":
        assert str(caught.value).startswith(f"{field}: expected")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("precision", value) for value in ("full", "norms", "none", *Precision)),
        *(
            (field, value)
            for field in ("freeze", "gradient_checkpointing", "audit", "keep_originals", "empty_cache", "progress")
            for value in (True, False)
        ),
        *(("gradient_checkpointing_kwargs", value) for value in ({}, {"use_reentrant": True}, {"a": None})),
        *(("input_require_grads", value) for value in (None, True, False)),
        *(("head", value) for value in (None, "float32")),
        *(("adapter_dtype", value) for value in (None, "float32", "bfloat16")),
        *(("norm_modules", value) for value in ((), (nn.LayerNorm,), ("Gated.*", nn.GroupNorm))),
        *(("memory_budget", value) for value in (None, 0, 1, "0", "512MiB")),
    ],
)
def test_a_valid_value_is_kept(field: str, value: Any) -> None:
    assert getattr(PrepareConfig(**{field: value}), field) == value


@pytest.mark.parametrize("value", ["full", "norms", "none"])
def test_a_precision_is_given_by_value_and_read_as_a_member(value: str) -> None:
    precision = PrepareConfig(precision=value).precision
    assert precision is Precision(value)
    assert str(precision) == f"{precision}" == value


@pytest.mark.parametrize("modules", ["Gated.*", nn.LayerNorm, ["Gated.*", nn.LayerNorm]])
def test_norm_modules_become_a_tuple(modules: Any) -> None:
    expected = tuple(modules) if isinstance(modules, list) else (modules,)
    assert PrepareConfig(norm_modules=modules).norm_modules == expected


def test_a_pattern_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"norm_modules: '\(' is not a regular expression"):
        PrepareConfig(norm_modules=("Norm", "("))


def test_the_config_does_not_follow_what_it_was_given() -> None:
    kwargs, modules = {"use_reentrant": True}, ["Gated"]
    config = PrepareConfig(gradient_checkpointing_kwargs=kwargs, norm_modules=modules)
    kwargs["debug"] = True
    modules.append("Other")
    assert config.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert config.norm_modules == ("Gated",)


def test_the_defaults_are_not_shared() -> None:
    assert PrepareConfig().gradient_checkpointing_kwargs is not PrepareConfig().gradient_checkpointing_kwargs


@pytest.mark.parametrize("field", FIELDS)
def test_a_config_is_frozen(field: str) -> None:
    config = PrepareConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, getattr(config, field))


def test_a_config_takes_keywords_only() -> None:
    kinds = {parameter.kind for parameter in inspect.signature(PrepareConfig).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError):
        PrepareConfig("full")


def test_configs_compare_by_value() -> None:
    assert PrepareConfig(precision="full") == PrepareConfig(precision=Precision.FULL)
    assert PrepareConfig(precision="full") != PrepareConfig()


# Where a config is read, and the fields are keywords too.
READERS = [build_plan, KbitPreparedModel]


@pytest.mark.parametrize("read", READERS)
def test_an_unknown_field_is_refused_with_all_fields(read: Any) -> None:
    with pytest.raises(ConfigError, match="unknown field 'zzz'") as caught:
        read(nn.Linear(2, 2), zzz=1)
    assert all(field in str(caught.value) for field in FIELDS)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("config", ["norms", {"precision": "norms"}, Precision.NORMS, PrepareConfig])
def test_a_config_of_another_type_is_refused(read: Any, config: Any) -> None:
    with pytest.raises(ConfigError, match="config: expected a PrepareConfig or None"):
        read(nn.Linear(2, 2), config)


@pytest.mark.parametrize("read", READERS)
def test_keywords_win_over_the_config_and_are_validated(read: Any) -> None:
    config = PrepareConfig(precision="full", freeze=False)
    merged = read(nn.Linear(2, 2), config, precision="none").config
    assert merged == PrepareConfig(precision="none", freeze=False)
    assert config.precision is Precision.FULL
    with pytest.raises(ConfigError, match="freeze"):
        read(nn.Linear(2, 2), config, freeze="no")


@pytest.mark.parametrize("read", READERS)
def test_every_field_is_a_keyword(read: Any) -> None:
    defaults = {field: getattr(PrepareConfig(), field) for field in FIELDS}
    assert read(nn.Linear(2, 2), **defaults).config == PrepareConfig()


@pytest.mark.parametrize(("budget", "num_bytes"), [(None, None), (0, 0), (12, 12), ("1KiB", 1024), ("2 GB", 2 * 10**9)])
def test_the_budget_in_bytes(budget: Any, num_bytes: int | None) -> None:
    assert PrepareConfig(memory_budget=budget).memory_budget_bytes == num_bytes


@settings(derandomize=True)
@given(st.integers(0, 1 << 70))
def test_an_integer_is_itself_as_number_and_as_string(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == num_bytes
    assert parse_bytes(str(num_bytes)) == num_bytes


@settings(derandomize=True)
@given(
    st.decimals(0, 10**6, places=3, allow_nan=False, allow_infinity=False),
    st.sampled_from(list(UNITS)),
    st.sampled_from(["", " ", "\t"]),
    st.sampled_from([str.upper, str.lower, str]),
)
def test_a_string_is_number_times_unit_rounded_down(number: Decimal, unit: str, space: str, case: Any) -> None:
    assert parse_bytes(f"{space}{number:f}{space}{case(unit)}{space}") == int(number * UNITS[unit])


@settings(derandomize=True, max_examples=40)
@given(st.text(max_size=8) | st.floats() | st.none() | st.booleans() | st.integers(max_value=-1) | st.binary())
def test_everything_else_is_refused(value: Any) -> None:
    number = value.strip().rstrip("bBkKmMgGtTiI").strip() if isinstance(value, str) else ""
    assume(not number.replace(".", "", 1).isdecimal())
    with pytest.raises(ConfigError, match="expected a number of bytes"):
        parse_bytes(value)


ERRORS = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, Exception)]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_says_its_message_and_survives_copies_and_other_processes(error: type[errors.KbitWrapError]) -> None:
    fields = {field.name: field.name for field in dataclasses.fields(error)}
    made = error(**fields)
    for found in (made, copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert str(found) == "message"
        assert vars(found) == fields


def test_an_error_may_be_raised_without_a_message() -> None:
    with pytest.raises(ConfigError, match=r"^$"):
        raise ConfigError
