"""Run rounds of trials until there were enough of each kind: ``python tests/campaign``.

What was run is kept in a record, in JSON: a run that is stopped, by Ctrl-C as well, is resumed by the same command. The
exit status is 1 where a trial did not hold. tests/campaign/__init__.py says what a kind is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

COUNTS = {"faults": 100_000, "cycles": 10_000, "kills": 500, "sequences": 100_000, "files": 1_000_000}
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/campaign", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(COUNTS)}; all where none is given")
    parser.add_argument("--count", type=int, help="how many trials of each kind to reach, over all runs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first round")
    parser.add_argument("--record", type=Path, default=Path("campaign.json"), help="the file that runs are summed in")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - COUNTS.keys():
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    record = json.loads(arguments.record.read_text()) if arguments.record.exists() else {}
    versions = {name: version(name) for name in LIBRARIES}
    if record and record["versions"] != versions:
        parser.error(f"{arguments.record} is of other versions; give another --record")
    record["versions"] = versions
    kinds = arguments.kinds or list(COUNTS)
    try:
        for kind in kinds:
            run(kind, arguments.count or COUNTS[kind], arguments.seed, record, arguments.record)
    except KeyboardInterrupt:
        print("stopped; the same command resumes", file=sys.stderr)
        return 130
    violations = [line for kind in kinds for line in record[kind]["violations"]]
    print(*violations, sep="\n")
    return 1 if violations else 0


def run(kind: str, count: int, seed: int, record: dict[str, Any], path: Path) -> None:
    """Run rounds of one kind until the record has as many trials; the record is saved after each round."""
    trials = importlib.import_module(f"campaign.{kind}").trials
    told = record.setdefault(kind, {"trials": 0, "seed": seed, "next_seed": seed, "violations": [], "seconds": 0.0})
    with tqdm(total=count, initial=told["trials"], desc=kind, unit="") as bar:
        while told["trials"] < count:
            start, num_trials, found = time.perf_counter(), 0, []
            for violations in trials(told["next_seed"]):
                num_trials += 1
                found += [f"{kind}, seed {told['next_seed']}: {line}" for line in violations]
                bar.update()
            told["trials"] += num_trials
            told["next_seed"] += 1
            told["violations"] += found
            told["seconds"] += round(time.perf_counter() - start, 1)
            for line in found:
                bar.write(line)
            unfinished = path.with_name(f"{path.name}.part")
            unfinished.write_text(json.dumps(record, indent=2))
            os.replace(unfinished, path)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    importlib.import_module("conftest")  # settings that every test shares
    importlib.import_module("support.forks").start()
    warnings.simplefilter("ignore")
    sys.exit(main())
