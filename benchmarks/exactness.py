"""The fast paths are exact: the same bits from run to run, across a resume, and for 1 or 2 threads."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
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
        whole = _run(name, root, "whole", threads=threads)
        again = _run(name, root, "again", threads=threads)
        _run(name, root, "resumed", threads=threads, stop=HALF)
        resumed = _run(name, root, "resumed", threads=threads)
        others = {"two runs": again, "interrupted and resumed": resumed}
        if compare_threads:
            others[f"1 thread and {threads}"] = _run(name, root, "single", threads=1)
        for what, other in others.items():
            differ = float(other != whole)
            rows.append(
                Row(f"{name}: {what}: bits differ", differ, "", 0, 0, "losses and weights, 0 = equal")
            )
        shutil.rmtree(root)
    return rows


def _run(workload: str, root: Path, name: str, *, threads: int, stop: int | None = None) -> str:
    """Train, or train up to step `stop` of the same schedule; return a hash of log and weights."""
    arguments = overrides(WORKLOADS[workload], precision="auto", threads=threads, steps=STEPS, root=root)
    arguments.remove("checkpoint.every=0")
    arguments.remove("logger.wandb.mode=offline")
    more = [f"run.name={name}", "logger=[llmc]", f"checkpoint.every={HALF}"]
    if stop is not None:
        more += [f"train.steps={stop}", f"scheduler.total_steps={STEPS}"]
    command = [sys.executable, "-m", "runner", *arguments, *more]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if stop is not None:
        return ""
    digest = hashlib.sha256((root / name / "main.log").read_bytes())
    weights = sorted((root / name).glob(f"model_{STEPS:08d}*"))
    assert weights, f"no weights of step {STEPS} in {root / name}"
    for path in weights:
        digest.update(path.read_bytes())
    return digest.hexdigest()
