"""One sweep from its cells to its summary, whatever decides which cells there are."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.arguments import quoted
from runner.cli import ConfigError
from runner.rules import processes
from runner.sweep import cells, naming, plan, summary
from runner.sweep.cells import Cell, Result
from runner.sweep.execute import Listed, Place, Ran, Source, execute, finished
from runner.sweep.lock import locked
from runner.sweep.plan import Composer, Job
from runner.sweep.slots import make_slots
from runner.sweep.tell import Teller, short

Launch = Callable[..., Sequence[Any]]

_BEGUN = ("progress.log", "manifest.json", "main.log", "metrics.jsonl")
"""Files that a cell's own process writes."""


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended: its exit code, and the result of every job in the order of the jobs."""

    folder: Path
    code: int
    results: list[Result]


def sweep_folder(composer: Composer) -> Path:
    """Return where this command's cells are: the same for the same command."""
    settings, command = composer.settings(), composer.command()
    plan.check_place(command)
    name = settings.name or naming.sweep_name(command, preset=composer.preset)
    plan.check_name(name)
    return (Path(settings.root) / name).resolve()


def run_list(composer: Composer, jobs: Sequence[Job]) -> SweepOutcome:
    """Run one cell per job, each in its own process; skip those that are done.

    Raises:
        ConfigError: with every problem of every cell; nothing was created then.
    """
    folder = sweep_folder(composer)
    numbers = plan.known_numbers(folder)
    made = plan.make_cells(jobs, folder=folder, numbers=numbers, composer=composer)
    ran = run_cells(composer, made, folder=folder, source=Listed)
    return conclude(folder, made, ran)


def run_cells(
    composer: Composer, made: Sequence[Cell], *, folder: Path, source: Callable[[list[Cell]], Source]
) -> Ran:
    """Lock the folder, write down the cells' numbers, and run what `source` makes of them."""
    unique = list({cell.number: cell for cell in made}.values())
    settings = composer.settings()
    with locked(folder) as handle:
        _unchanged(folder, unique)
        cells.add_numbers(folder, unique)
        tell = teller(unique, settings=settings, total=len(unique))
        tell.line(headline(folder, unique))
        place = Place(folder, settings, handle)
        ran = execute(source(unique), place=place, tell=tell, config=unique[0].config)
        summary.report(folder, tell=tell)
        tell.failures([(cell, ran.results[cell.number]) for cell in unique if cell.number in ran.results])
    return ran


def teller(unique: Sequence[Cell], *, settings: Any, total: int) -> Teller:
    """Return what writes this sweep's lines."""
    slots = make_slots(settings, unique[0].config, processes=processes(unique[0].config))
    return Teller(total=total, parallel=len(slots))


def headline(folder: Path, unique: Sequence[Cell]) -> str:
    """Say how many cells there are and what there is to do."""
    done = sum(finished(cell) is not None for cell in unique)
    begun = sum(finished(cell) is None and any(cell.folder.glob("DONE_*")) for cell in unique)
    parts = [f"{done} done before", f"{begun} to continue", f"{len(unique) - done - begun} to start"]
    many = "1 cell" if len(unique) == 1 else f"{len(unique)} cells"
    return f"sweep of {many} in {short(folder)}: {', '.join(parts)}"


def conclude(folder: Path, made: Sequence[Cell], ran: Ran) -> SweepOutcome:
    """Return what a sweep came to; any cell that failed or diverged makes its exit code 1."""
    missing = Result("stopped", 1, message="not run")
    results = [ran.results.get(cell.number, missing) for cell in made]
    if ran.signal is not None:
        return SweepOutcome(folder, 128 + ran.signal, results)
    bad = any(result.failed or result.status == "stopped" for result in results)
    return SweepOutcome(folder, int(bad), results)


def _unchanged(folder: Path, made: Sequence[Cell]) -> None:
    """Refuse numbers that another command has given away between the check and the lock."""
    taken = {number: key for key, number in plan.known_numbers(folder).items()}
    if any(taken.get(cell.number, cell.key) != cell.key for cell in made):
        raise ConfigError([f"sweep.name: {folder} was changed by another command just now; start again"])


