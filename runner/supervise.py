"""Start one process per rank on this machine, and end them together."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from runner.cli import ConfigError
from runner.launch import Outcome, RankError
from runner.ranks import Place
from runner.stop import Interrupted, give_back, handled, heed, held_back
from runner.watchdog import HANG_CODE
from runner.worker import Order, Report

GRACE_S = 5.0  # for the others to notice a rank's end and close their files, before they are killed
_POLL_S = 0.02
_TAIL = 200  # lines kept of what a silent rank wrote to standard error

Config = dict[str, Any]


class Rank:
    """A rank's process: its exit, its report and the end of what it wrote to standard error."""

    def __init__(self, order: Order, *, environment: dict[str, str], inherit: Sequence[int]) -> None:
        self.number = order.place.rank
        self.gone_at: float | None = None
        self.killed = False
        self._report: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `report`)
        self._tail: deque[str] = deque(maxlen=_TAIL)
        first = self.number == 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", _start_here()],
            stdin=subprocess.PIPE,
            stdout=None if first else subprocess.DEVNULL,
            stderr=None if first else subprocess.PIPE,
            env=environment,
            pass_fds=[self._report.fileno(), *inherit],
            process_group=0,  # a terminal's Ctrl-C must reach a rank once, and from here
        )
        self._reader = threading.Thread(target=self._read_tail, daemon=True)
        self._reader.start()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            pickle.dump(order._replace(report=self._report.fileno()), stdin)

    def ended(self) -> bool:
        """Whether the process is gone; notes when that was seen."""
        if self.gone_at is None and self.process.poll() is not None:
            self.gone_at = time.monotonic()
        return self.gone_at is not None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        if not self.ended():
            self.killed = True
            self.process.kill()
            self.process.wait()
            self.gone_at = time.monotonic()

    def report(self) -> Report | None:
        """Return what the rank had to say; None if it could not say anything any more."""
        self._report.seek(0)
        try:
            return Report(*pickle.load(self._report))
        except (EOFError, pickle.UnpicklingError):
            return None

    def tail(self) -> str:
        self._reader.join(timeout=1)
        return "".join(self._tail)

    def _read_tail(self) -> None:
        if self.process.stderr is not None:
            for line in self.process.stderr:
                self._tail.append(line.decode(errors="replace"))


def run_ranks(config: Config, *, dir: Path, processes: int) -> Outcome:
    """Run a checked configuration on `processes` ranks of this machine; return rank 0's outcome.

    Raises:
        ConfigError: the folder or the data forbid this run.
        Interrupted: a signal came before anything was trained.
        RankError: a rank ended otherwise; the others have been ended too.
    """
    with _listening() as sock:
        ranks: list[Rank] = []
        with _forwarded(ranks) as received:
            try:
                with held_back():  # a signal reaches every rank or, before there are any, none
                    for number in range(processes):
                        ranks.append(_start(config, dir=dir, number=number, world=processes, sock=sock))
                _wait(ranks)
            finally:
                for rank in ranks:
                    rank.kill()
        return _conclude(ranks, received=received)


def _start(config: Config, *, dir: Path, number: int, world: int, sock: socket.socket) -> Rank:
    address, port = sock.getsockname()
    place = Place(rank=number, world=world, local_rank=number, address=address, port=port)
    listening = sock.fileno() if number == 0 else None
    order = Order(config, dir, place, os.getpid(), listening, report=-1)
    inherit = [] if listening is None else [listening]
    return Rank(order, environment=_environment(config, world=world), inherit=inherit)


