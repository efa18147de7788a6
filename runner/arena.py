"""Flat buffers that start on a memory page, so that checkpoints can be written straight from them."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def zeros(numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """Return zeros [numel]; on a CPU they start at a page, outside of the heap of passing tensors."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(numel * dtype.itemsize, 1), flags=flags)
    return torch.frombuffer(pages, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
