"""Data parallel: every rank holds all weights and all optimizer state."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt

from runner.parallel.flat import Flat


class Ddp(Flat):
    """The flat engine on several ranks; `rank`, `world` and `device` are supplied."""

    def __init__(
        self,
        *,
        processes: Annotated[int, Ge(1)] | None = None,
        reduce: Literal["native", "canonical"] = "native",
        bucket_mb: Annotated[float, Gt(0)] = 25.0,
        shared_memory: Literal["auto", "off"] = "auto",
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        check_started(processes, world=world)
        super().__init__(
            rank=rank,
            world=world,
            device=device,
            reduce=reduce,
            bucket_mb=bucket_mb,
            share_memory=shared_memory == "auto",
        )


def check_started(processes: int | None, *, world: int) -> None:
    """Raise ValueError unless as many processes run as the config names; None takes what was started."""
    if processes is not None and processes != world:
        raise ValueError(
            f"parallel.processes: {processes}, but {world} were started; "
            f"start {processes}, or leave it null to take what the launcher starts"
        )
