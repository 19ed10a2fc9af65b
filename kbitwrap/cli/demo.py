"""``kbitwrap demo``: PEFT's way and ours on the same small model, and every promise checked on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from rich.console import Group, RenderableType
from rich.text import Text

from .. import Precision, PrepareConfig
from .console import (
    EXIT_DONE,
    EXIT_NO,
    Result,
    expect_installed,
    hanging,
    show,
    show_json,
)
from .hub import working
from .tables import Rows, table
from .usage import (
    BUILT_IN,
    PRECISIONS,
    TRAINED_QUANTS,
    Json,
    TrustRemoteCode,
    choice,
    device,
    flag,
    integer,
    value,
)

_LEAST_PERCENT = 0.01  # that is told
_MAX_SEED = 2**63 - 1
_DEFAULT_PRECISION = PrepareConfig().precision.value
_TITLES = {
    "plan": "the bytes are those planned and predicted",
    "numbers": 'same bits before; loss and gradients of "compute" are PEFT\'s',
    "training": "trained: {loss}, base untouched",
    "suspension": "suspended to generate: as loaded; then as before",
    "restore": "restored: bits, dtypes, flags, hooks as loaded",
    "merge": "merged: dtypes, hooks, flags as loaded, nothing in float32",
}
_NEXT = """Next, with your own:
  kbitwrap plan MODEL --step --budget 8GiB
  kbitwrap merge ADAPTER --quant KIND --out DIR
  kbitwrap doctor DIR --adapter ADAPTER --quant KIND"""
SUMMARY = (
    "Prepare, train and merge a small model PEFT's way and ours, and check each step."
)
HELP = """Prepare, train and merge a small quantized model PEFT's way and ours, side by side, and check each step.

A small model is built, loaded quantized and prepared; what a training step takes is predicted, and measured. A LoRA is
trained on it, text is generated from it while it is suspended, the model that the LoRA makes is exported, the model is
restored, and the LoRA is merged; the model is checked after each step. PEFT's own function then prepares the same bits,
and takes the same steps. The same LoRA is merged in PEFT's ways, and doctor examines each merge. Needs no network. With
--model, only the merge in place is made: the others may need more disk than there is.

Exit status: 0 every check passed, 1 one failed, 2 bad usage or bad input."""


_Model = Annotated[
    str | None,
    value(
        "--model",
        "MODEL",
        str,
        "A causal language model to use in place of the small built-in one.",
    ),
]
_Quant = Annotated[
    str,
    choice(
        "--quant", TRAINED_QUANTS, "Quantization; nf4 is without double quantization."
    ),
]
_Precision = Annotated[str, choice("--precision", PRECISIONS, "Where float32 is used.")]
_Device = Annotated[
    str | None,
    value(
        "--device",
        "DEVICE",
        device,
        "Such as cpu or cuda:1; cuda, if there is one.",
    ),
]
_Steps = Annotated[int, value("--steps", "N", integer(1), "Training steps.")]
_Seed = Annotated[int, value("--seed", "N", integer(0, _MAX_SEED), "Random seed.")]
_Verbose = Annotated[
    bool, flag("--verbose", "Print the plan, the text and every check.")
]


def command(
    model: _Model = None,
    quant: _Quant = "nf4",
    precision: _Precision = _DEFAULT_PRECISION,
    device: _Device = None,
    steps: _Steps = 30,
    seed: _Seed = 0,
    verbose: _Verbose = False,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Run the demonstration and print what was measured. 0 if every check passed, else 1.

    Raises:
        InputError: The model or the device cannot be used.
    """
    expect_installed("the demonstration", "bitsandbytes", "peft", "transformers")
    title = f"{model or BUILT_IN}, {quant}: PEFT's way and ours\n"
    # torch, which takes seconds to import, may refuse a device, and transformers a model
    is_certain = model is None and device in (None, "cpu")
    if is_certain and not json_:
        print(title, flush=True)
    with working(model, "importing torch", trust_remote_code) as doing:
        from .demo_run import Demo

        def begin() -> None:
            if not is_certain and not json_:
                with doing.aside():
                    print(title, flush=True)

        def say(text: str) -> None:
            if verbose and not json_:
                with doing.aside():
                    show(text)
                    print()

        result = Demo(
            model=model,
            quant=quant,
            precision=Precision(precision),
            device=device,
            steps=steps,
            seed=seed,
            trust_remote_code=trust_remote_code,
            begin=begin,
            show=say,
            doing=doing.now,
        ).run()
    if json_:
        show_json(result)
    else:
        _show_result(result, verbose=verbose)
    return EXIT_DONE if result["passed"] else EXIT_NO