def _environment(config: Config, *, world: int) -> dict[str, str]:
    """Return a rank's environment: its share of the cores, and traffic that stays on this machine."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    threads = max(1, len(os.sched_getaffinity(0)) // world) if hasattr(os, "sched_getaffinity") else 1
    share = {} if config["run"]["threads"] is not None else {"OMP_NUM_THREADS": str(threads)}
    return {**loopback, **share, **os.environ}


def _start_here() -> str:
    """Return a program that finds this package where this process found it, and runs a rank."""
    return f"import sys; sys.path[:] = {sys.path!r}; from runner.worker import main; main()"


@contextlib.contextmanager
def _listening() -> Iterator[socket.socket]:
    """Yield a bound socket for rank 0's store: MASTER_PORT if it is set, else a free port of the system's."""
    port = os.environ.get("MASTER_PORT", "0")
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                [f"MASTER_PORT: cannot listen on {port} ({error}); unset it or free the port"]
            ) from error
        sock.listen(128)
        yield sock


@contextlib.contextmanager
def _forwarded(ranks: list[Rank]) -> Iterator[list[int]]:
    """Pass each signal on to every rank; yield the list of those that came."""
    received: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        received.append(number)
        for rank in ranks:
            rank.signal(number)

    heed()
    previous: dict[int, Any] = {number: signal.signal(number, forward) for number in handled()}
    try:
        yield received
    finally:
        give_back(previous)


def _wait(ranks: list[Rank]) -> None:
    """Return when all ranks are gone, or `GRACE_S` after the first one failed."""
    deadline = float("inf")
    while time.monotonic() < deadline:
        running = [rank for rank in ranks if not rank.ended()]  # asks every one: when each went is noted
        if not running:
            return
        if deadline == float("inf") and any(rank.ended() and _failed(rank) for rank in ranks):
            deadline = time.monotonic() + GRACE_S
        time.sleep(_POLL_S)


def _failed(rank: Rank) -> bool:
    report = rank.report()
    return report is None or report.kind != "outcome"


def _conclude(ranks: list[Rank], *, received: list[int]) -> Outcome:
    failed = [rank for rank in ranks if _failed(rank) and not rank.killed]
    if not failed:
        report = ranks[0].report()
        assert report is not None and report.outcome is not None  # noqa: PT018
        return report.outcome
    cause = min(failed, key=_blame)
    report, code = cause.report(), cause.process.returncode
    name = f"rank {cause.number} of {len(ranks)}"
    if report is not None and report.kind == "config":
        raise ConfigError(report.lines)
    if report is not None and report.kind == "interrupted":
        raise Interrupted(report.signal)
    if len(received) > 1 and code == 128 + received[-1]:
        text = "stopped at once by a second signal; the newest complete checkpoint counts"
        raise RankError(text, trace="", code=code)
    if report is not None:
        trace = cause.tail() + report.trace if report.trace else ""
        raise RankError(f"{name} failed: {report.lines[0]}", trace=trace, code=1)
    trace = "".join(rank.tail() for rank in failed)
    if code == HANG_CODE:
        text = f"{name} made no progress and was ended; the stacks are above{_silent(ranks)}"
        raise RankError(text, trace=trace, code=code)
    raise RankError(f"{name} {_death(code)}", trace=trace, code=1)


def _silent(ranks: list[Rank]) -> str:
    """Return which ranks of a hung run had to be killed: the others may have waited for them alone."""
    numbers = ", ".join(str(rank.number) for rank in ranks if rank.killed)
    return f"; no word from rank {numbers}, which was killed: stopped, or still at work" if numbers else ""


def _blame(rank: Rank) -> tuple[bool, float]:
    """Return whether a rank failed only because another was gone, and when: the least is the cause.

    One that could not report was noticed late, and before its peers noticed.
    """
    report = rank.report()
    assert rank.gone_at is not None
    return (False, rank.gone_at - 1.0) if report is None else (report.follows, report.at)


def _death(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code} without a word"
    hint = {signal.SIGKILL: " (out of memory? see dmesg)", signal.SIGSEGV: " (a bug in compiled code)"}
    name = signal.Signals(-code).name
    return f"was killed by {name}{hint.get(signal.Signals(-code), '')}; the newest complete checkpoint counts"
