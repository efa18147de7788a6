"""Put files on a disk so that a crash at any instant leaves the old or the new one, never a mixture."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

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
_PIECE_BYTES = 8 << 20  # one direct write; larger ones gain 2 %, and live memory is given back piece by piece
_DIRECT_FROM_BYTES = 8 << 20  # smaller files gain nothing from skipping the page cache

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)  # FUSE, CIFS and others


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
    flat = chunk.detach().reshape(-1)
    if flat.numel() == 0:
        return np.empty(0, np.uint8)
    if flat.stride(0) != 1:  # one element of a strided tensor still counts as contiguous
        flat = flat.clone()
    seen: Bytes = flat.view(torch.uint8).numpy()
    return seen


def size_of(chunks: Iterable[Chunk]) -> int:
    """Return how many bytes the chunks make together."""
    return sum(len(c) if isinstance(c, bytes) else c.numel() * c.element_size() for c in chunks)


def cut(chunk: Chunk) -> list[Bytes]:
    """Return views of a chunk's memory, each small enough for one write."""
    data = memory(chunk)
    return [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]


def write_file(path: Path, chunks: Sequence[Chunk]) -> Written:
    """Write the chunks one after the other and wait until the disk has them; return size and checksum.

    Large files bypass the page cache where the disk allows it. Raises OSError; the file is then partial.
    """
    return write_pieces(path, (piece for chunk in chunks for piece in cut(chunk)), size=size_of(chunks))


def write_pieces(path: Path, pieces: Iterable[Bytes], *, size: int) -> Written:
    """Write pieces that make `size` bytes together, as `write_file` does; each is read before the next."""
    digest = xxhash.xxh3_64()
    fd, direct = _open(path, want_direct=size >= _DIRECT_FROM_BYTES)
    try:
        file = _File(fd, direct)
        for piece in pieces:
            digest.update(piece.data)
            file.write(piece)
        file.finish()
        os.fsync(fd)
    finally:
        os.close(fd)
    return Written(size, digest.hexdigest())


def _open(path: Path, *, want_direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    o_direct = getattr(os, "O_DIRECT", 0)
    if want_direct and o_direct:
        with contextlib.suppress(OSError):  # this file system has no direct writes
            return os.open(path, flags | o_direct, 0o644), True
    return os.open(path, flags, 0o644), False


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
    """Wait until the disk has the folder's names (renames and removals), where its file system can say so."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a small file as a whole, durably."""
    tmp = path.with_name(path.name + ".tmp")
    write_file(tmp, [data])
    os.replace(tmp, path)
    fsync_dir(path.parent)


def free_bytes(folder: Path) -> int | None:
    """Return how much an ordinary user may still write there (quotas excluded), None if nobody knows."""
    status = os.statvfs(folder)
    if status.f_blocks == 0:  # a file system without a size, such as an object store behind FUSE
        return None
    return status.f_bavail * status.f_frsize


def probe(folder: Path) -> None:
    """Fail now, with one line, if the folder cannot take files."""
    path = folder / f".probe_{os.getpid()}_{threading.get_ident()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, [b"probe"])
        path.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise ValueError(
            f"run.name: cannot write to {folder} ({error.strerror or error}); choose another or mend it"
        ) from None
