"""Layer norm and GELU, their gradients, and which kernels a layer runs.

`fast` kernels are for CPUs: compiled ones where there are (`runner.model.compiled`), else torch operations
on cache-sized pieces; with either the bits of a gradient do not depend on the number of threads. `plain` ones
are torch's own, used on other devices and as the reference in tests.
Legend: B sequences, T tokens, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.model import compiled, compiled_layers

Kernels = Literal["fast", "plain"]
Linear = Callable[..., Tensor]
"""`F.linear` or another product of its signature: what a block multiplies by its weights with."""

LAYER_NORM_EPS = 1e-5  # llm.c train_gpt2.c, layernorm_forward
GELU_CUBIC = 0.044715
GELU_FACTOR = 2 * math.sqrt(2 / math.pi)
PIECE = 1 << 16  # elements per pass of the GELU: a few fp32 temporaries stay in a core's L2 cache


def is_fast(x: Tensor, kernels: Kernels) -> bool:
    """Whether the CPU kernels apply to `x`; elsewhere torch's own are the fast ones.

    Under torch.compile plain operations are, which the compiler fuses by itself.
    """
    return kernels == "fast" and x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_compiled(x: Tensor, kernels: Kernels, delta: Tensor | None = None) -> bool:
    """Whether the compiled kernels take `x`, and `delta` added to it."""
    if not is_fast(x, kernels):
        return False
    added, made = x.dtype if delta is None else delta.dtype, compiled_layers.product_dtype(x)
    return compiled.usable(x.device, x.dtype, added, made) and (
        x.dtype == torch.float32 or x.dtype == added == made
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, kernels: Kernels) -> Tensor:
    """Normalise the last dimension of `x` [..., C] to mean 0 and variance 1, then scale and shift."""
    y: Tensor
    if is_compiled(x, kernels):
        y = compiled_layers.Norm.apply(x, weight, bias, LAYER_NORM_EPS)  # type: ignore[no-untyped-call]
    elif is_fast(x, kernels):
        y = _LayerNorm.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    else:
        y = F.layer_norm(x, (x.shape[-1],), weight, bias, LAYER_NORM_EPS)
    return y


def add_layer_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, *, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Return x + delta and its layer norm."""
    if is_compiled(x, kernels, delta):
        total, y = compiled_layers.AddNorm.apply(x, delta, weight, bias, LAYER_NORM_EPS)  # type: ignore[no-untyped-call]
        return total, y
    total = x + delta
    return total, layer_norm(total, weight, bias, kernels=kernels)


def gelu(x: Tensor, *, kernels: Kernels) -> Tensor:
    """Apply GPT-2's GELU, the tanh approximation (Hendrycks & Gimpel 2016, section 2)."""
    y: Tensor
    if is_compiled(x, kernels):
        y = compiled_layers.Gelu.apply(x)  # type: ignore[no-untyped-call]
    elif is_fast(x, kernels):
        y = _TanhGelu.apply(x)  # type: ignore[no-untyped-call]
    else:
        y = F.gelu(x, approximate="tanh")
    return y


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

    The derivative is made along with the value, in at least single precision, and kept in place of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, slope = torch.empty_like(x), torch.empty_like(x)
        size = min(PIECE, x.numel())
        scratch = x.new_empty(4, size, dtype=torch.promote_types(x.dtype, torch.float32))
        factor = torch.tensor(GELU_FACTOR, dtype=scratch.dtype)
        pieces = (torch.split(t.view(-1), size) for t in (x, y, slope))
        for x_piece, y_piece, slope_piece in zip(*pieces, strict=True):
            _gelu_piece(
                x_piece, y=y_piece, slope=slope_piece, scratch=scratch[:, : len(x_piece)], factor=factor
            )
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return dy.mul(slope)


def _gelu_piece(x: Tensor, *, y: Tensor, slope: Tensor, scratch: Tensor, factor: Tensor) -> None:
    """Write GELU and its derivative; 2u = factor * (x + 0.044715 x^3)."""
    wide, square, gate, spare = scratch
    torch.mul(wide.copy_(x), wide, out=square)
    torch.add(factor, square, alpha=GELU_FACTOR * GELU_CUBIC, out=gate).mul_(wide).sigmoid_()
    torch.mul(wide, gate, out=y)
    torch.ops.aten.sigmoid_backward.grad_input(wide, gate, grad_input=spare)  # x * gate * (1 - gate)
    torch.add(factor, square, alpha=3 * GELU_FACTOR * GELU_CUBIC, out=square)  # derivative of 2u
    slope.copy_(torch.addcmul(gate, spare, square, out=spare))
