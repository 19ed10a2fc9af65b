"""A training step that is predicted and run: the cells of the tests, and their figures."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import get_peft_model, prepare_model_for_kbit_training

from kbitwrap import KbitPreparedModel, StepMemory, StepTracker, predict_step
from support import zoo
from support.pairwise import pairwise

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
REENTRANT = {"use_reentrant": True}  # as PEFT's function by default, and without its warning
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Cell:
    """One way to train one model.

    Attributes:
        name: A key of the zoo.
        way: A precision, or ``"peft"``.
        head: The field of ``PrepareConfig``, and ``head_chunk_bytes`` another.
        quant: As in ``zoo.load``, and ``dtype`` by its short name; with ``autocast``, bfloat16's runs.
        checkpointing: ``None`` for the default, or whether it is reentrant, or ``"off"``.
        adapters: ``"lora"``, ``"dropout"`` in it, ``"dora"``, or ``"modules_to_save"`` beside it.
        source: What is predicted from: a ``"model"``, or its ``"config"`` or ``"folder"``.
        batch: ``"tensors"``, their ``"shapes"``, or the length of sequences that are described by nothing else.
    """

    name: str
    way: str = "norms"
    head: str | None = None
    head_chunk_bytes: int | None = None
    quant: str | None = "nf4"
    dtype: str = "bf16"
    autocast: bool = False
    checkpointing: bool | str | None = None
    adapters: str = "lora"
    source: str = "model"
    optimizer: str = "adamw_torch"
    batch: str | int = "tensors"

    def __str__(self) -> str:
        changed = (getattr(self, field.name) for field in dataclasses.fields(self)[1:])
        return "-".join([self.name, *(str(value) for value in changed if value is not None and value is not False)])

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a preparation, in the names of ``PrepareConfig``."""
        if self.checkpointing == "off" or not zoo.ARCHITECTURES[self.name].supports_gradient_checkpointing:
            fields: dict[str, Any] = {"gradient_checkpointing": False}
        elif self.checkpointing is None:
            fields = {"gradient_checkpointing_kwargs": REENTRANT} if self.way == "peft" else {}
        else:
            fields = {"gradient_checkpointing_kwargs": {"use_reentrant": self.checkpointing}}
        return fields | {k: v for k in ("head", "head_chunk_bytes") if (v := getattr(self, k)) is not None}

    def load(self) -> Any:
        """The model; a llama that is not predicted from its files has one layer."""
        num_layers = 1 if self.name == "llama" and self.source == "model" else None
        return zoo.load(self.name, self.quant, DTYPES[self.dtype], num_hidden_layers=num_layers)

    @property
    def settings(self) -> dict[str, Hashable]:
        """The values of the settings that are combined with one another."""
        return {
            "way": (self.way, self.head, self.head_chunk_bytes),
            "weights": (self.quant, self.dtype, self.autocast),
            "checkpointing": self.checkpointing,
            "adapters": self.adapters,
            "source": self.source,
            "optimizer": self.optimizer,
            "batch": type(self.batch) if isinstance(self.batch, int) else self.batch,
        }

    @property
    def lora(self) -> Any:
        options = {"dropout": {"lora_dropout": 0.1}, "dora": {"use_dora": True}}.get(self.adapters, {})
        return zoo.lora_config(self.name, modules_to_save=self.adapters == "modules_to_save", **options)

    def inputs(self, model: torch.nn.Module) -> zoo.Batch:
        if isinstance(self.batch, str):
            return zoo.inputs(self.name, model)
        generator = torch.Generator().manual_seed(self.batch)
        shape = (zoo.BATCH_SIZE, self.batch)
        names = ("input_ids", "labels")
        return {n: torch.randint(zoo.FIRST_ORDINARY_ID, zoo.VOCAB_SIZE, shape, generator=generator) for n in names}


def adapted(cell: Cell) -> Any:
    """The model of a cell, prepared and with its adapters."""
    model: Any = cell.load()
    if cell.way == "peft":
        names = {"gradient_checkpointing": "use_gradient_checkpointing"}
        model = prepare_model_for_kbit_training(model, **{names.get(k, k): v for k, v in cell.fields.items()})
        return get_peft_model(model, cell.lora).train()
    prepared = KbitPreparedModel(model, precision=cell.way, **cell.fields).prepare()
    model = get_peft_model(model, cell.lora)
    prepared.adopt(model)
    return model.train()