def _show_result(result: Result, *, verbose: bool) -> None:
    checks = result["checks"]
    failed = list(_failed(result))
    parts: list[RenderableType] = [table(_sides(result), right=True)]
    if result["merges"]:
        parts.append(table(_merges(result["merges"])))
    if verbose:
        parts.append(_checks(checks))
    elif failed:
        parts.append(Group(*failed))
    show(*parts, _count(result, verbose=verbose), _conclusion(result), _NEXT)


def _count(result: Result, *, verbose: bool) -> str:
    """The line on the checks."""
    checks = result["checks"]
    num_passed = sum(check["passed"] for check in checks)
    seconds = sum(result["seconds"].values())
    more = "" if verbose else "; all: --verbose"
    return f"{num_passed} of {len(checks)} checks passed in {seconds:.1f} s ({_fall(result)}{more})"


def _fall(result: Result) -> str:
    loss = result["loss"]
    before, after = loss["held_out_before"], loss["held_out_after"]
    return f"held-out loss {before:.2f} -> {after:.2f}"


def _conclusion(result: Result) -> str:
    """The sentences on what PEFT's way loses, and on what ours keeps."""
    precision = result["precision"]
    ours = f'Ours, with "{precision}",'
    names = {"PEFT's way": "peft", ours: precision}
    lost = {}
    if result["merges"]:
        lost["PEFT's way"] = _percent(result["merges"][0]["lost"])
        lost[ours] = _percent(result["merges"][-1]["lost"])
    sentences = []
    for subject, name in names.items():
        side = result["sides"][name]
        num_left = sum(side["left"].values())
        left = f"{num_left} things" if num_left else "nothing"
        parts = [f"adds {side['added_bytes']:,} bytes", f"leaves {left} changed"]
        if subject in lost:
            parts.append(f"loses {lost[subject]} of the fine-tune in a merge")
        *most, last = parts
        sentences.append(f"{subject} {', '.join(most)}, and {last}.")
    return " ".join(sentences)


def _sides(result: Result) -> Rows:
    """A row for each figure that was measured, PEFT's column first."""
    header = [f"prepared and trained on {result['device']}"]
    added = ["bytes that preparing adds"]
    predicted = ["bytes of a training step, predicted"]
    step = ["bytes of a training step, measured"]
    loss = ["first loss, distance from PEFT's"]
    left = ["dtypes, hooks and flags left changed"]
    for name, side in result["sides"].items():
        is_peft = name == "peft"
        header.append("PEFT's" if is_peft else f'"{name}"')
        added.append(f"{side['added_bytes']:,}")
        predicted.append(f"{side['predicted_bytes']:,}")
        step.append(f"{side['step_bytes']:,}")
        distance = side["difference_from_peft"]["loss"]
        loss.append("-" if is_peft else f"{distance:.2g}")
        left.append(str(sum(side["left"].values())))
    return [header, added, predicted, step, loss, left]


def _merges(merges: list[Result]) -> Rows:
    """A row for each way to merge, ours last."""
    rows = [["merged by", "fine-tune lost, by KL", "kbitwrap doctor says"]]
    for merge in merges:
        rows.append([merge["name"], _percent(merge["lost"]), _verdict(merge)])
    return rows


def _percent(part: float) -> str:
    percent = 100 * part
    return f"{percent:.2g} %" if percent >= _LEAST_PERCENT else f"< {_LEAST_PERCENT} %"


def _verdict(merge: Result) -> str:
    """What doctor says of a merge, in a few words."""
    if merge["faults"]:
        return "not a merge"
    return f"a merge, on the {merge['onto']} weights"


def _checks(checks: list[Result]) -> Group:
    rows = [("check", "measured", "result")]
    for check in checks:
        verdict = "pass" if check["passed"] else "FAIL"
        rows.append((check["name"], check["measured"], verdict))
    return table(rows)


def _failed(result: Result) -> Iterator[RenderableType]:
    """A line for each group of checks of which any failed, and one for each of these."""
    for group, title in _TITLES.items():
        checks = [check for check in result["checks"] if check["group"] == group]
        failed = [check for check in checks if not check["passed"]]
        if not failed:
            continue
        verdict = ("FAIL", "bold red")
        wanted = title.format(loss=_fall(result))
        yield Text.assemble(
            verdict, f"  {wanted} ({len(failed)} of {len(checks)} checks)"
        )
        for check in failed:
            yield hanging(f"{check['name']}: {check['measured']}", 8, 6)
