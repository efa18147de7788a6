"""One trunk at the peak learning rate, and a decay off it for each budget: what WSD saves.

A cosine run is good for one budget; three budgets cost three runs. A trunk is trained once, as far as
the longest budget's decay begins, and each budget adds only its decay (Hu et al. 2024, MiniCPM, 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from runner.arguments import quoted
from runner.cli import ConfigError
from runner.sweep import cells, plan
from runner.sweep.cells import Cell, Result
from runner.sweep.execute import finished
from runner.sweep.plan import Composer
from runner.sweep.rows import TRUNK
from runner.sweep.settings import Branches
from runner.sweep.sweep import SweepOutcome, conclude, run_cells, sweep_folder


def run_branches(composer: Composer, parsed: Sequence[Any], *, processes: bool) -> SweepOutcome:
    """Run the trunk, and every branch as soon as the checkpoint that it starts from is there.

    Raises:
        ConfigError: with every problem of every cell; nothing was created then.
    """
    branches = composer.settings().branches
    assert branches is not None
    _check(parsed, branches, processes=processes)
    fixed = [str(o.input_line) for o in parsed]
    folder = sweep_folder(composer)
    numbers = plan.known_numbers(folder)
    trunk = _trunk(composer, fixed, branches, folder=folder, numbers=numbers)
    _check_warmup(trunk, branches)
    jobs = [
        [*fixed, *_branch_lines(budget, branches, trunk=trunk)] for budget in sorted(set(branches.budgets))
    ]
    made = plan.make_cells(jobs, folder=folder, numbers=numbers, composer=composer)
    everything = [trunk, *(_named(cell) for cell in made)]
    return conclude(
        folder, everything, run_cells(composer, everything, folder=folder, source=partial(_Tree, branches))
    )


class _Tree:
    """The trunk first; a branch once its checkpoint is complete."""

    def __init__(self, branches: Branches, listed: Sequence[Cell]) -> None:
        self._branches = branches
        self._trunk, *self._left = listed
        self._offered = False

    def take(self) -> Cell | None:
        """Return the trunk, then any branch that can start."""
        if not self._offered:
            self._offered = True
            return self._trunk
        for cell in self._left:
            step = leaves_at(cell.config["train"]["steps"], self._branches)
            if finished(cell) is not None or (self._trunk.folder / f"DONE_{step:08d}").is_file():
                self._left.remove(cell)
                return cell
        return None

    def ended(self, cell: Cell, result: Result) -> Result:
        """Keep the result as it is."""
        return result

    def unwanted(self, running: Iterable[Cell]) -> list[int]:
        """Want every cell to its end."""
        return []


def leaves_at(budget: int, branches: Branches) -> int:
    """Return the trunk's step at which a budget's decay begins."""
    return budget - branches.decay_steps(budget)


def checkpoint_every(branches: Branches) -> int:
    """Return the interval of checkpoints that meets every branch point."""
    return math.gcd(*(leaves_at(budget, branches) for budget in branches.budgets))


def _trunk(
    composer: Composer, fixed: list[str], branches: Branches, *, folder: Any, numbers: dict[str, int]
) -> Cell:
    """Return the trunk's cell. Its length is no part of its identity: a larger budget extends it."""
    every = checkpoint_every(branches)
    steps = max(leaves_at(budget, branches) for budget in branches.budgets)
    lines = [
        *fixed,
        f"train.steps={steps}",
        "scheduler.decay_frac=null",
        "scheduler.decay_steps=0",
        *(f"checkpoint.{key}={every}" for key in ("every", "major_every")),
    ]
    row = {plan.key_of(o): plan.value_of(o) for o in composer.parse(fixed)}
    row["scheduler.decay_steps"] = 0
    cell = plan.numbered(
        cells.identity(row), "trunk", {**row, "budget": TRUNK}, folder=folder, numbers=numbers
    )
    try:
        return plan.with_config(cell, composer.compose(lines))
    except ConfigError as error:
        raise ConfigError([f"trunk: {line}" for line in error.problems]) from error


def _named(cell: Cell) -> Cell:
    budget = cell.config["train"]["steps"]
    return replace(cell, label=f"budget={budget}", overrides={**cell.overrides, "budget": budget})


def _branch_lines(budget: int, branches: Branches, *, trunk: Cell) -> list[str]:
    return [
        f"train.steps={budget}",
        "scheduler.decay_frac=null",
        f"scheduler.decay_steps={branches.decay_steps(budget)}",
        f"run.from={quoted(f'{trunk.name}@{leaves_at(budget, branches)}')}",
    ]


def _check(parsed: Sequence[Any], branches: Branches, *, processes: bool) -> None:
    """Refuse what branches cannot be combined with."""
    problems = [
        f"{plan.key_of(o)}: sweep.branches runs one trunk; give one value, or one sweep for each"
        for o in parsed
        if o.is_sweep_override()
    ]
    own = ("train.steps", "scheduler.decay_steps", "scheduler.decay_frac")
    problems += [
        f"{plan.key_of(o)}: set by sweep.branches from its budgets; change those"
        for o in parsed
        if plan.key_of(o) in own
    ]
    if not branches.budgets:
        problems.append("sweep.branches.budgets: is empty; list the steps of each budget, as in [400,800]")
    elif (count := _checkpoints(branches)) > branches.max_checkpoints:
        problems.append(
            f"sweep.branches.budgets: {branches.budgets} would need {count} checkpoints of the trunk to meet "
            "every branch point; choose budgets that are multiples of one another, or raise "
            "sweep.branches.max_checkpoints"
        )
    if not processes:
        problems.append(
            "hydra/launcher: sweep.branches needs hydra/launcher=processes, as branches wait for the trunk"
        )
    if problems:
        raise ConfigError(problems)


def _check_warmup(trunk: Cell, branches: Branches) -> None:
    """Refuse a branch that would leave before the trunk is at its peak."""
    warmup = trunk.config["scheduler"].get("warmup_steps") or 0
    early = [b for b in branches.budgets if leaves_at(b, branches) < warmup]
    if early:
        step = leaves_at(early[0], branches)
        raise ConfigError(
            [
                f"sweep.branches.budgets: {early[0]} leaves the trunk at step {step}, inside its warmup; "
                f"lower scheduler.warmup_steps={warmup}, or drop that budget"
            ]
        )


def _checkpoints(branches: Branches) -> int:
    return max(leaves_at(budget, branches) for budget in branches.budgets) // max(
        1, checkpoint_every(branches)
    )
