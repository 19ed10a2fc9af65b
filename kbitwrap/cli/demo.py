"""``kbitwrap demo``: PEFT's way and ours on the same small model, and every promise checked on the way."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.text import Text

from .. import Precision, PrepareConfig
from .console import EXIT_DONE, EXIT_NO, InputError, hanging, joined, progress, quiet_libraries, show
from .hub import models
from .tables import table
from .usage import PRECISIONS, TRAINED_QUANTS, Json, TrustRemoteCode, choice, device, integer

_MAX_SEED = 2**63 - 1
SUMMARY = "Prepare a small quantized model PEFT's way and ours, and check each step."
HELP = """Prepare a small quantized model PEFT's way and ours, side by side, and check each step.

A small model is built, loaded quantized and prepared, a LoRA is trained on it, text is generated from it while it is
suspended, the model that the LoRA makes is exported, it is restored, and the LoRA is merged; the model is checked after
each step. PEFT's own function then prepares the same bits, takes the same first step and merges the same LoRA. Needs no
network.

Exit status: 0 every check passed, 1 one failed, 2 bad usage or bad input."""


def command(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="A causal language model to use in place of the small built-in one."
        ),
    ] = None,
    quant: Annotated[str, choice("--quant", choices=TRAINED_QUANTS, help="Quantization.")] = "nf4",
    precision: Annotated[
        str, choice("--precision", choices=PRECISIONS, help="Where float32 is used.")
    ] = PrepareConfig().precision.value,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", parser=device, help="Such as cpu or cuda:1; cuda, if there is one."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", parser=integer(1), help="Training steps.")] = 30,
    seed: Annotated[int, typer.Option("--seed", metavar="N", parser=integer(0, _MAX_SEED), help="Random seed.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the plan, the text and every check.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Run the demonstration and print what was measured. 0 if every check passed, else 1.

    Raises:
        InputError: The model or the device cannot be used.
    """
    _expect_installed()
    with models(model, trust_remote_code=trust_remote_code), progress("importing torch") as doing, quiet_libraries():
        from .demo_run import Demo

        def say(*parts: str) -> None:
            if verbose and not json_:
                with doing.aside():
                    show(*parts)
                    print()

        result = Demo(
            model=model,
            quant=quant,
            precision=Precision(precision),
            device=device,
            steps=steps,
            seed=seed,
            show=say,
            doing=doing.now,
            trust_remote_code=trust_remote_code,
        ).run()
    if json_:
        print(json.dumps(result, indent=2))
    else:
        seconds = sum(result["seconds"].values())
        num_passed = sum(check["passed"] for check in result["checks"])
        more = "" if verbose else "; --verbose shows each"
        show(
            f"{result['model']}, {result['quant']}, on {result['device']}: PEFT's way and ours",
            table(_sides(result), right=True),
            _checks(result["checks"]) if verbose else joined(_groups(result)),
            f"{num_passed} of {len(result['checks'])} checks passed, in {seconds:.1f} s{more}.",
        )
    return EXIT_DONE if result["passed"] else EXIT_NO


def _sides(result: dict[str, Any]) -> list[list[str]]:
    """A row for each figure, PEFT's column first."""
    sides = result["sides"]
    peft = next(iter(sides.values()))
    rows = [["", *("PEFT's" if side is peft else f'"{name}"' for name, side in sides.items())]]

    def row(name: str, read: Callable[[dict[str, Any]], Any], form: str) -> None:
        found = [read(side) for side in sides.values()]
        rows.append([name, *("-" if value is None else format(value, form) for value in found)])

    def distance(what: str) -> Callable[[dict[str, Any]], Any]:
        return lambda side: None if side is peft else side["difference_from_peft"][what]

    row("bytes added", lambda side: side["added_bytes"], ",")
    row("bytes at the peak while preparing", lambda side: side["peak_bytes"], ",")
    row("milliseconds to prepare", lambda side: 1000 * side["seconds"], ",.1f")
    row("first step: loss, distance from PEFT's", distance("loss"), ".2g")
    row("first step: gradients, relative distance", distance("gradients"), ".2g")
    row("left in the end: dtypes, hooks, flags", lambda side: ", ".join(map(str, side["left"].values())), "")
    row("merged in place: bytes", lambda side: side["merged_bytes"], ",")
    row("merged in place: error of logits", lambda side: side["merged_error"], ".2%")
    row("exported in bfloat16: bytes", lambda side: side["exported_bytes"], ",")
    row("exported in bfloat16: error of logits", lambda side: side["exported_error"], ".2%")
    return [row for row in rows if {*row[1:]} != {"-"}]


def _checks(checks: list[dict[str, Any]]) -> Any:
    rows = [(check["name"], check["measured"], "pass" if check["passed"] else "FAIL") for check in checks]
    return table([("check", "measured", "result"), *rows])


def _groups(result: dict[str, Any]) -> Iterator[Text]:
    """A line for each group of checks, and one for each check that failed."""
    loss = result["loss"]
    fall = f"held-out loss {loss['held_out_before']:.2f} -> {loss['held_out_after']:.2f}"
    titles = {
        "plan": "the bytes added are those planned",
        "numbers": 'same bits before; loss and gradients of "compute" are PEFT\'s',
        "training": f"trained: {fall}, base untouched",
        "suspension": "suspended to generate: as loaded; then as before",
        "restore": "restored: bits, dtypes, flags, hooks as loaded",
        "merge": "merged: dtypes, hooks, flags as loaded, nothing in float32",
    }
    for group, title in titles.items():
        found = [check for check in result["checks"] if check["group"] == group]
        failed = [check for check in found if not check["passed"]]
        count = f"{len(found)} check{'s' if len(found) != 1 else ''}"
        verdict = ("FAIL", "bold red") if failed else ("pass", "green")
        yield Text.assemble(verdict, f"  {title} ({f'{len(failed)} of ' if failed else ''}{count})")
        yield from (hanging(f"{check['name']}: {check['measured']}", 8, 6) for check in failed)


def _expect_installed() -> None:
    for name in ("bitsandbytes", "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"the demonstration needs {name}, which is not installed")
