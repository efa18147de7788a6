"""Find values that are not finite in raw memory, fast enough to do it while a checkpoint is written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from runner.api import Slot
from runner.checkpoint.disk import Bytes
from runner.checkpoint.memory import any_not_finite


class NonFiniteError(ValueError):
    """Weights that must not become a checkpoint; the message names the tensor."""


def first_non_finite(data: Bytes, dtype: torch.dtype) -> int | None:
    """Return the index of the first nan or inf among `data`'s elements of `dtype`, or None.

    In IEEE formats these are the magnitudes from infinity's bits on. Signed, the largest integer shows
    the positive ones; unsigned, the largest shows the negative ones: two passes and no temporary.
    """
    width, infinity = _infinity(dtype)
    if any_not_finite(data, width=width, infinity=infinity) is False:
        return None
    signed, unsigned = data.view(f"<i{width}"), data.view(f"<u{width}")
    sign = 1 << (8 * width - 1)
    if not len(data) or (int(signed.max()) < infinity and int(unsigned.max()) < sign + infinity):
        return None
    return int(np.argmax((unsigned & np.asarray(sign - 1, unsigned.dtype)) >= infinity))


def slot_at(layout: Sequence[Slot], element: int) -> str:
    """Return the name of the slot that holds an element of the flat weights."""
    return next(slot.name for slot in layout if slot.offset <= element < slot.offset + slot.numel)


@cache
def _infinity(dtype: torch.dtype) -> tuple[int, int]:
    """Return an element's bytes and infinity's bits."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return dtype.itemsize, int(torch.tensor(float("inf")).to(dtype).view(whole))
