"""One engine for one to many ranks: weights and gradients are views of two flat buffers.

`single`, `ddp` and `zero1` are its settings. What travels between ranks, and in which order it is
added, is the reducer's business (`runner.parallel.reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from runner import arena, norm
from runner.api import Optimizer, Role, Segment, Slot
from runner.optimizer.groups import roles_of
from runner.parallel import collective, shared
from runner.parallel.collective import Agreement
from runner.parallel.gradient import Gradients
from runner.parallel.layout import Placed, layout_of
from runner.parallel.reduce import Reduce, Reducer, Setting, check_reduce, reducer_of
from runner.parallel.shard import Sharded, check_divisible


class Flat:
    """Where parameters live and how ranks combine, once `place` was called.

    With more ranks than one the default process group exists already. `weights` [numel] holds every
    slot in order, what a checkpoint writes and reads; `gradient` [numel] is fp32.
    """

    layout: tuple[Slot, ...]
    weights: Tensor
    gradient: Tensor

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        device: torch.device | None,
        reduce: Reduce = "native",
        shard: bool = False,
        bucket_mb: float = 25.0,
        share_memory: bool = False,
    ) -> None:
        check_reduce(reduce, world=world)
        self.rank, self.world = rank, world
        self.device = device if device is not None else torch.device("cpu")
        self.layout = ()
        self._reduce = reduce
        on_cpu = self.device.type == "cpu"
        self._share_memory = share_memory and world > 1 and reduce == "native" and on_cpu and not shard
        self._setting = Setting(rank=rank, world=world, shard=shard and world > 1, bucket_mb=bucket_mb)
        self._messages = collective.Messages(world=world, device=self.device)
        self._agreement: Agreement = self._messages

    def place(self, model: nn.Module) -> nn.Module:
        """Move the parameters into the flat buffers, equal on all ranks; return what the loop calls.

        Raises ValueError where the parameters cannot share a buffer or cannot be cut.
        """
        model.to(self.device)
        layout = layout_of(model)
        if self._setting.shard:
            check_divisible(layout.slots, world=self.world)
        self.layout, self._layout = layout.slots, layout
        self.weights = arena.zeros(layout.numel, dtype=layout.dtype, device=self.device)
        common = self._common() if self._share_memory else None
        if common is None:
            self.gradient = arena.zeros(layout.numel, device=self.device)
        else:
            self.gradient, self._agreement = common.rows[self.rank], common.agreement
        for placed in layout.placed:
            _move(placed, weights=self.weights)
        collective.broadcast([self.weights, *model.buffers()], world=self.world)
        self._segments = _segments(self, roles=roles_of(model))
        self._last_sums = torch.empty(0)
        self._sums = norm.ChunkSums(self._own_chunks(), gradient=self.gradient)
        self._gradients = Gradients(layout, flat=self.gradient)  # its hooks run before the reducer's
        self._reducer: Reducer | None = (
            shared.Shared(common, rank=self.rank)
            if common is not None
            else reducer_of(
                layout,
                gradient=self.gradient,
                clear=self._gradients.clear,
                reduce=self._reduce,
                setting=self._setting,
            )
        )
        return model

    def _common(self) -> shared.Common | None:
        words = norm.count_chunk_sums(self.layout, world=self.world) // self.world
        return shared.common(
            self._layout.numel, words=words, rank=self.rank, world=self.world, otherwise=self._messages
        )

    @property
    def adds_in(self) -> str:
        """Where ranks' gradients are added; with more than two ranks the last bits depend on it."""
        return "shared memory" if isinstance(self._reducer, shared.Shared) else self._reduce

    @property
    def draws_per_micro_step(self) -> int:
        """How many micro-batches one micro-step stands for in llm.c's stream (`ModelRng`).

        One, as for llm.c's rank 0; under canonical reduction every rank's, as if one process ran them all.
        """
        return self.world if self._reduce == "canonical" else 1

    def segments(self) -> tuple[Segment, ...]:
        """Return this rank's part of every slot, in the order of the layout."""
        return self._segments

    def optimizer(self, factory: Callable[[Sequence[Segment]], Optimizer]) -> Optimizer:
        """Return the factory's optimizer of this rank's segments."""
        inner = factory(self._segments)
        if not self._setting.shard:
            return inner
        return Sharded(inner, layout=self._layout, weights=self.weights, rank=self.rank, world=self.world)

    def zero_grad(self) -> None:
        """Start a step's gradient; the buffer is valid again after the first micro-batch."""
        self._gradients.clear()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch; gradients travel while backward runs."""
        with nullcontext() if self._reducer is None else self._reducer.micro_batch(last=last):
            yield
            self._gradients.settle()

    def finish_gradient_sync(self) -> None:
        """Return once the gradient is the mean over micro-batches and ranks (its own part, if sharded)."""
        if self._reducer is not None:
            self._reducer.finish()

    def grad_norm(self) -> Tensor:
        """Return the global L2 norm [] fp32, the same on every rank and from run to run."""
        self._last_sums = self._all_sums()
        return norm.norm_of(self._last_sums)

    @property
    def sums(self) -> Tensor:
        """The chunk sums that the last `grad_norm` added."""
        return self._last_sums

    def slot_norms(self, sums: Tensor | None = None) -> dict[str, float]:
        """Return the gradient norm of each tensor by name; waits for the device.

        Without `sums` they are made of what the gradient holds now, which all ranks must do together.
        """
        return norm.slot_norms(self._all_sums() if sums is None else sums, self.layout, world=self.world)

    def first_non_finite(self) -> str | None:
        """Return the first tensor whose gradient is not finite; all ranks call it; waits for the device."""
        return norm.first_non_finite(self._all_sums(), self.layout, world=self.world)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a 0-d value over the ranks, added in rank order in float64 on each."""
        return collective.mean(value, agreement=self._agreement, world=self.world, device=self.device)

    def any(self, flag: bool) -> bool:
        """Whether any rank raised `flag`; agreed by all."""
        return self._agreement.any_flag(flag)

    def gather(self, value: Any) -> list[Any]:
        """Return a small host value of every rank, in rank order."""
        return collective.gather_objects(value, world=self.world, group=self._messages.group)

    def full_weights(self) -> Tensor:
        """Return the live weights [numel]."""
        return self.weights

    def load_weights(self, flat: Tensor) -> None:
        self.weights.copy_(flat)

    def barrier(self) -> None:
        self._messages.barrier()

    def close(self) -> None:
        """Take the hooks off the model; the process group is its maker's to destroy."""
        self._gradients.close()
        if self._reducer is not None:
            self._reducer.close()

    def _own_chunks(self) -> list[norm.Chunk]:
        share = norm.chunks_per_layer(self.world) // self.world
        chunks = norm.chunks_of(self.layout, world=self.world)
        return [chunk for chunk in chunks if chunk.part // share == self.rank]

    def _all_sums(self) -> Tensor:
        """Return the chunk sums of all ranks in the order of `norm.chunks_of`."""
        rows = self._agreement.all_gather(self._sums())
        share = norm.chunks_per_layer(self.world) // self.world
        return rows.view(self.world, -1, share).transpose(0, 1).reshape(-1)


def _segments(engine: Flat, *, roles: dict[str, Role]) -> tuple[Segment, ...]:
    shards = engine.world if engine._setting.shard else 1
    first = {placed.slot: placed.name for placed in engine._layout.placed if placed.layer == 0}
    segments, offset = [], 0
    for index, slot in enumerate(engine.layout):
        n = slot.layer_numel // shards
        start = engine.rank * n if shards > 1 else 0
        whole = slice(slot.offset, slot.offset + slot.numel)
        param, grad = (
            flat[whole].view(slot.layers, slot.layer_numel)[:, start : start + n]
            for flat in (engine.weights, engine.gradient)
        )
        segments.append(
            Segment(slot.name, roles[first[index]], slot.shape, param, grad, offset, start, index)
        )
        offset += slot.layers * n
    return tuple(segments)


def _move(placed: Placed, *, weights: Tensor) -> None:
    """Make one parameter a view of the flat weights."""
    parameter = placed.parameter
    at = slice(placed.offset, placed.offset + placed.numel)
    home = weights[at].view(parameter.shape)
    home.copy_(parameter.detach())
    parameter.data = home
