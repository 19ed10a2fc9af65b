"""The parts of `python docs/figures gpu`: what each measures on the device, row by row.

Models have published shapes, and weights that are drawn on the device; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import init_empty_weights
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors import safe_open
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, TrainerCallback
from transformers.quantizers.auto import AutoHfQuantizer

from kbitwrap import KbitPreparedModel, StepPredictor, merge_checkpoint
from kbitwrap.foresight.rows import tokenizer_of
from machine import versions

HERE = Path(__file__).parent
PREDICTED = HERE / "gpu_predicted.json"
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "trl")
DEVICE, DEVICE_MAP = "cuda", {"": 0}
MODELS = {"mistral": "mistralai/Mistral-7B-v0.3", "qwen": "Qwen/Qwen3-8B"}
TRL = "trl"
WAYS = ("peft", "compute", "norms", "none", "unprepared", TRL)
UNCLEARED = "peft, cache kept"  # as PEFT's function was when huggingface/peft#3265 was reported
FORMS = ("half", "mixed", "quantized")
FILLED = 0.95  # of a card's memory is what a step may take
STEPS = 2  # that are timed, after one that is not
DRAWN_STD, TRAINED_STD = 0.02, 0.005
LORA = LoraConfig(r=16, target_modules="all-linear")
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
NF4_DOUBLE = BitsAndBytesConfig(**{**NF4.to_diff_dict(), "bnb_4bit_use_double_quant": True})

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a value

Row = dict[str, Any]


class Sizes(NamedTuple):
    """How large what is measured is.

    Attributes:
        name: The name of the predictions.
        shape: Fields that take the place of those of the published configs.
        batches: The batch size and the length of each step.
        compared: The shape of the models whose bits are compared.
        architectures: How many of these are compared.
        blocks: Blocks of the model that is merged from files.
        generated: Tokens to generate.
        tests: What pytest runs.
    """

    name: str
    shape: dict[str, int]
    batches: tuple[tuple[int, int], ...]
    compared: dict[str, int]
    architectures: int
    blocks: int
    generated: int
    tests: str


TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
WIDER = TINY | {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32000}
FULL = Sizes("full", {}, ((1, 512), (1, 2048), (3, 1024), (1, 4096)), WIDER, 4, 4, 32, "tests/gpu")
SMALL = Sizes("small", TINY, ((1, 16), (1, 64), (2, 32), (4, 16)), TINY, 4, 2, 4, "tests/gpu/test_accelerator.py")
FIRST = SMALL._replace(batches=SMALL.batches[:1], architectures=1)


class Rows:
    """The figures of a part, in a file that is whole at any moment.

    Args:
        path: The file; what it has is not measured again.
        is_small: Whether the models are small, which the file records.

    Attributes:
        prefix: What the names of rows begin with from here on.
    """

    def __init__(self, path: Path, *, is_small: bool) -> None:
        self.path, self.is_small = path, is_small
        self.found: dict[str, Row] = json.loads(path.read_text())["rows"] if path.exists() else {}
        self.prefix = ""

    def measure(self, name: str, call: Callable[[], Row]) -> None:
        """Measure a row unless the file has it; an error is kept as one, and is tried again by another run."""
        name = self.prefix + name
        if "error" not in self.found.get(name, {"error": "not measured yet"}):
            return
        start = time.monotonic()
        try:
            row = call()
        except Exception as error:  # of torch, drivers and libraries: the other rows are worth having
            row = {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}
        self.put(name, row, time.monotonic() - start)
        release()

    def put(self, name: str, row: Row, taken: float) -> None:
        """Write a row to the file, and say so."""
        self.found[name] = row
        self.write(is_finished=False)
        print(f"  {taken:6.1f} s  {name}: {row.get('error', 'measured')}", flush=True)

    def write(self, *, is_finished: bool) -> None:
        """Write the file, in one step."""
        said = {"finished": is_finished, "is_small": self.is_small, "environment": environment()}
        content = {**said, "rows": self.found}
        part = self.path.with_suffix(".new")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def environment() -> dict[str, str]:
    """The card, the versions and the date."""
    card = {"card": "none", "memory": "0 GiB"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        card = {"card": properties.name, "memory": f"{properties.total_memory / 2**30:.0f} GiB"}
    return {**card, **versions(LIBRARIES), "date": date.today().isoformat()}


# ----------------------------------------------------------------------------------------------------
# Models, memory and time.
# ----------------------------------------------------------------------------------------------------


def config_of(model: str, sizes: Sizes) -> PretrainedConfig:
    """The published config of one of `MODELS`, with the shape of `sizes`."""
    published = json.loads((HERE / "fits_models.json").read_text())
    (fields,) = (one["config"] for one in published if one["name"] == MODELS[model])
    made = getattr(transformers, fields["architectures"][0]).config_class(**(fields | sizes.shape))
    made.dtype = torch.bfloat16
    return made


def draw(config: PretrainedConfig, quantization: BitsAndBytesConfig | None = NF4) -> Any:
    """A model as `from_pretrained` loads it onto the device, its weights drawn there, and quantized by bitsandbytes."""
    release()
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    if quantization:
        config.quantization_config = quantization
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantizer = AutoHfQuantizer.from_config(quantization) if quantization else None
    if quantizer:
        quantizer.preprocess_model(model=model, dtype=torch.bfloat16, device_map=DEVICE_MAP)
    for module in model.modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            values = torch.empty(empty.shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=DRAWN_STD)
            if isinstance(module, Linear4bit) and name == "weight":
                made = Params4bit(values, requires_grad=False, **vars(empty)).to(DEVICE)
            else:
                made = torch.nn.Parameter(values + 1 if values.dim() == 1 else values)
            setattr(module, name, made)
    model = model.to(DEVICE)  # the buffers
    if quantizer:
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    model.hf_device_map = DEVICE_MAP
    release()
    return model.eval()


def release() -> None:
    """Give back what no tensor holds, the workspaces of cuBLAS too."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes until the device is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def memory() -> dict[str, int]:
    """What the allocator holds and held at the most."""
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "allocated_at_most_bytes": torch.cuda.max_memory_allocated(),
        "reserved_at_most_bytes": torch.cuda.max_memory_reserved(),
    }


