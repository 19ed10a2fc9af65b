"""``kbitwrap demo``: PEFT's way and ours on the same small model. Everything that is told was measured."""

from __future__ import annotations

import hashlib
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from .console import (
    EXIT_DONE,
    EXIT_NO,
    Doing,
    Result,
    expect_installed,
    quiet_libraries,
    show,
    show_json,
)
from .tables import table
from .usage import Json

if TYPE_CHECKING:
    from torch import Tensor, nn

SUMMARY = (
    "Prepare, train and merge a small model PEFT's way and ours, and compare them."
)
HELP = """Prepare, train and merge a small quantized model PEFT's way and ours, side by side.

A small byte-level Llama is built and loaded in nf4, once for each way. What a training step takes is predicted, and
measured. A LoRA is trained on it, the model is suspended and restored, and compared with what was loaded. The same LoRA
is merged in PEFT's ways and in ours, and doctor examines each merge. Runs on the CPU, and needs no network.

Exit status: 0 every answer is yes, 1 one is no, 2 bad usage or bad input."""

PEFT, COMPUTE, NORMS = WAYS = ("peft", "compute", "norms")
ASPECTS = ("bytes", "dtypes", "requires_grad", "parameters", "hooks", "attributes")
"""The aspects in which ``base_state`` describes a base."""
_TITLE = "built-in byte-level Llama, nf4: PEFT's way and ours\n"
_NEXT = """Next, with your own:
  kbitwrap plan MODEL --step --budget 8GiB
  kbitwrap merge ADAPTER --quant KIND --out DIR
  kbitwrap doctor DIR --adapter ADAPTER --quant KIND"""
_NUM_BYTES = 256  # a token is a byte
_LENGTH = 64  # tokens of a block
_NUM_HELD_OUT = 16  # blocks
_BATCH_SIZE = 4
_STEPS = 30
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


