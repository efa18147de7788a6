"""Learning-rate schedules as pure functions of the step, equal to llm.c's float32 values to the last bit.

Each function takes the 0-based step and the whole description of the curve, so a resumed run has
nothing to restore. All arithmetic is float32 in the order of llm.c's `schedulers.h`: N total steps,
w warmup steps, r progress of the decay in [0, 1], m = peak * final_frac.
A run asks for steps 0 .. N-1; step N is the documented end value, later ones are a `ValueError`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

if TYPE_CHECKING:
    from runner.api import Scheduler

_F32_MAX = float(np.finfo(np.float32).max)
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_PROBES = 4096


def constant(
    step: int,
    *,
    peak_lr: Annotated[float, Ge(0)],
    warmup_steps: Annotated[int, Ge(0)] = 0,
    warmup_from: Literal["one", "zero"] = "one",
) -> float:
    """Hold the peak, after a linear warmup if one is given (llm.c's has none)."""
    lr = _peak(step, peak_lr, warmup_steps)
    if step < warmup_steps:
        return float(_warmup(step, lr, warmup_steps, warmup_from))
    return float(lr)


def cosine(
    step: int,
    *,
    peak_lr: Annotated[float, Ge(0)],
    warmup_steps: Annotated[int, Ge(0)],
    total_steps: Annotated[int, Ge(1)],
    final_frac: Annotated[float, Ge(0), Le(1)],
    warmup_from: Literal["one", "zero"] = "one",
) -> float:
    """Warm up, then fall along half a cosine to `final_frac * peak_lr` at step N (SGDR, section 3)."""
    lr = _peak(step, peak_lr, warmup_steps)
    if step < warmup_steps:
        return float(_warmup(step, lr, warmup_steps, warmup_from))
    floor = _floor(lr, final_frac)
    return float(floor + _half_cosine(_progress(step, warmup_steps, total_steps)) * (lr - floor))


def linear(
    step: int,
    *,
    peak_lr: Annotated[float, Ge(0)],
    warmup_steps: Annotated[int, Ge(0)],
    total_steps: Annotated[int, Ge(1)],
    final_frac: Annotated[float, Ge(0), Le(1)],
    warmup_from: Literal["one", "zero"] = "one",
) -> float:
    """Warm up, then fall on a straight line to `final_frac * peak_lr` at step N."""
    lr = _peak(step, peak_lr, warmup_steps)
    if step < warmup_steps:
        return float(_warmup(step, lr, warmup_steps, warmup_from))
    floor = _floor(lr, final_frac)
    return float(lr - _progress(step, warmup_steps, total_steps) * (lr - floor))


def wsd(
    step: int,
    *,
    peak_lr: Annotated[float, Ge(0)],
    warmup_steps: Annotated[int, Ge(0)],
    total_steps: Annotated[int, Ge(1)],
    final_frac: Annotated[float, Ge(0), Le(1)],
    decay: Literal["sqrt", "linear", "cosine"] = "sqrt",
    decay_frac: Annotated[float, Ge(0), Le(1)] | None = None,
    decay_steps: Annotated[int, Ge(0)] | None = None,
    warmup_from: Literal["one", "zero"] = "one",
) -> float:
    """Warm up, stay at the peak, decay over the last steps: warmup-stable-decay; `linear` is a trapezoid.

    The decay takes the last `decay_steps`, or `decay_frac` of all steps (0.2 when neither is given, as
    llm.c); the first decaying step still has the peak. A warmup that outlasts the decay point drops
    onto the decay curve when it ends, as llm.c's does.
    """
    lr = _peak(step, peak_lr, warmup_steps)
    # Both are checked at every step: a mistake must not wait for the end of the warmup.
    start = decay_start(total_steps, decay_frac=decay_frac, decay_steps=decay_steps)
    floor = _floor(lr, final_frac)
    if step < warmup_steps:
        if warmup_from == "one":  # llm.c divides first here, and multiplies first everywhere else
            return float(lr * (np.float32(step + 1) / np.float32(warmup_steps)))
        return float(_warmup(step, lr, warmup_steps, warmup_from))
    if step < start:
        return float(lr)
    return float(floor + _TAILS[decay](_progress(step, start, total_steps)) * (lr - floor))


def trapezoid(
    step: int,
    *,
    peak_lr: Annotated[float, Ge(0)],
    warmup_steps: Annotated[int, Ge(0)],
    total_steps: Annotated[int, Ge(1)],
    final_frac: Annotated[float, Ge(0), Le(1)],
    decay_frac: Annotated[float, Ge(0), Le(1)] | None = None,
    decay_steps: Annotated[int, Ge(0)] | None = None,
    warmup_tokens: Annotated[int, Ge(0)] | None = None,
    decay_tokens: Annotated[int, Ge(0)] | None = None,
    warmup_from: Literal["one", "zero"] = "one",
    tokens_per_step: int = 1,
) -> float:
    """Go up in a line, stay, go down in a line (Zhai et al. 2022); both slopes in steps or in tokens.

    Tokens are turned into whole steps, rounded up, by the supplied `tokens_per_step` of all processes.
    """
    if warmup_tokens is not None:
        warmup_steps = -(-warmup_tokens // tokens_per_step)
    if decay_tokens is not None:
        if decay_steps is not None or decay_frac is not None:
            raise ValueError(
                f"scheduler.decay_tokens={decay_tokens} is given beside decay_steps or decay_frac: "
                "set one of them and leave the others null"
            )
        decay_steps = -(-decay_tokens // tokens_per_step)
    return wsd(
        step,
        peak_lr=peak_lr,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        final_frac=final_frac,
        decay="linear",
        decay_frac=decay_frac,
        decay_steps=decay_steps,
        warmup_from=warmup_from,
    )


def decay_start(total_steps: int, *, decay_frac: float | None = None, decay_steps: int | None = None) -> int:
    """Return the first step of a WSD decay; llm.c's `(int)(0.8f * N)` when nothing else is asked for."""
    if decay_frac is not None and decay_steps is not None:
        raise ValueError(
            f"scheduler.decay_steps={decay_steps} and scheduler.decay_frac={decay_frac} are both given: "
            "set one of them to null"
        )
    if decay_steps is not None:
        if not 0 <= decay_steps <= total_steps:
            raise ValueError(
                f"scheduler.decay_steps={decay_steps} must lie in 0..{total_steps} (train.steps)"
            )
        return total_steps - decay_steps
    if decay_frac is None or decay_frac == 0.2:
        return int(np.float32(0.8) * np.float32(total_steps))
    if not 0 <= decay_frac <= 1:
        raise ValueError(f"scheduler.decay_frac={decay_frac} must lie in [0, 1]")
    # Rounded to a millionth of a step, so that 0.7 * 90 in binary does not lose a step of 63.
    return math.floor(round((1.0 - decay_frac) * total_steps, 6))


def curve(scheduler: Scheduler, steps: int, *, at: Iterable[int] | None = None) -> list[float]:
    """Return the rates at the steps `at` of a run (None: all), or raise one line about the first bad one."""
    return [rate_at(scheduler, step, steps=steps) for step in (range(steps) if at is None else at)]


def probe(scheduler: Scheduler, steps: int) -> None:
    """Raise one line if a schedule cannot serve a run; of a long run a few thousand steps are tried."""
    stride = max(steps // _PROBES, 1)
    for step in {*range(0, steps, stride), steps - 1}:
        rate_at(scheduler, step, steps=steps)


def rate_at(scheduler: Scheduler, step: int, *, steps: int) -> float:
    """Return the rate of a step as the float32 value that is used; one line if there cannot be one."""
    given = scheduler(step)
    try:
        lr = math.nan if isinstance(given, str) else ctypes.c_float(float(given)).value
    except (TypeError, ValueError, RuntimeError):  # None, several numbers
        lr = math.nan
    if not 0 <= lr < math.inf:
        raise ValueError(
            f"scheduler: the learning rate at step {step} of {steps} is {given!r}; "
            "it must be a float32 number, finite and not negative: check optimizer.lr and the scheduler's "
            "settings"
        )
    return lr


def _peak(step: int, peak_lr: float, warmup_steps: int) -> np.float32:
    if not -_F32_MAX <= peak_lr <= _F32_MAX:
        raise ValueError(f"scheduler.peak_lr={peak_lr} must be a finite float32 number: set optimizer.lr")
    if step < 0 or warmup_steps < 0:
        raise ValueError(f"scheduler: step {step} and warmup_steps={warmup_steps} must not be negative")
    return np.float32(peak_lr)


def _floor(lr: np.float32, final_frac: float) -> np.float32:
    if not 0 <= final_frac <= 1:
        raise ValueError(
            f"scheduler.final_frac={final_frac} must lie in [0, 1]: it is a fraction of the peak"
        )
    return lr * np.float32(final_frac)


def _warmup(step: int, lr: np.float32, warmup_steps: int, warmup_from: str) -> np.float32:
    done = step + 1 if warmup_from == "one" else step
    return lr * np.float32(done) / np.float32(warmup_steps)


def _progress(step: int, start: int, total_steps: int) -> np.float32:
    if start >= total_steps or not start <= step <= total_steps:
        raise ValueError(
            f"scheduler: step {step} is outside the schedule's {total_steps} steps "
            f"(its decay covers {start}..{total_steps}): ask for a step below train.steps"
        )
    return np.float32(step - start) / np.float32(total_steps - start)


def _load_cosf() -> Callable[[float], float]:
    """Find libm's single-precision cosine: rounding `math.cos` misses its last bit in 1 of 200 values."""
    try:
        cosf = ctypes.CDLL(_libm()).cosf
    except (OSError, AttributeError):  # no such library: less than 3e-7 away
        return math.cos
    cosf.restype, cosf.argtypes = ctypes.c_float, [ctypes.c_float]
    return cosf


def _libm() -> str | None:
    if sys.platform == "linux":
        return "libm.so.6"  # what the search would find by starting a program
    return ctypes.util.find_library("m")


_cosf = _load_cosf()


def scaled(step: int, *, schedule: Scheduler, factor: float) -> float:
    """Return a schedule's float32 value times `factor`, as float32."""
    return float(np.float32(schedule(step) * factor))


def _half_cosine(r: np.float32) -> np.float32:
    angle = np.float32(math.pi * float(r))  # llm.c: double pi times float, narrowed by the call
    return _HALF * (_ONE + np.float32(_cosf(float(angle))))


def _one_minus_sqrt(r: np.float32) -> np.float32:
    return np.float32(_ONE - np.sqrt(r))


def _one_minus(r: np.float32) -> np.float32:
    return _ONE - r


_TAILS: dict[str, Callable[[np.float32], np.float32]] = {
    "sqrt": _one_minus_sqrt,
    "linear": _one_minus,
    "cosine": _half_cosine,
}
