"""Standard output and error that cannot fail: nobody may be reading, the disk behind them may be full."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)  # the reader left, or the terminal was closed


class LastingStream(io.TextIOWrapper):
    """A text stream on a file descriptor whose failures cost what was written, never the run.

    Once its reader is gone (`| head`) all further text goes nowhere; a full disk is tried again.
    """

    def __init__(self, fd: int, *, encoding: str = "utf-8", write_through: bool = False) -> None:
        super().__init__(
            io.BufferedWriter(io.FileIO(fd, "w", closefd=False)),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=True,
            write_through=write_through,
        )

    def write(self, text: str) -> int:
        """Write what can be written; return the length of all of it."""
        try:
            super().write(text)
        except OSError as error:
            self._outlive(error)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        try:
            super().flush()
        except OSError as error:
            self._outlive(error)

    def _outlive(self, error: OSError) -> None:
        if error.errno in _GONE:
            to_nowhere(self.fileno())


def settle_streams() -> None:
    """Give this process a standard output and error that outlive their readers; closed ones go nowhere."""
    open_descriptors()
    out, err = sys.stdout, sys.stderr
    sys.stdout = LastingStream(1, encoding=_encoding(out), write_through=_at_once(out))
    sys.stderr = LastingStream(2, encoding=_encoding(err), write_through=_at_once(err))


def open_descriptors() -> None:
    """Have a closed standard input, output or error read and write nothing."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # a later file, or a socket, would get its number and all that is printed
            to_nowhere(fd)


def to_nowhere(fd: int) -> None:
    """Have a descriptor read and write nothing."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != fd:  # the lowest free number: `fd` itself, if that was closed
        os.dup2(null, fd)
        os.close(null)


def _encoding(stream: Any) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def _at_once(stream: Any) -> bool:
    return bool(getattr(stream, "write_through", False))
