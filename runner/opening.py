"""Build every part of a session, in a fixed order, and put it where the last checkpoint left it."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from runner import __version__, manifest
from runner.api import Engine, Note, Optimizer, RunInfo, Segment, View
from runner.config import MULTIPLE, build, trusted
from runner.emit import Emitter
from runner.forensics import Forensics
from runner.meter import Meter
from runner.pace import Pace
from runner.precision import Precision
from runner.readback import Readback, Timing
from runner.rng import Generators, ModelRng, seed_everything
from runner.session import Identity, Progress, Session
from runner.stop import Stop
from runner.train import Plan
from runner.watchdog import Watchdog

Config = dict[str, Any]


class Process(NamedTuple):
    """What a session gets from the process that it runs in."""

    rank: int
    world: int
    device: torch.device
    stop: Stop
    watchdog: Watchdog


def open_session(config: Config, *, dir: Path, process: Process) -> Session:
    """Return a session that is ready to train: fresh, or restored from the newest intact checkpoint.

    Raises:
        ValueError: one line per reason why this run cannot start or go on in `dir`.
    """
    s = _build(config, dir=dir, process=process)
    restored = s.store.restore(s.snapshot(), overwrite=config["run"]["overwrite"])
    resumed = restored.snapshot is not None
    changes = _settle_manifest(config, s, step=restored.snapshot.step if restored.snapshot else None)
    if restored.snapshot is not None:
        changes = [*changes, *s.restore(restored.snapshot)]
    s.emitter.open(
        RunInfo(
            name=str(config["run"]["name"] or dir.name),
            dir=dir,
            config=config,
            manifest=manifest.read(dir) or {},
            start_step=s.progress.step,
            resumed=resumed,
            steps=s.plan.steps,
            group=config["run"]["group"],
            tags=tuple(config["run"]["tags"]),
        )
    )
    at = s.progress.step
    cautions: Sequence[str] = getattr(s.outlier, "warnings", tuple)()
    s.emit([*restored.events, *(Note(at, t) for t in changes), *(Note(at, t, "warning") for t in cautions)])
    s.meter.start()
    return s


def _build(config: Config, *, dir: Path, process: Process) -> Session:
    make = functools.partial(build, trust=trusted(config))
    run = config["run"]
    rank, world, device, stop, watchdog = process
    plan: Plan = make(config["train"], world=world)
    seed_everything(run["seed"], rank=rank)
    data = make(config["data"])
    precision: Precision = make(config["precision"])
    numbers = precision.apply(device)
    network = make(config["model"], vocab_size=data.vocab_size, max_seq_len=plan.seq_len)
    precision.convert(network, device=device)
    engine: Engine = make(config["parallel"], rank=rank, world=world, device=device)
    identity = _identity(network, numbers, engine, run)  # before an engine changes the model's type
    model = engine.place(network.to(device=device, dtype=precision.param_dtype(device)))
    rng = ModelRng(device=device, draws=engine.draws_per_micro_step)
    where = {"micro_batch": plan.micro_batch, "seq_len": plan.seq_len, "rank": rank, "world": world}
    meter: Meter = make(
        config["meter"],
        flops_per_token=network.flops_per_token(plan.seq_len),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        dtype="fp32" if numbers["mode"] == "fp32" else "bf16",
        world=world,
    )
    outlier, inject = make(config["outlier"]), make(config["debug"], this_rank=rank)
    autocast = precision.autocast(device)
    several = {group: {n: make(e) for n, e in (config[group] or {}).items() if e} for group in MULTIPLE}
    return Session(
        dir=dir,
        plan=plan,
        progress=Progress(max_consecutive_skips=outlier.max_consecutive_skips),
        data=data,
        stream=data.train(**where, device=device, seed=run["seed"]),
        model=model,
        engine=engine,
        optimizer=engine.optimizer(functools.partial(_optimizer, make, config["optimizer"], rng)),
        scheduler=make(config["scheduler"]),
        clip=make(config["clip"]),
        outlier=outlier,
        autocast=autocast,
        rng=rng,
        generators=Generators(device=device),
        meter=meter,
        readback=Readback(functools.partial(_timing, meter, plan), device=device),
        evaluators=several["evaluate"],
        view=View(model, engine, data, autocast, plan.micro_batch, plan.seq_len, run["seed"], plan.steps),
        emitter=Emitter(inject.loggers(several["logger"]) if rank == 0 else {}),
        store=make(
            config["checkpoint"],
            dir=dir,
            rank=rank,
            any_rank=engine.any,
            barrier=engine.barrier,
            fault=inject.write,
        ),
        stop=stop,
        watchdog=watchdog,
        inject=inject,
        forensics=Forensics(dir, engine=engine, rank_tokens=plan.micro_batch * plan.seq_len),
        pace=Pace(every=run["ranks_every"], engine=engine),
        identity=identity,
    )


def _settle_manifest(config: Config, s: Session, *, step: int | None) -> Sequence[str]:
    """Write the manifest; on a resume at `step`, compare with the old one and return what changed.

    Raises:
        ValueError: something changed that the run's bits depend on.
    """
    tokenizer = s.data.tokenizer
    new = manifest.collect(
        config,
        data=s.data.fingerprint(),
        tokenizer=tokenizer.name if tokenizer else None,
        parameters=sum(slot.numel for slot in s.engine.layout),
        world=s.engine.world,
        start_step=step or 0,
    )
    old = manifest.read(s.dir) if step is not None else None
    changes = manifest.compare(old, new) if old else manifest.Changes((), ())
    if changes.errors:
        raise ValueError("\n".join(changes.errors))
    if s.engine.rank == 0:
        manifest.write(s.dir, manifest.resumed(old, new) if old else new)
    return changes.notes


def _optimizer(
    make: Callable[..., Any], node: Config, rng: ModelRng, segments: Sequence[Segment]
) -> Optimizer:
    optimizer: Optimizer = make(node, segments=segments, rng=rng)
    return optimizer


def _timing(meter: Meter, plan: Plan, step: int) -> Timing:
    speed = meter.tick(plan.tokens)
    return Timing(tokens=(step + 1) * plan.tokens, **speed._asdict())


def choose_device(name: str, *, local_rank: int) -> torch.device:
    """Return the device of a rank, the `local_rank`-th of its machine.

    Raises:
        ValueError: there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"run.device: no device is called {name!r}; use auto, cpu, cuda or cuda:N"
        ) from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"run.device: {name} asked for, but this machine or this torch has no CUDA; use cpu"
            )
        device = torch.device(
            "cuda", local_rank % torch.cuda.device_count() if device.index is None else device.index
        )
        torch.cuda.set_device(device)
    return device


def _identity(network: nn.Module, numbers: dict[str, str], engine: Engine, run: Config) -> Identity:
    kind = {"GPT2": "gpt2"}.get(type(network).__name__, type(network).__name__.lower())
    header: Any = getattr(network, "header", dict)
    gpu = engine.device.type == "cuda"
    env = {
        "runner": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(engine.device) if gpu else _cpu(),
        "threads": torch.get_num_threads(),
        "precision": numbers["mode"],
        "fp32_matmul": numbers["fp32_matmul"],
        "deterministic": run["deterministic"],
        "world": engine.world,
    }
    return Identity({"kind": kind, **header()}, env)


def _cpu() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
