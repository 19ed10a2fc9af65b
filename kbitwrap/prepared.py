"""``KbitPreparedModel``: the small state machine around a plan and its journal."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from .config import PrepareConfig, StrPath
from .edits.journal import Journal, TrainedPolicy, finish
from .errors import ConfigError, StateError
from .model.checks import refuse_unsupported_tensors, tree_of
from .model.quantization import detect_as_peft
from .model.tree import ModelTree, only_reading
from .preparation.casts import Casts, refuse_unknown_engine
from .preparation.plan import Plan, plan_for, write_plan
from .preparation.preparation import Preparation, changing, refuse_held
from .reports import ExportReport, LifecycleState, RestoreReport, StateDiff

if TYPE_CHECKING:
    from .manifest.manifest import Manifest

_logger = logging.getLogger(__name__)

_HELD = (LifecycleState.PREPARED, LifecycleState.SUSPENDED)


class KbitPreparedModel:
    """A model prepared for k-bit training, and the way back to the exact state before.

    ``prepare`` freezes the base parameters, upcasts as the precision says, enables
    activation checkpointing and hooks the input embeddings where reentrant
    checkpointing needs it. ``restore`` puts back dtypes, bits, ``requires_grad``, hooks
    and attributes. The model and its Parameter objects stay the same objects
    throughout, so an optimizer made while prepared stays valid. The constructor plans
    and refuses; it changes nothing.

    Args:
        model: The model, quantized, as ``from_pretrained`` returned it; a ``PeftModel``
            as well.
        config: The settings; ``None`` for the defaults.
        **fields: Fields of ``PrepareConfig``, which win over ``config``.

    Attributes:
        model: The very object given.
        config: The settings.
        plan: The edits that ``prepare`` will make, or has made, and their bytes.
        state: A ``LifecycleState``.

    Raises:
        ConfigError: A setting is invalid.
        UnsupportedModelError: The model cannot be prepared, or not with these settings.
        MemoryBudgetError: The plan's peak is over ``memory_budget``.
        StateError: The model, a part of it, or one that shares a parameter with it is
            prepared already.

    Example:
        >>> import warnings, torch
        >>> from kbitwrap import KbitPreparedModel
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(8, 4), torch.nn.LayerNorm(4)
        ... ).bfloat16()
        >>> # A warning says that this model is not quantized.
        >>> warnings.simplefilter("ignore", UserWarning)
        >>> with KbitPreparedModel(model, precision="full") as prepared:
        ...     print(
        ...         prepared.state, model[0].weight.dtype, model[0].weight.requires_grad
        ...     )
        prepared torch.float32 False
        >>> print(prepared.state, model[0].weight.dtype, model[0].weight.requires_grad)
        restored torch.bfloat16 True
    """

    plan: Plan
    state = LifecycleState.NEW
    _preparation: Preparation | None = None
    _suspension: Journal | None = None
    _report: RestoreReport | None = None

    def __init__(
        self, model: nn.Module, config: PrepareConfig | None = None, **fields: Any
    ) -> None:
        self.model = model
        self.config = PrepareConfig.of(config, fields)
        self._settle_plan(tree_of(model))

    def _settle_plan(self, tree: ModelTree, engine: str | None = None) -> None:
        """Plan for the model as it is now; refuse one that cannot be prepared, or that another wrapper holds."""
        with only_reading():
            refuse_unsupported_tensors(tree, allow_meta=False)
        refuse_held(tree)
        self.plan = plan_for(tree, self.config, engine)

    def __repr__(self) -> str:
        return f"KbitPreparedModel({type(self.model).__name__}, precision={str(self.config.precision)!r}, {self.state})"

    def __getattr__(self, name: str) -> Any:
        """Raise, and say that the model may be meant."""
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}; it wraps a model: where that is meant, "
            "give prepared.model in its place",
            name=name,
            obj=self,
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise for a copy and for a pickle: the way back leads to this very model."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, because it leads back to one model: copy the model, "
            "copy.deepcopy(prepared.model) inside suspended(), and prepare that, or save prepared.manifest()"
        )

    def prepare(self, engine: str | None = None) -> KbitPreparedModel:
        """Apply the plan, all or nothing, and return the wrapper; from ``RESTORED`` a second time.

        It costs ``plan.added_bytes``: 512 MiB on a 7B under ``"full"``, half a MiB
        under ``"compute"``, else none.

        Args:
            engine: The engine that will shard the model, as `check_sharding` takes it.
                For ``"fsdp1"`` and ``"fsdp2"``, ``"compute"`` stores in float32 what it
                would upcast at use, as ``"full"`` does, since FSDP takes what stands in
                front of a weight for the weight; ``plan`` is the one for the engine.

        Raises:
            ConfigError: There is no such engine.
            MemoryBudgetError: The plan for the engine is over ``memory_budget``.
            StateError: This or another wrapper holds the model, a part of it, or one of
                its parameters.
            EditError: An edit failed; the model is as it was, and ``__cause__`` says
                why.
        """
        if engine is not None:
            refuse_unknown_engine(engine)
        with changing:
            tree = tree_of(self.model)
            self._settle_plan(tree, engine)
            for alarm in self.plan.alarms:
                warnings.warn(alarm, UserWarning, stacklevel=2)
            self._apply(self.plan, tree)
        return self

    def _apply(self, plan: Plan, tree: ModelTree) -> None:
        """Apply a plan on top of what is applied, all or nothing."""
        preparation = self._preparation or Preparation(self)
        previous = self._preparation, self._report, self.state
        try:
            # First, so that an interrupt right after the last edit leaves a wrapper
            # that can restore the model.
            self._preparation, self._report, self.state = (
                preparation,
                None,
                LifecycleState.PREPARED,
            )
            preparation.apply(plan, tree)
        except BaseException:
            # A first preparation with slots left is in force: the wrapper leads back.
            is_first = previous[0] is None
            if not (is_first and preparation.journal.slots):
                self._preparation, self._report, self.state = previous
            raise

    def restore(self, trained: TrainedPolicy = "keep") -> RestoreReport:
        """Undo the preparation: dtypes, bits, ``requires_grad``, hooks and attributes are those from before.

        What others replaced or added since (a merge, adapters) is left alone and
        reported. What was sharded since keeps the dtype that it is stored in, float32
        under ``"full"`` and ``"compute"``, and is reported (``kept_dtype``); ``export``
        writes its original. Copies that PEFT made of upcast modules get the original dtype. Where
        an adapter still sits on a base that is trainable again, the first step of an
        optimizer that steps the base warns that the base is trained too.

        Args:
            trained: The policy for values that changed while they were stored upcast:
                ``"keep"`` rounds them to the original dtype, ``"discard"`` puts the
                original bits back, ``"error"`` raises. Copies that PEFT made to be
                trained are an adapter's: ``"discard"`` rounds them too.

        Returns:
            The report. A second call changes nothing and returns the same report.

        Raises:
            StateError: Nothing was prepared, or it is suspended.
            ConfigError: An unknown ``trained``, or ``"discard"`` without
                ``keep_originals``.
            UnsupportedModelError: FSDP1 took parameters off their modules since
                (``use_orig_params=False``); nothing was changed.
            RestoreError: Something could not be put back, or was trained under
                ``"error"``; ``failures`` names it. Everything else is restored; call
                ``restore`` again for the rest.
        """
        if trained not in ("keep", "discard", "error"):
            raise ConfigError(
                f"trained: expected 'keep', 'discard' or 'error', found {trained!r}"
            )
        with changing:
            if self.state is LifecycleState.RESTORED and self._report is not None:
                return self._report  # of the restore that was made
            restore = self._expect_prepared("restore").begin_restore(trained)

            def settle() -> RestoreReport:
                report = self._report = restore()
                self.state, self._preparation = LifecycleState.RESTORED, None
                return report

            return finish(settle)

    def __enter__(self) -> KbitPreparedModel:
        return self if self.state is LifecycleState.PREPARED else self.prepare()

    def __exit__(
        self, exc_type: object, exc: BaseException | None, traceback: object
    ) -> None:
        if self.state not in _HELD:
            return
        try:
            # what was suspended in the body and not resumed, by a generator say
            self.resume()
            self.restore()
        except Exception:
            if exc is None:  # else the body's exception is what the caller has to see
                raise
            _logger.exception("could not restore %r after %r", self, exc)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[nn.Module]:
        """Put the model, which is yielded, in its original state for a while: for ``generate``, evaluation, saving.

        Adapters stay in place. Afterwards everything is as before, trained float32
        values bit for bit, and so are the states of torch's random generators, so that
        training continues as without a suspension. Values that others wrote into
        parameters inside, by loading a checkpoint or merging an adapter, are upcast and
        kept, and so are flags and hooks. Plain attributes that were set inside, such as
        the train mode and ``use_cache``, are put back.

        Raises:
            StateError: The model is not prepared, or suspended already; or a process
                group is initialized and a trained parameter would change its dtype,
                which takes it out of DistributedDataParallel for good.
            UnsupportedModelError: The model was sharded since, and is stored in another
                dtype, as under ``"full"`` and ``"compute"``; nothing was changed.

        Example:
            >>> import warnings, torch
            >>> from kbitwrap import KbitPreparedModel
            >>> # A warning says that this model is not quantized.
            >>> warnings.simplefilter("ignore", UserWarning)
            >>> with KbitPreparedModel(
            ...     torch.nn.LayerNorm(4).bfloat16(), precision="full"
            ... ) as prepared:
            ...     with prepared.suspended() as model:
            ...         print(model.weight.dtype)
            ...     print(model.weight.dtype)
            torch.bfloat16
            torch.float32
        """
        suspension = Journal()
        try:
            self._suspend(suspension, "suspended")
            yield self.model
        finally:
            finish(self._end_suspension, suspension)

    def suspend(self) -> None:
        """Put the model in its original state: ``suspended()`` where no with-block can be; raises as that does.

        It is all or nothing, and the model holds the wrapper meanwhile, as a prepared
        one does. ``resume`` ends it.
        """
        self._suspend(Journal(), "suspend", hold=True)

    def resume(self) -> bool:
        """End a suspension, and return whether there was one.

        After a failure, such as too little memory, the model stays suspended; another
        call resumes the rest. The end of a with-block that prepared the model resumes
        it too.
        """
        return self._suspension is not None and finish(
            self._end_suspension, self._suspension
        )

    def _end_suspension(self, suspension: Journal) -> bool:
        """End a suspension, if it is the current one."""
        with changing:
            if (
                self.state is not LifecycleState.SUSPENDED
                or suspension is not self._suspension
            ):
                return False
            try:
                self._expect_prepared("resume", _HELD).resume(suspension)
            finally:
                self.state = (
                    LifecycleState.SUSPENDED
                    if suspension.slots
                    else LifecycleState.PREPARED
                )
            return True

    def _suspend(self, suspension: Journal, call: str, *, hold: bool = False) -> None:
        """Suspend; ``suspension`` becomes the journal that leads back."""
        with changing:
            preparation = self._expect_prepared(call)
            try:
                self._suspension, self.state = suspension, LifecycleState.SUSPENDED
                preparation.suspend(suspension, is_held=hold)
            except BaseException:
                self.resume()
                raise

    def adopt(self, peft_model: nn.Module) -> None:
        """Tell the wrapper of adapters made after ``prepare``; may be called again when further ones are made.

        Under ``"adapted"`` the norms of the blocks that now hold an adapter compute in
        float32 from here on. Under every precision, ``restore`` undoes what accelerate
        sets on ``peft_model``, such as a forward under autocast, and adapters whose
        float32 output breaks a half model are a warning.

        Args:
            peft_model: The ``PeftModel``, or the prepared model itself where adapters
                were injected into it.

        Raises:
            StateError: The wrapper is not prepared.
            UnsupportedModelError: It is not the prepared model, or holds no adapter.
            EditError: An edit failed; the model is as it was before this call.
        """
        with changing:
            preparation = self._expect_prepared("adopt")
            preparation.adopt(peft_model)
            self.plan = preparation.plan

    def verify(self) -> StateDiff:
        """Compare the live model with the state that ``prepare`` left. Adapters do not count.

        Returns:
            The differences by fqn; empty, and false, where there are none.

        Raises:
            StateError: The model is not prepared.
        """
        return self._expect_prepared("verify").verify()

    def export(
        self,
        path: StrPath,
        *,
        merge_adapters: bool = False,
        merge_as: str = "half",
        model: nn.Module | None = None,
        processing_class: Any = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        seed: int = 0,
    ) -> ExportReport:
        """Write the exact base, or the merged model, as a checkpoint, and change nothing of the model.

        While prepared or suspended this is the model as ``restore(trained="keep")``
        would leave it: byte for byte the tensors that its ``save_pretrained`` would
        have written before, whatever adapters, wrappers and trained copies are on it by
        now. Otherwise it is the model as it is, without adapters. Its configs are the
        files that it was loaded with, and what differs from them; where there are none,
        fields that transformers 5 renamed have both names. Tensors are computed and
        written one at a time; the folder is whole or not there.

        With ``merge_adapters`` it is a plain model, which loads without bitsandbytes
        and PEFT: quantized weights are dequantized (4 bits in the dtype of their
        ``quant_state``, 8 bits in float32), the deltas of the active adapters added in
        float32, and each value rounded once to the original half dtype. Trained copies
        (``modules_to_save``) take the place of the originals.

        Of several processes that train together one calls it. Where FSDP or ZeRO-3
        sharded the model since, all call it: they gather one parameter at a time, rank 0
        writes, all get its report, and what fails on one raises on all.

        Args:
            path: The folder to make.
            merge_adapters: Write the plain model with the active adapters merged,
                instead of the exact base.
            merge_as: The form of the merged model. ``"half"``: no layer stays
                quantized. ``"mixed"``: layers that no active adapter touches keep
                their quantized bytes, scales and names; the others are those of
                ``"half"``, and the config names them. Layers that engines compute as
                one (q, k and v; gate and up; the experts of a layer) have one format:
                half, where an adapter touches one of them. ``"quantized"``: every layer of
                bitsandbytes keeps its format and its statistics, and adapted ones get
                codes that are rounded at random, so that the mean of each is the
                merged weight. The report says how much of the delta they keep.
            model: The model with its adapters, such as a ``PeftModel``; ``None``: those
                inside the model itself.
            processing_class: The tokenizer, the processor, or another object with
                ``save_pretrained``, to write too.
            max_shard_size: The most bytes in a file, or a string such as ``"5GB"``.
            overwrite: Replace the files of a checkpoint at ``path``; where others are
                there, nothing is written.
            seed: The seed of ``"quantized"``: the same gives the same bytes.

        Raises:
            ConfigError: ``max_shard_size``, ``merge_as`` or ``seed`` is invalid, or
                ``processing_class`` cannot be saved.
            UnsupportedModelError: The model is offloaded, or sharded and not prepared, or
                FSDP1 took parameters off its modules (``use_orig_params=False``), or
                ``model`` is another.
            ExportError: The exact base is gone, because adapters are merged into it,
                its tensors were replaced, or a frozen one holds other values; a
                quantized layer has lost its scales; it cannot be written; ``path`` is,
                holds or lies in the folder that the model was loaded from; no adapter is
                active, or one cannot be merged exactly; or, as ``"quantized"``, the layers are
                not of bitsandbytes, or over 0.1 % of the weights of one lie beyond the
                range of their codes. ``fqn`` names the first. Nothing was
                left at ``path``.

        Example:
            >>> import tempfile, warnings, torch
            >>> from kbitwrap import KbitPreparedModel
            >>> # A warning says that this model is not quantized.
            >>> warnings.simplefilter("ignore", UserWarning)
            >>> with KbitPreparedModel(
            ...     torch.nn.LayerNorm(4).bfloat16(), precision="full"
            ... ) as prepared:
            ...     report = prepared.export(tempfile.mkdtemp())
            >>> report.files, report.num_bytes
            (('model.safetensors',), 16)
        """
        from .export.export import export_model
        from .export.forms import MergeForm

        return export_model(
            self.model,
            self._preparation,
            path,
            merge_adapters=merge_adapters,
            form=MergeForm(merge_as, seed),
            live=model,
            processing_class=processing_class,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=self.config.progress,
        )

    def merged_weights(
        self, adapters: str | Sequence[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand out the merged model, as an iterator of ``(fqn, tensor)``: for an inference engine's weight loader, say.

        Names, order and values are those of ``export(merge_adapters=True)``; no file is
        written, and the model is only read. A tensor is computed when it is asked for,
        on the model's device, in memory of its own. Beside the one handed out last,
        that takes at most twice the bytes of the largest, where the adapters can be
        merged by rows.

        Where FSDP or ZeRO-3 sharded the model since, all ranks call it and iterate: rank 0 gets
        the tensors, and the iterator of each other rank hands out nothing and ends when
        that of rank 0 does. They gather one tensor at a time meanwhile, so that no
        other collective may be called on rank 0 between two of them.

        Args:
            adapters: The names of the adapters to merge, none for the base alone;
                ``None``: the active ones.

        Raises:
            StateError: The model is neither prepared nor suspended; on the way: its
                state changed.
            ConfigError: No adapter has such a name.
            UnsupportedModelError: The model is offloaded, or FSDP1 took parameters off its
                modules (``use_orig_params=False``).
            ExportError: As of ``export``; or the model's class has a
                ``save_pretrained`` of its own.

        Example:
            >>> import warnings, torch
            >>> from kbitwrap import KbitPreparedModel
            >>> # A warning says that this model is not quantized.
            >>> warnings.simplefilter("ignore", UserWarning)
            >>> with KbitPreparedModel(
            ...     torch.nn.LayerNorm(4).bfloat16(), precision="full"
            ... ) as prepared:
            ...     print(
            ...         [
            ...             (fqn, tensor.dtype)
            ...             for fqn, tensor in prepared.merged_weights()
            ...         ]
            ...     )
            [('weight', torch.bfloat16), ('bias', torch.bfloat16)]
        """
        from .export.export import merged_weights

        preparation = self._expect_prepared("merged_weights", _HELD)
        return merged_weights(
            self.model,
            preparation,
            adapters,
            lambda: (self.state, self._preparation, self._suspension),
        )

    def manifest(self) -> Manifest:
        """Record the preparation: the model, the settings, and every base tensor's original content by digest.

        It is the same while prepared and while suspended. Every tensor of the base is
        read once, on its own device. Where FSDP or ZeRO-3 sharded the model since, all ranks call
        it, and all get it.

        Raises:
            StateError: The model is not prepared.
            UnsupportedModelError: A tensor cannot be read: it is offloaded, or FSDP1 took
                it off its module (``use_orig_params=False``).
            ManifestError: Something cannot be recorded: a setting that JSON cannot
                hold, a name that could be taken for a path, weights that were replaced,
                trained, changed while frozen, or that adapters are merged into.

        Example:
            >>> import warnings, torch
            >>> from kbitwrap import KbitPreparedModel
            >>> # A warning says that this model is not quantized.
            >>> warnings.simplefilter("ignore", UserWarning)
            >>> with KbitPreparedModel(
            ...     torch.nn.LayerNorm(4).bfloat16(), precision="full"
            ... ) as prepared:
            ...     manifest = prepared.manifest()
            >>> (
            ...     manifest.tensors["weight"].original_dtype,
            ...     manifest.tensors["weight"].prepared_dtype,
            ... )
            ('bfloat16', 'float32')
        """
        from .manifest.manifest import Manifest

        return Manifest.of(self._expect_prepared("manifest", _HELD))

    @classmethod
    def from_manifest(
        cls, model: nn.Module, manifest: Manifest | StrPath
    ) -> KbitPreparedModel:
        """Make the wrapper for the preparation that a manifest records; changes nothing.

        Args:
            model: The recorded model, loaded again; it may carry adapters, or be the
                ``PeftModel`` around it.
            manifest: The manifest, the file that it was saved to, or a folder that
                holds it as ``kbitwrap.json``.

        Returns:
            The wrapper, in state ``NEW``: ``prepare`` or ``with`` applies it.

        Raises:
            ManifestError: The manifest cannot be read.
            ManifestMismatchError: The model is another than the one recorded.
            UnsupportedModelError: The model is sharded or offloaded, or cannot be
                prepared so.
            MemoryBudgetError: The plan's peak is over the recorded ``memory_budget``.
            StateError: The model, or a part of it, is prepared already.
        """
        from .manifest.manifest import Manifest

        manifest = (
            manifest if isinstance(manifest, Manifest) else Manifest.load(manifest)
        )
        manifest.check(model)
        return cls(model, manifest.prepare_config())

    def _expect_prepared(
        self, call: str, states: tuple[LifecycleState, ...] = _HELD[:1]
    ) -> Preparation:
        if self.state not in states or self._preparation is None:
            remedy = {
                LifecycleState.NEW: "prepare() it first, or use it in a with-block",
                LifecycleState.SUSPENDED: "resume() it, or leave suspended(), first",
                LifecycleState.RESTORED: "it was restored; prepare() it again",
            }[self.state]
            raise StateError(
                f"{call}() in state {str(self.state)!r}: {remedy}",
                state=self.state,
                expected=states,
            )
        return self._preparation


class PeftPreparedModel(KbitPreparedModel):
    """The wrapper of a model that the drop-in prepared.

    Its constructor does not plan: ``apply_on_top`` does.
    """

    def __init__(self, model: nn.Module, config: PrepareConfig) -> None:
        self.model, self.config = model, config

    @staticmethod
    def apply_on_top(model: nn.Module, config: PrepareConfig) -> None:
        """Prepare a model by PEFT's detection, on top of what holds it already; adapters are frozen too."""
        tree, preparation = Preparation.tree_of(model)
        with only_reading():
            refuse_unsupported_tensors(tree, allow_meta=False)
            refuse_held(tree, but=preparation)
            plan = write_plan(
                Casts(tree, config, detect_as_peft(model), freeze_adapters=True)
            )
        for alarm in plan.alarms:
            warnings.warn(alarm, UserWarning, stacklevel=3)
        wrapper = None if preparation is None else preparation.holder()
        if isinstance(wrapper, KbitPreparedModel):
            # raises where the model is suspended
            wrapper._expect_prepared("prepare_model_for_kbit_training")
        else:
            wrapper = PeftPreparedModel(model, config)
        wrapper._apply(plan, tree)
        wrapper.plan = plan
