"""The sweep's side of the process that forks its cells: start them, signal them, hear how they end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import runner
from runner.stop import held_back


class Ended(NamedTuple):
    """A cell's process is gone; a negative code is the signal that ended it."""

    number: int
    code: int


class Pool:
    """A server process (`runner.sweep.server`) and the socket to it; a context manager.

    The server starts on the first cell, so a sweep with nothing to do never pays for it.
    `keep_open` is a descriptor that it and its cells hold as long as they live.
    """

    def __init__(self, *, preload: Sequence[str], keep_open: int) -> None:
        self._preload = list(preload)
        self._keep_open = keep_open
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._rest = b""
        self._running: set[int] = set()

    def __enter__(self) -> Pool:
        return self

    def start(
        self, number: int, *, config: Mapping[str, Any], folder: Path, log: Path, env: Mapping[str, str]
    ) -> None:
        """Start a cell."""
        if self._link is None:
            self._start_server()
        self._running.add(number)
        where = {"folder": str(folder), "log": str(log), "env": dict(env)}
        self._send({"start": number, "config": config, **where})

    def signal(self, number: int, signal: int) -> None:
        """Send a cell a signal; nothing happens if it has ended."""
        self._send({"signal": signal, "cell": number})

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return the cells that ended, after at most `timeout_s`."""
        if self._link is None:
            return []
        self._link.settimeout(timeout_s)
        try:
            data = self._link.recv(1 << 16)
        except TimeoutError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            return self._server_is_gone()
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        ended = [Ended(m["ended"], m["code"]) for m in messages if "ended" in m]
        self._running -= {e.number for e in ended}
        return ended

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.wait()

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(runner.__file__).resolve().parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        env = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
        env["PYTHONPATH"] = os.pathsep.join([root, inherited] if inherited else [root])
        with theirs, held_back():  # until the server ignores what only the sweep may act on
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runner.sweep.server", str(theirs.fileno())],
                env=env,
                pass_fds=(theirs.fileno(), self._keep_open),
                stdin=subprocess.DEVNULL,
            )
        self._link = ours
        self._send({"import": self._preload})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._link is not None
        self._link.settimeout(None)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def _server_is_gone(self) -> list[Ended]:
        """Count every running cell as killed: the kernel ends them with their server."""
        assert self._link is not None
        self._link.close()
        self._link, self._rest = None, b""
        ended = [Ended(number, -9) for number in sorted(self._running)]
        self._running.clear()
        return ended