def optimizer_of(cell: Cell, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cls = {"adamw_torch": torch.optim.AdamW, "sgd": torch.optim.SGD}[cell.optimizer]
    return cls(trained, lr=LEARNING_RATE)


def tracked(cell: Cell) -> tuple[StepTracker, zoo.Batch]:
    """A real second step, and its batch."""
    model = adapted(cell)
    batch = cell.inputs(model)
    optimizer = optimizer_of(cell, model)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if cell.autocast else contextlib.nullcontext():
            return zoo.loss(cell.name, model, batch)

    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    with StepTracker(model, optimizer, batch) as tracker:
        loss().backward()
        optimizer.step()
    return tracker, batch


def predicted(cell: Cell, batch: Mapping[str, torch.Tensor]) -> StepMemory:
    """The same step, predicted."""
    dtype = DTYPES[cell.dtype]
    source: Any
    if cell.source == "model":
        source, options = cell.load(), {}
    else:
        source, options = zoo.checkpoint(cell.name), {"dtype": dtype}
        if cell.quant is not None:
            row = zoo.ARCHITECTURES[cell.name]
            options["quantization_config"] = zoo._quantization_config(row, cell.quant, dtype)
    if cell.source == "config":
        source = transformers.AutoConfig.from_pretrained(source)
    inputs: Any = None
    size: dict[str, int] = {}
    if isinstance(cell.batch, int):
        size = {"batch_size": zoo.BATCH_SIZE, "seq_len": cell.batch}
    elif "input_ids" not in batch:
        size = {"batch_size": zoo.BATCH_SIZE, "seq_len": zoo.SEQUENCE_LENGTH}
    if cell.batch == "tensors":
        inputs = batch
    elif cell.batch == "shapes":
        inputs = {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}
    return predict_step(
        source,
        precision=cell.way,
        inputs=inputs,
        lora=cell.lora,
        optimizer=cell.optimizer,
        autocast="bfloat16" if cell.autocast else None,
        kernels="cpu",
        exact=True,
        **size,
        **cell.fields,
        **options,
    )


def figures(memory: StepMemory | StepTracker) -> dict[str, Any]:
    names = ("static_bytes", "peak_bytes", "phases", "by_kind")
    return {name: getattr(memory, name) for name in names}


# ----------------------------------------------------------------------------------------------------
# Every two settings together at least once, over all architectures.
# ----------------------------------------------------------------------------------------------------

_WAYS = (
    {"way": "none"},
    {"way": "adapted"},
    {"way": "norms"},
    {"way": "norms", "head": "float32"},
    {"way": "compute"},
    {"way": "compute", "head": "float32", "head_chunk_bytes": 4096},
    {"way": "full"},
    {"way": "peft"},
)
_WEIGHTS = (
    {"quant": "nf4", "dtype": "bf16"},
    {"quant": "nf4", "dtype": "bf16", "autocast": True},
    {"quant": "nf4-double", "dtype": "fp16"},
    {"quant": "fp4", "dtype": "bf16"},
    {"quant": "int8", "dtype": "fp16"},
    {"quant": "int8", "dtype": "bf16", "autocast": True},
    {"quant": None, "dtype": "bf16"},
)
_CHECKPOINTING = (None, True, False, "off")
_ADAPTERS = ("lora", "dropout", "dora", "modules_to_save")
_REST = (
    {"source": "model", "optimizer": "adamw_torch", "batch": "tensors"},
    {"source": "config", "optimizer": "sgd", "batch": 5},
    {"source": "folder", "optimizer": "adamw_torch", "batch": 33},
    {"source": "model", "optimizer": "sgd", "batch": "shapes"},
)
# CLIP's tower has no loss of its own, and Dbrx's experts are given their tokens by values: tested apart.
NAMES = tuple(name for name in zoo.ARCHITECTURES if name not in ("clip", "dbrx"))


def cells() -> Iterator[Cell]:
    """The cells of the cover, each of the next architecture, in what that can do."""
    cover = pairwise(_WAYS, _WEIGHTS, _CHECKPOINTING, _ADAPTERS, _REST)
    for i in range(max(len(cover), 2 * len(NAMES))):
        way, weights, checkpointing, adapters, rest = cover[i % len(cover)]
        yield possible(
            Cell(NAMES[i % len(NAMES)], **way, **weights, **rest, checkpointing=checkpointing, adapters=adapters)
        )


def each_value_once(cells: Iterable[Cell]) -> list[Cell]:
    """A few of the cells, in which each setting has each of its values."""
    settings = {cell: set(cell.settings.items()) for cell in cells}
    missing = set().union(*settings.values())
    chosen = []
    while missing:
        cell = max(settings, key=lambda cell: len(settings[cell] & missing))
        missing -= settings.pop(cell)
        chosen.append(cell)
    return chosen


def possible(cell: Cell) -> Cell:
    """The cell, with what cannot be run left out."""
    row = zoo.ARCHITECTURES[cell.name]
    changes: dict[str, Any] = {}
    if cell.quant is not None and cell.quant not in row.quants:
        changes["quant"] = "nf4"
    if cell.quant == "int8" and cell.adapters == "dora":
        changes["adapters"] = "dropout"  # with DoRA, 8-bit layers lose their scales in the first forward
    if row.batch not in (zoo._causal, zoo._causal_without_mask):
        changes["batch"] = "tensors"
    if cell.name == "deberta_v2":
        changes["autocast"] = False  # its mask's value overflows in autocast's dtype
    return dataclasses.replace(cell, **changes)
