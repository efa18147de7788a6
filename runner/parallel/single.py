"""One process on one device."""

from __future__ import annotations

import torch

from runner.parallel.flat import Flat


class Single(Flat):
    """The flat engine alone; `device` is supplied."""

    def __init__(self, *, rank: int = 0, world: int = 1, device: torch.device | None = None) -> None:
        if world != 1:
            raise ValueError(
                f"parallel: single runs 1 process, {world} were started; use parallel=ddp or zero1"
            )
        super().__init__(rank=rank, world=world, device=device)
