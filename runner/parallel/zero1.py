"""ZeRO stage 1: every rank holds all weights, and the optimizer state of its 1/P of each tensor."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt

from runner.parallel.ddp import check_started
from runner.parallel.flat import Flat


class Zero1(Flat):
    """The flat engine with sharded optimizer state (Rajbhandari et al. 2020, P_os), cut as llm.c cuts it.

    `rank`, `world` and `device` are supplied. Rank r owns the r-th part of every (tensor, layer).
    """

    def __init__(
        self,
        *,
        processes: Annotated[int, Ge(1)] | None = None,
        reduce: Literal["native", "canonical"] = "native",
        bucket_mb: Annotated[float, Gt(0)] = 25.0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        check_started(processes, world=world)
        super().__init__(
            rank=rank, world=world, device=device, reduce=reduce, shard=True, bucket_mb=bucket_mb
        )
