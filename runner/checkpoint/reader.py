"""Read files that may be damaged: never more than they hold, no memory before the size was checked."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

import numpy as np
import torch
import xxhash
from torch import Tensor

from runner.checkpoint.disk import Bytes, Written, memory

_READ_BYTES = 8 << 20


class Reader:
    """Reads a regular file in order, never more than it holds, and sums it up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = regular_size(path)
        self._left = self.size
        self._file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115 (closed in __exit__)
        self._digest = xxhash.xxh3_64()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def take(self, n: int) -> bytes:
        """Return the next n bytes; ValueError when the file ends before."""
        buffer = np.empty(self._checked(n), np.uint8)
        self._fill(buffer)
        return buffer.tobytes()

    def tensor(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return the next n elements as a flat tensor; ValueError when the file ends before."""
        self._checked(n * dtype.itemsize)
        values = torch.empty(n, dtype=dtype)
        self._fill(memory(values))
        return values

    def skip(self) -> None:
        """Read to the end in small pieces, keeping only the checksum."""
        buffer = np.empty(min(_READ_BYTES, self._left), np.uint8)
        while self._left:
            self._fill(buffer[: min(len(buffer), self._left)])

    def peek_u64(self, at: int) -> int | None:
        """Return the little-endian integer at byte `at` without moving; None beyond the end."""
        data = os.pread(self._file.fileno(), 8, at) if at + 8 <= self.size else b""
        return int.from_bytes(data, "little") if len(data) == 8 else None

    def end(self) -> Written:
        """Return the file's size and checksum; ValueError if bytes are left over."""
        if self._left:
            raise ValueError(f"{self.path}: {self._left} bytes too many at the end")
        return Written(self.size, self._digest.hexdigest())

    def _checked(self, n: int) -> int:
        if not 0 <= n <= self._left:
            raise ValueError(
                f"{self.path}: {self.size} bytes, {n - self._left} too few for what it should hold"
            )
        return n

    def _fill(self, buffer: Bytes) -> None:
        for piece in (buffer[i : i + _READ_BYTES] for i in range(0, len(buffer), _READ_BYTES)):
            at = 0
            while at < len(piece):
                got = os.readv(self._file.fileno(), [piece[at:].data])
                if got == 0:
                    raise ValueError(f"{self.path}: shrank while it was read")
                at += got
            self._digest.update(piece.data)
        self._left -= len(buffer)


def checksum(path: Path) -> Written:
    """Read a whole file; return its size and checksum."""
    with Reader(path) as file:
        file.skip()
        return file.end()


def regular_size(path: Path) -> int:
    """Return a file's size in bytes; ValueError for anything but a readable regular file."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: not a regular file")
    return status.st_size
