"""The process that sweeps fork their cells from: everything is imported once, each cell starts clean.

It reads requests, one JSON object a line, from the socket that the sweep gave it, and answers with what
started and ended. When the sweep is gone, however it went, the socket closes: then every cell's
process group is killed, with whatever it started itself. Should this process be killed too, the kernel
ends its cells (PR_SET_PDEATHSIG). It keeps the sweep's lock open, and so do its cells: the lock is
free once the last of them is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner.stop import Interrupted, StartUp, handled, held_back, let_through
from runner.streams import LastingStream

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve the sweep at the other end of the socket whose descriptor is the first argument."""
    for number in handled():
        signal.signal(number, signal.SIG_IGN)  # the sweep decides what a Ctrl-C means
    let_through()
    with socket.socket(fileno=int(sys.argv[1])) as link:
        Server(link).serve()


class Server:
    """The cells that run now, by number."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._pids: dict[int, int] = {}

    def serve(self) -> None:
        """Answer requests until the sweep is gone; leave no cell behind."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._link, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        rest = b""
        try:
            while True:
                selector.select()
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                with contextlib.suppress(BlockingIOError):
                    data = self._link.recv(1 << 16, socket.MSG_DONTWAIT)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))
                self._reap()
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            self._kill_all()

    def _obey(self, request: dict[str, Any]) -> None:
        if "import" in request:
            preload(request["import"])
            self._tell({"ready": True})
        elif "start" in request:
            self._start(request["start"], request)
        elif "signal" in request and request["cell"] in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[request["cell"]], request["signal"])

    def _start(self, number: int, request: dict[str, Any]) -> None:
        server = os.getpid()
        with held_back():  # what is sent to the cell waits until it can take it
            pid = os.fork()
            if pid == 0:
                self._be_cell(server, request)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # here too: the group must exist before anybody may want to kill it
        self._pids[number] = pid

    def _be_cell(self, server: int, request: dict[str, Any]) -> None:
        """Become the cell: its own process group and log, tied to the server's life. Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            end_with_parent(server)
            self._link.close()
            redirect(Path(request["log"]))
            os.environ.update(request["env"])
            from runner.sweep.process import run_cell

            with StartUp():
                let_through()
                code = run_cell(request["config"], Path(request["folder"]))
        except Interrupted as error:
            sys.stderr.write(f"runner: {error}\n")
            code = error.code
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)  # what the cell started does not outlive it
            _, status = os.waitpid(pid, 0)
            del self._pids[number]
            self._tell({"ended": number, "code": os.waitstatus_to_exitcode(status)})

    def _kill_all(self) -> None:
        for pid in self._pids.values():
            kill_group(pid)
        for pid in self._pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _tell(self, message: dict[str, Any]) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")


def preload(modules: Iterable[str]) -> None:
    """Import what cells will need; one that fails will say so where it is used."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def kill_group(pid: int) -> None:
    """Kill a cell's process group; nothing happens if all of it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, also if it died before this call."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def redirect(log: Path) -> None:
    """Send what this process and its children print to `log`, after what is there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(out)
    os.close(null)
    sys.stdout, sys.stderr = LastingStream(1), LastingStream(2)


if __name__ == "__main__":
    main()
