"""Run the benchmarks and print one table: `python -m benchmarks [NAME ...] [--threads N] [--rounds N]`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    checkpoint,
    exactness,
    loader,
    loggers,
    peak_memory,
    peers,
    ranks,
    roofline,
    startup,
    step,
)
from benchmarks.results import QUIET, RESULTS, Row, load_average, save, stored, table
from benchmarks.workloads import WORKLOADS
from runner.usage import Parser, count

STEP_TURNS = {"S": 40, "M256": 4, "M50k": 2, "L": 2, "L1024": 1, "llama-S": 30, "llama-M256": 3}
PEER_TURNS = {"S": 30, "M256": 4, "M50k": 2, "L": 2, "L1024": 1}
RANK_STEPS = {"S": 200, "M256": 20}


def main(*names: str) -> None:
    """Measure what was asked for (`names` unless the command line says), save it, and print it."""
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(names))
    parser.add_argument("--threads", type=count, default=2, help="1 = compare CPU time, good under load")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--show", action="store_true", help="print what `results/` holds, measure nothing")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, help="of step and peers; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    asked = parser.parse_args()
    if asked.show:
        print("\n\n".join(stored()))
        return
    benchmarks = _benchmarks(asked)
    if unknown := set(asked.names) - set(benchmarks):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(benchmarks)}")
    load = load_average()
    if asked.threads > 1 and load >= QUIET:
        print(
            f"load average {load:.1f}: other programs run, so wall-clock ratios mean little", file=sys.stderr
        )
    for line in peers.skipped():
        print(line, file=sys.stderr)
    chosen = [name for name in benchmarks if not asked.names or name in asked.names]
    measured = {name: _measured(name, benchmarks[name], asked) for name in chosen}
    print("\n" + table([row for rows in measured.values() for row in rows or ()]))
    if failed := [name for name, rows in measured.items() if rows is None]:
        sys.exit(f"not measured: {', '.join(failed)}")


def _measured(name: str, measure: Callable[[], list[Row]], asked: argparse.Namespace) -> list[Row] | None:
    """Measure, save and return one benchmark's rows; None where it broke, so that the others still run."""
    load, began = load_average(), time.monotonic()
    print(f"{name} (load average {load:.1f}) ...", file=sys.stderr, end="", flush=True)
    try:
        rows = measure()
    except Exception:
        print(" failed", file=sys.stderr)
        traceback.print_exc()
        return None
    save(_file(name, asked), rows, load=load, folder=asked.results)
    print(f" {time.monotonic() - began:.0f} s", file=sys.stderr)
    return rows


def _file(name: str, asked: argparse.Namespace) -> str:
    some = "-".join(asked.workloads or []) if name in ("step", "peers", "ranks") else ""
    return "-".join(part for part in (name, some, f"{asked.threads}t") if part)


def _benchmarks(asked: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    threads, rounds = asked.threads, asked.rounds
    turns = [
        {n: table.get(n, 8) for n in asked.workloads} if asked.workloads else table
        for table in (STEP_TURNS, PEER_TURNS, RANK_STEPS)
    ]
    return {
        "roofline": lambda: roofline.measure(threads=threads),
        "startup": lambda: startup.measure(rounds=rounds, quiet=threads > 1),
        "step": lambda: step.measure(threads=threads, rounds=rounds, steps=turns[0]),
        "peers": lambda: peers.measure(threads=threads, rounds=rounds, steps=turns[1]),
        "ranks": lambda: ranks.measure(rounds=rounds, steps=turns[2]),
        "memory": peak_memory.measure,
        "checkpoint": lambda: checkpoint.measure(*(asked.workloads or ["L"])[:1], threads=threads),
        "loader": loader.measure,
        "loggers": loggers.measure,
        "exactness": exactness.measure,
    }


if __name__ == "__main__":
    main()
