"""Integration with transformers' ``Trainer`` and trainers derived from it, such as TRL's ``SFTTrainer``."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from kbitwrap import (
    ConfigError,
    KbitPreparedModel,
    KbitWrapError,
    LifecycleState,
    Manifest,
    ManifestDiff,
    ManifestMismatchError,
    StateError,
    UnsupportedModelError,
    prepared_of,
)

from ..checkpoints.merge import merge_live
from ..config import StrPath
from ..edits.training import Statistics
from ..export.forms import MergeForm
from ..manifest.manifest import MANIFEST_NAME
from ..manifest.numerics import changed_versions, with_logits
from ..model.tree import ModelTree
from ..model.wrappers import is_sharded_tensor
from ..preparation.casts import Casts
from ..preparation.preparation import Preparation
from ..reports import first_of, in_one_line, shown
from .lost_updates import LostUpdates

_Model = Any  # a module, or ``None``
_OF_FSDP1 = "_fsdp_wrapped_module."


class KbitTrainerCallback(TrainerCallback, ExportableState):
    """Records the base that is trained in every checkpoint, and refuses to resume on another one.

    It is for any ``Trainer`` whose model has adapters, TRL's included, and changes
    nothing of its training. What ``KbitPreparedModel`` or the drop-in prepared is
    recorded with its preparation; of any other model the base is recorded as it was
    loaded, and as not prepared, also where PEFT's own function cast it.

    Each checkpoint folder gets the manifest, and in the end the output folder, written
    by the processes that save. The manifest's essence (the settings, the model, one
    digest over all tensors) is also written into the checkpoint's
    ``trainer_state.json``, and a resumed training is compared with it: a callback is
    given the state, and not the folder. The base is digested once, when training begins,
    and then computes the logits of 16 tokens: where a resumed training's base has the
    same bytes and computes other logits, a warning names the libraries whose versions
    changed.

    A prepared model is adopted when the ``Trainer`` is made: its adapters are
    in ``adapter_dtype``, and under ``"adapted"`` the norms of adapted blocks compute in
    float32, from then on; ``restore`` removes what accelerate sets on the
    ``PeftModel``. A callback that is added to a ``Trainer`` later is too late for that:
    ``adopt`` the model before. It is too late, too, for a model that is not prepared and
    that accelerate shards.

    Args:
        prepared: The wrapper of the model that is trained; ``None`` finds it from the
            model, which may have none.
        manifest_name: The name of the manifest's file in a checkpoint folder.
        count_lost_updates: Whether to log, as ``"lost_updates"``, which share of the
            updates since the last log left the value as it was (`LostUpdates`). The log
            history and the callbacks after this one get it; trackers of ``report_to``
            are before it, and do not.
        merge_to: The folder to write the merged model to when training ends, with the
            tokenizer or processor and a model card; a checkpoint that is there is
            replaced. What ``load_best_model_at_end`` loads is merged. A merge that is
            refused is a warning: the trained adapter is there to be saved. ``None`` for
            no merge.
        merge_as: The form of the merged model, as for ``KbitPreparedModel.export``.

    Raises:
        ConfigError: There is no form ``merge_as``. When training begins: ``merge_to`` is or
            holds the output folder.
        StateError: When training begins: the model has no adapters and is not prepared,
            is not prepared by ``prepared``, or is suspended; or an adapter is not in ``adapter_dtype``,
            because it was made or loaded after the model was adopted. When a step
            begins, and when training ends: the model is suspended.
        UnsupportedModelError: When training begins: accelerate's FSDP sharded 4-bit
            weights that are stored as integers; or checkpoints are saved or resumed, and
            PEFT does not find the adapters in what FSDP1 wrapped; or the base cannot be
            recorded, because the callback was added after the trainer was made, and
            since then FSDP has sharded it, or an evaluation left its layers with scales
            in another order.
        ManifestMismatchError: When training begins: the checkpoint to resume from was
            trained on another base, or on one that was prepared differently. No step
            was taken.
        ManifestError: When training begins: an adapter is merged into the model, so that
            the base is not there to be recorded.
        ExportError: A manifest could not be written.

    Example:
        >>> from kbitwrap.integrations import KbitTrainerCallback
        >>> callback = KbitTrainerCallback()  # for trainer.add_callback(callback)
        >>> callback.manifest_name
        'kbitwrap.json'
    """

    def __init__(
        self,
        prepared: KbitPreparedModel | None = None,
        *,
        manifest_name: str = MANIFEST_NAME,
        count_lost_updates: bool = False,
        merge_to: StrPath | None = None,
        merge_as: str = "half",
    ) -> None:
        self.prepared = prepared
        self.manifest_name = manifest_name
        self.count_lost_updates = count_lost_updates
        self.merge_to = merge_to
        self.form = MergeForm(merge_as)
        self._lost_updates = LostUpdates()
        self._manifest: Manifest | None = None
        # of a model that nothing prepared
        self._statistics: Statistics | None = None
        self._recorded: Preparation | None = None

    def state(self) -> dict[str, Any]:
        """Return the callback's state for ``trainer_state.json``: its arguments, the essence and the numerics."""
        essence, numerics = None, {}
        if self._manifest is not None:
            essence = self._manifest.essence()
            adapters = self._manifest.adapters
            numerics = {
                "logits": self._manifest.logits,
                "versions": self._manifest.versions,
                "adapters": {name: [*one.dtypes] for name, one in adapters.items()},
                "base": self._manifest.model.name_or_path,
            }
        args = {
            "manifest_name": self.manifest_name,
            "count_lost_updates": self.count_lost_updates,
            "merge_to": self.merge_to and str(self.merge_to),
            "merge_as": self.form.merge_as,
        }
        return {
            "args": args,
            "attributes": {},
            "preparation": essence,
            "numerics": numerics,
        }

    def on_init_end(self, *args: Any, model: _Model = None, **kwargs: Any) -> None:
        """Adopt the model that was made from the prepared one, or record what evaluations and accelerate rewrite."""
        prepared = self._wrapper(model)
        if prepared is not None and _has_adapters(model):
            prepared.adopt(model)
        elif prepared is None and _is_to_be_sharded():
            self._recorded = Preparation.recording(model)
        elif prepared is None and model is not None:
            self._statistics = Statistics.of(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: _Model = None,
        **kwargs: Any,
    ) -> None:
        """Make the manifest; where training is resumed, compare it with the checkpoint's."""
        self._refuse_suspended(args, state, control, model)
        output = Path(args.output_dir or ".").resolve()
        if self.merge_to and output.is_relative_to(Path(self.merge_to).resolve()):
            raise ConfigError(
                f"merge_to: expected a folder of its own, such as {os.path.join(args.output_dir or '.', 'merged')!r}, "
                f"found {str(self.merge_to)!r}, which holds the checkpoints. No step was taken"
            )

        prepared = self._wrapper(model)
        saves = args.save_strategy != "no" or bool(state.global_step)
        _refuse_sharded(cast("nn.Module", model), saves=saves)

        # on all ranks, which read a sharded model together
        self._manifest = None
        if prepared is not None:
            _refuse_other_dtypes(prepared, model)
            self._manifest = prepared.manifest()
        elif self.prepared is None and _has_adapters(model):
            if self._recorded is None or not _is_to_be_sharded():
                self._recorded = Preparation.recording(model, self._statistics)
                self._statistics = self._recorded.statistics
            self._manifest = Manifest.of(self._recorded)
        if self._manifest is not None:
            autocast = None
            if args.bf16 or args.fp16:
                autocast = torch.bfloat16 if args.bf16 else torch.float16
            recorded = None if prepared is not None else self._recorded
            self._manifest = with_logits(self._manifest, model, autocast, recorded)
        # Training is resumed: what is wrong with that is said first.
        if state.global_step:
            self._compare(state)
        if self._manifest is None:
            raise StateError(
                "KbitTrainerCallback expects a Trainer whose model has adapters or is prepared; this "
                f"{type(model).__name__} is not prepared, is not the given KbitPreparedModel's model, or was "
                "restored: make the adapters first, or train inside `with KbitPreparedModel(model) as prepared`, "
                "or after prepare()",
                expected=(LifecycleState.PREPARED,),
            )

        # A checkpoint that was saved without this callback has no place for it.
        vars(state)["stateful_callbacks"][type(self).__name__] = self.state()

    def _refuse_suspended(
        self, args: Any, state: Any, control: Any, model: _Model = None, **kwargs: Any
    ) -> None:
        """Raise where the model is suspended: training would go on from rounded values."""
        prepared = self._wrapper(model)
        if prepared is not None and prepared.state is LifecycleState.SUSPENDED:
            raise StateError(
                f"training needs the prepared model, which is suspended at step {state.global_step}, by another "
                "callback or since an evaluation that raised: call prepared.resume(), make a new Trainer, and train. "
                "Checkpoints saved or loaded meanwhile, and an optimizer made meanwhile, may hold rounded values",
                state=LifecycleState.SUSPENDED,
                expected=(LifecycleState.PREPARED,),
            )

    on_step_begin = _refuse_suspended

    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: _Model = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Write the manifest into the output folder, and the merged model."""
        self._refuse_suspended(args, state, control, model)
        if self._manifest is None:
            return
        folder = Path(args.output_dir or ".").resolve()
        if args.should_save:
            self._manifest.save(folder / self.manifest_name)
        # of what is sharded, all ranks gather the parts
        merges = args.should_save or any(map(is_sharded_tensor, model.parameters()))
        if merges and self.merge_to is not None:
            try:
                report = merge_live(
                    model,
                    Preparation.tree_of(model)[1] or self._recorded,
                    self._manifest,
                    self.merge_to,
                    form=self.form,
                    name=folder.name,
                    processing_class=processing_class,
                )
                if args.should_save:
                    kept = (
                        ""
                        if report.kept is None
                        else f", {report.kept:.1%} of the delta kept"
                    )
                    told = f"merged into {self.merge_to} ({self.form.merge_as}){kept}"
                    print(f"kbitwrap: {told}", file=sys.stderr)
            except (
                KbitWrapError,
                OSError,
                MemoryError,
                torch.OutOfMemoryError,
            ) as error:
                warnings.warn(
                    f"the model was trained, and not merged: {in_one_line(error)}; nothing was written to "
                    f"{self.merge_to}. Save the adapter, which 'kbitwrap merge' merges",
                    stacklevel=2,
                )

    def on_pre_optimizer_step(
        self, *args: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Keep the values that the step will update, where lost updates are counted."""
        if self.count_lost_updates:
            self._lost_updates.before_step(optimizer)

    def on_optimizer_step(
        self, *args: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Count the updates that the step lost."""
        if self.count_lost_updates:
            self._lost_updates.after_step(optimizer)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the share of lost updates to what is logged."""
        share = self._lost_updates.take()
        if share is None:
            return
        state.log_history[-1]["lost_updates"] = share
        if logs is not None:
            logs["lost_updates"] = share

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: _Model = None,
        **kwargs: Any,
    ) -> None:
        """Write the manifest into the checkpoint folder, and into the folders of further adapters in it."""
        if not args.should_save or self._manifest is None:
            return
        pattern = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_hyper_param_search:  # which has a folder for each trial
            pattern = f"*/{pattern}"
        folders = sorted(
            Path(args.output_dir or ".").glob(pattern), key=os.path.getmtime
        )
        if folders:
            self._manifest.save(folders[-1] / self.manifest_name)
            for name in getattr(model, "peft_config", None) or ():
                if (folders[-1] / name / "adapter_config.json").is_file():
                    self._manifest.save(folders[-1] / name / self.manifest_name)
        else:
            warnings.warn(
                f"found no {PREFIX_CHECKPOINT_DIR}-{state.global_step} in {args.output_dir}, so no manifest was "
                "written; the checkpoint's trainer_state.json records the preparation all the same",
                UserWarning,
                stacklevel=2,
            )

    def _wrapper(self, model: _Model) -> KbitPreparedModel | None:
        """Return the model's wrapper; ``None`` where that is another than the one given."""
        found = prepared_of(model)
        return found if self.prepared in (None, found) else None

    def _compare(self, state: TrainerState) -> None:
        """Raise where the checkpoint to resume was trained on another preparation; warn where it does not say."""
        # The state of each callback is saved under the name of its class, or as a list
        # where there are several. The last record counts.
        expected, numerics = None, {}
        for saved in vars(state)["stateful_callbacks"].values():
            for one in saved if isinstance(saved, list) else [saved]:
                if isinstance(one, dict) and isinstance(one.get("preparation"), dict):
                    expected, numerics = one["preparation"], one.get("numerics", {})

        if expected is None:
            warnings.warn(
                f"the checkpoint of step {state.global_step} does not say how its base was prepared: unless its base "
                "was prepared in the same way, the losses will differ from those of the first run",
                UserWarning,
                stacklevel=3,
            )
            return
        manifest = self._manifest
        own = "nothing that is prepared"
        found = ManifestDiff({"": {"prepared": (True, False)}})  # expected, found
        if manifest is not None:
            own = shown(manifest.model.name_or_path)
            found = manifest.diff_essence(expected)
            if not found:
                _compare_numerics(manifest, numerics, state.global_step)
                return
        base = numerics.get("base") or "another base"
        checkpoint = f"checkpoint-{state.global_step}"
        raise ManifestMismatchError(
            f"the checkpoint of step {state.global_step} was trained on {shown(base)}, and this run has {own}; what "
            f"differs: {found.summary()}. No step was taken. Load the base of the checkpoint, and prepare it with "
            f"KbitPreparedModel.from_manifest(model, '{checkpoint}/{self.manifest_name}'), or not at all where that "
            f"says 'not prepared'; or train without resuming. 'kbitwrap doctor {checkpoint} --base BASE' names each "
            "tensor",
            **vars(found),
        )