def context() -> Row:
    """What the CUDA context takes beside the allocator, if nothing else uses the card."""
    free, total = torch.cuda.mem_get_info()
    return {"context_bytes": total - free - torch.cuda.memory_reserved()}


def tokens(config: Any, batch_size: int, seq_len: int) -> torch.Tensor:
    """Token ids on the device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, (batch_size, seq_len), generator=generator).to(DEVICE)


def adapt(model: Any, *, is_trained: bool = False) -> Any:
    """Put adapters on a model, whose delta is 0, or about 1 % of the weights as after a training."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, copy.deepcopy(LORA))
    for name, parameter in adapted.named_parameters():
        if is_trained and "lora_B" in name:
            parameter.data.normal_(std=TRAINED_STD)
    return adapted


# ----------------------------------------------------------------------------------------------------
# a. The reporter's script.
# ----------------------------------------------------------------------------------------------------


def reporter(rows: Rows, sizes: Sizes) -> None:
    """What preparing Mistral-7B takes, in nf4 with double quantization, as huggingface/peft#3265 does it."""
    config = config_of("mistral", sizes)
    for way in ("peft", UNCLEARED, "full", "compute", "norms", "adapted", "none"):
        rows.measure(way, functools.partial(preparing, config, way))
    rows.measure("CUDA context, afterwards", context)


def preparing(config: PretrainedConfig, way: str) -> Row:
    """Memory, seconds, and how often the host waited for the device, of one way to prepare."""
    model = draw(config, NF4_DOUBLE)
    torch.cuda.reset_peak_memory_stats()
    before = memory()
    with waits() as waited:
        prepared = prepare(model, way)
    after = memory()
    row = {"loaded_bytes": before["allocated_bytes"], "reserved_before_bytes": before["reserved_bytes"]}
    row |= {f"added_{name}": after[name] - before[name] for name in before}
    del prepared, model
    taken = min(seconds(functools.partial(prepare, draw(config, NF4_DOUBLE), way)) for _ in range(2))
    return row | {"prepare_seconds": taken, "waits": waited[0] if waited else None}


def prepare(model: Any, way: str) -> Any:
    """Prepare a model in one of the ways; the result keeps it prepared."""
    if way == "unprepared":
        return None
    if way in ("peft", UNCLEARED):
        return prepare_model_for_kbit_training(model, **({"auto_clear_cache": False} if way == UNCLEARED else {}))
    return KbitPreparedModel(model, precision=way).prepare()


@contextlib.contextmanager
def waits() -> Iterator[list[int]]:
    """Count the calls that made the host wait for the device; the list stays empty where torch cannot tell."""
    counted: list[int] = []
    if not hasattr(torch._C, "_cuda_set_sync_debug_mode"):
        yield counted
        return
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counted
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counted.append(sum("called a synchronizing" in str(one.message) for one in heard))


