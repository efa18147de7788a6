"""Names of sweeps and cells: stable from one start of a command to the next, and valid everywhere."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from runner.sweep.cells import is_how

_LONGEST = 60


class Command(NamedTuple):
    """What a sweep's command line asks for, apart from the values that it sweeps over."""

    swept: frozenset[str]
    fixed: dict[str, Any]  # key -> value


def sweep_name(command: Command, *, preset: str | None) -> str:
    """Name a sweep by its preset or swept keys, and by a hash of what they share.

    The swept values are left out: a command with one more value finds the same folder.
    """
    fixed = {key: value for key, value in command.fixed.items() if not is_how(key)}
    shared = json.dumps([sorted(command.swept), preset, fixed], sort_keys=True, default=str)
    words = preset or "-".join(short_names(sorted(command.swept)).values()) or "sweep"
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "_", words)[:_LONGEST].strip("._-") or "sweep"
    return f"{slug}-{hashlib.sha256(shared.encode()).hexdigest()[:6]}"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the shortest ending of each dotted key that no other key shares."""
    keys = list(dict.fromkeys(keys))
    names = {}
    for key in keys:
        parts = re.split(r"[./@]", key.lstrip("+"))
        endings = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = [k for k in keys if k != key]
        names[key] = next((e for e in endings if not any(_ends(o, e) for o in others)), key)
    return names


def _ends(key: str, ending: str) -> bool:
    plain = re.sub(r"[/@]", ".", key)
    return plain == ending or plain.endswith(f".{ending}")


def varying(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which the cells of one command differ, in the order they were given."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [key for key in keys if len({json.dumps(row.get(key), default=str) for row in rows}) > 1]


def label(overrides: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Say in one line what sets a cell apart: `lr=0.003 warmup_steps=50`."""
    names = short_names(keys)
    return " ".join(f"{names[key]}={show(overrides[key])}" for key in keys if key in overrides)


def show(value: Any) -> str:
    """Return a value as a person would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if isinstance(value, str | int) else json.dumps(value, default=str)
