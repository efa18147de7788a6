"""Memory that the CPU ranks of one machine share, and who of them still lives."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path

from runner.parallel import collective

_FOLDER = Path("/dev/shm")  # POSIX shared memory on Linux


class Memory:
    """`size` bytes that all `world` ranks see, zero at first; each rank holds a lock on its byte of the file.

    The lock ends with its process, however that ends, and is not inherited by a child.
    """

    def __init__(self, fd: int, size: int, *, rank: int, world: int) -> None:
        self.world = world
        self.bytes = mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def lives(self, rank: int) -> bool:
        """Whether another rank's process is still there."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)
        return False


def shared(size: int, *, rank: int, world: int) -> Memory | None:
    """Return memory of `size` bytes that all ranks see, or None where they cannot. All ranks together.

    They cannot on several machines or in containers of their own, or where shared memory is short (Docker
    gives 64 MB unless told otherwise).
    """
    path = _FOLDER / f"runner-{secrets.token_hex(16)}"
    mine = _memory(path, size, rank=rank, world=world, new=True) if rank == 0 else None
    name = collective.gather_objects(path.name if mine is not None else None, world=world, group=None)[0]
    if rank != 0 and name is not None:
        mine = _memory(_FOLDER / name, size, rank=rank, world=world, new=False)
    everyone = all(collective.gather_objects(mine is not None, world=world, group=None))
    if rank == 0:
        path.unlink(missing_ok=True)  # it lives on as long as a rank has it
    return mine if everyone else None


def _memory(path: Path, size: int, *, rank: int, world: int, new: bool) -> Memory | None:
    """Map a file, a new one reserved in full: a write to what is not there would end the process."""
    fd = None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
        if new:
            os.posix_fallocate(fd, 0, size)
        return Memory(fd, size, rank=rank, world=world)
    except (OSError, ValueError):
        if fd is not None:
            os.close(fd)
        if new and fd is not None:
            path.unlink(missing_ok=True)
        return None
