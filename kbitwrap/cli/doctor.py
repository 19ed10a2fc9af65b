"""``kbitwrap doctor``: the faults of a run that raise no error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.console import Group, RenderableType

from .adapters import asking_for_base, check_adapter, is_adapter, named_base
from .console import (
    EXIT_DONE,
    EXIT_NO,
    InputError,
    Result,
    first_line,
    hanging,
    printable,
    say,
    show,
    show_json,
)
from .hub import working
from .tables import table
from .usage import (
    Json,
    QuantInTraining,
    TrustRemoteCode,
    argument,
    device,
    path,
    value,
)

_MOST_TENSORS = 5  # of a wrong merge, in its table
SUMMARY = "Look for faults of a saved run that raise no error."
HELP = """Look for faults of a saved run that raise no error.

PATH is a checkpoint, an adapter or a Trainer's output folder. doctor looks for these faults: float32 left by a
preparation, another base than the manifest's, adapters that are zero, not finite or of another dtype, layers and
experts that were never quantized, tied weights that came apart, use_cache left off, idle devices, a merge into 4-bit
weights, scales in another order than their weights, an optimizer that trained what was not saved, a save that was
interrupted, a tokenizer with more ids than the embeddings have rows. Each check made is printed: fine, fault, or not
measured and why. No code in a file is run, but for that of BASE with --trust-remote-code.

Is a merged model what was trained? With --adapter every tensor of PATH is compared with the adapter and its base,
whatever tool merged them: how much of what the adapter learned is there, what is wrong where it is not, and what of the
base's files is missing. With --base and --quant alone, PATH is compared with the dequantized base: an engine that is
sent adapters only needs that.

Exit status: 0 no fault was found, 1 one was, 2 bad input."""


def command(
    path: Annotated[Path, argument("PATH", path, "The folder, or a file of weights.")],
    base: Annotated[
        str | None,
        value(
            "--base",
            "BASE",
            str,
            "The base that was trained on, to compare with the manifest, and with --adapter a merged PATH; with "
            "--adapter what its config names, if left out. It is loaded.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        value(
            "--adapter",
            "ADAPTER",
            path,
            "The folder of the adapter that was merged: how much of it PATH holds.",
        ),
    ] = None,
    quant: QuantInTraining = None,
    device: Annotated[
        str | None,
        value(
            "--device",
            "DEVICE",
            device,
            "The device to quantize BASE on, where PATH is compared with the dequantized base; cuda if there is one, "
            "else cpu.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Examine, and print what was found. 1 if that was a fault, else 0.

    Raises:
        InputError: There is nothing to examine, or it is damaged.
    """
    if not path.exists():
        raise InputError(f"there is nothing at {str(path)!r}")
    if quant is not None and base is None and adapter is None:
        raise InputError(
            "--quant says how a base was quantized: give --adapter, or --base"
        )
    is_named = False
    if adapter is not None:
        check_adapter(adapter)
        _refuse_adapter(path)
        if base is None:
            base, is_named = _base_of(adapter), True
    examining = working(base, f"examining {path}", trust_remote_code)
    with asking_for_base(is_named), examining as doing:
        from .. import KbitWrapError, doctor  # not before: they load torch

        def tell(num_done: int, num_tensors: int) -> None:
            doing.now(f"measuring {path}: {num_done:,} of {num_tensors:,} tensors")

        try:
            report = doctor(
                path,
                base=base,
                adapter=adapter,
                quant=quant,
                device=device,
                trust_remote_code=trust_remote_code,
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
    if is_named:
        say(f"note: the base is {base!r}, which the config of the adapter names")
    return EXIT_NO if report else EXIT_DONE


def _refuse_adapter(path: Path) -> None:
    """Refuse an adapter in place of the merged model."""
    is_alone = is_adapter(path) and not (path / "config.json").is_file()
    if is_alone or path.stem == "adapter_model":
        raise InputError(
            f"{str(path)!r} holds an adapter: with --adapter, PATH is the folder of the merged model"
        )


def _base_of(adapter: Path) -> str:
    """The base that the config of an adapter names; raises where it names none."""
    base = named_base(adapter)
    if base is None:
        raise InputError(
            f"the config of the adapter in {str(adapter)!r} names no base: give it (--base)"
        )
    return base


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
    parts: list[RenderableType] = [_summary(result)]
    parts += [_finding(finding) for finding in result["findings"]]
    by_place: dict[str, list[dict[str, str]]] = {}
    for examined in result["looked_at"]:
        by_place.setdefault(examined["where"], []).append(examined)
    parts += [_checklist(where, checks) for where, checks in by_place.items()]
    return parts


def _summary(result: Result) -> Group:
    """The number of faults and of checks, and what was not measured, a line for each."""
    num_faults = len(result["findings"])
    outcomes = [check["outcome"] for check in result["looked_at"]]
    num_open = outcomes.count("not measured")
    found = "no fault" if num_faults == 0 else _count(num_faults, "fault")
    checks = _count(len(outcomes) - num_open, "check")
    summary = f"{printable(result['subject'])}: {found} found in {checks}"
    if num_open:
        summary += f"; {num_open} not measured"
    lines = [hanging(summary, 0)]
    for text in result["not_measured"]:
        lines.append(hanging(f"not measured: {printable(text)}", 4))
    return Group(*lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
