"""One rank's life: settle the process, open the session, train, close, report how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
from pathlib import Path
from typing import Any, Literal

import torch

from runner import closing
from runner.cli import ConfigError
from runner.launch import Outcome
from runner.opening import open_session
from runner.session import DivergedError, Session
from runner.stop import Stop
from runner.train import train

Config = dict[str, Any]


def run_rank(config: Config, *, dir: Path, rank: int, world: int) -> Outcome:
    """Train one rank of a checked configuration in `dir`.

    Raises:
        ConfigError: what the run folder or the data hold forbids this run; nothing was changed.
    """
    settle_process(config["run"])
    stop = Stop()
    stop.install()
    try:
        try:
            session = open_session(config, dir=dir, rank=rank, world=world, stop=stop)
        except ValueError as error:
            if "RUNNER_TRACEBACK" in os.environ:
                raise
            raise ConfigError(str(error).splitlines()) from error
        gc.freeze()  # what is there now stays: no collection during training has to walk over it
        gc.enable()
        return _train(session, config)
    finally:
        stop.restore()


def _train(s: Session, config: Config) -> Outcome:
    status: Literal["finished", "stopped", "failed"] = "failed"
    code, message = 1, ""
    try:
        if s.progress.step < s.plan.steps:
            train(s)
        status, code = ("stopped", s.stop.code) if s.progress.stopped else ("finished", 0)
        if s.progress.step >= s.plan.steps:
            status, code = "finished", 0
    except DivergedError as error:
        message = str(error)
        s.progress.val_loss = float("inf")
    finally:
        with contextlib.suppress(Exception):
            s.emitter(s.readback.drain())
        s.stream.close()
        s.emit_quietly(s.store.close())
        s.emitter.close(status)
        s.engine.close()
    outcome = Outcome(s.dir, status, code, s.progress.step, s.progress.val_loss, message)
    if s.engine.rank == 0:
        closing.report(s, config, outcome)
    return outcome


def settle_process(run: Config) -> None:
    """Set what the bits of a run depend on, before anything is computed: threads, algorithms, allocator."""
    if run["threads"] is not None:
        torch.set_num_threads(run["threads"])
    if run["deterministic"]:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        if run["compile"]:
            torch.use_deterministic_algorithms(True)
        else:  # the same without importing the compiler, which takes longer than the rest of the start
            torch.set_deterministic_debug_mode("error")
        # Strict mode would fill every new tensor with nan, which costs a pass over memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free instead of unmapping it: page faults cost up to 30 % of a step."""
    if platform.libc_ver()[0] != "glibc":
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, -1)
        mallopt(m_top_pad, 64 << 20)
