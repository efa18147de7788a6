"""The z-score window's arithmetic on a CPU: as `runner.outlier` does it, without a tensor operation per line.

Python's floats are IEEE doubles, so every value has the bits of the tensor path; two dozen operations on
tensors of two elements would cost a small model one percent of its step.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.api import Verdict
from runner.host_scalars import HostScalars


class Window(NamedTuple):
    """The last W steps, updated in place, and what is too much."""

    ring: memoryview[Any]  # [4, W] float64: loss, norm and their squares
    width: int  # W
    sums: memoryview[Any]  # [4] float64
    seen: memoryview[Any]  # [1] int64, steps that entered
    limits: tuple[float, ...]  # of the two z-scores, float32 values


def window_of(ring: Tensor, sums: Tensor, seen: Tensor, *, limits: Tensor) -> Window:
    """Return CPU tensors as views of their memory."""
    return Window(_view(ring), ring.shape[1], _view(sums), _view(seen), tuple(limits.tolist()))


def _view(tensor: Tensor) -> Any:
    return tensor.numpy().data


def judge(loss: Tensor, norm: Tensor, *, window: Window) -> Verdict:
    """Judge one step, whose loss [] and norm [] are on the host, and enter them into the window."""
    ring, width, sums, seen, limits = window
    x, y, count = float(loss), float(norm), seen[0]
    slot = count % width
    entry = (x, y, x * x, y * y)
    new = [sums[row] - ring[row, slot] + entry[row] for row in range(4)]
    loss_z = norm_z = math.nan
    if count >= width:
        loss_z = _z(x, total=new[0], squares=new[2], width=width)
        norm_z = _z(y, total=new[1], squares=new[3], width=width)
    code = math.isfinite(x) + 2 * math.isfinite(y)
    if code == 3:
        for row in range(4):
            ring[row, slot], sums[row] = entry[row], new[row]
        seen[0] = count + 1
    # llm.c compares float32; an infinite z does not count.
    code += 4 * (limits[0] < ctypes.c_float(loss_z).value < math.inf)
    code += 8 * (limits[1] < ctypes.c_float(norm_z).value < math.inf)
    apply, reason = _FINDINGS[code]
    return Verdict(apply, _float64(loss_z), _float64(norm_z), reason)


def reason_of(code: int) -> int:
    """Map findings to bits of REASONS; as in llm.c, the norm is judged if the loss passed.

    `code`: 1 the loss is finite, 2 the norm is, 4 the loss is over its limit, 8 the norm is.
    """
    return (~code & 3) | (4 if code & 4 else code & 8)


def _z(x: float, *, total: float, squares: float, width: int) -> float:
    mean = total / width
    variance = squares / width - mean * mean
    if variance == 0:
        return 0.0
    return (x - mean) / math.sqrt(variance) if not variance < 0 else math.nan


_float64 = HostScalars(torch.float64)
_FINDINGS = [(torch.tensor(reason == 0), torch.tensor(reason)) for reason in map(reason_of, range(16))]
