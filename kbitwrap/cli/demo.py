"""``kbitwrap demo``: PEFT's way and ours on the same small model. Everything that is told was measured."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from .console import (
    EXIT_DONE,
    EXIT_NO,
    Doing,
    Result,
    show_result,
    working,
)
from .tables import table
from .usage import Json

if TYPE_CHECKING:
    from torch import Tensor, nn

SUMMARY = (
    "Prepare, train and merge a small model PEFT's way and ours, and compare them."
)
HELP = (
    "Prepare, train and merge a small quantized model PEFT's way and ours, side by side.\n\n"
    "A small byte-level Llama is built and loaded in nf4, once for each precision. What a training step takes is "
    "predicted, and measured. A LoRA is trained on it, the model is suspended and restored, and compared with what was "
    "loaded. The same LoRA is merged in PEFT's ways and in ours, and doctor examines each merge. Runs on the CPU, and "
    "needs no network.\n\n"
    "Exit status: 0 every answer is yes, 1 one is no, 2 bad usage or bad input."
)

PEFT, COMPUTE, NORMS = WAYS = ("peft", "compute", "norms")
_TITLE = "built-in byte-level Llama, nf4: PEFT's way and ours\n"
_NEXT = """Next, with your own:
  kbitwrap plan MODEL --step --budget 8GiB
  kbitwrap merge ADAPTER --quant KIND --out DIR
  kbitwrap doctor DIR --adapter ADAPTER --quant KIND"""
_LENGTH = 64  # tokens of a block of text
_NUM_HELD_OUT = 16  # blocks
_BATCH_SIZE = 4
_STEPS = 30
_IN_NF4, _IN_BFLOAT16, _EXPORT = (
    "merge_and_unload in nf4",
    "merge_and_unload in bfloat16",
    "kbitwrap's export",
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_ATTRIBUTES = (
    "forward",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
)

State = dict[tuple[str, str], Any]
"""The values that describe a base, by what they are of: an aspect and a name."""


def command(
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="Random seed.")
    ] = 0,
    json_: Json = False,
) -> int:
    """Run the demonstration and print what was measured. 0 if every answer is yes, else 1."""
    if not json_:
        print(_TITLE, flush=True)
    with working("measuring") as doing, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, on what is done here on purpose
        with tempfile.TemporaryDirectory(prefix="kbitwrap-demo-") as folder:
            result = run(seed, Path(folder), doing)
    show_result(result, _tables(result), json_)
    return EXIT_DONE if result["passed"] else EXIT_NO


def run(seed: int, folder: Path, doing: Doing) -> Result:
    """Measure each way to prepare and to merge, and answer; the result is ready for JSON.

    Args:
        seed: The seed of the model, the adapters and the order of the text.
        folder: The folder in which the model, the adapter and the merges are saved.
        doing: The line of progress.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _build_model().save_pretrained(folder / "base")
        blocks = _read_text()
        training, held_out = blocks[_NUM_HELD_OUT:], blocks[:_NUM_HELD_OUT]
        sides = {}
        for way in WAYS:
            doing.now(f"preparing and training: {way}")
            torch.manual_seed(seed)
            sides[way] = _measure_side(way, folder, training)
        doing.now("merging")
        merges = _measure_merges(folder, held_out)

    pefts, *ours = sides.values()
    expected = pefts.pop("numbers")
    for side in ours:
        distances = (side.pop("numbers") - expected).abs()
        side["distance_from_peft"] = distances.max().item()
    is_predicted = all(
        side["predicted_bytes"] == side["step_bytes"] for side in sides.values()
    )
    is_changed = any(side["suspended"] or side["left"] for side in ours)
    *merged_by_peft, export = merges.values()
    least_lost = min(merge["lost"] for merge in merged_by_peft)
    answers = {
        "a training step takes the bytes that were predicted": is_predicted,
        'loss and gradients of "compute" are PEFT\'s, bit for bit': (
            sides[COMPUTE]["distance_from_peft"] == 0
        ),
        "our base is as it was loaded, bit for bit, suspended and restored": (
            not is_changed
        ),
        "our export loses less of the fine-tune than PEFT's merges": (
            export["lost"] < least_lost
        ),
        "doctor finds our export to be a merge onto the weights that were trained on": (
            export["onto"] == "trained" and not export["faults"]
        ),
    }
    return {
        "passed": all(answers.values()),
        "seed": seed,
        "answers": answers,
        "sides": sides,
        "merges": merges,
    }


