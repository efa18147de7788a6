"""Arguments of a command that would do nothing, or not what they say: refused before anything is composed."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner import CONF
from runner.config import GROUPS, MULTIPLE

# Hydra's own settings that it would take and nobody read, and what decides instead.
_HYDRAS = {
    "hydra.run.dir": "a run's folder is run.root/run.name",
    "hydra.sweep.dir": "a sweep's folder is sweep.root/sweep.name",
    "hydra.sweep.subdir": "a sweep's cells are numbered",
    "hydra.output_subdir": "the configuration is in the run folder's manifest.json",
    "hydra.job.chdir": "paths are relative to where the command is given",
}


def unread(arguments: Sequence[str]) -> list[str]:
    """Return a line for each argument or file that the command would not heed."""
    return [*_files(arguments), *_settings(arguments), *_environment()]


def _environment() -> Iterator[str]:
    kernels = os.environ.get("RUNNER_KERNELS")
    if kernels not in (None, "", "on", "off"):
        yield f"RUNNER_KERNELS: must be one of on, off, got {kernels!r}"


def _settings(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        group = key.removeprefix("~")
        if key.startswith("~") and group in GROUPS and group not in MULTIPLE:
            yield f"{argument}: a run needs its {group}; choose another one, {group}=NAME"
        elif key.startswith("~") and group.partition(".")[0] in GROUPS and (users := _users(group)):
            yield f"{argument}: {users} made from it, so that it has to stay; set another value, {group}=..."
        elif key in _HYDRAS:
            yield f"{key}: not used here, {_HYDRAS[key]}"
        elif key in GROUPS and key not in MULTIPLE and re.fullmatch(r"\[.*,.*\]", value):
            # Hydra would merge them into one that is neither.
            yield f"{key}: takes one option, got {value}; sweep over them with -m {key}={value[1:-1]}"


def _users(key: str) -> str:
    """Return which packaged settings are interpolated from a key, with the verb; empty if none is."""
    mark = re.compile(rf"^(\w+):.*\$\{{{re.escape(key)}\}}", re.M)
    found = {
        f"{file.parent.name}.{match[1]}"
        for file in sorted(CONF.glob("*/*.yaml"))
        for match in mark.finditer(file.read_text(encoding="utf-8"))
    }
    names = [*sorted(found)[:2], *(["others"] if len(found) > 2 else [])]
    return f"{' and '.join(names)} {'is' if len(found) == 1 else 'are'}" if found else ""


def _files(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a line for each config folder that has options of names that the package has itself.

    Hydra takes the first file of a name, which is the package's: the other one would do nothing.
    """
    folders = [f for a, f in itertools.pairwise(arguments) if a in ("--config-dir", "-cd")]
    folders += [a.partition("=")[2] for a in arguments if a.startswith("--config-dir=")]
    folders += [
        f for a in arguments if "hydra.searchpath" in a for f in re.findall(r"file://([^,\]'\"]+)", a)
    ]
    for folder in map(Path, folders):
        twins = sorted(p for p in folder.rglob("*.yaml") if _hidden(p, CONF / p.relative_to(folder)))
        if twins:
            more = f" (and {len(twins) - 1} more)" if twins[1:] else ""
            yield f"{twins[0]}{more}: never read, the package has an option of this name; give it another one"


def _hidden(path: Path, packaged: Path) -> bool:
    return packaged.is_file() and path.is_file() and packaged.read_bytes() != path.read_bytes()
