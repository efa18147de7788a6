"""Divide the machine among the cells that run at the same time: CPU threads, and GPUs of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from runner.sweep.settings import Sweep

_NVIDIA = Path("/proc/driver/nvidia/gpus")


class Slot(NamedTuple):
    """What one running cell may use. `threads` is None where it has the CPU to itself."""

    threads: int | None
    env: dict[str, str]


def make_slots(settings: Sweep, config: Mapping[str, Any], *, processes: int) -> list[Slot]:
    """Return one slot for each cell that may run at a time: as many as there are GPUs for, else one."""
    gpus = [] if str(config["run"]["device"]).startswith("cpu") else visible_gpus()
    pinned = str(config["run"]["device"]).startswith("cuda:")  # the person has chosen one already
    shares = max(1, len(gpus) // processes) if gpus and not pinned else 1
    count = settings.parallel or shares
    threads = None if count * processes == 1 else max(1, cpus() // (count * processes))
    slots = []
    for index in range(count):
        first = index % shares * processes
        own = ",".join(gpus[first : first + processes])
        slots.append(Slot(threads, {"CUDA_VISIBLE_DEVICES": own} if gpus and not pinned else {}))
    return slots


def cpus() -> int:
    """Return the CPU threads that this process would use alone."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(int(limit), allowed) if limit.isdigit() and int(limit) else allowed


def visible_gpus() -> list[str]:
    """Return the GPUs that cells may be given, without waking any: as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() and name.strip() != "-1"]
    return [str(i) for i in range(len(list(_NVIDIA.iterdir())))] if _NVIDIA.is_dir() else []