def _build_model() -> Any:
    """Build a small Llama in bfloat16, whose tokens are bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).bfloat16()


def _read_text() -> Tensor:
    """Read the help texts that every Python carries: their bytes in blocks, in random order."""
    from pydoc_data.topics import topics

    import torch

    tokens = torch.tensor(list("\n".join(topics.values()).encode()))
    blocks = torch.stack(tokens.split(_LENGTH)[:-1])
    return blocks[torch.randperm(len(blocks))]


def _load(folder: Path, quantization: Any = None) -> Any:
    """Load a saved model, quantized or in the dtype of its files."""
    from transformers import AutoModelForCausalLM

    settings = {} if quantization is None else {"quantization_config": quantization}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", device_map={"": "cpu"}, **settings
    )


def _nf4() -> Any:
    """Return the config of the quantization. To compute in float32 is fast on a CPU."""
    from ..model.quantization import bitsandbytes_config

    return bitsandbytes_config("nf4", "float32")


def _measure_side(way: str, folder: Path, blocks: Tensor) -> Result:
    """Prepare the model in one way, train a LoRA on it, and undo that.

    PEFT's function has no way back: only the adapter is unloaded. The LoRA of
    ``"norms"`` is trained for longer, saved, and exported merged.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    from .. import KbitPreparedModel, predict_step

    lora = LoraConfig(
        r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = _load(folder / "base", _nf4())
    predicted = predict_step(
        model,
        precision=way,
        batch_size=_BATCH_SIZE,
        seq_len=_LENGTH,
        lora=lora,
        kernels="cpu",
    )
    modules, parameters = dict(model.named_modules()), list(model.parameters())
    loaded = base_state(modules)
    loaded_bytes = sum(parameter.nbytes for parameter in parameters)
    prepared = None
    if way == PEFT:
        prepare_model_for_kbit_training(model)
    else:
        prepared = KbitPreparedModel(model, precision=way).prepare()
    prepared_bytes = sum(parameter.nbytes for parameter in model.parameters())

    adapted: Any = get_peft_model(model, lora)
    if prepared is not None:
        prepared.adopt(adapted)
    batches = blocks.split(_BATCH_SIZE)[: _STEPS if way == NORMS else 2]
    numbers, step_bytes = _train(adapted, batches)
    suspended: Counter[str] = Counter()
    if prepared is not None:
        with prepared.suspended():
            suspended = differences(loaded, base_state(modules))
        if way == NORMS:
            adapted.save_pretrained(folder / "adapter")
            prepared.manifest().save(folder / "adapter" / "kbitwrap.json")
            prepared.export(folder / _EXPORT, merge_adapters=True, model=adapted)
    adapted.unload()
    if prepared is not None:
        prepared.restore()
    return {
        "added_bytes": prepared_bytes - loaded_bytes,
        "predicted_bytes": predicted.peak_bytes,
        "step_bytes": step_bytes,
        "numbers": numbers,
        "suspended": suspended,
        "left": differences(loaded, base_state(modules)),
    }


def _train(model: Any, batches: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """Train for a step a batch; return loss and gradients of the first step, and the most bytes of the last."""
    import torch

    from .. import StepTracker

    model.train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    numbers: list[Tensor] = []
    for rows in batches:
        batch = {"input_ids": rows.clone(), "labels": rows.clone()}
        with StepTracker(model, optimizer, batch) as tracker:
            loss = model(**batch).loss
            loss.backward()
            if not numbers:
                numbers = [loss.detach(), *(one.grad for one in trained)]
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([part.flatten() for part in numbers]), tracker.peak_bytes


def _measure_merges(folder: Path, held_out: Tensor) -> dict[str, Result]:
    """Merge the adapter in PEFT's ways, and measure them and our export.

    What is lost is KL(adapter model ‖ merged) / KL(adapter model ‖ base); the rest is
    what doctor finds.
    """
    from peft import PeftModel
    from torch.nn.functional import kl_div

    from .. import doctor

    base, adapter = folder / "base", folder / "adapter"
    exact = _load(base, _nf4()).dequantize().float()
    untrained = _log_probabilities(exact, held_out)
    adapted = PeftModel.from_pretrained(exact, adapter)
    expected = _log_probabilities(adapted, held_out)
    for name, quantization in ((_IN_NF4, _nf4()), (_IN_BFLOAT16, None)):
        model = PeftModel.from_pretrained(_load(base, quantization), adapter)
        model.merge_and_unload().save_pretrained(folder / name)

    found = {}
    whole = kl_div(untrained, expected, reduction="batchmean", log_target=True)
    for name in (_IN_NF4, _IN_BFLOAT16, _EXPORT):
        merged = _load(folder / name)
        if name == _IN_NF4:
            merged = merged.dequantize()
        left = _log_probabilities(merged.float(), held_out)
        lost = kl_div(left, expected, reduction="batchmean", log_target=True) / whole
        report = doctor(folder / name, base=base, adapter=adapter, quant=_nf4())
        assert report.merge is not None  # base and adapter were given
        found[name] = {
            "lost": lost.item(),
            "kept": report.merge.kept,
            "onto": report.merge.onto,
            "faults": [fault.cause for fault in report.merge.faults],
            "verdict": str(report.merge).partition(":")[0],
        }
    return found


def _log_probabilities(model: Any, rows: Tensor) -> Tensor:
    """Compute the log-probabilities of all tokens at each place of a text, float64."""
    import torch

    with torch.no_grad():
        logits = model.eval()(input_ids=rows, use_cache=False).logits
    return torch.log_softmax(logits.double(), dim=-1).flatten(0, 1)


def base_state(modules: Mapping[str, nn.Module]) -> State:
    """Describe a base by torch alone, so that kbitwrap does not vouch for itself.

    Args:
        modules: The base's modules by name, as they were when it was loaded: an adapter
            wraps them, and leaves them the same objects.

    Returns:
        ``{(aspect, fqn): value}``. Parameters are told apart by their addresses: they
        have to live until the next description.
    """
    import torch

    state: State = {}
    for prefix, module in modules.items():
        fields = vars(module)
        state["hooks", prefix] = [[*fields[name].values()] for name in _HOOKS]
        state["attributes", prefix] = [fields.get(name) for name in _ATTRIBUTES]
        tensors = dict(module.named_buffers(prefix, recurse=False))
        for fqn, parameter in module.named_parameters(prefix, recurse=False):
            tensors[fqn] = parameter
            state["dtypes", fqn] = parameter.dtype
            state["requires_grad", fqn] = parameter.requires_grad
            state["parameters", fqn] = id(parameter)
        if not list(module.children()):
            tensors |= module.state_dict(
                prefix=f"{prefix}."
            )  # all of a quantized layer
        for fqn, tensor in tensors.items():
            bits = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
            digest = hashlib.sha256(bits.numpy().data).hexdigest()
            state["bytes", fqn] = tensor.dtype, tensor.shape, digest
    return state


def differences(before: State, after: State) -> Counter[str]:
    """Count what differs between two states, by aspect."""
    counts: Counter[str] = Counter()
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            counts[key[0]] += 1
    return counts


def _tables(result: Result) -> list[RenderableType]:
    """Lay out what was measured, the answers, and what comes next."""
    rows = [["", "added", "step, predicted", "measured", "left changed"]]
    for way, side in result["sides"].items():
        sizes = [side[key] for key in ("added_bytes", "predicted_bytes", "step_bytes")]
        left = sum(side["left"].values())
        rows.append([way, *(f"{number:,}" for number in (*sizes, left))])
    merges = [["merged by", "divergence left", "kbitwrap doctor says"]]
    for name, merge in result["merges"].items():
        verdict = f"a merge, on the {merge['onto']} weights"
        if merge["faults"]:
            verdict = merge["verdict"]
        merges.append([name, f"{merge['lost']:.2%}", verdict])
    answers = [["", "answer"]]
    for what, is_so in result["answers"].items():
        answers.append(["yes" if is_so else "no", what])
    return [table(rows, right=True), table(merges), table(answers), _NEXT]
