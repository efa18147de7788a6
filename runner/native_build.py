"""Compile the CPU kernels once per machine, without importing torch.

A library lives in the user's cache under a name made of its source, flags and CPU, so that a changed source
or another machine on the same home never picks up a wrong one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-w")
_FLAGS_END = ("-shared", "-fPIC", "-lm")
_SOURCES = {
    "update": (_HERE / "update.c", ("-std=c11", "-ffp-contract=off")),
    "layers": (_HERE / "model" / "layers.c", ("-std=gnu11", "-ffp-contract=fast")),
    "memory": (_HERE / "checkpoint" / "memory.c", ("-std=gnu11",)),
    "board": (_HERE / "parallel" / "board.c", ("-std=gnu11", "-ffp-contract=off")),
}
_begun: dict[str, Future[Path]] = {}
_log = logging.getLogger(__name__)


def begin() -> None:
    """Start compiling what is not there yet, beside whatever else a start takes; `built` waits for it."""
    if os.environ.get("RUNNER_KERNELS", "on") != "off":
        for name in ("update", "layers", "memory"):
            if name not in _begun:
                _begun[name] = Future()
                threading.Thread(target=_settle, args=(_begun[name], name), daemon=True).start()


def built(name: str) -> Path:
    """Return the path of a library; raises OSError or SubprocessError where it cannot be compiled."""
    return _begun[name].result() if name in _begun else _built(name)


def _settle(future: Future[Path], name: str) -> None:
    try:
        future.set_result(_built(name))
    except Exception as error:
        future.set_exception(error)


def _built(name: str) -> Path:
    """Return the path of a library, compiling it unless it is there.

    Processes that compile at once each write their own file and rename it: the last one wins with
    the same content.
    """
    source, own_flags = _SOURCES[name]
    compiler = os.environ.get("CC", "cc")
    flags = (*_FLAGS, *own_flags)
    told = [
        source.read_bytes(),
        (_HERE / "team.h").read_bytes(),
        *map(str.encode, (compiler, *flags)),
        _cpu(),
    ]
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
