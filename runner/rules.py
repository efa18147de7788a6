"""Rules between config values, checked before torch is imported or a file is created."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from runner.config import build, trusted
from runner.ranks import placed

Config = dict[str, Any]


def cross_check(config: Config, *, wrong: Collection[str] = ()) -> list[str]:
    """Return the problems that no single value shows; rules over a group in `wrong` are left out."""
    rules: dict[tuple[str, ...], Callable[[Config], Iterable[str]]] = {
        ("run",): _root,
        ("parallel",): _ranks,
        ("train", "parallel"): _batch,
        ("model",): _model,
        ("scheduler", "train", "parallel"): _schedule,
        ("data", "train", "model", "parallel"): _data,
        ("run", "train", "model", "precision", "parallel", "debug"): _graphs,
        ("parallel", "debug"): _drill,
    }
    return [line for groups, rule in rules.items() if not set(groups) & set(wrong) for line in rule(config)]


def processes(config: Config) -> int:
    """Return how many ranks the run has: those that torchrun or srun started, or `parallel.processes`."""
    place = placed()
    return place.world if place is not None else int(config["parallel"].get("processes") or 1)


def _root(config: Config) -> Iterator[str]:
    if not config["run"]["root"]:  # an unset shell variable would put runs where the person happens to be
        yield "run.root: '' is not a folder; write . for the one you are in"


def _ranks(config: Config) -> Iterator[str]:
    place, parallel = placed(), config["parallel"]
    if place is None:
        return
    if str(parallel["_target_"]).endswith(".Single"):
        yield f"parallel: single runs 1 process, but {place.world} were started; use ddp, zero1 or fsdp"
    elif parallel.get("processes") not in (None, place.world):
        yield (
            f"parallel.processes: {parallel['processes']}, but {place.world} were started; "
            "leave it null to take what torchrun or srun starts"
        )


def _batch(config: Config) -> Iterator[str]:
    train, world = config["train"], processes(config)
    tokens, unit = train.get("tokens_per_step"), _rows(train) * train["seq_len"] * world
    if tokens is None and train["micro_batch"] == "auto":
        yield (
            "train.micro_batch: auto needs train.tokens_per_step, so that what is trained "
            "does not depend on the machine's memory"
        )
    if tokens is not None and tokens % unit:
        below, above = tokens // unit * unit, (tokens // unit + 1) * unit
        nearest = " or ".join(str(n) for n in sorted({below or above, above}))
        yield (
            f"train.tokens_per_step: {tokens} is not a multiple of micro_batch x seq_len x processes = "
            f"{_rows(train)} x {train['seq_len']} x {world} = {unit}; use {nearest}"
        )


def _rows(train: Config) -> int:
    """Return the sequences per pass; 1 while `auto` is not settled, which divides whatever it will be."""
    return 1 if train["micro_batch"] == "auto" else int(train["micro_batch"])


def _model(config: Config) -> Iterator[str]:
    model = config["model"]
    width, heads, kv = model.get("width"), model.get("heads"), model.get("kv_heads")
    if width and heads and width % heads:
        yield f"model.heads: {heads} does not divide model.width {width}; choose a divisor of {width}"
    if heads and kv and heads % kv:
        yield f"model.kv_heads: {kv} does not divide model.heads {heads}; choose a divisor of {heads}"


def tokens_per_step(train: Config, *, world: int) -> int:
    """Return the tokens of one update over all processes."""
    given = train.get("tokens_per_step")
    return int(given if given else _rows(train) * train["seq_len"] * world)


def _schedule(config: Config) -> Iterator[str]:
    from runner.scheduler import probe

    try:
        tokens = tokens_per_step(config["train"], world=processes(config))
        scheduler = build(config["scheduler"], trust=trusted(config), tokens_per_step=tokens)
        probe(scheduler, config["train"]["steps"])
    except (ValueError, ArithmeticError) as error:
        text = str(error)
        yield text if text.startswith("scheduler") else f"scheduler: {text}"


def _data(config: Config) -> Iterator[str]:
    train = config["train"]
    try:
        data = build(config["data"], trust=trusted(config))
    except (ValueError, OSError) as error:
        text = str(error)
        yield text if text.startswith("data") else f"data: {text}"
        return
    seq_len, limit = train["seq_len"], config["model"].get("max_seq_len")
    if limit is not None and seq_len > limit:
        yield f"train.seq_len: {seq_len} is longer than model.max_seq_len {limit}"
    yield from data.check(
        micro_batch=_rows(train),
        seq_len=seq_len,
        world=processes(config),
        vocab_size=config["model"].get("vocab_size"),
    )


def _drill(config: Config) -> Iterator[str]:
    rank, world = config["debug"].get("rank", 0), processes(config)
    if rank >= world:
        yield f"debug.rank: there is no rank {rank}, ranks count from 0 and the run has {world}"


def _graphs(config: Config) -> Iterator[str]:
    """What a CUDA graph, which repeats one process's device work blindly, cannot hold."""
    run, train, parallel, debug = (config[group] for group in ("run", "train", "parallel", "debug"))
    if not run["cuda_graphs"]:
        return
    obstacles = {
        "run.device=cpu": run["device"] == "cpu",
        f"{processes(config)} processes, whose gradients travel during the pass": processes(config) > 1,
        "parallel=fsdp": str(parallel["_target_"]).endswith(".Fsdp"),
        "parallel.reduce=canonical": parallel.get("reduce") == "canonical",
        "train.checkpoint_blocks=true": train["checkpoint_blocks"],
        f"model.dropout={config['model'].get('dropout')}": config["model"].get("dropout"),
        "precision.mode=fp8": config["precision"].get("mode") == "fp8",
        "debug.nan_loss_at": debug.get("nan_loss_at"),
        "debug.spike_loss_at": debug.get("spike_loss_at"),
    }
    for what, present in obstacles.items():
        if present:
            yield f"run.cuda_graphs: a graph cannot hold {what}; change it, or set run.cuda_graphs=false"
