"""The z-score window's arithmetic in tensor operations: the definition, which looks at no value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner.norm import fold


def running_z(values: Tensor, sums: Tensor, *, width: Tensor) -> Tensor:
    """Return the z-scores of `values` [2] by llm.c's running `sums` [4] of values and squares.

    `width` [1] is a tensor because a GPU multiplies by the reciprocal of a number: another last bit.
    """
    mean, mean_square = (sums / width).view(2, 2).unbind()
    return _z(values, mean=mean, variance=mean_square - mean * mean)


def two_pass_z(values: Tensor, window: Tensor, *, width: Tensor) -> Tensor:
    """Return the z-scores of `values` [2] in the `window` [2, W] that they have entered."""
    mean = _mean(window, width=width)
    return _z(values, mean=mean, variance=_mean((window - mean.unsqueeze(1)).square(), width=width))


def _mean(rows: Tensor, *, width: Tensor) -> Tensor:
    """Return the means [R] of [R, W], added in the order of `fold`: `mean` adds in each device's own."""
    window = rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, (1 << (window - 1).bit_length()) - window))
    return fold(padded) / width


def _z(values: Tensor, *, mean: Tensor, variance: Tensor) -> Tensor:
    std = square_root(variance)
    return ((values - mean) / std).masked_fill_(std == 0, 0.0)


def square_root(x: Tensor) -> Tensor:
    """Return IEEE square roots [n] in float64, NaN for negatives.

    On CPUs `torch.sqrt` comes from a vector library that misses the last bit of 1.3 % of all float64
    values; the Cholesky factor of a 1x1 matrix is the processor's own, correctly rounded root.
    """
    if x.device.type != "cpu":
        return torch.sqrt(x)
    root: Tensor = torch.linalg.cholesky_ex(x.view(-1, 1, 1)).L.view(-1)
    return root.masked_fill_(x < 0, math.nan)
