"""The compiled CPU kernels of a layer: tensors in, tensors out (`layers.c` says what each computes).

They take contiguous fp32 and bfloat16. `usable` decides; what it turns away runs as torch operations.
Legend: B sequences, T tokens, C channels, H heads, D channels per head, R rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_NORM = struct.Struct("@8P2qf3q")
_NORM_BACK = struct.Struct("@9P5q")
_ACTIVATION = struct.Struct("@4P3q")
_SOFTMAX = struct.Struct("@2P4qfq")
_HEADS = struct.Struct("@6P13q")
_ADD_ROWS = struct.Struct("@3P3q")
_LOSS = struct.Struct("@3P2q2fq")
_ROWS_PER_BLOCK = 32  # of layers.c


class Normed(NamedTuple):
    """A normalised tensor, and what its gradient needs."""

    total: Tensor  # x, plus delta where there is one
    y: Tensor
    mean: Tensor | None  # [R]; None for an RMS norm
    rstd: Tensor  # [R]


def usable(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether there are kernels for these types on this device."""
    return device.type == "cpu" and all(dtype in _TYPES for dtype in dtypes) and _kernels() is not None


def identity() -> str:
    """Return what the bits of these kernels depend on; "torch" where there are none."""
    library = native.load("layers") if _kernels() is not None else None
    return library.digest if library is not None else "torch"


def norm(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    delta: Tensor | None = None,
    centred: bool = True,
) -> Normed:
    """Normalise the rows of `x` (+ `delta`) [..., C]; the result has `dtype`."""
    x = x.contiguous()
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    y = torch.empty(x.shape, dtype=dtype)
    mean = torch.empty(rows) if centred else None
    rstd, total = torch.empty(rows), x if delta is None else torch.empty_like(x)
    delta = None if delta is None else delta.contiguous()
    weight, bias = weight.float(), None if bias is None else bias.float()
    pointers = map(_address, (x, delta, weight, bias, total, y, mean, rstd))
    types = (_TYPES[x.dtype], _TYPES[x.dtype if delta is None else delta.dtype], _TYPES[dtype])
    _run("norm", _NORM.pack(*pointers, rows, cols, eps, *types))
    return Normed(total, y, mean, rstd)


def norm_back(
    dy: Tensor, *, saved: Normed, weight: Tensor, carry: Tensor | None, delta_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, delta (None without a type), weight [C] and bias [C], the last two fp32.

    `carry` is the gradient that reaches x + delta from elsewhere.
    """
    dy, x = dy.contiguous(), saved.total
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    dx = torch.empty_like(x)
    ddelta = None if delta_dtype in (None, x.dtype) else torch.empty(x.shape, dtype=delta_dtype)
    partial = torch.empty(-(-rows // _ROWS_PER_BLOCK), 2, cols)
    carry = None if carry is None else carry.contiguous()
    weight = weight.float()
    pointers = map(_address, (dy, carry, x, weight, saved.mean, saved.rstd, dx, ddelta, partial))
    types = (_TYPES[x.dtype], _TYPES[delta_dtype or x.dtype], _TYPES[dy.dtype])
    _run("norm_back", _NORM_BACK.pack(*pointers, rows, cols, *types))
    return dx, dx if ddelta is None else ddelta, partial[0, 0], partial[0, 1]


def gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tanh GELU of `x` and its derivative."""
    x = x.contiguous()
    y, slope = torch.empty_like(x), torch.empty_like(x)
    _run("gelu", _ACTIVATION.pack(*map(_address, (x, None, y, slope)), 1, x.numel(), _TYPES[x.dtype]))
    return y, slope


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F] of `x` [..., 2F]."""
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    _run("swiglu", _ACTIVATION.pack(*map(_address, (x, None, y, None)), *_halves(x)))
    return y


def swiglu_back(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `x` [..., 2F]."""
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    _run("swiglu", _ACTIVATION.pack(*map(_address, (x, dy, dx, None)), *_halves(x)))
    return dx


def softmax_(scores: Tensor, *, start: int, scale: float) -> Tensor:
    """Make causal weights of the unscaled `scores` [n, queries, keys] of the queries from `start` on."""
    return _softmax(scores, None, start=start, scale=scale)


