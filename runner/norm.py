"""The global L2 norm of a gradient: the same bits for any number of ranks, threads or kernels.

Every (tensor, layer) is cut into equal chunks, as many as a multiple of the ranks, so that a rank's
shard is whole chunks. A chunk is summed in blocks of BLOCK elements; inside a block element i belongs
to lane i % LANES, which is summed in order, in float64 (where the square of a float32 is exact).
Lanes, then blocks, then chunks are added by `fold`. Nothing here depends on who does which.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner import native
from runner.api import Slot

BLOCK = 2048
LANES = 32
CHUNKS = 8  # per (tensor, layer); the same for every number of ranks that divides it
_AT_ONCE = 1 << 22  # elements that the torch path widens to float64 at a time
_log = logging.getLogger(__name__)


class Chunk(NamedTuple):
    """Elements `offset` to `offset + length` of the flat gradient; part `part` of layer `layer`."""

    offset: int
    length: int
    slot: int
    layer: int
    part: int


def chunks_per_layer(world: int) -> int:
    """Return how many chunks each (tensor, layer) is cut into for `world` ranks."""
    return math.lcm(CHUNKS, world)


def count_chunk_sums(layout: Sequence[Slot], *, world: int) -> int:
    """Return the length of the buffer of chunk sums (llm.c's get_max_num_block_sums)."""
    return sum(slot.layers for slot in layout) * chunks_per_layer(world)


def chunks_of(layout: Sequence[Slot], *, world: int) -> list[Chunk]:
    """Return every chunk in the order in which the sums are added."""
    parts = chunks_per_layer(world)
    chunks = []
    for index, slot in enumerate(layout):
        n = slot.layer_numel
        cuts = [part * n // parts for part in range(parts + 1)]
        for layer in range(slot.layers):
            base = slot.offset + layer * n
            chunks += [
                Chunk(base + cuts[part], cuts[part + 1] - cuts[part], index, layer, part)
                for part in range(parts)
            ]
    return chunks


class ChunkSums:
    """Sums of squares of chosen chunks of one flat fp32 gradient, kept in one buffer."""

    def __init__(self, chunks: Sequence[Chunk], *, gradient: Tensor) -> None:
        self._chunks = tuple(chunks)
        self._gradient = gradient
        self._offset = np.array([chunk.offset for chunk in chunks], dtype=np.int64)
        self._length = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        self.sums = torch.zeros(len(chunks), dtype=torch.float64, device=gradient.device)
        self._scratch = np.empty((0, 0))

    def __call__(self) -> Tensor:
        """Return the sums [chunks] float64 of what the gradient holds now; the buffer is reused."""
        on_cpu = self._gradient.device.type == "cpu"
        kernel = _kernel() if on_cpu else None
        kernels = native.triton_kernels() if self._gradient.is_cuda else None
        if kernels is not None:
            return self._sum_by_triton(kernels)
        if kernel is None:
            self._sum_by_torch()
        else:
            self._sum_by(kernel)
        return self.sums

    def _sum_by(self, kernel: Callable[..., None]) -> None:
        threads = torch.get_num_threads()
        if len(self._scratch) != threads:
            self._scratch = np.empty((threads, int(self._length.max()) // BLOCK + 1))
        plan = (self._offset, self._length, self.sums.numpy(), self._scratch)
        addresses = (array.ctypes.data for array in plan)
        kernel(self._gradient.data_ptr(), *addresses, len(self._chunks), self._scratch.shape[1], threads)

    def _sum_by_torch(self) -> None:
        for at, starts, length in self._groups:
            rows = [self._gradient[start : start + length] for start in starts]
            self.sums.index_copy_(0, at, square_sums(torch.stack(rows)))

    def _sum_by_triton(self, kernels: Any) -> Tensor:
        first, length, starts, longest, sums = self._blocks
        kernels.block_sums(self._gradient, first=first, length=length, out=sums, block=BLOCK, lanes=LANES)
        kernels.row_sums(sums, starts=starts, longest=longest, out=self.sums)
        return self.sums

    @functools.cached_property
    def _groups(self) -> list[tuple[Tensor, list[int], int]]:
        """Chunks of one length that are summed at a time: their numbers, first elements and length."""
        groups = []
        for length in sorted(set(self._length.tolist())):
            alike = np.flatnonzero(self._length == length)
            for some in np.array_split(alike, -(-len(alike) * max(length, 1) // _AT_ONCE)):
                at = torch.from_numpy(some).to(self.sums.device)
                groups.append((at, self._offset[some].tolist(), length))
        return groups

    @functools.cached_property
    def _blocks(self) -> _Blocks:
        counts = np.maximum(1, -(-self._length // BLOCK))
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        chunk = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(chunk)) - starts[chunk]
        first = self._offset[chunk] + number * BLOCK
        length = np.minimum(BLOCK, self._length[chunk] - number * BLOCK)
        device = self._gradient.device
        plan = [torch.from_numpy(x).to(device) for x in (first, length, starts)]
        sums = torch.zeros(len(chunk), dtype=torch.float64, device=device)
        return _Blocks(plan[0], plan[1], plan[2], int(counts.max()), sums)


class _Blocks(NamedTuple):
    """The blocks of all chunks, for a GPU's kernels."""

    first: Tensor  # element of each block
    length: Tensor
    starts: Tensor  # [chunks + 1], the first block of each chunk
    longest: int  # blocks of a chunk
    sums: Tensor  # scratch


def fold(x: Tensor) -> Tensor:
    """Sum the last dimension in halves: the upper half is added to the lower until one is left."""
    n = x.shape[-1]
    while n > 1:
        half = 1 << (n - 1).bit_length() - 1
        lower = x[..., :half].clone()
        lower[..., : n - half] += x[..., half:n]
        x, n = lower, half
    return x[..., 0]


def square_sums(rows: Tensor) -> Tensor:
    """Return the sum of squares [R] float64 of each row of fp32 `rows` [R, n]: the definition."""
    blocks = max(1, -(-rows.shape[1] // BLOCK))
    padded = torch.nn.functional.pad(rows.double(), (0, blocks * BLOCK - rows.shape[1]))
    squares = padded.square_().view(rows.shape[0], blocks, BLOCK // LANES, LANES)
    lanes = torch.zeros_like(squares[:, :, 0])
    for row in range(BLOCK // LANES):
        lanes += squares[:, :, row]
    return fold(fold(lanes))


def norm_of(sums: Tensor) -> Tensor:
    """Return the norm [] fp32 of all chunk sums in order; inf where it leaves fp32, nan stays nan."""
    if sums.device.type != "cpu":
        kernels = native.triton_kernels() if sums.is_cuda else None
        on_device: Tensor = fold(sums).sqrt().to(torch.float32) if kernels is None else kernels.norm(sums)
        return on_device
    root = math.sqrt(_fold_on_host(sums.numpy()))
    return torch.tensor(root, dtype=torch.float64).to(torch.float32)


def _fold_on_host(x: NDArray[np.float64]) -> float:
    """Do `fold` of [n] without a tensor operation per halving."""
    x, n = x.copy(), len(x)
    while n > 1:
        half = 1 << (n - 1).bit_length() - 1
        x[: n - half] += x[half:n]
        n = half
    return float(x[0])


def slot_norms(sums: Tensor, layout: Sequence[Slot], *, world: int) -> dict[str, float]:
    """Return the norm of each tensor by name, for diagnostics; reads the device."""
    parts = chunks_per_layer(world)
    pieces = torch.split(sums.cpu(), [slot.layers * parts for slot in layout])
    return {slot.name: float(norm_of(piece)) for slot, piece in zip(layout, pieces, strict=True)}


def first_non_finite(sums: Tensor, layout: Sequence[Slot], *, world: int) -> str | None:
    """Return the name of the first tensor whose gradient is not finite, or None; reads the device."""
    norms = slot_norms(sums, layout, world=world)
    return next((name for name, norm in norms.items() if not math.isfinite(norm)), None)


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """Return the compiled `square_sums` over chunks if it gives the definition's bits here."""
    library = native.load("update")
    if library is None:
        return None
    kernel: Callable[..., None] = library.functions.runner_square_sums
    kernel.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3  # type: ignore[attr-defined]
    kernel.restype = None  # type: ignore[attr-defined]
    x = torch.sin(torch.arange(5 * BLOCK + 77, dtype=torch.float64)).float() * 1e-3
    offset, length = np.array([0, 33]), np.array([x.numel(), 1000])
    out, scratch = np.zeros(2), np.empty(8)
    plan = (array.ctypes.data for array in (offset, length, out, scratch))
    kernel(x.data_ptr(), *plan, 2, len(scratch), 1)
    expected = [float(square_sums(x[None])), float(square_sums(x[None, 33:1033]))]
    if out.tolist() == expected:
        return kernel
    _log.warning("the compiled norm differs from its definition on this CPU; the torch path runs instead")
    return None
