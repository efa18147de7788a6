"""Name, find, check and remove the checkpoints in a run folder.

A checkpoint of step N is `model_N`, `state_N_RANK` and `extra_N_RANK` for each rank, and the empty `DONE_N`
that is written last and removed first: without it nothing of N counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from runner.api import State
from runner.checkpoint import disk, llmc_format, reader, safetensors_format, side_file

_DONE = re.compile(r"DONE_(\d{8})")
_FILE = re.compile(r"(?:model_(\d{8})|(?:state|extra)_(\d{8})_\d{5})\.(?:bin|safetensors|json)")
_LEFTOVER = re.compile(r"(?:model_\d{8}|(?:state|extra)_\d{8}_\d{5}|DONE_\d{8}|\.probe_\d+_\d+)[.a-z]*\.tmp")
_SUFFIXES = (llmc_format.SUFFIX, safetensors_format.SUFFIX)


class Found(NamedTuple):
    """A checkpoint whose files are all there with the sizes they should have."""

    folder: Path
    step: int
    suffix: str
    world: int
    extras: tuple[State, ...]  # the side files in rank order; empty when llm.c wrote the checkpoint


def done_path(folder: Path, step: int) -> Path:
    return folder / f"DONE_{step:08d}"


def model_path(folder: Path, step: int, suffix: str) -> Path:
    return folder / f"model_{step:08d}{suffix}"


def state_path(folder: Path, step: int, rank: int, suffix: str) -> Path:
    return folder / f"state_{step:08d}_{rank:05d}{suffix}"


def extra_path(folder: Path, step: int, rank: int) -> Path:
    return folder / f"extra_{step:08d}_{rank:05d}.json"


def done_steps(folder: Path) -> list[int]:
    """Return the steps with a DONE file, oldest first; only exact names count."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _DONE.fullmatch(name)))


def inspect(folder: Path, step: int) -> Found:
    """Check that every file of a checkpoint is there in full; ValueError names the first that is not."""
    if not extra_path(folder, step, 0).exists():
        return _inspect_llmc(folder, step)
    first = _extra(folder, step, 0)
    found = Found(folder, step, first["suffix"], first["world"], ())
    extras = (first, *(_extra(folder, step, rank) for rank in range(1, found.world)))
    for path, size, _ in recorded(found._replace(extras=extras)):
        if reader.regular_size(path) != size:
            raise ValueError(f"{path}: {reader.regular_size(path)} bytes, it was written with {size}")
    return found._replace(extras=extras)


def recorded(found: Found) -> Iterator[tuple[Path, int, str]]:
    """Yield path, size and checksum of every file that the side files vouch for."""
    for extra in found.extras:
        for name, (size, xxh3_64) in extra["files"].items():
            yield found.folder / name, size, xxh3_64


def verify(found: Found) -> None:
    """Read every file and compare its checksum; ValueError names the first that differs."""
    for path, size, xxh3_64 in recorded(found):
        check_written(path, reader.checksum(path), size=size, xxh3_64=xxh3_64)


def check_written(path: Path, written: disk.Written, *, size: int, xxh3_64: str) -> None:
    """Compare a file that was read with what was recorded; ValueError if it differs."""
    if written != (size, xxh3_64):
        raise ValueError(f"{path}: damaged (checksum {written.xxh3_64}, it was written with {xxh3_64})")


def _extra(folder: Path, step: int, rank: int) -> State:
    path = extra_path(folder, step, rank)
    content = side_file.read(path)
    files = content.get("files")
    good = (content.get("step"), content.get("rank")) == (step, rank) and isinstance(files, dict)
    if not good or content.get("suffix") not in _SUFFIXES or not isinstance(content.get("world"), int):
        raise ValueError(f"{path}: not the side file of step {step}, rank {rank}")
    return content


