"""Check everything that only a GPU can show, in one table and at most eight minutes.

    python -m benchmarks.gpu_check

Kernels against their definitions, host syncs per step, bits from run to run and across a resume, the
speed of GPT-2 124M beside torch eager, torch.compile and a nanoGPT-style loop, what a checkpoint costs.
On a CPU it runs the same code on tiny sizes, to show that the script itself works.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import exactness, gpu_parity
from benchmarks.bare import PlainModel, decayed, random_windows
from benchmarks.in_process import session
from benchmarks.results import Row, load_average, save, table
from benchmarks.workloads import FOLDER, WORKLOADS, Workload, overrides
from runner.api import Saved, TrainStep
from runner.flops import peak_tflops
from runner.train import train

BUDGET_S = 440.0
GPT2_124M = Workload(12, 12, 768, 1024, 32, 50304)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
SPEED = GPT2_124M if ON_GPU else WORKLOADS["tiny"]
WARM, TIMED = (8, 24) if ON_GPU else (2, 4)


class Probe:
    """A logger that notes when steps end, and counts syncs of the steps in the middle."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.saved: list[Saved] = []
        self.syncs: list[str] = []
        self._stack = contextlib.ExitStack()
        self._caught: list[warnings.WarningMessage] = []

    def log(self, event: Any) -> None:
        """Note a step or a checkpoint."""
        if isinstance(event, Saved):
            self.saved.append(event)
        if not isinstance(event, TrainStep):
            return
        self.stamps.append(time.perf_counter())
        if ON_GPU and event.step == WARM:
            self._caught = self._stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if ON_GPU and event.step == WARM + 4:
            torch.cuda.set_sync_debug_mode("default")
            self.syncs = [f"{w.filename}:{w.lineno}" for w in self._caught if "synchroniz" in str(w.message)]
            self._stack.close()

    def open(self, run: Any) -> None:
        """Do nothing."""

    def close(self, status: str) -> None:
        """Do nothing."""


