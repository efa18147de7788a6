"""fp32 master weights behind bfloat16 ones, and how to make the bfloat16 ones again from them.

The noise of element i of a layer depends on the seed of the tensor's draw, on i and on the layer,
never on the shard, so that any number of ranks rounds alike (llm.c indexes inside a rank's shard;
with one rank both are the same).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner import arena
from runner.api import Segment
from runner.rng import draws, stochastic_round, weight_noise


def initial_master(segments: Sequence[Segment]) -> Tensor:
    """Return flat fp32 copies of the weights, in the order of the segments."""
    first = segments[0].param
    master = arena.zeros(sum(segment.param.numel() for segment in segments), device=first.device)
    for segment in segments:
        view_of(master, segment).copy_(segment.param)
    return master


def view_of(state: Tensor, segment: Segment) -> Tensor:
    """Return the part [layers, n] of a flat state buffer that belongs to `segment`."""
    return state[segment.offset : segment.offset + segment.param.numel()].view(segment.param.shape)


def rederive(segments: Sequence[Segment], *, master: Tensor, last_update: int) -> list[Tensor]:
    """Return the bfloat16 weights [layers, n] of each segment, as the last update rounded them.

    `last_update` is the state of llm.c's model stream before that update's draws, one for each segment.
    """
    _, seeds = draws(last_update, len(segments))
    rounded = []
    for segment, seed in zip(segments, seeds, strict=True):
        exact = view_of(master, segment)
        rows = [
            stochastic_round(
                row, weight_noise(row.numel(), start=segment.start, layer=layer, seed=seed, device=row.device)
            )
            for layer, row in enumerate(exact)
        ]
        rounded.append(torch.stack(rows))
    return rounded


def differing(segments: Sequence[Segment], *, master: Tensor, last_update: int) -> list[str]:
    """Return the names of tensors whose bfloat16 weights are not the master's, rounded; [] is intact.

    Holds after an applied update, that is where `last_update` is no longer `runner.rng.START`: initial
    weights are no rounded master.
    """
    rounded = rederive(segments, master=master, last_update=last_update)
    return [
        segment.name
        for segment, weights in zip(segments, rounded, strict=True)
        if not torch.equal(weights.view(torch.int16), segment.param.contiguous().view(torch.int16))
    ]
