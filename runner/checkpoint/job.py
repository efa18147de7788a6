"""Lay out the files that one rank writes for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from runner.api import Slot, Snapshot, State
from runner.checkpoint import disk, llmc_format, safetensors_format, side_file
from runner.checkpoint import folder as files
from runner.checkpoint.disk import Chunk, Written

_SPARE_BYTES = 16 << 20  # left free on the disk for logs


class Job(NamedTuple):
    """What one rank has to write: data files in order, then a side file that vouches for them."""

    files: tuple[tuple[Path, list[Chunk]], ...]
    extra_path: Path
    extra: Callable[[dict[str, Written]], bytes]
    weights: Chunk | None  # one of the chunks: it is checked to be finite while it is written
    layout: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Bytes to write, without the side file."""
        return sum(disk.size_of(chunks) for _, chunks in self.files)

    @property
    def chunks(self) -> list[Chunk]:
        """What the data files hold, in the order in which it is written."""
        return [chunk for _, chunks in self.files for chunk in chunks]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file's final name; the side file first, which marks the others as ours."""
        return (self.extra_path, *(path for path, _ in self.files))


def check_format(format: str, snapshot: Snapshot) -> str:
    """Return the suffix of the files that will hold this run; ValueError if the format cannot."""
    fits = llmc_format.holds(snapshot)
    if format == "llmc" and not fits:
        kept, kind = ", ".join(snapshot.optimizer) or "none", snapshot.model.get("kind")
        raise ValueError(
            "checkpoint.format=llmc: llm.c's files hold a gpt2 model with optimizer state m, v (and master), "
            f"this run has {kind} with {kept}; pass checkpoint.format=auto"
        )
    return llmc_format.SUFFIX if fits and format != "safetensors" else safetensors_format.SUFFIX


def make_job(snapshot: Snapshot, *, folder: Path, suffix: str) -> Job:
    """Lay out one rank's files. Everything but the large tensors is encoded here and now."""
    step, rank = snapshot.step, snapshot.rank
    assert 0 <= step < 10**8, "file names have eight digits"
    llmc = suffix == llmc_format.SUFFIX
    chunks = llmc_format.state_chunks if llmc else safetensors_format.state_chunks
    data = [(files.state_path(folder, step, rank, suffix), chunks(snapshot))]
    if rank == 0:
        model = llmc_format.model_chunks if llmc else safetensors_format.model_chunks
        data.append((files.model_path(folder, step, suffix), model(snapshot)))
    stream = snapshot.stream if llmc else {}
    rest = llmc_format.stream_rest(stream)
    content: State = {
        "version": 1,
        "step": step,
        "rank": rank,
        "world": snapshot.world,
        "suffix": suffix,
        "model": snapshot.model,
        "env": snapshot.env,
        "parts": snapshot.parts,
        "stream": rest,
        "stream_held": sorted(stream.keys() - rest.keys()),
    }
    encoded = side_file.dumps(content)

    def extra(written: dict[str, Written]) -> bytes:
        recorded = {name: list(value) for name, value in written.items()}
        return side_file.frame(encoded, files=recorded)

    weights = data[-1][1][-1] if rank == 0 else None
    layout: tuple[Slot, ...] = snapshot.layout
    return Job(tuple(data), files.extra_path(folder, step, rank), extra, weights, layout)


def short_of_space(job: Job, folder: Path, *, ranks: int) -> str | None:
    """Return why the disk cannot take this job times `ranks`, or None if it can."""
    need = job.size * ranks + _SPARE_BYTES
    try:
        free = disk.free_bytes(folder)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return f"{folder}: {free} bytes free, {need} needed" if free is not None and free < need else None
