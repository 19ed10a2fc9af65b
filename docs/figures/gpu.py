"""Measures on a GPU what these pages predict or measured on CPUs; about ten minutes on an H100.

    python docs/figures gpu --out DIR [--small]   measure
    python docs/figures gpu --page DIR            write docs/gpu.md, README.md and docs/benchmarks/gpu.json from DIR
    python docs/figures gpu --predict             predict the steps that are measured; needs TRL and no GPU

Each part runs in a process of its own, has a limit, and writes DIR/PART.json row by row. Whatever stops the command, or
a part, what is measured is there: the same command goes on with what is missing. `--small` takes small models, and ten
times the limits; `python tests/device/run.py cuda docs/figures gpu --out DIR --small` rehearses all of it on a
simulated device. TRL's rows need the extra test-trl.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from sections import DOCS, markdown_table, replace_section

# The most valuable first, with their limits in seconds.
LIMITS = {"first": 80, "reporter": 60, "mistral": 110, "qwen": 130, "bits": 60, "speed": 80, "tests": 60}
TITLES = {
    "first": "Everything once, on a small model",
    "reporter": "Preparing Mistral-7B-v0.3, in nf4 with double quantization",
    "mistral": "Steps of Mistral-7B-v0.3",
    "qwen": "Steps of Qwen3-8B",
    "bits": "The same bits",
    "speed": "Speed, of Mistral-7B-v0.3's shapes",
    "tests": "The tests of a GPU",
}
PAGE, README, FIGURES = DOCS / "gpu.md", DOCS.parent / "README.md", DOCS / "benchmarks" / "gpu.json"
SIMULATED = "simulated"  # the name of the device of tests/device
MIB = 2**20

Found = dict[str, dict[str, Any]]


def read(folder: Path) -> Found:
    """What was measured: the content of each part's file, by part."""
    paths = {name: folder / f"{name}.json" for name in LIMITS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


# ----------------------------------------------------------------------------------------------------
# Measuring.
# ----------------------------------------------------------------------------------------------------


def measure(folder: Path, *, is_small: bool) -> int:
    """Run the parts that are not finished, and print the table, whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(part["is_small"] != is_small for part in read(folder).values()):
        raise SystemExit(f"{folder} has figures of {'large' if is_small else 'small'} models: name another folder")
    try:
        for name, seconds in LIMITS.items():
            limit = seconds * (10 if is_small else 1)
            if read(folder).get(name, {}).get("finished"):
                print(f"{name}: measured before", flush=True)
                continue
            print(f"{name}: {TITLES[name]}; at most {limit} s", flush=True)
            said = run_part(name, limit)
            print(f"{name}: {said}", flush=True)
            first = read(folder).get("first", {"rows": {}})["rows"].values()
            if all("error" in row for row in first):
                print("nothing of the first part could be measured: the others are not tried", flush=True)
                break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        found = read(folder)
        print(f"\n{summary(found)}\n\n{tables(found, level='#')}\n\n{summary(found)}", flush=True)
    return 0 if all(found.get(name, {}).get("finished") for name in LIMITS) else 1


def run_part(name: str, limit: float) -> str:
    """Run a part in a process that was started as this one was, and say how it ended."""
    command = [sys.executable, *sys.orig_argv[1:], "--part", name]
    start = time.monotonic()
    # a part ends with this process, which holds the other end of its input
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"stopped at its limit of {limit} s"
        finally:
            process.kill()
    taken = f"{time.monotonic() - start:.0f} s"
    return f"done in {taken}" if status == 0 else f"ended by status {status} after {taken}"


def end_with_parent() -> None:
    """End this process when the one that started it has ended."""

    def wait() -> NoReturn:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# ----------------------------------------------------------------------------------------------------
# Tables.
# ----------------------------------------------------------------------------------------------------


def summary(found: Found) -> str:
    """The parts, and how much of each is there."""
    lines = ["| part | rows | errors | finished |", "| --- | ---: | ---: | --- |"]
    for name in LIMITS:
        part = found.get(name, {"rows": {}, "finished": False})
        errors = sum("error" in row for row in part["rows"].values())
        lines.append(f"| {name} | {len(part['rows']) - errors} | {errors} | {'yes' if part['finished'] else 'no'} |")
    return "\n".join(lines)


def tables(found: Found, *, level: str) -> str:
    """All rows of all parts as Markdown."""
    texts, said = [], ""
    for name, part in found.items():
        texts.append(f"{level} {TITLES[name]}")
        before, said = said, conditions(part["environment"])
        if said != before:
            texts.append(said)
        in_words, groups = {}, {}
        for title, row in part["rows"].items():
            if all(isinstance(value, str) for value in row.values()):
                in_words |= {f"{title}: {key}": {"found": value} for key, value in row.items()}
            else:
                groups.setdefault(tuple(row), {})[title] = row
        texts += [table(rows, keys) for keys, rows in groups.items()]
        texts += [table(in_words, ("found",))] if in_words else []
    return "\n\n".join(texts)


def conditions(environment: Mapping[str, str]) -> str:
    """The card, the versions and the date in a line."""
    others = [f"{name} {value}" for name, value in environment.items() if name not in ("card", "memory", "date")]
    return f"{environment['card']}, {environment['memory']}; {', '.join(others)}; {environment['date']}."


def table(rows: Mapping[str, Mapping[str, Any]], keys: tuple[str, ...]) -> str:
    """Rows of the same figures as Markdown."""
    lines = [["", *map(heading, keys)]]
    for title, row in rows.items():
        lines.append([title, *(shown(key, row[key]) for key in keys)])
    return markdown_table(lines, "---" if keys == ("found",) else "---:")


def heading(key: str) -> str:
    """The heading of a column."""
    for ending, unit in {"_bytes": ", MiB", "_seconds": ", s", "_percent": ", %"}.items():
        if key.endswith(ending):
            return key.removesuffix(ending).replace("_", " ") + unit
    return key.replace("_", " ")


def shown(key: str, value: Any) -> str:
    """A figure in the unit of its heading."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value.replace("|", "/")
    if key.endswith("_bytes"):
        return f"{value / MIB:,.1f}"
    if key.endswith("_seconds"):
        return f"{value:.4f}"
    return (
        f"{value:+.2f}" if key.endswith("_percent") else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    )


# ----------------------------------------------------------------------------------------------------
# Pages.
# ----------------------------------------------------------------------------------------------------


def write_pages(found: Found) -> None:
    """Write what was measured into docs/gpu.md, README.md and docs/benchmarks."""
    if not found.get("reporter", {}).get("finished") or not {"mistral", "qwen"} & {*found}:
        raise SystemExit("expected a folder with the parts reporter and mistral or qwen measured; run --out DIR again")
    card = found["reporter"]["environment"]["card"]
    if card == SIMULATED or found["reporter"]["is_small"]:
        raise SystemExit("expected the figures of a GPU without --small, found those of a rehearsal")
    FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    on_page = {name: part for name, part in found.items() if name != "first"}
    replace_section(PAGE, "gpu", f"{summary(found)}\n\n{tables(on_page, level='##')}")
    replace_section(README, "gpu", in_short(found))


def in_short(found: Found) -> str:
    """README's sentences on what was measured."""
    environment = found["reporter"]["environment"]
    cells = [row for part in ("mistral", "qwen") for row in found.get(part, {"rows": {}})["rows"].values()]
    off = [abs(row["off_percent"]) for row in cells if "off_percent" in row]
    near = sum(one <= 2 for one in off)
    rows = found["reporter"]["rows"]
    peft, compute, norms = (rows[way]["added_reserved_bytes"] / MIB for way in ("peft", "compute", "norms"))
    return (
        f"Measured on an {environment['card']} on {environment['date']}: of the peaks of {len(off)} training steps of\n"
        f"a 7B and an 8B model, {near} are within 2 % of the prediction. Preparing Mistral-7B reserves {peft:,.1f}\n"
        f'MiB more with PEFT\'s function, {compute:,.1f} MiB with `"compute"` and {norms:,.1f} MiB with `"norms"`.\n'
        f"[More](docs/gpu.md). [The benchmarks](docs/benchmarks.md) are a CPU's."
    )


def main() -> int:
    """Measure, write the pages, or predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="measure, into this folder")
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--page", type=Path, metavar="DIR", help="write the pages from this folder")
    parser.add_argument("--predict", action="store_true", help="predict the steps")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.out and asked.part:
        end_with_parent()
        importlib.import_module("gpu_parts").run(asked.part, asked.out / f"{asked.part}.json", is_small=asked.small)
    elif asked.out:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        return measure(asked.out, is_small=asked.small)
    elif asked.page:
        write_pages(read(asked.page))
    elif asked.predict:
        importlib.import_module("gpu_parts").write_predictions()
    else:
        parser.error("expected --out DIR, --page DIR or --predict")
    return 0
