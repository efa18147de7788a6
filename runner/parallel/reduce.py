"""Turn every rank's gradient into the mean of all, while backward is still running.

native: a rank adds its micro-batches in place; on the last one the back end's all-reduce (under shards,
    reduce-scatter) adds the ranks. Equal bits at the same number of ranks.
canonical: the gradient of each micro-batch travels, and the micro-batches of all ranks are added in one
    binary tree over j = i * world + rank (micro-step i), llm.c's order of the data. Equal bits for any
    power-of-two number of ranks that share the same micro-batches, at `accumulate` times the traffic.

Messages are kept from step to step, in all as large as the fp32 gradient (canonical: three times that
on one or two ranks, less on more, and a further share for each doubling of the micro-batches).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from runner.parallel import collective
from runner.parallel.bucket import Bucket, pack, plan, unpack, unpack_shard
from runner.parallel.collective import Work
from runner.parallel.layout import Layout

Reduce = Literal["native", "canonical"]


class Setting(NamedTuple):
    """Who takes part and what comes back: the whole mean, or with `shard` this rank's part of it."""

    rank: int
    world: int
    shard: bool
    bucket_mb: float


def check_reduce(reduce: Reduce, *, world: int) -> None:
    """Raise ValueError where `world` ranks have no binary tree."""
    if reduce == "canonical" and world & (world - 1):
        raise ValueError(
            f"parallel.reduce: canonical needs a power-of-two number of processes, not {world}; "
            "start that many, or use parallel.reduce=native"
        )


class Reducer(Protocol):
    """Completes the flat gradient it was made for."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


def reducer_of(
    layout: Layout, *, gradient: Tensor, clear: Callable[[], None], reduce: Reduce, setting: Setting
) -> Reducer | None:
    """Return what `reduce` asks for; None where accumulating in place is all there is to do."""
    if reduce == "canonical":
        return Canonical(layout, gradient=gradient, clear=clear, setting=setting)
    return None if setting.world == 1 else Native(layout, gradient=gradient, setting=setting)


class InOrder:
    """Calls `launch(bucket)` for every bucket in order, each once it and those before it are complete.

    The order is that of the plan on every rank: ranks that launched in the order of readiness could
    wait for each other for ever.
    """

    def __init__(self, layout: Layout, *, buckets: Sequence[Bucket], launch: Callable[[int], None]) -> None:
        self._sizes = [len(bucket.members) for bucket in buckets]
        self._launch = launch
        self._missing: list[int] = []
        self._next = len(buckets)
        self._hooks = [
            layout.placed[member.parameter].parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, bucket=number: self._ready(bucket)
            )
            for number, bucket in enumerate(buckets)
            for member in bucket.members
        ]

    def begin(self) -> None:
        self._missing, self._next = list(self._sizes), 0

    def end(self) -> None:
        """Launch what backward left incomplete: parameters that the loss does not depend on."""
        while self._next < len(self._sizes):
            self._launch_next()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _ready(self, bucket: int) -> None:
        if self._next == len(self._sizes):
            return
        self._missing[bucket] -= 1
        while self._next < len(self._sizes) and self._missing[self._next] == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        self._next += 1
        self._launch(self._next - 1)


class Native:
    """The back end's own reduction of the accumulated gradient."""

    def __init__(self, layout: Layout, *, gradient: Tensor, setting: Setting) -> None:
        self._gradient, self._setting = gradient, setting
        self._buckets = plan(layout, world=setting.world, bucket_mb=setting.bucket_mb)
        self._rows = [gradient.new_zeros(setting.world, bucket.width) for bucket in self._buckets]
        self._shards = [gradient.new_empty(bucket.width if setting.shard else 0) for bucket in self._buckets]
        self._works: list[Work] = []
        self._order = InOrder(layout, buckets=self._buckets, launch=self._launch)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        if last:
            self._order.begin()
        yield
        if last:
            self._order.end()

    def finish(self) -> None:
        rank, world, shard, _ = self._setting
        for bucket, rows, mine, work in zip(
            self._buckets, self._rows, self._shards, self._works, strict=True
        ):
            work.wait()
            if shard:
                unpack_shard(bucket, mine.mul_(1 / world), rank=rank, flat=self._gradient)
            else:
                unpack(bucket, rows.mul_(1 / world), flat=self._gradient)
        self._works = []

    def close(self) -> None:
        self._order.close()

    def _launch(self, index: int) -> None:
        rows = self._rows[index]
        pack(self._buckets[index], self._gradient, rows=rows)
        if self._setting.shard:
            self._works.append(collective.start_reduce_scatter(rows, out=self._shards[index]))
        else:
            self._works.append(collective.start_all_reduce(rows))


class Canonical:
    """One fixed tree over all micro-batches of all ranks; each rank adds its 1/world of every message."""

    def __init__(
        self, layout: Layout, *, gradient: Tensor, clear: Callable[[], None], setting: Setting
    ) -> None:
        self._gradient, self._clear, self._setting = gradient, clear, setting
        self._buckets = plan(layout, world=setting.world, bucket_mb=setting.bucket_mb)
        shapes = [(setting.world, bucket.width) for bucket in self._buckets]
        self._sent, self._received = ([gradient.new_zeros(shape) for shape in shapes] for _ in range(2))
        self._works: list[Work] = []
        self._sums = [PairwiseSum() for _ in self._buckets]
        self._order = InOrder(layout, buckets=self._buckets, launch=self._launch)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:  # each travels: `last` changes nothing here
        self._clear()
        self._order.begin()
        yield
        self._order.end()
        for work in self._works:
            work.wait()
        self._works = []
        for rows, total in zip(self._exchanged(), self._sums, strict=True):
            total.add(_tree_sum(rows))

    def finish(self) -> None:
        rank, world, shard, _ = self._setting
        for bucket, total in zip(self._buckets, self._sums, strict=True):
            mean = total.take().mul_(1 / world)
            if shard:
                unpack_shard(bucket, mean, rank=rank, flat=self._gradient)
            else:
                unpack(bucket, collective.all_gather(mean, world=world), flat=self._gradient)

    def close(self) -> None:
        self._order.close()

    def _exchanged(self) -> list[Tensor]:
        return self._sent if self._setting.world == 1 else self._received

    def _launch(self, index: int) -> None:
        pack(self._buckets[index], self._gradient, rows=self._sent[index])
        if self._setting.world > 1:
            work = collective.start_all_to_all(self._sent[index], out=self._received[index])
            self._works.append(work)


class PairwiseSum:
    """Adds vectors as they come in a binary tree, with one buffer for each level that is open."""

    def __init__(self) -> None:
        self._open: list[tuple[int, Tensor]] = []  # (vectors in it, their sum), the largest first

    def add(self, vector: Tensor) -> None:
        """Take `vector` over; it may be overwritten."""
        count = 1
        while self._open and self._open[-1][0] == count:
            _, earlier = self._open.pop()
            vector = earlier.add_(vector)
            count *= 2
        self._open.append((count, vector))

    def take(self) -> Tensor:
        """Return the sum of all vectors and forget them."""
        assert self._open, "a step has at least one micro-batch"
        _, total = self._open.pop()
        while self._open:
            total = self._open.pop()[1].add_(total)
        return total


def _tree_sum(rows: Tensor) -> Tensor:
    """Return the sum of the rows of `rows` [2^k, n], neighbours first, in a buffer of its own."""
    if len(rows) == 1:
        return rows[0].clone()
    while len(rows) > 1:
        rows = torch.add(rows[0::2], rows[1::2])
    return rows[0]
