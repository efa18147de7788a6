"""Search with optuna: it proposes values, the sweep runs them, a journal keeps every trial.

A trial is a cell. What a killed command leaves running is continued from its checkpoint by the next
one, under the same trial; so twelve trials asked for are twelve trials run. The proposal for trial n
depends on the trials before it and on the seed alone: with one cell at a time an interrupted search
equals an uninterrupted one.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from runner.cli import ConfigError
from runner.sweep import cells, naming, plan, summary
from runner.sweep.cells import Cell, Result
from runner.sweep.execute import Place, execute
from runner.sweep.lock import locked
from runner.sweep.plan import Composer
from runner.sweep.settings import Search
from runner.sweep.sweep import SweepOutcome, sweep_folder, teller
from runner.sweep.tell import short

_VALIDATION = "runner.evaluate.Validation"


def measures_loss(evaluators: dict[str, Any] | None) -> bool:
    """Whether a validation loss can be expected; an evaluator that is not ours may well have one."""
    targets = [str(node["_target_"]) for node in (evaluators or {}).values() if node]
    return any(t == _VALIDATION or not t.startswith(("runner.", "plugins.")) for t in targets)


def run_search(composer: Composer, parsed: Sequence[Override], *, processes: bool) -> SweepOutcome:
    """Run trials until there are as many as `sweep.search.trials`.

    Raises:
        ConfigError: optuna is missing, nothing is swept, or the ends of a range make a wrong run.
    """
    settings = composer.settings()
    assert settings.search is not None
    space = {plan.key_of(o): o for o in parsed if o.is_sweep_override()}
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    distributions = _distributions(space, processes=processes)
    folder = sweep_folder(composer)
    first = _check_ends(composer, fixed, space, folder=folder / "ends")
    if not measures_loss(first.config["evaluate"]):
        raise ConfigError(["sweep=search: without a validation loss no trial is better; add evaluate=[val]"])
    with locked(folder) as handle:
        study = open_study(folder, settings.search)
        trials = Trials(study, settings.search, composer, fixed, distributions, folder)
        tell = teller([first], settings=settings, total=settings.search.trials)
        done = len(study.get_trials(deepcopy=False, states=_ended_states()))
        for _ in range(done):
            tell.skipped()
        keys = ", ".join(distributions)
        tell.line(
            f"search of {settings.search.trials} trials over {keys} in {short(folder)}: {done} done before"
        )
        ran = execute(trials, place=Place(folder, settings, handle), tell=tell, config=first.config)
        if trials.cells or done:
            summary.report(folder, tell=tell)
        tell.failures([(trials.cells[n], r) for n, r in ran.results.items() if r.status == "failed"])
    failed = any(result.status == "failed" for result in ran.results.values())
    return SweepOutcome(folder, 128 + ran.signal if ran.signal else int(failed), list(ran.results.values()))


class Trials:
    """A study as a source of cells: it proposes the next one and learns from every end."""

    def __init__(
        self,
        study: Any,
        settings: Search,
        composer: Composer,
        fixed: list[str],
        distributions: dict[str, Any],
        folder: Path,
    ) -> None:
        self._study, self._settings, self._composer = study, settings, composer
        self._fixed, self._distributions, self._folder = fixed, distributions, folder
        self._numbers = plan.known_numbers(folder)
        self._left_running = list(study.get_trials(deepcopy=False, states=_running_states()))
        self._trials: dict[int, Any] = {}
        self.cells: dict[int, Cell] = {}

    def take(self) -> Cell | None:
        """Return the cell of a trial that was interrupted, or of a new one; None when there are enough."""
        if self._left_running:
            trial = self._continued(self._left_running.pop(0))
        elif len(self._study.get_trials(deepcopy=False)) < self._settings.trials:
            self._study.sampler = sampler(self._settings, len(self._study.get_trials(deepcopy=False)))
            trial = self._study.ask(self._distributions)
        else:
            return None
        return self._cell(trial)

    def _continued(self, frozen: Any) -> Any:
        """Return a trial that was left running, with the values that a kill may have come before."""
        import optuna

        self._study.sampler = sampler(self._settings, frozen.number)
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        for key, distribution in self._distributions.items():
            if key in frozen.params:  # drawn again, for the generator to stand where it stood
                self._study.sampler.sample_independent(self._study, frozen, key, distribution)
            else:
                trial._suggest(key, distribution)
        return trial

    def _cell(self, trial: Any) -> Cell:
        values = {key: trial.params[key] for key in self._distributions}
        lines = [*self._fixed, *(f"{key}={value}" for key, value in values.items())]
        row = {plan.key_of(o): plan.value_of(o) for o in self._composer.parse(lines)}
        label = naming.label(row, list(values))
        cell = plan.numbered(f"trial-{trial.number}", label, row, folder=self._folder, numbers=self._numbers)
        cell = replace(cell, config=self._composer.compose(lines))
        cells.add_numbers(self._folder, [cell])
        self._trials[cell.number] = trial
        self.cells[cell.number] = cell
        return cell

    def ended(self, cell: Cell, result: Result) -> Result:
        """Tell the study. A diverged trial counts as a very bad one, and no trial is lost."""
        from optuna.trial import TrialState

        number = self._trials[cell.number].number
        if result.status == "stopped":
            return result  # the next command goes on with it
        if result.status == "finished" and math.isfinite(result.val_loss):
            self._study.tell(number, result.val_loss)
        elif result.status == "pruned":
            self._report(cell)
            self._study.tell(number, state=TrialState.PRUNED)
        elif result.status == "diverged":
            self._trials[cell.number].report(self._settings.penalty, cell.config["train"]["steps"])
            self._study.tell(number, state=TrialState.PRUNED)
        else:
            self._study.tell(number, state=TrialState.FAIL)
        return result

    def unwanted(self, running: Iterable[Cell]) -> list[int]:
        """Return the cells whose validation losses fall behind those of the other trials."""
        if not self._settings.prune:
            return []
        return [
            cell.number for cell in running if self._report(cell) and self._trials[cell.number].should_prune()
        ]

    def _report(self, cell: Cell) -> bool:
        """Pass new validation losses on; return whether there were any."""
        trial = self._trials[cell.number]
        known = self._study._storage.get_trial(trial._trial_id).intermediate_values
        new = [(s, v) for s, v in cells.read_progress(cell.folder) if s > 0 and s not in known and v == v]
        for step, value in new:
            trial.report(min(value, self._settings.penalty), step)
        return bool(new)


# ---------------------------------------------------------------- the study


def open_study(folder: Path, settings: Search) -> Any:
    """Open the sweep's study, or create it; mend what a killed command left in the journal."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = folder / "study.journal"
    mend(path)
    pruner = optuna.pruners.MedianPruner(
        n_startup_trials=settings.startup_trials, n_warmup_steps=settings.prune_after
    )
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(path))),
        study_name=folder.name,
        sampler=sampler(settings, 0),
        pruner=pruner if settings.prune else optuna.pruners.NopPruner(),
        direction="minimize",
        load_if_exists=True,
    )


