"""Export: a twin is written by the model's own ``save_pretrained``.

Tensors are computed and written one at a time.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import StrPath
from ..errors import ConfigError, ExportError, StateError, UnsupportedModelError
from ..model.checks import refuse_unreadable
from ..model.quantization import is_of_a_quantizer, quantized_stacks
from ..model.tree import ModelTree
from ..model.wrappers import loaded_class, unwrap
from ..preparation.preparation import Preparation
from ..preparation.process import plain_mode
from ..reports import ExportReport, caller_level
from ..tensors.bits import is_composed
from ..tensors.lazy import LazyTensor, keeping_last, materialize
from .configs import keep_base_configs
from .forms import MergeForm
from .merge import Merged, merge_into
from .sharding import Gathering
from .ties import configs_of_all
from .twin import Twin, build_twin, promise_adapters
from .writer import (
    CheckpointWriter,
    Tensors,
    checkpoint_writer,
    read_header,
    split_into_files,
)

_METADATA = {"format": "pt"}


def export_model(
    model: nn.Module,
    preparation: Preparation | None,
    path: StrPath,
    *,
    merge_adapters: bool,
    form: MergeForm,
    live: nn.Module | None,
    processing_class: Any,
    max_shard_size: int | str,
    overwrite: bool,
    progress: bool,
    finish: Callable[[Path, Merged], object] | None = None,
) -> ExportReport:
    """Write the base of a model, or the merged model.

    ``KbitPreparedModel.export`` documents it. ``finish`` adds files to the folder, and
    gets the figures of the merge, which are measured for it.
    """
    start = time.perf_counter()
    live = model if live is None else live
    if not (processing_class is None or hasattr(processing_class, "save_pretrained")):
        raise ConfigError(
            "processing_class: expected a tokenizer, a processor or another object with "
            f"save_pretrained, found a {type(processing_class).__name__}"
        )
    if form != MergeForm() and not merge_adapters:
        raise ConfigError(
            "merge_as and seed are for a merged model: give merge_adapters=True"
        )
    # refuses an invalid size before anything is computed
    split_into_files({}, max_shard_size)

    with plain_mode():
        # the model as a restore would leave it; as it is where it is not prepared
        twin, gathering = _twin_of(model, live, preparation, "export")
        merged = Merged()

        def merge() -> Merged:
            promise_adapters(twin, gathering)
            found = merge_into(twin, form=form, measures=finish is not None)
            if not found.fqns:
                raise ExportError(
                    "merge_adapters: expected an active adapter, found none on the "
                    "model; nothing was written: activate one (set_adapter, or outside "
                    "disable_adapter()), give the model that holds it (model=), or "
                    "export without merge_adapters, which writes the base"
                )
            return found

        if merge_adapters:
            # of a sharded model the twin of rank 0 alone is merged: the other ranks help
            # to gather, and are sent what it returns
            merged = gathering.lead(merge)
            if merged.note:
                warnings.warn(merged.note, UserWarning, stacklevel=caller_level())

        def write() -> ExportReport:
            # the folders, or the names on the hub, that all of it was loaded from
            read = [getattr(processing_class, "name_or_path", None)]
            read += [
                getattr(one, "_name_or_path", None) for one in configs_of_all(live)
            ]
            writing = checkpoint_writer(
                path,
                "export",
                overwrite=overwrite,
                progress=progress,
                sources=read,
            )
            refusing = _refusing(twin.model, f"{os.fspath(path)} is as it was")
            with writing as writer, refusing:
                save_model(twin.model, writer, max_shard_size)
                if processing_class is not None:
                    processing_class.save_pretrained(writer.folder)
                if finish is not None:
                    finish(writer.folder, merged)

            return ExportReport(
                Path(path),
                writer.files,
                writer.num_tensors,
                writer.num_bytes,
                twin.converted,
                seconds=time.perf_counter() - start,
                is_merge=merge_adapters,
                **merged.report(),
            )

        return gathering.lead(write)


def _twin_of(
    model: nn.Module, live: Any, preparation: Preparation | None, verb: str
) -> tuple[Twin, Gathering]:
    """Build the twin of what was made of a model, and what gathers its sharded tensors."""

    def walk(walked: nn.Module) -> ModelTree:
        return ModelTree(walked) if preparation is None else preparation.tree(walked)

    tree = walk(model)
    gathering = Gathering(tree, preparation, verb, ExportError)
    with gathering.agreeing():
        refuse_unreadable(tree, allow_sharded=gathering.is_sharded)
        if live is not model:
            if (
                not isinstance(live, nn.Module)
                or unwrap(live)[0] is not unwrap(model)[0]
            ):
                raise UnsupportedModelError(
                    f"model: expected this {type(model).__name__} or a model made from "
                    "it, such as get_peft_model(prepared.model, ...), found another "
                    f"{type(live).__name__}"
                )
            tree = walk(live)
        twin = build_twin(tree, preparation, gathering)
    return twin, gathering


def merged_weights(
    model: nn.Module,
    preparation: Preparation,
    adapters: str | Sequence[str] | None,
    moment: Callable[[], tuple[Any, ...]],
) -> Iterator[tuple[str, Tensor]]:
    """Hand out what a merged export writes, while the wrapper stays as it is.

    Args:
        model: The prepared model.
        preparation: Its preparation.
        adapters: As of `merge_into`.
        moment: Returns the wrapper's state, and what else is replaced when that
            changes: where it returns another value than at first, `StateError` is
            raised.
    """
    with plain_mode():
        twin, gathering = _twin_of(model, model, preparation, "merge")
        tensors = {}

        def merge() -> None:
            promise_adapters(twin, gathering)
            merge_into(twin, [adapters] if isinstance(adapters, str) else adapters)
            tensors.update(saved_tensors(twin.model))

        gathering.lead(merge)
    before = moment()

    def computed() -> Iterator[tuple[str, Tensor]]:
        # What the next tensor may be made of, too. The caller's code runs in none of the
        # modes that a tensor is computed in, and nothing here holds what was handed out.
        kept: dict[LazyTensor, Tensor] = {}
        for fqn in [*tensors]:
            if moment() != before:
                raise StateError(
                    f"merged_weights() began while the model was {before[0]}, and it "
                    "was suspended, resumed or restored since; iterate again from the "
                    "beginning",
                    state=moment()[0],
                    expected=(before[0],),
                )
            tensor = tensors.pop(fqn)
            with plain_mode(), keeping_last(kept, device=None):
                if isinstance(tensor, LazyTensor):
                    value = tensor.own()
                else:
                    value = tensor.detach().clone(memory_format=torch.contiguous_format)
            del tensor
            yield fqn, value
            del value

    return gathering.lead_each(computed())


def saved_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors that a twin is saved as, by their names in the files.

    None of them is computed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kbitwrap-") as folder,
        _refusing(model, "the model is as it was"),
    ):
        options = _settle(model)
        if saves_itself(type(model)):
            raise ExportError(
                f"{type(model).__name__} has its own save_pretrained, so its tensors "
                "cannot be handed out one at a time; export them merged instead"
            )
        tensors, _ = _lay_out(model, Path(folder), options)
        return tensors


@contextlib.contextmanager
def _refusing(model: Any, state: str) -> Iterator[None]:
    """Turn whatever a model's own saving raises into `ExportError`."""
    try:
        yield
    except (ExportError, OSError):
        raise
    except Exception as error:
        raise ExportError(
            f"{type(model).__name__} could not be saved: {error}; {state}"
        ) from error


