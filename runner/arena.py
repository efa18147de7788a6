"""Flat buffers that start on a memory page, so that checkpoints can be written straight from them."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def zeros(numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """Return zeros [numel]; on a CPU the first element lies at the start of a page."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    raw = torch.zeros(numel + mmap.PAGESIZE // dtype.itemsize, dtype=dtype)
    skip = -raw.data_ptr() % mmap.PAGESIZE // dtype.itemsize
    return raw[skip : skip + numel]
