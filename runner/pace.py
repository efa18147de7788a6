"""Show a rank that is slower than the others: how long each computes before it waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from runner.api import Engine, Ranks

_UNTIMED = nullcontext()


class Pace:
    """Times what a rank does alone in a step, and reports all ranks every `every` steps (0: never).

    Whole steps are no use for that: the ranks wait for the slowest, so all of them last as long. On a GPU
    events are recorded and read when a report is due, which is the only wait for the device.
    """

    def __init__(self, *, every: int, engine: Engine) -> None:
        self._every = every if engine.world > 1 else 0
        self._engine = engine
        self._gpu = engine.device.type == "cuda"
        self._spent_ms = 0.0
        self._steps = 0
        self._pairs: list[tuple[Any, Any]] = []

    def alone(self) -> AbstractContextManager[None]:
        """Time what happens inside: the part of a step before the rank waits for the others."""
        return self._timed() if self._every else _UNTIMED

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._now()
        yield
        self._steps += 1
        if self._gpu:
            self._pairs.append((start, self._now()))
        else:
            self._spent_ms += (self._now() - start) * 1e3

    def due(self, step: int) -> list[Ranks]:
        """Return every rank's mean time per step, in rank order, if `step` is one to report; all together."""
        if not self._every or step % self._every or not self._steps:
            return []
        if self._pairs:
            self._pairs[-1][1].synchronize()
            self._spent_ms = sum(start.elapsed_time(end) for start, end in self._pairs)
        mean_ms = self._spent_ms / self._steps
        self._spent_ms, self._steps, self._pairs = 0.0, 0, []
        return [Ranks(step, tuple(self._engine.gather(mean_ms)))]

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
