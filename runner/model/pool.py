"""Large buffers that are used once per step, kept apart from the heap that small objects would cut up."""

from __future__ import annotations

import torch
from torch import Tensor

_free: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}


def take(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor; on a CPU one that was given back, if there is one of that size.

    A buffer that is never given back is freed like any other tensor.
    """
    numel = torch.Size(shape).numel()
    spare = _free.get((device, dtype, numel))
    return (spare.pop() if spare else torch.empty(numel, dtype=dtype, device=device)).view(shape)


def give_back(buffer: Tensor) -> None:
    """Keep a buffer of `take`, which nobody reads any more, for the next one who asks for its size."""
    if buffer.device.type == "cpu":  # elsewhere torch's own allocator does this
        _free.setdefault((buffer.device, buffer.dtype, buffer.numel()), []).append(buffer.view(-1))
