"""The demonstration itself. Everything it reports, it measured."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F

from .. import (
    ConfigError,
    KbitPreparedModel,
    MemoryBudgetError,
    Precision,
    RestoreError,
    RestoreReport,
    UnsupportedModelError,
)
from .base_state import ASPECTS, BaseState
from .console import Check, InputError, first_line
from .loading import LoadedModel, choose_device, load_builtin, load_named
from .text import Blocks, read_blocks

_LENGTH = 65  # tokens in a block: 64 to predict
_BATCH_SIZE = 4
_NUM_HELD_OUT = 16
_NUM_PROMPT = 32
_NUM_GENERATED = 64
_RANK = 32

# The held-out loss has to fall by a hundredth of itself at least, and by three standard errors of its mean fall over
# the blocks, so that neither noise nor a training that does nothing passes.
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
        seconds: How long each part took.
        measured: Further figures, ready for JSON.
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
    seconds: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Run it.

        Returns:
            The settings, what was measured, the checks and the timings, ready for JSON.

        Raises:
            InputError: The model or the device cannot be used.
        """
        device = choose_device(self.device)
        with _few_threads(self.model is None), torch.random.fork_rng(_fork_devices(device), device_type=_rng(device)):
            torch.manual_seed(self.seed)
            with self._timed("load"):
                loaded = self._load(device)
            blocks = read_blocks(loaded.tokens, length=_LENGTH, num_held_out=_NUM_HELD_OUT, seed=self.seed)
            blocks = Blocks(blocks.training.to(device), blocks.held_out.to(device))
            self._prepare_train_restore(loaded, blocks)
        return {
            "passed": all(check.passed for check in self.checks),
            "model": loaded.name,
            "quant": self.quant,
            "precision": self.precision.value,
            "device": str(device),
            "steps": self.steps,
            "seed": self.seed,
            "checks": [check.to_dict() for check in self.checks],
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            **self.measured,
        }

    def _load(self, device: torch.device) -> LoadedModel:
        if self.model is None:
            return load_builtin(self.quant, device)
        return load_named(self.model, self.quant, device, self.trust_remote_code)

    def _prepare_train_restore(self, loaded: LoadedModel, blocks: Blocks) -> None:
        with self._timed("digests"):
            base = BaseState.of(dict(loaded.model.named_modules()))
        try:
            prepared = KbitPreparedModel(loaded.model, precision=self.precision)
        except (ConfigError, MemoryBudgetError, UnsupportedModelError) as error:
            raise InputError(f"{loaded.name} cannot be prepared: {first_line(error)}") from error
        self.show(f"{loaded.name}, {self.quant}: the plan\n{prepared.plan}")
        self.measured["plan"] = prepared.plan.to_dict()
        started = time.perf_counter()
        with prepared:
            self.seconds["prepare"] = time.perf_counter() - started
            self._check_bytes(base, prepared)
            peft_model = self._add_adapter(loaded)
            prepared.adopt(peft_model)
            with self._timed("train"):
                self._train(peft_model, blocks, loaded.learning_rate)
            self._check(
                "training changed nothing of the base",
                f"{len(prepared.verify().differences)} differences found by verify()",
                not prepared.verify(),
            )
            with self._timed("suspend"):
                self._suspend(prepared, peft_model, loaded, base, blocks)
            with self._timed("restore"):
                report = self._restore(prepared)
        with self._timed("compare"):
            self._check_restored(base, report)
        with self._timed("merge"):
            merged = peft_model.merge_and_unload()
            self._check_merged(base, merged)

    def _check_bytes(self, base: BaseState, prepared: KbitPreparedModel) -> None:
        added = base.again().parameter_bytes - base.parameter_bytes
        planned = prepared.plan.added_bytes
        self._check("the bytes added are those planned", f"{added:,} added, {planned:,} planned", added == planned)

    def _add_adapter(self, loaded: LoadedModel) -> PeftModel:
        config = LoraConfig(
            r=_RANK,
            lora_alpha=2 * _RANK,
            target_modules="all-linear",
            modules_to_save=loaded.modules_to_save,
            task_type="CAUSAL_LM",
        )
        try:
            peft_model = get_peft_model(loaded.model, config)
        except ValueError as error:
            raise InputError(f"PEFT cannot put a LoRA on {loaded.name}: {first_line(error)}") from error
        assert isinstance(peft_model, PeftModel)
        return peft_model

    def _train(self, model: PeftModel, blocks: Blocks, learning_rate: float) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
        before = _evaluate(model, blocks.held_out)
        model.train()
        losses = []
        for step in range(self.steps):
            loss = _block_losses(model, _batch(blocks, step)).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            self.doing(f"train: step {step + 1} of {self.steps}, loss {losses[-1]:.2f}")
        falls = before - _evaluate(model, blocks.held_out)
        start, fall = before.mean().item(), falls.mean().item()
        error = falls.std().item() / len(falls) ** 0.5
        least = max(_LEAST_RELATIVE_FALL * start, _LEAST_STANDARD_ERRORS * error)
        self._check(
            "the held-out loss fell",
            f"{start:.3f} -> {start - fall:.3f}, by {fall:.3f} ± {error:.3f}; at least {least:.3f} expected",
            fall > least,
        )
        self.measured["loss"] = {
            "held_out_before": start,
            "held_out_after": start - fall,
            "fall_standard_error": error,
            "least_fall": least,
            "training": losses,
            "trained_parameters": sum(p.numel() for p in parameters),
        }

    def _suspend(
        self, prepared: KbitPreparedModel, model: PeftModel, loaded: LoadedModel, base: BaseState, blocks: Blocks
    ) -> None:
        def figures() -> tuple[float, torch.Tensor]:
            model.train()
            training = _block_losses(model, _batch(blocks, self.steps)).mean()
            return training.item(), _evaluate(model, blocks.held_out)

        training_before, held_out_before = figures()
        prompt = blocks.held_out[:1, :_NUM_PROMPT]
        with prepared.suspended():
            self._check_as_loaded(base, "suspended")
            model.eval()
            with torch.no_grad():
                output = model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=True,
                    temperature=0.7,
                    max_new_tokens=_NUM_GENERATED,
                )
        texts = {
            "prompt": loaded.tokens.decode(prompt[0].tolist()),
            "text": loaded.tokens.decode(output[0, _NUM_PROMPT:].tolist()),
        }
        self.measured["generation"] = texts
        self.show(f"generated while suspended\n  prompt: {texts['prompt']!r}\n  text:   {texts['text']!r}")
        training_after, held_out_after = figures()
        self._check(
            "after a suspension: the same training loss",
            f"{training_before!r} -> {training_after!r}",
            training_before == training_after,
        )
        num_same = int((held_out_before == held_out_after).sum())
        self._check(
            "after a suspension: the same held-out losses",
            f"{num_same} of {len(held_out_before)} blocks bit-identical",
            torch.equal(held_out_before, held_out_after),
        )

    def _restore(self, prepared: KbitPreparedModel) -> RestoreReport | RestoreError:
        with warnings.catch_warnings():
            # It warns that training on would train the base too. Here the adapter is merged next.
            warnings.filterwarnings("ignore", r"restore\(\) made \d+ base parameters trainable", UserWarning)
            try:
                return prepared.restore()
            except RestoreError as error:
                return error

    def _check_restored(self, base: BaseState, report: RestoreReport | RestoreError) -> None:
        if isinstance(report, RestoreError):
            self._check("restore() put everything back", first_line(report), False)
        else:
            self.measured["restore_report"] = report.to_dict()
            measured = f"{len(report.trained)} trained copies, {len(report.replaced)} parameters replaced by others"
            self._check("restore() put everything back", measured, True)
        self._check_as_loaded(base, "restored")

    def _check_as_loaded(self, base: BaseState, when: str) -> None:
        now = base.again()
        self.measured.setdefault("base_digest", {"loaded": base.digest()})[when] = now.digest()
        for aspect, what in ASPECTS.items():
            self._check_same(f"{when}: {what} as loaded", base, now, aspect)

    def _check_merged(self, base: BaseState, merged: nn.Module) -> None:
        now = BaseState.of(dict(merged.named_modules()))
        before = base.values["dtypes"]
        left = [fqn for fqn, dtype in now.values["dtypes"].items() if dtype == "float32" != before.get(fqn)]
        self._check("merged: no float32 left behind", _named(left, len(now.values["dtypes"]), "in float32"), not left)
        for aspect in ("dtypes", "hooks", "attributes"):
            self._check_same(f"merged: {ASPECTS[aspect]} as loaded", base, now, aspect)

    def _check_same(self, name: str, base: BaseState, now: BaseState, aspect: str) -> None:
        differences = base.differences(now, aspect)
        self._check(name, _named(differences, len(base.values[aspect]), "differ"), not differences)

    def _check(self, name: str, measured: str, passed: bool) -> None:
        self.checks.append(Check(name, measured, passed))

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.doing(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def _named(names: list[str], total: int, verb: str) -> str:
    example = f", the first {names[0]}" if names else ""
    return f"{len(names)} of {total} {verb}{example}"


def _batch(blocks: Blocks, step: int) -> torch.Tensor:
    first = step * _BATCH_SIZE
    return blocks.training[torch.arange(first, first + _BATCH_SIZE) % len(blocks.training)]


def _block_losses(model: nn.Module, blocks: torch.Tensor) -> torch.Tensor:
    """The mean loss of each block.

    Args:
        model: The model.
        blocks: ``(num_blocks, length)``, int64.

    Returns:
        ``(num_blocks,)``, float32.
    """
    logits = model(input_ids=blocks[:, :-1], use_cache=False).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten(), reduction="none")
    return losses.view(len(blocks), -1).mean(dim=1)


def _evaluate(model: nn.Module, held_out: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([_block_losses(model, blocks) for blocks in held_out.split(_BATCH_SIZE)]).cpu()


@contextlib.contextmanager
def _few_threads(is_builtin: bool) -> Iterator[None]:
    """One thread for the built-in model: it is so small that more of them mostly wait for one another."""
    num_threads = torch.get_num_threads()
    if is_builtin:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _fork_devices(device: torch.device) -> list[int]:
    return [] if device.type == "cpu" else [device.index or 0]


def _rng(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type
