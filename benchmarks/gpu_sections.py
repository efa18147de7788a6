"""What `gpu_check` measures, one section to a process: what one of them breaks, the others do not see."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import resource
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import exactness, gpu_parity
from benchmarks.bare import PlainModel, decayed, random_windows
from benchmarks.in_process import session
from benchmarks.results import Row
from benchmarks.workloads import FOLDER, WORKLOADS, Workload, overrides
from runner.api import Saved, TrainStep
from runner.flops import peak_tflops
from runner.train import train

GPT2_124M = Workload(12, 12, 768, 1024, 32, 50304)
WATCHED = 4  # steps whose host syncs are counted
PARITY_STEPS = 8


class Scale(NamedTuple):
    """What is measured, and how long."""

    device: torch.device
    workload: Workload
    small: str  # workload of checks that need no size
    warm: int
    timed: int


@functools.cache
def scale() -> Scale:
    """Return sizes for this machine: tiny ones on a CPU, to see that everything runs."""
    if torch.cuda.is_available():
        return Scale(torch.device("cuda"), GPT2_124M, "S", warm=8, timed=24)
    return Scale(torch.device("cpu"), WORKLOADS["tiny"], "tiny", warm=2, timed=4)


def on_gpu() -> bool:
    """Whether there is a GPU to measure."""
    return scale().device.type == "cuda"


class Report:
    """Rows and figures as they come: a line of JSON each, so that what was found outlives what follows."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def row(self, row: Row) -> None:
        """Add a row of the table."""
        self._write({"row": row._asdict()})

    def figure(self, name: str, value: Any) -> None:
        """Add a figure that another section is compared with."""
        self._write({"figure": [name, value]})

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Probe:
    """A logger that notes losses and when steps end, and counts syncs of the steps in the middle."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.losses: list[float] = []
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
        self.losses.append(event.loss)
        if on_gpu() and event.step == scale().warm:
            self._caught = self._stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if on_gpu() and event.step == scale().warm + WATCHED:
            torch.cuda.set_sync_debug_mode("default")
            self.syncs = [f"{w.filename}:{w.lineno}" for w in self._caught if "synchroniz" in str(w.message)]
            self._stack.close()

    def open(self, run: Any) -> None:
        """Do nothing."""

    def close(self, status: str) -> None:
        """Do nothing."""

    @property
    def step_ms(self) -> float:
        """The median step behind those in which syncs were counted."""
        steps = [1e3 * (b - a) for a, b in zip(self.stamps, self.stamps[1:], strict=False)]
        return statistics.median(steps[scale().warm + WATCHED + 1 :])


# ---------------------------------------------------------------- sections


def kernels(report: Report) -> None:
    """Compare every kernel with its definition."""
    for row in gpu_parity.measure(scale().device):
        report.row(row)


def steps(report: Report, *, name: str, more: Sequence[str] = ()) -> None:
    """Time a real session's steps; count its syncs; look at its memory."""
    probe = _ran(_arguments(steps=scale().warm + scale().timed + WATCHED + 2), more, folder=name)
    how = "no GPU: nothing to count"
    if on_gpu():
        how = f"of {WATCHED} steps; " + "; ".join(sorted(set(probe.syncs))[:4])
    report.row(Row(f"{name}: host syncs outside readback", float(len(probe.syncs)), "", 0, 0, how))
    _speed(report, name, probe.step_ms)
    report.figure(f"losses {name}", probe.losses)


def loops(report: Report) -> None:
    """Time bare loops of the same model."""
    kinds: dict[str, dict[str, bool]] = {"torch eager": {"fused": True, "compiled": False}}
    if on_gpu():
        kinds["torch.compile"] = {"fused": True, "compiled": True}
    kinds["nanoGPT-style"] = {"fused": on_gpu(), "compiled": on_gpu(), "read_loss": True}
    for name, how in kinds.items():
        _speed(report, name, _loop_ms(**how))


def losses(report: Report) -> None:
    """Train the same few fp32 steps on this device and on a CPU."""
    found = {}
    for device in ("cpu", scale().device.type):
        usual = overrides(
            WORKLOADS[scale().small], precision="fp32", threads=1, steps=PARITY_STEPS, root=FOLDER / "gpu"
        )
        usual.remove("logger.wandb.mode=offline")
        usual += ["logger=[llmc]", f"run.device={device}", "precision.tf32=false"]
        found[device] = _ran(usual, [], folder=f"parity-{device}").losses
    theirs, ours = found["cpu"], found[scale().device.type]
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    how = f"{PARITY_STEPS} steps in fp32, the largest relative difference"
    report.row(Row("loss: this device / CPU - 1", worst, "", 1e-3, 1e-5, how))


