"""AdamW in torch operations: the definition of every bit, for any device, and the path without kernels.

llm.c's update (llmc/adamw.cuh) in IEEE float32, with a fused multiply-add only where llm.c writes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.api import Segment
from runner.rng import stochastic_round, weight_noise

CHUNK = 1 << 14  # elements at a time on a CPU, so that the temporaries stay in its second-level cache
_HALF_BITS = 1 << 28  # of a float64: exactly between two float32
_LOW_BITS = (1 << 29) - 1
_SMALLEST_NORMAL = np.finfo(np.float32).tiny


class Step(NamedTuple):
    """A step's scalars as 0-d fp32 tensors on the device of the data."""

    scale: Tensor
    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    correction1: Tensor  # 1 - beta1^t
    correction2: Tensor
    eps: Tensor


class Part(NamedTuple):
    """A segment with its state, all [layers, n]; `master` is None where the weights are their own."""

    segment: Segment
    m: Tensor
    v: Tensor
    master: Tensor | None
    decay: float


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return fp32 a * b + c rounded once.

    The product is exact in float64 and the sum is made there. Rounding it again to float32 is wrong
    only where the float64 sum was inexact and fell between two float32; those are rounded to odd
    first (Boldo and Melquiond 2008), which makes the second rounding right.
    """
    product = a.double() * b.double()
    wide = product + c
    if wide.device.type != "cpu":
        return _odd(product, c.double(), wide).float()
    values = np.atleast_1d(wide.numpy())
    doubtful = (values.view(np.int64) & _LOW_BITS) == _HALF_BITS
    doubtful |= np.abs(values) < _SMALLEST_NORMAL
    if doubtful.any():
        at = torch.from_numpy(doubtful & (values != 0)).view(wide.shape)
        wide[at] = _odd(product[at], c.double().expand_as(wide)[at], wide[at])
    return wide.float()


def _odd(product: Tensor, addend: Tensor, wide: Tensor) -> Tensor:
    """Return `wide`, the float64 sum, rounded to odd instead of to nearest even."""
    back = wide - product
    error = (product - (wide - back)) + (addend - back)
    even = (wide.view(torch.int64) & 1) == 0
    inexact = (error != 0) & torch.isfinite(error)
    toward = torch.where(error > 0, torch.inf, -torch.inf).to(torch.float64)
    return torch.where(inexact & even, torch.nextafter(wide, toward), wide)


def adamw(
    old: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Step, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new (weight, m, v) of fp32 vectors; nothing is modified."""
    g = step.scale * grad
    squared = g * g
    m = fma(step.beta1, m, fma(-step.beta1, g, g))
    v = fma(step.beta2, v, fma(-step.beta2, squared, squared))
    m_hat = m / step.correction1
    v_hat = v / step.correction2
    return old - step.lr * (m_hat / (_sqrt(v_hat) + step.eps) + decay * old), m, v


def _sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded root of fp32 `x`; torch's own on a CPU is not."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return x.double().sqrt().float()


def update(
    parts: Sequence[Part], *, step: Step, seeds: Sequence[int | Tensor], apply: Tensor | None = None
) -> None:
    """Update every part in place; where `apply` [] bool is given, select with it instead of branching."""
    for part, seed in zip(parts, seeds, strict=True):
        layers, n = part.segment.param.shape
        at_once = CHUNK if part.m.device.type == "cpu" else max(n, 1)
        for layer in range(layers):
            for first in range(0, n, at_once):
                _update_chunk(
                    part, layer, slice(first, min(first + at_once, n)), step=step, seed=seed, apply=apply
                )


def _update_chunk(
    part: Part, layer: int, at: slice, *, step: Step, seed: int | Tensor, apply: Tensor | None
) -> None:
    param, m, v = part.segment.param[layer, at], part.m[layer, at], part.v[layer, at]
    exact = param if part.master is None else part.master[layer, at]
    new, new_m, new_v = adamw(exact.float(), part.segment.grad[layer, at], m, v, step, part.decay)
    written = [(m, new_m), (v, new_v)]
    if part.master is not None:
        written.append((exact, new))
    if param.dtype == torch.bfloat16:
        start = part.segment.start + at.start
        noise = weight_noise(new.numel(), start=start, layer=layer, seed=seed, device=new.device)
        new = stochastic_round(new, noise)
    written.append((param, new))
    for target, value in written:
        target.copy_(value if apply is None else torch.where(apply, value, target))
