# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Quotients and roots in fp32 that are rounded as IEEE wants it under every Triton, subnormal ones too."""

from __future__ import annotations

import os

import triton
import triton.language as tl

_OLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6)
_FLUSHES = tl.constexpr(_OLD and os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def divide(x, y):
    """Return the IEEE quotient in fp32; Triton before 3.6 makes subnormal ones zero."""
    if _FLUSHES:
        code: tl.constexpr = "div.rn.f32 $0, $1, $2;"
        quotient = tl.inline_asm_elementwise(code, "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)
    else:
        quotient = tl.math.div_rn(x, y)
    return quotient


@triton.jit
def square_root(x):
    """Return the IEEE root in fp32; Triton before 3.6 takes subnormal numbers for zero."""
    if _FLUSHES:
        code: tl.constexpr = "sqrt.rn.f32 $0, $1;"
        root = tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        root = tl.math.sqrt_rn(x)
    return root
