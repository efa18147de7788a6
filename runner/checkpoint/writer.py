"""Write one rank's files of a checkpoint under temporary names, and give them their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from runner.checkpoint import disk
from runner.checkpoint.disk import Bytes, Chunk, Written
from runner.checkpoint.finite import NonFiniteError, first_non_finite, slot_at
from runner.checkpoint.job import Job
from runner.checkpoint.pieces import Pieces


class Outcome(NamedTuple):
    """How a write ended: the bytes written, or one line that says why not."""

    size: int
    failure: str | None


def write(job: Job, pieces: Pieces, *, ready: Callable[[], None]) -> Outcome:
    """Write every file of `job` and wait until the disk has them; `ready` returns once they can be read.

    `pieces` are those of all its chunks, in order.
    """
    path = job.extra_path
    try:
        ready()
        written: dict[str, Written] = {}
        for path, chunks in job.files:
            data = (piece for chunk in chunks for piece in _checked(job, chunk, pieces))
            written[path.name] = disk.write_pieces(_tmp(path), data, size=disk.size_of(chunks))
        pieces.close()
        path = job.extra_path
        extra = disk.write_file(_tmp(path), [job.extra(written)])
    except NonFiniteError as error:
        return Outcome(0, f"refused: {error}")
    except OSError as error:
        return Outcome(0, f"{_tmp(path)}: {error.strerror or error}")
    except Exception as error:  # a thread must not die silently
        return Outcome(0, f"{path}: {type(error).__name__}: {error}")
    finally:
        pieces.close()
    return Outcome(sum(w.size for w in written.values()) + extra.size, None)


def publish(job: Job) -> None:
    """Give the finished files their names."""
    for path in job.paths:
        os.replace(_tmp(path), path)


def discard(job: Job) -> None:
    """Remove what was written."""
    for path in job.paths:
        with contextlib.suppress(OSError):
            _tmp(path).unlink(missing_ok=True)


def _checked(job: Job, chunk: Chunk, pieces: Pieces) -> Iterator[Bytes]:
    """Yield a chunk's pieces; NonFiniteError before the first that holds weights which are not finite."""
    if chunk is not job.weights:
        yield from pieces.of(chunk)
        return
    assert isinstance(chunk, Tensor)
    seen = 0
    for piece in pieces.of(chunk):
        if (at := first_non_finite(piece, chunk.dtype)) is not None:
            raise NonFiniteError(f"{slot_at(job.layout, seen + at)} holds non-finite weights")
        seen += len(piece) // chunk.itemsize
        yield piece


def _tmp(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
