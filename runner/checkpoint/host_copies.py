"""Copy a snapshot from a GPU to host memory while the device works on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.api import Snapshot


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
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copied = self._copy(snapshot)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
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
                _cudart().cudaHostUnregister(buffer.data_ptr())
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
    """Allocate host memory for a copy, pinned in place: torch's own allocator rounds up to a power of two."""
    host = torch.empty(value.shape, dtype=value.dtype)
    if value.device.type == "cuda" and host.numel():
        size = host.numel() * host.element_size()
        torch.cuda.check_error(_cudart().cudaHostRegister(host.data_ptr(), size, 0))
    return host


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
