"""Compares what other clients compute from written models with what transformers 5 does: all read the same of a config.

    python docs/figures clients FOLDER              write the models, and transformers' logits beside each
    CLIENT_PYTHON docs/figures/clients.py FOLDER    compare what the client does that this Python has installed

A client is an older transformers (with bitsandbytes for what is quantized), mlx-lm, or llama.cpp, whose sources the
folder `LLAMA_CPP` holds: its converter, and its library in xllamacpp. Each base has random weights and the config of a
model on the hub, from before transformers 5. The second command prints, for each written model, how far the
log-probabilities are off in parts of their length, and names what the client cannot read of the base either. Its status
is 1 where a client reads a base and computes something else from what was written of it.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

TOKENS = [list(range(8, 104))]  # more than a sliding window holds
PLAIN = ("half", "no-adapter", "live", "made")
QUANTIZED = ("export", "mixed", "quantized")
MOST_OFF = 1e-3
BASE_OF = {"export": "saved"}  # what the client has to read of each, where it is not the base's own folder
ADAPTED = r".*(q_proj|v_proj|qkv_proj|query_key_value|c_attn)"

_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh"}
# The class of each architecture, and the fields of its config beside the shape.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    "mistral": ("MistralForCausalLM", {"rope_theta": 1e6, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"rope_theta": 1e6, "use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", {"rope_theta": 1e6, "rope_scaling": None, "head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_MOE,
            "num_experts": 4,
            "rope_theta": 1e7,
            "rope_scaling": None,
            "head_dim": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"rope_theta": 1e6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeForCausalLM", {"rope_theta": 50000.0, "num_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2ForCausalLM", {"rope_theta": 500000, "rope_scaling": None}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "rope_theta": 50000.0,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 50000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 32,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {"rope_theta": 50000.0, "rope_scaling": _LONG, "original_max_position_embeddings": 64},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {"intermediate_size": 256, "rotary_emb_base": 50000, "rotary_pct": 0.5, "use_parallel_residual": True},
    ),
    "stablelm": ("StableLmForCausalLM", {"rope_theta": 50000, "partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "cohere": ("CohereForCausalLM", {"rope_theta": 4e6, "logit_scale": 0.5, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 256,
            "n_ctx": 256,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
}
_NOT_OF = {  # the shape's fields that files of an architecture do not have
    "gpt_neox": {"num_key_value_heads"},
    "gpt2": {
        name for name in _SHAPE if name.startswith(("hidden", "intermediate", "num_", "max_", "rms", "layer", "torch"))
    },
}


def config_of(name: str) -> dict[str, Any]:
    """The config of an architecture as its file on the hub has it."""
    class_name, fields = CONFIGS[name]
    shape = {key: value for key, value in _SHAPE.items() if key not in _NOT_OF.get(name, ())}
    return {**shape, **fields, "model_type": name, "architectures": [class_name]}


def make_base(name: str, folder: Path) -> Any:
    """Save a model with random weights, and the config that its file on the hub has; return the model."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, CONFIGS[name][0])
    model = model_class(model_class.config_class.from_dict(copy.deepcopy(config_of(name)))).to(torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config_of(name), indent=2))
    return model


def write(name: str, folder: Path) -> None:
    """Write a base, and all that is written of it, with the logits of each."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from kbitwrap import KbitPreparedModel, merge_checkpoint

    base, adapter = folder / "base", folder / "adapter"
    made = make_base(name, base)
    KbitPreparedModel(made).export(folder / "made")
    # the dtype in which what is quantized is compared
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4, device_map={"": "cpu"})
    model.save_pretrained(folder / "saved")
    with KbitPreparedModel(model) as prepared:
        peft_model = get_peft_model(model, LoraConfig(lora_alpha=2, target_modules=ADAPTED, init_lora_weights=False))
        peft_model.save_pretrained(adapter)
        prepared.export(folder / "export", model=peft_model)
        prepared.export(folder / "live", model=peft_model, merge_adapters=True)
    merge_checkpoint(base, None, folder / "no-adapter", quantization_config=nf4)
    for form in ("half", "mixed", "quantized"):
        merge_checkpoint(base, adapter, folder / form, merge_as=form, quantization_config=nf4)

    for written in ("base", "saved", *PLAIN, *QUANTIZED):
        numpy.save(folder / written / "logits.npy", by_transformers(folder / written))


# ----------------------------------------------------------------------------------------------------
# The clients: each computes the logits of a folder, in float32.
# ----------------------------------------------------------------------------------------------------


def by_transformers(folder: Path) -> Any:
    """The logits that the installed transformers computes."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for tensor in model.parameters():  # those that hold 4-bit codes stay
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits[0].numpy()


