"""Who says how a base was quantized in training, and in which order they are asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kbitwrap import ConfigError, KbitPreparedModel, ManifestMismatchError, QuantKind
from kbitwrap.checkpoints.adapters import read_adapter
from kbitwrap.checkpoints.base_quantization import (
    BESIDE_ADAPTER,
    GIVEN,
    OF_BASE,
    OF_MANIFEST,
    UNKNOWN,
    UNQUANTIZED,
    find_quantization,
)
from kbitwrap.model.quantization import bitsandbytes_config
from support import training, zoo


def test_the_first_source_that_says_it_counts(tmp_path: Path) -> None:
    base, nf4 = zoo.checkpoint("llama"), bitsandbytes_config("nf4", torch.bfloat16)
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        training.adapt("llama", prepared.model).save_pretrained(tmp_path / "adapter")
        manifest = prepared.manifest()
    saved = read_adapter(tmp_path / "adapter")
    assert find_quantization(base, None, None, saved).source == UNKNOWN
    assert find_quantization(base, False, None, saved) == UNQUANTIZED

    zoo.load("llama").save_pretrained(tmp_path / "quantized")
    for given, source in ((nf4, GIVEN), (None, BESIDE_ADAPTER)):
        found = find_quantization(base, given, None, saved)
        assert (found.source, found.kind, found.form) == (source, QuantKind.NF4, "in nf4")
        (tmp_path / "adapter" / "config.json").write_bytes((tmp_path / "quantized" / "config.json").read_bytes())

    for given in (None, nf4):
        found = find_quantization(base, given, manifest, saved)
        assert (found.source, found.kind) == (OF_MANIFEST, QuantKind.NF4)
        assert find_quantization(tmp_path / "quantized", given, manifest, saved).source == OF_BASE


def test_what_a_source_contradicts_is_refused(tmp_path: Path) -> None:
    fp4 = bitsandbytes_config("fp4", torch.bfloat16)
    model = zoo.load("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has a quantization of its own, .*bnb_4bit_quant_type: 'nf4', given: 'fp4'"):
        find_quantization(tmp_path, fp4, None, None)
    with KbitPreparedModel(model) as prepared:
        manifest = prepared.manifest()
    with pytest.raises(ManifestMismatchError, match=r"the manifest records nf4 .*, and fp4 was given"):
        find_quantization(zoo.checkpoint("llama"), fp4, manifest, None)