def sampler(settings: Search, number: int) -> Any:
    """Return what proposes trial `number`, seeded so that a restart proposes the same."""
    import optuna

    seed = (settings.seed * 1_000_003 + number) % 2**32
    if settings.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=settings.startup_trials, constant_liar=True)


def mend(journal: Path) -> None:
    """Cut a line that a crash tore off the journal, and remove the lock that nobody holds any more."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink(missing_ok=True)  # the sweep's own lock says that we are alone
    if journal.is_file():
        content = journal.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(journal, whole)


def _ended_states() -> tuple[Any, ...]:
    from optuna.trial import TrialState

    return (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


def _running_states() -> tuple[Any, ...]:
    from optuna.trial import TrialState

    return (TrialState.RUNNING, TrialState.WAITING)


# ---------------------------------------------------------------- the space


def _distributions(space: dict[str, Override], *, processes: bool) -> dict[str, Any]:
    try:
        import optuna
    except ImportError:
        raise ConfigError(["sweep=search: optuna is not installed; pip install 'runner[search]'"]) from None
    problems = []
    if not space:
        problems.append(
            "sweep=search: nothing to search; give ranges, as in "
            "'optimizer.lr=tag(log,interval(1e-4,1e-2))' scheduler.warmup_steps=range(10,110,10)"
        )
    if not processes:
        problems.append("hydra/launcher: sweep=search runs its trials with hydra/launcher=processes")
    if problems:
        raise ConfigError(problems)
    found = {}
    for key, override in space.items():
        try:
            found[key] = distribution(override, optuna.distributions)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


def distribution(override: Override, kinds: Any) -> Any:
    """Return what optuna draws from: interval -> float or int, range -> steps, choice -> categories.

    Raises:
        ValueError: an interval has no values.
    """
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        low, high, log = value.start or 0, value.end or 0, "log" in value.tags
        if low > high:
            raise ValueError(f"interval({low},{high}): the lower end comes first")
        if log and low <= 0:
            raise ValueError(f"tag(log,interval({low},{high})): by magnitude, the lower end must be > 0")
        if isinstance(low, int) and isinstance(high, int):
            return kinds.IntDistribution(low, high, log=log)
        return kinds.FloatDistribution(float(low), float(high), log=log)
    if isinstance(value, RangeSweep):
        points = list(value.range())
        if all(isinstance(point, int) for point in points):
            return kinds.IntDistribution(points[0], points[-1], step=int(value.step))
        return kinds.FloatDistribution(float(points[0]), float(points[-1]), step=float(value.step))
    assert isinstance(value, ChoiceSweep)
    return kinds.CategoricalDistribution([str(text) for text in override.sweep_string_iterator()])


def _ends(override: Override) -> list[str]:
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        return [str(value.start), str(value.end)]
    if isinstance(value, RangeSweep):
        points = list(value.range())
        return [str(points[0]), str(points[-1])]
    return [str(text) for text in override.sweep_string_iterator()]


def _check_ends(composer: Composer, fixed: list[str], space: dict[str, Override], *, folder: Path) -> Cell:
    """Check the runs at the ends of every range, the others at their first; return one of them."""
    ends = {key: _ends(override) for key, override in space.items()}
    start = {key: values[0] for key, values in ends.items()}
    moved = [{**start, key: value} for key, values in ends.items() for value in values]
    jobs = [[*fixed, *(f"{key}={value}" for key, value in job.items())] for job in moved]
    unique = [job for job, _ in itertools.groupby(jobs)]
    try:
        return plan.make_cells(unique, folder=folder, numbers={}, composer=composer)[0]
    except ConfigError as error:
        lines = [line.split(" ", 1)[1] if line.startswith("#") else line for line in error.problems]
        raise ConfigError(list(dict.fromkeys(lines))) from error
