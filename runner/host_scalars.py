"""Numbers that the host computed, as the tensors [] that every device path returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 256


class HostScalars:
    """Makes CPU tensors [] of `dtype`, each its own, from numbers.

    After a training step, which swept the caches, `torch.tensor` takes 13 us, and a small model's step
    needs a handful. So memory for many of them is cut up at once, and each call fills the next one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._free: list[Tensor] = []
        self._memory: Any = memoryview(b"")

    def __call__(self, value: float) -> Tensor:
        """Return `value`, rounded to the dtype."""
        if not self._free:
            block = torch.empty(_BLOCK, dtype=self._dtype, device="cpu")
            self._free, self._memory = list(block.unbind()), block.numpy().data
        scalar = self._free.pop()
        self._memory[len(self._free)] = value
        return scalar
