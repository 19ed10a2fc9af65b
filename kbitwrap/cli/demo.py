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

_MAX_SEED = 2**63 - 1
_DEFAULT_PRECISION = PrepareConfig().precision.value
_TITLES = {
    "plan": "the bytes added are those planned",
    "numbers": 'same bits before; loss and gradients of "compute" are PEFT\'s',
    "training": "trained: {loss}, base untouched",
    "suspension": "suspended to generate: as loaded; then as before",
    "restore": "restored: bits, dtypes, flags, hooks as loaded",
    "merge": "merged: dtypes, hooks, flags as loaded, nothing in float32",
}
_NEXT = (
    "Your own model: kbitwrap plan MODEL --step --budget 8GiB says what a training step takes, and "
    "kbitwrap demo --model MODEL runs this on it."
)
SUMMARY = "Prepare a small quantized model PEFT's way and ours, and check each step."
HELP = """Prepare a small quantized model PEFT's way and ours, side by side, and check each step.

A small model is built, loaded quantized and prepared, a LoRA is trained on it, text is generated from it while it is
suspended, the model that the LoRA makes is exported, it is restored, and the LoRA is merged; the model is checked after
each step. PEFT's own function then prepares the same bits, takes the same first step and merges the same LoRA. Needs no
network.

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
    sides = _sides(result["sides"], result["device"])
    parts: list[RenderableType] = [table(sides, right=True)]
    if verbose:
        parts.append(_checks(checks))
    elif failed:
        parts.append(Group(*failed))
    num_passed = sum(check["passed"] for check in checks)
    seconds = sum(result["seconds"].values())
    more = _fall(result) if verbose else f"{_fall(result)}; all: --verbose"
    show(
        *parts,
        f"{num_passed} of {len(checks)} checks passed in {seconds:.1f} s ({more})",
        _conclusion(result["sides"], result["precision"]),
        _NEXT,
    )


def _fall(result: Result) -> str:
    loss = result["loss"]
    before, after = loss["held_out_before"], loss["held_out_after"]
    return f"held-out loss {before:.2f} -> {after:.2f}"


def _conclusion(sides: dict[str, Result], precision: str) -> str:
    """The sentence on the loss in PEFT's way, and on what ours keeps."""
    peft, ours = sides["peft"], sides[precision]
    lost = f"In PEFT's way {peft['added_bytes']:,} bytes are added, {_left(peft)}"
    kept = f"In ours {_left(ours)}"
    if peft["merged_error"] is not None and ours["exported_error"] is not None:
        lost += f", and the merge puts the logits off by {peft['merged_error']:.2%}"
        kept += f", and the export puts them off by {ours['exported_error']:.2%}"
    return f"{lost}. {kept}."


def _left(side: Result) -> str:
    """The differences in the end from the model as it was loaded."""
    left = side["left"]
    counts = [f"{what}: {number}" for what, number in left.items() if number]
    if not counts:
        return "all is as loaded in the end"
    return f"and not all is as loaded in the end ({', '.join(counts)})"


# The figures of a side that are shown: the title, the name, and the format.
_FIGURES = (
    ("bytes added", "added_bytes", ","),
    ("bytes at the peak while preparing", "peak_bytes", ","),
    ("first step: loss, distance from PEFT's", "loss", ".2g"),
    ("first step: gradients, relative distance", "gradients", ".2g"),
    ("left in the end: dtypes, hooks, flags", "left", ""),
    ("merged in place: bytes", "merged_bytes", ","),
    ("merged in place: logits off float32's", "merged_error", ".2%"),
    ("exported in bfloat16: bytes", "exported_bytes", ","),
    ("exported in bfloat16: logits off float32's", "exported_error", ".2%"),
)


def _sides(sides: dict[str, Result], device: str) -> Rows:
    """A row for each figure that was measured, PEFT's column first."""
    header = [f"on {device}"]
    columns = []
    for name, side in sides.items():
        distances = side["difference_from_peft"]
        header.append(f'"{name}"')
        if name == "peft":
            distances = {"loss": None, "gradients": None}
            header[-1] = "PEFT's"
        left = ", ".join(map(str, side["left"].values()))
        columns.append({**side, **distances, "left": left})
    rows = [header]
    for title, key, form in _FIGURES:
        figures = [column[key] for column in columns]
        cells = ["-" if value is None else format(value, form) for value in figures]
        if any(cell != "-" for cell in cells):
            rows.append([title, *cells])
    return rows


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
