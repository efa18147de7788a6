"""Re-cut sharded optimizer state for another number of ranks.

Under ZeRO-1 rank r of P keeps, of every layer of every tensor, the r-th 1/P (llm.c's layout), so one tensor
of one rank is [layers, n/P]; joining the ranks along the second axis gives the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.api import Slot, Snapshot, State


def is_sharded(snapshot: Snapshot) -> bool:
    """Whether each rank keeps only its part of the flat optimizer state."""
    return any(_is_part(value, snapshot) for value in snapshot.optimizer.values())


def reshard(snapshots: Sequence[Snapshot], *, world: int, rank: int, sharded: bool) -> Snapshot:
    """Return what `rank` of `world` needs, from the snapshots of all old ranks in rank order.

    Optimizer state is exact. The data stream and the parts of an old rank with the same number are kept,
    of rank 0 where there was none: a shuffled order goes on, but not in the order of an uninterrupted run.
    """
    base = snapshots[rank] if rank < len(snapshots) else snapshots[0]
    whole = _whole_state(snapshots)
    params = base.weights.numel()
    state = whole
    if sharded:
        _check_divisible(base.layout, world)
        state = {
            name: _cut(value, base.layout, world, rank) if _is_flat(value, params) else value
            for name, value in whole.items()
        }
    return replace(base, rank=rank, world=world, optimizer=state)


def _whole_state(snapshots: Sequence[Snapshot]) -> State:
    first = snapshots[0]
    whole: State = {}
    for name, value in first.optimizer.items():
        values = [snapshot.optimizer[name] for snapshot in snapshots]
        if _is_part(value, first):
            whole[name] = _join(values, first.layout, first.world)
        elif _is_flat(value, first.weights.numel()) or all(_same(value, other) for other in values):
            whole[name] = value
        else:
            raise ValueError(
                f"checkpoint {first.step}: optimizer state {name!r} differs between its {first.world} ranks "
                f"and cannot be re-cut; resume with {first.world} ranks"
            )
    return whole


def _join(parts: Sequence[Tensor], layout: Sequence[Slot], world: int) -> Tensor:
    joined = []
    for slot in layout:
        start, n = slot.offset // world, slot.numel // world
        rows = [part[start : start + n].view(slot.layers, -1) for part in parts]
        joined.append(torch.cat(rows, dim=1).view(-1))
    return torch.cat(joined)


def _cut(whole: Tensor, layout: Sequence[Slot], world: int, rank: int) -> Tensor:
    pieces = []
    for slot in layout:
        rows = whole[slot.offset : slot.offset + slot.numel].view(slot.layers, world, -1)
        pieces.append(rows[:, rank].reshape(-1))
    return torch.cat(pieces)


def _check_divisible(layout: Sequence[Slot], world: int) -> None:
    for slot in layout:
        if slot.layer_numel % world:
            raise ValueError(
                f"parallel: {slot.name} has {slot.layer_numel} elements per layer, which {world} ranks "
                "cannot share equally; choose a number of ranks that divides it, or parallel=ddp"
            )


def _is_flat(value: Any, numel: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == numel


def _is_part(value: Any, snapshot: Snapshot) -> bool:
    params = snapshot.weights.numel()
    return snapshot.world > 1 and params % snapshot.world == 0 and _is_flat(value, params // snapshot.world)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and repr(a) == repr(b)
