"""One rank's life: settle the process, open the session, train, close, report how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Literal

import torch

from runner import closing, manifest
from runner.assembly import Process, choose_device
from runner.checkpoint.folder import done_steps
from runner.cli import ConfigError
from runner.launch import Outcome
from runner.opening import open_session
from runner.progress import DivergedError
from runner.ranks import ALONE, Place, join, meet
from runner.session import Session
from runner.stop import PREEMPTION, Stop, heed
from runner.train import train
from runner.watchdog import Watchdog

log = logging.getLogger(__name__)

Config = dict[str, Any]
Status = Literal["finished", "stopped", "failed"]
_REQUEUE_S = 60


def run_rank(
    config: Config, *, dir: Path, place: Place = ALONE, store: Any = None, listening: int | None = None
) -> Outcome:
    """Train one rank of a checked configuration in `dir`.

    Several ranks meet in `store`, made here if it is not given; `listening` is the socket for it.

    Raises:
        ConfigError: what the run folder or the data hold forbids this run; nothing was changed.
        Interrupted: a signal came before this.
    """
    settle_process(config["run"])
    heed()
    stop = Stop()
    watchdog = Watchdog(config["run"]["watchdog_s"], folder=dir, rank=place.rank)
    stop.install()
    watchdog.start()
    try:
        session = _open(config, dir=dir, place=place, store=store, listening=listening, ends=(stop, watchdog))
        return_freed_memory()
        gc.freeze()  # what is there now stays: no collection during training has to walk over it
        gc.enable()
        outcome = _train(session, config)
    finally:
        watchdog.stop()
        stop.restore()
    if outcome.status == "stopped":
        _after_stop(stop, config["run"]["requeue"] if place.rank == 0 else None)
    return outcome


def _open(
    config: Config,
    *,
    dir: Path,
    place: Place,
    store: Any,
    listening: int | None,
    ends: tuple[Stop, Watchdog],
) -> Session:
    try:
        device = choose_device(config["run"]["device"], local_rank=place.local_rank)
        if place.world > 1:
            join(place, store or meet(place, listening=listening), device=device)
        return open_session(config, dir=dir, process=Process(place.rank, place.world, device, *ends))
    except ValueError as error:
        if "RUNNER_TRACEBACK" in os.environ:
            raise
        raise ConfigError(str(error).splitlines()) from error


def _train(s: Session, config: Config) -> Outcome:
    status: Status = "failed"
    code, message, began = 1, "", s.progress.step
    try:
        if s.progress.step < s.plan.steps:
            train(s)
        status, code, message = _verdict(s)
    except DivergedError as error:
        message = str(error)
        s.progress.val_loss = float("inf")
    except BaseException as error:
        _close_alone(s)
        if steps := done_steps(s.dir):
            where = f"the checkpoint of step {steps[-1]} (with run.name={s.dir.name})"
            error.add_note(f"the same command goes on from {where}")
        raise
    if lacking := _close(s, status):
        status, code = ("failed", 1) if status == "finished" else (status, code)
        message = message or f"the record is not complete: logger.{', logger.'.join(lacking)} (see above)"
    outcome = Outcome(s.dir, status, code, s.progress.step, s.progress.val_loss, message)
    if s.engine.rank == 0 and began < s.plan.steps:
        _note_end(outcome)
    if s.engine.rank == 0 and (s.progress.step or status != "stopped"):
        closing.report(s, config, outcome)
    return outcome


def _note_end(outcome: Outcome) -> None:
    try:
        manifest.end_session(outcome.dir, status=outcome.status, step=outcome.step)
    except (ValueError, OSError) as error:  # the record itself is complete, or was told not to be
        log.warning("manifest.json does not say how the run ended: %s", error)


def _verdict(s: Session) -> tuple[Status, int, str]:
    """Return how the run ended, its exit code, and what a person has to do about it."""
    step, stopped = s.progress.step, s.progress.step < s.plan.steps
    lost = s.store.lacks(step, stopped=stopped)
    message = (
        f"the checkpoint of step {step} could not be written (see above); once that is mended, the same "
        "command goes on from the last one that was"
    )
    if stopped:
        s.stop.agree(s.engine.gather)
        return "stopped", s.stop.code, message if lost and step else ""
    return ("failed", 1, message) if lost else ("finished", 0, "")


def _close(s: Session, status: Status) -> list[str]:
    """Complete what is under way and close every part; all ranks together.

    Returns the loggers of the record that could not write all of it (rank 0).
    """
    s.watchdog.beat("closing")
    s.emit_quietly(s.readback.drain())
    s.stream.close()
    for evaluator in s.evaluators.values():
        getattr(evaluator, "close", bool)()
    s.emit_quietly(s.store.close())
    s.engine.barrier()
    s.engine.close()
    if s.engine.world > 1:
        torch.distributed.destroy_process_group()
    s.watchdog.beat("closing the loggers")
    return s.emitter.close(status)


def _close_alone(s: Session) -> None:
    """Close what can be closed without the other ranks, which may be gone."""
    with contextlib.suppress(Exception):
        s.emit_quietly(s.readback.drain())
    with contextlib.suppress(Exception):
        s.stream.close()
    if s.engine.world == 1:
        with contextlib.suppress(Exception):
            s.emit_quietly(s.store.close())
    s.emitter.close("failed")


def _after_stop(stop: Stop, requeue: str | None) -> None:
    """Have the scheduler start the run again, if it was a scheduler's signal that stopped it."""
    if requeue is not None and stop.signal in PREEMPTION:
        done = subprocess.run(requeue, shell=True, timeout=_REQUEUE_S, capture_output=True, text=True)
        said = " ".join((done.stdout + done.stderr).split())
        if done.returncode:
            log.error("run.requeue: %r failed with %d (%s); requeue by hand", requeue, done.returncode, said)
        else:
            log.info("run.requeue: %r done %s", requeue, said)
    stop.pass_on()


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


def return_freed_memory() -> None:
    """Give back what building the model needed for a while: a second copy of the weights."""
    if platform.libc_ver()[0] == "glibc":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