# ----------------------------------------------------------------------------------------------------
# b. Predicted and measured.
# ----------------------------------------------------------------------------------------------------


def cells(model: str, rows: Rows, sizes: Sizes) -> None:
    """Steps of one of `MODELS`: their peaks beside the predicted ones, and their seconds."""
    predicted = json.loads(PREDICTED.read_text())["cells"][sizes.name]
    for way in WAYS:
        cells_of(model, way, predicted, rows, sizes)
        release()
    rows.measure(f"{model}, CUDA context, afterwards", context)


def cells_of(model: str, way: str, predicted: dict[str, Row], rows: Rows, sizes: Sizes) -> None:
    """The steps of one way to prepare; the model is drawn when the first of them is measured."""
    config = config_of(model, sizes)
    trained = functools.cache(functools.partial(trained_model, config, way))
    measured = functools.partial(trl_cell, config) if way == TRL else lambda *batch: cell(*trained(), *batch)
    for batch in sizes.batches:
        name = cell_name(model, way, *batch)
        rows.measure(name, functools.partial(compared, predicted.get(name, {}), measured, *batch))


def cell_name(model: str, way: str, batch_size: int, seq_len: int) -> str:
    """The name of a row, and of its prediction."""
    return f"{model}, {way}, {batch_size} x {seq_len}"


def compared(told: Row, measured: Callable[[int, int], Row], batch_size: int, seq_len: int) -> Row:
    """A measured step beside its prediction, unless it is predicted not to fit."""
    predicted, total = told.get("predicted_bytes", 0), torch.cuda.get_device_properties(0).total_memory
    if predicted > FILLED * total:
        return told | {"not_run": "is predicted not to fit this card"}
    row = told | measured(batch_size, seq_len)
    if "not_run" in row:
        return row
    if predicted:
        tensors = row["allocated_at_most_bytes"] - row["workspace_bytes"]
        row["off_percent"] = 100 * (predicted - tensors) / tensors
    row["tokens_per_second"] = batch_size * seq_len / row["step_seconds"]
    return row


