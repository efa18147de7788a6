"""RMS norm, SwiGLU and rotary positions, and their gradients; `fast` and `plain` as in `runner.model.layers`.

Legend: B sequences, T tokens, C channels, F feed-forward channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.model import compiled_layers
from runner.model.layers import Kernels, is_compiled, is_fast


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, kernels: Kernels) -> Tensor:
    """Scale the last dimension of `x` [..., C] to a root mean square of 1, then by `weight` [C].

    Zhang & Sennrich 2019. The result has the type of `x`, or already the one that the next product reads.
    """
    y: Tensor
    if is_compiled(x, kernels):
        y = compiled_layers.Norm.apply(x, weight, None, eps)  # type: ignore[no-untyped-call]
    elif is_fast(x, kernels):
        y = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    else:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)
    return y


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, *, eps: float, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Return x + delta and its RMS norm."""
    if is_compiled(x, kernels, delta):
        total, y = compiled_layers.AddNorm.apply(x, delta, weight, None, eps)  # type: ignore[no-untyped-call]
        return total, y
    total = x + delta
    return total, rms_norm(total, weight, eps=eps, kernels=kernels)


def swiglu(gate_up: Tensor, *, kernels: Kernels) -> Tensor:
    """Return silu(gate) * up of `gate_up` [..., 2F], the two halves side by side (Shazeer 2020)."""
    y: Tensor
    if is_compiled(gate_up, kernels):
        y = compiled_layers.SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    elif is_fast(gate_up, kernels):
        y = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    else:
        gate, up = gate_up.chunk(2, -1)
        y = F.silu(gate) * up
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, kernels: Kernels) -> Tensor:
    """Turn each pair (i, i + D/2) of `x` [B, H, T, D] by its position's angle (Su et al. 2021).

    `cos`, `sin` [T, D/2] fp32.
    """
    if is_fast(x, kernels):
        y: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return y
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """torch's own takes six times as long as its layer norm on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x * rstd
        dweight = (dy * normed).sum(tuple(range(x.dim() - 1)))
        dnormed = dy * weight
        overlap = (dnormed * normed).mean(-1, keepdim=True)
        dx = dnormed.addcmul(normed, overlap, value=-1).mul_(rstd)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    """Writes both halves of the gradient where the projection's backward pass reads them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        ctx.save_for_backward(gate_up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        gradient = torch.empty_like(gate_up)
        dgate, dup = gradient.chunk(2, -1)
        torch.mul(dy, F.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
        return gradient


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, sin, direction=-1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, direction: int) -> Tensor:
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = y.chunk(2, -1)
    first.copy_((a * cos).addcmul_(b, sin, value=-direction))
    second.copy_((b * cos).addcmul_(a, sin, value=direction))
    return y
