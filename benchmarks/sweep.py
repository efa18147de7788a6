"""What a sweep costs beside its training: `python -m benchmarks.sweep [--cells 6] [--steps 100]`.

Prints, for small runs on this machine: the seconds a cell takes beyond its training steps, and those of
the same run started alone; and how much faster two cells at a time are than one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = [
    *("logger=[llmc,jsonl]", "run.plot=false", "evaluate=val", "evaluate.val.batches=4"),
    *("model.layers=2", "model.width=64", "model.loss_chunk=4096"),
    *("train.seq_len=64", "train.micro_batch=4", "checkpoint.every=1000"),
]


def main() -> None:
    """Run the sweeps, and the same cells alone, in turns; print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=6)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    seeds = ",".join(str(i) for i in range(1, given.cells + 1))
    walls: dict[str, list[float]] = {"one": [], "two": []}
    cell: list[float] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for n in range(given.rounds):
            for name, parallel in (("one", 1), ("two", 2)):
                root = Path(folder) / f"{name}{n}"
                swept = ["-m", f"run.seed={seeds}", f"sweep.parallel={parallel}", f"sweep.root={root}"]
                walls[name].append(command([*swept, f"train.steps={given.steps}"]))
                if parallel == 1:
                    (sweep,) = root.iterdir()
                    cell += [beside(path, result_s(path)) for path in sorted(sweep.glob("0*"))[1:]]
            root = Path(folder) / f"alone{n}"
            wall = command([f"run.root={root}", "run.name=alone", f"train.steps={given.steps}"])
            alone.append(beside(root / "alone", wall))
    print(f"seconds beside training: cell after the first {statistics.median(cell):.2f}", end=", ")
    print(f"run started alone {statistics.median(alone):.2f}")
    one, two = statistics.median(walls["one"]), statistics.median(walls["two"])
    print(f"sweep of {given.cells} cells: one at a time {one:.1f} s, two {two:.1f} s, ratio {one / two:.2f}")


def command(arguments: list[str]) -> float:
    """Run the product; return the seconds it took."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    start = time.perf_counter()
    line = [sys.executable, "-m", "runner", *arguments, *RUN]
    subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def result_s(folder: Path) -> float:
    """Return the seconds from a cell's start to its end, as the sweep saw them."""
    return float(json.loads((folder / "result.json").read_text())["seconds"])


def beside(folder: Path, wall_s: float) -> float:
    """Return the seconds of a run that were not training: everything before and after its metrics."""
    times = [json.loads(line)["time"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return wall_s - (max(times) - min(times))


if __name__ == "__main__":
    main()
