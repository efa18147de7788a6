"""Gather updated weights: each rank has updated its shard, every rank needs the whole."""

from __future__ import annotations

from torch import Tensor

from runner.api import Optimizer, Slot, State
from runner.parallel import collective
from runner.parallel.bucket import pack_shard, plan, unpack
from runner.parallel.layout import Layout


def check_divisible(slots: tuple[Slot, ...], *, world: int) -> None:
    """Raise ValueError naming the first tensor that `world` ranks cannot share equally."""
    for slot in slots:
        if slot.layer_numel % world:
            raise ValueError(
                f"parallel: zero1 cannot cut {slot.name!r} {list(slot.shape)} ({slot.layer_numel} elements) "
                f"into {world} equal parts; change parallel.processes to a divisor, or use parallel=ddp"
            )


class Sharded:
    """An optimizer of this rank's shards that leaves every rank with all weights."""

    def __init__(self, inner: Optimizer, *, layout: Layout, weights: Tensor, rank: int, world: int) -> None:
        self.inner = inner
        self._weights, self._rank, self._world = weights, rank, world
        self._buckets = plan(layout, world=world, bucket_mb=64)
        self._row = weights.new_empty(max(bucket.width for bucket in self._buckets))

    def update(self, *, step: int, lr: float, scale: Tensor, apply: Tensor) -> None:
        """Update the shard, then gather; after a skip the gather changes nothing."""
        self.inner.update(step=step, lr=lr, scale=scale, apply=apply)
        for bucket in self._buckets:
            row = self._row[: bucket.width]
            pack_shard(bucket, self._weights, rank=self._rank, row=row)
            unpack(bucket, collective.all_gather(row, world=self._world), flat=self._weights)

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.inner.load_state_dict(state)
