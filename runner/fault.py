"""Say what ended a run: one line for what data or a machine can do, with the stack for what must be a bug."""

from __future__ import annotations

import contextlib
import dis
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

_RAISE = dis.opmap["RAISE_VARARGS"]
_NO_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|bad_?alloc|CUBLAS_STATUS_ALLOC_FAILED", re.I
)
_WANTED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.I)
# gloo's words, and NCCL's
_NO_PEER = re.compile(
    r"Connection (closed|reset) by peer[^.]*|Broken pipe[^.]*|remote process exited[^.]*|ncclRemoteError",
    re.I,
)
_DETAILS = re.compile(r" (Including non-PyTorch|Of the allocated|If reserved but|See documentation).*")


class LostRankError(RuntimeError):
    """Another rank's process ended, or does not answer; the text says which."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError say which file it is about: those of writing to an open one do not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else it has a text of its own, which a name would hide
            error.filename = error.filename or str(path)
        raise


def fault_line(error: BaseException) -> str:
    """Return an error as one line, with the way out where there is a usual one."""
    if _lacks_memory(error):
        line = _memory_line(error)
    elif isinstance(error, LostRankError):
        line = f"{error}; its own lines say why, unless it was killed"
    elif (gone := _lacks_peer(error)) is not None:
        line = f"another rank ended ({gone}); the launcher says which one, and its own lines why"
    elif isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        line = f"{where}{error.strerror} ({type(error).__name__})"
    elif expected(error) and str(error):
        line = str(error)
    else:
        line = f"{type(error).__name__}: {error}"
    return " ".join("; ".join([line, *getattr(error, "__notes__", ())]).split())


def stack(error: BaseException) -> str:
    """Return the stack that a person needs beside the line: none for what is expected to go wrong.

    `RUNNER_TRACEBACK=1` shows it always.
    """
    if expected(error) and "RUNNER_TRACEBACK" not in os.environ:
        return ""
    return "".join(traceback.format_exception(error))


def expected(error: BaseException) -> bool:
    """Whether the data or the machine did this, so that its line says all.

    A ValueError counts if a statement of this package raised it: that is how it says what a person can
    mend, in the middle of a run too. One out of a library means that it was called wrongly.
    """
    if isinstance(error, OSError) or _lacks_memory(error) or lacks_rank(error):
        return True
    return isinstance(error, ValueError) and _raised_here(error)


def lacks_rank(error: BaseException) -> bool:
    """Whether an error says only that another rank is gone, which must have failed before."""
    return isinstance(error, LostRankError) or _lacks_peer(error) is not None


def _raised_here(error: BaseException) -> bool:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_globals.get("__name__", "").split(".")[0] != "runner":
        return False
    # `float(text)` ends in the frame that called it, as a raise does, but not at such an instruction.
    return last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def _lacks_peer(error: BaseException) -> str | None:
    """Return what a collective says of a rank that is gone."""
    found = _NO_PEER.search(str(error)) if isinstance(error, RuntimeError) else None
    return found[0] if found else None


def _memory_line(error: BaseException) -> str:
    text = str(error).split("\n")[0]
    if text.startswith("[enforce fail"):  # a place in PyTorch's source
        text = ""
    wanted = _WANTED.search(str(error))
    size = f" for {_readable(float(wanted[1]), wanted[2])} more" if wanted else ""
    told = f" ({_DETAILS.sub('', text)})" if text else ""
    return (
        f"out of memory{size}{told}: lower train.micro_batch (with train.tokens_per_step the step stays "
        "as it is) or train.seq_len, set train.checkpoint_blocks=true, or take a smaller model"
    )


def _readable(size: float, unit: str) -> str:
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = next(i for i, name in enumerate(units) if name.lower() == unit.lower())
    while size >= 1024 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {units[power]}"
