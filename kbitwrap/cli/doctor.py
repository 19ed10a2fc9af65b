"""``kbitwrap doctor``: the faults of a run that raise no error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.console import Group, RenderableType

from .console import (
    EXIT_DONE,
    EXIT_NO,
    InputError,
    Result,
    first_line,
    hanging,
    printable,
    show,
    show_json,
)
from .hub import quantization_in_training, working
from .tables import table
from .usage import Json, QuantInTraining, argument, path, value

_MOST_TENSORS = 5  # of a wrong merge, in its table
SUMMARY = "Look for faults of a saved run that raise no error."
HELP = """Look for faults of a saved run that raise no error.

PATH is a checkpoint, an adapter or a Trainer's output folder. doctor looks for these faults: float32 left by a
preparation, another base than the manifest's, adapters that are zero, not finite or of another dtype, layers and
experts that were never quantized, tied weights that came apart, use_cache left off, idle devices, a merge into 4-bit
weights, an optimizer that trained what was not saved, a save that was interrupted, a tokenizer with more ids than the
embeddings have rows. Each check made is printed: fine, fault, or not measured and why. No code in a file is run.

Is a merged model what was trained? With --base and --adapter every tensor of PATH is compared with the base and the
adapter, whatever tool merged them: how much of what the adapter learned is there, and what is wrong where it is not.
With --base and --quant alone, PATH is compared with the dequantized base: an engine that is sent adapters only needs
that.

Exit status: 0 no fault was found, 1 one was, 2 bad input."""


def command(
    path: Annotated[Path, argument("PATH", path, "The folder, or a file of weights.")],
    base: Annotated[
        str | None,
        value(
            "--base",
            "BASE",
            str,
            "The base that was trained on, to compare with the manifest, and with --adapter a merged PATH; it is "
            "loaded.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        value(
            "--adapter",
            "ADAPTER",
            path,
            "The adapter that was merged: with --base, how much of it PATH holds.",
        ),
    ] = None,
    quant: QuantInTraining = None,
    json_: Json = False,
) -> int:
    """Examine, and print what was found. 1 if that was a fault, else 0.

    Raises:
        InputError: There is nothing to examine, or it is damaged.
    """
    if not path.exists():
        raise InputError(f"there is nothing at {str(path)!r}")
    with working(base, f"examining {path}") as doing:
        from .. import KbitWrapError, doctor  # not before: they load torch

        def tell(num_done: int, num_tensors: int) -> None:
            doing.now(f"measuring {path}: {num_done:,} of {num_tensors:,} tensors")

        quantization = quantization_in_training(quant, None)
        try:
            report = doctor(
                path,
                base=base,
                adapter=adapter,
                quantization_config=quantization,
                progress=tell,
            )
        except (KbitWrapError, OSError) as error:
            raise InputError(first_line(error)) from error
    result = report.to_dict()
    if json_:
        show_json(result)
    else:
        if report.merge is not None:
            show(*_merge(report.merge))
        show(*_describe(result))
    return EXIT_NO if report else EXIT_DONE


def _merge(merge: Any) -> list[RenderableType]:
    """The verdict on a merge, and its worst tensors where it is none."""
    if not merge.faults:
        return [hanging(printable(str(merge)), 0)]
    worst = sorted(merge.tensors.items(), key=lambda item: -item[1].error)
    rows = [["tensor", "kept", "error", "bits"]]
    for fqn, one in worst[:_MOST_TENSORS]:
        rows.append(
            [printable(fqn), f"{one.kept:.1%}", f"{one.error:.1%}", str(one.bits)]
        )
    verdict = hanging(printable(str(merge)), 0)
    kept = f"{merge.kept:.1%} of the delta is there, with an error of {merge.error:.1%} of it; the worst tensors:"
    return [verdict, kept, table(rows)]


def _describe(result: Result) -> list[RenderableType]:
    findings = result["findings"]
    number = len(findings) or "no"
    plural = "" if len(findings) == 1 else "s"
    parts: list[RenderableType] = [
        f"{printable(result['subject'])}: {number} fault{plural} found"
    ]
    parts += [_finding(finding) for finding in findings]
    by_place: dict[str, list[dict[str, str]]] = {}
    for examined in result["looked_at"]:
        by_place.setdefault(examined["where"], []).append(examined)
    parts += [_checklist(where, checks) for where, checks in by_place.items()]
    return parts


def _finding(finding: dict[str, str]) -> Group:
    lines = [hanging(printable(finding["what"]), 0)]
    for name in ("where", "evidence", "remedy"):
        lines.append(hanging(f"{name}: {printable(finding[name])}", 4, 2))
    return Group(*lines)


def _checklist(where: str, checks: list[dict[str, str]]) -> Group:
    """The checks of one place, a line for each."""
    lines = [f"looked at in {printable(where)}:"]
    for check in checks:
        line = f"{check['what']}: {check['outcome']}: {check['evidence']}"
        lines.append(hanging(printable(line), 4, 2))
    return Group(*lines)
