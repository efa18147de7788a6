"""Find the compiled kernels, of the CPU and of a GPU; where there are none, the torch paths run.

The CPU's are compiled once per machine (`runner.native_build`). "update" is used only where
`runner.optimizer.compiled` and `runner.norm` found it equal to their torch paths, bit for bit. "layers"
(`runner.model.compiled`) agrees with torch to rounding, so every checkpoint says which of the two ran.
"memory" (`runner.checkpoint.memory`) and "board" (`runner.parallel.board`) only move bits.
`RUNNER_KERNELS=off` turns all kernels off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import subprocess
from typing import Any, Literal, NamedTuple

from runner import native_build

_COSTS = {
    "update": "updates take about 20 times as long, same bits",
    "layers": "steps take longer",
    "memory": "checkpoints hold training up a little longer",
    "board": "ranks agree by messages",
}
_log = logging.getLogger(__name__)


class Library(NamedTuple):
    """Compiled kernels, and what identifies their results."""

    functions: ctypes.CDLL
    digest: str


@functools.cache
def load(name: Literal["update", "layers", "memory", "board"]) -> Library | None:
    """Return compiled kernels, or None where they are off or cannot be built (logged once)."""
    if os.environ.get("RUNNER_KERNELS", "on") == "off":
        return None
    try:
        path = native_build.built(name)
        found = Library(ctypes.CDLL(str(path)), hashlib.sha256(path.read_bytes()).hexdigest()[:12])
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("no compiled CPU kernels for %s (%s): %s", name, error, _COSTS[name])
        return None
    process, wanted = ctypes.CDLL(None), ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    teams = hasattr(found.functions, "runner_team")
    if teams and all(hasattr(process, name) for name in wanted):  # torch brings them
        found.functions.runner_team(*(ctypes.cast(getattr(process, n), ctypes.c_void_p) for n in wanted))
    return found


@functools.cache
def triton_kernels() -> Any:
    """Return the module of GPU kernels, or None where they are off or Triton is missing (logged once)."""
    if os.environ.get("RUNNER_KERNELS", "on") == "off":
        return None
    if importlib.util.find_spec("triton") is None:
        _log.warning("Triton is not installed: updates run as many small GPU operations, with the same bits")
        return None
    return importlib.import_module("runner.triton_kernels")
