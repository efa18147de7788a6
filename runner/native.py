"""Find the compiled kernels, of the CPU and of a GPU; where there are none, the torch paths run.

The CPU's are compiled once per machine. The library lives in the user's cache under a name made of its
source, flags and CPU, so that a changed source or another machine on the same home never picks up a
wrong one. "update" is used only where `runner.optimizer.compiled` and `runner.norm` found it equal to
their torch paths, bit for bit. "layers" (`runner.model.compiled`) agrees with torch to rounding, so every
checkpoint says which of the two ran. `RUNNER_KERNELS=off` turns all kernels off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-w")
_FLAGS_END = ("-shared", "-fPIC", "-lm")
_SOURCES = {
    "update": (_HERE / "update.c", ("-std=c11", "-ffp-contract=off")),
    "layers": (_HERE / "model" / "layers.c", ("-std=gnu11", "-ffp-contract=fast")),
}
_COSTS = {"update": "updates take about 20 times as long, same bits", "layers": "steps take longer"}
_log = logging.getLogger(__name__)


class Library(NamedTuple):
    """Compiled kernels, and what identifies their results."""

    functions: ctypes.CDLL
    digest: str


@functools.cache
def library(name: Literal["update", "layers"]) -> Library | None:
    """Return compiled kernels, or None where they are off or cannot be built (logged once)."""
    if os.environ.get("RUNNER_KERNELS", "on") == "off":
        return None
    try:
        path = _built(name)
        return Library(ctypes.CDLL(str(path)), hashlib.sha256(path.read_bytes()).hexdigest()[:12])
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("no compiled CPU kernels for %s (%s): %s", name, error, _COSTS[name])
        return None


@functools.cache
def triton_kernels() -> Any:
    """Return the module of GPU kernels, or None where they are off or Triton is missing (logged once)."""
    if os.environ.get("RUNNER_KERNELS", "on") == "off":
        return None
    if importlib.util.find_spec("triton") is None:
        _log.warning("Triton is not installed: updates run as many small GPU operations, with the same bits")
        return None
    return importlib.import_module("runner.triton_kernels")


def in_threads(work: Callable[[int, int], None]) -> None:
    """Run `work(share, shares)` for every share, one per torch thread."""
    shares = torch.get_num_threads()
    if shares == 1:
        work(0, 1)
        return
    others = [_pool(shares - 1, os.getpid()).submit(work, share, shares) for share in range(1, shares)]
    try:
        work(0, shares)
    finally:
        for other in others:
            other.result()


@functools.cache
def _pool(workers: int, process: int) -> ThreadPoolExecutor:  # threads do not survive a fork: one per process
    return ThreadPoolExecutor(workers, thread_name_prefix="kernels")


def _built(name: str) -> Path:
    """Return the path of a library, compiling it unless it is there.

    Processes that compile at once each write their own file and rename it: the last one wins with
    the same content.
    """
    source, own_flags = _SOURCES[name]
    compiler = os.environ.get("CC", "cc")
    flags = (*_FLAGS, *own_flags)
    told = [source.read_bytes(), *map(str.encode, (compiler, *flags)), _cpu()]
    key = hashlib.sha256(b"\0".join(told)).hexdigest()[:16]
    path = _cache() / f"{name}-{key}.so"
    if path.exists():
        return path
    handle, made = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        command = [compiler, *flags, str(source), "-o", made, *_FLAGS_END]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _cache() -> Path:
    """Return a writable folder: the user's cache, else a new one that no other user can plant a file in."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(home) if home else Path.home() / ".cache") / "runner"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError) as error:
        _log.info("no cache for the compiled kernels (%s): they are compiled anew", error)
    return Path(tempfile.mkdtemp(prefix="runner-kernels-"))


def _cpu() -> bytes:
    """Identify the instruction set: -march=native code of one machine may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = (b"model name", b"flags", b"Features")
    return b"".join(sorted({line for line in lines if line.startswith(wanted)}))
