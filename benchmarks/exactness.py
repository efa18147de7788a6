"""The fast paths are exact: the same bits from run to run, across a resume, and for 1 or 2 threads."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.race import ROOT
from benchmarks.results import Row
from benchmarks.workloads import FOLDER, WORKLOADS, overrides

STEPS, HALF = 12, 5


def measure(
    workloads: tuple[str, ...] = ("S", "llama-S"), *, threads: int = 2, compare_threads: bool = True
) -> list[Row]:
    """Train twice, once interrupted, once on one thread; compare losses and final weights."""
    rows = []
    for name in workloads:
        root = FOLDER / f"exact-{name}"
        shutil.rmtree(root, ignore_errors=True)
        whole = run(name, root, "whole", threads=threads)
        again = run(name, root, "again", threads=threads)
        run(name, root, "resumed", threads=threads, stop=HALF)
        resumed = run(name, root, "resumed", threads=threads)
        others = {"two runs": again, "interrupted and resumed": resumed}
        if compare_threads:
            others[f"1 thread and {threads}"] = run(name, root, "single", threads=1)
        for what, other in others.items():
            differ = float(other != whole)
            rows.append(
                Row(f"{name}: {what}: bits differ", differ, "", 0, 0, "losses and weights, 0 = equal")
            )
        shutil.rmtree(root)
    return rows


def run(
    workload: str,
    root: Path,
    name: str,
    *,
    threads: int,
    stop: int | None = None,
    arguments: Sequence[str] = (),
) -> str:
    """Train, or train up to step `stop` of the same schedule; return a hash of log and weights.

    Raises:
        RuntimeError: the run failed; with the end of what it said.
    """
    usual = overrides(WORKLOADS[workload], precision="auto", threads=threads, steps=STEPS, root=root)
    usual.remove("checkpoint.every=0")
    usual.remove("logger.wandb.mode=offline")
    more = [f"run.name={name}", "logger=[llmc]", f"checkpoint.every={HALF}"]
    if stop is not None:
        more += [f"train.steps={stop}", f"scheduler.total_steps={STEPS}"]
    command = [sys.executable, "-m", "runner", *usual, *more, *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"exit {ended.returncode}: {(ended.stderr or ended.stdout).strip()[-400:]}")
    if stop is not None:
        return ""
    digest = hashlib.sha256((root / name / "main.log").read_bytes())
    weights = sorted((root / name).glob(f"model_{STEPS:08d}*"))
    assert weights, f"no weights of step {STEPS} in {root / name}"
    for path in weights:
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("exactness")
