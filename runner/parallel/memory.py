"""Memory that the CPU ranks of one machine share, and who of them still lives."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref

from runner.parallel import collective

_CLOSE_ON_EXEC = 1  # linux/memfd.h


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

    They cannot on several machines or in containers of their own, or where memory is short. It has no name
    in any folder, so that it goes with the last of them, whenever and however they end.
    """
    name = f"runner-{secrets.token_hex(16)}"
    fd = _new(name, size) if rank == 0 else None
    place = None if fd is None else (f"/proc/{os.getpid()}/fd/{fd}", name)
    place = collective.gather_objects(place, world=world, group=None)[0]
    if rank != 0 and place is not None:
        fd = _opened(*place)
    mine = None if fd is None else _mapped(fd, size, rank=rank, world=world)
    everyone = all(collective.gather_objects(mine is not None, world=world, group=None))
    return mine if everyone else None


def _new(name: str, size: int) -> int | None:
    """Make a file in memory, reserved in full: a write to what is not there would end the process."""
    try:
        create = ctypes.CDLL(None, use_errno=True).memfd_create  # many builds of Python lack os.memfd_create
    except AttributeError:
        return None
    fd: int = create(name.encode(), _CLOSE_ON_EXEC)
    if fd < 0:
        return None
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        return None
    return fd


def _opened(path: str, name: str) -> int | None:
    """Open another process's file, if it is the one: elsewhere its number may be anybody's."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC) if name in os.readlink(path) else None
    except OSError:
        return None


def _mapped(fd: int, size: int, *, rank: int, world: int) -> Memory | None:
    try:
        return Memory(fd, size, rank=rank, world=world)
    except (OSError, ValueError):
        os.close(fd)
        return None
