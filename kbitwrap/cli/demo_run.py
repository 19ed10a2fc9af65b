"""The demonstration itself. Everything it reports, it measured."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import nn
from transformers import AutoModelForCausalLM

from .. import (
    ConfigError,
    KbitPreparedModel,
    MemoryBudgetError,
    Precision,
    RestoreError,
    RestoreReport,
    UnsupportedModelError,
)
from ..bench.memory import stored_bytes
from .base_state import ASPECTS, BaseState
from .console import Check, InputError, first_line
from .demo_sides import (
    PEFT,
    Side,
    Subject,
    in_float32,
    measure_ours,
    measure_peft,
    prepare_by_peft,
    relative_error,
)
from .loading import (
    LoadedModel,
    choose_device,
    few_threads,
    fork_devices,
    load_builtin,
    load_named,
    rng,
)
from .losses import batch, block_losses, evaluate, logits
from .text import Blocks, read_blocks

_LENGTH = 65  # tokens in a block: 64 to predict
_NUM_HELD_OUT = 16
_NUM_PROMPT = 32
_NUM_GENERATED = 64
_RANK = 32

# The held-out loss has to fall by a hundredth of itself at least, and by three standard
# errors of its mean fall over the blocks, so that neither noise nor a training that
# does nothing passes.
_LEAST_RELATIVE_FALL = 0.01
_LEAST_STANDARD_ERRORS = 3.0


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
        show: Called with the texts to print during the run.
        doing: Called with what is being done.
        trust_remote_code: Run the code that the model brings along.
        checks: What was checked so far.
        sides: What each way to prepare costs, computes and leaves.
        seconds: How long each part took.
        measured: Further figures, ready for JSON.
        loaded: What belongs to the model: its name, its tokens and how it is trained.
            Each side has a model of its own.
        blocks: The text, on the device.
        subject: What the sides are measured on.
        base: The state of the model that is trained, as loaded.
    """

    model: str | None
    quant: str
    precision: Precision
    device: str | None
    steps: int
    seed: int
    show: Callable[..., object]
    doing: Callable[[str], object]
    trust_remote_code: bool
    checks: list[Check] = field(default_factory=list)
    sides: dict[str, Side] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    loaded: LoadedModel = field(init=False)
    blocks: Blocks = field(init=False)
    subject: Subject = field(init=False)
    base: BaseState = field(init=False)

    def run(self) -> dict[str, Any]:
        """Run it.

        Returns:
            The settings, what was measured, the checks and the timings, ready for JSON.

        Raises:
            InputError: The model or the device cannot be used.
        """
        device = choose_device(self.device)
        with (
            few_threads(self.model is None),
            torch.random.fork_rng(fork_devices(device), device_type=rng(device)),
        ):
            with self._timed("load"):
                loaded = self._load(device)
            blocks = read_blocks(
                loaded.tokens,
                length=_LENGTH,
                num_held_out=_NUM_HELD_OUT,
                seed=self.seed,
            )
            self.blocks = Blocks(blocks.training.to(device), blocks.held_out.to(device))
            self.loaded = dataclasses.replace(loaded, model=nn.Identity())
            del loaded
            self.subject = Subject(
                load=lambda: self._load(device).model,
                adapt=lambda model: self._add_adapter(model, None),
                loss=lambda model: block_losses(model, batch(self.blocks, 0)).mean(),
            )
            self._measure_sides()
            self._prepare_train_restore(self.subject.load())
        return {
            "passed": all(check.passed for check in self.checks),
            "model": self.loaded.name,
            "quant": self.quant,
            "precision": self.precision.value,
            "device": str(device),
            "steps": self.steps,
            "seed": self.seed,
            "checks": [check.to_dict() for check in self.checks],
            "sides": {
                name: side.to_dict(self.sides[PEFT])
                for name, side in self.sides.items()
            },
            "seconds": {
                name: round(seconds, 3) for name, seconds in self.seconds.items()
            },
            **self.measured,
        }

    def _load(self, device: torch.device) -> LoadedModel:
        torch.manual_seed(self.seed)
        if self.model is None:
            return load_builtin(self.quant, device)
        return load_named(self.model, self.quant, device, self.trust_remote_code)

    def _measure_sides(self) -> None:
        with self._timed(PEFT):
            peft = self.sides[PEFT] = measure_peft(self.subject)
        for precision in dict.fromkeys((Precision.COMPUTE, self.precision)):
            with self._timed(precision.value), self._refusing():
                side = self.sides[precision.value] = measure_ours(
                    precision, self.subject
                )
            if precision.upcasts_all:
                self._check_numbers(side, peft)

    def _prepare_train_restore(self, model: nn.Module) -> None:
        with self._timed("digests"):
            self.base = BaseState.of(dict(model.named_modules()))
        digest = self.base.digest()
        is_same = {side.digest for side in self.sides.values()} == {digest}
        self._check(
            "numbers", "all began with the same bits", f"digest {digest[:16]}", is_same
        )
        with self._refusing():
            prepared = KbitPreparedModel(model, precision=self.precision)
        self.show(f"{self.loaded.name}, {self.quant}: the plan\n{prepared.plan}")
        self.measured["plan"] = prepared.plan.to_dict()
        side = self.sides[self.precision.value]
        started = time.perf_counter()
        with prepared:
            self.seconds["prepare"] = time.perf_counter() - started
            self._check_bytes(prepared)
            peft_model = self._add_adapter(model, self.loaded.modules_to_save)
            prepared.adopt(peft_model)
            with self._timed("train"):
                self._train(peft_model)
            differences = prepared.verify().differences
            found = f"{len(differences)} differences found by verify()"
            self._check(
                "training",
                "training changed nothing of the base",
                found,
                not differences,
            )
            with self._timed("suspend"):
                self._suspend(prepared, peft_model)
            trained = _adapter_state(peft_model)
            expected = self._expected(trained)
            with self._timed("export"):
                self._export(prepared, peft_model, side, expected)
            with self._timed("restore"):
                report = self._restore(prepared)
        with self._timed("compare"):
            self._check_restored(report)
        with self._timed("merge"):
            merged = peft_model.merge_and_unload()
            self._check_merged(merged)
            self._measure_merged(side, merged, expected)
        del merged, peft_model
        with self._timed("merge, PEFT's way"):
            model = self.subject.load()
            prepare_by_peft(model)
            merged = self._with_trained(model, trained).merge_and_unload()
            self._measure_merged(self.sides[PEFT], merged, expected)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, MemoryBudgetError, UnsupportedModelError) as error:
            name = self.model or "the built-in model"
            raise InputError(
                f"{name} cannot be prepared: {first_line(error)}"
            ) from error

    def _check_numbers(self, side: Side, peft: Side) -> None:
        distances = {
            "loss": side.loss_difference(peft),
            "gradients": side.gradient_difference(peft),
        }
        for what, distance in distances.items():
            self._check(
                "numbers",
                f'"{side.name}": PEFT\'s {what}',
                f"difference {distance:g}",
                distance == 0,
            )

    def _with_trained(
        self, model: nn.Module, trained: dict[str, torch.Tensor]
    ) -> PeftModel:
        peft_model = self._add_adapter(model, self.loaded.modules_to_save)
        set_peft_model_state_dict(peft_model, trained)
        return peft_model.eval()

    def _expected(self, trained: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """The logits of the dequantized base and the adapter beside it, in float32; ``None`` for a model of others."""
        if self.model is not None:
            return None
        with self._timed("float32"):
            exact = in_float32(self.subject.load())
            return logits(self._with_trained(exact, trained), self.blocks)

    def _export(
        self,
        prepared: KbitPreparedModel,
        model: PeftModel,
        side: Side,
        expected: torch.Tensor | None,
    ) -> None:
        if expected is None:
            return
        with tempfile.TemporaryDirectory(prefix="kbitwrap-demo-") as folder:
            path = f"{folder}/merged"
            report = prepared.export(path, merge_adapters=True, model=model)
            device_map = {"": expected.device}
            exported = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, device_map=device_map
            )
        side.exported_bytes = report.num_bytes
        side.exported_error = relative_error(logits(exported, self.blocks), expected)

    def _measure_merged(
        self, side: Side, merged: nn.Module, expected: torch.Tensor | None
    ) -> None:
        side.merged_bytes = stored_bytes(merged)
        if expected is not None:
            side.merged_error = relative_error(
                logits(in_float32(merged), self.blocks), expected
            )

    def _check_bytes(self, prepared: KbitPreparedModel) -> None:
        added = self.base.again().parameter_bytes - self.base.parameter_bytes
        planned = prepared.plan.added_bytes
        found = f"{added:,} added, {planned:,} planned"
        self._check(
            "plan", "the bytes added are those planned", found, added == planned
        )

    def _add_adapter(
        self, model: nn.Module, modules_to_save: list[str] | None
    ) -> PeftModel:
        torch.manual_seed(self.seed)
        config = LoraConfig(
            r=_RANK,
            lora_alpha=2 * _RANK,
            target_modules="all-linear",
            modules_to_save=modules_to_save,
            task_type="CAUSAL_LM",
        )
        try:
            peft_model = get_peft_model(model, config)
        except ValueError as error:
            raise InputError(
                f"PEFT cannot put a LoRA on {self.loaded.name}: {first_line(error)}"
            ) from error
        assert isinstance(peft_model, PeftModel)
        return peft_model

    def _train(self, model: PeftModel) -> None:
        parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        optimizer = torch.optim.AdamW(parameters, lr=self.loaded.learning_rate)
        before = evaluate(model, self.blocks.held_out)
        model.train()
        losses = []
        for step in range(self.steps):
            loss = block_losses(model, batch(self.blocks, step)).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            self.doing(f"train: step {step + 1} of {self.steps}, loss {losses[-1]:.2f}")
        after = evaluate(model, self.blocks.held_out)
        self._check_fall(before, after)
        self.measured["loss"]["training"] = losses
        self.measured["loss"]["trained_parameters"] = sum(
            parameter.numel() for parameter in parameters
        )

    def _check_fall(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Check that training helped: the losses of the held-out blocks, before and after it."""
        falls = before - after
        start = before.mean().item()
        fall = falls.mean().item()
        error = falls.std().item() / len(falls) ** 0.5
        least = max(_LEAST_RELATIVE_FALL * start, _LEAST_STANDARD_ERRORS * error)
        found = f"{start:.3f} -> {start - fall:.3f}, by {fall:.3f} ± {error:.3f}; at least {least:.3f} expected"
        self._check("training", "the held-out loss fell", found, fall > least)
        self.measured["loss"] = {
            "held_out_before": start,
            "held_out_after": start - fall,
            "fall_standard_error": error,
            "least_fall": least,
        }

    def _suspend(self, prepared: KbitPreparedModel, model: PeftModel) -> None:
        """Generate while suspended; the losses are the same before and after, to the bit."""
        training_before = self._training_loss(model)
        held_out_before = evaluate(model, self.blocks.held_out)
        with prepared.suspended():
            self._check_as_loaded("suspended")
            self._generate(model)
        training_after = self._training_loss(model)
        held_out_after = evaluate(model, self.blocks.held_out)
        self._check(
            "suspension",
            "after a suspension: the same training loss",
            f"{training_before!r} -> {training_after!r}",
            training_before == training_after,
        )
        num_same = int((held_out_before == held_out_after).sum())
        self._check(
            "suspension",
            "after a suspension: the same held-out losses",
            f"{num_same} of {len(held_out_before)} blocks bit-identical",
            torch.equal(held_out_before, held_out_after),
        )

    def _training_loss(self, model: PeftModel) -> float:
        model.train()
        return block_losses(model, batch(self.blocks, self.steps)).mean().item()

    @torch.no_grad()
    def _generate(self, model: PeftModel) -> None:
        model.eval()
        tokens = self.loaded.tokens
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

    def _restore(self, prepared: KbitPreparedModel) -> RestoreReport | RestoreError:
        try:
            return prepared.restore()
        except RestoreError as error:
            return error

    def _check_restored(self, report: RestoreReport | RestoreError) -> None:
        what = "restore() undid every edit"
        if isinstance(report, RestoreError):
            self._check("restore", what, first_line(report), False)
        else:
            self.measured["restore_report"] = report.to_dict()
            copies = sorted({*report.trained, *report.replaced})
            beside = (
                f"; beside the base: PEFT's trained copy of {', '.join(copies)}"
                if copies
                else ""
            )
            self._check("restore", what, f"0 failures{beside}", True)
        self._check_as_loaded("restored")
        for side in self.sides.values():
            if side.name != PEFT:
                left = ", ".join(
                    f"{number} {what}" for what, number in side.left.items()
                )
                is_clean = not any(side.left.values())
                self._check(
                    "restore",
                    f'"{side.name}", unloaded: nothing left',
                    f"{left} differ",
                    is_clean,
                )

    def _check_as_loaded(self, when: str) -> None:
        now = self.base.again()
        digests = self.measured.setdefault(
            "base_digest", {"loaded": self.base.digest()}
        )
        digests[when] = now.digest()
        group = {"suspended": "suspension", "restored": "restore"}[when]
        for aspect, what in ASPECTS.items():
            self._check_same(group, f"{when}: {what} as loaded", now, aspect)

    def _check_merged(self, merged: nn.Module) -> None:
        now = BaseState.of(dict(merged.named_modules()))
        before = self.base.values["dtypes"]
        dtypes = now.values["dtypes"]
        left = [
            fqn
            for fqn, dtype in dtypes.items()
            if dtype == "float32" and before.get(fqn) != "float32"
        ]
        measured = _named(left, len(dtypes), "in float32")
        self._check("merge", "merged: no float32 left behind", measured, not left)
        for aspect in ("dtypes", "hooks", "attributes"):
            self._check_same(
                "merge", f"merged: {ASPECTS[aspect]} as loaded", now, aspect
            )

    def _check_same(self, group: str, name: str, now: BaseState, aspect: str) -> None:
        differences = self.base.differences(now, aspect)
        measured = _named(differences, len(self.base.values[aspect]), "differ")
        self._check(group, name, measured, not differences)

    def _check(self, group: str, name: str, measured: str, passed: bool) -> None:
        self.checks.append(Check(name, measured, passed, group))

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.doing(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def _adapter_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """Copies of an adapter's trained values, on the CPU."""
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.cpu().clone() for name, tensor in state.items()}


def _named(names: list[str], total: int, verb: str) -> str:
    example = f", the first {names[0]}" if names else ""
    return f"{len(names)} of {total} {verb}{example}"
