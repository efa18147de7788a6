"""Be a command beside the run itself: its arguments, its output, and the code it leaves with."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple, NoReturn

from runner.arguments import home_paths
from runner.fault import fault_line, stack
from runner.streams import open_descriptors, to_nowhere

HELP = frozenset({"-h", "--help"})


class Keyed(NamedTuple):
    """The values of `key=value` arguments by key, in order, and a line for each argument that is wrong."""

    values: dict[str, list[str]]
    problems: list[str]

    def text(self, key: str) -> str | None:
        """Return what a key was set to; None if it was not."""
        return self.values[key][-1] if key in self.values else None


def keyed(
    arguments: Iterable[str],
    *,
    known: Sequence[str],
    several: Collection[str] = (),
    paths: Collection[str] = (),
) -> Keyed:
    """Read `key=value` arguments; `several` may be repeated, and `paths` begin with ~ and are not empty."""
    values: dict[str, list[str]] = {}
    problems = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or key not in known:
            problems.append(f"{argument!r} is not an option{_meant(key, known)}")
            continue
        values.setdefault(key, []).append(home_paths(text) if key in paths else text)
    for key, given in values.items():
        if key in paths and "" in given:
            problems.append(f"{key}= is empty; name a path (is a shell variable empty?)")
        if len(given) > 1 and key not in several:
            problems.append(f"{key}= is given {len(given)} times ({', '.join(given)}); give it once")
    return Keyed(values, problems)


def whole(key: str, text: str, *, least: int = 0) -> int:
    """Return a whole number of at least `least`; ValueError with one line if it is none."""
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"{key}={text}: expected a whole number of at least {least}")
    return int(text)


def told(name: str, error: Exception) -> int:
    """Say on standard error what is wrong with a command, in one line per mistake; return exit code 2."""
    for line in [fault_line(error)] if isinstance(error, OSError) else str(error).splitlines():
        print(f"{name}: error: {line}", file=sys.stderr)
    return 2


def leave(name: str, main: Callable[[], int]) -> NoReturn:
    """Run a command and leave with its exit code, whatever happens to it or to its output.

    A reader that has seen enough (`| head`) ends it quietly, output that cannot be written with code 1.
    """
    open_descriptors()
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    sys.stdout = Output(name)
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        print(f"{stack(error)}{name}: error: {fault_line(error)}", file=sys.stderr)
        code = 1
    sys.exit(code)


class Output(io.TextIOWrapper):
    """Standard output as a command's result: nothing is lost without a word, and nobody has to read it all.

    What cannot be encoded is escaped: a name that is no UTF-8, a drawing in an ASCII terminal.
    """

    def __init__(self, name: str) -> None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        raw = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
        super().__init__(raw, encoding=encoding, errors="backslashreplace", line_buffering=os.isatty(1))
        self._name = name

    def write(self, text: str) -> int:
        """Write text; SystemExit if there is no one to read it, or no room for it."""
        try:
            return super().write(text)
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Write what is held back; SystemExit as `write` does."""
        try:
            super().flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> NoReturn:
        to_nowhere(1)  # what is still held back would fail again when the process ends
        if error.errno == errno.EPIPE:
            raise SystemExit(0) from None
        print(f"{self._name}: error: standard output: {fault_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _meant(key: str, known: Sequence[str]) -> str:
    near = get_close_matches(key.lstrip("-"), known, n=1)
    return (
        f", did you mean {near[0]}=...?" if near else f": expected key=value with one of {', '.join(known)}"
    )
