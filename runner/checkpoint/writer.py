"""Write one rank's files of a checkpoint on a thread, from live memory or from copies in host memory.

On a CPU the thread reads the live tensors while the next forward and backward run: they change only in
the update, before which the loop joins the thread. On a GPU the tensors are first copied to pinned host
memory on a side stream; only the next update waits for the copies, on the device.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.api import Slot, Snapshot
from runner.checkpoint import disk
from runner.checkpoint.disk import Chunk, Written


class Job(NamedTuple):
    """What one rank has to write: data files in order, then a side file that vouches for them."""

    files: tuple[tuple[Path, list[Chunk]], ...]
    extra_path: Path
    extra: Callable[[dict[str, Written]], bytes]
    weights: Tensor | None  # checked to be finite before anything is written
    layout: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Bytes to write, without the side file."""
        return sum(disk.size_of(chunks) for _, chunks in self.files)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file's final name; the side file first, which marks the others as ours."""
        return (self.extra_path, *(path for path, _ in self.files))


class Writing:
    """A write in flight. `failure` is one line once it is over, or None."""

    def __init__(self, job: Job, *, ready: Callable[[], None]) -> None:
        self.job = job
        self.failure: str | None = None
        self.size = 0
        self._ready = ready
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def publish(self) -> None:
        """Give the finished files their names."""
        for path in self.job.paths:
            os.replace(_tmp(path), path)

    def discard(self) -> None:
        """Remove what was written."""
        for path in self.job.paths:
            with contextlib.suppress(OSError):
                _tmp(path).unlink(missing_ok=True)

    def _run(self) -> None:
        path = self.job.extra_path
        try:
            self._ready()
            if self.job.weights is not None and (bad := non_finite(self.job.weights, self.job.layout)):
                self.failure = f"refused: {bad} holds non-finite weights"
                return
            written: dict[str, Written] = {}
            for path, chunks in self.job.files:
                written[path.name] = disk.write_file(_tmp(path), chunks)
            path = self.job.extra_path
            extra = disk.write_file(_tmp(path), [self.job.extra(written)])
            self.size = sum(w.size for w in written.values()) + extra.size
        except OSError as error:
            self.failure = f"{_tmp(path)}: {error.strerror or error}"
        except Exception as error:  # a thread must not die silently
            self.failure = f"{path}: {type(error).__name__}: {error}"


def _tmp(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def non_finite(weights: Tensor, layout: Sequence[Slot]) -> str | None:
    """Return the name of the first slot that holds nan or inf, or None."""
    if bool(torch.isfinite(weights.sum(dtype=torch.float64))):  # any nan or inf reaches the sum
        return None
    for slot in layout:
        if not bool(torch.isfinite(weights[slot.offset : slot.offset + slot.numel]).all()):
            return slot.name
    return None


# ---------------------------------------------------------------- copies from a GPU


class HostCopies:
    """Copies of a snapshot's tensors in reusable host memory, taken on a side stream."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: Any = None
        self._stream: Any = None

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Start copying; the result may be read once `wait_host` returned."""
        device = snapshot.weights.device
        if device.type != "cuda":
            return self._copy(snapshot)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copied = self._copy(snapshot)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        return copied

    def wait_host(self) -> None:
        """Wait until the copies are complete; called by the writer thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait_device(self) -> None:
        """Make what the device does next (the update) wait for the copies; the host does not."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def close(self) -> None:
        """Give the host memory back; nothing may be in flight."""
        for buffer in self._buffers.values():
            if self._copied is not None and buffer.numel():
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        self._buffers.clear()

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        weights = self._host("weights", snapshot.weights)
        optimizer = self._map("optimizer", snapshot.optimizer)
        return replace(snapshot, weights=weights, optimizer=optimizer)

    def _map(self, where: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._host(where, value)
        if isinstance(value, dict):
            return {key: self._map(f"{where}.{key}", item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self._map(f"{where}.{i}", item) for i, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        return value

    def _host(self, where: str, value: Tensor) -> Tensor:
        buffer = self._buffers.get(where)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = self._buffers[where] = _pinned_like(value)
        return buffer.copy_(value.detach(), non_blocking=True)


def _pinned_like(value: Tensor) -> Tensor:
    """Allocate host memory for a copy; pinned in place, as torch's pinned allocator rounds up to a power of two."""
    host = torch.empty(value.shape, dtype=value.dtype)
    if value.device.type == "cuda" and host.numel():
        size = host.numel() * host.element_size()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0))
    return host
