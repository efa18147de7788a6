"""Compare a checkpoint with the run that wants to resume from it, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from runner.api import Snapshot
from runner.checkpoint.reshard import is_sharded


class Matched(NamedTuple):
    """A snapshot that fits the run, and what a person should know about it."""

    snapshot: Snapshot
    notes: tuple[str, ...]
    resharded: bool = False


def check_model(saved: Snapshot, live: Snapshot, *, fields: Collection[str] | None = None) -> None:
    """Raise ValueError naming every field in which the models differ; `fields` are those that were saved."""
    here = f"checkpoint {saved.step}"
    different = [
        f"{name} {saved.model.get(name)!r} (run: {live.model.get(name)!r})"
        for name in sorted(saved.model.keys() | live.model.keys() if fields is None else fields)
        if saved.model.get(name) != live.model.get(name)
    ]
    if different:
        raise ValueError(
            f"model: {here} has {', '.join(different)}; use the checkpoint's model or another run.name"
        )
    shapes = [[(slot.shape, slot.layers, slot.offset) for slot in s.layout] for s in (saved, live)]
    if shapes[0] != shapes[1]:
        name = next((b.name for a, b in zip(saved.layout, live.layout, strict=False) if a[1:] != b[1:]), "?")
        raise ValueError(f"model: the tensors of {here} differ from this run's, first at {name}")
    if saved.weights.dtype != live.weights.dtype:
        raise ValueError(
            f"precision: {here} has {_dtype(saved.weights)} weights, this run {_dtype(live.weights)}; "
            "resume with the precision that it was trained in"
        )


def check_topology(saved: Snapshot, live: Snapshot, *, allow_reshard: bool) -> bool:
    """Return whether the state must be re-cut for this run's ranks; ValueError if it may not."""
    was, now = _topology(saved), _topology(live)
    if was == now:
        return False
    if not allow_reshard:
        if saved.world == live.world:
            way, cost = "use its kind of parallel", "state and order of the data stay exact"
        else:
            way, cost = "start it with as many ranks", "the state is exact, the order of the data changes"
        raise ValueError(
            f"checkpoint {saved.step} was written by {was}, this run has {now}; {way}, "
            f"or pass checkpoint.allow_reshard=true ({cost})"
        )
    return True


def _topology(snapshot: Snapshot) -> str:
    sharded = "sharded" if is_sharded(snapshot) else "unsharded"
    return f"{snapshot.world} rank{'s' * (snapshot.world > 1)} with {sharded} optimizer state"


def match_optimizer(saved: Snapshot, live: Snapshot) -> Matched:
    """Return the snapshot with the optimizer state that this run keeps; ValueError if it lacks any."""
    was, now = saved.optimizer, live.optimizer
    if not now or not all(isinstance(value, Tensor) for value in now.values()):
        return Matched(saved, ())  # the optimizer itself checks what it is given
    notes: tuple[str, ...] = ()
    if was.keys() - now.keys() == {"master"} and was.keys() > now.keys():
        was = {name: value for name, value in was.items() if name != "master"}
        notes = (f"checkpoint {saved.step}: its master weights are not used, this run keeps none",)
    different = [
        f"{name} {_extent(was.get(name))} (run: {_extent(now.get(name))})"
        for name in sorted(was.keys() | now.keys())
        if _extent(was.get(name)) != _extent(now.get(name))
    ]
    if different:
        raise ValueError(
            f"optimizer: checkpoint {saved.step} has {', '.join(different)}; use the optimizer and precision "
            "that it was written with"
        )
    return Matched(replace(saved, optimizer=was), notes)


def match_env(saved: Snapshot, live: Snapshot, *, strict: bool) -> tuple[str, ...]:
    """Return one line if the bits may change because the environment did; ValueError when `strict`."""
    if not saved.env:
        return ()  # llm.c records none
    different = [
        f"{name} {saved.env.get(name)!r} -> {live.env.get(name)!r}"
        for name in sorted(saved.env.keys() | live.env.keys())
        if saved.env.get(name) != live.env.get(name)
    ]
    if not different:
        return ()
    line = f"bits may differ from an uninterrupted run, the environment changed: {', '.join(different)}"
    if strict:
        raise ValueError(f"checkpoint.strict_env: {line}; restore it or pass checkpoint.strict_env=false")
    return (line,)


def _extent(value: Any) -> str:
    return f"{_dtype(value)}{list(value.shape)}" if isinstance(value, Tensor) else "(absent)"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
