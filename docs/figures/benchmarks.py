"""Measures what docs/benchmarks.md shows, and writes it there: tables, plots, and the figures themselves as JSON.

    python docs/figures benchmarks NAME...            measure, save the figures, draw them, write the page
    python docs/figures benchmarks --saved NAME...    draw and write what was saved

A name is one of `BENCHMARKS`; `rollout` is on docs/rollouts.md. What a page has between `<!-- benchmark: NAME -->` and
`<!-- end -->` is replaced.
Leave the machine alone meanwhile; timings are compared within a run, but a busy machine is unfair to some cases.
"""

from __future__ import annotations

import argparse
import contextlib
import io

from kbitwrap.cli import main as kbitwrap
from sections import DOCS, replace_section

PAGE = DOCS / "benchmarks.md"
PAGES = {"rollout": DOCS / "rollouts.md"}
FIGURES = DOCS / "benchmarks"
BENCHMARKS = {
    "mistral-7b": ["--repeats", "15"],
    "step": ["--step"],
    "step-tokens": [
        *("--step", "--tokens", "512", "1024", "--repeats", "7"),
        *("--case", "peft", "--case", "full", "--case", "compute", "--case", "compute-chunked"),
    ],
    "step-small-head": ["--step", "--vocab-size", "256", "--case", "peft", "--case", "norms", "--case", "none"],
    "identity": ["--identity", "--layers", "2", "--hidden-size", "256", "--tokens", "16"],
    "export": ["--export", "--repeats", "7"],
    "loss": ["--loss", "--repeats", "5"],
    "rollout": ["--rollout", "--repeats", "1"],
    "mistral-7b-cuda": ["--device", "cuda"],
    "step-cuda": ["--device", "cuda", "--step", "--tokens", "512", "1024", "2048", "4096", "8192"],
    "identity-cuda": ["--device", "cuda", "--identity"],
}


def bench(*options: str) -> str:
    """Run `kbitwrap bench`, and return what it prints. A number that differs is shown, not hidden: status 1."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = kbitwrap(["bench", *options])
    if status not in (0, 1):
        raise SystemExit(status)
    return printed.getvalue().rstrip()


def benchmark(name: str, *, is_saved: bool) -> str:
    """What the page shows of a benchmark."""
    FIGURES.mkdir(exist_ok=True)
    saved = FIGURES / f"{name}.json"
    if not is_saved:
        bench(*BENCHMARKS[name], "--json", "--output", str(saved), "--overwrite")
    lines = ["```text", bench("--from", str(saved)), "```"]
    if not {"--identity", "--export", "--rollout"} & {*BENCHMARKS[name]}:
        plot = FIGURES / f"{name}.svg"
        bench("--from", str(saved), "--plot", str(plot), "--overwrite")
        lines += ["", f"![The figures of this run]({FIGURES.name}/{plot.name})"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--saved", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    for name in arguments.names:
        shown = benchmark(name, is_saved=arguments.saved)
        replace_section(PAGES.get(name, PAGE), f"benchmark: {name}", shown)
