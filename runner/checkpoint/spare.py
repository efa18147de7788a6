"""Keep host memory for copies of a training state, as much as the machine can spare."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runner import arena
from runner.checkpoint.disk import Bytes
from runner.checkpoint.memory import copy

_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = (  # limit, use and the entry of memory.stat that can be dropped: version 2, version 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Spare:
    """Page-aligned memory, kept from save to save. Pages are taken at their first use, from the end.

    Small ones: training waits for a first use, and there are new pages to use for many saves.
    """

    def __init__(self) -> None:
        self._pages: Bytes = np.empty(0, np.uint8)
        self._taken_from = 0

    def open(self, size: int, *, ranks: int) -> int:
        """Make room for `size` bytes; return the offset from which on they may be used.

        Never more than half of what is available, shared with the other ranks, is taken in addition.
        """
        if len(self._pages) != size:
            self.close()
            try:
                self._pages = np.frombuffer(arena.pages(size, huge=False), np.uint8)
            except (OSError, ValueError):  # a limit on address space, or nothing to copy
                return size
            self._taken_from = size
        return max(0, self._taken_from - available_bytes() // (2 * ranks))

    def copy(self, data: Bytes, *, at: int) -> Bytes:
        """Return a copy of `data`, placed `at` bytes from the start."""
        place = self._pages[at : at + len(data)]
        copy(data, place)
        self._taken_from = min(self._taken_from, at)
        return place

    def close(self) -> None:
        """Give the memory back; copies that are still in use stay."""
        self._pages, self._taken_from = np.empty(0, np.uint8), 0


def available_bytes() -> int:
    """Return how much memory may still be taken before something is pushed out; 0 where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        paths = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return 0
    machine = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    return int(min([machine, *(_group_bytes(kinds, path) for kinds, path in paths)]))


def _group_bytes(kinds: str, path: str) -> float:
    """Return what a control group and those around it leave; infinity where they set no limit."""
    root = _CGROUPS / "memory" if kinds == "memory" else _CGROUPS
    left = float("inf")
    if kinds not in ("", "memory"):
        return left
    inner = root / path.lstrip("/")
    for folder in (inner, *inner.parents):
        if folder.is_relative_to(root):
            left = min(left, _left_in(folder))
    return left


def _left_in(folder: Path) -> float:
    for limit, use, cached in _LIMITS:
        try:
            most = (folder / limit).read_text().strip()
            used = int((folder / use).read_text())
            stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if most != "max":
            return max(0, int(most) - used + int(stat.get(cached, 0)))
    return float("inf")
