"""From host batches to tensors on the device, read ahead."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.stream import Pair, Position, Source, State

if TYPE_CHECKING:
    import torch

    from runner.api import Batch


_BURST = 16  # batches
_BURST_S = 2e-4


class _Read(NamedTuple):
    """A batch read ahead, with the state and position that hold once it is handed out."""

    pair: torch.Tensor  # [2, B, T] int64
    batch: Batch  # its halves
    state: State
    position: Position


class Loader:
    """An `api.Stream` over one source.

    `prefetch` batches are read ahead by a daemon thread; with 0 `next` reads, small batches a few at a
    time. Tokens, state and errors are the same either way: the state is that after the last batch
    handed out, and an error is raised by the `next` that would have returned its batch.
    """

    def __init__(self, source: Source, *, device: Any = "cpu", prefetch: int = 0) -> None:
        import torch

        from runner.api import Batch

        self._source, self._batch = source, Batch
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"
        self._ahead: _Thread | _Burst
        self._ahead = _Thread(self._read, depth=prefetch) if prefetch > 0 else _Burst(self._read)
        self._state = source.state_dict()
        self._position = source.position

    @property
    def position(self) -> Position:
        """Where the batch that was handed out last came from."""
        return self._position

    def next(self) -> Batch:
        """Return the next batch; on CUDA its copy from pinned memory may still be under way, in order
        with the current stream."""
        pair, batch, self._state, self._position = self._ahead.get()
        if self._on_host:
            return batch
        # The allocator of pinned memory reuses `pair` only when this copy has finished.
        return self._batch(*pair.to(self._device, non_blocking=True).unbind())

    def state_dict(self) -> State:
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: State) -> None:
        self._ahead.stop()
        self._source.load_state_dict(state)
        self._state, self._position = self._source.state_dict(), self._source.position

    def close(self) -> None:
        """Stop the thread and close the files."""
        self._ahead.stop()
        self._source.close()

    def _read(self) -> _Read:
        pair = _to_tensor(self._source.take(), device=self._device)
        return _Read(pair, self._batch(*pair.unbind()), self._source.state_dict(), self._source.position)


def _to_tensor(pair: Pair, *, device: torch.device) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(pair)
    if device.type != "cuda":
        return tensor
    with torch.cuda.device(device):  # a new thread stands on device 0 and would open a context there
        return tensor.pin_memory()


class _Burst:
    """Calls `read` whenever nothing is left, again and again for as long as a batch is not worth a pause.

    The first small batch after a training step costs ten times what the next one does, as neither the code
    nor the source's data is in the caches.
    """

    def __init__(self, read: Callable[[], _Read]) -> None:
        self._read = read
        self._ready: deque[_Read | Exception] = deque()

    def get(self) -> _Read:
        """Return the next result, or raise the error that took its place."""
        if not self._ready:
            self._fill()
        return _first(self._ready)

    def stop(self) -> None:
        """Forget what was read; the source then stands past what was handed out."""
        self._ready.clear()

    def _fill(self) -> None:
        end = time.perf_counter() + _BURST_S
        while len(self._ready) < _BURST:
            try:
                self._ready.append(self._read())
            except Exception as error:
                self._ready.append(error)
                return
            if time.perf_counter() > end:
                return


class _Thread:
    """Calls `read` in a daemon thread, at most `depth` results ahead of `get`."""

    def __init__(self, read: Any, *, depth: int) -> None:
        self._read = read
        self._depth = depth
        self._changed = threading.Condition()
        self._ready: deque[_Read | BaseException] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def get(self) -> _Read:
        """Return the next result or raise the error that took its place; starts the thread if needed."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._work, name="data-prefetch", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            read = _first(self._ready)
            self._changed.notify_all()
        return read

    def stop(self) -> None:
        """End the thread and forget what it read; the source then stands past what was handed out."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._ready.clear()

    def _work(self) -> None:
        while self._wait_for_room():
            try:
                read: _Read | BaseException = self._read()
            except BaseException as error:
                read = error
            with self._changed:
                self._ready.append(read)
                self._changed.notify_all()
            if isinstance(read, BaseException):
                return

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or len(self._ready) < self._depth)
            return not self._stopping


def _first(ready: deque[Any]) -> _Read:
    """Take the first result; an error stays in place, as the source is not read past it."""
    read = ready[0]
    if isinstance(read, BaseException):
        raise read
    taken: _Read = ready.popleft()
    return taken