def bits(report: Report, *, name: str, more: Sequence[str] = (), again: bool = True) -> None:
    """Train in processes of their own: whole, again, interrupted and resumed."""
    root = FOLDER / "gpu" / f"bits-{name}".replace(" ", "-")
    run = functools.partial(exactness.run, scale().small, root, threads=1, arguments=more)
    whole = run("whole")
    report.figure(f"bits {name}", whole)
    if again:
        report.row(_equal(f"{name}: two runs: bits differ", run("again"), whole))
    run("resumed", stop=exactness.HALF)
    report.row(_equal(f"{name}: interrupted and resumed: bits differ", run("resumed"), whole))


def checkpoint(report: Report) -> None:
    """Save every eighth step; compare the time that training lost with a step."""
    usual = _arguments(steps=scale().warm + 24)
    usual.remove("checkpoint.every=0")
    probe = _ran(usual, ["checkpoint.every=8", "checkpoint.keep=1"], folder="checkpoint")
    blocked = statistics.median(saved.blocked_ms for saved in probe.saved[:-1])
    size = probe.saved[0].bytes / 1e9
    how = f"{size:.2f} GB; blocked {blocked:.1f} ms, a step {probe.step_ms:.1f} ms"
    goals = (1.0, 0.1) if on_gpu() else (None, None)
    report.row(Row("checkpoint: stall / a step", blocked / probe.step_ms, "x", *goals, how))


def fp8(report: Report) -> None:
    """Time the runner in fp8 where the hardware has it; elsewhere see that the emulation runs."""
    if importlib.util.find_spec("torchao") is None:
        report.row(Row("runner, fp8: left out", float("nan"), "", how="torchao is not installed"))
        return
    if on_gpu() and torch.cuda.get_device_capability() < (8, 9):
        report.row(Row("runner, fp8: left out", float("nan"), "", how="this GPU has no fp8"))
        return
    more = ["precision=fp8", *(["run.compile=blocks"] if on_gpu() else ["precision.fp8_emulate=true"])]
    steps(report, name="runner, fp8", more=more)


# ---------------------------------------------------------------- how


def _arguments(*, steps: int) -> list[str]:
    usual = overrides(scale().workload, precision="auto", threads=1, steps=steps, root=FOLDER / "gpu")
    usual.remove("logger.wandb.mode=offline")
    return [*usual, "logger=[llmc,jsonl]"]


def _ran(usual: Sequence[str], more: Sequence[str], *, folder: str) -> Probe:
    """Train a session to its end and return what was seen in it."""
    place = FOLDER / "gpu" / folder.replace(" ", "-").replace(",", "")
    shutil.rmtree(place, ignore_errors=True)
    s = session([*usual, *more], folder=place)
    probe = s.emitter.loggers["probe"] = Probe()
    train(s)
    s.stream.close()
    s.store.close()
    s.emitter.close("finished")
    s.engine.close()
    torch.set_deterministic_debug_mode("default")
    shutil.rmtree(place, ignore_errors=True)
    return probe


def _speed(report: Report, name: str, step_ms: float) -> None:
    workload = scale().workload
    tokens = workload.batch * workload.seq_len
    peak = peak_tflops(torch.cuda.get_device_name(), "bf16") if on_gpu() else -1.0
    share = workload.flops / step_ms / 1e9 / peak if peak > 0 else -1.0
    how = f"{step_ms:.2f} ms a step" + (f", MFU {100 * share:.1f} %" if peak > 0 else "")
    report.figure(f"ms {name}", step_ms)
    report.row(Row(f"{name}: speed", tokens / step_ms * 1e3, "tokens/s", how=how))
    if on_gpu():
        gib, how = torch.cuda.max_memory_reserved() / 2**30, "reserved on the GPU"
    else:
        gib, how = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "of the process"
    report.row(Row(f"{name}: peak memory", gib, "GiB", how=how))


def _equal(what: str, ours: str, theirs: str) -> Row:
    return Row(what, float(ours != theirs), "", 0, 0, "losses and weights, 0 = equal")


def _loop_ms(*, fused: bool, compiled: bool, read_loss: bool = False) -> float:
    """Return the median step of a bare bf16 loop; `read_loss` each step, as nanoGPT's log line does."""
    torch.manual_seed(0)
    device = scale().device
    if on_gpu():
        torch.compiler.reset()  # it may hold the model of the loop before
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model: Any = PlainModel(scale().workload).to(device)
    optimizer = torch.optim.AdamW(decayed(model), lr=6e-4, betas=(0.9, 0.95), fused=fused)
    parameters = list(model.parameters())
    model = torch.compile(model) if compiled else model
    batches = _on_device(random_windows(scale().workload))
    stamps = []
    for _ in range(scale().warm + scale().timed):
        x, y = next(batches)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if read_loss:
            loss.item()
        elif on_gpu():
            torch.cuda.current_stream().synchronize()
        stamps.append(time.perf_counter())
    warm = scale().warm
    return statistics.median(1e3 * (b - a) for a, b in zip(stamps[warm:], stamps[warm + 1 :], strict=False))


def _on_device(draw: Callable[[], Any]) -> Iterator[Any]:
    while True:
        x, y = draw()
        if on_gpu():
            x, y = (t.pin_memory().to(scale().device, non_blocking=True) for t in (x, y))
        yield x, y
