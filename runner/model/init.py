"""Initial weights: llm.c's to the bit, and the normal draws of other models.

llm.c draws with a Mersenne twister and the Box-Muller transform in single precision, through the C
library's `logf`, `cosf` and `sinf`. Those are short polynomials evaluated in double precision and
rounded once, so they are repeated here on whole arrays; torch's own `normal_` takes the same random
numbers but ends up to 5e-8 away.
Sources: llm.c llmc/rand.h (`normal_`), train_gpt2.cu (`gpt_build_from_descriptor`); the polynomials
are those of Arm's optimized routines, which glibc uses (`logf`, `sincosf`).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STD = 0.02  # Radford et al. 2019; llm.c

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

CHUNK = 1 << 17  # values per pass: the working set stays in a core's cache
EPSILON = np.float32(1e-12)  # rand.h, keeps the logarithm finite

# log(z) for z in [0.7, 1.4] around 16 points c: rows 1/c, log(c)
_LOG_TABLE: F64 = np.array(
    [
        [float.fromhex(word) for word in row.split()]
        for row in (
            "0x1.661ec79f8f3bep+0 -0x1.57bf7808caadep-2",
            "0x1.571ed4aaf883dp+0 -0x1.2bef0a7c06ddbp-2",
            "0x1.49539f0f010bp+0 -0x1.01eae7f513a67p-2",
            "0x1.3c995b0b80385p+0 -0x1.b31d8a68224e9p-3",
            "0x1.30d190c8864a5p+0 -0x1.6574f0ac07758p-3",
            "0x1.25e227b0b8eap+0 -0x1.1aa2bc79c81p-3",
            "0x1.1bb4a4a1a343fp+0 -0x1.a4e76ce8c0e5ep-4",
            "0x1.12358f08ae5bap+0 -0x1.1973c5a611cccp-4",
            "0x1.0953f419900a7p+0 -0x1.252f438e10c1ep-5",
            "0x1p+0 0x0p+0",
            "0x1.e608cfd9a47acp-1 0x1.aa5aa5df25984p-5",
            "0x1.ca4b31f026aap-1 0x1.c5e53aa362eb4p-4",
            "0x1.b2036576afce6p-1 0x1.526e57720db08p-3",
            "0x1.9c2d163a1aa2dp-1 0x1.bc2860d22477p-3",
            "0x1.886e6037841edp-1 0x1.1058bc8a07ee1p-2",
            "0x1.767dcf5534862p-1 0x1.4043057b6ee09p-2",
        )
    ]
).T.copy()
_LOG_A = [
    float.fromhex(a) for a in ("-0x1.00ea348b88334p-2", "0x1.5575b0be00b6ap-2", "-0x1.ffffef20a4123p-2")
]
_LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_COS = [
    float.fromhex(a)
    for a in (
        "-0x1.ffffffd0c621cp-2",
        "0x1.55553e1068f19p-5",
        "-0x1.6c087e89a359dp-10",
        "0x1.99343027bf8c3p-16",
    )
]
_SIN = [float.fromhex(a) for a in ("-0x1.555545995a603p-3", "0x1.1107605230bc4p-7", "-0x1.994eb3774cf24p-13")]
_HALF_PI = float.fromhex("0x1.921fb54442d18p0")


def _log(x: F32) -> F32:
    """Return `logf` of positive normal numbers."""
    bits = x.view(np.int32)
    above = bits - np.int32(0x3F330000)  # 0.7: x = 2^k z with z in [0.7, 1.4]
    k = above >> 23
    row = (above >> 19) & 15
    z = (bits - (above & np.int32(-0x800000))).view(np.float32)
    r = z * _LOG_TABLE[0][row] - 1.0
    y = (_LOG_A[1] * r + _LOG_A[2]) + _LOG_A[0] * (r * r)
    return np.asarray(y * (r * r) + ((_LOG_TABLE[1][row] + k * _LN2) + r), dtype=np.float32)


def _cos_sin(x: F32) -> tuple[F32, F32]:
    """Return `cosf` and `sinf` of angles in [0, 2 pi]."""
    wide = x.astype(np.float64)
    quadrant = np.rint(wide * (1 / _HALF_PI))
    r = wide - quadrant * _HALF_PI
    r2 = r * r
    r3, r4 = r * r2, r2 * r2
    sin = (r + r3 * _SIN[0]) + (r3 * r2) * (_SIN[1] + r2 * _SIN[2])
    cos = ((1.0 + r2 * _COS[0]) + r4 * _COS[1]) + (r4 * r2) * (_COS[2] + r2 * _COS[3])
    q = quadrant.astype(np.int32)
    odd = (q & 1).astype(bool)
    sign_sin = 1.0 - (q & 2)
    sign_cos = 1.0 - ((q + 1) & 2)
    return (
        np.asarray(np.where(odd, sin, cos) * sign_cos, dtype=np.float32),
        np.asarray(np.where(odd, cos, sin) * sign_sin, dtype=np.float32),
    )


def _box_muller(u: F32, std: np.float32) -> F32:
    """Turn uniforms [n, 16] into normals: in each row 8 radii, then 8 angles (`normal_fill_16`)."""
    radius = np.sqrt(np.float32(-2) * _log((np.float32(1) - u[:, :8]) + EPSILON))
    cos, sin = _cos_sin((2 * math.pi * u[:, 8:].astype(np.float64)).astype(np.float32))
    return np.concatenate([radius * cos * std + np.float32(0), radius * sin * std + np.float32(0)], axis=1)


def _few_normals(count: int, *, std: np.float32, generator: torch.Generator) -> F32:
    """Draw fewer than 16 values, which rand.h makes in pairs from 53-bit uniforms."""
    u = torch.rand(count + count % 2, dtype=torch.float64, generator=generator).numpy().astype(np.float32)
    radius = np.sqrt(np.float32(-2) * _log((np.float32(1) - u[1::2]) + EPSILON))
    cos, sin = _cos_sin((2 * math.pi * u[::2].astype(np.float64)).astype(np.float32))
    first = radius * cos * std + np.float32(0)
    second = (radius * sin).astype(np.float64) * float(std)
    return np.stack([first, second.astype(np.float32)], axis=1).reshape(-1)[:count]


def normal_(out: Tensor, *, std: float, generator: torch.Generator) -> None:
    """Fill a contiguous fp32 CPU tensor with N(0, std), the bits of rand.h's `normal_`."""
    assert out.is_contiguous()
    assert (out.dtype, out.device.type) == (torch.float32, "cpu")
    flat, narrow_std = out.detach().view(-1), np.float32(std)
    if len(flat) < 16:
        flat.copy_(torch.from_numpy(_few_normals(len(flat), std=narrow_std, generator=generator)))
        return
    torch.rand(len(flat), generator=generator, out=flat)
    values, whole = flat.numpy(), len(flat) // 16 * 16
    for start in range(0, whole, CHUNK):
        rows = values[start : min(start + CHUNK, whole)].reshape(-1, 16)
        rows[:] = _box_muller(rows, narrow_std)
    if whole != len(flat):  # the last 16 are drawn anew
        last = torch.rand(16, generator=generator).numpy().reshape(1, 16)
        values[-16:] = _box_muller(last, narrow_std)[0]


def residual_std(layers: int) -> float:
    """Return the standard deviation of the weights that write into the residual stream.

    0.02 / sqrt(2L) keeps the stream's variance independent of depth (Radford et al. 2019, section
    2.3; Shoeybi et al. 2019). Multiplied out in single precision, as llm.c does.
    """
    return float(np.float32(STD) * np.float32(1.0 / np.sqrt(np.float32(2 * layers))))
