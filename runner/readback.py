"""Bring a step's device scalars to the host, at most one step late: the only sync in the hot path."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.api import REASONS, TrainStep, Verdict


class Timing(NamedTuple):
    """Host-side figures of one step, as the meter measured them."""

    tokens: int
    step_ms: float
    tokens_per_s: float
    mfu: float


class _Pending(NamedTuple):
    step: int
    lr: float
    values: Tensor | list[float]  # [7]; float64 on the host once `arrived`
    arrived: Any  # CUDA event, or None on a CPU


class Readback:
    """Turn pushed device values into `TrainStep` events, in order.

    On a CPU an event is ready at once. On CUDA each step's values travel in one asynchronous copy
    into pinned memory and are handed out while the next step runs; `drain` waits for the rest.
    The lag is fixed, never polled, so every rank sees the same events at the same step.
    """

    def __init__(self, timing: Callable[[], Timing], *, device: torch.device) -> None:
        self._timing = timing
        self._lag = 1 if device.type == "cuda" else 0
        self._pending: deque[_Pending] = deque()
        self._skipped = 0

    def push(self, step: int, lr: float, loss: Tensor, norm: Tensor, scale: Tensor, verdict: Verdict) -> None:
        """Start copying one step's values to the host."""
        rows = (loss, norm, scale, verdict.loss_z, verdict.norm_z, verdict.apply, verdict.reason)
        if not self._lag:
            self._pending.append(_Pending(step, lr, [float(row) for row in rows], None))
            return
        host = torch.empty(len(rows), dtype=torch.float64, pin_memory=True)
        host.copy_(torch.stack([row.to(torch.float64) for row in rows]), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._pending.append(_Pending(step, lr, host, arrived))

    def ready(self) -> list[TrainStep]:
        """Return the events that the lag allows."""
        return [self._pop() for _ in range(len(self._pending) - self._lag)]

    def drain(self) -> list[TrainStep]:
        """Wait for and return every outstanding event."""
        return [self._pop() for _ in range(len(self._pending))]

    def _pop(self) -> TrainStep:
        pending = self._pending.popleft()
        if pending.arrived is not None:
            pending.arrived.synchronize()
        values = pending.values
        loss, norm, scale, loss_z, norm_z, applied, bits = (
            values if isinstance(values, list) else values.tolist()
        )
        timing = self._timing()
        self._skipped += not applied
        return TrainStep(
            step=pending.step,
            loss=loss,
            lr=pending.lr,
            norm=norm,
            loss_z=loss_z,
            norm_z=norm_z,
            applied=bool(applied),
            reason=", ".join(text for bit, text in REASONS.items() if int(bits) & bit) if bits else "",
            scale=scale,
            skipped=self._skipped,
            tokens=timing.tokens,
            step_ms=timing.step_ms,
            tokens_per_s=timing.tokens_per_s,
            mfu=timing.mfu,
        )

    def state_dict(self) -> dict[str, int]:
        """Return the count of skipped steps; nothing may be outstanding."""
        assert not self._pending, "drain the readback before a checkpoint"
        return {"skipped": self._skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the count of skipped steps."""
        self._skipped = int(state["skipped"])