def trained_model(config: PretrainedConfig, way: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model with adapters, prepared in one of the ways, and its optimizer."""
    model = draw(config)
    prepared = prepare(model, way)
    peft_model = adapt(model)
    if isinstance(prepared, KbitPreparedModel):
        prepared.adopt(peft_model)
        peft_model.prepared = prepared  # lives as long as the model
    optimizer = torch.optim.AdamW([one for one in peft_model.parameters() if one.requires_grad], lr=1e-4)
    return peft_model.train(), optimizer


def cell(model: Any, optimizer: torch.optim.Optimizer, batch_size: int, seq_len: int) -> Row:
    """Peak and seconds of a training step."""
    ids = tokens(model.config, batch_size, seq_len)
    labels = ids.clone()

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    release()
    torch.cuda.reset_peak_memory_stats()
    loss = step()
    reserved = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    taken = seconds(lambda: [step() for _ in range(STEPS)])
    return measured_step(taken, reserved, loss)


def measured_step(taken: float, reserved: int, loss: torch.Tensor) -> Row:
    """The row of steps that ended just now."""
    if not loss.isfinite():
        raise ArithmeticError(f"the loss is {loss.item()}")
    at_most = torch.cuda.max_memory_allocated()
    reserved = max(reserved, torch.cuda.max_memory_reserved())
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return {
        "allocated_at_most_bytes": at_most,
        "reserved_at_most_bytes": reserved,
        "workspace_bytes": held - torch.cuda.memory_allocated(),
        "step_seconds": taken / STEPS,
    }


def sft_arguments(folder: str, batch_size: int, seq_len: int, **options: Any) -> Any:
    """The arguments of TRL's trainer, whose step is predicted and measured."""
    from trl import SFTConfig

    return SFTConfig(
        folder,
        per_device_train_batch_size=batch_size,
        max_length=seq_len,
        bf16=True,
        max_steps=1 + STEPS,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **options,
    )


class Timed(TrainerCallback):  # type: ignore[misc]
    """Times the steps of a trainer after the first, and reads their peak."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.reserved = torch.cuda.max_memory_reserved()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 + STEPS:
            torch.cuda.synchronize()
            self.taken = time.perf_counter() - self.start


def trl_cell(config: Any, batch_size: int, seq_len: int) -> Row:
    """Peak and seconds of a step of TRL's SFTTrainer, which prepares nothing, with its own kernels."""
    if not torch.backends.cuda.is_built():
        return {"not_run": "the simulated device has no kernels for TRL's head"}
    from datasets import Dataset, disable_progress_bars

    from trl import SFTTrainer

    disable_progress_bars()
    arguments = sft_arguments(tempfile.gettempdir(), batch_size, seq_len)
    _ = arguments.device  # counts the devices, of which one is used
    arguments._n_gpu = 1
    ids = tokens(config, (1 + STEPS) * batch_size, seq_len).tolist()
    timed = Timed()
    trainer = SFTTrainer(
        draw(config),
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tokenizer_of(config.vocab_size, 3),
        peft_config=copy.deepcopy(LORA),
        callbacks=[timed],
    )
    release()
    torch.cuda.reset_peak_memory_stats()
    loss = torch.tensor(trainer.train().training_loss)
    return measured_step(timed.taken, timed.reserved, loss)


def predict(model: str, way: str, sizes: Sizes) -> dict[str, Row]:
    """The predictions of the cells of one way to prepare, which need no device."""
    options: dict[str, Any] = {"precision": "unprepared" if way == TRL else way}
    if way == TRL:
        options["args"] = sft_arguments("unused", *sizes.batches[0], use_cpu=True)
    config = config_of(model, sizes)
    predictor = StepPredictor(config, lora=LORA, quantization_config=NF4, dtype="bfloat16", **options)
    return {cell_name(model, way, *batch): {"predicted_bytes": predictor(*batch).peak_bytes} for batch in sizes.batches}


def write_predictions() -> None:
    """Predict the steps of both sizes, and write the predictions."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    cells: dict[str, dict[str, Row]] = {}
    for sizes in (SMALL, FULL):
        cells[sizes.name] = {}
        for model, way in itertools.product(MODELS, WAYS):
            cells[sizes.name] |= predict(model, way, sizes)
            print(f"{sizes.name}: {model}, {way}", flush=True)
    content = {"versions": versions(LIBRARIES), "cells": cells}
    PREDICTED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------
# c. Bits.
# ----------------------------------------------------------------------------------------------------


def bits(rows: Rows, sizes: Sizes) -> None:
    """What is the same bit for bit, on four architectures."""
    shape = sizes.compared
    opt = {"ffn_dim": shape["intermediate_size"], "word_embed_proj_dim": shape["hidden_size"]}
    configs = {
        "Llama": transformers.LlamaConfig(**shape),
        "OPT": transformers.OPTConfig(**(shape | opt)),
        "Gemma2": transformers.Gemma2Config(**shape),
        "Mixtral": transformers.MixtralConfig(**shape, num_local_experts=4),
    }
    for name, config in list(configs.items())[: sizes.architectures]:
        with tempfile.TemporaryDirectory() as folder:
            base = functools.cache(functools.partial(save_base, config, Path(folder) / "base"))
            rows.measure(f"{name}: training", lambda base=base: compared_training(base()))
            rows.measure(f"{name}: what comes back", lambda base=base: compared_states(base()))
            rows.measure(f"{name}: merges", lambda base=base, f=folder: compared_merges(base(), Path(f)))


def save_base(config: PretrainedConfig, folder: Path) -> Path:
    """Save a base with random weights in bfloat16."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def load(base: Path) -> Any:
    """Load a base in nf4 onto the device."""
    options = {"dtype": torch.bfloat16, "device_map": DEVICE_MAP}
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=NF4, **options)


def compared_training(base: Path) -> Row:
    """The loss and the gradients of `"compute"` beside those after PEFT's function."""
    outcomes = []
    for way in ("peft", "compute"):
        model = load(base)
        prepared = prepare(model, way)
        trained = adapt(model, is_trained=True).train()
        ids = tokens(model.config, 2, 64)
        with sdpa_kernel(SDPBackend.MATH):  # the backward pass of others adds up in an order that differs by run
            loss = trained(input_ids=ids, labels=ids).loss
            loss.backward()
        gradients = {name: one.grad for name, one in trained.named_parameters() if one.grad is not None}
        outcomes.append({"loss": loss.detach(), **gradients})
        del prepared
    return {"compute and PEFT: loss and gradients": difference(*outcomes)}


