"""`train.micro_batch=auto`: the largest number of sequences at a time that fits, found once and recorded.

It only decides how a step's tokens are cut into passes, so `train.tokens_per_step` must be given: what is
trained never depends on the machine. A resumed run takes the number from its manifest, because the
order of additions, and so the last bits, depend on it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import manifest
from runner.checkpoint.folder import done_steps
from runner.config import build, trusted
from runner.precision import Precision

Config = dict[str, Any]

CPU_TOKENS = 8192  # per pass: beyond it a CPU gains nothing, and memory is the other programs' too
STATE_BYTES = 16  # per parameter beside the weights: gradient, two moments, master copy, all fp32
MARGIN = 0.9  # of a GPU's memory that a pass may take

log = logging.getLogger(__name__)


def settle_micro_batch(config: Config, *, dir: Path, device: torch.device, world: int) -> Config:
    """Return `config` with a number in `train.micro_batch`.

    Raises:
        ValueError: not even one sequence fits.
    """
    train = config["train"]
    if train["micro_batch"] != "auto":
        return config
    rows = train["tokens_per_step"] // (train["seq_len"] * world)  # of a process in a step
    found = _recorded(dir) if _goes_on(config, dir=dir) else None
    if found is None:
        found = _find(config, rows=rows, device=device)
    elif rows % found:
        raise ValueError(
            f"train.micro_batch=auto: the run was begun with {found} sequences in a pass, which do not "
            f"divide the {rows} that each of {world} processes now has in a step; restore "
            "parallel.processes and train.tokens_per_step, or choose another run.name"
        )
    log.info("train.micro_batch=auto: %d sequences", found)
    return {**config, "train": {**train, "micro_batch": found}}


def _goes_on(config: Config, *, dir: Path) -> bool:
    """Whether the run continues from a checkpoint; what a start before that left behind binds nothing."""
    afresh = config["run"]["overwrite"] or config["checkpoint"]["resume"] == "never"
    return not afresh and bool(done_steps(dir))


def _recorded(dir: Path) -> int | None:
    was = (manifest.read(dir) or {}).get("config", {}).get("train", {}).get("micro_batch")
    return was if isinstance(was, int) else None


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def largest_fitting(candidates: list[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest candidate that fits, trying upwards and stopping at the first that does not."""
    best = None
    for candidate in candidates:
        if not fits(candidate):
            break
        best = candidate
    return best


def _find(config: Config, *, rows: int, device: torch.device) -> int:
    seq_len = config["train"]["seq_len"]
    if device.type == "cuda":
        fits: Callable[[int], bool] = functools.partial(
            _passes, _model(config, device=device), config, device
        )
    else:
        fits = lambda some: some == 1 or some * seq_len <= CPU_TOKENS  # noqa: E731
    best = largest_fitting(divisors(rows), fits)
    if best is None:
        raise ValueError(
            "train.micro_batch=auto: not even one sequence fits into the memory of the device; "
            "shorten train.seq_len, or set train.checkpoint_blocks=true"
        )
    return _least_over_ranks(best, device=device)


def _least_over_ranks(rows: int, *, device: torch.device) -> int:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return rows
    least = torch.tensor(rows, device=device)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    return int(least)


def _model(config: Config, *, device: torch.device) -> nn.Module:
    from runner.blocks import settle_blocks

    make = functools.partial(build, trust=trusted(config))
    precision: Precision = make(config["precision"])
    data = make(config["data"])
    model: nn.Module = make(
        config["model"], vocab_size=data.vocab_size, max_seq_len=config["train"]["seq_len"]
    )
    precision.convert(model, device=device)
    settle_blocks(model, compile=False, checkpoint=config["train"]["checkpoint_blocks"])
    return model.to(device=device, dtype=precision.param_dtype(device))


def _passes(model: nn.Module, config: Config, device: torch.device, rows: int) -> bool:
    """Whether a forward and backward pass of `rows` sequences leaves room for the rest of the run."""
    precision: Precision = build(config["precision"], trust=trusted(config))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        reserve = torch.empty(
            sum(p.numel() for p in model.parameters()) * STATE_BYTES, dtype=torch.uint8, device=device
        )
        tokens = torch.zeros(rows, config["train"]["seq_len"], dtype=torch.int64, device=device)
        with precision.autocast(device)():
            loss = model(tokens, tokens)
        loss.backward()
        del reserve
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_reserved(device) <= MARGIN * total