class SuspendedEvaluation(Trainer):
    """A ``Trainer`` that evaluates and predicts with the base in its original state, as it will be after ``restore``.

    ``evaluate`` and ``predict``, in training or not, of several datasets, with
    generation or without, run their loop inside ``suspended()``; training continues bit
    for bit as without an evaluation. The model is adopted, as by the callback. Other
    trainers get the same: put this class before theirs.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> from kbitwrap.integrations import SuspendedEvaluation
        >>> class MyTrainer(SuspendedEvaluation, Seq2SeqTrainer):
        ...     pass
    """

    model: _Model

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepared = _unsuspended_wrapper(self.model)
        if prepared is not None and _has_adapters(self.model):
            prepared.adopt(self.model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Run the loop that ``evaluate`` and ``predict`` share, suspended where the model is prepared.

        Raises:
            StateError: Several processes train, and a trained parameter would change
                its dtype.
        """
        prepared = _unsuspended_wrapper(self.model)
        if prepared is None:
            return super().evaluation_loop(*args, **kwargs)

        # Schedule-free optimizers write the values that are to be evaluated, which the
        # suspension then rounds.
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "eval", None)):
            optimizer.eval()
        with prepared.suspended():
            return super().evaluation_loop(*args, **kwargs)


@contextlib.contextmanager
def prepared_trainer(trainer: Trainer, **fields: Any) -> Iterator[KbitPreparedModel]:
    """Prepare the model of a ``Trainer`` that exists already, and restore it at the end of the block, errors included.

    It is for trainers that load the model or make its adapters themselves, as TRL's do
    with ``quantization_config`` and ``peft_config``. The original is what the trainer's
    constructor left. ``train()`` makes the optimizer, loads the checkpoint to resume
    from, and wraps the model, all of it in the block; it may run there more than once.

    Checkpointing is as the trainer's arguments say, unless ``fields`` says otherwise.
    During the block the trainer has a `KbitTrainerCallback`, added here if it was given
    none. With ``adapter_dtype`` the adapters are in that dtype when ``train()`` makes
    the optimizer, whatever dtype the trainer made or loaded them in.

    Args:
        trainer: The trainer; TRL's and others derived from transformers' as well.
        **fields: Fields of ``PrepareConfig``.

    Yields:
        The wrapper of the trainer's model, prepared.

    Raises:
        ConfigError: The trainer's constructor computed a reference with the model
            (``precompute_ref_log_probs=True`` of DPO and KTO), which was not prepared.
        StateError: The model is prepared already, as one that was prepared before it
            was given to the trainer.
        UnsupportedModelError: The model cannot be prepared, because it is sharded
            already, say; or it was given in place of the trainer.

    Example:
        >>> from kbitwrap.integrations import prepared_trainer
        >>> trainer = SFTTrainer(
        ...     "org/model", quantization_config=..., peft_config=...
        ... )  # doctest: +SKIP
        >>> with prepared_trainer(trainer):  # doctest: +SKIP
        ...     trainer.train()
    """
    if not isinstance(trainer, Trainer):
        raise UnsupportedModelError(
            f"prepared_trainer: expected a Trainer, found a {type(trainer).__name__}: give the trainer that was made, "
            "or prepare a model by KbitPreparedModel(model)"
        )

    if getattr(trainer.args, "precompute_ref_log_probs", False):
        raise ConfigError(
            "precompute_ref_log_probs: prepared_trainer expects False, found True: the constructor of "
            f"{type(trainer).__name__} has computed the reference with the model as it was loaded, and the prepared "
            "model computes other numbers. Leave the argument out, or prepare the model first, "
            "KbitPreparedModel(model).prepare(), and give that to the trainer"
        )

    for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        # transformers 5.23 reads the new name, and drops the old one in 6.
        new_name = name.replace("gradient", "activation")
        old = getattr(trainer.args, name, None)
        value = getattr(trainer.args, new_name, old)
        if value is not None:
            fields.setdefault(name, value)

    callbacks = trainer.callback_handler.callbacks
    has_callback = any(isinstance(one, KbitTrainerCallback) for one in callbacks)
    prepared = KbitPreparedModel(cast("nn.Module", trainer.model), **fields)
    with contextlib.ExitStack() as stack:
        if not has_callback:
            callback = KbitTrainerCallback()
            trainer.add_callback(callback)
            stack.callback(trainer.remove_callback, callback)
        stack.enter_context(prepared)
        if prepared.config.adapter_dtype is not None:
            # PEFT loads adapters in float32 to resume
            create = trainer.create_optimizer

            def create_optimizer(*args: Any, **kwargs: Any) -> Any:
                if _has_adapters(trainer.model):
                    prepared.adopt(cast("nn.Module", trainer.model))
                return create(*args, **kwargs)

            patch = mock.patch.object(trainer, "create_optimizer", create_optimizer)
            stack.enter_context(patch)
        yield prepared


def _compare_numerics(
    manifest: Manifest, recorded: Mapping[str, Any], step: int
) -> None:
    """Warn where the recorded base computed other logits, or adapters were trained in another dtype than PEFT loads."""
    logits = recorded.get("logits"), manifest.logits
    if None not in logits and logits[0] != logits[1]:
        cause = "no library's version changed: the device, its kernels or threads, or the dtype of the run is another"
        changed = changed_versions(recorded.get("versions", {}))
        if changed:
            cause = f"since then {', '.join(changed)}"
        warnings.warn(
            f"the base has the same bytes as in the first run, and computes other logits: {cause}; training continues",
            UserWarning,
            stacklevel=4,
        )
    dtypes = recorded.get("adapters", {})
    for name, one in manifest.adapters.items():
        before, now = dtypes.get(name), [*one.dtypes]
        if before not in (None, now):
            warnings.warn(
                f"the adapter {name!r} was {' and '.join(before)} at step {step}, and is {' and '.join(now)} now: "
                "its losses differ from those of a run that never stopped; resume inside prepared_trainer(trainer, "
                f"adapter_dtype={before[0]!r})",
                UserWarning,
                stacklevel=4,
            )


def _is_to_be_sharded() -> bool:
    """Return whether accelerate shards, or sharded, the model of a trainer by FSDP."""
    state = sys.modules["accelerate.state"].AcceleratorState
    return "FSDP" in str(state._shared_state.get("distributed_type"))


def _refuse_sharded(model: nn.Module, *, saves: bool) -> None:
    """Raise where sharded parameters would train wrongly, or checkpoints hold no adapters, if they are saved.

    accelerate sharded 4-bit weights that are stored as integers before it left them
    whole, and training then ran with a loss of 0 and gradients that are not numbers:
    https://github.com/huggingface/accelerate/issues/3983.

    FSDP1 puts wrappers around blocks, whose names PEFT 0.21 takes for a part of the
    adapters' names: what it saves is empty, and what it loads is nothing.
    """
    for fqn, parameter in model.named_parameters():
        if not is_sharded_tensor(parameter):
            continue
        if _is_to_be_sharded() and not parameter.is_floating_point():
            raise UnsupportedModelError(
                f"{fqn}: accelerate sharded a 4-bit weight that is stored as {parameter.dtype}, which trains with a "
                "loss of 0 and NaN, without an error: load the model with bnb_4bit_quant_storage set to its dtype, as "
                "torch.bfloat16. No step was taken",
                fqn=fqn,
            )
        is_lost = saves and _has_adapters(model) and _OF_FSDP1 in fqn
        if is_lost and parameter.requires_grad:
            raise UnsupportedModelError(
                "PEFT finds no adapter in a model whose blocks FSDP1 wrapped, so checkpoints would hold none, and none "
                'would be loaded from them: shard by FSDP2 (fsdp_config={"version": 2, ...}), or train with '
                'save_strategy="no" and export the merged model. No step was taken',
                fqn=fqn,
            )


def _refuse_other_dtypes(prepared: KbitPreparedModel, model: _Model) -> None:
    """Raise where an adapter is not in the dtype that the preparation asks for."""
    dtype, tree = prepared.config.adapter_dtype, ModelTree(model)
    for edit in Casts(tree, prepared.config, tree.quantization).cast_adapters:
        raise StateError(
            f"adapter_dtype={dtype!r}, and {first_of(edit.fqns)} are in another dtype: they were made or loaded after "
            "the model was adopted, as when training is resumed. No step was taken. Train inside "
            f"`with prepared_trainer(trainer, adapter_dtype={dtype!r})`, or call prepared.adopt(model) before the "
            "optimizer is made",
            state=prepared.state,
            expected=(LifecycleState.PREPARED,),
        )


def _unsuspended_wrapper(model: _Model) -> KbitPreparedModel | None:
    """Return the wrapper that holds a model, unless it is suspended."""
    found = prepared_of(model)
    if found is None or found.state is LifecycleState.SUSPENDED:
        return None
    return found


def _has_adapters(model: _Model) -> bool:
    # absent from a model that is none of PEFT's
    return bool(getattr(model, "peft_config", None))
