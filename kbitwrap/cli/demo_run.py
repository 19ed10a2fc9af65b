"""The demonstration itself. Everything it reports, it measured."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import (
    PeftModel,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
    set_peft_model_state_dict,
)
from torch import nn

from .. import (
    ConfigError,
    KbitPreparedModel,
    MemoryBudgetError,
    Precision,
    RestoreError,
    UnsupportedModelError,
)
from .base_state import ASPECTS, BaseState
from .console import InputError, Result, first_line
from .demo_merges import IN_PLACE, Merge, Merges
from .demo_sides import PEFT, Side, Subject, in_float32, measure, stored_bytes
from .loading import choose_device, put_back
from .losses import evaluate, logits

_NUM_PROMPT = 32
_NUM_GENERATED = 64

# The held-out loss has to fall by 0.3 % of itself at least, and by three standard
# errors of its mean fall over the blocks, so that neither noise nor a training that
# does nothing passes.
_LEAST_RELATIVE_FALL = 0.003
_LEAST_STANDARD_ERRORS = 3.0

State = dict[str, torch.Tensor]
"""An adapter's trained values."""


@dataclass
class Demo:
    """One run of the demonstration.

    Attributes:
        model: What ``from_pretrained`` takes, or ``None`` for the built-in model.
        quant: ``"nf4"`` or ``"int8"``.
        precision: The precision to prepare with.
        device: The device's name, or ``None``.
        steps: Training steps.
        seed: Seed of the weights, the adapter, the text and the generation.
        trust_remote_code: Run the code that the model brings along.
        begin: Called once the model is loaded.
        show: Called with the texts to print during the run.
        doing: Called with what is being done.
        subject: The model that all sides prepare, with its text.
        blocks: The text.
        base: The state of the base when it was loaded.
        trained: The values of the trained adapter.
        folder: A temporary folder, for the built-in model and what is made of it.
        sides: What was measured of each way to prepare.
        merger: What merges the trained adapter, saved; ``None`` for a model of others.
        merges: What was measured of each way to merge.
        checks: The checks, each with what was found.
        seconds: The time that each part took.
        measured: What else was measured.
    """

    model: str | None
    quant: str
    precision: Precision
    device: str | None
    steps: int
    seed: int
    trust_remote_code: bool
    begin: Callable[[], object]
    show: Callable[..., object]
    doing: Callable[[str], object]

    def run(self) -> Result:
        """Run it.

        Returns:
            The settings, what was measured, the checks and the timings, ready for JSON.

        Raises:
            InputError: The model or the device cannot be used.
        """
        device = choose_device(self.device)
        self.checks: list[Result] = []
        self.sides: dict[str, Side] = {}
        self.merges: list[Merge] = []
        self.seconds: dict[str, float] = {}
        self.measured: Result = {}
        with (
            tempfile.TemporaryDirectory(prefix="kbitwrap-demo-") as folder,
            put_back(device, one_thread=self.model is None),
        ):
            self.folder = Path(folder)
            with self._timed("load"):
                self.subject = Subject(
                    self.model,
                    self.quant,
                    device,
                    self.seed,
                    self.trust_remote_code,
                    self.folder,
                )
            self.begin()
            self.blocks = self.subject.blocks
            self._measure_sides()
            self._prepare_train_restore()
        peft = self.sides[PEFT]
        sides = {name: side.to_dict(peft) for name, side in self.sides.items()}
        seconds = {name: round(took, 3) for name, took in self.seconds.items()}
        return {
            "passed": all(check["passed"] for check in self.checks),
            "model": self.subject.name,
            "quant": self.quant,
            "precision": self.precision.value,
            "device": str(device),
            "steps": self.steps,
            "seed": self.seed,
            "checks": self.checks,
            "sides": sides,
            "merges": [merge.to_dict() for merge in self.merges],
            "seconds": seconds,
            **self.measured,
        }

    def _measure_sides(self) -> None:
        """PEFT's way, "compute" and the precision asked for, each from its own copy of the model."""
        precisions = dict.fromkeys((Precision.COMPUTE, self.precision))
        for name in (PEFT, *(precision.value for precision in precisions)):
            with self._timed(name), self._refusing():
                self.sides[name] = measure(name, self.subject)
        for precision in precisions:
            if precision.upcasts_all:
                self._check_numbers(precision.value)
        if self.model is None and self.subject.device.type == "cpu":
            for name in self.sides:
                self._check_prediction(name)

    def _check_numbers(self, name: str) -> None:
        """Compare the first step with PEFT's: its numbers are the same, to the bit.

        Args:
            name: A precision that computes what PEFT's function computes.
        """
        distances = self.sides[name].distances(self.sides[PEFT])
        for what, distance in distances.items():
            check = f'"{name}": PEFT\'s {what}'
            self._check("numbers", check, f"difference {distance:g}", distance == 0)

    def _check_prediction(self, name: str) -> None:
        """Compare the bytes of a step with what was predicted: on a CPU they are the same."""
        side = self.sides[name]
        what = f'"{name}": a step takes the bytes predicted'
        measured = f"{side.predicted_bytes:,} predicted, {side.step_bytes:,} measured"
        is_same = side.predicted_bytes == side.step_bytes
        self._check("plan", what, measured, is_same)

    def _prepare_train_restore(self) -> None:
        """Take our way from the loaded model to the merged one.

        Then the same adapter is merged in other ways, to compare what these give.
        """
        model = self.subject.load()
        with self._timed("digests"):
            self.base = BaseState.of(dict(model.named_modules()))
        self._check_beginning()
        with self._refusing():
            prepared = KbitPreparedModel(model, precision=self.precision)
        self.show(f"{self.subject.name}, {self.quant}: the plan\n{prepared.plan}")
        self.measured["plan"] = prepared.plan.to_dict()
        adapted = self._use_prepared(prepared)
        with self._timed("compare"):
            self._check_restored()
        with self._timed("merge"):
            merged = adapted.merge_and_unload()
            self._check_merged(merged)
            self.sides[self.precision.value].merged_bytes = stored_bytes(merged)
        del model, prepared, merged, adapted  # not two models at a time
        with self._timed("merge, PEFT's way"):
            self._merge_in_other_ways()

    def _merge_in_other_ways(self) -> None:
        """Merge the same adapter in PEFT's ways."""
        model = self.subject.load()
        prepare_model_for_kbit_training(model)
        merged = self._with_trained(model).merge_and_unload()
        self.sides[PEFT].merged_bytes = stored_bytes(merged)
        if self.merger is None:
            return
        name = IN_PLACE.format(quant=self.quant)
        in_place = self.merger.in_place(name, merged)
        self.merges = [in_place, self.merger.reloaded(), *self.merges]

    def _use_prepared(self, prepared: KbitPreparedModel) -> PeftModel:
        """Do what is done while the model is prepared.

        It is trained, suspended to generate, and exported with its adapter; each is checked.

        Args:
            prepared: The model, not prepared yet.

        Returns:
            The model under its trained adapter, restored.
        """
        started = time.perf_counter()
        with prepared:
            self.seconds["prepare"] = time.perf_counter() - started
            self._check_bytes(prepared)
            adapted = self.subject.adapt(prepared.model, self.subject.modules_to_save)
            prepared.adopt(adapted)
            with self._timed("train"):
                self._train(adapted)
            self._check_untouched(prepared)
            with self._timed("suspend"):
                self._suspend(prepared, adapted)
            self.trained = _adapter_state(adapted)
            self.merger = self._merger(prepared, adapted)
            if self.merger is not None:
                with self._timed("export"):
                    self._check_export(self.merger.exported(prepared, adapted))
            with self._timed("restore"):
                self._restore(prepared)
        return adapted

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Say in one line why a model cannot be prepared."""
        try:
            yield
        except (ConfigError, MemoryBudgetError, UnsupportedModelError) as error:
            name = self.model or "the built-in model"
            raise InputError(
                f"{name} cannot be prepared: {first_line(error)}"
            ) from error

    # What is trained, and generated meanwhile.

    def _train(self, model: PeftModel) -> None:
        """Train the adapter, and see that the held-out loss falls.

        Args:
            model: The prepared model under its adapter.
        """
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.subject.learning_rate)
        before = evaluate(model, self.blocks.held_out)
        model.train()
        losses = []
        for step in range(self.steps):
            loss = self.subject.loss(model, step)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            self.doing(f"train: step {step + 1} of {self.steps}, loss {losses[-1]:.2f}")
        falls = before - evaluate(model, self.blocks.held_out)
        start = before.mean().item()
        fall = falls.mean().item()
        error = falls.std().item() / len(falls) ** 0.5
        least = max(_LEAST_RELATIVE_FALL * start, _LEAST_STANDARD_ERRORS * error)
        found = f"{start:.3f} -> {start - fall:.3f}, by {fall:.3f} ± {error:.3f}; at least {least:.3f} expected"
        self._check(
            "training",
            "the held-out loss fell",
            found,
            fall > least,
        )
        self.measured["loss"] = {
            "held_out_before": start,
            "held_out_after": start - fall,
            "fall_standard_error": error,
            "least_fall": least,
            "training": losses,
            "trained_parameters": sum(one.numel() for one in trained),
        }

    def _suspend(self, prepared: KbitPreparedModel, model: PeftModel) -> None:
        """Generate while suspended; the losses are the same before and after, to the bit.

        Args:
            prepared: The prepared model.
            model: The same under its adapter.
        """
        training_before = self._training_loss(model)
        held_out_before = evaluate(model, self.blocks.held_out)
        with prepared.suspended():
            self._check_as_loaded("suspension", "suspended")
            self._generate(model)
        training_after = self._training_loss(model)
        held_out_after = evaluate(model, self.blocks.held_out)

        what = "after a suspension: the same training loss"
        measured = f"{training_before!r} -> {training_after!r}"
        is_same = training_before == training_after
        self._check("suspension", what, measured, is_same)

        what = "after a suspension: the same held-out losses"
        num_same = int((held_out_before == held_out_after).sum())
        measured = f"{num_same} of {len(held_out_before)} blocks bit-identical"
        is_same = torch.equal(held_out_before, held_out_after)
        self._check("suspension", what, measured, is_same)

    def _training_loss(self, model: PeftModel) -> float:
        """The loss of the step that would come next."""
        model.train()
        return self.subject.loss(model, self.steps).item()

    @torch.no_grad()
    def _generate(self, model: PeftModel) -> None:
        """Continue a held-out text.

        Args:
            model: The model under its adapter.
        """
        model.eval()
        tokens = self.subject.tokens
        prompt = self.blocks.held_out[:1, :_NUM_PROMPT]
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=0.7,
            max_new_tokens=_NUM_GENERATED,
        )
        prompt_text = tokens.decode(prompt[0].tolist())
        text = tokens.decode(output[0, _NUM_PROMPT:].tolist())
        self.measured["generation"] = {"prompt": prompt_text, "text": text}
        self.show(
            f"generated while suspended\n  prompt: {prompt_text!r}\n  text:   {text!r}"
        )

    # What is exported and merged, beside the same computed in float32.

    def _with_trained(self, model: nn.Module) -> PeftModel:
        """Put the adapter that was trained on another copy of the model.

        Args:
            model: The copy.

        Returns:
            The model under the adapter, in evaluation mode.
        """
        adapted = self.subject.adapt(model, self.subject.modules_to_save)
        set_peft_model_state_dict(adapted, self.trained)
        return adapted.eval()

    def _merger(self, prepared: KbitPreparedModel, model: PeftModel) -> Merges | None:
        """Save the adapter, and compute what merged models are compared with.

        Args:
            prepared: The prepared model.
            model: The same under its adapter.

        Returns:
            What merges it; ``None`` for a model of others, which may be too large to be
            merged three times.
        """
        if self.model is not None:
            return None
        folder = self.folder / "merges"
        model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
        prepared.manifest().save(folder / "adapter" / "kbitwrap.json")
        with self._timed("float32"):
            exact = in_float32(self.subject.load())
            base = logits(exact, self.blocks)
            expected = logits(self._with_trained(exact), self.blocks)
        return Merges(self.subject, folder, base, expected)

    # What is checked.

    def _check_beginning(self) -> None:
        digest = self.base.digest()
        is_same = all(side.digest == digest for side in self.sides.values())
        measured = f"digest {digest[:16]}"
        self._check("numbers", "all began with the same bits", measured, is_same)

    def _check_bytes(self, prepared: KbitPreparedModel) -> None:
        added = self.base.again().parameter_bytes - self.base.parameter_bytes
        planned = prepared.plan.added_bytes
        measured = f"{added:,} added, {planned:,} planned"
        what = "the bytes added are those planned"
        self._check("plan", what, measured, added == planned)

    def _check_untouched(self, prepared: KbitPreparedModel) -> None:
        differences = prepared.verify().differences
        measured = f"{len(differences)} differences found by verify()"
        what = "training changed nothing of the base"
        self._check("training", what, measured, not differences)

    def _check_export(self, merge: Merge) -> None:
        self.merges.append(merge)
        what = "exported: a merge, says doctor"
        measured = f"{merge.kept:.1%} of the delta, on the {merge.onto} weights"
        self._check("merge", what, measured, merge.is_right)

    def _restore(self, prepared: KbitPreparedModel) -> None:
        """Restore the model; that every edit could be undone is a check.

        Args:
            prepared: The prepared model.
        """
        what = "restore() undid every edit"
        try:
            report = prepared.restore()
        except RestoreError as error:
            self._check(
                "restore",
                what,
                first_line(error),
                False,
            )
            return
        self.measured["restore_report"] = report.to_dict()
        found = "0 failures"
        copies = sorted({*report.trained, *report.replaced})
        if copies:
            found += f"; beside the base: PEFT's trained copy of {', '.join(copies)}"
        self._check("restore", what, found, True)

    def _check_restored(self) -> None:
        self._check_as_loaded("restore", "restored")
        for name, side in self.sides.items():
            if name == PEFT:  # has no way back
                continue
            left = ", ".join(f"{number} {what}" for what, number in side.left.items())
            what = f'"{name}", unloaded: nothing left'
            is_clean = not any(side.left.values())
            self._check("restore", what, f"{left} differ", is_clean)

    def _check_as_loaded(self, group: str, when: str) -> None:
        """Check every aspect of the base: it is as it was when it was loaded.

        Args:
            group: The group of the checks.
            when: What was done before, in one word.
        """
        now = self.base.again()
        digests = {"loaded": self.base.digest()}
        self.measured.setdefault("base_digest", digests)[when] = now.digest()
        for aspect, what in ASPECTS.items():
            self._check_same(
                group,
                f"{when}: {what} as loaded",
                now,
                aspect,
            )

    def _check_merged(self, merged: nn.Module) -> None:
        """Check that nothing of the preparation is left in the merged model.

        Args:
            merged: The model.
        """
        now = BaseState.of(dict(merged.named_modules()))
        before = self.base.values["dtypes"]
        dtypes = now.values["dtypes"]
        float32 = [fqn for fqn, dtype in dtypes.items() if dtype == "float32"]
        left = [fqn for fqn in float32 if before.get(fqn) != "float32"]
        measured = _named(left, len(dtypes), "in float32")
        self._check("merge", "merged: no float32 left behind", measured, not left)
        for aspect in ("dtypes", "hooks", "attributes"):
            what = f"merged: {ASPECTS[aspect]} as loaded"
            self._check_same("merge", what, now, aspect)

    def _check_same(self, group: str, name: str, now: BaseState, aspect: str) -> None:
        differences = self.base.differences(now, aspect)
        measured = _named(
            differences,
            len(self.base.values[aspect]),
            "differ",
        )
        self._check(
            group,
            name,
            measured,
            not differences,
        )

    def _check(self, group: str, name: str, measured: str, passed: bool) -> None:
        """Write down a check.

        Args:
            group: The group that it is shown in.
            name: What must hold.
            measured: What was found.
            passed: Whether it holds.
        """
        self.checks.append(
            {"name": name, "measured": measured, "passed": passed, "group": group}
        )

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Time a part, and say that it is being done.

        Args:
            name: The name of the part.
        """
        self.doing(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def _adapter_state(model: PeftModel) -> State:
    """Copy an adapter's trained values.

    Args:
        model: The model under the adapter.

    Returns:
        The copies, by name, on the CPU.
    """
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.cpu().clone() for name, tensor in state.items()}


def _named(names: list[str], total: int, verb: str) -> str:
    """Say how many of all differ, and name the first.

    Args:
        names: Those that do.
        total: The number of all.
        verb: What they do.

    Returns:
        The text.
    """
    example = f", the first {names[0]}" if names else ""
    return f"{len(names)} of {total} {verb}{example}"
