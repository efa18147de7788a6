"""Compose and check every cell of a sweep before the first one starts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from yaml import YAMLError

from runner.arguments import home_paths
from runner.cli import ConfigError, resolve
from runner.config import build, check_node
from runner.explain import explain
from runner.sweep import cell_log, cells, naming
from runner.sweep.cells import Cell
from runner.sweep.naming import Command
from runner.sweep.settings import Sweep

Job = Sequence[str]
_PLACE = ("run.name", "run.root", "sweep.name", "sweep.root")


class Composer:
    """Turns a cell's overrides into its checked configuration, with the Hydra loader of the sweep."""

    def __init__(self, loader: Any, config: DictConfig) -> None:
        self._loader = loader
        self._config = config

    def parse(self, lines: Sequence[str]) -> list[Override]:
        """Parse command-line overrides."""
        parsed: list[Override] = OverridesParser.create(config_loader=self._loader).parse_overrides(
            list(lines)
        )
        return parsed

    def compose(self, job: Job) -> dict[str, Any]:
        """Return a job's checked configuration.

        Raises:
            ConfigError: with every problem of this job.
        """
        try:
            config = self._loader.load_sweep_config(self._config, list(job))
        except (HydraException, YAMLError, OSError) as error:
            lines = explain(error, list(job))
            raise ConfigError(lines or [str(error)]) from error
        with open_dict(config):
            del config["hydra"]
        return _started(resolve(config))

    def settings(self) -> Sweep:
        """Return the checked `sweep.*` settings.

        Raises:
            ConfigError: with every problem of theirs.
        """
        node = OmegaConf.to_container(self._config.sweep, resolve=True)
        assert isinstance(node, dict)
        plain = {str(key): home_paths(value) for key, value in node.items()}
        problems = list(check_node(plain, "sweep"))
        if problems:
            raise ConfigError(problems)
        settings: Sweep = build(plain)
        return settings

    def command(self) -> Command:
        """Return what this command asks for: the swept keys, and the values that all cells share."""
        params = OmegaConf.to_container(self._config.hydra.sweeper.get("params") or OmegaConf.create())
        assert isinstance(params, dict)
        given = self.parse(list(self._config.hydra.overrides.task))
        preset = self.parse([f"{key!s}={value}" for key, value in params.items()])
        swept = {key_of(o) for o in (*preset, *given) if o.is_sweep_override()}
        fixed = {key_of(o): value_of(o) for o in (*preset, *given) if not o.is_sweep_override()}
        return Command(frozenset(swept), {key: v for key, v in fixed.items() if key not in swept})

    @property
    def preset(self) -> str | None:
        """Return the chosen `sweep=` option, if any."""
        choice = self._config.hydra.runtime.choices.get("sweep")
        return None if choice in (None, "null") else str(choice)


def key_of(override: Override) -> str:
    """Return the key that an override sets, without `+`."""
    return str(override.get_key_element()).lstrip("+~")


def value_of(override: Override) -> Any:
    """Return an override's value as JSON would keep it: 1e-3 and 0.001 are the same."""
    if override.value_type in (ValueType.ELEMENT, None):
        value = override.value()
        return value if isinstance(value, int | float | str | list | dict | None) else str(value)
    return override.get_value_element_as_str()


def make_cells(
    jobs: Sequence[Job], *, folder: Path, numbers: dict[str, int], composer: Composer
) -> list[Cell]:
    """Return the cell of every job, in order; nothing is written. The same job twice is one cell.

    `numbers` are the known cells by identity; new ones are added to it.

    Raises:
        ConfigError: one line per problem of any cell, naming it.
    """
    rows = [{key_of(o): value_of(o) for o in composer.parse(job)} for job in jobs]
    differing = naming.varying(rows)
    made: list[Cell] = []
    problems: list[tuple[Cell, list[str]]] = []
    for job, row in zip(jobs, rows, strict=True):
        key = cells.identity(row, swept=frozenset(differing))
        label = naming.label(row, differing)
        cell = numbered(key, label, row, folder=folder, numbers=numbers)
        try:
            cell = replace(cell, config=composer.compose(job))
            wrong = _unlike_before(cell)
        except ConfigError as error:
            wrong = error.problems
        except ValueError as error:  # what the cell left behind cannot be read
            wrong = [str(error)]
        made.append(cell)
        problems += [(cell, wrong)] if wrong else []
    if problems:
        raise ConfigError(_lines(problems, total=len(made)))
    return made


