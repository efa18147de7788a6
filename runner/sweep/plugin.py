"""What Hydra sees: a sweeper that lists the cells, and a launcher that runs cells of any sweeper."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from runner import CONF
from runner.cli import ConfigError
from runner.sweep.branches import run_branches
from runner.sweep.cells import CellError, Result
from runner.sweep.plan import Composer
from runner.sweep.search import run_search
from runner.sweep.sweep import run_elsewhere, run_list

_MODULE = "hydra_plugins.runner"


def register() -> None:
    """Make the plugins known to Hydra, under the package name that 1.3 insists on."""
    module = types.ModuleType(_MODULE)
    parent = _namespace()
    for plugin in (Cells, Processes):
        plugin.__module__ = _MODULE
        setattr(module, plugin.__name__, plugin)
        Plugins.instance().register(plugin)
    sys.modules[_MODULE] = module
    parent.runner = module  # type: ignore[attr-defined]
    _prefer_our_presets()


def _namespace() -> types.ModuleType:
    """Return the package that Hydra's plugins live in; without any installed it does not exist yet."""
    name = _MODULE.partition(".")[0]
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    package = types.ModuleType(name)
    package.__path__ = []
    return sys.modules.setdefault(name, package)


def _prefer_our_presets() -> None:
    """Take nodes that a launcher's package stored under a preset's name out of Hydra's store.

    Hydra 1.3 would check the preset against them, with a deprecation warning in every job.
    """
    stored = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for preset in (CONF / "hydra" / "launcher").glob("*.yaml"):
        stored.pop(preset.name, None)


class Processes(Launcher):
    """Runs each job in a process of its own; finished ones are not run again."""

    def __init__(self) -> None:
        self.composer: Composer | None = None
        self._outcomes: list[Any] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what Hydra knows about this command."""
        self.composer = Composer(hydra_context.config_loader, config)
        self._outcomes = getattr(task_function, "outcomes", [])

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs for any sweeper; a job's return value is its validation loss, inf if it diverged."""
        assert self.composer is not None
        outcome = run_list(self.composer, job_overrides)
        self._outcomes.append(outcome)
        return [_returned(result) for result in outcome.results]


class Cells(Sweeper):
    """Lists the cells of a grid, a search or a set of branches, checks all of them, has them run."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self._params = dict(params or {})
        self._composer: Composer | None = None
        self._launcher: Launcher | None = None
        self._outcomes: list[Any] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what Hydra knows about this command."""
        self._composer = Composer(hydra_context.config_loader, config)
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        self._outcomes = getattr(task_function, "outcomes", [])

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep that the command asks for."""
        composer, launcher = self._composer, self._launcher
        assert composer is not None
        assert launcher is not None
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ConfigError(
                ["-m: torchrun starts the ranks of one run; start a sweep without it (parallel=ddp)"]
            )
        lines = [f"{key}={value}" for key, value in self._params.items()] + arguments
        parsed = composer.parse(lines)
        settings = composer.settings()
        own = launcher if isinstance(launcher, Processes) else None
        if settings.search is not None:
            outcome = run_search(composer, parsed, processes=own is not None)
        elif settings.branches is not None:
            outcome = run_branches(composer, parsed, processes=own is not None)
        else:
            jobs = _grid(parsed)
            if own is None:
                outcome = run_elsewhere(composer, jobs, launch=launcher.launch)
            else:
                outcome = run_list(composer, jobs)
        self._outcomes.append(outcome)
        return outcome


def _grid(parsed: list[Override]) -> list[list[str]]:
    """Return the overrides of each cell of a grid.

    Raises:
        ConfigError: there is none, or it would have infinitely many.
    """
    for override in parsed:
        if override.is_interval_sweep():
            key = override.get_key_element()
            raise ConfigError(
                [f"{key}: an interval has no cells; add sweep=search, or list values: {key}=1,2"]
            )
    jobs: list[list[str]] = BasicSweeper.split_arguments(parsed, None)[0]
    if not jobs:
        swept = ", ".join(o.input_line or "" for o in parsed if o.is_sweep_override())
        raise ConfigError([f"-m: nothing to run, {swept} matches no value"])
    return jobs


def _returned(result: Result) -> JobReturn:
    returned = JobReturn()
    failed = result.status in ("failed", "stopped")
    returned.status = JobStatus.FAILED if failed else JobStatus.COMPLETED
    returned.return_value = CellError(result.message) if failed else result.val_loss
    return returned
