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

EVERY, STEPS, ROUNDS, LOADS = 6, 25, 3, 12


class Save(NamedTuple):
    """What one checkpoint cost the run: how long the loop waited, and how much longer the steps took."""

    blocked_s: float
    extra_s: float  # over all steps up to the next checkpoint, waiting included


class Training(NamedTuple):
    """A run's folder, its usual step and its checkpoints."""

    folder: Path
    step_s: float
    saves: list[Save]


def measure(workload: str = "L", *, threads: int = 1) -> list[Row]:
    """Train with checkpoints, save the same state with torch.save + fsync, read ours back cold."""
    w = WORKLOADS[workload]
    root = FOLDER / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        rounds = []
        for _ in range(ROUNDS):  # in turns: the disk is not the same from minute to minute
            shutil.rmtree(root / "bench", ignore_errors=True)
            peer_s, size = _torch_save(w, root / "state.pt")
            rounds.append((_train(w, root=root, threads=threads), peer_s))
        rows = _stall(rounds, workload, size=size)
        return [*rows, _cold_load(w, rounds[-1][0], workload, root=root, threads=threads)]
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _arguments(w: Workload, *, root: Path, threads: int, steps: int) -> list[str]:
    arguments = overrides(w, precision="bf16", threads=threads, steps=steps, root=root)
    arguments.remove("checkpoint.every=0")
    arguments.remove("logger.wandb.mode=offline")
    files = ["run.name=bench", "logger=[llmc,jsonl]", f"checkpoint.every={EVERY}", "checkpoint.keep=1"]
    return [*arguments, *files]


def _train(w: Workload, *, root: Path, threads: int) -> Training:
    command = [sys.executable, "-m", "runner", *_arguments(w, root=root, threads=threads, steps=STEPS)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (root / "bench" / "metrics.jsonl").read_text().splitlines()
    return _costs(root / "bench", [json.loads(line) for line in lines])


def _costs(folder: Path, events: list[dict[str, Any]]) -> Training:
    """Find each checkpoint's cost from the times at which the rows were written."""
    ended = {e["step"]: e["time"] for e in events if e["event"] == "TrainStep"}
    wall_s = {step: ended[step] - ended[step - 1] for step in ended if step - 1 in ended}
    saved = {e["step"]: e for e in events if e["event"] == "Saved"}
    undisturbed = []
    saves = []
    for first, event in saved.items():
        window = range(first, first + EVERY)
        undisturbed += [wall_s[s] for s in window if s in wall_s and ended[s - 1] > event["time"]]
        if window[-1] in wall_s:
            blocked_s = event["checkpoint/blocked_ms"] / 1e3
            saves.append(Save(blocked_s, sum(wall_s[step] for step in window)))
    if not undisturbed:
        raise RuntimeError(f"{folder}: a checkpoint takes longer than {EVERY} steps; raise EVERY")
    usual = statistics.median(undisturbed)
    return Training(folder, usual, [Save(save.blocked_s, save.extra_s - EVERY * usual) for save in saves])


def _stall(rounds: list[tuple[Training, float]], workload: str, *, size: int) -> list[Row]:
    peer_s = statistics.median(seconds for _, seconds in rounds)
    step_s = statistics.median(run.step_s for run, _ in rounds)
    rows = []
    for name, field, must, want in (("blocked", 0, 0.10, 0.01), ("extra wall", 1, 0.15, 0.06)):
        ratio = statistics.median(save[field] / seconds for run, seconds in rounds for save in run.saves)
        spent_ms = 1e3 * statistics.median(save[field] for run, _ in rounds for save in run.saves)
        first_ms = 1e3 * statistics.median(run.saves[0][field] for run, _ in rounds)
        how = f"{workload}, {size / 1e9:.2f} GB; torch.save + fsync {peer_s:.2f} s; a step {step_s:.2f} s; "
        how += f"the first save of a run {first_ms:.0f} ms"
        rows.append(Row(f"checkpoint: {name} {spent_ms:.0f} ms / torch.save", ratio, "x", must, want, how))
    return rows


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


def _cold_load(w: Workload, run: Training, workload: str, *, root: Path, threads: int) -> Row:
    from benchmarks.in_process import session as open_session

    fresh = root / "fresh"
    arguments = _arguments(w, root=root, threads=threads, steps=STEPS + 1)
    session = open_session(arguments, folder=fresh)
    paths = sorted(p for p in run.folder.iterdir() if p.suffix in (".bin", ".safetensors", ".extra"))
    session.store.dir = run.folder
    ways = {"raw": _read_raw, "ours": lambda _: session.restore(_snapshot(session))}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(LOADS):
        for way in sorted(ways, reverse=turn % 2 == 1):
            times[way].append(_timed(paths, ways[way]))
    session.store.dir = fresh
    session.emitter.close("finished")
    size = sum(path.stat().st_size for path in paths)
    raw, ours = (statistics.quantiles(times[way], n=10)[0] for way in ("raw", "ours"))
    how = f"{workload}, {size / 1e9:.2f} GB, page cache dropped, checksums verified; 10th percentiles of "
    slowest = ", ".join(f"{max(times[way]):.1f} s" for way in ("ours", "raw"))
    how += f"{LOADS}: {ours:.2f} s, {raw:.2f} s (the slowest {slowest})"
    return Row("checkpoint: cold load / raw read", ours / raw, "x", 1.15, 1.02, how)


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


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main("checkpoint")
