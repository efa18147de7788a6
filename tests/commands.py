"""Start the product as a person does, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SMALL = [
    *("model.layers=2", "model.heads=2", "model.width=32", "train.seq_len=16", "train.micro_batch=2"),
    *("train.steps=40", "optimizer.lr=1e-2", "scheduler.warmup_steps=4", "checkpoint.every=7"),
    *("evaluate=val", "evaluate.val.every=10", "evaluate.val.batches=2", "logger=[llmc,jsonl]"),
    *("run.plot=false", "run.threads=1"),
]
"""A run of a second: enough of everything to be worth interrupting."""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "WANDB_MODE": "offline"}


def start(*arguments: str, cwd: Path, module: str = "runner") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=heard,
    )


def heard() -> None:
    """Hear SIGHUP again in a new process: the tests may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run(*arguments: str, cwd: Path, module: str = "runner", code: int = 0) -> str:
    """Run to the end, check the exit code and return what was printed."""
    process = start(*arguments, cwd=cwd, module=module)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == code, f"exit {process.returncode}, expected {code}:\n{printed}"
    return printed


def kill_when(process: subprocess.Popen[str], log: Path, *, lines: int, delay_s: float) -> bool:
    """SIGKILL `process` once `log` has `lines` lines and `delay_s` more; False if it ended before."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.is_file() and log.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.001)
    time.sleep(delay_s)
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return not ended
