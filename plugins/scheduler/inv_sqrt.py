"""Decay with the inverse square root of the step: a whole scheduler plugin in one function."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from annotated_types import Ge


def inv_sqrt(
    step: int, *, peak_lr: Annotated[float, Ge(0)], warmup_steps: Annotated[int, Ge(1)] = 50
) -> float:
    """Warm up linearly, then fall as `sqrt(warmup_steps / step)` (Attention Is All You Need, section 5.3).

    It has no end, so training can go on for as long as one likes.
    """
    factor = min((step + 1) / warmup_steps, math.sqrt(warmup_steps / (step + 1)))
    return float(np.float32(peak_lr * factor))