def command(
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="Random seed.")
    ] = 0,
    json_: Json = False,
) -> int:
    """Run the demonstration and print what was measured. 0 if every answer is yes, else 1."""
    expect_installed("the demonstration", "bitsandbytes", "peft", "transformers")
    if not json_:
        print(_TITLE, flush=True)
    with (
        Doing("importing torch") as doing,
        quiet_libraries(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # PEFT's, on what is done here on purpose
        result = run(seed, doing)
    if json_:
        show_json(result)
    else:
        _show(result)
    return EXIT_DONE if result["passed"] else EXIT_NO


def run(seed: int, doing: Doing) -> Result:
    """Measure each way to prepare and to merge, and answer; the result is ready for JSON."""
    import torch

    started = time.perf_counter()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of a model so small, more mostly wait for one another
    try:
        with (
            torch.random.fork_rng(devices=[]),
            tempfile.TemporaryDirectory(prefix="kbitwrap-demo-") as folder,
        ):
            demo = Demo(seed, Path(folder))
            sides = {}
            for way in WAYS:
                doing.now(f"preparing and training: {way}")
                sides[way] = demo.measure_side(way)
            doing.now("merging")
            merges = demo.measure_merges()
    finally:
        torch.set_num_threads(num_threads)
    predicted = [side["predicted_bytes"] for side in sides.values()]
    distances = sides[COMPUTE]["difference_from_peft"].values()
    ours = (sides[COMPUTE], sides[NORMS])
    changes = [side[when] for side in ours for when in ("suspended", "left")]
    in_place, reloaded, export = merges
    is_merge = export["onto"] == "trained" and not export["faults"]
    answers = {
        "a training step takes the bytes that were predicted": (
            predicted == [side["step_bytes"] for side in sides.values()]
        ),
        'loss and gradients of "compute" are PEFT\'s, bit for bit': set(distances)
        == {0},
        "our base is as it was loaded, bit for bit, suspended and restored": (
            not any(sum(counts.values()) for counts in changes)
        ),
        "our export loses less of the fine-tune than PEFT's merges": (
            export["lost"] < min(in_place["lost"], reloaded["lost"])
        ),
        "doctor finds our export to be a merge onto the weights that were trained on": is_merge,
    }
    return {
        "passed": all(answers.values()),
        "seed": seed,
        "answers": answers,
        "sides": sides,
        "merges": merges,
        "seconds": round(time.perf_counter() - started, 1),
    }


class Demo:
    """The built-in model with its text, and what was measured of PEFT's way, which ours is compared with.

    Args:
        seed: Seed of the model, the adapters and the order of the text.
        folder: Where the model, the adapter and the merges are saved.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from ..model.quantization import bitsandbytes_config

        self.seed = seed
        self.folder = folder
        self.nf4 = bitsandbytes_config("nf4", torch.float32)  # fast on a CPU
        self.blocks, self.held_out = _read_text(seed)
        config = LlamaConfig(
            vocab_size=_NUM_BYTES,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_LENGTH,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(seed)
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "base")

    def load(self, name: str = "base", quantization: Any = None) -> Any:
        """Load a saved model, quantized or in the dtype of its files."""
        from transformers import AutoModelForCausalLM

        settings = {} if quantization is None else {"quantization_config": quantization}
        return AutoModelForCausalLM.from_pretrained(
            self.folder / name, dtype="auto", device_map={"": "cpu"}, **settings
        )

    def lora(self) -> Any:
        """Return the config of the adapter."""
        from peft import LoraConfig

        return LoraConfig(
            r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
        )

    def measure_side(self, way: str) -> Result:
        """Prepare the model in one way, train a LoRA on it, and undo that.

        PEFT's function has no way back: only the adapter is unloaded. The LoRA of
        ``"norms"`` is saved, and exported merged.
        """
        import torch
        from peft import get_peft_model, prepare_model_for_kbit_training

        from .. import KbitPreparedModel, predict_step

        model = self.load(quantization=self.nf4)
        predicted = predict_step(
            model,
            precision=way,
            batch_size=_BATCH_SIZE,
            seq_len=_LENGTH,
            lora=self.lora(),
            kernels="cpu",
        )
        modules, parameters = dict(model.named_modules()), list(model.parameters())
        loaded = base_state(modules)
        loaded_bytes = sum(one.nbytes for one in parameters)
        prepared = None
        if way == PEFT:
            prepare_model_for_kbit_training(model)
        else:
            prepared = KbitPreparedModel(model, precision=way).prepare()
        added_bytes = sum(one.nbytes for one in model.parameters()) - loaded_bytes
        torch.manual_seed(self.seed)
        adapted: Any = get_peft_model(model, self.lora())
        suspended = {}
        if prepared is not None:
            prepared.adopt(adapted)
        step_bytes, difference = self._train(way, adapted)
        if prepared is not None:
            with prepared.suspended():
                suspended = differences(loaded, base_state(modules))
            if way == NORMS:
                adapted.save_pretrained(self.folder / "adapter")
                prepared.manifest().save(self.folder / "adapter" / "kbitwrap.json")
                exported = self.folder / "exported"
                prepared.export(exported, merge_adapters=True, model=adapted)
        adapted.unload()
        if prepared is not None:
            prepared.restore()
        return {
            "added_bytes": added_bytes,
            "predicted_bytes": predicted.peak_bytes,
            "step_bytes": step_bytes,
            "difference_from_peft": difference,
            "suspended": suspended,
            "left": differences(loaded, base_state(modules)),
        }

    def _train(self, way: str, model: Any) -> tuple[int, dict[str, float]]:
        """Train the adapter for two steps, and the one that is merged for some more.

        Returns the most bytes of the second step, and the distances of the first from
        PEFT's numbers: of the loss, and the largest of a gradient.
        """
        import torch

        from .. import StepTracker

        model.train()
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        batches = self.blocks.split(_BATCH_SIZE)

        def inputs(number: int) -> dict[str, Tensor]:
            rows = batches[number]
            return {"input_ids": rows.clone(), "labels": rows.clone()}

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        loss = model(**inputs(0)).loss
        loss.backward()
        numbers = [loss.detach(), *(one.grad.clone() for one in trained)]
        if way == PEFT:
            self.pefts = numbers
        pairs = zip(numbers, self.pefts, strict=True)
        distances = [(own - other).abs().max().item() for own, other in pairs]
        update()
        batch = inputs(1)
        with StepTracker(model, optimizer, batch) as tracker:
            model(**batch).loss.backward()
            update()
        for number in range(2, _STEPS if way == NORMS else 2):
            model(**inputs(number)).loss.backward()
            update()
        difference = {"loss": distances[0], "gradients": max(distances[1:])}
        return tracker.peak_bytes, difference

    def measure_merges(self) -> list[Result]:
        """Merge the adapter in PEFT's ways, and measure them and our export.

        What is lost is KL(adapter model ‖ merged) / KL(adapter model ‖ base); the rest
        is what doctor finds.
        """
        from peft import PeftModel

        from .. import doctor

        adapter = self.folder / "adapter"
        exact = self.load(quantization=self.nf4).dequantize().float()
        base = self._log_probabilities(exact)
        expected = self._log_probabilities(PeftModel.from_pretrained(exact, adapter))
        for name, quantization in (("nf4", self.nf4), ("bfloat16", None)):
            model = PeftModel.from_pretrained(
                self.load(quantization=quantization), adapter
            )
            model.merge_and_unload().save_pretrained(self.folder / name)

        found = []
        names = {
            "nf4": "merge_and_unload in nf4",
            "bfloat16": "merge_and_unload in bfloat16",
            "exported": "kbitwrap's export",
        }
        for folder, name in names.items():
            merged = self.load(folder)
            if getattr(merged, "is_quantized", False):
                merged = merged.dequantize()
            left = _divergence(expected, self._log_probabilities(merged.float()))
            report = doctor(
                self.folder / folder,
                base=self.folder / "base",
                adapter=adapter,
                quant=self.nf4,
            )
            assert report.merge is not None  # base and adapter were given
            found.append(
                {
                    "name": name,
                    "lost": left / _divergence(expected, base),
                    "kept": report.merge.kept,
                    "onto": report.merge.onto,
                    "faults": [fault.cause for fault in report.merge.faults],
                }
            )
        return found

    def _log_probabilities(self, model: Any) -> Tensor:
        """Compute the log-probabilities of all tokens at each place of the held-out text, float64."""
        import torch

        with torch.no_grad():
            logits = model.eval()(input_ids=self.held_out, use_cache=False).logits
        return torch.log_softmax(logits.double(), dim=-1).flatten(0, 1)


def _read_text(seed: int) -> tuple[Tensor, Tensor]:
    """Read the help texts that every Python carries, as bytes in blocks: to train on, and of other topics held out."""
    from pydoc_data.topics import topics

    import torch

    texts = [topics[name] for name in sorted(topics)]

    def blocks(texts: list[str]) -> Tensor:
        tokens = torch.tensor(list("\n".join(texts).encode()))
        return tokens[: len(tokens) // _LENGTH * _LENGTH].view(-1, _LENGTH)

    held_out = blocks(texts[::8])[:_NUM_HELD_OUT]
    del texts[::8]
    training = blocks(texts)
    generator = torch.Generator().manual_seed(seed)
    return training[torch.randperm(len(training), generator=generator)], held_out


def _divergence(expected: Tensor, found: Tensor) -> float:
    """Compute KL(expected ‖ found) of log-probabilities, in nats, the mean over all tokens."""
    from torch.nn import functional as F

    return F.kl_div(found, expected, reduction="batchmean", log_target=True).item()


def base_state(modules: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Describe a base by torch alone, so that kbitwrap does not vouch for itself.

    Args:
        modules: The base's modules by name, as they were when it was loaded: an adapter
            wraps them, and leaves them the same objects.

    Returns:
        ``{aspect: {fqn: value}}``, the aspects being ``ASPECTS``. Parameters are told
            apart by their addresses: they have to live until the next description.
    """
    found: dict[str, dict[str, Any]] = {aspect: {} for aspect in ASPECTS}
    for prefix, module in modules.items():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            fqn = f"{prefix}.{name}"
            found["dtypes"][fqn] = parameter.dtype
            found["requires_grad"][fqn] = parameter.requires_grad
            found["parameters"][fqn] = id(parameter)
        stored: dict[str, Any] = dict(module.named_buffers(recurse=False))
        is_leaf = next(module.children(), None) is None
        stored |= module.state_dict() if is_leaf else own  # all of a quantized layer
        for name, tensor in stored.items():
            found["bytes"][f"{prefix}.{name}"] = _digest(tensor)
        hooks = [
            hook for name in _HOOKS for hook in (vars(module)[name] or {}).values()
        ]
        found["hooks"][prefix] = [_described(hook) for hook in hooks]
        found["attributes"][prefix] = {
            name: _described(vars(module)[name])
            for name in _ATTRIBUTES
            if name in vars(module)
        }
    return found


def differences(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> dict[str, int]:
    """Count what differs between two states, by aspect."""
    counts = {}
    for aspect in ASPECTS:
        names = before[aspect].keys() | after[aspect].keys()
        differing = [
            name
            for name in names
            if before[aspect].get(name) != after[aspect].get(name)
        ]
        counts[aspect] = len(differing)
    return counts


def _digest(value: Any) -> str:
    """Return a digest of a tensor's bits, with its dtype and shape; of another value its ``repr``."""
    import torch

    if not isinstance(value, torch.Tensor):
        return repr(value)
    bits = value.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
    digest = hashlib.sha256(bits.numpy().data).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} {digest}"


def _described(value: Any) -> str:
    """Name a hook or an attribute by its class or function: a copy of a module has copies of them."""
    if value is None or isinstance(value, bool):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _show(result: Result) -> None:
    """Print the tables, the answers, and what they come to."""
    sides = result["sides"]
    rows = [["prepared and trained", "PEFT's", f'"{COMPUTE}"', f'"{NORMS}"']]
    for title, key in {
        "bytes that preparing adds": "added_bytes",
        "bytes of a training step, predicted": "predicted_bytes",
        "bytes of a training step, measured": "step_bytes",
    }.items():
        rows.append([title, *(f"{side[key]:,}" for side in sides.values())])
    losses = [sides[way]["difference_from_peft"]["loss"] for way in (COMPUTE, NORMS)]
    rows.append(
        ["first loss, distance from PEFT's", "-", *(f"{loss:.2g}" for loss in losses)]
    )
    shown = ("dtypes", "hooks", "requires_grad", "attributes")
    left = {}
    for way, side in sides.items():
        left[way] = sum(side["left"][key] for key in shown)
    rows.append(["dtypes, hooks and flags left changed", *map(str, left.values())])

    merges = [["merged by", "fine-tune lost", "kbitwrap doctor says"]]
    for merge in result["merges"]:
        verdict = "not a merge"
        if not merge["faults"]:
            verdict = f"a merge, on the {merge['onto']} weights"
        merges.append([merge["name"], _percent(merge["lost"]), verdict])

    answers = [
        Text.assemble("yes  " if is_so else ("NO   ", "bold red"), what)
        for what, is_so in result["answers"].items()
    ]
    in_place, *_, export = result["merges"]
    conclusion = (
        f"PEFT's way adds {sides[PEFT]['added_bytes']:,} bytes, leaves {left[PEFT]} things changed, and loses "
        f'{_percent(in_place["lost"])} of the fine-tune in a merge. Ours, with "{NORMS}", adds '
        f"{sides[NORMS]['added_bytes']:,} bytes, leaves {left[NORMS] or 'nothing'} changed, and loses "
        f"{_percent(export['lost'])}. ({result['seconds']} s)"
    )
    show(table(rows, right=True), table(merges), Group(*answers), conclusion, _NEXT)


def _percent(part: float) -> str:
    percent = 100 * part
    return f"{percent:.2g} %" if percent >= 0.01 else "< 0.01 %"
