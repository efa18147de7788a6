"""Build every part of a session, in a fixed order; `runner.opening` then decides where it starts."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from runner import __version__
from runner.api import Engine, Optimizer, Scheduler, Segment, View
from runner.blocks import settle_blocks
from runner.checkpoint.folder import done_steps
from runner.checkpoint.store import Store
from runner.config import MULTIPLE, build, trusted
from runner.cuda_graphs import graphs_of
from runner.curvature import curvature_of
from runner.emit import Emitter
from runner.forensics import Forensics
from runner.load import initialise
from runner.meter import Meter
from runner.model import compiled
from runner.optimizer.options import NAMES, Options, assemble
from runner.pace import Pace
from runner.precision import Precision
from runner.progress import Progress
from runner.rates import Rates
from runner.readback import Readback, Timing
from runner.rng import Generators, ModelRng, seed_everything
from runner.scheduler import scaled
from runner.session import Identity, Session
from runner.signature import signature_of
from runner.stop import Stop
from runner.train import Plan
from runner.watchdog import Watchdog

Config = dict[str, Any]
Make = Callable[..., Any]


class Process(NamedTuple):
    """What a session gets from the process that it runs in."""

    rank: int
    world: int
    device: torch.device
    stop: Stop
    watchdog: Watchdog


def assemble_session(config: Config, *, dir: Path, process: Process) -> Session:
    """Return a session whose parts are fresh.

    Raises:
        ValueError: one line of whichever part cannot be built.
    """
    make: Make = functools.partial(build, trust=trusted(config))
    run = config["run"]
    rank, world, device, stop, watchdog = process
    plan: Plan = make(config["train"], world=world)
    seed_everything(run["seed"], rank=rank)
    data = make(config["data"])
    precision: Precision = make(config["precision"])
    numbers = precision.apply(device)
    begins = run["overwrite"] or not done_steps(dir)
    network = _network(make, config, precision, data.vocab_size, device=device, begins=begins)
    engine: Engine = make(config["parallel"], rank=rank, world=world, device=device)
    identity = _identity(network, numbers, engine, run)  # before an engine changes the model's type
    model = engine.place(network.to(device=device, dtype=precision.param_dtype(device)))
    if world > 1:
        identity.env["adds_in"] = getattr(engine, "adds_in", "native")
    rng = ModelRng(device=device, draws=engine.draws_per_micro_step)
    optimizer = engine.optimizer(functools.partial(_optimizer, make, config["optimizer"], rng))
    where = {"micro_batch": plan.rows, "seq_len": plan.seq_len, "rank": rank, "world": world}
    meter = _meter(make, config, network, engine, numbers)
    outlier, inject = make(config["outlier"]), make(config["debug"], this_rank=rank)
    autocast, generators = precision.autocast(device), Generators(device=device)
    several = {group: {n: make(e) for n, e in (config[group] or {}).items() if e} for group in MULTIPLE}
    return Session(
        dir=dir,
        plan=plan,
        progress=Progress(max_consecutive_skips=outlier.max_consecutive_skips),
        data=data,
        stream=data.train(**where, device=device, seed=run["seed"]),
        model=model,
        engine=engine,
        graphs=graphs_of(
            device, wanted=run["cuda_graphs"], accumulate=plan.accumulate, untouched=generators.untouched
        ),
        optimizer=optimizer,
        curvature=curvature_of(optimizer),
        scheduler=Rates(_scheduler(make, config, tokens=plan.tokens), steps=plan.steps),
        clip=make(config["clip"]),
        outlier=outlier,
        autocast=autocast,
        rng=rng,
        generators=generators,
        meter=meter,
        readback=Readback(functools.partial(_timing, meter, plan), device=device),
        evaluators=several["evaluate"],
        view=View(model, engine, data, autocast, plan.rows, plan.seq_len, run["seed"], plan.steps),
        emitter=Emitter(inject.loggers(several["logger"]) if rank == 0 else {}, rank=rank),
        store=_store(make, config, engine, dir=dir, fault=inject.write),
        stop=stop,
        watchdog=watchdog,
        inject=inject,
        forensics=Forensics(dir, engine=engine, rank_tokens=plan.rows * plan.seq_len),
        pace=Pace(every=run["ranks_every"], engine=engine),
        identity=identity,
    )


def _network(
    make: Make, config: Config, precision: Precision, vocab_size: int, *, device: torch.device, begins: bool
) -> nn.Module:
    """Build the model with its first weights; `begins` is false for a run that goes on."""
    train = config["train"]
    network: nn.Module = make(config["model"], vocab_size=vocab_size, max_seq_len=train["seq_len"])
    source = getattr(network, "init_from", None)
    if source and begins:
        # A run that goes on takes its weights from its checkpoint: what it began with may be gone.
        initialise(network, source)
    precision.convert(network, device=device)
    settle_blocks(network, compile=config["run"]["compile"], checkpoint=train["checkpoint_blocks"])
    return network


def _meter(make: Make, config: Config, network: nn.Module, engine: Engine, numbers: dict[str, str]) -> Meter:
    device, flops = engine.device, getattr(network, "flops_per_token", None)
    meter: Meter = make(
        config["meter"],
        flops_per_token=flops(config["train"]["seq_len"]) if flops else 0,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        dtype="fp32" if numbers["mode"] == "fp32" else "bf16",
        world=engine.world,
    )
    return meter


def _store(make: Make, config: Config, engine: Engine, *, dir: Path, fault: Callable[[], None]) -> Store:
    store: Store = make(
        config["checkpoint"],
        dir=dir,
        rank=engine.rank,
        any_rank=engine.any,
        barrier=engine.barrier,
        gather=engine.gather,
        fault=fault,
    )
    return store


def _optimizer(make: Make, node: Config, rng: ModelRng, segments: Sequence[Segment]) -> Optimizer:
    takes = frozenset(signature_of(str(node["_target_"])).parameters)
    return assemble(segments, node=node, make=make, takes=takes, rng=rng)


def _scheduler(make: Make, config: Config, *, tokens: int) -> Scheduler:
    node = config["optimizer"]
    factor = Options(**{name: node[name] for name in NAMES & node.keys()}).lr_factor(tokens)
    schedule: Scheduler = make(config["scheduler"], tokens_per_step=tokens)
    return schedule if factor == 1 else functools.partial(scaled, schedule=schedule, factor=factor)


def _timing(meter: Meter, plan: Plan) -> Timing:
    speed = meter.tick(plan.tokens)
    return Timing(meter.tokens, *speed)


def choose_device(name: str, *, local_rank: int) -> torch.device:
    """Return the device of a rank, the `local_rank`-th of its machine.

    Raises:
        ValueError: there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name, re.ASCII):
        raise ValueError(f"run.device: no device is called {name!r}; use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"run.device: {name} asked for, but this machine or this torch has no CUDA; use cpu"
            )
        if device.index is None:
            device = torch.device("cuda", _gpu_of(local_rank, count=torch.cuda.device_count()))
        torch.cuda.set_device(device)
    return device


def _gpu_of(local_rank: int, *, count: int) -> int:
    """Return a rank's GPU: its own number, or the only one that its launcher lets it see."""
    if 1 < count <= local_rank:
        raise ValueError(
            f"parallel.processes: rank {local_rank} of this machine has no GPU, {count} are visible; "
            f"start at most {count} ranks here, or set run.device=cpu"
        )
    return local_rank % count


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
        "kernels": "torch" if gpu else compiled.identity(),
        "deterministic": run["deterministic"],
        "compile": run["compile"],
        "world": engine.world,
        **({"cuda_graphs": True} if run["cuda_graphs"] else {}),
    }
    return Identity({"kind": kind, **header()}, env)


def _cpu() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
