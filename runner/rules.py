"""Rules between config values, checked before torch is imported or a file is created."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.config import build, trusted

Config = dict[str, Any]


def cross_check(config: Config) -> list[str]:
    """Return the problems that no single value shows; `config` passed `runner.config.check`."""
    return [
        *_batch(config["train"], processes(config)),
        *_model(config["model"]),
        *_schedule(config),
        *_data(config),
    ]


def processes(config: Config) -> int:
    """Return how many ranks the run has: torchrun's, or `parallel.processes`."""
    import os

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return int(config["parallel"].get("processes") or 1)


def _batch(train: Config, world: int) -> Iterator[str]:
    tokens, unit = train.get("tokens_per_step"), train["micro_batch"] * train["seq_len"] * world
    if tokens is not None and tokens % unit:
        below, above = tokens // unit * unit, (tokens // unit + 1) * unit
        yield (
            f"train.tokens_per_step: {tokens} is not a multiple of micro_batch x seq_len x processes = "
            f"{train['micro_batch']} x {train['seq_len']} x {world} = {unit}; use {below or above} or {above}"
        )


def _model(model: Config) -> Iterator[str]:
    width, heads, kv = model.get("width"), model.get("heads"), model.get("kv_heads")
    if width and heads and width % heads:
        yield f"model.heads: {heads} does not divide model.width {width}; choose a divisor of {width}"
    if heads and kv and heads % kv:
        yield f"model.kv_heads: {kv} does not divide model.heads {heads}; choose a divisor of {heads}"


def _schedule(config: Config) -> Iterator[str]:
    from runner.scheduler import curve

    try:
        scheduler = build(config["scheduler"], trust=trusted(config))
        curve(scheduler, config["train"]["steps"])
    except (ValueError, ArithmeticError) as error:
        yield f"scheduler: {error}"


def _data(config: Config) -> Iterator[str]:
    train = config["train"]
    try:
        data = build(config["data"], trust=trusted(config))
    except (ValueError, OSError) as error:
        yield f"data: {error}"
        return
    seq_len, limit = train["seq_len"], config["model"].get("max_seq_len")
    if limit is not None and seq_len > limit:
        yield f"train.seq_len: {seq_len} is longer than model.max_seq_len {limit}"
    yield from data.check(
        micro_batch=train["micro_batch"],
        seq_len=seq_len,
        world=processes(config),
        vocab_size=config["model"].get("vocab_size"),
    )