def save_model(
    model: Any,
    writer: CheckpointWriter,
    max_shard_size: int | str,
    others: Tensors | None = None,
) -> None:
    """Write a model by its class's ``save_pretrained``, and other tensors beside its own.

    Of one that has none, the state dict is written. There are no others for a class that
    `saves_itself`.
    """
    options = _settle(model)
    if not saves_itself(type(model)):
        tensors, metadata = _lay_out(model, writer.folder, options)
        tensors = {**(others or {}), **tensors}
        files = split_into_files(tensors, max_shard_size)
        index = {}
        if hasattr(type(model), "save_pretrained"):
            number = model.num_parameters()
            number += sum(tensor.numel() for tensor in (others or {}).values())
            index["metadata"] = {"total_parameters": number}
        writer.save(tensors, files, metadata, index=index)
        return

    if isinstance(model, _pretrained_class()):
        options["max_shard_size"] = max_shard_size
    _materialize(model)
    # the function of the class, not a wrapper around it
    type(model).save_pretrained(model, writer.folder, **options)
    keep_base_configs(model, writer.folder)
    # The writer has seen none of it.
    for path in writer.folder.rglob("*.safetensors"):
        header, _ = read_header(path)
        header.pop("__metadata__", None)
        for entry in header.values():
            start, end = entry["data_offsets"]
            writer.num_tensors += 1
            writer.num_bytes += end - start


