"""Writes the figures, tables and pictures of the documentation, each by one command.

python docs/figures                       list the commands and what each writes
python docs/figures NAME [ARGUMENT ...]   run one; `--help` shows its arguments
"""

from __future__ import annotations

import importlib
import sys

WRITES = {
    "benchmarks": "docs/benchmarks.md: timings, bytes and numbers beside PEFT's",
    "clients": "nothing: writes models with the configs of the hub, which other clients then compute (`.ci/run --all`)",
    "compatibility": "docs/compatibility.md: what the tests of the quantizers find",
    "eight_gb": "docs/eight_gb.md: what trains on 8 GB that host and device share; with --host, what the host takes",
    "evidence": "docs/evidence.md, with its plot: what norms in float32 are worth",
    "fits": "docs/fits.md and docs/benchmarks/fits.json: what fits of known models, by device",
    "front": "docs/pictures/front.svg: what merges lose and what a step takes, of docs/pictures.md",
    "gpu": "docs/gpu.md, README.md and docs/benchmarks/gpu.json: what a GPU measures",
    "guarantees": "docs/guarantees.md: the sums of the records of `python tests/campaign`",
    "memory_tables": "docs/memory.md and docs/fit.md: what preparing and a step take, by model and precision",
    "losses": "docs/benchmarks.md, with its plot: losses of a LoRA under several arithmetics",
    "merge_cost": "nothing: prints the CPU time of a merged export beside that of its parts by themselves",
    "merge_times": "nothing: prints how long merging and measuring take on Mistral-7B's shapes",
    "merges": "docs/merge.md and docs/merges_measured.md, with docs/pictures/merges.svg: what each way to merge keeps",
    "numerics": "docs/versions.md: in which environments a base computes other logits, and what a resume says of it",
    "pictures": "docs/pictures/preparing.svg and left.svg: what each way holds, and what it leaves",
    "planning": "docs/prediction.md: the CPU time of predictions and searches",
    "published": "docs/published.md and docs/pictures/published.svg: predictions beside what others measured",
    "rollouts": "docs/benchmarks.md: a trainer beside engines that are sent its adapter",
    "versions": "docs/versions.md: with which versions the tests passed; `.ci/run` calls it",
}


def main() -> int:
    """List the commands, or run the one that is named."""
    if len(sys.argv) == 1:
        print(__doc__)
        for name, written in WRITES.items():
            print(f"{name:14} {written}")
        return 0
    name = sys.argv[1]
    if name not in WRITES:
        print(f"no figures are called {name!r}: expected one of {', '.join(WRITES)}", file=sys.stderr)
        return 2
    sys.argv[:2] = [f"python docs/figures {name}"]
    status: int | None = importlib.import_module(name).main()
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
