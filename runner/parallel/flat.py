"""One engine for one to many ranks: weights and gradients are views of two flat buffers.

`single`, `ddp` and `zero1` are its settings. What travels between ranks, and in which order it is
added, is the reducer's business (`runner.parallel.reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runner import arena, norm
from runner.api import Optimizer, Segment, Slot
from runner.optimizer.groups import roles_of
from runner.parallel.layout import Layout, Placed, layout_of


class Flat:
    """Where parameters live. `rank`, `world` and `device` are supplied."""

    def __init__(self, *, rank: int = 0, world: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.world = rank, world
        self.device = device if device is not None else torch.device("cpu")
        self.layout: tuple[Slot, ...] = ()
        self.weights = torch.empty(0)  # flat, every slot in order; what a checkpoint writes and reads
        self.gradient = torch.empty(0)  # flat, fp32
        self._segments: tuple[Segment, ...] = ()

    def place(self, model: nn.Module) -> nn.Module:
        """Move the parameters into the flat buffers; return what the loop calls.

        Raises ValueError where the parameters cannot share a buffer.
        """
        model.to(self.device)
        layout = layout_of(model)
        self.layout = layout.slots
        self.weights = arena.zeros(layout.numel, dtype=layout.dtype, device=self.device)
        self.gradient = arena.zeros(layout.numel, device=self.device)
        for placed in layout.placed:
            _move(placed, weights=self.weights, gradient=self.gradient)
        self._segments = self._cut(layout, roles=roles_of(model))
        self._sums = norm.ChunkSums(norm.chunks_of(layout.slots, world=self.world), gradient=self.gradient)
        return model

    def segments(self) -> tuple[Segment, ...]:
        """Return this rank's part of every slot, in the order of the layout."""
        return self._segments

    def optimizer(self, factory: Callable[[Sequence[Segment]], Optimizer]) -> Optimizer:
        return factory(self._segments)

    def zero_grad(self) -> None:
        self.gradient.zero_()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch; gradients travel only on the last."""
        yield

    def finish_gradient_sync(self) -> None:
        """Return once the flat gradient is the mean over micro-batches and ranks."""

    def grad_norm(self) -> Tensor:
        """Return the global L2 norm [] fp32, the same on every rank and from run to run."""
        return norm.norm_of(self._sums())

    def slot_norms(self) -> dict[str, float]:
        """Return the gradient norm of each tensor by name, for diagnostics; waits for the device."""
        return norm.slot_norms(self._sums(), self.layout, world=self.world)

    def first_non_finite(self) -> str | None:
        """Return the first tensor whose gradient is not finite, for diagnostics; waits for the device."""
        return norm.first_non_finite(self._sums(), self.layout, world=self.world)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a 0-d value over the ranks, the same bits on each."""
        return value

    def any(self, flag: bool) -> bool:
        """Whether any rank raised `flag`; agreed by all."""
        return flag

    def barrier(self) -> None: ...

    def close(self) -> None: ...

    def _cut(self, layout: Layout, *, roles: dict[str, str]) -> tuple[Segment, ...]:
        segments, offset = [], 0
        first = {placed.slot: placed.name for placed in reversed(layout.placed) if placed.layer == 0}
        for index, slot in enumerate(layout.slots):
            shape = (slot.layers, slot.layer_numel)
            at = slice(slot.offset, slot.offset + slot.numel)
            param, grad = self.weights[at].view(shape), self.gradient[at].view(shape)
            segments.append(
                Segment(slot.name, roles[first[index]], slot.shape, param, grad, offset, index=index)  # type: ignore[arg-type]
            )
            offset += param.numel()
        return tuple(segments)


def _move(placed: Placed, *, weights: Tensor, gradient: Tensor) -> None:
    parameter = placed.parameter
    at = slice(placed.offset, placed.offset + placed.numel)
    home = weights[at].view(parameter.shape)
    home.copy_(parameter.detach())
    parameter.data = home
    main = gradient[at].view(parameter.shape)
    if parameter.dtype == main.dtype:
        parameter.grad = main
        return

    def add_to_main(parameter: Tensor) -> None:
        assert parameter.grad is not None
        main.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add_to_main)
