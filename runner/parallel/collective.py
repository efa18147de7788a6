"""The few collectives that an engine needs, under one name each; alone, they cost nothing.

torch renamed two of them in 2.13; both names are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any: ...


def all_gather(mine: Tensor, *, world: int) -> Tensor:
    """Return [world, n]: the contiguous vector [n] of every rank, in rank order."""
    out = mine.new_empty(world * mine.numel())
    if world == 1:
        out.copy_(mine.view(-1))
    else:
        _gather(out, mine.view(-1))
    return out.view(world, -1)


def start_all_reduce(rows: Tensor) -> Work:
    """Replace `rows` by their sum over the ranks."""
    work: Work = dist.all_reduce(rows.view(-1), async_op=True)
    return work


def start_reduce_scatter(rows: Tensor, *, out: Tensor) -> Work:
    """Put the sum over the ranks of row `rank` of `rows` [world, n] into `out` [n]."""
    work: Work = _scatter(out, rows.view(-1), async_op=True)
    return work


def start_all_to_all(rows: Tensor, *, out: Tensor) -> Work:
    """Send row r of `rows` [world, n] to rank r; row r of `out` is what rank r sent here."""
    work: Work = dist.all_to_all_single(out.view(-1), rows.view(-1), async_op=True)
    return work


def broadcast(tensors: list[Tensor], *, world: int) -> None:
    """Overwrite `tensors` with rank 0's."""
    if world > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


class Agreement(Protocol):
    """How ranks agree on small numbers; every rank calls the same methods in the same order."""

    def any_flag(self, flag: bool) -> bool:
        """Whether any rank raised `flag`."""

    def barrier(self) -> None:
        """Return once every rank is here."""

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return [world, n]: the contiguous vector [n] of every rank, in rank order."""


class Messages:
    """Agreement by the process group; flags that the host decides on do not touch the device."""

    def __init__(self, *, world: int, device: torch.device) -> None:
        self._world = world
        self.group: Any = None
        if world > 1 and device.type != "cpu":
            self.group = dist.new_group(backend="gloo")

    def any_flag(self, flag: bool) -> bool:
        if self._world == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flags[0])

    def barrier(self) -> None:
        if self._world > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)

    def all_gather(self, mine: Tensor) -> Tensor:
        return all_gather(mine, world=self._world)


def mean(value: Tensor, *, agreement: Agreement, world: int, device: torch.device) -> Tensor:
    """Return the mean of a 0-d value over the ranks, added in rank order in float64 on each."""
    if world == 1:
        return value
    values = agreement.all_gather(value.detach().double().to(device).view(1))
    total = values[0, 0]
    for other in values[1:, 0]:
        total = total + other
    return (total / world).to(value.dtype)


def gather_objects(value: Any, *, world: int, group: Any) -> list[Any]:
    """Return a small picklable value of every rank, in rank order; for rare moments."""
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value, group=group)
    return values