def main() -> None:
    """Run every check that the time allows; a check that fails is a row, not the end."""
    began = time.perf_counter()
    shutil.rmtree(FOLDER / "gpu", ignore_errors=True)
    rows: list[Row] = []
    for name, check in _checks().items():
        left = BUDGET_S - (time.perf_counter() - began)
        if left < 0:
            rows.append(Row(f"{name}: left out, the time is up", float("nan"), ""))
            continue
        start = time.perf_counter()
        try:
            rows += check()
        except Exception as error:
            traceback.print_exc()
            rows.append(
                Row(f"{name}: failed", float("nan"), "", 0, 0, f"{type(error).__name__}: {error}"[:200])
            )
        print(f"[{time.perf_counter() - start:.0f} s] {name}", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
    where = torch.cuda.get_device_name() if ON_GPU else "CPU, tiny sizes"
    save(f"gpu_check-{DEVICE.type}", rows, load=load_average())
    print(f"\n{where}, torch {torch.__version__}\n\n{table(rows)}")
    shutil.rmtree(FOLDER / "gpu", ignore_errors=True)


def _checks() -> dict[str, Callable[[], list[Row]]]:
    return {
        "kernel parity": lambda: gpu_parity.measure(DEVICE),
        "speed and syncs": _speed,
        "bits": lambda: exactness.measure(("S",) if ON_GPU else ("tiny",), threads=1, compare_threads=False),
        "checkpoint": _checkpoint,
    }


def _speed() -> list[Row]:
    """Compare the runner, eager and compiled blocks, with bare loops."""
    ours = {
        "runner": _runner_ms([]),
        **({"runner, compiled blocks": _runner_ms(["run.compile=blocks"])} if ON_GPU else {}),
    }
    loops = {
        "torch eager": _loop_ms(fused=True, compiled=False),
        **({"torch.compile": _loop_ms(fused=True, compiled=True)} if ON_GPU else {}),
        "nanoGPT-style": _loop_ms(fused=ON_GPU, compiled=ON_GPU, read_loss=True),
    }
    tokens = SPEED.batch * SPEED.seq_len
    peak = peak_tflops(torch.cuda.get_device_name(), "bf16") if ON_GPU else -1.0
    rows = []
    syncs = {name: probe.syncs for name, (_, probe) in ours.items()}
    for name, found in syncs.items():
        how = "of four steps; " + "; ".join(sorted(set(found))[:4]) if ON_GPU else "no GPU: nothing to count"
        rows.append(Row(f"{name}: host syncs outside readback", float(len(found)), "", 0, 0, how))
    times = {**{name: ms for name, (ms, _) in ours.items()}, **loops}
    best = min(ours, key=lambda name: times[name])
    for name, ms in times.items():
        share = SPEED.flops / ms / 1e9 / peak if peak > 0 else -1.0
        how = f"{ms:.2f} ms a step" + (f", MFU {100 * share:.1f} %" if peak > 0 else "")
        rows.append(Row(f"{name}: speed", tokens / ms * 1e3, "tokens/s", how=how))
    for name, ms in loops.items():
        rows.append(Row(f"{best}: step / {name}", times[best] / ms, "x", *_goal(1.0, 0.95)))
    return rows


def _arguments(root: Path, *, steps: int) -> list[str]:
    arguments = overrides(SPEED, precision="auto", threads=1, steps=steps, root=root)
    arguments.remove("logger.wandb.mode=offline")
    return [*arguments, "logger=[llmc,jsonl]"]


def _runner_ms(more: list[str]) -> tuple[float, Probe]:
    """Return the median step of a real session and what was seen in it."""
    folder = FOLDER / "gpu" / f"speed{len(more)}"
    s = session([*_arguments(folder.parent, steps=WARM + TIMED + 6), *more], folder=folder)
    probe = s.emitter.loggers["probe"] = Probe()
    train(s)
    return _finish(s, probe)


def _finish(s: Any, probe: Probe) -> tuple[float, Probe]:
    s.stream.close()
    s.store.close()
    s.emitter.close("finished")
    s.engine.close()
    torch.set_deterministic_debug_mode("default")
    steps = [1e3 * (b - a) for a, b in zip(probe.stamps, probe.stamps[1:], strict=False)]
    return statistics.median(steps[WARM + 5 :]), probe  # behind the steps in which syncs were counted


def _loop_ms(*, fused: bool, compiled: bool, read_loss: bool = False) -> float:
    """Return the median step of a bare bf16 loop; `read_loss` each step, as nanoGPT's log line does."""
    torch.manual_seed(0)
    model: Any = PlainModel(SPEED).to(DEVICE)
    optimizer = torch.optim.AdamW(decayed(model), lr=6e-4, betas=(0.9, 0.95), fused=fused)
    parameters = list(model.parameters())
    model = torch.compile(model) if compiled else model
    batches = _on_device(random_windows(SPEED))
    stamps = []
    for _ in range(WARM + TIMED):
        x, y = next(batches)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if read_loss:
            loss.item()
        elif ON_GPU:
            torch.cuda.current_stream().synchronize()
        stamps.append(time.perf_counter())
    return statistics.median(1e3 * (b - a) for a, b in zip(stamps[WARM:], stamps[WARM + 1 :], strict=False))


def _on_device(draw: Callable[[], Any]) -> Iterator[Any]:
    while True:
        x, y = draw()
        if ON_GPU:
            x, y = (t.pin_memory().to(DEVICE, non_blocking=True) for t in (x, y))
        yield x, y


def _checkpoint() -> list[Row]:
    """Save every eighth step; compare the time that training lost with a step."""
    folder = FOLDER / "gpu" / "checkpoint"
    arguments = _arguments(folder.parent, steps=WARM + 24)
    arguments.remove("checkpoint.every=0")
    s = session([*arguments, "checkpoint.every=8", "checkpoint.keep=1"], folder=folder)
    probe = s.emitter.loggers["probe"] = Probe()
    train(s)
    usual, _ = _finish(s, probe)
    blocked = statistics.median(saved.blocked_ms for saved in probe.saved[:-1])
    size = probe.saved[0].bytes / 1e9
    how = f"{size:.2f} GB; blocked {blocked:.1f} ms, a step {usual:.1f} ms"
    return [Row("checkpoint: stall / a step", blocked / usual, "x", *_goal(1.0, 0.1), how)]


def _goal(must: float, want: float) -> tuple[float | None, float | None]:
    """Return a goal of a GPU; tiny sizes on a CPU have none."""
    return (must, want) if ON_GPU else (None, None)


if __name__ == "__main__":
    main()