def by_mlx(folder: Path) -> Any:
    """The logits that mlx-lm computes."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return numpy.array(model(mx.array(TOKENS))[0])


def by_llama_cpp(folder: Path) -> Any:
    """The logarithms of the probabilities, after all tokens, that llama.cpp computes from what its converter writes."""
    import xllamacpp

    sys.path[:0] = [os.environ["LLAMA_CPP"], f"{os.environ['LLAMA_CPP']}/gguf-py"]
    conversion, gguf = importlib.import_module("conversion"), importlib.import_module("gguf")
    vocabulary = range(_SHAPE["vocab_size"])

    def set_vocab(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("llama")
        self.gguf_writer.add_token_list([f"<{token}>" for token in vocabulary])
        self.gguf_writer.add_token_scores([0.0 for _ in vocabulary])
        self.gguf_writer.add_token_types([gguf.TokenType.NORMAL for _ in vocabulary])

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    own = conversion.get_model_class(architecture)
    path = folder / "model.gguf"
    converter = type(own.__name__, (own,), {"model_arch": own.model_arch, "set_vocab": set_vocab})
    converter(folder, gguf.LlamaFileType.ALL_F32, path).write()

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = _SHAPE["max_position_embeddings"]
    params.n_parallel = 1
    params.verbosity = -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    question = {"prompt": TOKENS[0], "n_predict": 1, "n_probs": len(vocabulary), "temperature": 0}
    answer = xllamacpp.Server(params).handle_completions(question)
    path.unlink()
    found = numpy.empty((1, len(vocabulary)))
    for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        found[0, token["id"]] = token["logprob"]
    return found


def client() -> tuple[Callable[[Path], Any], tuple[str, ...]]:
    """The client that is installed here, and the models that it reads."""
    if "LLAMA_CPP" in os.environ:
        return by_llama_cpp, PLAIN
    if importlib.util.find_spec("mlx_lm"):
        return by_mlx, PLAIN
    return by_transformers, PLAIN + QUANTIZED if importlib.util.find_spec("bitsandbytes") else PLAIN


def log_probabilities(logits: Any) -> Any:
    """The logarithms of the probabilities that logits of shape (tokens, vocabulary) give; of themselves, the same."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - numpy.log(numpy.exp(logits).sum(axis=-1, keepdims=True))


def off(compute: Callable[[Path], Any], folder: Path) -> float | str:
    """How far a client's log-probabilities are off, in parts of their length; or why it computes none."""
    expected = log_probabilities(numpy.load(folder / "logits.npy"))
    try:
        found = log_probabilities(compute(folder))
    except Exception as error:  # of a client, whatever it cannot read
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    expected = expected[-len(found) :]  # llama.cpp tells those after the last token only
    return float(numpy.linalg.norm(found - expected) / numpy.linalg.norm(expected))


def is_right(found: float | str) -> bool:
    """Whether a client computed the logits of transformers 5."""
    return not isinstance(found, str) and found < MOST_OFF


def compare(folder: Path) -> int:
    """Compare the installed client's logits with those of transformers 5, for all that was written."""
    compute, written = client()
    wrong = 0
    for name in CONFIGS:
        for one in written:
            found = off(compute, folder / name / one)
            told = found if isinstance(found, str) else f"{found:.0e}"
            if not is_right(found):
                of_base = off(compute, folder / name / BASE_OF.get(one, "base"))
                told += f": WRONG, the base is off by {of_base:.0e}" if is_right(of_base) else ", and so is the base"
                wrong += is_right(of_base)
            print(f"{name:12} {one:11} {told}")
    return int(wrong > 0)


def main() -> None:
    """Write the models."""
    for name in CONFIGS:
        write(name, Path(sys.argv[1]) / name)


if __name__ == "__main__":
    sys.exit(compare(Path(sys.argv[1])))
