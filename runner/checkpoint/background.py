"""Run something beside the training loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A call on a thread of its own, begun at once; the thread never keeps the process alive."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._result: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> T:
        """Wait for the call; return what it returned, raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._action()
        except BaseException as error:
            self._error = error
