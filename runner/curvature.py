"""The second gradient that curvature-aware optimizers ask for, every so many steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner.api import Optimizer

ROWS = 1 << 24  # logits to draw from at a time


class Curvature:
    """Says when an estimate is due, draws its labels and passes it to those that asked for it."""

    def __init__(self, observers: tuple[Any, ...]) -> None:
        self._observers = observers
        self._every = min((int(o.curvature_every) for o in observers), default=0)

    def due(self, step: int) -> bool:
        """Whether the optimizer wants an estimate before the update of `step`."""
        return self._every > 0 and step % self._every == 0

    def draw_labels(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return a label [B, T] for each position, drawn from the model's own prediction."""
        with torch.no_grad():
            logits = model(tokens).flatten(0, 1)
            rows = max(1, ROWS // logits.shape[-1])
            drawn = [torch.multinomial(part.float().softmax(-1), 1) for part in logits.split(rows)]
        return torch.cat(drawn).view(tokens.shape)

    def observe(self, *, samples: int, apply: Tensor) -> None:
        """Pass the gradient that now stands in the engine to the optimizer, unless `apply` [] is false."""
        for observer in self._observers:
            observer.observe_curvature(samples=samples, apply=apply)


def curvature_of(optimizer: Optimizer) -> Curvature:
    """Return what `optimizer`, or those that it is made of, want to know of the curvature."""
    return Curvature(tuple(part for part in _inside(optimizer) if hasattr(part, "observe_curvature")))


def _inside(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    if hasattr(optimizer, "inner"):
        yield from _inside(optimizer.inner)
    for part in getattr(optimizer, "parts", ()):
        yield from _inside(part.optimizer)
