"""Gradient clipping as one factor on the complete gradient; the gradients themselves are not touched."""

from __future__ import annotations

import ctypes
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from runner import native
from runner.host_scalars import HostScalars

_float32 = HostScalars(torch.float32)
_LEAST = torch.finfo(torch.float32).tiny  # what is less may count as 0, and stop every weight


def clip_by_norm(norm: Tensor, *, max_norm: Annotated[float, Gt(0)] | None) -> Tensor:
    """Return the factor [] that brings a gradient of global norm `norm` down to `max_norm`.

    Exactly `max_norm / norm` in fp32 above the limit, else 1 (llm.c; no epsilon as in
    `clip_grad_norm_`). An infinite norm gives 0 and a NaN norm 1: neither reaches a weight, since every
    outlier part but `off` refuses such a step. `max_norm=None` is off; 0 is an error, not a freeze.
    """
    if max_norm is None:
        return torch.ones_like(norm)
    if not max_norm >= _LEAST:
        raise ValueError(
            f"clip.max_norm={max_norm} must be above 0 as a float32: null (clip=none) turns clipping off"
        )
    if norm.is_cuda and (kernels := native.triton_kernels()) is not None:
        factor: Tensor = kernels.clip_factor(norm, max_norm=max_norm)
        return factor
    if norm.device.type == "cpu" and norm.dtype == torch.float32:
        return _on_host(float(norm), limit=ctypes.c_float(max_norm).value)
    # A tensor, because torch computes `number / tensor` as number * (1 / tensor): another last bit.
    limit = torch.full_like(norm, max_norm)
    return torch.where(norm > limit, limit / norm, 1.0)


def _on_host(norm: float, *, limit: float) -> Tensor:
    """Do the same for float32 values: rounding their quotient in float64 first does not change its bits."""
    return _float32(limit / norm if norm > limit else 1.0)