def _lay_out(
    model: Any, folder: Path, options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Let the library save a twin, but for its tensors.

    Returns:
        The tensors, by their names in the files, none of them computed; and the
        metadata of the files.
    """
    tensors = {}
    function = getattr(type(model), "save_pretrained", None)
    if function is None:
        for fqn, tensor in model.state_dict().items():
            if not isinstance(tensor, Tensor):
                raise ExportError(
                    f"{fqn}: expected a tensor in the state dict, found "
                    f"{type(tensor).__name__}",
                    fqn=fqn,
                )
            tensors[fqn] = tensor
        return tensors, _METADATA

    found = _METADATA

    def collect(file: Tensors, path: StrPath, metadata: Mapping[str, str]) -> None:
        nonlocal found
        found = dict(metadata)
        tensors.update(file)

    _streaming(function, collect)(model, folder, max_shard_size=sys.maxsize, **options)
    keep_base_configs(model, folder)
    return tensors, found


def _pretrained_class() -> Any:
    return loaded_class("transformers.modeling_utils", "PreTrainedModel")


def _settle(model: nn.Module) -> dict[str, Any]:
    """Let a twin's models be written by ``save_pretrained``, whose options it returns.

    What nothing could load is refused.
    """
    pretrained = _pretrained_class()
    modules = [*model.named_modules()]
    tensors = ModelTree(model).tensors
    if any(vars(module).get("hf_quantizer") for _, module in modules):
        tensors = []
    for tensor in tensors:
        kind = type(tensor.parameter)
        if is_composed(kind):
            raise ExportError(
                f"{tensor.fqn} is a {kind.__name__}, and no quantizer of transformers "
                "made it that could write it: load the model with a "
                "quantization_config, or export it merged",
                fqn=tensor.fqn,
            )

    options = {}
    for fqn, module in modules:
        if quantized_stacks(module):
            # A checkpoint's own format holds each expert by itself, and a quantized
            # stack cannot be split.
            options["save_original_format"] = False
        if not isinstance(module, pretrained):
            continue
        if not hasattr(type(model), "save_pretrained"):
            raise ExportError(
                f"{fqn} is a {type(module).__name__} inside a {type(model).__name__}, "
                "which has no save_pretrained, so nothing could load the two: prepare "
                f"and export {fqn} by itself",
                fqn=fqn,
            )
        fields = vars(module)
        # A single process writes everything, whatever its rank.
        fields["should_save_on_this_rank"] = lambda is_main_process: True
        if fields.get("_weight_conversions"):
            # A quantizer's conversions cannot be reverted, and need not be: a state
            # dict has the names that they read.
            fields["_weight_conversions"] = [
                c for c in fields["_weight_conversions"] if not is_of_a_quantizer(c)
            ]

    quantization = ModelTree(model).quantization
    config = vars(model).get("config")
    is_told = getattr(config, "quantization_config", None) is not None
    if hasattr(type(model), "save_pretrained") and not (quantization.casts or is_told):
        warnings.warn(
            f"the config of this {type(model).__name__} does not tell that it is "
            f"quantized with {quantization.method}: from_pretrained alone initializes "
            "the quantized layers again, without an error. The page on exports has a "
            "program that reads them",
            UserWarning,
            stacklevel=caller_level(),
        )
    return options


def saves_itself(model_class: Any) -> bool:
    """Return whether a class has a ``save_pretrained`` that `_streaming` cannot take the place of."""
    own = getattr(_pretrained_class(), "save_pretrained", None)
    found = getattr(model_class, "save_pretrained", None)
    return found is not None and (found is not own or inspect.unwrap(own) is not own)


def _streaming(function: Any, save_file: Callable[..., None]) -> Callable[..., None]:
    """Return the library's ``save_pretrained`` with another ``save_file`` and no bar.

    It runs over a copy of its globals: nothing of the library is patched.
    """
    # safetensors.torch.save_file, as transformers' own save_pretrained calls it
    names = {**function.__globals__, "safe_save_file": save_file}
    logging = types.SimpleNamespace(**vars(names["logging"]))
    logging.tqdm = lambda files, **_: files
    names["logging"] = logging
    rebuilt = types.FunctionType(
        function.__code__,
        names,
        argdefs=function.__defaults__,
        closure=function.__closure__,
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt


def _materialize(model: nn.Module) -> None:
    """Compute every lazy tensor of a twin; ties are kept."""
    computed = {}
    for module in model.modules():
        held = vars(module)["_parameters"]
        for name, parameter in held.items():
            if isinstance(parameter, LazyTensor):
                if parameter not in computed:
                    computed[parameter] = materialize(parameter)
                held[name] = computed[parameter]

    if computed:
        warnings.warn(
            f"{type(model).__name__} has its own save_pretrained, so its tensors cannot "
            "be computed and written one at a time: they are held in memory at once",
            UserWarning,
            stacklevel=caller_level(),
        )
