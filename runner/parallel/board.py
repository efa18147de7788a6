"""Numbers that CPU ranks of one machine agree on in each step, told in shared memory.

Through gloo each such word wakes threads on both sides, which costs a small model more than its gradients do.
"""

from __future__ import annotations

import ctypes
import time

import torch
from torch import Tensor

from runner import native
from runner.fault import LostRankError
from runner.parallel.memory import Memory
from runner.ranks import COLLECTIVE_S

_SPIN_NS = 20_000  # a rank that spins slows one that works where cores are halves of one
_LOOK_NS = 50_000_000  # between looks whether the others live, and for signals


def functions() -> ctypes.CDLL | None:
    """Return the compiled functions of board.c, or None where there are none."""
    library = native.load("board")
    if library is None:
        return None
    found, (integer, pointer) = library.functions, (ctypes.c_int64, ctypes.c_void_p)
    found.runner_board_bytes.argtypes, found.runner_board_bytes.restype = [integer], integer
    found.runner_board_show.argtypes = [pointer, integer, integer, ctypes.c_uint32, pointer, integer]
    found.runner_board_show.restype = None
    found.runner_board_read.argtypes = [pointer, integer, integer, ctypes.c_uint32, pointer, *[integer] * 3]
    found.runner_board_read.restype = integer
    found.runner_mean_rows.argtypes, found.runner_mean_rows.restype = [pointer, *[integer] * 4], None
    return found


def size(compiled: ctypes.CDLL, *, words: int, world: int) -> int:
    """Return the bytes of a board for vectors of up to `words` numbers."""
    one: int = compiled.runner_board_bytes(words)
    return world * one


class Board:
    """What gloo would do, with the same results: every rank calls the same methods in the same order.

    It lies `at` bytes into the memory and takes vectors of up to `room` numbers. Not for several threads.
    """

    def __init__(self, memory: Memory, compiled: ctypes.CDLL, *, rank: int, at: int, room: int) -> None:
        self._memory, self._compiled = memory, compiled
        self._rank, self._address, self._room = rank, memory.address + at, room
        self._turn = 0
        self._flag = torch.zeros(1, dtype=torch.float64)

    def any_flag(self, flag: bool) -> bool:
        """Whether any rank raised `flag`."""
        self._flag[0] = flag
        return any(self.all_gather(self._flag)[:, 0].tolist())

    def barrier(self) -> None:
        """Return once every rank is here, and all see what any wrote to the shared memory before."""
        self.all_gather(self._flag)

    def mean_rows(self, rows: Tensor, start: int, end: int) -> None:
        """Replace columns `start` to `end` of every row [world, numel] fp32 by their mean, added in order."""
        self._compiled.runner_mean_rows(rows.data_ptr(), len(rows), rows.stride(0), start, end)

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return [world, n]: the float64 vector [n] of every rank, in rank order.

        Raises:
            LostRankError: a rank that is waited for ended, or does not come for an hour.
        """
        count, mine = mine.numel(), mine.contiguous()
        assert mine.dtype == torch.float64
        assert count <= self._room, "the board was made for less"
        self._turn = (self._turn + 1) & 0xFFFFFFFF
        place = (self._address, self._rank, self._room, self._turn)
        self._compiled.runner_board_show(*place, mine.data_ptr(), count)
        out = mine.new_empty(self._memory.world, count)
        if (missing := self._read(out)) >= 0:
            self._wait(out, missing)
        return out

    def _read(self, out: Tensor, *, patience_ns: int = _LOOK_NS) -> int:
        """Wait a moment; return -1 once `out` holds everyone's numbers, else a rank that is missing."""
        place = (self._address, self._memory.world, self._room, self._turn)
        missing: int = self._compiled.runner_board_read(
            *place, out.data_ptr(), out.shape[1], _SPIN_NS, patience_ns
        )
        return missing

    def _wait(self, out: Tensor, missing: int) -> None:
        deadline = time.monotonic() + COLLECTIVE_S
        while missing >= 0:
            if not self._memory.lives(missing):
                if self._read(out, patience_ns=0) != missing:  # it left after its last word
                    missing = self._read(out)
                    continue
                raise LostRankError(f"rank {missing} ended")
            if time.monotonic() > deadline:
                raise LostRankError(f"rank {missing} did not answer for {COLLECTIVE_S} s")
            missing = self._read(out)
