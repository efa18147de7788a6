"""Start a run from another run's checkpoint (`run.from`): weights, moments, data position, detectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from runner.api import Snapshot
from runner.checkpoint import folder as files
from runner.checkpoint import load

_OWN = ("loggers",)
"""Parts that name the run itself (a wandb id): a branch gets its own."""


class Branch(NamedTuple):
    """Where a run starts from, and what a person should know about it."""

    source: Path
    snapshot: Snapshot
    notes: tuple[str, ...]


def branch_off(
    where: str, *, root: Path, live: Snapshot, steps: int, allow_reshard: bool, strict_env: bool
) -> Branch:
    """Load the checkpoint that `RUN[@STEP]` names: the newest intact one, or that of the step.

    RUN is a folder, or a name below `root`; `live` is the freshly built run that it must fit.

    Raises:
        ValueError: there is no such run or checkpoint, or it is another model's or damaged.
    """
    source, step = locate(where, root=root)
    there = files.done_steps(source)
    wanted = [step] if step is not None else there[::-1]
    if not there or (step is not None and step not in there):
        lacks = "no complete checkpoint" if step is None or not there else f"no checkpoint of step {step}"
        known = f"it has those of steps {', '.join(map(str, there))}" if there else "name another run"
        raise ValueError(f"run.from={where}: {source} has {lacks}; {known}")
    problems: list[str] = []
    for at in wanted:
        if at >= steps:
            raise ValueError(
                f"run.from={where}: step {at} is not before train.steps={steps}; raise train.steps"
            )
        found, problem = load.try_load(source, at, live, allow_reshard=allow_reshard, strict_env=strict_env)
        if found is not None:
            parts = {name: state for name, state in found.snapshot.parts.items() if name not in _OWN}
            told = (f"starts from step {at} of {source}", *problems, *found.notes)
            return Branch(source, replace(found.snapshot, parts=parts), told)
        problems.append(f"checkpoint {at} in {source} is damaged: {problem}")
    raise ValueError(f"run.from={where}: {'; '.join(problems)}; name another step")


def locate(where: str, *, root: Path) -> tuple[Path, int | None]:
    """Return the folder and the step, if one is named, of `RUN[@STEP]`.

    Raises:
        ValueError: there is no such folder, or the step is no number.
    """
    name, at, step = where.rpartition("@")
    if not at:
        name, step = where, ""
    if at and not step.isdigit():
        raise ValueError(
            f"run.from={where}: {step!r} after the @ is not a step; write RUN@STEP, as in trunk@800"
        )
    for folder in (root / name, Path(name)):
        if folder.is_dir():
            return folder.resolve(), int(step) if step else None
    raise ValueError(f"run.from={where}: there is no run {name} below {root} or here; name a run folder")