def _started(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the run that it starts from found where one run alone would find it.

    A cell looks below its sweep's folder, where the names of other cells are.
    """
    run = config["run"]
    name = str(run["from"] or "").rpartition("@")[0] or str(run["from"] or "")
    there = Path(run["root"]) / name
    if not name or re.fullmatch(r"\d{3,}", name) or not there.is_dir():
        return config
    return {**config, "run": {**run, "from": str(Path(run["root"]) / run["from"])}}


def numbered(key: str, label: str, row: dict[str, Any], *, folder: Path, numbers: dict[str, int]) -> Cell:
    """Return a cell without configuration under its old number, or under the next free one."""
    number = numbers.setdefault(key, max(numbers.values(), default=-1) + 1)
    return Cell(number, key, label, row, {}, folder / cells.folder_name(number))


def known_numbers(folder: Path) -> dict[str, int]:
    """Return the numbers of the cells that a sweep has, by identity.

    Raises:
        ConfigError: the folder holds something else.
    """
    try:
        return cells.read_numbers(folder)
    except NotADirectoryError as error:
        raise ConfigError([f"sweep.root: {folder.parent} is not a folder; choose another"]) from error
    except (ValueError, OSError) as error:
        raise ConfigError([f"sweep.name: {error}"]) from error


def placed(cell: Cell, *, root: Path, group: str, threads: int | None) -> dict[str, Any]:
    """Return the configuration that a cell's process gets: its folder, its threads, a log for the sweep."""
    run: dict[str, Any] = placed_run(cell, root=root, group=group)
    if cell.config["run"]["threads"] is None and threads is not None:
        run["threads"] = threads
    loggers = {**(cell.config["logger"] or {}), "cell": cell_log.entry()}
    return {**cell.config, "run": {**cell.config["run"], **run}, "logger": loggers}


def placed_run(cell: Cell, *, root: Path, group: str) -> dict[str, Any]:
    """Return the `run.*` settings that say where a cell goes and what loggers call it."""
    given = cell.config["run"]
    label = " ".join(filter(None, (given["label"], cell.label))) or cell.name
    group = given["group"] or group
    return {"root": str(root), "name": cell.name, "label": label, "group": group, "from": given["from"]}


def _unlike_before(cell: Cell) -> list[str]:
    """Refuse to pass off a result as that of another configuration."""
    before = cells.read_cell(cell.folder)
    result = cells.read_result(cell.folder)
    if before is None or result is None or cell.config["run"]["overwrite"]:
        return []
    if result.step < cell.config["train"]["steps"] and result.status == "finished":
        return []  # it is extended, and the run itself compares its manifest
    differences = cells.changed(before["config"], cell.config)
    if not differences:
        return []
    what = ", ".join(differences[:3]) + (" ..." if len(differences) > 3 else "")
    return [f"{cell.folder} ended with other settings ({what}); restore them, or choose another sweep.name"]


def _lines(problems: Sequence[tuple[Cell, list[str]]], *, total: int) -> list[str]:
    """Name the cell in front of each problem, unless every cell has it."""
    count = Counter(line for _, lines in problems for line in lines)
    shared = [line for line, n in count.items() if n == total and total > 1]
    named = [
        f"#{cell.number} {cell.label}: {line}" if cell.label else line
        for cell, lines in problems
        for line in lines
        if line not in shared
    ]
    return [*shared, *named]


def check_place(command: Command) -> None:
    """Refuse names for single cells, which have numbers that a repeated command finds again, and `sweep.*`.

    Raises:
        ConfigError: naming the key.
    """
    problems = [
        f"{key}: a sweep's cells are folders 000, 001, ... of one folder and cannot have their own; give one "
        f"value, which names the sweep, or sweep over run.label"
        for key in _PLACE
        if key in command.swept
    ]
    problems += [
        f"{key}: a setting of the sweep as a whole, which cells cannot differ in; give one value"
        for key in sorted(command.swept.difference(_PLACE))
        if key.split(".")[0] == "sweep"
    ]
    name, own = command.fixed.get("run.name"), command.fixed.get("sweep.name")
    if own is not None and name is not None and own != name:
        problems.append(f"run.name: {name!r}, but sweep.name={own!r} names the folder; give only one of them")
    if problems:
        raise ConfigError(problems)


def check_name(name: str) -> None:
    """Refuse a sweep name that is no folder name.

    Raises:
        ConfigError: naming it.
    """
    parts = name.split("/")
    if not name.isprintable() or any(p in ("", ".", "..") or len(p.encode()) > 255 for p in parts):
        raise ConfigError([f"sweep.name: {name!r} is not a folder name; use letters, digits, - _ . ="])


def with_config(cell: Cell, config: dict[str, Any]) -> Cell:
    """Return a cell with its checked configuration.

    Raises:
        ConfigError: it has a result of other settings.
    """
    complete = replace(cell, config=config)
    if wrong := _unlike_before(complete):
        raise ConfigError(wrong)
    return complete
