"""``kbitwrap demo``: prepare a small quantized model, train it, restore it, and check every promise on the way."""

from __future__ import annotations

import importlib.util
import json
from typing import Annotated

import typer

from .. import Precision, PrepareConfig
from .console import EXIT_DONE, EXIT_NO, InputError, progress, quiet_libraries, show
from .hub import models
from .tables import table
from .usage import PRECISIONS, QUANTS, Json, TrustRemoteCode, choice, device, integer

_MAX_SEED = 2**63 - 1
SUMMARY = "Prepare, train and restore a small quantized model, and check each step."
HELP = """Prepare, train and restore a small quantized model, and check each step.

A small model is built, loaded quantized and prepared, a LoRA is trained on it, text is generated from it while it is
suspended, it is restored, and the LoRA is merged; the model is checked after each step. Needs no network.

Exit status: 0 every check passed, 1 one failed, 2 bad usage or bad input."""


def command(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="A causal language model to use in place of the small built-in one."
        ),
    ] = None,
    quant: Annotated[str, choice("--quant", choices=QUANTS[:2], help="Quantization.")] = "nf4",
    precision: Annotated[
        str, choice("--precision", choices=PRECISIONS, help="Where float32 is used.")
    ] = PrepareConfig().precision.value,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", parser=device, help="Such as cpu or cuda:1; cuda, if there is one."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", parser=integer(1), help="Training steps.")] = 30,
    seed: Annotated[int, typer.Option("--seed", metavar="N", parser=integer(0, _MAX_SEED), help="Random seed.")] = 0,
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
            if not json_:
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
        rows = [(row["name"], row["measured"], "pass" if row["passed"] else "FAIL") for row in result["checks"]]
        seconds = ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items())
        num_passed = sum(row["passed"] for row in result["checks"])
        show(
            table([("check", "measured", "result"), *rows]),
            f"{num_passed} of {len(rows)} checks passed. Seconds: {seconds}",
        )
    return EXIT_DONE if result["passed"] else EXIT_NO


def _expect_installed() -> None:
    for name in ("bitsandbytes", "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"the demonstration needs {name}, which is not installed")