def softmax_back_(dweights: Tensor, *, weights: Tensor, start: int, scale: float) -> Tensor:
    """Make the gradient of unscaled scores of that of the weights, in place."""
    return _softmax(dweights, weights, start=start, scale=scale)


def split(
    packed: Tensor, *, heads: tuple[int, int, int], cos: Tensor | None = None, sin: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Part `packed` [B, T, (sum of heads) * D] into [B, heads, T, D]; rotate the first two by cos and sin."""
    packed = packed.contiguous()
    B, T, width = packed.shape
    D = width // sum(heads)
    parts = tuple(packed.new_empty(B, count, T, D) for count in heads if count)
    _move_heads(packed, parts, heads=heads, cos=cos, sin=sin, back=False)
    return parts


def join(
    parts: tuple[Tensor, ...],
    *,
    heads: tuple[int, int, int],
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Undo `split`: pack [B, heads, T, D] into [B, T, (sum of heads) * D], new or some tokens of `out`."""
    parts = tuple(part.contiguous() for part in parts)
    B, _, T, D = parts[0].shape
    packed = parts[0].new_empty(B, T, sum(heads) * D) if out is None else out
    _move_heads(packed, parts, heads=heads, cos=cos, sin=sin, back=True)
    return packed


def loss_(logits: Tensor, targets: Tensor, *, weight: float, z_loss: float) -> Tensor:
    """Return losses [R] fp32 of `logits` [R, V], which become the gradient of `weight` times their sum.

    Raises IndexError for a target that is no column.
    """
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
        raise IndexError(f"a target lies outside of the {logits.shape[1]} logits")
    losses, targets = torch.empty(len(logits)), targets.to(torch.int64).contiguous()
    fields = (*logits.shape, weight, z_loss, _TYPES[logits.dtype])
    assert logits.is_contiguous()
    _run("loss", _LOSS.pack(*map(_address, (logits, targets, losses)), *fields))
    return losses


def add_rows_(table: Tensor, *, ids: Tensor, rows: Tensor) -> None:
    """Add `rows` [R, C] to the rows `ids` [R], known to exist, of `table` [V, C], in order."""
    ids, rows = ids.to(torch.int64).contiguous(), rows.contiguous()
    assert table.is_contiguous()
    pointers = map(_address, (table, ids, rows))
    _run("add_rows", _ADD_ROWS.pack(*pointers, *rows.shape, _TYPES[table.dtype]))


def _softmax(scores: Tensor, weights: Tensor | None, *, start: int, scale: float) -> Tensor:
    assert scores.is_contiguous()
    pointers = map(_address, (scores, weights))
    _run("softmax", _SOFTMAX.pack(*pointers, *scores.shape, start, scale, _TYPES[scores.dtype]))
    return scores


def _move_heads(
    packed: Tensor,
    parts: tuple[Tensor, ...],
    *,
    heads: tuple[int, int, int],
    cos: Tensor | None,
    sin: Tensor | None,
    back: bool,
) -> None:
    B, _, T, D = parts[0].shape
    at = [_address(parts[i]) if i < len(parts) else 0 for i in range(3)]
    turned = (0, 0, 0) if cos is None else (1, 1, 0)
    angles = (_address(x if x is None else x.contiguous()) for x in (cos, sin))
    fields = (*heads, *turned, B, T, D, packed.stride(1), packed.stride(0), back, _TYPES[packed.dtype])
    _run("heads", _HEADS.pack(_address(packed), *at, *angles, *fields))


def _halves(x: Tensor) -> tuple[int, int, int]:
    return x.numel() // x.shape[-1], x.shape[-1] // 2, _TYPES[x.dtype]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _run(name: str, arguments: bytes) -> None:
    kernels = _kernels()
    assert kernels is not None
    kernels[name](arguments, torch.get_num_threads())


@functools.cache
def _kernels() -> dict[str, Any] | None:
    library = native.load("layers")
    if library is None:
        return None
    kernels = {}
    for name in ("norm", "norm_back", "gelu", "swiglu", "softmax", "heads", "loss", "add_rows"):
        kernels[name] = getattr(library.functions, f"runner_{name}")
        kernels[name].argtypes, kernels[name].restype = (ctypes.c_char_p, ctypes.c_int64), None
    return kernels
