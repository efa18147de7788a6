"""A matrix product whose weight gradient goes straight into the engine's buffer.

autograd would make it in the product's type, widen it into a second tensor, and hand that over to be copied:
three passes over memory as large as the model. Where the engine offers a parameter's `main_grad`
(`runner.parallel.gradient`) there is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.model import compiled
from runner.model.compiled_layers import Grads, product_dtype
from runner.model.layers import is_fast


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias as `F.linear` does, under autocast too."""
    learns = torch.is_grad_enabled() and weight.requires_grad
    if learns and is_fast(x, "fast") and compiled.usable(x.device, x.dtype, product_dtype(x)):
        y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x, weight, bias)


def take_main_grad(parameter: Tensor) -> Tensor | None:
    """Return the buffer that the engine offers for a gradient to begin in, to the first who asks.

    Who writes the gradient there returns an alias of it (`detach`) to autograd: it keeps, without a copy,
    a tensor that nobody else refers to.
    """
    main: Tensor | None = getattr(parameter, "main_grad", None)
    if main is not None:
        parameter.main_grad = None  # type: ignore[attr-defined]
    return main


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = product_dtype(x)
        rows, short = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
        if bias is None:
            y = torch.mm(rows, short.t())
        else:
            y = torch.addmm(bias.to(dtype), rows, short.t())
        ctx.save_for_backward(rows, short)
        ctx.weight, ctx.bias_dtype, ctx.x = weight, None if bias is None else bias.dtype, (x.shape, x.dtype)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Grads:
        rows, short = ctx.saved_tensors
        shape, dtype = ctx.x
        dy = dy.reshape(-1, dy.shape[-1])
        dbias = None if ctx.bias_dtype is None else dy.sum(0).to(ctx.bias_dtype)
        dx = (dy @ short).view(shape).to(dtype) if ctx.needs_input_grad[0] else None
        return dx, _weight_gradient(dy, rows, weight=ctx.weight), dbias


def _weight_gradient(dy: Tensor, rows: Tensor, *, weight: Tensor) -> Tensor:
    main = take_main_grad(weight)
    if main is None:
        return torch.mm(dy.t(), rows).to(weight.dtype)
    if main.dtype == dy.dtype:
        torch.mm(dy.t(), rows, out=main)
    else:
        main.copy_(torch.mm(dy.t(), rows))
    return main.detach()