@torch.no_grad()
def compared_states(base: Path) -> Row:
    """The base after a suspension and a restore, and its logits meanwhile, beside what they were."""
    model = load(base)
    ids = tokens(model.config, 2, 64)
    before = state(model)
    logits = model(ids).logits
    row = {}
    for way in ("full", "compute", "norms"):
        prepared = KbitPreparedModel(model, precision=way).prepare()
        with prepared.suspended():
            row[f"{way}: logits in a suspension"] = difference({"logits": logits}, {"logits": model(ids).logits})
        prepared.restore()
        row[f"{way}: the base after restore"] = difference(before, state(model))
    return row


def state(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all that a model saves, its quantization's statistics among it."""
    return {name: one.clone() for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


def compared_merges(base: Path, folder: Path) -> Row:
    """The live export and the merge of files, each form on the device and on the CPU."""
    model = load(base)
    with KbitPreparedModel(model) as prepared:
        trained = adapt(model, is_trained=True)
        trained.save_pretrained(folder / "adapter")
        prepared.export(folder / "exported", merge_adapters=True)
    row = {}
    for form in FORMS:
        found = {}
        for device in (DEVICE, "cpu"):
            merged = folder / f"{form}-{device}"
            options = {"merge_as": form, "quantization_config": NF4, "device": device}
            merge_checkpoint(base, folder / "adapter", merged, **options)
            found[device] = tensors_of(merged)
        if form == "half":
            row["export and merge"] = difference(tensors_of(folder / "exported"), found[DEVICE])
        row[f"{form}: device and CPU"] = difference(found["cpu"], found[DEVICE])
    return row


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """In words, how tensors differ from others of the same names."""
    if expected.keys() != found.keys():
        return f"other names: {sorted(expected.keys() ^ found.keys())[:3]}"
    num_values, num_unequal, num_tensors, largest = 0, 0, 0, 0.0
    for name, first in expected.items():
        second = found[name]
        if first.shape != second.shape or first.dtype != second.dtype:
            return f"{name}: {second.dtype} {tuple(second.shape)}, not {first.dtype} {tuple(first.shape)}"
        num_values += first.numel()
        unequal = int((first.view(BITS[first.itemsize]) != second.view(BITS[second.itemsize])).sum())
        if unequal:
            num_tensors, num_unequal = num_tensors + 1, num_unequal + unequal
            off = (first.double() - second.double()).abs().max() / first.double().abs().max()
            largest = max(largest, float(off))
    if not num_unequal:
        return f"the same bits, {len(expected)} tensors"
    share = 100 * num_unequal / num_values
    return (
        f"{num_tensors} of {len(expected)} tensors differ, in {share:.2g} % of all values, by at most "
        f"{100 * largest:.2g} % of a tensor's largest"
    )


# ----------------------------------------------------------------------------------------------------
# d. Speed.
# ----------------------------------------------------------------------------------------------------


def speed(rows: Rows, sizes: Sizes) -> None:
    """Seconds of suspending, generating and merging, of Mistral-7B's shapes in nf4."""
    config = config_of("mistral", sizes)
    for way in ("full", "compute", "norms", "none"):
        rows.measure(f"suspend and resume, {way}", functools.partial(suspending, config, way))
    rows.measure("generation", functools.partial(generation, config, sizes.generated))
    rows.measure("merged weights", functools.partial(streaming, config))
    config.num_hidden_layers = sizes.blocks
    with tempfile.TemporaryDirectory() as folder:
        run = functools.cache(functools.partial(save_run, config, Path(folder)))
        for form in FORMS:
            call = functools.partial(merging, run, Path(folder) / form, form)
            rows.measure(f"merge_checkpoint of {sizes.blocks} blocks, {form}", call)


def suspending(config: PretrainedConfig, way: str) -> Row:
    """Seconds of suspending and resuming; the median of five."""
    model = draw(config)
    prepared = KbitPreparedModel(model, precision=way).prepare()
    prepared.adopt(adapt(model))
    times = [(seconds(prepared.suspend), seconds(prepared.resume)) for _ in range(5)]
    suspended, resumed = zip(*times, strict=True)
    return {"suspend_seconds": median(suspended), "resume_seconds": median(resumed)}


@torch.no_grad()
def generation(config: PretrainedConfig, number: int) -> Row:
    """Tokens a second of one sequence, under each precision and inside its suspension."""
    row = {}
    for way in ("compute", "norms"):
        model = draw(config)
        prepared = KbitPreparedModel(model, precision=way).prepare()
        adapted = adapt(model).eval()
        prepared.adopt(adapted)
        options = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False, "pad_token_id": 0}
        generate = functools.partial(adapted.generate, tokens(model.config, 1, 32), use_cache=True, **options)
        generate()
        row[f"{way}_tokens_per_second"] = number / seconds(generate)
        with prepared.suspended():
            generate()
            row[f"{way}_suspended_tokens_per_second"] = number / seconds(generate)
        del model, prepared, adapted, generate
        release()
    return row


def streaming(config: PretrainedConfig) -> Row:
    """Gigabytes a second of the merged weights, left on the device and copied to the host, and of plain copies."""
    model = draw(config)
    prepared = KbitPreparedModel(model).prepare()
    prepared.adopt(adapt(model, is_trained=True))
    sizes: list[int] = []

    def stream(use: Callable[[torch.Tensor], object]) -> float:
        sizes.clear()

        def run() -> None:
            for _, tensor in prepared.merged_weights():
                use(tensor)
                sizes.append(tensor.nbytes)

        taken = seconds(run)
        return sum(sizes) / taken / 1e9

    row = {"streamed_gb_per_second": stream(lambda tensor: None)}
    row["streamed_to_host_gb_per_second"] = stream(lambda tensor: tensor.cpu())
    shape = (config.intermediate_size, config.hidden_size)
    plain = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    row["copy_to_host_gb_per_second"] = plain.nbytes / min(seconds(plain.cpu) for _ in range(5)) / 1e9
    return row | {"streamed_bytes": sum(sizes)}


def save_run(config: PretrainedConfig, folder: Path) -> tuple[Path, Path]:
    """Save a base in bfloat16, drawn on the device, and an adapter."""
    model = draw(config, None)
    model.save_pretrained(folder / "base")
    adapt(model, is_trained=True).save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def merging(run: Callable[[], tuple[Path, Path]], merged: Path, form: str) -> Row:
    """Seconds of a merge of files, in one form."""
    base, adapter = run()
    release()
    torch.cuda.reset_peak_memory_stats()
    options = {"merge_as": form, "quantization_config": NF4, "device": DEVICE}
    taken = seconds(lambda: merge_checkpoint(base, adapter, merged, **options))
    written = sum(path.stat().st_size for path in merged.glob("*.safetensors"))
    return {
        "merge_seconds": taken,
        "written_bytes": written,
        "allocated_at_most_bytes": torch.cuda.max_memory_allocated(),
    }


# ----------------------------------------------------------------------------------------------------
# First, and last.
# ----------------------------------------------------------------------------------------------------


def first(rows: Rows, sizes: Sizes) -> None:
    """Everything once on a small model, so that a wrong wheel costs a minute and not all of them."""
    for key, value in environment().items():
        print(f"  {key} {value}", flush=True)
    parts = {"preparing": reporter, "step": functools.partial(cells, "mistral"), "bits": bits, "speed": speed}
    for name, part in parts.items():
        rows.prefix = f"{name}: "
        part(rows, FIRST)


def tests(rows: Rows, sizes: Sizes) -> None:
    """The tests of a GPU, by file."""
    import pytest

    rows.found = {}

    class Recorder:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when != "call" and report.passed:
                return
            file, _, test = report.nodeid.partition("::")
            row = rows.found.setdefault(file, {"passed": 0, "skipped": 0, "failed": 0, "why": ""})
            row[report.outcome] += 1
            if report.failed:
                row["why"] += f"{test}: {report.longreprtext.splitlines()[-1][:200]}; "
            rows.write(is_finished=False)

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # an image for GPUs has many
    # libraries are imported before pytest could rewrite them
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    if not torch.backends.cuda.is_built():  # the device is a simulated one
        options += ["-m", "not real_gpu"]
    pytest.main([str(HERE.parents[1] / sizes.tests), *options], plugins=[Recorder()])
    if not rows.found:
        rows.put(sizes.tests, {"error": "pytest ran nothing"}, 0)


RUN: dict[str, Callable[[Rows, Sizes], None]] = {
    "first": first,
    "reporter": reporter,
    "mistral": functools.partial(cells, "mistral"),
    "qwen": functools.partial(cells, "qwen"),
    "bits": bits,
    "speed": speed,
    "tests": tests,
}


def run(name: str, path: Path, *, is_small: bool) -> None:
    """Run one part in this process."""
    if not torch.cuda.is_available():
        raise SystemExit("expected a GPU of CUDA, found none")
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = Rows(path, is_small=is_small)
    RUN[name](rows, SMALL if is_small else FULL)
    rows.write(is_finished=not any("error" in row for row in rows.found.values()))
