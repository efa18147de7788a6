"""Save, find and restore a run's checkpoints so that a crash at any instant loses at most one interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge

from runner.api import Event, Note, Removed, Snapshot
from runner.checkpoint import disk, load, side_file
from runner.checkpoint import folder as files
from runner.checkpoint.background import Background
from runner.checkpoint.flight import Flight, Together, attempt
from runner.checkpoint.host_copies import HostCopies
from runner.checkpoint.job import check_format, make_job, short_of_space
from runner.checkpoint.pieces import Pieces
from runner.checkpoint.spare import Spare
from runner.checkpoint.writer import write

BRIEF = 4_000_000
"""Parameters up to which a checkpoint is so quick that `async: auto` completes it before the next update."""


class Restored(NamedTuple):
    """What to go on from; `snapshot` is None on a fresh start.

    `resharded`: the optimizer state was re-cut for this run's ranks, the data stream's state was not.
    """

    snapshot: Snapshot | None
    events: tuple[Event, ...]
    resharded: bool = False


class Store:
    """A run folder's checkpoints, as one rank sees them.

    Every method that all ranks must call together says so. Supplied when built: `dir` the run folder, the
    engine's `rank`, `any_rank` (its `any`: whether any rank raised a flag), `barrier` and `gather`, and
    `fault`, which may delay or fail a write for a drill (`debug.*`).
    """

    def __init__(
        self,
        *,
        every: Annotated[int, Ge(0)],
        keep: Annotated[int, Ge(1)] | None,
        major_every: Annotated[int, Ge(0)],
        resume: Literal["auto", "never", "must"],
        format: Literal["auto", "llmc", "safetensors"],
        allow_reshard: bool,
        strict_env: bool,
        async_: Literal["auto", "on", "off"],
        dir: Path,
        rank: int = 0,
        any_rank: Callable[[bool], bool] = bool,
        barrier: Callable[[], None] = lambda: None,
        gather: Callable[[str | None], list[str | None]] = lambda value: [value],
        fault: Callable[[], None] = lambda: None,
    ) -> None:
        self.every, self.keep, self.major_every = every, keep, major_every
        self.resume, self.format = resume, format
        self.allow_reshard, self.strict_env = allow_reshard, strict_env
        self._async = async_
        self.dir = Path(dir)
        self.rank, self._fault = rank, fault
        self._together = Together(any_rank, barrier, gather)
        self.resumed_step: int | None = None
        self._saved_step: int | None = None
        self._copies, self._spare = HostCopies(), Spare()
        self._flight: Flight | None = None
        self.brief = False
        self._foreign: set[int] = set()

    # ------------------------------------------------------------ when

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after `step` updates: llm.c's rule, and never again what was resumed from."""
        if not self.every or step == self.resumed_step:
            return False
        return last or (step > 0 and step % self.every == 0)

    def lacks(self, step: int, *, stopped: bool) -> bool:
        """Whether a run that ends at `step` should be on the disk and is not; a stopped one always should."""
        return (self.every > 0 or stopped) and step not in (self.resumed_step, self._saved_step)

    def warnings(self) -> list[str]:
        """Return a line if most of the steps that should stay for ever are never saved."""
        if not self.every or not self.major_every or self.keep is None or self.major_every % self.every == 0:
            return []
        both = math.lcm(self.every, self.major_every)
        return [
            f"checkpoint.major_every={self.major_every} is no multiple of checkpoint.every={self.every}: "
            f"only the checkpoints of steps {both}, {2 * both}, ... are kept for ever"
        ]

    # ------------------------------------------------------------ restore

    def resumes(self, *, overwrite: bool) -> bool:
        """Whether `restore` would look for a checkpoint and the folder claims to have one."""
        return not overwrite and self.resume != "never" and bool(files.done_steps(self.dir))

    def restore(self, live: Snapshot, *, overwrite: bool = False) -> Restored:
        """Find what to continue from; `live` is the freshly built run that it must fit. All ranks together.

        ValueError (one line) if the folder is not writable, holds only damaged checkpoints, or a checkpoint
        of another model, optimizer or topology, or if a fresh start would overwrite checkpoints.
        """
        check_format(self.format, live)
        if overwrite and self.resume == "must":
            raise ValueError("run.overwrite=true starts afresh, checkpoint.resume=must continues: choose one")
        side_file.dumps([live.parts, live.env, live.stream])  # fails now rather than at the first checkpoint
        disk.probe(self.dir)
        self._together.barrier()
        if overwrite or self.resume == "never":
            return Restored(None, self._start_fresh(overwrite=overwrite))
        return self._resume(live)

    def _start_fresh(self, *, overwrite: bool) -> tuple[Event, ...]:
        steps = files.require_fresh(self.dir, overwrite=overwrite)
        self._together.barrier()
        if self.rank != 0:
            return ()
        for step in steps:
            files.remove(self.dir, step)
        removed = (Removed(step, str(files.done_path(self.dir, step))) for step in steps)
        return (*removed, *self._clean(0))

    def _resume(self, live: Snapshot) -> Restored:
        events: list[Event] = []
        steps = files.done_steps(self.dir)
        for step in reversed(steps):
            snapshot, problem = load.try_load(
                self.dir, step, live, allow_reshard=self.allow_reshard, strict_env=self.strict_env
            )
            damage = self._together.agree(problem or "unreadable" if snapshot is None else None)
            if damage is not None:
                text = f"checkpoint {step} in {self.dir} is damaged, trying the next older one: {damage}"
                events.append(Note(step, text, "warning"))
                continue
            assert snapshot is not None
            self.resumed_step = step
            events += [Note(step, text, "warning") for text in snapshot.notes]
            return Restored(snapshot.snapshot, (*events, *self._clean(step)), snapshot.resharded)
        if steps:
            reasons = "; ".join(event.text for event in events if isinstance(event, Note))
            raise ValueError(
                f"run.name: no checkpoint in {self.dir} is intact ({reasons}); mend the files, "
                "or start again with run.overwrite=true"
            )
        if self.resume == "must":
            raise ValueError(
                f"checkpoint.resume=must: {self.dir} holds no DONE file; check run.name, "
                "or set checkpoint.resume=auto"
            )
        return Restored(None, self._clean(0))

    def _clean(self, step: int) -> tuple[Event, ...]:
        if self.rank != 0:
            return ()
        return tuple(Note(step, f"{self.dir}: {line}") for line in files.clean(self.dir))

    # ------------------------------------------------------------ save

    def save(self, snapshot: Snapshot) -> list[Event]:
        """Start writing a checkpoint, complete when `before_update` or `join` returns Saved. All together.

        The snapshot's tensors may change after `before_update`, not earlier. A failure is an event, never an
        exception: training goes on.
        """
        events = self.join()
        if snapshot.step in (self.resumed_step, self._saved_step):
            return events  # it is on the disk, and rewriting it would put it at risk
        start = time.perf_counter()
        copied = snapshot.weights.device.type != "cpu"
        held = self._copies.take(snapshot) if copied else snapshot
        job = make_job(held, folder=self.dir, suffix=check_format(self.format, snapshot))
        problem = short_of_space(job, self.dir, ranks=snapshot.world if self.rank == 0 else 1)
        problem = self._together.agree(problem)
        if problem is not None:
            text = f"checkpoint {snapshot.step} not written, the next one is tried: {problem}"
            return [*events, Note(snapshot.step, text, "warning")]
        pieces = Pieces(job.chunks, spare=self._spare, ranks=snapshot.world)
        self._flight = Flight(
            job,
            step=snapshot.step,
            rank=self.rank,
            folder=self.dir,
            together=self._together,
            writing=Background(partial(write, job, pieces, ready=partial(self._ready, copied=copied))),
            release=self._copies.wait_device if copied else pieces.detach,
            retain=self._retain,
        )
        self.brief = self._async == "auto" and sum(slot.numel for slot in snapshot.layout) <= BRIEF
        self._flight.blocked_s = time.perf_counter() - start
        return events + self.join() if self._async == "off" else events

    def _ready(self, *, copied: bool) -> None:
        """Return once the snapshot can be read; runs where the files are written."""
        self._fault()
        if copied:
            self._copies.wait_host()

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._flight is not None

    def before_update(self) -> list[Event]:
        """Make the next update safe; call it before the optimizer's state changes. All ranks together.

        The checkpoint is completed as soon as every rank's writer is done, a brief one here.
        """
        if self._flight is not None and self.brief:
            return self.join()
        return self._land() if self._flight is not None and self._flight.poll() else []

    def join(self) -> list[Event]:
        """Complete the checkpoint in flight, if any. All ranks together."""
        if self._flight is None:
            return []
        self._flight.finish()
        return self._land()

    def close(self) -> list[Event]:
        """Complete what is in flight and release host memory. All ranks together."""
        events = self.join()
        self._copies.close()
        self._spare.close()
        return events

    def _land(self) -> list[Event]:
        flight, self._flight = self._flight, None
        assert flight is not None
        if flight.saved:
            self._saved_step = flight.step
        return flight.events()

    def _retain(self, step: int) -> list[Event]:
        steps = files.done_steps(self.dir)
        events: list[Event] = []
        foreign = {s for s in steps if s > step} - self._foreign
        if foreign:
            self._foreign |= foreign
            text = f"{self.dir} holds later checkpoints of another run, left alone: {sorted(foreign)}"
            events.append(Note(step, text, "warning"))
        protect = {step} if self.resumed_step is None else {step, self.resumed_step}
        gone = files.victims(
            steps, written=step, keep=self.keep, major_every=self.major_every, protect=protect
        )
        for victim in gone:
            if failure := attempt(partial(files.remove, self.dir, victim), folder=self.dir):
                events.append(Note(step, f"checkpoint {victim} not removed: {failure}", "warning"))
            else:
                events.append(Removed(victim, str(files.done_path(self.dir, victim))))
        return events
