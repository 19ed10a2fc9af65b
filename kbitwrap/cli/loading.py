"""Loads the demonstration's model, quantized by bitsandbytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from .. import Plan
from ..model.quantization import bitsandbytes_config
from .console import InputError, first_line
from .text import NUM_BYTES, ByteTokens, TokenizerTokens, Tokens


def choose_device(name: str | None) -> torch.device:
    """Find the device to run on, and see that it is there.

    Args:
        name: A device; ``None`` for CUDA if there is one, else the CPU.

    Returns:
        The device.

    Raises:
        InputError: There is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        # raises on a device that is not there, or cannot compute
        torch.empty(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = "torch cannot compute on it here"
        if name.startswith("cuda"):
            why = _why_not_cuda()
        raise InputError(
            f"--device: device {name!r} is not available: {why}; leave it out, or give cpu"
        ) from error
    return device


def _why_not_cuda() -> str:
    count = torch.cuda.device_count()
    if count > 1:
        return f"there are {count}, cuda:0 to cuda:{count - 1}"
    if count == 1:
        return "there is one, cuda:0"
    if torch.version.cuda or torch.version.hip:
        return "torch finds no GPU"
    return "this torch is built without CUDA"


def save_builtin(folder: Path) -> None:
    """Build a small Llama over bytes with random weights, and save it in bfloat16.

    Args:
        folder: Where to.
    """
    config = LlamaConfig(
        vocab_size=NUM_BYTES + 3,
        bos_token_id=NUM_BYTES,
        eos_token_id=NUM_BYTES + 1,
        pad_token_id=NUM_BYTES + 2,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def load_builtin(folder: Path, quant: str, device: torch.device) -> Any:
    """Load the built-in model quantized, as any checkpoint is.

    Args:
        folder: Where it was saved.
        quant: ``"nf4"`` or ``"int8"``.
        device: The device.

    Returns:
        The model.
    """
    return _from_pretrained(str(folder), quant, device, local_files_only=True)


def load_named(
    name: str, quant: str, device: torch.device, trust_remote_code: bool
) -> Any:
    """Load a causal language model.

    Args:
        name: What ``from_pretrained`` takes.
        quant: ``"nf4"`` or ``"int8"``.
        device: The device.
        trust_remote_code: Run the code that it brings along; otherwise a model that has
            some is refused.

    Returns:
        The model.

    Raises:
        InputError: It cannot be loaded.
    """
    try:
        if not trust_remote_code:
            _refuse_larger(name)
        return _from_pretrained(
            name, quant, device, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever transformers, safetensors and the network raise, the input was at fault
        raise InputError(
            f"cannot load the model {name!r}: {first_line(error)}"
        ) from error


def quantization_on(device: torch.device, quant: str) -> Any:
    """The config by which the demonstration quantizes.

    Args:
        device: The device.
        quant: ``"nf4"`` or ``"int8"``.

    Returns:
        The config for ``from_pretrained``.
    """
    # A CPU computes faster in float32; what is stored stays half.
    compute_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return bitsandbytes_config(quant, compute_dtype)


def tokens_of(name: str, model: Any, trust_remote_code: bool) -> Tokens:
    """The tokens of a model: its tokenizer's, or bytes where it has none.

    Args:
        name: What ``from_pretrained`` takes.
        model: The model.
        trust_remote_code: Run the code that it brings along.

    Returns:
        The tokens.

    Raises:
        InputError: It has no tokenizer, and its vocabulary has no room for bytes.
    """
    try:
        return TokenizerTokens(
            AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        )
    # whatever transformers raises without a tokenizer that it can read
    except Exception as error:
        if model.get_input_embeddings().weight.shape[0] >= NUM_BYTES:
            return ByteTokens()
        raise InputError(
            f"the model {name!r} has no tokenizer, and its vocabulary is too small for bytes"
        ) from error


def _refuse_larger(name: str) -> None:
    """Raise where a config describes far more than the files of its folder hold, or than any model has."""
    described = sum(row["bytes"] for row in Plan.for_pretrained(name).by_role.values())
    files = [
        path for path in Path(name).glob("*") if path.suffix in (".safetensors", ".bin")
    ]
    held = sum(path.stat().st_size for path in files)
    if files and described > 32 * held + (128 << 20):
        raise InputError(
            f"its config describes {described:,} bytes, and its files hold {held:,}"
        )


def _from_pretrained(name: str, quant: str, device: torch.device, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        name,
        quantization_config=quantization_on(device, quant),
        dtype=torch.bfloat16,
        device_map={"": device},
        **kwargs,
    )


@contextlib.contextmanager
def put_back(device: torch.device, *, one_thread: bool) -> Iterator[None]:
    """Put torch's random state and its number of threads back afterwards.

    Args:
        device: The device whose random state it is, beside the CPU's.
        one_thread: Compute in one thread meanwhile. The built-in model is so small that
            more of them mostly wait for one another.

    Yields:
        Nothing.
    """
    devices, device_type = [device.index or 0], device.type
    if device_type == "cpu":
        devices, device_type = [], "cuda"  # a type that fork_rng knows
    num_threads = torch.get_num_threads()
    if one_thread:
        torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices, device_type=device_type):
            yield
    finally:
        torch.set_num_threads(num_threads)
