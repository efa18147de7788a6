"""Read a checkpoint's files into snapshots, with every checksum compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from runner.api import Slot, Snapshot, State
from runner.checkpoint import folder as files
from runner.checkpoint import llmc_format, match, safetensors_format
from runner.checkpoint.disk import Written
from runner.checkpoint.folder import Found
from runner.checkpoint.match import Matched
from runner.checkpoint.reshard import is_sharded, reshard


class Weights(NamedTuple):
    """A model file's content."""

    model: dict[str, Any]
    layout: tuple[Slot, ...]
    weights: Tensor  # flat, in layout order


def newest(folder: Path) -> tuple[Found | None, tuple[str, ...]]:
    """Return the newest checkpoint whose files are all intact, and a line for each later one that is not."""
    damaged: list[str] = []
    for step in reversed(files.done_steps(folder)):
        try:
            found = files.inspect(folder, step)
            files.verify(found)
        except (ValueError, OSError) as error:
            damaged.append(f"checkpoint {step} in {folder} is damaged: {error}")
        else:
            return found, tuple(damaged)
    return None, tuple(damaged)


def try_load(
    folder: Path, step: int, live: Snapshot, *, allow_reshard: bool, strict_env: bool
) -> tuple[Matched | None, str]:
    """Load a checkpoint for the run `live`; None and why if it is damaged, ValueError if it does not fit."""
    try:
        found = files.inspect(folder, step)
        weights = load_weights(found, layout=live.layout)
        ranks = [live.rank] if found.world == live.world else range(found.world)
        saved = [load_rank(found, rank, weights) for rank in ranks]
    except safetensors_format.MismatchError:
        raise
    except (ValueError, OSError) as error:
        return None, str(error)
    match.check_model(saved[0], live, fields=None if found.extras else saved[0].model)
    snapshot, notes = saved[0], missing(found)
    resharded = match.check_topology(snapshot, live, allow_reshard=allow_reshard)
    if resharded:
        if len(saved) != found.world:
            saved = [load_rank(found, rank, weights) for rank in range(found.world)]
        snapshot = reshard(saved, world=live.world, rank=live.rank, sharded=is_sharded(live))
        text = (
            f"optimizer state re-cut from {found.world} to {live.world} ranks; the order of the data changes"
        )
        notes += (f"checkpoint {step}: {text}",)
    matched = match.match_optimizer(snapshot, live)
    notes += matched.notes + match.match_env(snapshot, live, strict=strict_env)
    return Matched(matched.snapshot, notes, resharded), ""


def load_weights(found: Found, *, layout: Sequence[Slot] = ()) -> Weights:
    """Read the model of a checkpoint; `layout` is the run's, which safetensors files need.

    ValueError when the file is damaged; its subclass MismatchError when it holds another model.
    """
    path = files.model_path(found.folder, found.step, found.suffix)
    if found.suffix == safetensors_format.SUFFIX:
        weights, model, written = safetensors_format.read_model(path, layout=tuple(layout))
        read = Weights(model, tuple(layout), weights)
    else:
        model_file = llmc_format.read_model(path)
        shape, written = model_file.header.shape, model_file.written
        read = Weights({"kind": "gpt2", **shape}, llmc_format.gpt2_layout(shape), model_file.weights)
    _compare(found, path, written)
    model = found.extras[0]["model"] if found.extras else read.model
    return read._replace(model=model)


def load_rank(found: Found, rank: int, weights: Weights) -> Snapshot:
    """Read one rank's state of a checkpoint; ValueError when a file is damaged."""
    extra = found.extras[rank] if found.extras else {}
    path = files.state_path(found.folder, found.step, rank, found.suffix)
    if found.suffix == safetensors_format.SUFFIX:
        state, at, written = safetensors_format.read_state(path)
        where = (at["step"], at["rank"], at["world"])
        optimizer, stream, rng = state["optimizer"], state["stream"], state["rng"]
    else:
        file = llmc_format.read_state(path, params=weights.weights.numel())
        where, written = (file.header.step, file.header.rank, file.header.world), file.written
        optimizer, rng = file.optimizer, file.header.rng
        stream = _stream(file.stream, extra)
    files.check_place(path, where, found, rank)
    _compare(found, path, written)
    return Snapshot(
        step=found.step,
        rank=rank,
        world=found.world,
        layout=weights.layout,
        model=weights.model,
        weights=weights.weights,
        optimizer=optimizer,
        stream=stream,
        rng=rng,
        parts=extra.get("parts", {}),
        env=extra.get("env", {}),
    )


def missing(found: Found) -> tuple[str, ...]:
    """Say what a checkpoint of llm.c's own cannot restore."""
    if found.extras:
        return ()
    lost = "outlier windows, generators of dropout and sampling, loggers and counters start fresh"
    name = files.extra_path(found.folder, found.step, 0).name
    return (f"checkpoint {found.step} has no {name} (llm.c wrote it, or it was lost): {lost}",)


def _stream(parsed: State, extra: State) -> State:
    """Join what the state file holds of the data stream with what the side file does."""
    if not extra:
        return parsed
    return {**{name: parsed[name] for name in extra["stream_held"]}, **extra["stream"]}


def _compare(found: Found, path: Path, written: Written) -> None:
    for recorded, size, xxh3_64 in files.recorded(found):
        if recorded == path:
            files.check_written(path, written, size=size, xxh3_64=xxh3_64)
