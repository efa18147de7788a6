"""Record what a run is made of in `manifest.json`, and compare it when the run is resumed."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import runner
from runner import provenance
from runner.fault import naming

FILE_NAME = "manifest.json"

_FIXED = ("model", "optimizer", "data", "precision", "run.seed")
_FIXED_KEYS = ("train.micro_batch", "train.seq_len", "train.tokens_per_step")
_FREE = ("optimizer.lr", "data.prefetch", "data.cache", "data.train", "data.val", "data.path")
# Where data lies is free: that it is the same data is what its fingerprint tells.


class Changes(NamedTuple):
    """How a resumed run's configuration differs from the one that it continues."""

    notes: tuple[str, ...]  # allowed, one line each
    errors: tuple[str, ...]  # not allowed: the run would no longer be the same run


# ---------------------------------------------------------------- collect


def collect(
    config: Mapping[str, Any],
    *,
    data: Mapping[str, Any],
    tokenizer: str | None,
    parameters: int,
    world: int,
    start_step: int = 0,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the manifest of a run that starts now; `config` resolved, `data` the corpus's fingerprint."""
    return {
        "version": 1,
        "config": dict(config),
        "config_hash": config_hash(config),
        "seed": dict(config.get("run", {})).get("seed"),
        "data": dict(data),
        "tokenizer": tokenizer,
        "parameters": parameters,
        "sessions": [session(world=world, start_step=start_step, command=command)],
    }


def session(*, world: int, start_step: int, command: Sequence[str]) -> dict[str, Any]:
    """Describe one start of a run: command, code, packages and hardware."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "start_step": start_step,
        "command": list(command) or list(sys.orig_argv),
        "runner": runner.__version__,
        "git": provenance.git_state(Path(runner.__file__).resolve().parent),
        "python": platform.python_version(),
        "packages": provenance.packages(),
        "hardware": provenance.hardware(),
        "world": world,
    }


def end_session(folder: Path, *, status: str, step: int) -> None:
    """Note in the run folder's manifest how the session that wrote it ended."""
    manifest = read(folder)
    if manifest is not None and manifest.get("sessions"):
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        manifest["sessions"][-1]["ended"] = {"at": now, "status": status, "step": step}
        write(folder, manifest)


def finished_at(folder: Path) -> int | None:
    """Return the step at which the folder's last session finished; None if it did not, or nobody knows."""
    try:
        manifest = read(folder)
        ended = manifest["sessions"][-1]["ended"] if manifest else {}
        return int(ended["step"]) if ended["status"] == "finished" else None
    except (ValueError, LookupError, TypeError):
        return None


def config_hash(config: Mapping[str, Any]) -> str:
    """Identify a resolved configuration, whatever the order of its keys."""
    return hashlib.sha256(_text(config, indent=None).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- the file


def write(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest into the run folder, whole or not at all."""
    path = folder / FILE_NAME
    tmp = path.with_name(FILE_NAME + ".tmp")
    with naming(tmp), open(tmp, "w", encoding="utf-8") as file:
        file.write(_text(manifest, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)


def read(folder: Path) -> dict[str, Any] | None:
    """Return the run folder's manifest, None if it has none; ValueError if it cannot be read."""
    path = folder / FILE_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); remove it to resume without comparing configurations"
        ) from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("config"), dict):
        raise ValueError(f"{path}: not a manifest; remove it to resume without comparing configurations")
    return manifest


def resumed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a resumed run: the new configuration, and the history of all sessions."""
    return {**new, "sessions": [*old.get("sessions", ()), *new["sessions"]]}


def _text(value: Any, *, indent: int | None) -> str:
    separators = (",", ":") if indent is None else None
    return json.dumps(value, indent=indent, sort_keys=True, default=str, separators=separators)


# ---------------------------------------------------------------- compare


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Compare the manifest of a run with that of its continuation.

    What the weights' history depends on may not change: model, optimizer (but for the learning rate),
    data, precision, seed and the shape of a step. Everything else may, and is noted.
    """
    notes, errors = [], []
    before, after = _flat(old["config"]), _flat(new["config"])
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if was == now:
            continue
        line = f"{key}: {_show(was)} -> {_show(now)}"
        if _is_fixed(key):
            errors.append(f"{line} may not change in a resumed run; restore it or choose another run.name")
        else:
            notes.append(line)
    for name in ("data", "tokenizer", "parameters"):
        if _normal(old.get(name)) != _normal(new.get(name)):
            errors.append(_contents(name, old.get(name), new.get(name)))
    return Changes(tuple(notes), tuple(errors))


_ABSENT = object()


def _is_fixed(key: str) -> bool:
    if key in _FREE:
        return False
    return key in _FIXED_KEYS or any(key == group or key.startswith(group + ".") for group in _FIXED)


def _contents(name: str, was: Any, now: Any) -> str:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        a, b = _flat(was), _flat(now)
        keys = [key for key in sorted(a.keys() | b.keys()) if a.get(key, _ABSENT) != b.get(key, _ABSENT)]
        shown = (f"{k} {_show(a.get(k, _ABSENT))} -> {_show(b.get(k, _ABSENT))}" for k in keys[:3])
        what = ", ".join(shown) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    else:
        what = f"{_show(was)} -> {_show(now)}"
    return f"{name}: not what the run was trained with ({what}); restore it or choose another run.name"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by dotted key, as JSON keeps them."""
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping) and item:
            leaves.update(_flat(item, name))
        else:
            leaves[name] = _normal(item)
    return leaves


def _normal(value: Any) -> Any:
    return json.loads(_text(value, indent=None))


def _show(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
