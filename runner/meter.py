"""Measure a run's speed on the host: step time, tokens per second, MFU, time left.

Time inside `pause` (evaluation, checkpoints, samples) belongs to no step, and every rate counts this
session's steps only, so neither a save nor a resume makes a number jump.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Gt, Lt

from runner.api import State
from runner.flops import Dtype, mfu, peak_tflops

log = logging.getLogger(__name__)


class Speed(NamedTuple):
    """How fast a step was; `tokens_per_s` is smoothed and over all ranks, `mfu` is -1 when unknown."""

    step_ms: float
    tokens_per_s: float
    mfu: float


class Meter:
    """Time steps: `start` once, `tick` after each step, `pause` around everything else.

    Supplied: `flops_per_token` of the model, `device_name` and `dtype` of the matrix products to look the
    peak up by, `world` ranks that share a step's tokens.
    """

    def __init__(
        self,
        *,
        peak_tflops: Annotated[float, Gt(0)] | None = None,
        smoothing: Annotated[float, Ge(0), Lt(1)] = 0.95,
        flops_per_token: int = 0,
        device_name: str = "",
        dtype: Literal["fp32", "bf16", "fp16"] = "bf16",
        world: int = 1,
    ) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"meter.smoothing={smoothing} must lie in [0, 1): 0 shows each step's own rate")
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(
                f"meter.peak_tflops={peak_tflops} must be above 0; null looks it up by the GPU's name"
            )
        self.peak_tflops = _peak(device_name, dtype) if peak_tflops is None else peak_tflops
        self.train_s = 0.0
        self.tokens = 0
        self._smoothing, self._world = smoothing, world
        self._flops_per_token = flops_per_token
        self._mean_s = self._mean_tokens = self._weight = 0.0
        self._steps = 0
        self._paused_s = 0.0
        self._last: float | None = None

    def start(self) -> None:
        """Begin timing; the first `tick` measures from here."""
        self._last, self._paused_s = perf_counter(), 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the time inside out of every figure."""
        began = perf_counter()
        try:
            yield
        finally:
            self._paused_s += perf_counter() - began

    def tick(self, tokens: int) -> Speed:
        """Close a step that trained on `tokens` over all ranks."""
        now = perf_counter()
        assert self._last is not None, "Meter.start comes before the first tick"
        step_s = max(now - self._last - self._paused_s, 1e-9)
        self._last, self._paused_s = now, 0.0
        self.train_s += step_s
        self.tokens += tokens
        self._smooth(step_s, tokens)
        utilization = mfu(
            self._flops_per_token, tokens=tokens // self._world, step_s=step_s, peak_tflops=self.peak_tflops
        )
        return Speed(step_s * 1e3, self._mean_tokens / self._mean_s, utilization)

    def eta_s(self, steps: int) -> float:
        """Return the seconds that `steps` more steps take, without evaluations; nan before the first tick."""
        return steps * self._mean_s / self._weight if self._weight else float("nan")

    def state_dict(self) -> State:
        return {"train_s": self.train_s, "tokens": self.tokens}

    def load_state_dict(self, state: State) -> None:
        self.train_s, self.tokens = state["train_s"], state["tokens"]

    def _smooth(self, step_s: float, tokens: int) -> None:
        self._steps += 1
        if self._steps == 2:  # the first step pays for compilation and caches: it does not count for long
            self._mean_s = self._mean_tokens = self._weight = 0.0
        new = 1.0 - self._smoothing
        self._mean_s += new * (step_s - self._mean_s)
        self._mean_tokens += new * (tokens - self._mean_tokens)
        self._weight += new * (1.0 - self._weight)  # what the means started from 0 still lack


def _peak(device_name: str, dtype: Dtype) -> float:
    peak = peak_tflops(device_name, dtype)
    if device_name and peak < 0:
        log.info(
            "MFU is off: no %s peak known for %r; set meter.peak_tflops to its dense figure",
            dtype,
            device_name,
        )
    return peak
