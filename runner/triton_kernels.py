# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The update, the norm, the guard and llm.c's stream on a GPU: the same bits as their torch definitions.

Import this module only where Triton is installed (`native.triton_kernels`). Every kernel is launched
with `enable_fp_fusion=False`: Triton would otherwise contract a * b + c where the definition rounds twice.
Nothing here waits for the device: what changes from step to step arrives in device memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.optimizer.reference import Part
from runner.triton_guard import WIDTH as WIDTH
from runner.triton_guard import clip_factor as clip_factor
from runner.triton_guard import fold
from runner.triton_guard import judge_by_z as judge_by_z
from runner.triton_guard import judge_finite as judge_finite
from runner.triton_guard import norm as norm
from runner.triton_guard import row_sums as row_sums
from runner.triton_ieee import divide, square_root

ELEMENTS = 1024  # of one program of the update


@triton.jit
def adamw_kernel(
    param_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    master_ptr,
    scalars_ptr,
    scale_ptr,
    apply_ptr,
    seed_ptr,
    decay,
    n,
    start,
    param_stride,
    grad_stride,
    HALF: tl.constexpr,
    MASTER: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Update SIZE elements of one layer; program (block, layer)."""
    if tl.load(apply_ptr) == 0:
        return
    layer = tl.program_id(1)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = i < n
    at = layer.to(tl.int64) * n + i
    to = layer.to(tl.int64) * param_stride + i
    g = tl.load(scale_ptr) * tl.load(grad_ptr + layer.to(tl.int64) * grad_stride + i, mask=mask, other=0.0)
    m = _lerp(tl.load(scalars_ptr + 1), tl.load(m_ptr + at, mask=mask, other=0.0), g)
    v = _lerp(tl.load(scalars_ptr + 2), tl.load(v_ptr + at, mask=mask, other=0.0), g * g)
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)
    m_hat = divide(m, tl.load(scalars_ptr + 3) + tl.zeros_like(m))
    v_hat = divide(v, tl.load(scalars_ptr + 4) + tl.zeros_like(v))
    ratio = divide(m_hat, square_root(v_hat) + tl.load(scalars_ptr + 5))
    old = _exact(param_ptr + to, master_ptr + at, mask, HALF, MASTER)
    new = old - tl.load(scalars_ptr) * (ratio + decay * old)
    if MASTER:
        tl.store(master_ptr + at, new, mask=mask)
    if HALF:
        seed = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
        new = _round(new, _noise((start + i).to(tl.uint32), layer.to(tl.uint32), seed))
    tl.store(param_ptr + to, new, mask=mask)


@triton.jit
def _lerp(beta, old, new):
    """Move from `new` to `old` by `beta`, in llm.c's two fused operations."""
    beta = beta + tl.zeros_like(new)
    return tl.math.fma(beta, old, tl.math.fma(-beta, new, new))


@triton.jit
def _exact(params, masters, mask, HALF: tl.constexpr, MASTER: tl.constexpr):
    """Return the fp32 weights that the update starts from."""
    if MASTER:
        weights = tl.load(masters, mask=mask, other=0.0)
    elif HALF:
        bits = tl.load(params, mask=mask, other=0).to(tl.int32)
        weights = ((bits & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    else:
        weights = tl.load(params, mask=mask, other=0.0)
    return weights


@triton.jit
def _noise(i, layer, seed):
    """SquirrelNoise5 at llm.c's position of element i of a layer."""
    k = ((i & 511) + 198491317 * ((i & 0xFFFFFE00) + layer)) * 0xD2A80A3F
    k = k + seed
    k = k ^ (k >> 9)
    k = k + 0xA884F197
    k = k ^ (k >> 11)
    k = k * 0x6C736F4B
    k = k ^ (k >> 13)
    k = k + 0xB79F3ABB
    k = k ^ (k >> 15)
    k = k * 0x1B56C4F5
    return k ^ (k >> 17)


@triton.jit
def _round(x, noise):
    """Round stochastically to bfloat16; return its bits as int16."""
    bits = x.to(tl.uint32, bitcast=True)
    kept = tl.where((bits & 0xFFFF) > (noise & 0xFFFF), bits | 0xFFFF, bits & 0xFFFF0000)
    nearest = (kept + 0x7FFF + ((kept >> 16) & 1)) >> 16
    return tl.where((kept & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, nearest).to(tl.int16)


@triton.jit
def block_sums_kernel(x_ptr, first_ptr, length_ptr, out_ptr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Sum the squares of one block into its lanes, each lane in order, and fold the lanes."""
    block = tl.program_id(0)
    first, length = tl.load(first_ptr + block), tl.load(length_ptr + block)
    lane = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), dtype=tl.float64)
    for row in range(ROWS):
        i = row * LANES + lane
        x = tl.load(x_ptr + first + i, mask=i < length, other=0.0).to(tl.float64)
        sums += x * x
    tl.store(out_ptr + block, fold(sums, LANES))


@triton.jit
def draws_kernel(state_ptr, seeds_ptr, apply_ptr, pending, count):
    """Draw `pending` seeds, then `count` more that stay drawn only if the update is applied."""
    state = tl.load(state_ptr).to(tl.uint64, bitcast=True)
    for _ in range(pending):
        state = _next(state)
    before = state
    for i in range(count):
        state = _next(state)
        seed = ((state * 0x2545F4914F6CDD1D) >> 32).to(tl.uint32)
        tl.store(seeds_ptr + i, seed.to(tl.int32, bitcast=True))
    if tl.load(apply_ptr) == 0:
        tl.store(state_ptr, before.to(tl.int64, bitcast=True))
    else:
        tl.store(state_ptr, state.to(tl.int64, bitcast=True))
        tl.store(state_ptr + 1, before.to(tl.int64, bitcast=True))


@triton.jit
def _next(state):
    """Advance xorshift64."""
    state = state ^ (state >> 12)
    state = state ^ (state << 25)
    return state ^ (state >> 27)


def adamw(parts: Sequence[Part], *, scalars: Tensor, scale: Tensor, seeds: Tensor, apply: Tensor) -> None:
    """Update every part in place; `scalars` [6] is lr, betas, corrections, eps; `seeds` int32 [parts]."""
    flag = apply.view(torch.uint8)
    for index, part in enumerate(parts):
        param, grad = part.segment.param, part.segment.grad
        layers, n = param.shape
        half = param.dtype == torch.bfloat16
        adamw_kernel[(triton.cdiv(n, ELEMENTS), layers)](
            param.view(torch.int16) if half else param,
            grad,
            part.m,
            part.v,
            part.m if part.master is None else part.master,
            scalars,
            scale,
            flag,
            seeds[index],
            part.decay,
            n,
            part.segment.start,
            param.stride(0),
            grad.stride(0),
            HALF=half,
            MASTER=part.master is not None,
            SIZE=ELEMENTS,
            num_warps=4,
            enable_fp_fusion=False,
        )


def block_sums(flat: Tensor, *, first: Tensor, length: Tensor, out: Tensor, block: int, lanes: int) -> None:
    """Write each block's sum of squares (int64 `first`, `length` [blocks]) to `out` [blocks] float64."""
    block_sums_kernel[(len(first),)](
        flat, first, length, out, LANES=lanes, ROWS=block // lanes, num_warps=1, enable_fp_fusion=False
    )


def draws(state: Tensor, *, pending: int, count: int, apply: Tensor) -> Tensor:
    """Return `count` seeds int32 of the stream in `state` [2] int64 (state, last update), advancing it."""
    seeds = torch.empty(count, dtype=torch.int32, device=state.device)
    draws_kernel[(1,)](state, seeds, apply.view(torch.uint8), pending, count, num_warps=1)
    return seeds
