"""One process on one device."""

from __future__ import annotations

from typing import Literal

import torch

from runner.parallel.flat import Flat


class Single(Flat):
    """The flat engine alone; `rank`, `world` and `device` are supplied.

    `reduce=canonical` adds micro-batches in the tree that makes the bits those of many ranks.
    """

    def __init__(
        self,
        *,
        reduce: Literal["native", "canonical"] = "native",
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        if world != 1:
            raise ValueError(
                f"parallel: single runs 1 process, but {world} were started; use parallel=ddp or zero1"
            )
        super().__init__(rank=rank, world=world, device=device, reduce=reduce)