def _inspect_llmc(folder: Path, step: int) -> Found:
    """Check a checkpoint without side files, as llm.c writes it."""
    suffix = llmc_format.SUFFIX
    header = llmc_format.read_model_header(model_path(folder, step, suffix))
    first = llmc_format.read_state_header(state_path(folder, step, 0, suffix), params=header.params)
    found = Found(folder, step, suffix, first.world, ())
    for rank in range(first.world):
        path = state_path(folder, step, rank, suffix)
        at = llmc_format.read_state_header(path, params=header.params)
        check_place(path, (at.step, at.rank, at.world), found, rank)
    return found


def check_place(path: Path, inside: tuple[int, int, int], found: Found, rank: int) -> None:
    """Compare step, rank and world inside a state file with its name; ValueError if they differ."""
    wanted = (found.step, rank, found.world)
    if inside != wanted:
        texts = [f"step {step}, rank {r} of {world}" for step, r, world in (inside, wanted)]
        raise ValueError(f"{path}: holds {texts[0]}, it should hold {texts[1]}")


def mark_done(folder: Path, step: int) -> None:
    """Declare a checkpoint complete, once the disk has the names of its files."""
    disk.fsync_dir(folder)
    disk.write_atomic(done_path(folder, step), b"")


# ---------------------------------------------------------------- removal


def remove(folder: Path, step: int) -> None:
    """Remove a checkpoint, DONE first: a crash in between never leaves a DONE that points at nothing."""
    done = done_path(folder, step)
    if done.exists():
        done.unlink()
        disk.fsync_dir(folder)
    _remove_files(folder, step)


def _remove_files(folder: Path, step: int) -> None:
    # Side files last: they are the sign that an unfinished checkpoint is ours to clean.
    names = sorted(_names_of(folder).get(step, ()), key=lambda name: (name.startswith("extra"), name))
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _names_of(folder: Path) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name in os.listdir(folder):
        if match := _FILE.fullmatch(name):
            names.setdefault(int(match[1] or match[2]), []).append(name)
    return names


def clean(folder: Path) -> list[str]:
    """Remove what a crash left unfinished; return a line for each such checkpoint."""
    for name in os.listdir(folder):
        if _LEFTOVER.fullmatch(name):
            (folder / name).unlink(missing_ok=True)
    lines = []
    complete = set(done_steps(folder))
    for step, names in sorted(_names_of(folder).items()):
        if step in complete:
            continue
        if any(name.startswith("extra") for name in names):
            _remove_files(folder, step)
            lines.append(
                f"removed the unfinished checkpoint of step {step} ({len(names)} files without DONE)"
            )
        else:
            lines.append(
                f"left alone {', '.join(sorted(names))}: no DONE_{step:08d} and not written by this program"
            )
    return lines


def require_fresh(folder: Path, *, overwrite: bool) -> list[int]:
    """Refuse a fresh start over old checkpoints, or with `overwrite` return the steps to remove."""
    steps = done_steps(folder)
    if steps and not overwrite:
        raise ValueError(
            f"run.name: {folder} holds checkpoints up to step {steps[-1]}, a fresh start would lose them; "
            "continue with checkpoint.resume=auto, choose another run.name, or pass run.overwrite=true"
        )
    return steps


# ---------------------------------------------------------------- retention


def victims(
    steps: Collection[int], *, written: int, keep: int | None, major_every: int, protect: Collection[int]
) -> list[int]:
    """Return which checkpoints to remove after writing one, oldest first.

    The `keep` newest up to the one just written stay, all multiples of `major_every` and all in `protect`.
    Later ones belong to another run in the same folder: they neither count nor go.
    """
    if keep is None:
        return []
    old = sorted(step for step in steps if step <= written)[:-keep]
    spared = {written, *protect}
    return [s for s in old if s not in spared and not (major_every and s % major_every == 0)]


def llmc_victim(step: int, *, every: int, keep: int, major: int) -> int | None:
    """Return the step that llm.c deletes after writing one at `step` (-n every -nk keep -nm major), if any.

    Source: train_gpt2.cu. It may never have existed.
    """
    victim = step - keep * every
    return victim if keep > 0 and victim > 0 and (major == 0 or victim % major != 0) else None
