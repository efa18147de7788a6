# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""From chunk sums to verdict and clip factor on a GPU: what the torch definitions do in a hundred launches.

Import this module through `native.triton_kernels`. Every kernel is launched with `enable_fp_fusion=False`,
so that each operation rounds where the definition's does; float64 roots and quotients are IEEE on a GPU.
Nothing here waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.api import Verdict
from runner.triton_ieee import divide

WIDTH = 4096  # sums that a program folds in registers; longer rows are halved in memory first


@triton.jit
def fold(x, SIZE: tl.constexpr):
    """Do `norm.fold` of [SIZE], a power of two: the upper half is added to the lower until one is left."""
    for level in tl.static_range(12):
        if SIZE >> level > 1:
            x = tl.sum(tl.reshape(x, (2, SIZE >> (level + 1))), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def fold_row(row_ptr, n, SIZE: tl.constexpr):
    """Do `norm.fold` of the n float64 at `row_ptr`, in place where they are more than SIZE."""
    i = tl.arange(0, SIZE)
    half = tl.full((), SIZE, tl.int64)
    while half * 2 < n:
        half = half * 2
    while n > SIZE:
        for first in range(0, n - half, SIZE):
            mask = first + i < n - half
            lower = tl.load(row_ptr + first + i, mask=mask, other=0.0)
            upper = tl.load(row_ptr + half + first + i, mask=mask, other=0.0)
            tl.store(row_ptr + first + i, lower + upper, mask=mask)
        tl.debug_barrier()  # the next round's threads read what others wrote
        n = half
        half = half // 2
    return fold(tl.load(row_ptr + i, mask=i < n, other=0.0), SIZE)


@triton.jit
def row_sums_kernel(x_ptr, starts_ptr, out_ptr, SIZE: tl.constexpr):
    """Fold the elements from starts[r] to starts[r + 1]; program r."""
    row = tl.program_id(0)
    first = tl.load(starts_ptr + row)
    tl.store(out_ptr + row, fold_row(x_ptr + first, tl.load(starts_ptr + row + 1) - first, SIZE))


@triton.jit(do_not_specialize=["n"])
def norm_kernel(sums_ptr, n, out_ptr, SIZE: tl.constexpr):
    """Store the root of the folded sums as fp32."""
    root = tl.sqrt(fold_row(sums_ptr, n.to(tl.int64), SIZE))
    tl.store(out_ptr, root.to(tl.float32))


@triton.jit
def clip_kernel(norm_ptr, out_ptr, max_norm):
    """Store max_norm / norm, or 1 where the norm is not above it."""
    norm = tl.load(norm_ptr)
    limit = max_norm + tl.zeros_like(norm)
    tl.store(out_ptr, tl.where(norm > limit, divide(limit, norm), 1.0))


@triton.jit
def _non_finite(loss, norm):
    """Return the first two bits of REASONS, int64."""
    bad_loss = tl.where(tl.abs(loss) < float("inf"), 0, 1)
    bad_norm = tl.where(tl.abs(norm) < float("inf"), 0, 2)
    return (bad_loss + bad_norm).to(tl.int64)


@triton.jit
def finite_kernel(loss_ptr, norm_ptr, reason_ptr, z_ptr, apply_ptr):
    """Judge by finiteness alone."""
    reason = _non_finite(tl.load(loss_ptr), tl.load(norm_ptr))
    nan = tl.full((), float("nan"), tl.float64)
    tl.store(reason_ptr, reason)
    tl.store(z_ptr, nan)
    tl.store(z_ptr + 1, nan)
    tl.store(apply_ptr, tl.where(reason == 0, 1, 0).to(tl.uint8))


@triton.jit
def _score(x, mean, variance):
    """Return the z-score; NaN where the variance is negative."""
    std = tl.sqrt(variance)
    return tl.where(std == 0, 0.0, (x - mean) / std)


@triton.jit
def _two_pass(x, row_ptr, slot, W: tl.constexpr, SIZE: tl.constexpr):
    """Return the z-score of x in the window that it enters at `slot`."""
    i = tl.arange(0, SIZE)
    width = tl.full((), W, tl.float64)
    window = tl.where(i == slot, x, tl.load(row_ptr + i, mask=i < W, other=0.0))
    mean = fold(window, SIZE) / width
    gap = window - mean
    return _score(x, mean, fold(tl.where(i < W, gap * gap, 0.0), SIZE) / width)


@triton.jit
def guard_kernel(
    loss_ptr,
    norm_ptr,
    ring_ptr,
    sums_ptr,
    seen_ptr,
    limits_ptr,
    reason_ptr,
    z_ptr,
    apply_ptr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    ROBUST: tl.constexpr,
):
    """Do `outlier.ZScore` of one step: score, judge, and let what may enter into the window."""
    x, y = tl.load(loss_ptr).to(tl.float64), tl.load(norm_ptr).to(tl.float64)
    x2, y2 = x * x, y * y
    seen = tl.load(seen_ptr)
    slot = seen % W
    at = ring_ptr + slot
    sum_x = tl.load(sums_ptr) - tl.load(at) + x
    sum_y = tl.load(sums_ptr + 1) - tl.load(at + W) + y
    sum_x2 = tl.load(sums_ptr + 2) - tl.load(at + 2 * W) + x2
    sum_y2 = tl.load(sums_ptr + 3) - tl.load(at + 3 * W) + y2
    if ROBUST:
        loss_z = _two_pass(x, ring_ptr, slot, W, SIZE)
        norm_z = _two_pass(y, ring_ptr + W, slot, W, SIZE)
    else:
        width = tl.full((), W, tl.float64)
        mean_x, mean_y = sum_x / width, sum_y / width
        loss_z = _score(x, mean_x, sum_x2 / width - mean_x * mean_x)
        norm_z = _score(y, mean_y, sum_y2 / width - mean_y * mean_y)
    loss_z = tl.where(seen < W, float("nan"), loss_z)
    norm_z = tl.where(seen < W, float("nan"), norm_z)
    narrow_x, narrow_y = loss_z.to(tl.float32), norm_z.to(tl.float32)
    over_x = (narrow_x > tl.load(limits_ptr)) & (narrow_x < float("inf"))
    over_y = (narrow_y > tl.load(limits_ptr + 1)) & (narrow_y < float("inf"))
    bad = _non_finite(x, y)
    reason = bad + tl.where(over_x, 4, tl.where(over_y, 8, 0)).to(tl.int64)
    tl.store(reason_ptr, reason)
    tl.store(z_ptr, loss_z)
    tl.store(z_ptr + 1, norm_z)
    tl.store(apply_ptr, tl.where(reason == 0, 1, 0).to(tl.uint8))
    tl.debug_barrier()  # the window was read by many threads
    keeps_out = reason if ROBUST else bad
    if keeps_out == 0:
        tl.store(at, x)
        tl.store(at + W, y)
        tl.store(at + 2 * W, x2)
        tl.store(at + 3 * W, y2)
        tl.store(sums_ptr, sum_x)
        tl.store(sums_ptr + 1, sum_y)
        tl.store(sums_ptr + 2, sum_x2)
        tl.store(sums_ptr + 3, sum_y2)
        tl.store(seen_ptr, seen + 1)


def row_sums(x: Tensor, *, starts: Tensor, longest: int, out: Tensor) -> None:
    """Fold rows of float64 `x`, from starts[r] to starts[r + 1] (int64), into `out` [rows].

    `x` is scratch afterwards.
    """
    size = min(WIDTH, triton.next_power_of_2(longest))
    row_sums_kernel[(len(out),)](x, starts, out, SIZE=size, num_warps=4, enable_fp_fusion=False)


def norm(sums: Tensor) -> Tensor:
    """Return the root [] fp32 of the fold of `sums` [n] float64."""
    out = torch.empty((), dtype=torch.float32, device=sums.device)
    size = min(WIDTH, triton.next_power_of_2(len(sums)))
    scratch = sums.clone() if len(sums) > size else sums
    norm_kernel[(1,)](scratch, len(sums), out, SIZE=size, num_warps=4, enable_fp_fusion=False)
    return out


def clip_factor(norm: Tensor, *, max_norm: float) -> Tensor:
    """Return the factor [] of `clip.clip_by_norm`."""
    out = torch.empty_like(norm)
    clip_kernel[(1,)](norm, out, float(max_norm), num_warps=1, enable_fp_fusion=False)
    return out


def judge_finite(loss: Tensor, norm: Tensor) -> Verdict:
    """Return the verdict of `outlier.Finite`."""
    verdict, reason, z, apply = _empty_verdict(norm.device)
    finite_kernel[(1,)](loss, norm, reason, z, apply, num_warps=1)
    return verdict


def judge_by_z(
    loss: Tensor, norm: Tensor, *, ring: Tensor, sums: Tensor, seen: Tensor, limits: Tensor, robust: bool
) -> Verdict:
    """Return the verdict of `outlier.ZScore`, whose state is updated in place."""
    verdict, reason, z, apply = _empty_verdict(norm.device)
    window = ring.shape[1]
    guard_kernel[(1,)](
        loss,
        norm,
        ring,
        sums,
        seen,
        limits,
        reason,
        z,
        apply,
        W=window,
        SIZE=triton.next_power_of_2(window),
        ROBUST=robust,
        num_warps=4 if robust else 1,
        enable_fp_fusion=False,
    )
    return verdict


def _empty_verdict(device: torch.device) -> tuple[Verdict, Tensor, Tensor, Tensor]:
    """Return a verdict to be written, and its reason [], z-scores [2] and decision [8] uint8: one buffer."""
    words = torch.empty(4, dtype=torch.int64, device=device)
    reason, z, flags = words[0], words[1:3].view(torch.float64), words[3:].view(torch.uint8)
    loss_z, norm_z = z.unbind()
    return Verdict(flags[0].view(torch.bool), loss_z, norm_z, reason), reason, z, flags
