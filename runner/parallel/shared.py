"""CPU ranks of one machine that see one memory: no gradient travels, and no message says who is ready.

Through the loopback device a gradient moves at about 1 GB/s; here each rank adds its share of all ranks'
buffers where they lie.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from runner.parallel import board, collective, memory
from runner.parallel.collective import Agreement


class Common(NamedTuple):
    """What ranks share: the `rows` [world, numel] fp32 of their gradients, and how they agree."""

    rows: Tensor
    agreement: Agreement


def common(numel: int, *, words: int, rank: int, otherwise: Agreement, world: int) -> Common | None:
    """Return zeros that all ranks see, or None where they cannot. All ranks together.

    They agree on vectors of up to `words` numbers by a board in the same memory; where its functions cannot
    be compiled, as `otherwise` does.
    """
    compiled = board.functions()
    if not all(collective.gather_objects(compiled is not None, world=world, group=None)):
        compiled = None
    row = -(-4 * numel // mmap.PAGESIZE) * mmap.PAGESIZE  # ranks write to pages of their own
    size = 0 if compiled is None else board.size(compiled, words=words, world=world)
    found = memory.shared(row * world + size, rank=rank, world=world)
    if found is None:
        return None
    rows = torch.frombuffer(found.bytes, dtype=torch.float32, count=row // 4 * world)
    agreement = otherwise
    if compiled is not None:
        agreement = board.Board(found, compiled, rank=rank, at=row * world, room=words)
    return Common(rows.view(world, -1)[:, :numel], agreement)


class Shared:
    """Native reduction in shared rows; the rank's own gradient is its row."""

    def __init__(self, common: Common, *, rank: int) -> None:
        self._rows, self._agreement = common
        self._world, numel = self._rows.shape
        self._from, self._to = (numel * part // self._world for part in (rank, rank + 1))

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        yield

    def finish(self) -> None:
        """Return once every rank's row is the mean, added in the order of the ranks."""
        self._agreement.barrier()  # everyone's gradient is complete
        if isinstance(self._agreement, board.Board):
            self._agreement.mean_rows(self._rows, self._from, self._to)
        else:
            self._mean_rows()
        self._agreement.barrier()  # every share is done

    def _mean_rows(self) -> None:
        first, *others = self._rows[:, self._from : self._to]
        for other in others:
            first += other
        first *= 1 / self._world
        for other in others:
            other.copy_(first)

    def close(self) -> None:
        """Hooks are not needed."""
