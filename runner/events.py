"""What a run tells its loggers: frozen values of the host, and the names that their numbers go by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainStep:
    """One executed step; `step` is 0-based, `norm` the global norm before clipping."""

    step: int
    loss: float
    lr: float
    norm: float
    loss_z: float
    norm_z: float
    applied: bool
    reason: str
    scale: float
    tokens: int  # seen up to and with this step
    step_ms: float
    tokens_per_s: float
    mfu: float  # -1 when the device's peak is unknown
    skipped: int = 0  # skipped steps so far


@dataclass(frozen=True)
class ValLoss:
    """Mean validation loss in nats per token; `bits_per_byte` is nan without a tokenizer."""

    step: int
    loss: float
    bits_per_byte: float = float("nan")


@dataclass(frozen=True)
class Score:
    """A named evaluation result, e.g. accuracy in [0, 1]."""

    step: int
    name: str
    value: float


@dataclass(frozen=True)
class Sample:
    """Text that the model wrote; `prompt` is the part it was given."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Saved:
    """A checkpoint was completed; `blocked_ms` is how long the loop waited for it."""

    step: int
    path: str
    bytes: int
    blocked_ms: float


@dataclass(frozen=True)
class Removed:
    """Retention removed a checkpoint."""

    step: int
    path: str


@dataclass(frozen=True)
class Note:
    """Something a person should know; never a metric."""

    step: int
    text: str
    level: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True)
class Ranks:
    """Step time of every rank in milliseconds, in rank order."""

    step: int
    step_ms: tuple[float, ...]


@dataclass(frozen=True)
class GpuState:
    """A look at the GPU; nan where the board has no figure, `throttle` names what holds it back."""

    step: int
    sm_clock_mhz: float
    power_w: float
    temperature_c: float
    utilization_percent: float
    throttle: tuple[str, ...]


Event = TrainStep | ValLoss | Score | Sample | Saved | Removed | Note | Ranks | GpuState


def metrics(event: Event) -> dict[str, float]:
    """Return an event's numbers under the names that every sink uses; empty for plain text."""
    if isinstance(event, TrainStep):
        named = {
            "train/loss": event.loss,
            "train/lr": event.lr,
            "train/grad_norm": event.norm,
            "train/grad_scale": event.scale,
            "train/tokens": float(event.tokens),
            "train/skipped": float(event.skipped),
            "perf/step_ms": event.step_ms,
            "perf/tokens_per_s": event.tokens_per_s,
        }
        if event.loss_z == event.loss_z:
            named["train/loss_z"] = event.loss_z
        if event.norm_z == event.norm_z:
            named["train/norm_z"] = event.norm_z
        if event.mfu >= 0:
            named["perf/mfu"] = event.mfu
        return named
    if isinstance(event, ValLoss):
        named = {"val/loss": event.loss, "val/ppl": _exp(event.loss)}
        if event.bits_per_byte == event.bits_per_byte:
            named["val/bits_per_byte"] = event.bits_per_byte
        return named
    if isinstance(event, Score):
        return {f"eval/{event.name}": float(event.value)}  # a plugin's may be numpy's or a tensor
    if isinstance(event, Saved):
        return {"checkpoint/step": float(event.step), "checkpoint/blocked_ms": event.blocked_ms}
    if isinstance(event, Ranks) and event.step_ms:
        return {"perf/slowest_rank_ms": max(event.step_ms), "perf/fastest_rank_ms": min(event.step_ms)}
    if isinstance(event, GpuState):
        named = {
            "gpu/sm_clock_mhz": event.sm_clock_mhz,
            "gpu/power_w": event.power_w,
            "gpu/temperature_c": event.temperature_c,
            "gpu/utilization_percent": event.utilization_percent,
        }
        return {name: value for name, value in named.items() if math.isfinite(value)}
    return {}


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
