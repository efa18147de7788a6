"""The gradients of the compiled kernels: what a layer on a CPU runs where `compiled.usable` says so.

Under autocast a norm hands over the type that the next product reads, which saves a pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.model import compiled
from runner.model.compiled import Normed

Grads = tuple[Tensor | None, ...]


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product would read `x`."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class Norm(torch.autograd.Function):
    """Layer norm, or RMS norm without a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        normed = compiled.norm(
            x, weight=weight, bias=bias, eps=eps, dtype=product_dtype(x), centred=bias is not None
        )
        _keep(ctx, normed, weight=weight)
        return normed.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Grads:
        total, weight, mean, rstd = ctx.saved_tensors
        dx, _, dweight, dbias = compiled.norm_back(
            dy, saved=Normed(total, dy, mean, rstd), weight=weight, carry=None, delta_dtype=None
        )
        return dx, dweight.to(weight.dtype), None if mean is None else dbias.to(weight.dtype), None


class AddNorm(torch.autograd.Function):
    """The residual stream moved on by a layer's output, and its norm: read once, for both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed = compiled.norm(
            x,
            weight=weight,
            bias=bias,
            eps=eps,
            dtype=product_dtype(x),
            delta=delta,
            centred=bias is not None,
        )
        _keep(ctx, normed, weight=weight)
        ctx.delta_dtype = delta.dtype
        ctx.set_materialize_grads(False)
        return normed.total, normed.y

    @staticmethod
    def backward(ctx: Any, carry: Tensor | None, dy: Tensor | None) -> Grads:
        total, weight, mean, rstd = ctx.saved_tensors
        if dy is None:
            return carry, None if carry is None else carry.to(ctx.delta_dtype), None, None, None
        saved = Normed(total, dy, mean, rstd)
        dx, ddelta, dweight, dbias = compiled.norm_back(
            dy, saved=saved, weight=weight, carry=carry, delta_dtype=ctx.delta_dtype
        )
        return dx, ddelta, dweight.to(weight.dtype), None if mean is None else dbias.to(weight.dtype), None


class Gelu(torch.autograd.Function):
    """The derivative is made along with the value and kept in place of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, slope = compiled.gelu(x)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return dy.mul(slope)


class SwiGLU(torch.autograd.Function):
    """Writes both halves of the gradient where the projection's backward pass reads them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return compiled.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return compiled.swiglu_back(dy, gate_up)


class SplitHeads(torch.autograd.Function):
    """One pass in each direction, rotary positions included."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: tuple[int, int, int], cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.heads = heads
        ctx.save_for_backward(cos, sin)
        return compiled.split(qkv, heads=heads, cos=cos, sin=sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Grads:
        cos, sin = ctx.saved_tensors
        return compiled.join(gradients, heads=ctx.heads, cos=cos, sin=sin), None, None, None


def _keep(ctx: Any, normed: Normed, *, weight: Tensor) -> None:
    ctx.save_for_backward(normed.total, weight, normed.mean, normed.rstd)
