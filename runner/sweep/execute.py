"""Run a sweep's cells: as many at a time as there are slots, each in its process, come what may."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from runner.rules import processes
from runner.stop import give_back, handled, heed
from runner.sweep import cells
from runner.sweep.cells import Cell, Result
from runner.sweep.plan import placed
from runner.sweep.pool import Ended, Pool
from runner.sweep.settings import Sweep
from runner.sweep.slots import Slot, make_slots
from runner.sweep.tell import Teller

_POLL_S = 0.5


class Source(Protocol):
    """Says which cell is next, and hears how each ended."""

    def take(self) -> Cell | None:
        """Return the next cell; None if there is none now."""

    def ended(self, cell: Cell, result: Result) -> Result:
        """Hear how a cell ended; return the result as it stands."""

    def unwanted(self, running: Iterable[Cell]) -> list[int]:
        """Return the numbers of running cells that need not go on."""


class Listed:
    """Cells known beforehand, in order."""

    def __init__(self, listed: Sequence[Cell]) -> None:
        self._left = list(listed)

    def take(self) -> Cell | None:
        """Return the next cell; None after the last."""
        return self._left.pop(0) if self._left else None

    def ended(self, cell: Cell, result: Result) -> Result:
        """Keep the result as it is."""
        return result

    def unwanted(self, running: Iterable[Cell]) -> list[int]:
        """Want every cell to its end."""
        return []


@dataclass(frozen=True)
class Place:
    """Where a sweep is and how its cells are run."""

    folder: Path
    settings: Sweep
    lock: int  # descriptor that every process of the sweep holds open

    @property
    def name(self) -> str:
        """Return the sweep's name, which groups its cells."""
        return self.folder.name


@dataclass(frozen=True)
class Ran:
    """The results of this command by cell number, and the signal that stopped it, if one did."""

    results: dict[int, Result]
    signal: int | None = None


@dataclass
class _Running:
    cell: Cell
    slot: Slot
    started_s: float
    attempt: int = 1
    unwanted: bool = False


def execute(source: Source, *, place: Place, tell: Teller, config: Mapping[str, Any]) -> Ran:
    """Run what `source` has to offer; `config` is that of any cell, for what cells share."""
    with Pool(preload=preload(config), keep_open=place.lock) as pool, Interrupts() as interrupts:
        return _Execution(source, place, tell, pool, interrupts, processes(dict(config)), config).run()


class _Execution:
    def __init__(
        self,
        source: Source,
        place: Place,
        tell: Teller,
        pool: Pool,
        interrupts: Interrupts,
        ranks: int,
        config: Mapping[str, Any],
    ) -> None:
        self._source, self._place, self._tell = source, place, tell
        self._pool, self._interrupts = pool, interrupts
        self._free = make_slots(place.settings, config, processes=ranks)[::-1]
        self._running: dict[int, _Running] = {}
        self._results: dict[int, Result] = {}
        self._stopping = False
        self._signals_passed = 0

    def run(self) -> Ran:
        while True:
            self._fill()
            if not self._running:
                return Ran(self._results, self._interrupts.signal)
            for ended in self._pool.wait(_POLL_S):
                self._settle(ended)
            for number in self._source.unwanted([r.cell for r in self._running.values()]):
                if not self._running[number].unwanted:
                    self._running[number].unwanted = True
                    self._pool.signal(number, signal.SIGTERM)
            self._pass_on_signals()

    def _fill(self) -> None:
        while self._free and not self._stopping and not self._interrupts.count:
            cell = self._source.take()
            if cell is None:
                return
            done = finished(cell)
            if done is not None:
                self._results[cell.number] = self._source.ended(cell, done)
                self._tell.skipped()
                continue
            self._start(_Running(cell, self._free.pop(), time.monotonic()))

    def _start(self, running: _Running) -> None:
        cell = running.cell
        threads = _threads_before(cell, running.slot.threads)
        config = placed(cell, root=self._place.folder, group=self._place.name, threads=threads)
        if running.attempt == 1:
            cells.write_cell(replace(cell, config=config))
        (cell.folder / "result.json").unlink(missing_ok=True)
        self._running[cell.number] = running
        self._tell.started(cell, attempt=running.attempt)
        log = cell.folder / "console.log"
        self._pool.start(cell.number, config=config, folder=cell.folder, log=log, env=running.slot.env)

    def _settle(self, ended: Ended) -> None:
        running = self._running.pop(ended.number)
        cell = running.cell
        result = read_end(cell, ended.code, unwanted=running.unwanted)
        retry = result.status == "failed" and running.attempt <= self._place.settings.retries
        if retry and not self._interrupts.count and ended.code != 2:
            self._tell.retried(cell, result)
            self._start(replace(running, attempt=running.attempt + 1))
            return
        self._free.append(running.slot)
        result = cells.with_seconds(result, time.monotonic() - running.started_s)
        result = self._source.ended(cell, result)
        if result.status != "stopped":
            cells.write_result(cell.folder, result)
        self._results[cell.number] = result
        self._tell.ended(cell, result, seconds=result.seconds)
        if result.failed and self._place.settings.on_error == "stop":
            self._stopping = True

    def _pass_on_signals(self) -> None:
        if self._interrupts.count <= self._signals_passed:
            return
        self._signals_passed = self._interrupts.count
        self._tell.interrupted(len(self._running), again=self._signals_passed > 1)
        number = signal.SIGTERM if self._signals_passed == 1 else signal.SIGKILL
        for cell_number in self._running:
            self._pool.signal(cell_number, number)


def finished(cell: Cell) -> Result | None:
    """Return the result of a cell that need not run again; None if it has to."""
    result = cells.read_result(cell.folder)
    if result is None or result.status not in cells.DONE or cell.config["run"]["overwrite"]:
        return None
    extended = result.status == "finished" and result.step < cell.config["train"]["steps"]
    return None if extended else result


def read_end(cell: Cell, code: int, *, unwanted: bool) -> Result:
    """Return how a cell ended that has just gone: what it wrote down, or what its exit code says."""
    result = cells.read_result(cell.folder)
    if result is not None:
        return result
    step, val_loss = cells.last_progress(cell.folder)
    if unwanted and not math.isnan(val_loss):
        return Result("pruned", code, step, val_loss)
    if code >= 128:
        return Result("stopped", code, step, val_loss, message="stopped; the same command continues it")
    if code < 0:
        name = signal.Signals(-code).name
        return Result("failed", code, step, message=f"killed by {name} after step {step}")
    return Result("failed", code or 1, step, message=f"ended with exit code {code} and no result")


def preload(config: Mapping[str, Any]) -> list[str]:
    """Return the modules that cells like this one import."""
    found = ["torch", "runner.job", "runner.sweep.process"]
    if config["run"]["plot"]:
        found.append("runner.report")
    stack = list(config.values())
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            stack += node.values()
            target = node.get("_target_")
            found += [str(target).rpartition(".")[0]] if target else []
    return list(dict.fromkeys(found))


def _threads_before(cell: Cell, threads: int | None) -> int | None:
    """Keep the thread count that an interrupted cell began with: its bits may depend on it."""
    before = cells.read_cell(cell.folder)
    if before is None or cell.config["run"]["overwrite"]:
        return threads
    kept: int | None = before["config"]["run"]["threads"]
    return kept


class Interrupts:
    """Count signals while a sweep runs: the first stops it gently, the second at once."""

    def __init__(self) -> None:
        self.count = 0
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        heed()
        for number in handled():
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        give_back(self._previous)

    def _note(self, number: int, _frame: object) -> None:
        self.count += 1
        self.signal = self.signal or number
