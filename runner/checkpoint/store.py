"""Save, find and restore a run's checkpoints so that a crash at any instant loses at most the last interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge

from runner.api import Event, Note, Removed, Saved, Slot, Snapshot, State
from runner.checkpoint import disk, llmc_format, load, match, safetensors_format, side_file
from runner.checkpoint import folder as files
from runner.checkpoint.disk import Written
from runner.checkpoint.folder import Found
from runner.checkpoint.reshard import is_sharded, reshard
from runner.checkpoint.writer import HostCopies, Job, Writing

_SPARE_BYTES = 16 << 20  # left free on the disk for logs


class Restored(NamedTuple):
    """What to go on from; `snapshot` is None on a fresh start."""

    snapshot: Snapshot | None
    events: tuple[Event, ...]


class Store:
    """A run folder's checkpoints, as one rank sees them.

    Every method that all ranks must call together says so. Supplied when built: `dir` the run folder,
    `rank` and `world`, `any_rank` (whether any rank raised a flag) and `barrier` of the engine.
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
    ) -> None:
        self.every, self.keep, self.major_every = every, keep, major_every
        self.resume, self.format = resume, format
        self.allow_reshard, self.strict_env = allow_reshard, strict_env
        self.asynchronous = async_ != "off"
        self.dir = Path(dir)
        self.rank, self._any_rank, self._barrier = rank, any_rank, barrier
        self.resumed_step: int | None = None
        self._copies = HostCopies()
        self._flight: _Flight | None = None
        self._foreign: set[int] = set()

    # ------------------------------------------------------------ when

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after `step` updates: llm.c's rule, and never again what was resumed from."""
        if not self.every or step == self.resumed_step:
            return False
        return last or (step > 0 and step % self.every == 0)

    # ------------------------------------------------------------ restore

    def restore(self, live: Snapshot, *, overwrite: bool = False) -> Restored:
        """Find what to continue from; `live` is the freshly built run that it must fit. All ranks together.

        ValueError (one line) if the folder is not writable, holds only damaged checkpoints, or a checkpoint
        of another model, optimizer or topology, or if a fresh start would overwrite checkpoints.
        """
        check_format(self.format, live)
        if overwrite and self.resume == "must":
            raise ValueError("run.overwrite=true starts afresh, checkpoint.resume=must continues: choose one")
        if self.rank == 0:
            disk.probe(self.dir)
        self._barrier()
        if overwrite or self.resume == "never":
            return Restored(None, self._start_fresh(overwrite=overwrite))
        return self._resume(live)

    def _start_fresh(self, *, overwrite: bool) -> tuple[Event, ...]:
        steps = files.require_fresh(self.dir, overwrite=overwrite)
        self._barrier()
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
            snapshot, problem = self._try_load(step, live)
            if self._any_rank(snapshot is None):
                problem = problem or "another rank cannot read it"
                text = f"checkpoint {step} in {self.dir} is damaged, trying the next older one: {problem}"
                events.append(Note(step, text, "warning"))
                continue
            assert snapshot is not None
            self.resumed_step = step
            events += [Note(step, text, "warning") for text in snapshot.notes]
            return Restored(snapshot.snapshot, (*events, *self._clean(step)))
        if steps:
            reasons = "; ".join(event.text for event in events if isinstance(event, Note))
            raise ValueError(
                f"run.dir: no checkpoint in {self.dir} is intact ({reasons}); mend the files, "
                "or start again with run.overwrite=true"
            )
        if self.resume == "must":
            raise ValueError(
                f"checkpoint.resume=must: {self.dir} holds no DONE file; check run.name, or pass resume=auto"
            )
        return Restored(None, self._clean(0))

    def _try_load(self, step: int, live: Snapshot) -> tuple[match.Matched | None, str]:
        """Load a checkpoint for this run; None and the reason if it is damaged, ValueError if it does not fit."""
        try:
            found = files.inspect(self.dir, step)
            weights = load.load_weights(found, layout=live.layout)
            ranks = [self.rank] if found.world == live.world else range(found.world)
            saved = [load.load_rank(found, rank, weights) for rank in ranks]
        except safetensors_format.MismatchError:
            raise
        except (ValueError, OSError) as error:
            return None, str(error)
        return self._fit(found, saved, live), ""

    def _fit(self, found: Found, saved: list[Snapshot], live: Snapshot) -> match.Matched:
        """Check that a checkpoint belongs to this run, and re-cut its state if that is asked for."""
        match.check_model(saved[0], live)
        snapshot = saved[0]
        notes = load.missing(found)
        if match.check_topology(snapshot, live, allow_reshard=self.allow_reshard):
            if len(saved) != found.world:
                weights = load.Weights(snapshot.model, snapshot.layout, snapshot.weights)
                saved = [load.load_rank(found, rank, weights) for rank in range(found.world)]
            snapshot = reshard(saved, world=live.world, rank=live.rank, sharded=is_sharded(live))
            notes += (
                f"checkpoint {found.step}: optimizer state re-cut from {found.world} to {live.world} ranks; "
                "the data goes on in another order than without the interruption",
            )
        matched = match.match_optimizer(snapshot, live)
        notes += matched.notes + match.match_env(snapshot, live, strict=self.strict_env)
        return match.Matched(matched.snapshot, notes)

    def _clean(self, step: int) -> tuple[Event, ...]:
        if self.rank != 0:
            return ()
        return tuple(Note(step, f"{self.dir}: {line}") for line in files.clean(self.dir))

    # ------------------------------------------------------------ save

    def save(self, snapshot: Snapshot) -> list[Event]:
        """Start writing a checkpoint; it is complete once `before_update` or `join` says so. All ranks together.

        Until then the snapshot's tensors must not change, except that `before_update` may be followed by
        an update. A failure is an event, never an exception: training goes on.
        """
        events = self.join()
        start = time.perf_counter()
        copied = snapshot.weights.device.type != "cpu"
        held = self._copies.take(snapshot) if copied else snapshot
        job = make_job(held, folder=self.dir, suffix=check_format(self.format, snapshot))
        problem = self._short_of_space(job, snapshot)
        if self._any_rank(problem is not None):
            problem = problem or "another rank's disk is too full"
            text = f"checkpoint {snapshot.step} not written, the next one is tried: {problem}"
            return [*events, Note(snapshot.step, text, "warning")]
        writing = Writing(job, ready=self._copies.wait_host if copied else lambda: None)
        self._flight = _Flight(snapshot.step, writing, copied, time.perf_counter() - start)
        return events if self.asynchronous else events + self.join()

    def _short_of_space(self, job: Job, snapshot: Snapshot) -> str | None:
        ranks = snapshot.world if self.rank == 0 else 1
        need = job.size * ranks + _SPARE_BYTES
        try:
            free = disk.free_bytes(self.dir)
        except OSError as error:
            return f"{self.dir}: {error.strerror or error}"
        return f"{self.dir}: {free} bytes free, {need} needed" if free < need else None

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._flight is not None

    def before_update(self) -> list[Event]:
        """Make the next update safe; call it before each one. All ranks together.

        Written from live memory: waits for the writer. From copies: the device waits for the copies, and
        the checkpoint is completed as soon as every rank's writer is done.
        """
        if self._flight is None:
            return []
        if self._flight.copied:
            self._copies.wait_device()
            if self._any_rank(self._flight.writing.running):
                return []
        return self.join()

    def join(self) -> list[Event]:
        """Complete the checkpoint in flight, if any. All ranks together."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        start = time.perf_counter()
        flight.writing.wait()
        events = self._complete(flight.step, flight.writing)
        blocked_ms = 1000 * (flight.blocked_s + time.perf_counter() - start)
        if self.rank == 0 and events is None:
            path = str(files.done_path(self.dir, flight.step))
            saved = Saved(flight.step, path, flight.writing.size, blocked_ms)
            return [saved, *self._retain(flight.step)]
        return events or []

    def close(self) -> list[Event]:
        """Complete what is in flight and release host memory. All ranks together."""
        events = self.join()
        self._copies.close()
        return events

    def _complete(self, step: int, writing: Writing) -> list[Event] | None:
        """Give the files their names and write DONE; return events only if that failed."""
        failure = writing.failure
        if self._any_rank(failure is not None):
            writing.discard()
            return self._failed(step, failure or "another rank could not write its files")
        failure = self._attempt(lambda: files.remove(self.dir, step) if self.rank == 0 else None)
        self._barrier()  # an older attempt at this step is gone: nothing vouches for a mixture
        failure = failure or self._attempt(writing.publish)
        if self._any_rank(failure is not None):
            return self._failed(step, failure or "another rank could not rename its files")
        failure = self._attempt(lambda: files.mark_done(self.dir, step) if self.rank == 0 else None)
        return self._failed(step, failure) if failure else None

    def _attempt(self, action: Callable[[], None]) -> str | None:
        try:
            action()
        except OSError as error:
            return f"{error.filename or self.dir}: {error.strerror or error}"
        return None

    def _failed(self, step: int, why: str) -> list[Event]:
        return [Note(step, f"checkpoint {step} not written, older ones stay: {why}", "error")]

    def _retain(self, step: int) -> list[Event]:
        steps = files.done_steps(self.dir)
        events: list[Event] = []
        foreign = {s for s in steps if s > step} - self._foreign
        if foreign:
            self._foreign |= foreign
            text = f"{self.dir} holds later checkpoints {sorted(foreign)} that this run did not write; left alone"
            events.append(Note(step, text, "warning"))
        protect = {step} if self.resumed_step is None else {step, self.resumed_step}
        gone = files.victims(
            steps, written=step, keep=self.keep, major_every=self.major_every, protect=protect
        )
        for victim in gone:
            if failure := self._attempt(partial(files.remove, self.dir, victim)):
                events.append(Note(step, f"checkpoint {victim} not removed: {failure}", "warning"))
            else:
                events.append(Removed(victim, str(files.done_path(self.dir, victim))))
        return events


class _Flight(NamedTuple):
    step: int
    writing: Writing
    copied: bool
    blocked_s: float


def check_format(format: str, snapshot: Snapshot) -> str:
    """Return the suffix of the files that will hold this run; ValueError if the format cannot."""
    fits = llmc_format.holds(snapshot)
    if format == "llmc" and not fits:
        raise ValueError(
            f"checkpoint.format=llmc: llm.c's files hold a gpt2 model with m, v (and master), not a "
            f"{snapshot.model.get('kind')} with {', '.join(snapshot.optimizer) or 'no state'}; pass format=auto"
        )
    return llmc_format.SUFFIX if fits and format != "safetensors" else safetensors_format.SUFFIX


def make_job(snapshot: Snapshot, *, folder: Path, suffix: str) -> Job:
    """Lay out one rank's files. Everything but the large tensors is encoded here and now."""
    step, rank = snapshot.step, snapshot.rank
    assert 0 <= step < 10**8, "file names have eight digits"
    llmc = suffix == llmc_format.SUFFIX
    chunks = llmc_format.state_chunks if llmc else safetensors_format.state_chunks
    data = [(files.state_path(folder, step, rank, suffix), chunks(snapshot))]
    if rank == 0:
        model = llmc_format.model_chunks if llmc else safetensors_format.model_chunks
        data.append((files.model_path(folder, step, suffix), model(snapshot)))
    stream = snapshot.stream if llmc else {}
    rest = llmc_format.stream_rest(stream)
    content: State = {
        "version": 1,
        **{"step": step, "rank": rank, "world": snapshot.world, "suffix": suffix},
        **{"model": snapshot.model, "env": snapshot.env, "parts": snapshot.parts},
        **{"stream": rest, "stream_held": sorted(stream.keys() - rest.keys())},
    }
    encoded = side_file.dumps(content)

    def extra(written: dict[str, Written]) -> bytes:
        recorded = {name: list(value) for name, value in written.items()}
        return side_file.frame(encoded, files=recorded)

    weights = snapshot.weights if rank == 0 else None
    layout: tuple[Slot, ...] = snapshot.layout
    return Job(tuple(data), files.extra_path(folder, step, rank), extra, weights, layout)
