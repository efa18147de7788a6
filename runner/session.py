"""The parts of one rank's run, built in a fixed order and then restored from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.api import (
    Clip,
    Data,
    Engine,
    Evaluator,
    Event,
    Note,
    Optimizer,
    Outlier,
    Scheduler,
    Snapshot,
    Stream,
    TrainStep,
    View,
)
from runner.checkpoint.store import Store
from runner.cuda_graphs import Graphs
from runner.curvature import Curvature
from runner.emit import Emitter
from runner.forensics import Forensics
from runner.inject import Inject
from runner.meter import Meter
from runner.pace import Pace
from runner.progress import Progress
from runner.readback import Readback
from runner.rng import Generators, ModelRng
from runner.stop import Stop
from runner.train import Plan
from runner.watchdog import Watchdog

_RESIDUE = (
    "outlier: a value as far out as this one leaves a rounding residue in llm.c's running sums, by which "
    "z-scores may be wrong or missing from now on; outlier.robust=true has no such sums, and a run that is "
    "continued may set it"
)


@dataclass(frozen=True)
class Identity:
    """What a checkpoint says of the run that wrote it: the model's shape, and what its bits depend on."""

    model: dict[str, Any]
    env: dict[str, Any]


@dataclass(frozen=True)
class Session:
    """Everything a run is made of. The loop is the only place where these parts meet."""

    dir: Path
    plan: Plan
    progress: Progress
    data: Data
    stream: Stream
    model: nn.Module
    engine: Engine
    graphs: Graphs | None
    optimizer: Optimizer
    curvature: Curvature
    scheduler: Scheduler
    clip: Clip
    outlier: Outlier
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    rng: ModelRng
    generators: Generators
    meter: Meter
    readback: Readback
    evaluators: dict[str, Evaluator]
    view: View
    emitter: Emitter
    store: Store
    stop: Stop
    watchdog: Watchdog
    inject: Inject
    forensics: Forensics
    pace: Pace
    identity: Identity

    def emit(self, events: Iterable[Event]) -> None:
        """Pass events to the loggers, in order, and keep the books on them."""
        for event in events:
            self.emitter([event])
            if isinstance(event, TrainStep) and not event.applied:
                self.emitter(self.forensics.keep(event))
            if isinstance(event, TrainStep) and self.progress.leaps(event) and self._sums_run:
                self.emitter([Note(event.step, _RESIDUE, "warning")])
            self.progress.observe(event)

    @property
    def _sums_run(self) -> bool:
        """Whether updates are refused by z-scores of llm.c's running sums."""
        limits = (getattr(self.outlier, name, 0) for name in ("max_loss_z", "max_norm_z"))
        return any(limits) and not getattr(self.outlier, "robust", True)

    def parts(self) -> dict[str, Any]:
        """Return the stateful parts that the checkpoint's side file keeps, by name."""
        return {
            "progress": self.progress,
            "outlier": self.outlier,
            "generators": self.generators,
            "meter": self.meter,
            "readback": self.readback,
            "loggers": self.emitter,
        }

    def snapshot(self) -> Snapshot:
        """Return this rank's complete state; the readback must have been drained."""
        return Snapshot(
            step=self.progress.step,
            rank=self.engine.rank,
            world=self.engine.world,
            layout=self.engine.layout,
            model=self.identity.model,
            weights=self.engine.full_weights(),
            optimizer=self.optimizer.state_dict(),
            stream=self.stream.state_dict(),
            rng=self.rng.state_dict(),
            parts={name: part.state_dict() for name, part in self.parts().items()},
            env=self.identity.env,
        )

    def emit_quietly(self, events: Iterable[Event]) -> None:
        """Pass events to the loggers only, where nothing may raise any more."""
        self.emitter(events)

    def save(self) -> None:
        """Write a checkpoint of the current step; a failure is told, and the run goes on."""
        self.emit(self.readback.drain())
        self.watchdog.beat(f"a checkpoint of step {self.progress.step}")
        with self.meter.pause():
            self.emit(self.store.save(self.snapshot()))

    def finish_save(self) -> None:
        """Let a checkpoint in flight go first as far as the next update asks for; no step's time holds that.

        A GPU waits for its copies by itself, so the host only waits where a brief checkpoint is completed.
        """
        if not self.store.pending:
            return
        on_gpu = self.engine.device.type == "cuda"
        if on_gpu and not self.store.brief:
            self.emit(self.store.before_update())
            return
        if on_gpu:  # what it computes meanwhile is the step's own time
            torch.cuda.synchronize(self.engine.device)
        with self.meter.pause():
            self.emit(self.store.before_update())

    def restore(self, found: Snapshot) -> list[str]:
        """Put every part where it was when `found` was written; return what could not be."""
        was = int(found.env.get("world", self.engine.world))
        resharded = was != self.engine.world
        self.engine.load_weights(found.weights)
        self.optimizer.load_state_dict(found.optimizer)
        self.stream.load_state_dict({**found.stream, "recut": resharded} if resharded else found.stream)
        self.rng.load_state_dict(found.rng)
        notes = self._tokens_changed(was)
        for name, part in self.parts().items():
            try:
                # A rank that was not there keeps its own seeds: rank 0's generators are not for two.
                if name in found.parts and not (name == "generators" and self.engine.rank >= was):
                    part.load_state_dict(found.parts[name])
            except ValueError as error:
                # The guard may be swapped in mid-run; anything else that does not fit is an error.
                if name != "outlier":
                    raise
                notes.append(f"{error}; it starts with an empty window")
        if "meter" not in found.parts:
            self.meter.tokens = found.step * self.plan.tokens
        # llm.c's own checkpoints have no side file: the step in the header is what counts.
        self.progress.step = found.step
        return notes

    def _tokens_changed(self, was_world: int) -> list[str]:
        """Say that another number of ranks changes what a step is, where nothing but it decides that."""
        plan = self.plan
        if was_world == plan.world or plan.tokens_per_step is not None:
            return []
        before = plan.tokens // plan.world * was_world
        return [
            f"a step has {plan.tokens} tokens on {plan.world} ranks, it had {before} on {was_world}; "
            f"train.tokens_per_step={before} would have kept it"
        ]
