"""How long training waits for a checkpoint, and how fast one is read, against torch.save and raw reads."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.race import ROOT
from benchmarks.results import Row
from benchmarks.workloads import FOLDER, WORKLOADS, Workload, overrides

EVERY, STEPS = 4, 13


class Files(NamedTuple):
    """A run folder and the rows of its metrics."""

    folder: Path
    events: list[dict[str, Any]]


def measure(workload: str = "L", *, threads: int = 1) -> list[Row]:
    """Train with checkpoints, save the same state with torch.save + fsync, read both back cold."""
    w = WORKLOADS[workload]
    root = FOLDER / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    try:
        run = _train(w, root=root, threads=threads)
        peer_s, peer_bytes = _torch_save(w, root / "state.pt")
        rows = _stall(run, workload, peer_s=peer_s, peer_bytes=peer_bytes)
        return [*rows, _cold_load(w, run, workload, root=root, threads=threads)]
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _arguments(w: Workload, *, root: Path, threads: int, steps: int) -> list[str]:
    arguments = overrides(w, precision="bf16", threads=threads, steps=steps, root=root)
    arguments.remove("checkpoint.every=0")
    arguments.remove("logger.wandb.mode=offline")
    files = ["run.name=bench", "logger=[llmc,jsonl]", f"checkpoint.every={EVERY}", "checkpoint.keep=1"]
    return [*arguments, *files]


def _train(w: Workload, *, root: Path, threads: int) -> Files:
    command = [sys.executable, "-m", "runner", *_arguments(w, root=root, threads=threads, steps=STEPS)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (root / "bench" / "metrics.jsonl").read_text().splitlines()
    return Files(root / "bench", [json.loads(line) for line in lines])


def _stall(run: Files, workload: str, *, peer_s: float, peer_bytes: int) -> list[Row]:
    saved = {e["step"]: e["checkpoint/blocked_ms"] for e in run.events if e["event"] == "Saved"}
    step_ms = {e["step"]: e["perf/step_ms"] for e in run.events if e["event"] == "TrainStep"}
    during = [step_ms[s] for s in saved if s in step_ms]  # the step while the file is written
    usual = statistics.median(ms for s, ms in step_ms.items() if s not in saved and s > 1)
    blocked = statistics.median(ms for s, ms in saved.items() if s in step_ms)
    extra = max(0.0, statistics.median(during) - usual)
    how = f"{workload}, {peer_bytes / 1e9:.2f} GB; torch.save + fsync {peer_s:.2f} s; "
    how += f"a step {usual / 1e3:.2f} s"
    return [
        Row(
            f"checkpoint: blocked {blocked:.0f} ms / torch.save", blocked / 1e3 / peer_s, "x", 0.10, 0.01, how
        ),
        Row(
            f"checkpoint: extra wall {extra:.0f} ms / torch.save", extra / 1e3 / peer_s, "x", 0.15, 0.06, how
        ),
    ]


def _torch_save(w: Workload, path: Path) -> tuple[float, int]:
    """Return the median seconds of saving weights and two moments with torch.save and fsync, and the size."""
    tensors = {name: torch.randn(w.parameters) for name in ("weights", "m", "v")}
    times = []
    for _ in range(3):
        began = time.perf_counter()
        with path.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        times.append(time.perf_counter() - began)
    size = path.stat().st_size
    path.unlink()
    return statistics.median(times), size


def _cold_load(w: Workload, run: Files, workload: str, *, root: Path, threads: int) -> Row:
    from benchmarks.in_process import session as open_session

    fresh = root / "fresh"
    arguments = _arguments(w, root=root, threads=threads, steps=STEPS + 1)
    session = open_session(arguments, folder=fresh)
    paths = sorted(p for p in run.folder.iterdir() if p.suffix in (".bin", ".safetensors", ".extra"))
    ratios = []
    for _ in range(3):
        raw = _timed(paths, _read_raw)
        session.store.dir = run.folder
        ours = _timed(paths, lambda _: session.restore(_snapshot(session)))
        ratios.append(ours / raw)
    session.store.dir = fresh
    session.emitter.close("finished")
    size = sum(path.stat().st_size for path in paths)
    how = f"{workload}, {size / 1e9:.2f} GB, page cache dropped, checksums verified"
    return Row("checkpoint: cold load / raw read", statistics.median(ratios), "x", 1.15, 1.02, how)


def _snapshot(session: Any) -> Any:
    found = session.store.restore(session.snapshot()).snapshot
    assert found is not None
    return found


def _timed(paths: list[Path], action: Any) -> float:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    began = time.perf_counter()
    action(paths)
    return time.perf_counter() - began


def _read_raw(paths: list[Path]) -> None:
    for path in paths:
        buffer = bytearray(path.stat().st_size)
        view, at = memoryview(buffer), 0
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(view[at : at + (8 << 20)]):
                at += got
