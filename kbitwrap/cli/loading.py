"""Loads the demonstration's model, quantized by bitsandbytes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from .. import Plan
from .console import InputError, first_line
from .text import NUM_BYTES, ByteTokens, TokenizerTokens, Tokens


@dataclass(frozen=True)
class LoadedModel:
    """A quantized model, and how to train it.

    Attributes:
        name: What to call it.
        model: The model, as ``from_pretrained`` returned it.
        tokens: Its tokens.
        learning_rate: The learning rate for a LoRA on it.
        modules_to_save: What to train beside the LoRA.
    """

    name: str
    model: nn.Module
    tokens: Tokens
    learning_rate: float
    modules_to_save: list[str] | None


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
        why, count = "torch cannot compute on it here", torch.cuda.device_count()
        if name.startswith("cuda") and not count:
            why = (
                "torch finds no GPU"
                if torch.version.cuda or torch.version.hip
                else "this torch is built without CUDA"
            )
        elif name.startswith("cuda"):
            why = (
                f"there are {count}, cuda:0 to cuda:{count - 1}"
                if count > 1
                else "there is one, cuda:0"
            )
        raise InputError(
            f"--device: device {name!r} is not available: {why}; leave it out, or give cpu"
        ) from error
    return device


def load_builtin(quant: str, device: torch.device) -> LoadedModel:
    """Build a small Llama over bytes with random weights, and load it quantized, as any checkpoint is.

    Its head is random too, so it is trained beside the LoRA: PEFT copies it, which
    preparation has to cope with.

    Args:
        quant: ``"nf4"`` or ``"int8"``.
        device: The device.

    Returns:
        The model. Its checkpoint is gone from the disk.
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
    with tempfile.TemporaryDirectory(prefix="kbitwrap-demo-") as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = _from_pretrained(folder, quant, device, local_files_only=True)
    return LoadedModel(
        "built-in byte-level Llama", model, ByteTokens(), 2e-3, ["lm_head"]
    )


def load_named(
    name: str, quant: str, device: torch.device, trust_remote_code: bool = False
) -> LoadedModel:
    """Load a causal language model, and its tokenizer if it has one.

    Args:
        name: What ``from_pretrained`` takes.
        quant: ``"nf4"`` or ``"int8"``.
        device: The device.
        trust_remote_code: Run the code that it brings along; otherwise a model that has
            some is refused.

    Returns:
        The model.

    Raises:
        InputError: It cannot be loaded, or its vocabulary has no room for bytes and it
            has no tokenizer.
    """
    try:
        if not trust_remote_code:
            _refuse_larger(name)
        model = _from_pretrained(
            name, quant, device, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever transformers, safetensors and the network raise, the input was at fault
        raise InputError(
            f"cannot load the model {name!r}: {first_line(error)}"
        ) from error
    try:
        tokens: Tokens = TokenizerTokens(
            AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        )
    except (
        Exception
    ):  # whatever transformers raises where there is no tokenizer that it can read
        tokens = ByteTokens()
        if model.get_input_embeddings().weight.shape[0] < NUM_BYTES:
            raise InputError(
                f"the model {name!r} has no tokenizer, and its vocabulary is too small for bytes"
            ) from None
    return LoadedModel(name, model, tokens, 2e-4, None)


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
    if quant == "nf4":
        # A CPU computes faster in float32; what is stored stays half.
        compute_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute_dtype,
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(
        name,
        quantization_config=config,
        dtype=torch.bfloat16,
        device_map={"": device},
        **kwargs,
    )


@contextlib.contextmanager
def few_threads(is_builtin: bool) -> Iterator[None]:
    """One thread for the built-in model: it is so small that more of them mostly wait for one another."""
    num_threads = torch.get_num_threads()
    if is_builtin:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def fork_devices(device: torch.device) -> list[int]:
    """The devices whose random state is put back, the CPU's apart."""
    return [] if device.type == "cpu" else [device.index or 0]


def rng(device: torch.device) -> str:
    """The type of device that ``fork_rng`` knows."""
    return "cuda" if device.type == "cpu" else device.type
