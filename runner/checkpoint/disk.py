"""Put files on a disk so that a crash at any instant leaves the old or the new one, never a mixture."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Chunk = bytes | Tensor
"""A stretch of a file: bytes, or a contiguous tensor in host memory whose memory is the file's bytes."""

_ALIGN = 512  # logical block of the disk: direct writes start and end on it (4096 on 4Kn disks: buffered)
_STAGE_BYTES = 4 << 20  # one direct write through the aligned stage
_WRITE_BYTES = 32 << 20  # one direct write from live memory
_DIRECT_FROM_BYTES = 8 << 20  # smaller files gain nothing from skipping the page cache
_READ_BYTES = 8 << 20


class Written(NamedTuple):
    """What a file must look like when it is read back."""

    size: int  # bytes
    xxh3_64: str


def memory(chunk: Chunk) -> Bytes:
    """View a chunk's bytes without copying them."""
    if isinstance(chunk, bytes):
        return np.frombuffer(chunk, np.uint8)
    assert chunk.device.type == "cpu", "only host memory is written"
    assert chunk.is_contiguous(), "a view with gaps is not a stretch of a file"
    flat: Bytes = chunk.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def size_of(chunks: Iterable[Chunk]) -> int:
    """Return how many bytes the chunks make together."""
    return sum(len(c) if isinstance(c, bytes) else c.numel() * c.element_size() for c in chunks)


def write_file(path: Path, chunks: Sequence[Chunk]) -> Written:
    """Write the chunks one after the other and wait until the disk has them; return size and checksum.

    Large files bypass the page cache where the disk allows it. Raises OSError; the file is then partial.
    """
    total = size_of(chunks)
    digest = xxhash.xxh3_64()
    fd, direct = _open(path, want_direct=total >= _DIRECT_FROM_BYTES)
    try:
        file = _File(fd, direct)
        for chunk in chunks:
            for piece in _pieces(memory(chunk)):
                digest.update(piece.data)
                file.write(piece)
        file.finish()
        os.fsync(fd)
    finally:
        os.close(fd)
    return Written(total, digest.hexdigest())


def _open(path: Path, *, want_direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    o_direct = getattr(os, "O_DIRECT", 0)
    if want_direct and o_direct:
        with contextlib.suppress(OSError):  # this file system has no direct writes
            return os.open(path, flags | o_direct, 0o644), True
    return os.open(path, flags, 0o644), False


def _pieces(data: Bytes) -> Iterator[Bytes]:
    for start in range(0, len(data), _WRITE_BYTES):
        yield data[start : start + _WRITE_BYTES]


class _File:
    """A file descriptor fed in order, with direct writes kept aligned by a small stage."""

    def __init__(self, fd: int, direct: bool) -> None:
        self.fd = fd
        self.direct = direct
        self.staged = 0
        pages = mmap.mmap(-1, _STAGE_BYTES) if direct else bytearray()
        self.stage: Bytes = np.frombuffer(pages, np.uint8)  # page-aligned

    def write(self, data: Bytes) -> None:
        if not self.direct:
            return self._write_all(data)
        if self.staged % _ALIGN == 0 and data.ctypes.data % _ALIGN == 0:
            self._flush()
            whole = len(data) - len(data) % _ALIGN
            self._write_all(data[:whole])
            data = data[whole:]
        while len(data):
            n = min(len(data), _STAGE_BYTES - self.staged)
            np.copyto(self.stage[self.staged : self.staged + n], data[:n])
            self.staged += n
            data = data[n:]
            if self.staged == _STAGE_BYTES:
                self._flush()
        return None

    def finish(self) -> None:
        if self.staged % _ALIGN:
            self._go_buffered()
        self._flush()

    def _flush(self) -> None:
        self._write_all(self.stage[: self.staged])
        self.staged = 0

    def _write_all(self, data: Bytes) -> None:
        while len(data):
            try:
                data = data[os.write(self.fd, data.data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self._go_buffered()  # the disk wants another alignment

    def _go_buffered(self) -> None:
        import fcntl  # absent on Windows, where O_DIRECT is too

        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False


def fsync_dir(folder: Path) -> None:
    """Wait until the disk has the folder's names (renames and removals)."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a small file as a whole, durably."""
    tmp = path.with_name(path.name + ".tmp")
    write_file(tmp, [data])
    os.replace(tmp, path)
    fsync_dir(path.parent)


def free_bytes(folder: Path) -> int:
    """Return how much an ordinary user may still write there (quotas excluded)."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def probe(folder: Path) -> None:
    """Fail now, with one line, if the folder cannot take files."""
    path = folder / f".probe_{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, [b"probe"])
        path.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise ValueError(
            f"run.dir: cannot write to {folder} ({error.strerror or error}); choose another folder or mend it"
        ) from None


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
