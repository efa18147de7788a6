"""Claim the run folder and start one process per rank."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from runner import native_build
from runner.cli import ConfigError
from runner.fault import fault_line, stack
from runner.fits import show
from runner.lock import UNLOCKED, try_lock
from runner.ranks import Leader, Place, first_to, hear, meet
from runner.stop import Interrupted, undisturbed

log = logging.getLogger(__name__)

Config = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The settings of a run as a whole (`run.*`)."""

    name: str | None = None
    root: str = "outputs"
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    seed: Annotated[int, Ge(0), Le(2147483647)] = 42
    device: str = "auto"
    threads: Annotated[int, Ge(1), Le(1024)] | None = None
    deterministic: bool = True
    compile: Literal[False, "blocks"] = False
    cuda_graphs: bool = False
    overwrite: bool = False
    trust: list[str] = field(default_factory=list)
    plot: bool = True
    watchdog_s: Annotated[float, Gt(0)] | None = 3600.0
    ranks_every: Annotated[int, Ge(0)] = 100
    requeue: str | None = None
    label: str | None = None
    from_: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `val_loss` is nats per token: inf if it diverged, nan if never measured."""

    dir: Path
    status: Literal["finished", "stopped", "failed"]
    code: int
    step: int
    val_loss: float
    message: str = ""


class RankError(RuntimeError):
    """A rank ended otherwise than by its own decision; `trace` is what it left, `code` the exit code."""

    def __init__(self, text: str, *, trace: str, code: int) -> None:
        super().__init__(text)
        self.trace, self.code = trace, code


def launch(config: Config, *, leader: Leader | None = None, spare: bool = False) -> Outcome:
    """Run a checked configuration to its end on every rank; `leader` if another program started them.

    `spare`: leave the record of a finished run alone that no checkpoint could be continued from.

    Raises:
        ConfigError: the run folder cannot be used, or what it holds forbids this run.
        RankError: a rank died.
        Interrupted: a signal came before anything was trained.
    """
    with claim(config["run"]) as folder:
        if spare and not config["run"]["overwrite"]:
            _spare_record(folder)
        outcome = _launch_in(folder, config, leader=leader)
        if outcome.status == "stopped" and outcome.step == 0:
            raise Interrupted(outcome.code - 128)
        return outcome


def _spare_record(folder: Path) -> None:
    from runner import manifest

    step = manifest.finished_at(folder)
    if step is None or next(folder.glob("DONE_*"), None) is not None:
        return
    text = (
        f"run.name: {folder} holds the record of a run that finished at step {step} without a checkpoint, "
        "a fresh start would empty it; choose another run.name, or pass run.overwrite=true"
    )
    raise ConfigError([text])


def _launch_in(folder: Path, config: Config, *, leader: Leader | None) -> Outcome:
    processes = config["parallel"].get("processes") or 1
    if leader is None and processes > 1:
        from runner.supervise import run_ranks

        return run_ranks(config, dir=folder, processes=processes)
    native_build.begin()
    with undisturbed():
        from runner.job import run_rank
    if leader is not None:
        store = leader.announce(config, dir=str(folder))
        with _one_voice(leader.place, store):
            return run_rank(config, dir=folder, place=leader.place, store=store)
    return run_rank(config, dir=folder)


def follow(place: Place) -> Outcome | int:
    """Run what rank 0 says, as another of its ranks; return the exit code if it says to leave."""
    store = meet(place)
    news = hear(store)
    if news.config is None:
        return news.code
    with undisturbed():
        from runner.job import run_rank

    with _one_voice(place, store):
        return run_rank(news.config, dir=Path(news.dir), place=place, store=store)


@contextlib.contextmanager
def _one_voice(place: Place, store: Any) -> Iterator[None]:
    """Let the rank that failed first say why, and the others, which fail because it did, say only that."""
    try:
        yield
    except ConfigError as error:
        raise error if first_to(store, "refuse") else ConfigError([]) from error
    except Exception as error:
        name = f"rank {place.rank} of {place.world}"
        if not first_to(store, "fail"):
            raise RankError(f"{name} ended because another rank failed", trace="", code=1) from None
        raise RankError(f"{name} failed: {fault_line(error)}", trace=stack(error), code=1) from error


@contextlib.contextmanager
def claim(run: Config) -> Iterator[Path]:
    """Yield the run folder, locked for this process; a new one in which nothing was trained goes again."""
    folder, made = _folder(run)
    try:
        with _lock(folder):
            _probe(folder)
            yield folder
    except Interrupted:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if made:
            _remove_if_empty(folder)
            _remove_empty(made)


def _folder(run: Config) -> tuple[Path, list[Path]]:
    """Return the run folder, and those that had to be made for it: none if it was there."""
    root, name = Path(run["root"]).resolve(), run["name"]
    if name is not None:
        _check_name(str(name))
    made: list[Path] = []
    try:
        made = _missing(root if name is None else root / str(name))
        root.mkdir(parents=True, exist_ok=True)
        if name is None:
            folder = _new_folder(root)
            return folder, [folder, *made]
        folder = root / str(name)
        if blocked := next((path for path in (folder, *folder.parents) if path.is_file()), None):
            raise ConfigError([f"run.name: {blocked} is a file, not a folder; choose another run.name"])
        if (folder / "cells.json").is_file():
            raise ConfigError([f"run.name: {folder} holds a sweep, not a run; choose another run.name"])
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_empty(made)
        raise ConfigError([_unusable(error, root)]) from error
    return folder.resolve(), made


def _missing(folder: Path) -> list[Path]:
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _check_name(name: str) -> None:
    parts = name.split("/")
    if any(len(part.encode()) > 255 for part in parts):
        raise ConfigError([f"run.name: {show(name)} has over 255 bytes; a folder's name has at most 255"])
    if not name.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise ConfigError([f"run.name: {name!r} is not a folder name; use letters, digits, - _ . ="])


def _new_folder(root: Path) -> Path:
    stem = time.strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        # mkdir is atomic: of two runs started in the same second only one gets the name.
        with contextlib.suppress(FileExistsError):
            folder = root / f"{stem}{suffix}"
            folder.mkdir()
            return folder
    raise ConfigError([f"run.root: {root} has a thousand runs named {stem}; give run.name"])


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        handle = open(folder / ".lock", "a+", encoding="ascii")  # noqa: SIM115
    except OSError as error:
        raise ConfigError([_unusable(error, folder)]) from error
    with handle:
        try:
            if not try_lock(handle.fileno()):
                log.warning(UNLOCKED, folder, "run.name")
        except BlockingIOError:
            handle.seek(0)
            owner = re.sub(r"\D", "", handle.read()) or "unknown"
            raise ConfigError(
                [f"run.name: {folder} is in use by process {owner}; wait for it or choose another run.name"]
            ) from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        with contextlib.suppress(OSError):
            handle.flush()
        yield


def _probe(folder: Path) -> None:
    """Write and remove a small file, so that a bad disk shows now and not at the first checkpoint."""
    path = folder / ".probe"
    try:
        with open(path, "wb") as handle:
            handle.write(b"\0" * 65536)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise ConfigError([_unusable(error, folder)]) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _unusable(error: OSError, where: Path) -> str:
    path = error.filename or where
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"run.root: no space left for {path}; free some, or set run.root to another disk"
    return f"run.root: cannot write to {path} ({error.strerror}); set run.root to a folder you may write to"


def _remove_empty(made: list[Path]) -> None:
    """Remove the folders that were made for a run and hold nothing: a mistake leaves no trace."""
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()


def _remove_if_empty(folder: Path) -> None:
    left = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if left <= {".lock"}:
        shutil.rmtree(folder, ignore_errors=True)
