"""From host batches to tensors on the device, read ahead by a thread."""

from __future__ import annotations

import copy
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.stream import Pair, Position, Source, State

if TYPE_CHECKING:
    import torch

    from runner.api import Batch


class _Read(NamedTuple):
    """A batch read ahead, with the state and position that hold once it is handed out."""

    tensor: torch.Tensor
    state: State
    position: Position


class Loader:
    """An `api.Stream` over one source.

    `prefetch` batches are read ahead by a daemon thread; 0 reads in `next`. Tokens, state and errors
    are the same either way: the state is that after the last batch handed out, and an error of the
    thread is raised by the `next` that would have returned its batch.
    """

    def __init__(self, source: Source, *, device: Any = "cpu", prefetch: int = 0) -> None:
        import torch

        self._source = source
        self._device = torch.device(device)
        self._ahead = _Ahead(self._read, depth=prefetch) if prefetch > 0 else None
        self._state = source.state_dict()
        self._position = source.position

    @property
    def position(self) -> Position:
        """Where the batch that was handed out last came from."""
        return self._source.position if self._ahead is None else self._position

    def next(self) -> Batch:
        """Return the next batch; on CUDA its copy from pinned memory may still be under way, in order
        with the current stream."""
        from runner.api import Batch

        if self._ahead is None:
            pair = _to_tensor(self._source.take(), device=self._device)
        else:
            pair, self._state, self._position = self._ahead.get()
        if self._device.type != "cpu":
            # The allocator of pinned memory reuses `pair` only when this copy has finished.
            pair = pair.to(self._device, non_blocking=True)
        return Batch(inputs=pair[0], targets=pair[1])

    def state_dict(self) -> State:
        return copy.deepcopy(self._source.state_dict() if self._ahead is None else self._state)

    def load_state_dict(self, state: State) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        self._source.load_state_dict(state)
        self._state, self._position = self._source.state_dict(), self._source.position

    def close(self) -> None:
        """Stop the thread and close the files."""
        if self._ahead is not None:
            self._ahead.stop()
        self._source.close()

    def _read(self) -> _Read:
        tensor = _to_tensor(self._source.take(), device=self._device)
        return _Read(tensor, self._source.state_dict(), self._source.position)


def _to_tensor(pair: Pair, *, device: torch.device) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(pair)
    if device.type != "cuda":
        return tensor
    with torch.cuda.device(device):  # a new thread stands on device 0 and would open a context there
        return tensor.pin_memory()


class _Ahead:
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
            read = self._ready[0]
            if isinstance(read, BaseException):
                raise read  # it stays in place: the source is not read past an error
            self._ready.popleft()
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
