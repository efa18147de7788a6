"""Layer norm, GELU and their gradients.

`fast` kernels are for CPUs: built from vectorised torch operations on cache-sized pieces, with
gradients whose bits do not depend on the number of threads. `plain` ones are torch's own, used on
other devices and as the reference in tests.
Legend: B sequences, T tokens, C channels.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernels = Literal["fast", "plain"]

LAYER_NORM_EPS = 1e-5  # llm.c train_gpt2.c, layernorm_forward
PIECE = 1 << 15  # elements per pass of the GELU: a few fp32 temporaries stay in a core's L2 cache


def is_fast(x: Tensor, kernels: Kernels) -> bool:
    """Whether the CPU kernels apply to `x`; elsewhere torch's own are the fast ones."""
    return kernels == "fast" and x.device.type == "cpu"


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, kernels: Kernels) -> Tensor:
    """Normalise the last dimension of `x` [..., C] to mean 0 and variance 1, then scale and shift."""
    if is_fast(x, kernels):
        y: Tensor = _LayerNorm.apply(x, weight, bias)
        return y
    return F.layer_norm(x, (x.shape[-1],), weight, bias, LAYER_NORM_EPS)


def gelu(x: Tensor, *, kernels: Kernels) -> Tensor:
    """Apply GPT-2's GELU, the tanh approximation (Hendrycks & Gimpel 2016, section 2)."""
    if is_fast(x, kernels):
        y: Tensor = _TanhGelu.apply(x)
        return y
    return F.gelu(x, approximate="tanh")


class _LayerNorm(torch.autograd.Function):
    """torch sums the weight gradient over as many partial rows as there are threads; this one does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, LAYER_NORM_EPS)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, [x.shape[-1]], mean, rstd, weight, bias, [True, False, False]
        )
        rows = tuple(range(x.dim() - 1))
        dweight = ((x - mean).mul_(rstd)).mul_(dy).sum(rows)
        return dx, dweight.to(weight.dtype), dy.sum(rows).to(bias.dtype)


class _TanhGelu(torch.autograd.Function):
    """x * (1 + tanh u) / 2 = x * sigmoid(2u), where a sigmoid costs a fifth of torch's tanh.

    The derivative is made along with the value and kept in place of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        slope = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        flat, flat_y = x.view(-1), y.view(-1)
        flat_slope = slope.view(-1) if slope is not None else None
        for start in range(0, flat.numel(), PIECE):
            piece = slice(start, start + PIECE)
            flat_y[piece], derivative = _gelu_piece(flat[piece])
            if flat_slope is not None:
                flat_slope[piece] = derivative
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return dy * slope


def _gelu_piece(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU and its derivative, at least in single precision."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    a = 2 * math.sqrt(2 / math.pi)
    square = x * x
    gate = (square * (a * 0.044715)).add_(a).mul_(x).sigmoid_()
    y = x * gate
    inner = square.mul_(3 * a * 0.044715).add_(a)  # derivative of 2u
    return y, torch.addcmul(gate, torch.addcmul(y, y, gate, value=-1), inner)