# ---------------------------------------------------------------- other launchers


def run_elsewhere(composer: Composer, jobs: Sequence[Job], *, launch: Launch) -> SweepOutcome:
    """Run the cells through another Hydra launcher (a cluster's), each in its own folder here.

    Raises:
        ConfigError: with every problem of every cell; nothing was created then.
    """
    folder = sweep_folder(composer)
    numbers = plan.known_numbers(folder)
    made = plan.make_cells(jobs, folder=folder, numbers=numbers, composer=composer)
    unique = list({cell.number: cell for cell in made}.values())
    lines = {cell.number: list(job) for cell, job in zip(made, jobs, strict=True)}
    with locked(folder):
        _unchanged(folder, unique)
        tell = Teller(total=len(unique), parallel=1)
        tell.line(headline(folder, unique))
        results = {cell.number: done for cell in unique if (done := finished(cell)) is not None}
        todo = [cell for cell in unique if cell.number not in results]
        given = [[*lines[cell.number], *_placed_lines(cell, folder)] for cell in todo]
        with _undone_if_refused(folder, todo):
            cells.add_numbers(folder, unique)
            for cell in todo:
                cells.write_cell(cell)
                (cell.folder / "result.json").unlink(missing_ok=True)
            returned = _launched(launch, given) if todo else []
        for cell, job in zip(todo, returned, strict=True):
            results[cell.number] = result = _result_elsewhere(cell, job)
            cells.write_result(cell.folder, result)
            tell.ended(cell, result, seconds=0.0)
        summary.report(folder, tell=tell)
        tell.failures([(cell, results[cell.number]) for cell in unique])
    return conclude(folder, made, Ran(results))


@contextlib.contextmanager
def _undone_if_refused(folder: Path, todo: Sequence[Cell]) -> Iterator[None]:
    """Take back what was written for cells that a launcher could not start; what has begun stays."""
    files = [folder / "cells.json"]
    files += [cell.folder / name for cell in todo for name in ("cell.json", "result.json")]
    before = {path: path.read_bytes() if path.is_file() else None for path in files}
    try:
        yield
    except ConfigError:
        if any((cell.folder / name).exists() for cell in todo for name in _BEGUN):
            raise
        for path, content in before.items():
            if content is not None:
                path.write_bytes(content)
                continue
            path.unlink(missing_ok=True)
        for cell in todo:
            _remove_empty(cell.folder)
        if before[folder / "cells.json"] is None:
            (folder / ".sweep.lock").unlink(missing_ok=True)
            _remove_empty(folder)
        raise


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it holds something, or is not there
        folder.rmdir()


def _launched(launch: Launch, given: list[list[str]]) -> Sequence[Any]:
    """Hand the cells over.

    Raises:
        ConfigError: the launcher itself cannot work here; a cell that fails is in what it returns.
    """
    try:
        return launch(given, initial_job_idx=0)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            [f"hydra/launcher: it cannot start the cells: {type(error).__name__}: {text}"]
        ) from error


def _placed_lines(cell: Cell, folder: Path) -> list[str]:
    run = plan.placed_run(cell, root=folder, group=folder.name)
    lines = [f"run.{key}={quoted(value)}" for key, value in run.items() if value is not None]
    return [*lines, "+logger.cell._target_=runner.sweep.cell_log.CellLog"]


def _result_elsewhere(cell: Cell, job: Any) -> Result:
    """Judge a cell by what it left in its folder, and by what its launcher says of it."""
    step, last = cells.last_progress(cell.folder)
    try:
        value = job.return_value
    except Exception as error:
        return Result("failed", 1, step, message=" ".join(f"{type(error).__name__}: {error}".split()))
    ending = cells.ending(cell.folder)
    if ending == "finished":
        return Result("finished", 0, step, last if value is None else float(value))
    if value is not None and math.isinf(float(value)):
        return Result("diverged", 1, step, math.inf, message="diverged")
    if ending == "stopped":
        return Result("stopped", 143, step, last, message="stopped; the same command continues it")
    return Result("failed", 1, step, message="did not end; see the launcher's own logs")
